"""`scan_stream`, `read_streams`, `scan_streams`, `write_hashes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import weft
from weft.errors import NotFoundError, SchemaError, SettingsError, WeftError

Add = Callable[..., list[str]]


def test_a_query(url: str, add: Add) -> None:
    lazy = weft.scan_stream(url, stream="events", schema={"action": pl.Utf8, "value": pl.Float64})
    assert isinstance(lazy, pl.LazyFrame)
    add("events", *({"action": "ab"[i % 2], "value": i} for i in range(2000)))
    result = lazy.filter(pl.col("value") > 100).group_by("action").agg(pl.col("value").mean()).collect()
    assert dict(result.rows()) == {"a": 1050.0, "b": 1050.0}
    assert lazy.head(3).collect()["value"].to_list() == [0, 1, 2]
    assert lazy.select("action").tail(1).collect().rows() == [("b",)]
    assert lazy.select(pl.len()).collect().item() == 2000
    assert lazy.filter(pl.col("value") > 1997).select("action").collect().rows() == [("a",), ("b",)]


def test_only_the_columns_of_the_query_are_made(url: str, add: Add) -> None:
    add("events", {"a": "1", "b": "not a number"})
    lazy = weft.scan_stream(url, "events", schema={"a": "int64", "b": "int64"}, on_error="raise")
    assert lazy.select("a").collect().rows() == [(1,)]
    with pytest.raises(SchemaError, match="not a number"):
        lazy.collect()


def test_what_is_put_aside_does_not_depend_on_the_columns_of_a_query(url: str, add: Add) -> None:
    add("events", {"a": "1", "b": "not a number"}, {"a": "2", "b": "2"})
    lazy = weft.scan_stream(url, "events", schema={"a": "int64", "b": "int64"}, on_error="quarantine")
    for query in (lazy, lazy.select("a"), lazy.filter(pl.col("a") < 5).select("_id", "a")):
        assert query.collect()["a"].to_list() == [2]
    assert lazy.select(pl.len()).collect().item() == 1
    assert len(weft.read_stream(url, "events__quarantine")) == 1


def test_a_scan_without_a_schema(url: str, add: Add) -> None:
    add("events", {"a": 1}, {"b": 2})
    lazy = weft.scan_stream(url, "events", include_id=False, include_timestamp=False)
    assert lazy.collect_schema().names() == ["a", "b"]
    assert lazy.filter(pl.col("b") == "2").select("b").collect().rows() == [("2",)]


def test_a_filter_with_a_python_function(url: str, add: Add) -> None:
    pytest.importorskip("cloudpickle")
    add("events", {"a": 1, "b": "x"}, {"a": 2, "b": "y"})
    lazy = weft.scan_stream(url, "events", schema={"a": pl.Int64, "b": pl.String})
    is_even = pl.col("a").map_elements(lambda value: bool(value % 2 == 0), return_dtype=pl.Boolean)
    assert lazy.filter(is_even).select("b").collect().rows() == [("y",)]


def test_limits_of_a_scan(url: str, add: Add) -> None:
    ids = add("events", *({"n": i} for i in range(100)))
    lazy = weft.scan_stream(url, "events", schema={"n": "int64"}, start_id=ids[10], end_id=ids[50], count=20)
    assert lazy.collect()["n"].to_list() == list(range(10, 30))
    assert lazy.head(5).collect()["n"].to_list() == list(range(10, 15))
    with pytest.raises(SettingsError, match="LazyFrame"):
        weft.scan_stream(url, "events", to="pandas")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"keyword argument 'group'\. read_stream and iter_stream have it\."):
        weft.scan_stream(url, "events", group="analytics")  # type: ignore[call-arg]


def test_many_streams(url: str, add: Add, client: Any) -> None:
    for name in ("events:b", "events:a", "other"):
        add(name, *({"n": i, name[-1]: 1} for i in range(600)))
    client.set("events:text", "x")
    frame = weft.read_streams(url, "events:*", schema={"n": pl.Int64})
    assert frame.columns == ["_stream", "_id", "_ts", "n"]
    assert frame["_stream"].to_list() == ["events:a"] * 600 + ["events:b"] * 600
    assert frame["n"].to_list() == [*range(600)] * 2
    assert weft.read_streams(url, "events:*").columns == ["_stream", "_id", "_ts", "n", "a", "b"]
    assert len(weft.read_streams(url, "events:*", count=700)) == 700
    empty = weft.read_streams(url, "nothing:*", schema={"n": pl.Int64})
    assert empty.schema == {"_stream": pl.String, "_id": pl.String, "_ts": pl.Int64, "n": pl.Int64}
    lazy = weft.scan_streams(url, "events:*", schema={"n": pl.Int64})
    assert lazy.filter(pl.col("n") == 5).select("_stream", "n").collect().rows() == [("events:a", 5), ("events:b", 5)]
    with pytest.raises(SettingsError, match="pattern"):
        weft.read_streams(url, ["events:a"])  # type: ignore[arg-type]


def test_quarantines_are_no_streams_of_their_own(url: str, add: Add) -> None:
    add("events:a", {"n": "x"}, {"n": 1})
    for _ in range(2):
        frame = weft.read_streams(url, "events:*", schema={"n": pl.Int64}, on_error="quarantine")
        assert frame["n"].to_list() == [1]
    assert len(weft.read_stream(url, "events:a__quarantine")) == 1


def test_a_stream_that_is_named_like_a_quarantine(url: str, add: Add) -> None:
    add("q", {"n": "1"})
    add("q__quarantine", {"n": "2"})
    assert weft.read_streams(url, "q*")["n"].to_list() == ["1", "2"]
    add("p", {"n": "x"})
    weft.read_stream(url, "p", schema={"n": pl.Int64}, on_error="quarantine")
    assert weft.read_streams(url, "p*")["_stream"].to_list() == ["p"]
    assert weft.read_streams(url, "p__*")["_stream"].to_list() == ["p__quarantine"]


def test_hashes(url: str, client: Any) -> None:
    frame = pl.DataFrame({"sensor_id": ["a", "b"], "avg": [1.5, None], "count": [1, 2], "ok": [True, False]})
    client.hset("sensor:stats:b", mapping={"avg": "old", "other": "stays"})
    assert weft.write_hashes(url, frame, key_column="sensor_id", key_prefix="sensor:stats:") == 2
    assert client.hgetall("sensor:stats:a") == {b"avg": b"1.5", b"count": b"1", b"ok": b"true"}
    assert client.hgetall("sensor:stats:b") == {b"count": b"2", b"ok": b"false", b"other": b"stays"}


@pytest.mark.parametrize("kind", ["arrow", "pandas", "lazy"])
def test_hashes_of_other_frames(url: str, client: Any, kind: str) -> None:
    table = pa.table({"key": [f"k{i}" for i in range(2500)], "value": [bytes([255, i % 256]) for i in range(2500)]})
    frame = {"arrow": table, "pandas": table.to_pandas(), "lazy": pl.from_arrow(table).lazy()}[kind]  # type: ignore[union-attr]
    assert weft.write_hashes(url, frame) == 2500
    assert client.dbsize() == 2500
    assert client.hgetall("k2499") == {b"value": bytes([255, 2499 % 256])}


def test_hashes_that_cannot_be(url: str, client: Any) -> None:
    frame = pl.DataFrame({"id": ["a", None], "list": [[1], [2]]})
    with pytest.raises(NotFoundError, match=r"(?s)'ids'.*'id'"):
        weft.write_hashes(url, frame, key_column="ids")
    with pytest.raises(SchemaError, match="Row 1"):
        weft.write_hashes(url, frame, key_column="id")
    with pytest.raises(WeftError, match="'list'"):
        weft.write_hashes(url, frame.head(1), key_column="id")
    with pytest.raises(SettingsError, match="field"):
        weft.write_hashes(url, pl.DataFrame({"id": ["a"]}), key_column="id")
    with pytest.raises(SettingsError, match="dict"):
        weft.write_hashes(url, {"id": ["a"]}, key_column="id")
    with pytest.raises(SettingsError, match="needs Redis"):
        weft.write_hashes("sqlite:///x.db", frame, key_column="id")
    with pytest.raises(SettingsError, match="key_prefix"):
        weft.write_hashes(url, frame, key_column="id", key_prefix=b"x")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="key_column"):
        weft.write_hashes(url, frame, key_column=None)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="Two columns have the name 'n'"):
        weft.write_hashes(url, pa.table([["a"], [1], [2]], names=["id", "n", "n"]), key_column="id")
    with pytest.raises(SchemaError, match="column n"):
        weft.write_hashes(url, pd.DataFrame({"id": ["a", "b"], "n": [1, "x"]}), key_column="id")
    with pytest.raises(SchemaError, match="Rows 0 and 2 have the same 'id', 'a'"):
        weft.write_hashes(url, pl.DataFrame({"id": ["a", "b", "a"], "n": [1, 2, None]}), key_column="id")
    assert client.dbsize() == 0


def test_a_key_that_is_no_hash(url: str, client: Any) -> None:
    """It is named, and no value is."""
    client.set("b", "text")
    with pytest.raises(WeftError, match=r"WRONGTYPE.*'b'") as refused:
        weft.write_hashes(url, pl.DataFrame({"key": ["a", "b"], "card": ["4929", "4916"]}))
    assert "4916" not in str(refused.value)
