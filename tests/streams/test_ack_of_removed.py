"""Events that retention removes while a member holds them: each can be acknowledged once, and only what never is
counts as lost."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

import weft
from weft import EventsLostError, LeaseLostError
from weft.project import Project
from workers import declare, execute, rowids, wait_until_expired


def publish(*numbers: int) -> dict[str, Any]:
    return weft.publish_sync("orders", [{"n": n} for n in numbers])


def consume(**options: Any) -> list[dict[str, Any]]:
    return weft.consume_sync("orders", "c", **options)


def ack(events: Any, **options: Any) -> int:
    return weft.ack_sync("orders", "c", events, **options)


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["n"] for event in events]


def group() -> dict[str, Any]:
    return weft.groups_sync("orders")[0]


def lost(**options: Any) -> int:
    with pytest.raises(EventsLostError) as caught:
        consume(**options)
    return caught.value.lost


def held(count: int) -> list[dict[str, Any]]:
    """So many events in the hands of a member."""
    declare(fields={"n": "int64"})
    publish(*range(count))
    return consume()


def test_one_by_one(streams: Project) -> None:
    events = held(5)
    weft.trim_sync("orders", max_rows=0)
    for left, event in enumerate(events, -len(events)):
        assert group()["pending"] == -left
        assert ack(event) == 1
    assert group()["pending"] == group()["lost"] == 0
    publish(5)
    assert numbers(consume()) == [5]


def test_in_any_order_while_more_and_more_is_removed(streams: Project) -> None:
    events = held(12)
    for acknowledged, event in enumerate(random.Random(5).sample(events, len(events))):
        weft.trim_sync("orders", max_rows=11 - acknowledged)
        assert ack(event) == 1
    assert group()["pending"] == group()["lost"] == 0
    assert consume() == []


def test_across_the_cut_part_by_part(streams: Project) -> None:
    events = held(10)
    weft.trim_sync("orders", max_rows=4)
    assert ack(events[2:4]) == 2
    assert ack([events[1], events[4], events[7]]) == 3
    assert group()["pending"] == 5
    assert ack(events) == 5
    assert group()["lost"] == 0
    assert consume() == []


def test_each_only_once(streams: Project) -> None:
    events = held(4)
    weft.trim_sync("orders", max_rows=1)
    copies = pickle.loads(pickle.dumps(events))  # they do not know what is acknowledged through the others
    bare = [{"_weft_rowid": rowid} for rowid in rowids(events)]
    assert ack(events[1]) == 1
    assert ack(events[1]) == 0
    assert ack(bare[1]) == 0
    assert ack(copies[1]) == 0
    assert ack(bare[:2]) == 1
    assert ack(bare) == 2
    assert group()["pending"] == group()["lost"] == 0


def test_what_is_never_acknowledged_is_told_in_one_piece(streams: Project) -> None:
    """However it lies: every other event was acknowledged."""
    events = held(9)
    weft.trim_sync("orders", max_rows=1)
    for event in events[::2]:
        ack(event)
    assert group()["lost"] == 0
    assert lost(batch_size=1) == 4
    assert group()["lost"] == 4
    assert consume() == []
    assert group()["pending"] == 0
    with pytest.raises(LeaseLostError):
        ack(events[1])


@pytest.mark.brief("postgres", "redis")
@pytest.mark.timing
def test_the_holder_dies_halfway(streams: Project) -> None:
    declare(fields={"n": "int64"})
    publish(*range(6))
    events = consume(member="dies", lease=3)
    weft.trim_sync("orders", max_rows=2)
    assert ack(events[0]) == 1
    assert ack(events[3]) == 1
    wait_until_expired("orders")
    with pytest.raises(LeaseLostError, match="ran out"):
        ack(events[1])
    assert lost(member="lives") == 2
    assert numbers(consume(member="lives")) == [4, 5]


def test_nack_of_one(streams: Project) -> None:
    """It cannot be delivered again, but its neighbours are still held."""
    events = held(5)
    weft.trim_sync("orders", max_rows=1)
    assert weft.nack_sync("orders", "c", events[1]) == 1
    assert group()["lost"] == 1
    assert [ack(events[index]) for index in (0, 2, 3, 4)] == [1, 1, 1, 1]
    assert lost() == 1
    assert consume() == []
    assert group()["lost"] == 1


def test_nack_across_the_cut(streams: Project) -> None:
    events = held(6)
    weft.trim_sync("orders", max_rows=3)
    assert weft.nack_sync("orders", "c", events[2:5]) == 3
    assert [ack(events[index]) for index in (5, 0, 1)] == [1, 1, 1]
    assert lost() == 1
    assert numbers(consume()) == [3, 4]


def test_held_by_two_consumers(streams: Project) -> None:
    declare(fields={"n": "int64"})
    publish(*range(4))
    batches = {consumer: weft.consume_sync("orders", consumer) for consumer in ("a", "b")}
    weft.trim_sync("orders", max_rows=0)
    for consumer, events in batches.items():
        assert [weft.ack_sync("orders", consumer, event) for event in events] == [1, 1, 1, 1]
    assert [each["lost"] for each in weft.groups_sync("orders")] == [0, 0]


def test_more_than_a_step_of_retention(streams: Project) -> None:
    declare(fields={"n": "int64"})
    publish(*range(25_000))
    events = consume(batch_size=22_000)
    assert weft.trim_sync("orders", max_rows=1_000) == 24_000
    assert ack(events[15_000]) == 1
    assert ack(events[:15_000]) == 15_000
    assert ack(events[21_999]) == 1
    assert group()["pending"] == 6_998
    assert ack(events) == 6_998
    assert lost() == 2_000
    assert len(consume(batch_size=2_000)) == 1_000


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
def test_gaps(streams: Project, system: Any) -> None:
    """Offsets that no event has, among those that are removed: to acknowledge one acknowledges nothing."""
    declare(fields={"n": "int64"})
    publish(0)
    execute(system, "ALTER TABLE events.orders ADD CHECK (n >= 0)")
    for n in range(1, 6):
        with pytest.raises(weft.WeftError):
            publish(-1, -1)
        publish(n, n)
    events = consume()
    assert rowids(events)[-1] - rowids(events)[0] > len(events)
    weft.trim_sync("orders", before=rowids(events)[-3])
    unused = {*range(rowids(events)[0], rowids(events)[-1])} - {*rowids(events)}
    ack([{"_weft_rowid": rowid} for rowid in unused])
    assert group()["pending"] == 11
    for event in events[:-1]:
        assert ack(event) == 1
    assert group()["pending"] == 1
    assert numbers(consume()) == [5]
    assert group()["lost"] == 0
    weft.trim_sync("orders", max_rows=0)
    assert lost() == 1
