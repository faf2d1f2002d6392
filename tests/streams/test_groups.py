"""`groups`: where each consumer of a stream stands."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import weft
from weft.project import Project
from workers import declare, rowids, start


def publish(many: int) -> int:
    return weft.publish_sync("orders", [{"n": n} for n in range(many)])["last_rowid"]


def group(consumer: str = "worker") -> dict[str, Any]:
    (found,) = [each for each in weft.groups_sync("orders") if each["consumer"] == consumer]
    return found


def test_no_consumer(streams: Project) -> None:
    declare()
    assert weft.groups_sync("orders") == []
    publish(3)
    assert weft.groups_sync("orders") == []


def test_position_lag_and_pending(streams: Project) -> None:
    declare()
    last = publish(10)
    first = last - 9
    events = weft.consume_sync("orders", "worker", batch_size=4, member="a")
    state = group()
    assert state.keys() == {"consumer", "position", "lag", "pending", "lost", "members"}
    assert (state["position"], state["lag"], state["pending"], state["lost"]) == (first + 3, 6, 4, 0)
    weft.ack_sync("orders", "worker", events[1:3])
    state = group()
    assert (state["position"], state["lag"], state["pending"]) == (first + 3, 6, 2)
    weft.ack_sync("orders", "worker", events)
    weft.ack_sync("orders", "worker", weft.consume_sync("orders", "worker", member="a"))
    state = group()
    assert (state["position"], state["lag"], state["pending"], state["members"]) == (last, 0, 0, [])
    publish(2)
    assert (group()["position"], group()["lag"]) == (last, 2)


@pytest.mark.timing
def test_members(streams: Project) -> None:
    declare()
    publish(10)
    before = datetime.now(UTC)
    for member, size in (("b", 2), ("a", 3), ("c", 1)):
        weft.consume_sync("orders", "worker", batch_size=size, member=member, lease=100)
    weft.consume_sync("orders", "worker", batch_size=2, member="b", lease=200)
    members = group()["members"]
    assert [(member["member"], member["pending"], member["deliveries"]) for member in members] == [
        ("a", 3, 1),
        ("b", 2, 2),
        ("c", 1, 1),
    ]
    for member, seconds in zip(members, (100, 200, 100), strict=True):
        assert member.keys() == {"member", "pending", "expires_at", "deliveries"}
        assert abs(member["expires_at"] - before - timedelta(seconds=seconds)) < timedelta(seconds=20)


def test_events_that_were_given_back_are_pending_but_nobodys(streams: Project) -> None:
    declare()
    publish(3)
    weft.nack_sync("orders", "worker", weft.consume_sync("orders", "worker"), delay=100)
    state = group()
    assert (state["pending"], state["members"]) == (3, [])


def test_consumers_by_name(streams: Project) -> None:
    declare("orders")
    declare("refunds")
    publish(3)
    for consumer in ("b", "a", "c"):
        weft.consume_sync("orders", consumer, batch_size=1)
    weft.consume_sync("refunds", "other")
    assert [each["consumer"] for each in weft.groups_sync("orders")] == ["a", "b", "c"]
    assert [each["consumer"] for each in weft.groups_sync("refunds")] == ["other"]


def test_to_ask_changes_nothing(streams: Project) -> None:
    declare()
    publish(3)
    events = weft.consume_sync("orders", "worker", member="a")
    assert weft.groups_sync("orders") == weft.groups_sync("orders")
    assert rowids(weft.consume_sync("orders", "worker", member="a")) == rowids(events)


def test_of_other_processes(streams: Project) -> None:
    declare()
    publish(3)
    start('declare(); weft.consume_sync("orders", "worker", batch_size=2, member="there")').answer()
    assert [(member["member"], member["pending"]) for member in group()["members"]] == [("there", 2)]
    assert start('declare(); answer(weft.groups_sync("orders"))').answer() == weft.groups_sync("orders")
