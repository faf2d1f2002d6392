"""Streams as Spark DataFrames."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.errors import SettingsError
from weft.systems.redis.pages import partition
from weft.systems.redis.wire import Wire

Add = Callable[..., list[str]]
START = 1704067200000


@pytest.fixture
def events(url: str, client: Any) -> list[str]:
    """A thousand entries over a hundred seconds, ten of them in each of a hundred milliseconds."""
    ids = [f"{START + (i // 10) * 1000}-{i % 10 + 5}" for i in range(1000)]
    pipeline = client.pipeline(transaction=False)
    for i, each in enumerate(ids):
        pipeline.xadd("events", {"n": i, "at": "2024-01-01T00:00:00Z"}, id=each)
    pipeline.execute()
    return ids


def test_a_frame(spark: Any, url: str, add: Add) -> None:
    add("events", {"n": 1, "b": b"\xff"}, {"n": 2})
    frame = weft.read_stream(url, "events", schema={"n": "int64", "b": "bytes"}, to="spark")
    assert [(row.n, row.b) for row in frame.collect()] == [(1, bytearray(b"\xff")), (2, None)]


@pytest.mark.parametrize("read", [weft.read_stream, weft.scan_stream])
def test_values_are_the_same_in_every_zone(plain_spark: Any, url: str, add: Add, read: Any) -> None:
    """A time without a zone is in none, whatever zone the session has."""
    add("events", {"t": "2024-07-01T12:00:00", "z": "2024-07-01T12:00:00", "u": 2**64 - 1, "n": 2**53 + 1}, {"u": 1})
    add("events", {"u": 2, "id": "no", "": "nameless"})
    schema = {"t": pa.timestamp("ns"), "z": "timestamp", "u": pa.uint64(), "n": "int64", "id": "uuid", "": "string"}
    plain_spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        frame = read(url, "events", schema=schema, to="spark")
        texts = frame.toDF("_id", "_ts", *"tzunie").selectExpr(*(f"string({name})" for name in "tzunie")).collect()
    finally:
        plain_spark.conf.set("spark.sql.session.timeZone", "UTC")
    noon, evening = "2024-07-01 12:00:00", "2024-07-01 21:00:00"
    assert sorted(map(tuple, texts), key=repr) == [
        (noon, evening, str(2**64 - 1), str(2**53 + 1), None, None),
        (None, None, "1", None, None, None),
        (None, None, "2", None, None, "nameless"),
    ]


@pytest.mark.full
def test_a_scan_in_ranges(spark: Any, url: str, events: list[str]) -> None:
    frame = weft.scan_stream(url, "events", schema={"n": "int64", "at": "timestamp"}, to="spark")
    assert [each.dataType.simpleString() for each in frame.schema] == ["string", "bigint", "bigint", "timestamp"]
    assert frame.rdd.getNumPartitions() == 2
    rows = frame.collect()
    assert sorted(row.n for row in rows) == list(range(1000))
    assert [row._id for row in sorted(rows, key=lambda row: row.n)] == events
    moment = START + 50_000
    assert frame.where(f"_ts >= {moment}").count() == 500
    assert frame.where(f"_ts < {moment} and n % 2 = 0").count() == 250
    assert frame.where(f"_id = '{events[3]}'").select("n").collect() == [(3,)]
    assert frame.where(f"_id >= '{moment}'").count() == 500
    assert frame.where("_id > '2'").count() == 0
    assert frame.where(f"_ts = {START + 1}").count() == 0


def test_two_filters_of_one_query(spark: Any, url: str, events: list[str]) -> None:
    frame = weft.scan_stream(url, "events", schema={"n": "int64"}, to="spark")
    both = frame.where(f"_ts = {START}").union(frame.where(f"_ts > {START}"))
    assert both.count() == frame.count()


def test_a_scan_without_a_schema(spark: Any, url: str, add: Add) -> None:
    add("events", {"a": 1, "_id": "mine"}, {"b": b"\xff"})
    frame = weft.scan_stream(url, "events", to="spark")
    assert frame.columns == ["_id", "_ts", "a", "_id#2", "b"]
    assert [tuple(row)[2:] for row in frame.orderBy("_id").collect()] == [("1", "mine", None), (None, None, b"\xff")]


def test_nothing_there(spark: Any, url: str) -> None:
    assert weft.scan_stream(url, "events", schema={"n": "int64"}, to="spark").collect() == []
    frame = weft.read_stream(url, "events", schema={"n": pa.uint8(), "t": pa.timestamp("us")}, to="spark")
    assert frame.collect() == []
    assert [each.dataType.simpleString() for each in frame.schema][2:] == ["smallint", "timestamp_ntz"]
    for options in ({"count": 5}, {"start_id": "$"}):
        with pytest.raises(SettingsError):
            weft.scan_stream(url, "events", to="spark", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [1, 3, 7, 5000])
@pytest.mark.parametrize("bounds", [("-", "+"), (f"{START + 1000}-7", f"({START + 90_000}-9"), ("0", "5")])
def test_ranges_hold_every_entry_once(
    url: str, client: Any, events: list[str], wanted: int, bounds: tuple[str, str]
) -> None:
    wire = Wire(weft.connect(url=url), "events")  # type: ignore[arg-type]
    found = partition(wire, "events", *bounds, wanted)
    wire.close()
    assert len(found) <= wanted
    held = [each.decode() for part in found for each, _ in client.xrange("events", *part)]
    assert held == [each.decode() for each, _ in client.xrange("events", *bounds)]


def test_an_odd_event_of_a_declared_stream(spark: Any, streams: Any) -> None:
    @weft.stream(fields={"n": "int64", "_id": "int64"})
    def sales():
        pass

    weft.publish_sync("sales", [{"n": 1, "_id": 2}, {"n": "three", "_id": "four"}])
    scan = partial(weft.scan_stream, "default", "sales", to="spark", include_timestamp=False)
    assert [row.n for row in scan().orderBy("_id").collect()] == [1, None]
    frame = scan(schema={"n": "string", "_id": "string"})
    assert [tuple(row)[1:] for row in frame.orderBy("n").collect()] == [("1", "2"), ("three", "four")]
    assert [row.n for row in scan(schema={"n": "int64"}).orderBy("_id").collect()] == [1, None]
    with pytest.raises(Exception, match="CAST_INVALID_INPUT"):
        scan(schema={"n": "int64"}, on_error="raise").collect()


def test_a_declared_stream(spark: Any, streams: Any) -> None:
    @weft.stream(fields={"n": "int64", "at": "timestamp", "text": "string"})
    def sales():
        pass

    at = datetime(2026, 1, 2, tzinfo=UTC)
    weft.publish_sync("sales", [{"n": n, "at": at, "text": str(n), "more": {"x": n}} for n in range(20)])
    frame = weft.scan_stream("default", "sales", schema={"text": "int32", "n": "string", "more": "string"}, to="spark")
    assert frame.columns == ["_id", "_ts", "text", "n", "more"]
    rows = sorted(frame.collect(), key=lambda row: row.text)
    assert [(row.text, row.n) for row in rows] == [(n, str(n)) for n in range(20)]
    ids = weft.read_stream("default", "sales")["_id"].to_list()
    assert [row._id for row in rows] == ids
    part = weft.scan_stream("default", "sales", start_id=ids[5], end_id=ids[6], to="spark")
    assert sorted(row.n for row in part.collect()) == [5, 6]
    assert abs(rows[0]._ts / 1000 - datetime.now(UTC).timestamp()) < 3600
