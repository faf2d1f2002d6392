"""The history of the service: sampled while nobody looks, stored once a minute, there after a restart."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.server import history
from weft.server.history import History
from workers import declare

START = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
pytestmark = pytest.mark.parametrize("system", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that goes on by 20 seconds with each look, and looks that follow each other at once."""
    ticks = itertools.count()
    clock = SimpleNamespace(time=lambda: START.timestamp() + 20 * next(ticks), monotonic=lambda: 0.0)
    monkeypatch.setattr(history, "time", clock)
    monkeypatch.setattr(history, "SECONDS", 0.02)
    return ticks


async def until_stored(kept: History, stream: Any, published: int) -> list[Any]:
    async with asyncio.timeout(120):
        while True:
            found = await asyncio.to_thread(kept._table.read, stream.name, START - timedelta(days=1))
            if found and found[-1][1].published == published:
                return found
            await asyncio.sleep(0.05)


def test_a_point_a_minute_survives_a_restart(streams: Project, minutes: Any) -> None:
    orders = declare("orders", fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": 1}])

    async def sampled() -> list[Any]:
        kept = History(7)
        kept.begin()
        kept.begin()  # with each request: one sampler all the same
        await until_stored(kept, orders, 1)
        weft.publish_sync("orders", [{"n": 2}, {"n": 3}])
        found = await until_stored(kept, orders, 3)
        kept.stop()
        kept.begin()  # a request that came late
        assert kept._keeping is None or kept._keeping.cancelled() or kept._keeping.cancelling()
        return found

    stored = asyncio.run(sampled())
    # The last one before a change is stored with it, and one again after a pause.
    assert list(dict.fromkeys(values.published for _, values in stored)) == [1, 3]
    assert all(at % 60 == 0 for at, _ in stored)
    assert len({at for at, _ in stored}) == len(stored)
    # Another process, which has sampled nothing yet.
    points = History(7).read(orders, START - timedelta(days=1))
    assert list(dict.fromkeys(point.published for point in points)) == [1, 3]


def test_a_database_that_fails_ends_nothing(streams: Project, minutes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = declare("orders", fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": 1}])

    async def sampled() -> None:
        kept = History(7)
        write, failures = kept._table.write, iter([OSError("away"), OSError("away")])

        def fails_twice(*arguments: Any) -> None:
            if (error := next(failures, None)) is not None:
                raise error
            write(*arguments)

        monkeypatch.setattr(kept._table, "write", fails_twice)
        kept.begin()
        await until_stored(kept, orders, 1)
        kept.stop()

    asyncio.run(sampled())
