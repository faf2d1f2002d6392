"""`nack`: events go back, to be delivered again after a delay, with a reason that stays with them."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from servers import wait_until
from weft import LeaseLostError, SettingsError
from weft.project import Project
from workers import declare, drain, rowids, wait_until_expired


@pytest.fixture
def orders(streams: Project) -> Any:
    made = declare()
    weft.publish_sync("orders", [{"n": n} for n in range(6)])
    return made


def take(member: str = "a", **options: Any) -> list[dict[str, Any]]:
    return weft.consume_sync("orders", "worker", member=member, **options)


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["n"] for event in events]


def test_at_once_and_to_anybody(orders: Any) -> None:
    events = take()
    assert weft.nack_sync(orders, "worker", events) == 6
    assert numbers(take("b")) == numbers(events)
    assert take("a") == []


def test_events_that_went_back_come_before_new_ones(orders: Any) -> None:
    events = take(batch_size=3)
    weft.nack_sync("orders", "worker", [events[2], events[0]])
    assert numbers(take("b")) == [0, 2, 3, 4, 5]


def test_own_events_come_before_those_that_went_back(orders: Any) -> None:
    events = take(batch_size=4)
    weft.nack_sync("orders", "worker", [events[0], events[2]])
    assert numbers(take("a", batch_size=3)) == [1, 3, 0]


def test_part(orders: Any) -> None:
    events = take()
    assert weft.nack_sync("orders", "worker", events[1:3]) == 2
    assert weft.ack_sync("orders", "worker", [events[0], *events[3:]]) == 4
    assert numbers(take("b")) == [1, 2]


def test_one_event_and_rowids_alone(orders: Any) -> None:
    events = take()
    assert weft.nack_sync("orders", "worker", events[5]) == 1
    assert weft.nack_sync("orders", "worker", [{"_weft_rowid": events[4]["_weft_rowid"]}]) == 1
    assert weft.nack_sync("orders", "worker", []) == 0
    assert numbers(take("b")) == [4, 5]


@pytest.mark.timing
def test_delay(orders: Any) -> None:
    events = take()
    weft.nack_sync("orders", "worker", events[:2], delay=3600)
    weft.nack_sync("orders", "worker", events[2:4], delay=1.5)
    weft.nack_sync("orders", "worker", events[4:])
    assert numbers(take("b")) == [4, 5]
    found: list[int] = []

    def came_back() -> bool:
        found.extend(numbers(take("c")))
        return bool(found)

    wait_until(came_back, "the delay to pass")
    assert found == [2, 3]
    assert take("a") == []
    (group,) = weft.groups_sync("orders")
    assert group["pending"] == 6
    assert sorted(member["member"] for member in group["members"]) == ["b", "c"]


@pytest.mark.timing
def test_a_waiting_consumer_gets_what_comes_back(orders: Any) -> None:
    events = take()
    weft.nack_sync("orders", "worker", events[:1], delay=0.2)
    assert numbers(take("b", wait=30)) == [0]


def test_deliveries_are_counted(orders: Any) -> None:
    for expected in (1, 2, 3):
        events = take()
        (group,) = weft.groups_sync("orders")
        assert [member["deliveries"] for member in group["members"]] == [expected]
        weft.nack_sync("orders", "worker", events)


def test_the_reason_goes_with_the_event(streams: Project) -> None:
    declare(max_deliveries=2)
    weft.publish_sync("orders", [{"n": 0}, {"n": 1}])
    weft.nack_sync("orders", "worker", take(), reason="first try")
    for _ in range(2):
        weft.nack_sync("orders", "worker", take(batch_size=1), reason="second 'try'\x00\ud800 🦄")
    assert take() == []
    reasons = [event["reason"] for event in drain("orders__dead_letter")]
    assert [reason.startswith("second 'try'") and reason.endswith("🦄") for reason in reasons] == [True, True]


def test_a_reason_stays_when_the_next_has_none(streams: Project) -> None:
    declare(max_deliveries=2)
    weft.publish_sync("orders", {"n": 0})
    weft.nack_sync("orders", "worker", take(), reason="broken")
    weft.nack_sync("orders", "worker", take())
    assert take() == []
    assert [event["reason"] for event in drain("orders__dead_letter")] == ["broken"]


def test_a_long_reason_is_cut(streams: Project) -> None:
    declare(max_deliveries=1)
    weft.publish_sync("orders", {"n": 0})
    weft.nack_sync("orders", "worker", take(), reason="é" * 1_000_000)
    assert take() == []
    (event,) = drain("orders__dead_letter")
    assert set(event["reason"]) == {"é"}
    assert 100 < len(event["reason"]) <= 2_000


def refused(events: Any, **options: Any) -> str:
    with pytest.raises(LeaseLostError) as caught:
        weft.nack_sync("orders", "worker", events, **options)
    return str(caught.value)


@pytest.mark.timing
def test_refused(orders: Any) -> None:
    events = take(lease=0.05)
    wait_until_expired("orders")
    assert "ran out" in refused(events)
    again = take("b")
    assert "'b'" in refused(events)
    weft.ack_sync("orders", "worker", again[:2])
    refused(again[:2])
    refused([{"_weft_rowid": rowid} for rowid in rowids(again[:2])])
    weft.nack_sync("orders", "worker", again[2:])
    assert "given back" in refused(again[2:])
    refused({"_weft_rowid": 10**9})
    weft.reset_sync("orders", "worker", to="end")
    refused(again)


def test_bad_delay(orders: Any) -> None:
    events = take()
    for delay in (-1, "5", None, float("nan"), float("inf"), True):
        with pytest.raises(SettingsError, match="delay"):
            weft.nack_sync("orders", "worker", events, delay=delay)  # type: ignore[arg-type]
    assert weft.ack_sync("orders", "worker", events) == 6


async def test_async(orders: Any) -> None:
    events = await weft.consume("orders", "worker", member="a")
    assert await weft.nack("orders", "worker", events, delay=0, reason="later") == 6
    assert numbers(await weft.consume("orders", "worker", member="b")) == list(range(6))
