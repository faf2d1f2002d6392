"""`publish`: one event or many, all or nothing, in order, and the caller's data is left alone."""

from __future__ import annotations

import collections
import copy
import types
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import weft
from weft import NotFoundError, SchemaError, WeftError
from weft.project import Project
from workers import declare, drain, plain, rowids


def test_one_event(streams: Project) -> None:
    declare()
    result = weft.publish_sync("orders", {"id": 1, "action": "click"})
    (event,) = drain("orders")
    assert plain(event) == {"id": 1, "action": "click"}
    assert event["_weft_publish_id"] == result["publish_id"]
    assert event["_weft_rowid"] == result["first_rowid"] == result["last_rowid"]


def test_result(streams: Project) -> None:
    declare()
    result = weft.publish_sync("orders", [{"id": 1}, {"id": 2}])
    assert list(result) == [
        "status",
        "stream",
        "rows_received",
        "publish_id",
        "triggered_models",
        "first_rowid",
        "last_rowid",
        "rows_deduplicated",
        "rows_quarantined",
    ]
    assert result["status"] == "accepted"
    assert result["stream"] == "orders"
    assert result["rows_received"] == 2
    assert str(uuid.UUID(result["publish_id"])) == result["publish_id"]
    assert uuid.UUID(result["publish_id"]).version == 4
    assert result["triggered_models"] == []
    assert (result["rows_deduplicated"], result["rows_quarantined"]) == (0, 0)
    events = drain("orders")
    assert (events[0]["_weft_rowid"], events[1]["_weft_rowid"]) == (result["first_rowid"], result["last_rowid"])
    assert weft.publish_sync("orders", {"id": 3})["publish_id"] != result["publish_id"]


async def test_async(streams: Project) -> None:
    made = declare()
    assert (await weft.publish("orders", {"id": 1}))["rows_received"] == 1
    assert (await weft.publish(made, [{"id": 2}, {"id": 3}]))["rows_received"] == 2
    assert (await weft.publish(made, []))["first_rowid"] is None
    events = await weft.consume("orders", "c")
    assert [event["id"] for event in events] == [1, 2, 3]


def test_by_function(streams: Project) -> None:
    @weft.stream(name="orders")
    def made() -> None: ...

    weft.publish_sync(made, {"id": 1})
    assert [event["id"] for event in drain(made)] == [1]
    assert [event["id"] for event in drain("orders", "other")] == [1]


def test_declared_fields_in_any_order(streams: Project) -> None:
    """Values go to columns by name, whatever the order of keys in each event."""
    declare(fields={"a": "string", "b": "string", "c": "string"})
    weft.publish_sync("orders", [{"c": "c", "a": "a", "b": "b"}, {"b": "B", "c": "C", "a": "A"}, {"b": "only"}])
    first, second, third = drain("orders")
    assert plain(first) == {"a": "a", "b": "b", "c": "c"}
    assert plain(second) == {"a": "A", "b": "B", "c": "C"}
    assert {key: third[key] for key in "abc"} == {"a": None, "b": "only", "c": None}


@pytest.mark.parametrize("empty", [[], (), iter(())], ids=["list", "tuple", "iterator"])
def test_nothing(streams: Project, empty: Any) -> None:
    declare()
    result = weft.publish_sync("orders", empty)
    assert (result["status"], result["rows_received"]) == ("accepted", 0)
    assert (result["first_rowid"], result["last_rowid"]) == (None, None)
    assert drain("orders") == []


@pytest.mark.parametrize("event", [{}, {"a": None}], ids=repr)
def test_empty_event(streams: Project, event: dict[str, Any]) -> None:
    """An event without a value is an event all the same."""
    declare()
    assert weft.publish_sync("orders", [event, event])["rows_received"] == 2
    weft.publish_sync("orders", event)
    assert [plain(event) for event in drain("orders")] == [{}, {}, {}]


CONTAINERS: list[Callable[[], Any]] = [
    lambda: ({"n": n} for n in range(3)),
    lambda: tuple({"n": n} for n in range(3)),
    lambda: collections.deque({"n": n} for n in range(3)),
    lambda: {n: {"n": n} for n in range(3)}.values(),
    lambda: [collections.OrderedDict(n=n) for n in range(3)],
    lambda: [types.MappingProxyType({"n": n}) for n in range(3)],
    lambda: [collections.ChainMap({"n": n}) for n in range(3)],
]


def test_many_in_any_container(streams: Project) -> None:
    declare()
    for events in CONTAINERS:
        assert weft.publish_sync("orders", events())["rows_received"] == 3
    assert [event["n"] for event in drain("orders")] == [0, 1, 2] * len(CONTAINERS)


NOT_DICTS: list[tuple[Any, int | None]] = [
    ("text", None),
    (b"bytes", None),
    (5, None),
    (None, None),
    (["text"], 0),
    ([{"n": 1}, ["n", 1]], 1),
    ([{"n": 1}, None], 1),
    ([[("n", 1)]], 0),
]


def test_not_dicts(streams: Project) -> None:
    declare()
    for events, index in NOT_DICTS:
        with pytest.raises(SchemaError) as caught:
            weft.publish_sync("orders", events)
        assert caught.value.index == index
        assert "'orders'" in str(caught.value)
    assert drain("orders") == []


def test_callers_data_is_left_alone(streams: Project) -> None:
    declare(fields={"id": "int64", "at": "timestamp", "price": "decimal(10,2)", "doc": "json"}, idempotency_key="id")
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    events = [
        {"id": n, "at": "2026-01-31T12:00:00+02:00", "price": "1.5", "doc": {"deep": [1, {"x": None}]}, "extra": moment}
        for n in range(3)
    ]
    before, keys = copy.deepcopy(events), [list(event) for event in events]
    weft.publish_sync("orders", events)
    weft.publish_sync("orders", events[0])
    with pytest.raises(SchemaError):
        weft.publish_sync("orders", [*events, {"id": 4, "doc": float("nan")}])
    assert events == before
    assert [list(event) for event in events] == keys
    event = drain("orders")[0]
    event["doc"]["deep"].append("changed")
    assert events == before


RESERVED = [
    "_weft_rowid",
    "_weft_published_at",
    "_weft_publish_id",
    "_weft_extra",
    "_weft_",
    "_weft_anything",
    "_WEFT_ROWID",
    "_Weft_x",
]


def test_reserved_keys_are_refused(streams: Project) -> None:
    declare(fields={"id": "int64"})
    for key in RESERVED:
        with pytest.raises(SchemaError) as caught:
            weft.publish_sync("orders", [{"id": 1}, {"id": 2, key: 5}])
        assert (caught.value.index, caught.value.field, caught.value.value) == (1, key, 5)
        assert key in str(caught.value)
    weft.publish_sync("orders", {"id": 3, "weft_ok": 1, "_wef": 2})
    (event,) = drain("orders")
    assert plain(event) == {"id": 3, "weft_ok": 1, "_wef": 2}


def test_a_consumed_event_cannot_be_published_as_it_is(streams: Project) -> None:
    declare()
    weft.publish_sync("orders", {"id": 1})
    (event,) = drain("orders")
    with pytest.raises(SchemaError, match="_weft_"):
        weft.publish_sync("orders", event)
    weft.publish_sync("orders", plain(event))


def test_all_or_nothing(streams: Project) -> None:
    declare(fields={"id": "int64", "name": "string"}, validate_schema=True)
    good = [{"id": n, "name": "x"} for n in range(50)]
    for index in (0, 17, 49):
        bad = [dict(event) for event in good]
        bad[index]["id"] = "seven"
        with pytest.raises(SchemaError) as caught:
            weft.publish_sync("orders", bad)
        error = caught.value
        assert isinstance(error, ValueError)
        assert (error.index, error.field, error.value) == (index, "id", "seven")
        assert f"Event {index} " in str(error)
        assert "'id'" in str(error)
        assert "'seven'" in str(error)
    weft.publish_sync("orders", good)
    assert [event["id"] for event in drain("orders")] == list(range(50))


def test_the_error_shows_little_of_a_long_value(streams: Project) -> None:
    declare(fields={"id": "int64"}, validate_schema=True)
    with pytest.raises(SchemaError) as caught:
        weft.publish_sync("orders", {"id": "x" * 1_000_000})
    assert len(str(caught.value)) < 1_000


async def test_all_or_nothing_async(streams: Project) -> None:
    declare(fields={"id": "int64"}, on_schema_drift="reject")
    with pytest.raises(SchemaError) as caught:
        await weft.publish("orders", [{"id": 1}, {"id": 2, "other": 5}])
    assert (caught.value.index, caught.value.field, caught.value.value) == (1, "other", 5)
    assert await weft.consume("orders", "c") == []


def test_order(streams: Project) -> None:
    """Offsets grow, within a publish and from one to the next."""
    declare()
    expected = []
    for batch in range(10):
        events = [{"n": batch * 100 + n} for n in range(batch * 7 % 30)]
        weft.publish_sync("orders", events)
        expected += [event["n"] for event in events]
    events = drain("orders")
    assert [event["n"] for event in events] == expected
    assert rowids(events) == sorted(set(rowids(events)))
    moments = [event["_weft_published_at"] for event in events]
    assert moments == sorted(moments)


@pytest.mark.brief("sqlite", "postgres")
def test_a_large_publish(streams: Project) -> None:
    declare(fields={"n": "int64", "text": "string"})
    result = weft.publish_sync("orders", ({"n": n, "text": f"text {n}"} for n in range(30_000)))
    assert result["rows_received"] == 30_000
    events = drain("orders", batch_size=10_000)
    assert [event["n"] for event in events] == list(range(30_000))
    assert all(event["text"] == f"text {event['n']}" for event in events)


def test_metadata(streams: Project) -> None:
    declare()
    before = datetime.now(UTC) - timedelta(seconds=5)
    result = weft.publish_sync("orders", [{"n": 1}, {"n": 2}])
    after = datetime.now(UTC) + timedelta(seconds=5)
    for event in drain("orders"):
        assert type(event["_weft_rowid"]) is int
        assert event["_weft_publish_id"] == result["publish_id"]
        assert event["_weft_published_at"].tzinfo is UTC
        assert before < event["_weft_published_at"] < after
        assert "_weft_extra" not in event


def test_unknown_stream(streams: Project) -> None:
    declare("user_events")
    with pytest.raises(NotFoundError, match="Did you mean 'user_events'"):
        weft.publish_sync("user_event", {"id": 1})
    for wrong in (5, None, lambda: None, ["user_events"]):
        with pytest.raises(WeftError, match="stream"):
            weft.publish_sync(wrong, {"id": 1})


def test_two_streams_do_not_mix(streams: Project) -> None:
    for name in ("orders", "order_s", "orders-2"):
        declare(name)
        weft.publish_sync(name, {"from": name})
    declare("same", schema="one")
    weft.publish_sync("same", {"from": "one.same"})
    for name in ("orders", "order_s", "orders-2"):
        assert [event["from"] for event in drain(name)] == [name]
    assert [event["from"] for event in drain("same")] == ["one.same"]


def test_offsets_are_not_reused_after_all_events_are_gone(streams: Project) -> None:
    declare()
    last = weft.publish_sync("orders", [{"n": n} for n in range(5)])["last_rowid"]
    weft.trim_sync("orders", before=last + 1)
    assert weft.publish_sync("orders", {"n": 5})["first_rowid"] > last
    weft.streams.close(streams)
    last = weft.publish_sync("orders", {"n": 6})["last_rowid"]
    weft.trim_sync("orders", before=last + 1)
    weft.streams.close(streams)
    assert weft.publish_sync("orders", {"n": 7})["first_rowid"] > last


def test_a_failed_publish_leaves_no_column_behind(streams: Project) -> None:
    """What a refused event looked like must not decide the types of those that come after."""
    declare()
    with pytest.raises(SchemaError):
        weft.publish_sync("orders", {"price": "\ud800"})
    with pytest.raises(SchemaError):
        weft.publish_sync("orders", [{"price": "cheap"}, {"_weft_x": 1}])
    weft.publish_sync("orders", {"price": 1.5})
    assert str(log_fields("orders")["price"]) == "float64"


def log_fields(stream: str) -> dict[str, Any]:
    from workers import log_of

    return log_of(stream).fields(fresh=True)
