"""A connection to the run's broker of RabbitMQ, and what Spark's Python process has of a source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import weft
from weft import RabbitMQConnection
from weft.engine.streaming.sources import open_source
from weft.systems.received import ReceivedOffsets

_opened: list[ReceivedOffsets] = []


@pytest.fixture
def connection(rabbitmq: Any) -> RabbitMQConnection:
    return RabbitMQConnection(rabbitmq.url(), name="broker")


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().stop()


def offsets_of(connection: Any, queue: str, reader: str = "copies") -> ReceivedOffsets:
    """Return what Spark's Python process has of a source."""
    source: Any = open_source(weft.Source(connection=connection, query=queue), 0.05)
    made = replace(source._offsets, consumer=reader, open=source.opener())
    made.store = source._offsets.store
    _opened.append(made)
    return made


def received_values(offsets: ReceivedOffsets, after: int = 0) -> list[bytes]:
    page = offsets.log.read(after, offsets.log.head(), 10_000)
    return list(page.columns[page.names.index("value")])


def drain(offsets: ReceivedOffsets, after: int = 0) -> int:
    """Receive what the queue has now, and return the last offset. The log keeps it, for `received_values`."""
    offsets.keep_days = 1
    offsets.stop_at_head()
    while (upto := offsets.following(after)) > after:
        after = upto
    return after
