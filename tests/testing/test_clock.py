"""`weft.testing.Clock`: stands still until it is moved, and everything that depends on time follows it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest

import weft
from weft.testing import START, Clock, MemoryProject


@pytest.fixture
def memory() -> Iterator[MemoryProject]:
    with weft.testing.project() as inner:

        @weft.stream(retention={"max_age_days": 7}, idempotency_key={"fields": ["id"], "horizon_days": 2})
        def events(): ...

        yield inner


def test_it_stands_still() -> None:
    clock = Clock()
    assert clock.now() == clock.now() == START == datetime(2026, 1, 1, tzinfo=UTC)
    assert clock() == START.timestamp()


def test_move() -> None:
    clock = Clock()
    assert clock.move(90) == START + timedelta(seconds=90)
    assert clock.move(seconds=30) == START + timedelta(minutes=2)
    assert clock.move(timedelta(hours=1)) == START + timedelta(hours=1, minutes=2)
    assert clock.move(days=1, hours=-1) == START + timedelta(days=1, minutes=2)
    with pytest.raises(TypeError):
        clock.move(fortnights=1)


def test_set() -> None:
    clock = Clock()
    clock.set(datetime(2027, 5, 4, 3))
    assert clock.now() == datetime(2027, 5, 4, 3, tzinfo=UTC)
    clock.set(datetime(2027, 5, 4, 3, tzinfo=timezone(timedelta(hours=2))))
    assert clock.now() == datetime(2027, 5, 4, 1, tzinfo=UTC)


def test_times_of_publication(memory: MemoryProject) -> None:
    weft.publish_sync("events", {"id": 1})
    memory.clock.move(microseconds=1500)
    weft.publish_sync("events", {"id": 2})
    assert [event["_weft_published_at"] for event in memory.events("events")] == [
        START,
        START + timedelta(microseconds=1500),
    ]


def test_leases(memory: MemoryProject) -> None:
    weft.publish_sync("events", {"id": 1})
    held = weft.consume_sync("events", "worker", member="a", lease=60)
    memory.clock.move(59)
    assert weft.consume_sync("events", "worker", member="b") == []
    memory.clock.move(1)
    assert len(weft.consume_sync("events", "worker", member="b")) == 1
    with pytest.raises(weft.LeaseLostError):
        weft.ack_sync("events", "worker", held)


def test_delays(memory: MemoryProject) -> None:
    weft.publish_sync("events", {"id": 1})
    weft.nack_sync("events", "worker", weft.consume_sync("events", "worker"), delay=10)
    assert weft.consume_sync("events", "worker") == []
    memory.clock.move(10)
    assert len(weft.consume_sync("events", "worker")) == 1


def test_retention(memory: MemoryProject) -> None:
    weft.publish_sync("events", {"id": 1})
    memory.clock.move(days=6)
    weft.publish_sync("events", {"id": 2})
    memory.clock.move(days=2)
    assert weft.trim_sync("events") == 1
    assert [event["id"] for event in memory.events("events")] == [2]


def test_horizon_of_idempotency_keys(memory: MemoryProject) -> None:
    weft.publish_sync("events", {"id": 1})
    memory.clock.move(days=1)
    assert weft.publish_sync("events", {"id": 1})["rows_deduplicated"] == 1
    memory.clock.move(days=3)
    assert weft.publish_sync("events", {"id": 1})["rows_deduplicated"] == 0
