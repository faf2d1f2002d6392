"""Frames of declared streams, on every system that holds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import polars as pl
import pytest

import weft
from weft.dataframes.log_feed import LogGroupFeed, LogRangeFeed
from weft.errors import ConnectionFailedError, LeaseLostError, NotFoundError, SchemaError, SettingsError
from weft.streams import Stream
from workers import declare

ALL = pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql", "redis"], indirect=True)
FIELDS = {"user_id": "string", "amount": "decimal(10,2)", "n": "int64", "at": "timestamp?", "more": "json?"}


@pytest.fixture
def sales(streams: Any) -> Stream:
    @weft.stream(fields=FIELDS)
    def sales():
        pass

    assert isinstance(sales, Stream)
    return sales


def publish(stream: Stream, numbers: range) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    events = [{"user_id": f"u{n}", "amount": n, "n": n, "at": at, "more": {"k": [n]}} for n in numbers]
    weft.publish_sync(stream, events)


def test_a_range(sales: Stream) -> None:
    before = datetime.now(UTC).timestamp() * 1000 - 60_000
    publish(sales, range(100))
    frame = weft.read_stream("default", "sales", include_sequence=True)
    assert frame.columns == ["_id", "_ts", "_seq", *FIELDS]
    assert frame["n"].to_list() == list(range(100))
    assert frame["amount"][7] == Decimal("7.00")
    assert frame["at"][0] == datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    assert frame["more"][7].replace(" ", "") == '{"k":[7]}'
    assert frame["_id"].dtype == pl.String
    assert before < frame["_ts"].min() < before + 120_000  # type: ignore[operator]
    ids = frame["_id"].to_list()
    part = weft.read_stream("default", sales, start_id=ids[10], end_id=ids[12], schema={"n": "string", "x": "int64"})
    assert part.drop("_ts").rows() == [(ids[i], str(i), None) for i in (10, 11, 12)]
    assert weft.read_stream("default", "sales", count=3)["n"].to_list() == [0, 1, 2]
    assert len(weft.read_stream("default", "sales", start_id="$")) == 0
    assert weft.read_stream("default", "sales", start_id=f"({ids[97]}")["n"].to_list() == [98, 99]


@ALL
@pytest.mark.parametrize("member", [{}, {"group": "g", "consumer": "c"}], ids=["alone", "group"])
def test_a_frame_without_events_has_the_declared_columns(sales: Stream, member: dict[str, Any]) -> None:
    """As one with events has them; nobody has published yet, or nothing new came."""
    empty = weft.read_stream("default", "sales", **member)
    with weft.iter_stream("default", "sales", yield_on_idle=True, block_ms=1, **member) as batches:
        assert next(batches).schema == empty.schema
    if not member:
        assert weft.scan_stream("default", "sales").collect_schema() == empty.schema
    publish(sales, range(2))
    full = weft.read_stream("default", "sales", auto_ack=bool(member), **member)
    assert full.schema == empty.schema
    assert full.columns == ["_id", "_ts", *FIELDS]
    start = {} if member else {"start_id": "$"}
    assert weft.read_stream("default", "sales", **start, **member).schema == empty.schema
    pandas = weft.read_stream("default", "sales", to="pandas", id_column="amount", **start, **member)
    assert [*pandas.columns] == ["amount", "_ts", "user_id", "amount#2", *list(FIELDS)[2:]]


@ALL
@pytest.mark.parametrize("member", [{}, {"group": "g", "consumer": "c"}], ids=["alone", "group"])
def test_a_declared_field_that_has_no_column_yet(streams: Any, member: dict[str, Any]) -> None:
    """A reader adds none to the table."""
    declare("events", fields={"n": "int64"}, max_new_columns=0)
    weft.publish_sync("events", [{"n": 1, "late": 5}, {"n": 2}])
    declare("events", fields={"n": "int64", "late": "int32", "later": "string"})
    frame = weft.read_stream("default", "events", auto_ack=bool(member), **member)
    assert frame.select("n", "late", "later").rows() == [(1, 5, None), (2, None, None)]
    empty = weft.read_stream("default", "events", **({} if member else {"start_id": "$"}), **member)
    assert frame.schema == empty.schema
    assert frame.schema == {"_id": pl.String, "_ts": pl.Int64, "n": pl.Int64, "late": pl.Int32, "later": pl.String}


@pytest.mark.parametrize("member", [{}, {"group": "g", "consumer": "c"}], ids=["alone", "group"])
def test_one_odd_event_does_not_change_the_type_of_a_declared_field(
    streams: Any, member: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    @weft.stream(fields={"n": "int64", "b": "bool", "_ts": "int64"}, on_schema_drift="evolve")
    def events():
        pass

    weft.publish_sync("events", [{"n": 1, "b": True, "_ts": 1}, {"n": 2, "nested": {"a": 1}}])
    weft.publish_sync("events", {"n": "three", "b": "no", "_ts": "four"})
    frame = weft.read_stream("default", "events", **member)
    fields = frame.select("n", "b", "_ts#2")
    assert fields.schema == {"n": pl.Int64, "b": pl.Boolean, "_ts#2": pl.Int64}
    assert fields.rows() == [(1, True, 1), (2, None, None), (None, None, None)]
    assert [each and each.replace(" ", "") for each in frame["nested"].to_list()] == [None, '{"a":1}', None]
    assert f"the entry {frame['_id'][2]} of 'events'" in caplog.text
    assert "'three'" not in caplog.text  # the first of a row is named
    assert "'four', which is no value of its declared type" in caplog.text
    with pytest.raises(SchemaError, match="declared type"):
        weft.read_stream("default", "events", on_error="raise", **member)
    # As another type it may fit, and the values of other events do not depend on it.
    schema = {"n": "string", "b": "int64", "_ts": "string"}
    other = weft.read_stream("default", "events", schema=schema, **member)
    assert other.select("n", "b", "_ts#2").rows() == [("1", 1, "1"), ("2", None, None), ("three", None, "four")]


def test_a_field_that_is_not_declared_has_every_value(streams: Any) -> None:
    @weft.stream(on_schema_drift="evolve")
    def events():
        pass

    weft.publish_sync("events", [{"n": 1, "b": b"\xff"}, {"n": 2}])
    weft.publish_sync("events", {"n": "three", "b": 3})
    frame = weft.read_stream("default", "events")
    assert frame["n"].to_list() == ["1", "2", "three"]
    assert frame["b"].to_list() == [b"\xff", None, b"3"]


@ALL
@pytest.mark.parametrize("first", ["float", "whole", "text"])
def test_whole_numbers_are_alike_in_every_read(streams: Any, first: str) -> None:
    """Whichever event came first, and so whether a column holds them or a text of JSON."""
    weft.stream(name="events")(lambda: None)
    numbers = [1.5, 2.0, 1e15, 2**53 + 1]
    before: list[dict[str, Any]] = {"float": [{"n": 0.5}], "whole": [{"n": 5}], "text": [{"n": "x"}]}[first]
    weft.publish_sync("events", before)
    weft.publish_sync("events", [{"n": number} for number in numbers])

    def reads(**options: Any) -> Iterator[list[Any]]:
        for number, member in enumerate(({}, {"group": "g", "consumer": "c"})):
            yield weft.read_stream("default", "events", **member, **options)["n"].to_list()
            if member:
                member["group"] = f"g{number}"
            with weft.iter_stream("default", "events", **member, **options) as batches:
                yield next(batches)["n"].to_list()
            if member:
                member["group"] = f"one by one {number}"
            with weft.iter_stream("default", "events", batch_size=1, **member, **options) as batches:
                yield [next(batches)["n"][0] for _ in range(5)]
        yield weft.scan_stream("default", "events", **options).collect()["n"].to_list()

    for found in reads():
        assert list(map(str, found[1:])) == ["1.5", "2.0", "1000000000000000.0", "9007199254740993"]
    for found in reads(schema={"n": "string"}):
        assert found[1:] == ["1.5", "2.0", "1000000000000000.0", "9007199254740993"]
    for found in reads(schema={"n": "int64"}):
        assert found[1:] == [None, 2, 10**15, 2**53 + 1]
    for found in reads(schema={"n": "float64"}):
        assert found[1:] == [1.5, 2.0, 1e15, float(2**53)]


def test_an_odd_event_of_another_page(streams: Any) -> None:
    @weft.stream(fields={"n": "int64"}, on_schema_drift="evolve")
    def events():
        pass

    weft.publish_sync("events", [{"n": n, "o": n} for n in range(50_001)])
    weft.publish_sync("events", [{"n": "three", "o": "three"}])
    frame = weft.read_stream("default", "events")
    assert frame["n"].to_list() == [*range(50_001), None]
    assert frame["o"].to_list() == [*map(str, range(50_001)), "three"]


def test_bytes_stay_bytes_whatever_they_are(streams: Any) -> None:
    @weft.stream(fields={"b": "bytes"})
    def events():
        pass

    weft.publish_sync("events", [{"b": b"text"}, {"b": b""}, {"b": None}])
    for member in ({}, {"group": "g", "consumer": "c"}):
        assert weft.read_stream("default", "events", **member)["b"].to_list() == [b"text", b"", None]


def test_a_scan(sales: Stream) -> None:
    publish(sales, range(50))
    lazy = weft.scan_stream("default", "sales", schema={"n": pl.Int64, "user_id": pl.String})
    assert lazy.filter(pl.col("n") > 47).select("user_id").collect().rows() == [("u48",), ("u49",)]


def test_iterating(sales: Stream, later: Callable[..., None]) -> None:
    publish(sales, range(25))
    seen: list[int] = []
    with weft.iter_stream("default", "sales", batch_size=10) as batches:
        for frame in batches:
            assert len(frame) <= 10
            seen += frame["n"].to_list()
            if len(seen) == 25:
                later(publish, sales, range(25, 30))
            if len(seen) == 30:
                break
    assert seen == list(range(30))


def test_a_group(sales: Stream) -> None:
    publish(sales, range(25))
    one: dict[str, Any] = {"group": "g", "consumer": "one"}
    first = weft.read_stream("default", "sales", count=10, **one)
    assert first["n"].to_list() == list(range(10))
    assert first["amount"].to_list()[:2] == [Decimal("0.00"), Decimal("1.00")]
    again = weft.read_stream("default", "sales", count=10, **one)
    assert again["_id"].to_list() == first["_id"].to_list()  # not acknowledged yet
    two = weft.read_stream("default", "sales", group="g", consumer="two", count=10, auto_ack=True)
    assert two["n"].to_list() == list(range(10, 20))
    assert weft.ack_entries("default", "sales", "g", first["_id"].to_list()) == 10
    assert weft.ack_entries("default", "sales", "g", []) == 0
    assert weft.read_stream("default", "sales", auto_ack=True, **one)["n"].to_list() == list(range(20, 25))
    (group,) = weft.groups_sync(sales)
    assert (group["lag"], group["pending"]) == (0, 0)
    with pytest.raises(LeaseLostError):
        weft.ack_entries("default", "sales", "g", [str(int(first["_id"][-1]) + 1_000_000)])


def test_iterating_as_a_group(sales: Stream) -> None:
    publish(sales, range(25))
    seen: list[int] = []
    options: dict[str, Any] = {"group": "g", "consumer": "c", "batch_size": 10, "block_ms": 50, "yield_on_idle": True}
    for frame in weft.iter_stream("default", "sales", auto_ack=True, schema={"n": pl.Int64}, **options):
        if len(frame) == 0:
            break
        seen += frame["n"].to_list()
    assert seen == list(range(25))


def test_what_only_redis_has(sales: Stream) -> None:
    one: dict[str, Any] = {"group": "g", "consumer": "one"}
    for options in ({"on_error": "quarantine"}, {"include_delivery": True, **one}, {"start_id": "$", **one}):
        with pytest.raises(SettingsError):
            weft.read_stream("default", "sales", **options)
    for read in (weft.read_stream, weft.iter_stream):
        with pytest.raises(SettingsError, match="claim_idle is 1,000,000,000,000"):
            read("default", "sales", claim_idle=10**12, **one)
    with pytest.raises(SettingsError, match="'1-1'"):
        weft.read_stream("default", "sales", start_id="1-1")
    with pytest.raises(NotFoundError, match=r"(?s)'sale'.*'sales'"):
        weft.read_stream(weft.connect(url="sqlite:///other.db"), "sale")
    with pytest.raises(SettingsError, match="needs Redis"):
        weft.read_streams(weft.connect(url="sqlite:///other.db"), "sal*")


def test_a_group_gives_what_a_plain_read_gives(streams: Any) -> None:
    """Also of JSON, and of values that fit no column."""

    @weft.stream(fields={**dict.fromkeys("ijk", "int64"), "f": "float64", "s": "string", "d": "decimal(10,2)"})
    def mixed():
        pass

    @weft.stream(fields={"j": "json", "t": "timestamp", "b": "bool"})
    def documents():
        pass

    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    rows: dict[str, list[dict[str, Any]]] = {
        "mixed": [
            {"i": 1, "f": 1.5, "s": "a", "d": "1.00", "other": 1},
            {"i": "1", "f": "1.5", "s": 5, "d": 1.005, "other": "1"},
            {"i": 1.0, "f": -0.0, "s": {"a": "é"}, "d": "x", "j": True, "other": True},
            {"i": 2**63, "f": 2**63 + 1, "s": True, "d": [1], "j": 7, "other": {"a": ["é", 1.0]}},
        ],
        "documents": [{"j": value, "t": at} for value in ("1", 1, 1.0, True, "é", {"é": ["a", 1]}, [], "null", None)],
    }
    rows["documents"] += [{"t": 5, "b": 1}, {"t": "soon", "b": "true"}]
    for name, events in rows.items():
        for event in events:
            weft.publish_sync(name, event)
        plain = weft.read_stream("default", name)
        grouped = weft.read_stream("default", name, group="g", consumer="c", auto_ack=True)
        assert grouped.columns == plain.columns
        assert grouped.rows() == plain.rows()
    assert weft.read_stream("default", "documents")["j"].to_list()[:2] == ['"1"', "1"]


def test_a_group_gives_what_a_plain_read_gives_of_values_that_are_older_than_their_column(streams: Any) -> None:
    late = {"i": "int64", "f": "float64", "b": "bool", "s": "string", "j": "json", "t": "timestamp", "mixed": "int64"}
    values = {"i": 5, "f": 1.5, "b": True, "s": "x", "j": "text", "t": "2026-01-02T03:04:05+00:00", "mixed": 1.5}
    declare("events", fields={"n": "int64"}, max_new_columns=0)
    weft.publish_sync("events", {"n": 0, **values})
    declare("events", fields={"n": "int64", **late})
    weft.publish_sync("events", {"n": 1, **values})
    plain = weft.read_stream("default", "events")
    grouped = weft.read_stream("default", "events", group="g", consumer="c")
    assert grouped.schema == plain.schema
    assert grouped.rows() == plain.rows()
    assert [plain.schema[name] for name in "ifb"] == [pl.Int64, pl.Float64, pl.Boolean]
    assert plain["i"].to_list() == [5, 5]
    assert plain["j"].to_list() == ['"text"', '"text"']


def test_a_key_is_not_a_stream_that_is_declared_elsewhere(sales: Stream, system: Any, open_system: Any) -> None:
    """And to read either writes nothing."""
    import redis

    publish(sales, range(2))
    with open_system("redis") as other, redis.Redis.from_url(other.url) as client:
        client.xadd("sales", {"n": "raw"})
        assert weft.read_stream(other.url, "sales")["n"].to_list() == ["raw"]
        assert weft.scan_stream(other.url, "sales", schema={"n": "string"}).collect()["n"].to_list() == ["raw"]
        assert next(iter(weft.iter_stream(other.url, "sales")))["n"].to_list() == ["raw"]
        # The stream itself is declared, wherever it is read; there is one event of it, which somebody else added.
        assert weft.read_stream(other.url, sales)["_id"].len() == 1
        assert client.keys() == [b"sales"]
    assert weft.read_stream(system.url, "sales")["n"].to_list() == [0, 1]


def test_blocking_for_new_events(sales: Stream, later: Callable[..., None]) -> None:
    """Events of another stream do not end the wait."""

    @weft.stream
    def others() -> None: ...

    publish(sales, range(3))

    def publish_both() -> None:
        for n in range(3):
            weft.publish_sync(others, {"n": n})
        publish(sales, range(3, 4))

    later(publish_both)
    assert weft.read_stream("default", "sales", start_id="$", block_ms=20_000)["n"].to_list() == [3]
    assert len(weft.read_stream("default", "sales", start_id="$", block_ms=1)) == 0


@pytest.mark.timing
def test_an_end_that_is_still_to_come(sales: Stream, later: Callable[..., None]) -> None:
    publish(sales, range(3))
    ids = weft.read_stream("default", "sales")["_id"].to_list()
    # On Redis an event of an hour later.
    end = str(int(ids[-1]) + (3_600_000 << 20 if int(ids[-1]) > 2**32 else 2))
    with weft.iter_stream("default", "sales", end_id=end, schema={"n": pl.Int64}) as batches:
        assert next(batches)["n"].to_list() == [0, 1, 2]
        publish(sales, range(3, 5))
        assert next(batches)["n"].to_list() == [3, 4]
        if end == str(int(ids[-1]) + 2):
            publish(sales, range(5, 7))
            assert list(batches) == []


def test_iterating_without_an_ack(sales: Stream) -> None:
    """No event comes twice in one iteration; the next one begins with what was not acknowledged."""
    publish(sales, range(25))
    options: dict[str, Any] = {"group": "g", "consumer": "c", "batch_size": 10, "schema": {"n": pl.Int64}}
    with weft.iter_stream("default", "sales", count=25, **options) as batches:
        frames = list(batches)
    assert [frame["n"].to_list() for frame in frames] == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert weft.ack_entries("default", "sales", "g", frames[0]["_id"]) == 10
    with weft.iter_stream("default", "sales", count=15, auto_ack=True, **options) as batches:
        assert sorted(n for frame in batches for n in frame["n"]) == list(range(10, 25))
    (group,) = weft.groups_sync(sales)
    assert (group["lag"], group["pending"]) == (0, 0)


@ALL
def test_a_read_begins_with_what_an_iteration_of_its_consumer_holds(sales: Stream) -> None:
    publish(sales, range(10))
    one: dict[str, Any] = {"group": "g", "consumer": "c"}
    with weft.iter_stream("default", "sales", batch_size=3, **one) as batches:
        assert [next(batches)["n"].to_list() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert weft.read_stream("default", "sales", count=4, **one)["n"].to_list() == [0, 1, 2, 3]
    held = weft.read_stream("default", "sales", **one)
    assert held["n"].to_list() == list(range(10))
    assert weft.read_stream("default", "sales", group="g", consumer="c#other")["n"].to_list() == []
    assert weft.ack_entries("default", "sales", "g", held["_id"]) == 10


def test_a_read_has_all_that_its_consumer_holds_under_one_lease(sales: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, the first could end before the frame is acknowledged."""
    publish(sales, range(10))
    one: dict[str, Any] = {"group": "g", "consumer": "c", "schema": {"n": pl.Int64}}
    with weft.iter_stream("default", "sales", batch_size=3, **one) as batches:
        assert [next(batches)["n"].to_list() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    leases = []
    confirm = LogGroupFeed.confirm

    def confirmed(feed: Any) -> None:
        leases.extend({event.lease.token for event in feed._unconfirmed})
        confirm(feed)

    monkeypatch.setattr(LogGroupFeed, "confirm", confirmed)
    assert weft.read_stream("default", "sales", auto_ack=True, **one)["n"].to_list() == list(range(10))
    assert len(leases) == 1
    (group,) = weft.groups_sync(sales)
    assert (group["lag"], group["pending"]) == (0, 0)


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "awaited"])
def test_an_iteration_reads_a_stream_that_was_created_again(
    sales: Stream, system: Any, is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if is_there:
        publish(sales, range(10))
    with weft.iter_stream("default", "sales", count=14, schema={"n": pl.Int64}) as batches:
        if not is_there:
            publish(sales, range(10))
        assert next(batches)["n"].to_list() == list(range(10))
        weft.delete_stream_sync(sales)
        publish(sales, range(100, 104))
        assert [n for frame in batches for n in frame["n"]] == list(range(100, 104))
    assert system.kind == "redis" or "read from its start" in caplog.text


@pytest.mark.parametrize("group", [{}, {"group": "g", "consumer": "c"}], ids=["alone", "group"])
def test_a_fetch_that_failed_can_be_made_again(
    sales: Stream, group: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(sales, range(10))
    if group:  # a backlog
        weft.read_stream("default", "sales", **group)
    kind, name = (LogGroupFeed, "_consume") if group else (LogRangeFeed, "_page")
    original, fails = getattr(kind, name), [True]

    def failing(*arguments: Any) -> Any:
        if fails:
            fails.pop()
            raise ConnectionFailedError("gone", is_transient=False)
        return original(*arguments)

    fetch = kind.fetch

    def fetch_again(*arguments: Any) -> Any:
        if fails:
            with pytest.raises(ConnectionFailedError):
                fetch(*arguments)
        return fetch(*arguments)

    monkeypatch.setattr(kind, name, failing)
    monkeypatch.setattr(kind, "fetch", fetch_again)
    with weft.iter_stream("default", "sales", count=10, schema={"n": pl.Int64}, **group) as batches:
        assert next(batches)["n"].to_list() == list(range(10))


def test_a_batch_that_nobody_took_is_given_back(sales: Stream) -> None:
    publish(sales, range(20))
    options: dict[str, Any] = {"group": "g", "batch_size": 5, "schema": {"n": pl.Int64}}
    weft.read_stream("default", "sales", group="g", consumer="c", count=20)
    with weft.iter_stream("default", "sales", consumer="c", auto_ack=True, **options) as batches:
        assert next(batches)["n"].to_list() == list(range(5))
    with weft.iter_stream("default", "sales", consumer="other", count=15, auto_ack=True, **options) as batches:
        assert sorted(n for frame in batches for n in frame["n"]) == list(range(5, 20))


def test_an_iteration_that_acknowledges_holds_no_more_of_its_backlog_than_it_yields(sales: Stream) -> None:
    """Else the lease of the last events ends before it is their turn, and another member gets them too."""
    publish(sales, range(20))
    weft.read_stream("default", "sales", group="g", consumer="c", count=20, claim_idle=1)
    options: dict[str, Any] = {"group": "g", "auto_ack": True, "batch_size": 5, "schema": {"n": pl.Int64}}
    with weft.iter_stream("default", "sales", consumer="c", count=15, **options) as batches:
        assert next(batches)["n"].to_list() == list(range(5))
        # Their first lease has ended, and nobody has them in hand.
        other = weft.read_stream("default", "sales", group="g", consumer="other", count=5, auto_ack=True)
        assert other["n"].to_list() == list(range(5, 10))
        assert [frame["n"].to_list() for frame in batches] == [list(range(10, 15)), list(range(15, 20))]
    (group,) = weft.groups_sync(sales)
    assert (group["lag"], group["pending"]) == (0, 0)


@pytest.mark.parametrize("group", [{}, {"group": "g", "consumer": "c", "auto_ack": True}], ids=["alone", "group"])
def test_iterating_goes_on_when_retention_overtakes_it(
    sales: Stream, group: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    publish(sales, range(5))
    with weft.iter_stream("default", "sales", batch_size=5, count=10, schema={"n": pl.Int64}, **group) as batches:
        assert next(batches)["n"].to_list() == list(range(5))
        publish(sales, range(5, 20))
        weft.trim_sync(sales, max_rows=5)
        assert [n for frame in batches for n in frame["n"]] == list(range(15, 20))
    assert "removed" in caplog.text


def test_a_loss_while_a_range_is_read_is_told(sales: Stream, caplog: pytest.LogCaptureFixture) -> None:
    publish(sales, range(20_000))
    with weft.iter_stream("default", "sales", batch_size=100, schema={"n": pl.Int64}) as batches:
        seen = next(batches)["n"].to_list()
        weft.trim_sync(sales, max_rows=100)
        while seen[-1] < 19_999:
            seen += next(batches)["n"].to_list()
    assert seen[:100] == list(range(100)) and seen[-100:] == list(range(19_900, 20_000)) and len(seen) < 20_000
    # Threads read ahead: there may be several gaps.
    told = sum(int(lost.replace(",", "")) for lost in re.findall(r"lost up to ([\d,]+) events", caplog.text))
    assert told >= 20_000 - len(seen)
