"""Streams that other tools write and read too."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

import weft
from weft import DeclarationError, SchemaError, WeftError
from weft.engine.readers import stream_reader
from weft.engine.streaming.log_source import EventRows
from weft.project import Project
from weft.systems.stream_source import EVENT_TIME
from workers import declare, drain, log_of

FIELDS = {
    "n": "int32",
    "amount": "float64",
    "price": "decimal(10,2)",
    "ok": "bool",
    "day": "date",
    "at": "timestamp",
    "body": "json",
    "raw": "bytes",
    "note": "string",
}
FITS = {
    "n": ("7", 7),
    "amount": ("1.5", 1.5),
    "price": ("1.5", Decimal("1.50")),
    "ok": ("1", True),
    "at": ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
    "body": ('{"a": [1]}', {"a": [1]}),
    "raw": (b"\x00\xff\r\n", b"\x00\xff\r\n"),
    "note": ("é\r\n", "é\r\n"),
}
MISFITS = {
    "n": "3000000000",
    "amount": "nan",
    "price": "1.234",
    "ok": "perhaps",
    "day": "tomorrow",
    "at": "1769860800",
    "body": "{",
    "other": "text",
}


def test_entries_of_others(streams: Project, client: Any) -> None:
    declare(fields=FIELDS)
    client.xadd("orders", {name: text for name, (text, _) in FITS.items()})
    client.xadd("orders", MISFITS)
    client.xadd("orders", {"n": "1_000", "note": b"\xff"})
    first, second, third = weft.consume_sync("orders", "worker")
    for name, (_, value) in FITS.items():
        assert first[name] == value, name
    assert first["day"] is None
    assert first["_weft_publish_id"] is None
    assert abs(first["_weft_published_at"] - datetime.now(UTC)) < timedelta(minutes=5)
    assert {name: second[name] for name in MISFITS} == MISFITS
    assert (third["n"], third["note"]) == ("1_000", {"base64": "/w=="})
    assert weft.ack_sync("orders", "worker", [first, second, third]) == 3


def test_bytes_that_are_no_text_make_a_bad_event_of_their_own(streams: Project, client: Any) -> None:
    """The others are read, whoever reads. Nobody takes escaped bytes for the text of the field."""
    stream = declare(fields={"n": "int64", "note": "string"})
    weft.publish_sync(stream, {"n": 0, "note": "a"})
    client.xadd("orders", {"n": 1, "note": b"\xff\xfe"})
    weft.publish_sync(stream, {"n": 2, "note": "b"})
    ids = [str(event["_weft_rowid"]) for event in weft.consume_sync(stream, "worker")]
    for member in ({}, {"group": "g", "consumer": "c"}):
        assert weft.read_stream("default", stream, **member)["note"].to_list() == ["a", None, "b"]
        hint = "schema={'note': \"string\"} reads them as texts"
        with pytest.raises(weft.SchemaError, match=f"(?s)entry {ids[1]} of 'orders': 'note'.*{hint}"):
            weft.read_stream("default", stream, on_error="raise", **member)
        texts = weft.read_stream("default", stream, on_error="raise", schema={"note": "string"}, **member)
        assert texts["note"].to_list() == ["a", '{"base64": "//4="}', "b"]
    log = log_of(stream)
    rows = EventRows("orders", replace(stream_reader(stream), time_column=EVENT_TIME), 3, log=log).split()
    assert rows.gather()["note"].to_pylist() == ["a", "b"]
    (letter,) = rows.bad
    assert letter.offset == ids[1]
    assert json.loads(letter.payload)["note"] == {"base64": "//4="}


def test_ours_are_read_by_others(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64", "ok": "bool"})
    declare("clicks", schema="web")
    given = weft.publish_sync("orders", [{"n": 1, "ok": True}, {"n": None, "more": [1]}])
    weft.publish_sync("clicks", {"page": "/"})
    (first, one), (_, two) = client.execute_command("XRANGE", "orders", "-", "+")
    assert (
        (one[b"n"], one[b"ok"]) == (b"1", b"true") if isinstance(one, dict) else one[:4] == [b"n", b"1", b"ok", b"true"]
    )
    ms, seq = map(int, first.split(b"-"))
    assert given["first_rowid"] == ms << 20 | seq
    assert b"n" not in two
    assert client.xlen("web:clicks") == 1
    assert log_of("orders").store.names() == [("events", "orders"), ("web", "clicks")]


def test_subscribers_see_entries_of_others(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})

    async def listen() -> Any:
        async with weft.subscribe("orders") as live:
            task = asyncio.ensure_future(anext(live))
            await asyncio.sleep(0)
            await asyncio.to_thread(client.xadd, "orders", {"n": 5})
            return await asyncio.wait_for(task, 30)

    assert asyncio.run(listen())["n"] == 5


def test_an_id_without_an_offset_is_named(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    client.xadd("orders", {"n": 1}, id="5-1048576")
    with pytest.raises(SchemaError, match="5-1048576"):
        drain("orders")
    client.xdel("orders", "5-1048576")
    client.xadd("orders", {"n": 2})
    assert [event["n"] for event in drain("orders", "other")] == [2]


def test_a_full_millisecond_goes_over_into_the_next(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    ahead = 1000 * (client.time()[0] + 3600)
    client.xadd("orders", {"n": -1}, id=f"{ahead}-{2**20 - 3}")
    weft.publish_sync("orders", [{"n": n} for n in range(5)])
    assert [entry[0] for entry in client.xrange("orders")] == [
        b"%d-%d" % (ahead, 2**20 - 3),
        b"%d-%d" % (ahead, 2**20 - 2),
        b"%d-%d" % (ahead, 2**20 - 1),
        *(b"%d-%d" % (ahead + 1, n) for n in range(3)),
    ]
    assert [event["n"] for event in drain("orders")] == [-1, *range(5)]


def test_a_key_that_is_no_stream(streams: Project, client: Any) -> None:
    client.set("orders", "x")
    declare()
    for _ in range(2):
        with pytest.raises(DeclarationError, match="orders is a string"):
            weft.publish_sync("orders", {"n": 1})
    declare("refunds")
    weft.publish_sync("refunds", {"n": 1})
    client.delete("refunds")
    client.set("refunds", "x")
    with pytest.raises(weft.WeftError, match="not a stream"):
        weft.publish_sync("refunds", {"n": 2})
    with pytest.raises(weft.WeftError, match="WRONGTYPE") as refused:
        weft.consume_sync("refunds", "worker")
    assert "script" not in str(refused.value)


def test_old_entries_are_removed_by_their_age(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"}, retention={"max_age_days": 30})
    for days in (100, 40, 20, 0):
        client.xadd("orders", {"n": days}, id=f"{1000 * (client.time()[0] - days * 86_400)}-1")
    assert weft.trim_sync("orders") == 2
    assert [event["n"] for event in drain("orders")] == [20, 0]


# --------------------------------------------------------------------------------------------------------------- groups


def test_pending_entries_are_those_of_redis(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(5)])
    events = weft.consume_sync("orders", "worker", 3, member="a")
    assert client.xpending("orders", "worker")["consumers"] == [{"name": b"a", "pending": 3}]
    (group,) = client.xinfo_groups("orders")
    assert (group["name"], group["pending"], group["lag"]) == (b"worker", 3, 2)
    weft.ack_sync("orders", "worker", events[:1])
    weft.nack_sync("orders", "worker", events[1:2], delay=60)
    (found,) = weft.groups_sync("orders")
    assert (found["pending"], found["lag"], [m["pending"] for m in found["members"]]) == (2, 2, [1])
    client.xack(
        "orders", "worker", *(entry["message_id"] for entry in client.xpending_range("orders", "worker", "-", "+", 9))
    )
    assert [event["n"] for event in weft.consume_sync("orders", "worker", member="a")] == [3, 4]


def test_what_a_plain_client_left_is_taken_over(streams: Project, client: Any) -> None:
    """Once it is idle for as long as the lease that is asked for; before that it is that client's."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(3)])
    client.xgroup_create("orders", "worker", "0")
    client.xreadgroup("worker", "plain", {"orders": ">"}, count=2)
    assert [event["n"] for event in weft.consume_sync("orders", "worker", member="a", lease=3600)] == [2]
    held = client.xpending_range("orders", "worker", "-", "+", 9, "plain")
    client.execute_command(
        "XCLAIM", "orders", "worker", "plain", 0, *(e["message_id"] for e in held), "IDLE", 7_200_000
    )
    assert [event["n"] for event in weft.consume_sync("orders", "worker", member="b", lease=3600)] == [0, 1]
    with pytest.raises(weft.LeaseLostError, match="'b' holds them"):
        weft.ack_sync("orders", "worker", {"_weft_rowid": log_of("orders").read(0, 2**62, 1).columns[1][0]}, member="a")


def test_a_group_that_vanished_begins_anew(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 0})
    events = weft.consume_sync("orders", "worker", member="a")
    client.flushdb()
    with pytest.raises(weft.LeaseLostError):
        weft.ack_sync("orders", "worker", events)
    weft.publish_sync("orders", {"n": 1})
    assert [event["n"] for event in weft.consume_sync("orders", "worker", member="a")] == [1]
    client.xgroup_destroy("orders", "worker")
    assert [event["n"] for event in weft.consume_sync("orders", "worker", member="b")] == [1]


@pytest.mark.timing
def test_what_a_plain_client_acknowledged_leaves_nothing_behind(streams: Project, client: Any) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": n} for n in range(4)])
    events = weft.consume_sync("orders", "worker", member="a", lease=0.001)
    client.xack("orders", "worker", *(entry[0] for entry in client.xrange("orders")))
    assert weft.consume_sync("orders", "worker", member="b", wait=0.1) == []
    weft.reset_sync("orders", "worker")
    events = weft.consume_sync("orders", "worker", member="a")
    weft.nack_sync("orders", "worker", events, reason="no")
    client.xack("orders", "worker", *(entry[0] for entry in client.xrange("orders")))
    weft.publish_sync("orders", {"n": 4})
    last = weft.consume_sync("orders", "worker", member="b")
    assert [event["n"] for event in last] == [4]
    assert weft.ack_sync("orders", "worker", last) == 1
    weft.publish_sync("orders", {"n": 5})
    client.xreadgroup("worker", "plain", {"orders": ">"})
    assert weft.consume_sync("orders", "worker", member="b") == []
    assert client.keys("weft:{orders}:*:worker") == []


def test_an_id_that_leaves_no_room(streams: Project, client: Any) -> None:
    """Nothing of a publish is stored, and those who publish to other streams at the same time are not disturbed."""
    declare(fields={"n": "int64"})
    declare("others", fields={"n": "int64"})
    client.xadd("orders", {"n": "1"}, id=f"{2**43 - 10}-0")

    async def publish_both() -> list[Any]:
        publishes = [weft.publish(name, {"n": n}) for n in range(20) for name in ("orders", "others")]
        return await asyncio.gather(*publishes, return_exceptions=True)

    outcomes = asyncio.run(publish_both())
    assert all(isinstance(each, WeftError) and "NOTSTORED the last id of orders" in str(each) for each in outcomes[::2])
    assert (client.xlen("orders"), client.xlen("others")) == (1, 20)


def test_more_events_in_a_commit_than_a_millisecond_can_have(streams: Project, client: Any) -> None:
    """A last id whose millisecond is nearly full, ahead of the clock."""
    declare(fields={"n": "int64"})
    ahead = int(datetime.now(UTC).timestamp() * 1000) + 3_600_000
    client.xadd("orders", {"n": "0"}, id=f"{ahead}-{2**20 - 3}")
    result = weft.publish_sync("orders", [{"n": n} for n in range(1, 6)])
    assert result["last_rowid"] == (ahead + 1) << 20 | 2
    assert [event["n"] for event in drain("orders")] == [0, 1, 2, 3, 4, 5]


def test_entries_that_pretend_to_be_ours(streams: Project, client: Any) -> None:
    """They are events like others, and stop nobody."""
    declare(fields={"n": "int64", "body": "json"})
    for fields in (
        {"n": 0, "body": "[" * 100_000},
        {"n": 1, "_weft_publish_id": b"\xff"},
        {"n": 2, "_weft_publish_id": "p", "_weft_extra": "{"},
        {"n": 3, "_weft_publish_id": "p", "_weft_extra": "[1]"},
        {"n": 4, "_weft_publish_id": "p", "_weft_extra": '{"_weft_rowid": 123}'},
        {"n": 5, "_weft_rowid": "123", "_weft_published_at": "never"},
        {"n": 6, "_weft_publish_id": "p", "body": r'"\ud800"'},
        {"n": 7, "_weft_publish_id": "p", "_weft_extra": r'{"a": "\ud800"}'},
        {"n": 8, "_weft_publish_id": "p", "body": "NaN"},
        {"n": 10**30, "_weft_publish_id": "p"},
    ):
        client.xadd("orders", fields)
    numbers = [*range(9), 10**30]
    events = weft.consume_sync("orders", "worker")
    assert [event["n"] for event in events] == numbers
    assert events[5]["_weft_rowid#2"] == "123"
    for member in ({}, {"group": "g", "consumer": "c"}):
        assert weft.read_stream("default", "orders", **member)["n"].to_list() == [*numbers[:-1], None]
    assert weft.ack_sync("orders", "worker", events) == 10


@pytest.mark.parametrize("system", ["redis", "redis-cluster"], indirect=True)
def test_fields_of_one_name(streams: Project, client: Any) -> None:
    """Each is kept, also where names are alike only as texts."""
    declare(fields={"n": "int64"})
    words = ["n", 1, "n", 2, "x", "a", "x", "b", b"\xff", "c", r"\xff", "d"]
    client.execute_command("XADD", "orders", "*", *words)
    (event,) = weft.consume_sync("orders", "worker")
    expected = {"n": 1, "n#2": "2", "x": "a", "x#2": "b", r"\xff": "c", r"\xff#2": "d"}
    assert {name: value for name, value in event.items() if not name.startswith("_weft_")} == expected


def test_a_key_of_ours_that_is_something_else(streams: Project, client: Any) -> None:
    """It is found before anything is written, so that nothing is stored twice by those who try each publish alone."""
    declare(fields={"n": "int64"})
    keyed = declare("keyed", fields={"n": "int64"}, idempotency_key="n")
    client.set(log_of(keyed).keys.seen, "mine")

    async def publish_both() -> list[Any]:
        publishes = [weft.publish(name, {"n": n}) for n in range(20) for name in ("orders", "keyed")]
        return await asyncio.gather(*publishes, return_exceptions=True)

    outcomes = asyncio.run(publish_both())
    assert all(isinstance(each, WeftError) and "is a string, not a zset" in str(each) for each in outcomes[1::2])
    assert (client.xlen("orders"), client.xlen("keyed")) == (20, 0)


def test_a_reader_needs_no_right_to_write(streams: Project, system: Any, client: Any) -> None:
    stream = declare(fields={"n": "int64"})
    weft.publish_sync(stream, [{"n": 1}, {"n": 2}])
    weft.consume_sync(stream, "other", 1)
    rights = "+@connection +@read +@scripting +info +time"
    client.execute_command("ACL", "SETUSER", "reader", "reset", "on", ">hunter2", "~*", *rights.split())
    try:
        reader = weft.connect(system.url.replace("redis://", "redis://reader:hunter2@"))

        async def first() -> Any:
            async with weft.subscribe(stream, since="start", connection=reader) as live:
                return (await anext(live))["n"]

        assert weft.read_stream(reader, stream)["n"].to_list() == [1, 2]
        assert [each["pending"] for each in weft.groups_sync(stream, connection=reader)] == [1]
        assert asyncio.run(first()) == 1
        with pytest.raises(weft.WeftError):
            weft.publish_sync(stream, {"n": 3}, connection=reader)
    finally:
        client.execute_command("ACL", "DELUSER", "reader")
