"""Other clients trim, delete, acknowledge and claim in the same groups: nothing is lost untold, and nothing is slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.streams.events import read_after, to_dicts
from workers import declare, drain, log_of, wait_until_expired


def lag_and_lost() -> tuple[int, int]:
    (group,) = weft.groups_sync("orders")
    return group["lag"], group["lost"]


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["n"] for event in events]


# ------------------------------------------------------------------------------------------------------------- trimming


@pytest.mark.parametrize("asked", [True, False])
def test_what_others_trimmed_unread_is_told(streams: Project, client: Any, asked: bool) -> None:
    """Producers that add with MAXLEN are the rule."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(10)])
    weft.ack_sync("orders", "worker", weft.consume_sync("orders", "worker", 2))
    client.xtrim("orders", maxlen=3, approximate=False)
    if asked:
        assert lag_and_lost() == (3, 0)
    with pytest.raises(weft.EventsLostError) as caught:
        weft.consume_sync("orders", "worker")
    assert caught.value.lost == 5
    assert lag_and_lost() == (3, 5)
    assert numbers(drain("orders", "worker")) == [7, 8, 9]
    assert lag_and_lost() == (0, 5)
    client.xtrim("orders", maxlen=0, approximate=False)
    weft.publish_sync("orders", {"n": 10})
    assert numbers(drain("orders", "worker")) == [10]
    client.xadd("orders", {"n": 11})
    client.xtrim("orders", maxlen=0, approximate=False)
    with pytest.raises(weft.EventsLostError) as caught:
        weft.consume_sync("orders", "worker")
    assert caught.value.lost == 1
    assert lag_and_lost() == (0, 6)


def test_what_others_trimmed_and_what_they_deleted_are_told_together(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(10)])
    weft.consume_sync("orders", "worker", 6, member="a")
    entries = [entry for entry, _ in client.xrange("orders")]
    client.xdel("orders", entries[4])
    client.xtrim("orders", maxlen=2, approximate=False)
    with pytest.raises(weft.EventsLostError) as caught:
        weft.consume_sync("orders", "worker", member="a")
    assert caught.value.lost == 8  # five of them, and the deleted one, were leased
    assert numbers(drain("orders", "worker")) == [8, 9]
    assert lag_and_lost() == (0, 8)


@pytest.mark.parametrize("holders", ["itself", "leases that ended"])
def test_what_others_deleted_is_told_at_once(streams: Project, client: Any, holders: str) -> None:
    """However few the member asks for."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(10)])
    if holders == "itself":
        weft.consume_sync("orders", "worker", member="a")
    else:
        for number in range(10):
            weft.consume_sync("orders", "worker", 1, member=f"b{number}", lease=2)
        wait_until_expired("orders")
    client.xdel("orders", *[entry for n, (entry, _) in enumerate(client.xrange("orders")) if n not in (6, 8)])
    with pytest.raises(weft.EventsLostError) as caught:
        weft.consume_sync("orders", "worker", 1, member="a")
    assert caught.value.lost == 8
    assert numbers(weft.consume_sync("orders", "worker", 3, member="a")) == [6, 8]
    assert lag_and_lost() == (0, 8)


def test_what_others_deleted_between_events_that_are_left_is_told_at_once(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(10)])
    weft.consume_sync("orders", "worker", member="a")
    client.xdel("orders", *[entry for entry, _ in client.xrange("orders")][1::2])
    events = weft.consume_sync("orders", "worker", 2, member="a")
    assert numbers(events) == [0]  # what is left comes first
    weft.ack_sync("orders", "worker", events)
    with pytest.raises(weft.EventsLostError) as caught:
        weft.consume_sync("orders", "worker", 2, member="a")
    assert caught.value.lost == 5
    assert numbers(weft.consume_sync("orders", "worker", member="a")) == [2, 4, 6, 8]


@pytest.mark.parametrize("system", ["redis", "redis-cluster"], indirect=True)
def test_a_subscriber_is_told_what_others_trimmed(streams: Project, client: Any) -> None:
    stream = declare(fields={"n": "int64"})
    weft.publish_sync(stream, [{"n": -1}] * 3)

    def add(count: int, left: int) -> None:
        for n in range(count):
            client.xadd("orders", {"n": n})
        client.xtrim("orders", maxlen=left, approximate=False)

    async def listen() -> None:
        async with weft.subscribe(stream) as live:

            async def following() -> Any:
                return (await asyncio.wait_for(anext(live), 20))["n"]

            await asyncio.to_thread(add, 10, 4)
            with pytest.raises(weft.EventsLostError) as caught:
                await following()
            assert caught.value.lost == 6
            assert [await following() for _ in range(4)] == [6, 7, 8, 9]
            await asyncio.to_thread(add, 0, 0)  # it had those
            await asyncio.to_thread(add, 2, 2)
            assert [await following() for _ in range(2)] == [0, 1]
            await asyncio.to_thread(add, 1, 0)
            with pytest.raises(weft.EventsLostError) as caught:
                await following()
            assert caught.value.lost == 1
            await weft.publish(stream, {"n": 11})
            assert await following() == 11

    asyncio.run(listen())


def test_what_is_trimmed_after_it_was_read_is_not_lost(streams: Project, client: Any) -> None:
    stream = declare(fields={"n": "int64"})
    weft.publish_sync(stream, {"n": 0})
    log = log_of(stream)
    start = log.head()
    for n in range(1, 6):
        client.xadd("orders", {"n": n})
    page = to_dicts(log.read(start, log.head(), 3))
    client.xtrim("orders", maxlen=1, approximate=False)
    assert log.lost_after(start, page[0]["_weft_rowid"]) == (0, 0)
    events, floor, lost = read_after(log, page[-1]["_weft_rowid"], 10)
    assert (events, lost) == ([], 1)
    assert numbers(read_after(log, floor, 10)[0]) == [5]
    assert read_after(log, floor, 10)[1:] == (0, 0)


def test_a_subscriber_after_a_flush_is_told_nothing_wrong(streams: Project, client: Any) -> None:
    """Redis counts from the beginning then."""
    stream = declare(fields={"n": "int64"})
    weft.publish_sync(stream, [{"n": n} for n in range(10)])
    log = log_of(stream)
    position = log.head()
    client.flushdb()
    weft.publish_sync(stream, [{"n": n} for n in range(3)])
    events, floor, _ = read_after(log, position, 10)
    assert (numbers(events), floor) == ([0, 1, 2], 0)
    position = events[-1]["_weft_rowid"]
    assert read_after(log, position, 10) == ([], 0, 0)
    weft.publish_sync(stream, [{"n": n} for n in range(3, 6)])
    client.xtrim("orders", maxlen=1, approximate=False)
    assert read_after(log, position, 10)[2] == 2


def test_deleted_entries_are_not_behind(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(6)])
    weft.consume_sync("orders", "worker", 1, member="a")
    client.xdel("orders", client.xrange("orders")[3][0])
    assert numbers(weft.consume_sync("orders", "worker", member="b")) == [1, 2, 4, 5]
    assert lag_and_lost() == (0, 0)


def test_nothing_new_comes_before_what_a_member_holds(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(6)])
    weft.consume_sync("orders", "worker", 4, member="a")
    client.xdel("orders", client.xrange("orders")[0][0])
    held = weft.consume_sync("orders", "worker", 2, member="a")
    assert numbers(held) == [1]
    weft.ack_sync("orders", "worker", held)
    with pytest.raises(weft.EventsLostError):
        weft.consume_sync("orders", "worker", member="a")
    assert numbers(weft.consume_sync("orders", "worker", member="a")) == [2, 3, 4, 5]


# --------------------------------------------------------------------------------------------------------------- groups


def test_a_group_made_anew_delivers_anew(streams: Project, client: Any) -> None:
    """Also to the dead letters, which take each delivery once."""
    stream = declare(fields={"n": "int64"}, max_deliveries=1)
    weft.publish_sync(stream, {"n": 1})
    for rounds in (1, 2, 3):
        weft.nack_sync(stream, "worker", weft.consume_sync(stream, "worker"))
        assert weft.consume_sync(stream, "worker") == []
        assert client.xlen("orders__dead_letter") == rounds
        client.xgroup_destroy("orders", "worker")


def test_looking_at_what_others_hold_does_not_renew_it(streams: Project, client: Any) -> None:
    """The last attempt of each goes alone; the others are as idle as they were."""
    stream = declare(fields={"n": "int64"}, max_deliveries=2)
    weft.publish_sync(stream, [{"n": n} for n in range(5)])
    client.xgroup_create("orders", "worker", "0")
    client.xreadgroup("worker", "plain", {"orders": ">"})
    held = [entry["message_id"] for entry in client.xpending_range("orders", "worker", "-", "+", 9)]
    client.execute_command("XCLAIM", "orders", "worker", "plain", 0, *held, "IDLE", 7_200_000, "RETRYCOUNT", 1)
    for n in range(5):
        (event,) = weft.consume_sync(stream, "worker", member="a", lease=3600)
        assert event["n"] == n
        left = client.xpending_range("orders", "worker", "-", "+", 9, "plain")
        assert all(entry["time_since_delivered"] >= 7_200_000 for entry in left)
        assert weft.ack_sync(stream, "worker", event) == 1


def test_leases_of_which_others_acknowledged_everything(streams: Project, client: Any) -> None:
    """Also those of the member that asks: they filled the list of leases that ended."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(60)])
    log = log_of("orders")
    for member in "ab" * 15:
        log.lease("worker", member, 1, 0)
        entry = client.xpending_range("orders", "worker", "-", "+", 1, member)[0]["message_id"]
        client.xack("orders", "worker", entry)
    last = log.lease("worker", "c", 1, 3600)
    log.lease("worker", "a", 1, 3600)
    books = [client.hlen(log.keys.books("worker")[0]), client.hlen(log.keys.books("worker")[1])]
    assert books == [2, 2]
    assert log.settle("worker", [last.spans[0].first], token=last.token, member="c") == 1


def test_given_back_events_come_in_order(streams: Project, client: Any) -> None:
    """Their ids as texts are in another order."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(30)])
    weft.nack_sync("orders", "worker", weft.consume_sync("orders", "worker"))
    for start in range(0, 30, 5):
        assert numbers(weft.consume_sync("orders", "worker", 5, member=f"m{start}")) == [*range(start, start + 5)]


# ------------------------------------------------------------------------------------------------------------- settling


def test_the_name_of_what_was_given_back_is_nobodys(streams: Project) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    with pytest.raises(weft.SettingsError, match="cannot be 'weft:given-back'"):
        weft.consume_sync("orders", "worker", member="weft:given-back")


def test_an_ack_after_the_books_are_gone(streams: Project, client: Any) -> None:
    """It does not say that the member itself took the event away from itself."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": 0}, {"n": 1}])
    events = weft.consume_sync("orders", "worker", member="a")
    client.delete("weft:{orders}:held:worker")
    with pytest.raises(weft.LeaseLostError, match="their lease is gone"):
        weft.ack_sync("orders", "worker", events)
    held = client.xpending_range("orders", "worker", "-", "+", 1)[0]["message_id"]
    client.xclaim("orders", "worker", "plain", 0, [held])
    with pytest.raises(weft.LeaseLostError, match="member 'plain' holds them now"):
        weft.ack_sync("orders", "worker", events[:1])


def test_more_than_a_text_can_have(streams: Project, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(fields={"body": "string"})
    monkeypatch.setattr("weft.systems.redis.store._MOST_BYTES", 10_000)
    with pytest.raises(weft.SchemaError, match="may have 10,000 bytes, not 2"):
        weft.publish_sync("orders", [{"body": "x" * 1000} for _ in range(20)])
    weft.publish_sync("orders", {"body": "x" * 1000})
    assert client.xlen("orders") == 1


def test_a_key_that_is_no_stream_any_more_disturbs_no_other(streams: Project, client: Any) -> None:
    """All streams are watched together."""
    for name in ("orders", "others"):
        declare(name, fields={"n": "int64"})
        weft.publish_sync(name, {"n": 1})
    store = log_of("orders").store
    assert store.changed(None, 1).keys() == {"orders", "others"}
    client.delete("others")
    client.set("others", "text")
    before = store.changed(None, 1)
    entry = client.xadd("orders", {"n": 2})
    assert store.changed(before, 1) == {"orders": entry}
