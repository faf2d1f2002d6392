"""Every stream source: each row is taken once, bad ones are apart and say where they are from, and a batch that is
taken again has the same rows.

A new system adds a function to `SOURCES`. The positions of sources have their own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import weft
from systems.contracts.conftest import by_name
from tests.engine.streaming.conftest import forget_last_commit, rows, run_once
from weft.engine.streaming.dead_letters import open_store
from weft.pipelines.streaming.declare import make
from weft.project import Project
from weft.systems.dead_letter_store import StoredLetter

pytestmark = pytest.mark.spark


@dataclass
class Filled:
    """A source under test."""

    declared: weft.Source
    add: Callable[[list[int]], None]
    """Adds rows with these numbers in the column `n`."""
    add_bad: Callable[[], None] | None = None
    """Adds one thing that is no row, unless the system itself rejects such a thing."""


def _stream(project: Path, request: pytest.FixtureRequest) -> Filled:
    events = weft.stream(name="events", fields={"n": "int64"})(lambda: None)
    return Filled(weft.Source(query=events), lambda numbers: weft.publish_sync(events, [{"n": n} for n in numbers]))


def _topic(project: Path, request: pytest.FixtureRequest) -> Filled:
    kafka = request.getfixturevalue("kafka")
    broker, topic = weft.KafkaConnection(kafka.bootstrap, name="broker"), kafka.create_topic()
    return Filled(
        weft.Source(connection=broker, query=topic),
        lambda numbers: kafka.produce(topic, _messages(numbers)),
        lambda: kafka.produce(topic, [b"{"]),
    )


def _kinesis(project: Path, request: pytest.FixtureRequest) -> Filled:
    kinesis = request.getfixturevalue("kinesis")
    connection, stream = weft.KinesisConnection(**kinesis.fields(), name="kinesis"), kinesis.create_stream()
    return Filled(
        weft.Source(connection=connection, query=stream),
        lambda numbers: kinesis.put(stream, _messages(numbers)),
        lambda: kinesis.put(stream, [b"{"]),
    )


def _pubsub(project: Path, request: pytest.FixtureRequest) -> Filled:
    pubsub = request.getfixturevalue("pubsub")
    connection, (topic, subscription) = weft.PubSubConnection(**pubsub.fields(), name="pubsub"), pubsub.create_queue()
    return Filled(
        weft.Source(connection=connection, query=subscription),
        lambda numbers: pubsub.publish(topic, _messages(numbers)),
        lambda: pubsub.publish(topic, [b"{"]),
    )


def _rabbitmq(project: Path, request: pytest.FixtureRequest) -> Filled:
    rabbitmq = request.getfixturevalue("rabbitmq")
    connection, queue = weft.RabbitMQConnection(rabbitmq.url(), name="broker"), rabbitmq.create_queue()
    return Filled(
        weft.Source(connection=connection, query=queue),
        lambda numbers: rabbitmq.publish(queue, _messages(numbers)),
        lambda: rabbitmq.publish(queue, [b"{"]),
    )


def _files(project: Path, request: pytest.FixtureRequest) -> Filled:
    lake = weft.ObjectStoreLocalConnection(str(project / "lake"), name="lake", format="json_lines")
    folder = project / "lake/raw"
    folder.mkdir(parents=True)

    def add(lines: list[bytes]) -> None:
        # As any writer should: a file appears as a whole.
        hidden = folder / "_next"
        hidden.write_bytes(b"".join(b"%s\n" % line for line in lines))
        hidden.rename(folder / f"{len(list(folder.iterdir()))} é.jsonl")

    return Filled(
        weft.Source(connection=lake, query="raw"), lambda numbers: add(_messages(numbers)), lambda: add([b"{"])
    )


def _versions(project: Path, request: pytest.FixtureRequest) -> Filled:
    deltalake = pytest.importorskip("deltalake")
    import pyarrow as pa

    lake = weft.DeltaLocalConnection(str(project / "lake"), name="delta")

    def add(numbers: list[int]) -> None:
        deltalake.write_deltalake(str(project / "lake/numbers"), pa.table({"n": numbers}), mode="append")

    return Filled(weft.Source(connection=lake, query="numbers"), add)


def _queue(project: Path, request: pytest.FixtureRequest) -> Filled:
    queue = request.getfixturevalue("spool").queue("numbers")
    source = weft.Source(connection=request.getfixturevalue("spool"), query="numbers")
    return Filled(source, lambda numbers: queue.append(_messages(numbers)), lambda: queue.append([b"{"]))


def _messages(numbers: list[int]) -> list[bytes]:
    return [json.dumps({"n": n}).encode() for n in numbers]


SOURCES = {
    "stream": _stream,
    "topic": _topic,
    "kinesis": _kinesis,
    "pubsub": _pubsub,
    "rabbitmq": _rabbitmq,
    "files": _files,
    "delta": _versions,
    "third_party": _queue,
}


@pytest.fixture(params=by_name(SOURCES))
def filled(request: pytest.FixtureRequest, here: Project, project: Path) -> Filled:
    return SOURCES[request.param](project, request)


# The others have tests of whole pipelines of their own.
@pytest.mark.brief(*(SOURCES.keys() - {"files", "kinesis", "pubsub", "topic"}))
def test_each_row_is_taken_once(filled: Filled) -> None:
    declared: dict[str, Any] = {
        "name": "copies",
        "source": filled.declared,
        "target": "default",
        "target_table": (None, "copies"),
        "dead_letter_table": (None, "failed"),
    }
    filled.add([1, 2])
    if filled.add_bad:
        filled.add_bad()
    run_once(**declared)
    assert rows("copies", "n") == [(1,), (2,)]
    letters = _letters(declared)
    if filled.add_bad:
        (letter,) = letters
        assert (letter.stage, letter.payload) == ("read", "{")
        assert letter.source and letter.offset and letter.error

    # As after a crash between the target's commit and Spark's own: the same rows again, and none of them twice.
    forget_last_commit("copies")
    filled.add([3])
    run_once(**declared)
    assert rows("copies", "n") == [(1,), (2,), (3,)]
    assert [each.letter_id for each in _letters(declared)] == [each.letter_id for each in letters]
    assert all(moment is not None for (moment,) in rows("copies", "_event_ts"))


def _letters(declared: dict[str, Any]) -> list[StoredLetter]:
    store = open_store(make(**declared))
    assert store is not None
    return [each for record in store.records() if (each := StoredLetter.of(record))]
