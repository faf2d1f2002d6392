"""`ack`: any order, any part, once; refused, and said so, when the lease is no longer the caller's."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from weft import LeaseLostError, SchemaError
from weft.project import Project
from weft.systems.sql.driver import Session
from workers import declare, rowids, start, wait_until_expired


@pytest.fixture
def orders(streams: Project) -> Any:
    made = declare()
    weft.publish_sync("orders", [{"n": n} for n in range(10)])
    return made


def take(member: str = "a", **options: Any) -> list[dict[str, Any]]:
    return weft.consume_sync("orders", "worker", member=member, **options)


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["n"] for event in events]


def pending() -> int:
    return sum(group["pending"] for group in weft.groups_sync("orders"))


def test_acknowledged_events_do_not_come_again(orders: Any) -> None:
    events = take()
    assert weft.ack_sync(orders, "worker", events) == 10
    assert take() == []
    assert take("b") == []
    assert pending() == 0


def test_one_event(orders: Any) -> None:
    events = take()
    assert weft.ack_sync("orders", "worker", events[3]) == 1
    assert numbers(take()) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "order", [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [5, 0, 9, 1, 8, 2, 7, 3, 6, 4], [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]], ids=str
)
@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
def test_any_order(orders: Any, order: list[int], together: bool) -> None:
    events = take()
    if together:
        assert weft.ack_sync("orders", "worker", [events[n] for n in order]) == 10
    else:
        left = set(order)
        for n in order:
            assert weft.ack_sync("orders", "worker", events[n]) == 1
            left.discard(n)
            assert pending() == len(left)
    assert take() == []


def test_part_of_a_batch(orders: Any) -> None:
    events = take()
    assert weft.ack_sync("orders", "worker", events[2:5]) == 3
    assert pending() == 7
    again = take()
    assert numbers(again) == [0, 1, 5, 6, 7, 8, 9]
    assert weft.ack_sync("orders", "worker", [again[0], again[-1]]) == 2
    assert numbers(take()) == [1, 5, 6, 7, 8]


def test_any_iterable(orders: Any) -> None:
    events = take()
    assert weft.ack_sync("orders", "worker", (event for event in events[:2])) == 2
    assert weft.ack_sync("orders", "worker", tuple(events[2:4])) == 2
    assert weft.ack_sync("orders", "worker", []) == 0
    assert pending() == 6


def test_twice(orders: Any) -> None:
    events = take()
    assert weft.ack_sync("orders", "worker", events[:4]) == 4
    assert weft.ack_sync("orders", "worker", events[:4]) == 0
    assert weft.ack_sync("orders", "worker", events) == 6
    assert weft.ack_sync("orders", "worker", events) == 0
    assert take() == []


def test_twice_by_a_copy_that_knows_the_lease_alone(orders: Any) -> None:
    """As over HTTP: the copy does not know what was acknowledged, and its token does no harm."""
    events = take()
    copies = pickle.loads(pickle.dumps(events))
    again = pickle.loads(pickle.dumps(events))
    assert weft.ack_sync("orders", "worker", events[:4]) == 4
    assert weft.ack_sync("orders", "worker", copies) == 6
    assert weft.ack_sync("orders", "worker", again) == 0
    with pytest.raises(LeaseLostError, match="lease is gone"):
        weft.nack_sync("orders", "worker", again)
    weft.reset_sync("orders", "worker", to="end")
    with pytest.raises(LeaseLostError, match="lease is gone"):
        weft.ack_sync("orders", "worker", pickle.loads(pickle.dumps(events)))


def test_the_same_event_twice_in_one_call(orders: Any) -> None:
    events = take()
    assert weft.ack_sync("orders", "worker", [events[0], events[0], events[1]]) == 2
    assert weft.ack_sync("orders", "worker", [{"_weft_rowid": events[2]["_weft_rowid"]}] * 3) == 1
    assert pending() == 7


def test_scattered_events_take_few_statements(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each piece that is left."""
    declare()
    weft.publish_sync("orders", [{"n": n} for n in range(4000)])
    events = take(batch_size=4000)
    ran: list[str] = []
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda session, sql, values=(): ran.append(sql) or run(session, sql, values))
    assert weft.ack_sync("orders", "worker", events[::2]) == 2000
    assert weft.nack_sync("orders", "worker", events[1::4]) == 1000
    assert weft.ack_sync("orders", "worker", events[3::4]) == 1000
    assert len(ran) < 30
    assert pending() == 1000
    ran.clear()
    assert numbers(take(batch_size=4000)) == list(range(1, 4000, 4))
    assert len(ran) < 10


def test_rowids_alone(orders: Any) -> None:
    ids = [{"_weft_rowid": rowid} for rowid in rowids(take())]
    assert weft.ack_sync("orders", "worker", ids[0]) == 1
    assert weft.ack_sync("orders", "worker", ids[:5]) == 4  # one of them was acknowledged before
    assert pending() == 5
    assert numbers(take()) == [5, 6, 7, 8, 9]


def test_copies_through_json(orders: Any) -> None:
    """What went over HTTP and back: without the lease, of which only the offset is left."""
    events = json.loads(json.dumps(take(), default=str))
    assert weft.ack_sync("orders", "worker", events, member="a") == 10
    assert take() == []


@pytest.mark.timing
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_copies_keep_the_lease(orders: Any, copied: Any) -> None:
    events = [copied(event) for event in take(lease=0.05)]
    wait_until_expired("orders")
    take("b")
    with pytest.raises(LeaseLostError):
        weft.ack_sync("orders", "worker", events)


def test_from_another_process(orders: Any) -> None:
    events = take()
    code = 'declare(); answer(weft.ack_sync("orders", "worker", args[0]))'
    assert start(code, events[:4]).answer() == 4
    assert start(code, [{"_weft_rowid": event["_weft_rowid"]} for event in events[4:8]]).answer() == 4
    assert numbers(take()) == [8, 9]


def refused(events: Any, **options: Any) -> LeaseLostError:
    with pytest.raises(LeaseLostError) as caught:
        weft.ack_sync("orders", "worker", events, **options)
    return caught.value


@pytest.mark.timing
def test_refused_after_the_lease_ran_out(orders: Any) -> None:
    events = take(lease=0.05)
    wait_until_expired("orders")
    error = refused(events)
    assert error.rowids == tuple(rowids(events))
    assert "ran out" in str(error)
    assert "'worker'" in str(error)
    assert "lease=" in str(error)
    assert numbers(take("b")) == numbers(events)


@pytest.mark.timing
def test_refused_after_another_took_over(orders: Any) -> None:
    events = take("a", lease=0.05)
    wait_until_expired("orders")
    taken = take("b")
    error = refused(events)
    assert "'b'" in str(error)
    assert pending() == 10
    assert weft.ack_sync("orders", "worker", taken) == 10


@pytest.mark.timing
def test_refused_after_another_acknowledged(orders: Any) -> None:
    events = take("a", lease=0.05)
    wait_until_expired("orders")
    weft.ack_sync("orders", "worker", take("b"))
    assert refused(events).rowids == tuple(rowids(events))
    assert take() == []


@pytest.mark.timing
def test_an_ack_that_is_refused_in_part_is_refused_whole(orders: Any) -> None:
    """And says so of every event."""
    events = take("a", lease=0.05)
    wait_until_expired("orders")
    taken = take("b", batch_size=3)
    mine = take("a")
    assert numbers(mine) == [3, 4, 5, 6, 7, 8, 9]
    assert refused(events).rowids == tuple(rowids(events))
    assert pending() == 10
    weft.ack_sync("orders", "worker", [*taken, *mine])
    assert pending() == 0


@pytest.mark.timing
def test_the_good_leases_of_a_mixed_ack_count(orders: Any) -> None:
    """Events of several deliveries in one call: what is held is acknowledged, and the error names the rest."""
    old = take("a", batch_size=3, lease=0.05)
    wait_until_expired("orders")
    take("b", batch_size=3)
    good = take("a", batch_size=4)
    assert refused([*old, *good]).rowids == tuple(rowids(old))
    assert pending() == 3


def test_refused_after_a_reset(orders: Any) -> None:
    events = take()
    weft.reset_sync("orders", "worker", to="start")
    refused(events)
    refused([{"_weft_rowid": rowid} for rowid in rowids(events)])
    assert numbers(take()) == list(range(10))


def test_refused_after_a_reset_and_a_new_delivery(orders: Any) -> None:
    events = take("a")
    weft.reset_sync("orders", "worker", to="start")
    again = take("a")
    refused(events)
    assert weft.ack_sync("orders", "worker", again) == 10


def test_refused_after_own_second_delivery(orders: Any) -> None:
    """A member that consumes again gets its events under a new lease; the old one is over."""
    first = take("a")
    second = take("a")
    refused(first)
    assert weft.ack_sync("orders", "worker", second) == 10


def test_refused_after_nack(orders: Any) -> None:
    events = take()
    weft.nack_sync("orders", "worker", events[:2])
    assert "given back" in str(refused(events[:2]))
    assert weft.ack_sync("orders", "worker", events[2:]) == 8


def test_refused_by_member(orders: Any) -> None:
    ids = [{"_weft_rowid": rowid} for rowid in rowids(take("a"))]
    refused(ids, member="b")
    assert weft.ack_sync("orders", "worker", ids, member="a") == 10


def test_never_delivered(orders: Any) -> None:
    events = take(batch_size=3)
    later = {"_weft_rowid": events[-1]["_weft_rowid"] + 1}
    assert "not delivered" in str(refused(later))
    assert refused([*({"_weft_rowid": rowid} for rowid in rowids(events)), later])
    assert refused({"_weft_rowid": 2**62}).rowids == (2**62,)
    with pytest.raises(LeaseLostError):
        weft.ack_sync("orders", "nobody", later)
    assert pending() == 3
    assert numbers(take()) == list(range(10))


def test_another_consumers_events(orders: Any) -> None:
    events = take()
    with pytest.raises(LeaseLostError):
        weft.ack_sync("orders", "other", events)
    weft.consume_sync("orders", "other")
    with pytest.raises(LeaseLostError):
        weft.ack_sync("orders", "other", events)


NOT_EVENTS: list[Any] = [
    *({"_weft_rowid": wrong} for wrong in (None, "1.0", "x", "-1", "9" * 20, True, 0, -1, 2**63, 1.0)),
    {},
    {"n": 1},
    5,
    None,
    "text",
]


def test_not_an_event(orders: Any) -> None:
    events = take()
    for wrong in NOT_EVENTS:
        with pytest.raises(SchemaError) as caught:
            weft.ack_sync("orders", "worker", [events[0], wrong])
        assert caught.value.index == 1
        assert pending() == 10


def test_not_events_at_all(orders: Any) -> None:
    for wrong in (5, None, "text"):
        with pytest.raises(SchemaError):
            weft.ack_sync("orders", "worker", wrong)


def test_a_late_ack_moves_nothing_backwards(orders: Any) -> None:
    first = take("a", batch_size=5)
    weft.ack_sync("orders", "worker", take("b", batch_size=5))
    weft.ack_sync("orders", "worker", first)
    (group,) = weft.groups_sync("orders")
    assert (group["pending"], group["lag"]) == (0, 0)
    weft.publish_sync("orders", {"n": 10})
    assert numbers(take()) == [10]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sets(st.integers(0, 9), max_size=6), max_size=6))
def test_any_parts(orders: Any, parts: list[set[int]]) -> None:
    weft.reset_sync("orders", "worker", to="start")
    events = take()
    left = set(range(10))
    for part in parts:
        assert weft.ack_sync("orders", "worker", [events[n] for n in sorted(part)]) == len(part & left)
        left -= part
    assert pending() == len(left)
    assert numbers(take()) == sorted(left)
