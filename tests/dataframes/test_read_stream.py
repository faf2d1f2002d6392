"""`read_stream` gives every entry exactly, in the columns that were asked for."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import weft
from servers import wait_until
from weft.errors import ConnectionFailedError, DeclarationError, SchemaError, SettingsError, WeftError

Add = Callable[..., list[str]]


def test_all_entries_with_the_types_of_the_schema(url: str, add: Add) -> None:
    ids = add("events", *({"user_id": f"u{i}", "value": i} for i in range(1234)))
    frame = weft.read_stream(url, stream="events", schema={"user_id": pl.Utf8, "value": pl.Int64})
    assert frame.schema == {"_id": pl.String, "_ts": pl.Int64, "user_id": pl.String, "value": pl.Int64}
    assert frame["_id"].to_list() == ids
    assert frame["_ts"].to_list() == [int(each.partition("-")[0]) for each in ids]
    assert frame["value"].to_list() == list(range(1234))
    assert frame["user_id"].to_list() == [f"u{i}" for i in range(1234)]


def test_without_a_schema_all_fields_of_all_entries(url: str, add: Add) -> None:
    add("events", *({"a": i} for i in range(3000)), {"late": "x"}, {"a": 1, "late": "y"})
    frame = weft.read_stream(url, "events")
    assert frame.columns == ["_id", "_ts", "a", "late"]
    assert frame["late"].to_list() == [None] * 3000 + ["x", "y"]
    assert frame["a"].to_list() == [str(i) for i in range(3000)] + [None, "1"]


@pytest.mark.parametrize("there", [True, False])
def test_a_schema_guarantees_its_columns(url: str, add: Add, there: bool) -> None:
    if there:
        add("events", {"b": 2, "other": 1})
    frame = weft.read_stream(url, "events", schema={"missing": "float64", "b": "int32", "day": pl.Date})
    assert frame.schema == {
        "_id": pl.String,
        "_ts": pl.Int64,
        "missing": pl.Float64,
        "b": pl.Int32,
        "day": pl.Date,
    }
    assert frame["b"].to_list() == ([2] if there else [])


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "ü€", "ü€"),
        ("bytes", b"\xff\r\n\x00", b"\xff\r\n\x00"),
        (pa.binary(2), b"\xff\xfe", b"\xff\xfe"),
        (pa.binary(2), b"three", None),
        ("bool", "true", True),
        ("int32", "-7", -7),
        ("float64", "1.5e3", 1500.0),
        ("decimal(10,2)", "12.5", Decimal("12.50")),
        ("date", "2024-02-29", dt.date(2024, 2, 29)),
        ("timestamp", "2024-01-01T12:00:00+02:00", dt.datetime(2024, 1, 1, 10, tzinfo=dt.UTC)),
        ("timestamp", "2024-01-01 12:00:00", dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)),
        (pl.Categorical, "red", "red"),
        (pl.Datetime("ms"), "2024-01-01T12:00:00", dt.datetime(2024, 1, 1, 12)),
        (pa.int16(), "12", 12),
        (pl.UInt64, str(2**64 - 1), 2**64 - 1),
        (pl.Enum(["red", "blue"]), "red", "red"),
        (pl.Enum(["red", "blue"]), "green", None),
        (pl.Decimal(10, 2), "12.5", Decimal("12.50")),
        (pl.Decimal(10, 2), "12.345", None),
        ("uuid", "5E0A4C1E-7D0D-4C8F-9C55-0A3F6A4B1F10", "5e0a4c1e-7d0d-4c8f-9c55-0a3f6a4b1f10"),
        ("uuid", "not one", None),
        ("json", '{"a": 1.0}', '{"a": 1.0}'),
        ("json", "{a}", None),
        ("json", "NaN", None),
        ("json", "[" * 100_000, None),
    ],
)
def test_types(url: str, add: Add, kind: Any, text: Any, value: Any) -> None:
    add("events", {"field": text})
    frame = weft.read_stream(url, "events", schema={"field": kind})
    assert frame["field"].to_list() == [value]
    if value is None:
        with pytest.raises(SchemaError, match="which is no"):
            weft.read_stream(url, "events", schema={"field": kind}, on_error="raise")
    if isinstance(kind, type | pl.DataType):
        assert frame.schema["field"] == kind


def test_types_of_spark(url: str, add: Add) -> None:
    from pyspark.sql.types import LongType, StringType

    add("events", {"n": 1, "s": "x"})
    table = weft.read_stream(url, "events", schema={"n": LongType(), "s": StringType()}, to="arrow")
    assert table.schema.field("n").type == pa.int64()
    assert table.drop_columns(["_id", "_ts"]).to_pylist() == [{"n": 1, "s": "x"}]


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"a": "int63"}, "int64"),
        ({"a": object()}, "not the type of a column"),
        ({"a": pl.List(pl.Int64)}, "cannot be read from a text"),
        ({"a": pl.Int128}, "not the type of a column"),
        ({"a": pl.Object}, "not the type of a column"),
        ({"a": pl.Decimal}, "not the type of a column"),
        ({"a": pl.Enum}, "not the type of a column"),
        ({"a": pa.uuid()}, "not the type of a column"),
        ({"a": pa.decimal256(50, 2)}, "polars"),
        (["a"], "maps names"),
    ],
)
def test_types_that_cannot_be(url: str, schema: Any, says: str) -> None:
    with pytest.raises(DeclarationError, match=says):
        weft.read_stream(url, "events", schema=schema)


@pytest.mark.parametrize("to", ["arrow", "pandas", "polars"])
def test_kinds_of_frames(url: str, add: Add, to: Any) -> None:
    add("events", {"n": 1}, {"n": 2})
    frame = weft.read_stream(url, "events", schema={"n": "int64"}, to=to)
    assert list(frame["n"].to_pylist() if to == "arrow" else frame["n"]) == [1, 2]
    assert type(frame).__module__.startswith({"arrow": "pyarrow"}.get(to, to))


@pytest.mark.parametrize("to", ["arrow", "pandas", "polars"])
def test_nulls_change_no_other_value(url: str, add: Add, to: Any) -> None:
    """Plain types of pandas have no null: its floats have no 2^53 + 1."""
    large = 2**53 + 1
    add("events", {"n": large, "u": 2**64 - 1, "b": "true", "s": "x"}, {"s": "y"})
    schema = {"n": "int64", "u": pa.uint64(), "b": "bool", "s": "string"}
    frame = weft.read_stream(url, "events", schema=schema, to=to)
    rows = frame.to_pylist() if to == "arrow" else frame.to_dicts() if to == "polars" else frame.to_dict("records")
    assert [rows[0][name] for name in schema] == [large, 2**64 - 1, True, "x"]
    if to == "pandas":
        assert [str(frame[name].dtype) for name in ("_ts", "n", "u", "b")] == ["Int64", "Int64", "UInt64", "boolean"]
        assert frame["n"].isna().to_list() == frame["b"].isna().to_list() == [False, True]
        # The same without a null: batches must fit together.
        assert str(weft.read_stream(url, "events", schema=schema, to=to, count=1)["n"].dtype) == "Int64"
    else:
        assert rows[1]["n"] is rows[1]["u"] is rows[1]["b"] is None


def test_parts_of_ids(url: str, client: Any) -> None:
    ids = ["1-1", "1-18446744073709551615", "1704067200000-0", "1704067200000-12345", "9999999999999999-7"]
    for each in ids:
        client.xadd("events", {"a": 1}, id=each)
    frame = weft.read_stream(url, "events", include_sequence=True)
    assert frame["_id"].to_list() == ids
    assert frame["_ts"].to_list() == [1, 1, 1704067200000, 1704067200000, 9999999999999999]
    # Signed, as in the frames of others; what does not fit is null, and the id still says it.
    assert frame["_seq"].to_list() == [1, None, 0, 12345, 7]


def test_an_id_near_the_largest_does_not_overflow(url: str, client: Any) -> None:
    client.xadd("events", {"a": 1}, id="18446744073709551614-18446744073709551615")
    assert weft.read_stream(url, "events")["_ts"].to_list() == [None]
    with pytest.raises(SchemaError, match="18446744073709551614-18446744073709551615"):
        weft.read_stream(url, "events", on_error="raise")


def test_nothing_comes_after_the_largest_id(url: str, client: Any) -> None:
    client.xadd("events", {"a": 1}, id="18446744073709551615-18446744073709551615")
    assert [frame["a"].to_list() for frame in weft.iter_stream(url, "events")] == [["1"]]
    assert len(weft.read_stream(url, "events", start_id="$", block_ms=1)) == 0


def test_columns_of_ours_can_be_left_out_and_renamed(url: str, add: Add) -> None:
    (first,) = add("events", {"_id": "mine", "_ts": "my time"})
    frame = weft.read_stream(url, "events", id_column="entry", include_timestamp=False)
    assert frame.to_dicts() == [{"entry": first, "_id": "mine", "_ts": "my time"}]
    with pytest.raises(DeclarationError, match="Two columns"):
        weft.read_stream(url, "events", id_column="_ts")


def test_fields_named_like_ours_are_kept(url: str, add: Add) -> None:
    (first,) = add("events", {"_id": "mine", "_ts": "12", "_seq": "no"})
    frame = weft.read_stream(url, "events")
    assert frame.drop("_ts").to_dicts() == [{"_id": first, "_id#2": "mine", "_ts#2": "12", "_seq": "no"}]
    typed = weft.read_stream(url, "events", schema={"_ts": pl.Int32}, include_sequence=True)
    assert typed.schema == {"_id": pl.String, "_ts": pl.Int64, "_seq": pl.Int64, "_ts#2": pl.Int32}
    assert typed["_ts#2"].to_list() == [12]


def test_fields_that_come_twice_are_kept(url: str, client: Any) -> None:
    client.execute_command("XADD", "events", "*", "a", "1", "b", "2", "a", "3", "a", "4")
    frame = weft.read_stream(url, "events", include_id=False, include_timestamp=False)
    assert frame.to_dicts() == [{"a": "1", "b": "2", "a#2": "3", "a#3": "4"}]


@pytest.mark.parametrize("to", ["arrow", "pandas", "polars"])
def test_a_field_without_a_name(url: str, client: Any, to: Any) -> None:
    client.execute_command("XADD", "events", "*", "", "1", "column_2", "2", "", "3")
    frame = weft.read_stream(url, "events", to=to)
    names = frame.column_names if to == "arrow" else list(frame.columns)
    assert names == ["_id", "_ts", "", "column_2", "#2"]
    assert [str(frame[name][0]) for name in ("", "column_2", "#2")] == ["1", "2", "3"]


@pytest.mark.parametrize("others", [0, 50])
def test_values_that_look_like_the_protocol(url: str, add: Add, others: int) -> None:
    hostile = [
        b"\r\n",
        b"a\nb",
        b"",
        b"\x00\xff\xfe",
        b"*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\na\r\n$1\r\nb",
        b"$5\r\nhello\r\n*2\r\n$15\r\n1704067200000-0\r\n*2\r\n$5\r\nfield\r\n$1\r\nx",
        b"x" * 100_000,
        b"-ERR\r\n",
        b"+OK",
    ]
    plain = [b"plain"] * others
    for each in hostile:
        add("events", *({"field": value, "n": "1"} for value in [*plain, each]))
    table = weft.read_stream(url, "events", schema={"field": "bytes", "n": "int64"}, to="arrow")
    assert table["field"].to_pylist() == [value for each in hostile for value in [*plain, each]]
    assert table["n"].to_pylist() == [1] * len(table)


def test_a_page_that_ends_in_something_like_an_entry(url: str, add: Add) -> None:
    """The next page is asked for by what looks like the last entry; another look decides."""
    fake = b"\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\na\r\n$1\r\nb"
    ids = add("events", *({"field": fake, "n": i} for i in range(3000)))
    frame = weft.read_stream(url, "events", schema={"n": pl.Int64})
    assert frame["_id"].to_list() == ids
    assert frame["n"].to_list() == list(range(3000))


def test_bytes_that_are_no_text(url: str, add: Add) -> None:
    add("events", *({"a": b"text"} for _ in range(2000)), {"a": b"\xff\xfe"}, {b"\xff": b"named badly"})
    frame = weft.read_stream(url, "events")
    assert frame.schema["a"] == pl.Binary
    assert frame["a"].to_list() == [b"text"] * 2000 + [b"\xff\xfe", None]
    assert frame["\\xff"].to_list()[-1] == "named badly"
    assert weft.read_stream(url, "events", schema={"a": "string"})["a"].to_list()[-3:] == ["text", None, None]


def test_large_and_many(url: str, client: Any) -> None:
    """Far more than one page, of entries whose size changes."""
    pipeline = client.pipeline(transaction=False)
    for i in range(30_000):
        pipeline.xadd("events", {"n": i, "pad": "x" * (100_000 if i % 1000 == 999 else i % 7)})
    pipeline.execute()
    table = weft.read_stream(url, "events", schema={"n": "int64", "pad": "string"}, to="arrow")
    assert table["n"].to_pylist() == list(range(30_000))
    assert [len(each) for each in table["pad"].to_pylist()[::999]] == [
        100_000 if i % 1000 == 999 else i % 7 for i in range(0, 30_000, 999)
    ]


def test_ranges_and_counts(url: str, client: Any) -> None:
    for i in range(1, 101):
        client.xadd("events", {"n": i}, id=f"{i}-0")

    def numbers(**options: Any) -> list[int]:
        found: list[int] = weft.read_stream(url, "events", schema={"n": pl.Int64}, **options)["n"].to_list()
        return found

    assert numbers(start_id="10-0", end_id="12-0") == [10, 11, 12]
    assert numbers(start_id="10", end_id="12") == [10, 11, 12]
    assert numbers(start_id="(10-0", end_id="(12-0") == [11]
    assert numbers(start_id="-", end_id="+", count=3) == [1, 2, 3]
    assert numbers(count=0) == []
    assert numbers(start_id="$") == []
    assert numbers(start_id="101") == []
    assert numbers(count=1000) == list(range(1, 101))


@pytest.mark.parametrize(
    "options",
    [
        {"count": -1},
        {"count": 1.5},
        {"block_ms": -1},
        {"block_ms": 2**63},
        {"group": "g", "consumer": "c", "claim_idle": 2**63},
        {"start_id": "yesterday"},
        {"start_id": "+"},
        {"start_id": "+", "block_ms": 1},
        {"start_id": "+", "group": "g", "consumer": "c"},
        {"end_id": "$"},
        {"to": "dask"},
        {"on_error": "ignore"},
        {"group": "g"},
        {"consumer": "c"},
        {"auto_ack": True},
        {"claim_idle": 5},
        {"include_delivery": True},
        {"group": "g", "consumer": "c", "end_id": "5-0"},
        {"group": "g", "consumer": "c", "claim_idle": -1},
        {"group": "", "consumer": "c"},
        {"group": 5, "consumer": "c"},
        {"group": "g", "consumer": 5},
        {"group": "g", "consumer": "c", "auto_ack": "false"},
    ],
)
def test_options_that_cannot_be(url: str, options: Any) -> None:
    with pytest.raises(SettingsError):
        weft.read_stream(url, "events", **options)


def test_the_nearest_choice_is_named(url: str) -> None:
    with pytest.raises(SettingsError, match="Did you mean 'quarantine'"):
        weft.read_stream(url, "events", on_error="quarantin")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="Did you mean 'polars'"):
        weft.read_stream(url, "events", to="polar")  # type: ignore[arg-type]


@pytest.mark.timing
def test_waiting_for_the_first_entry(url: str, add: Add, later: Callable[..., None]) -> None:
    add("events", {"n": 1})
    assert len(weft.read_stream(url, "events", start_id="$", block_ms=20)) == 0
    later(add, "events", {"n": 2}, when_blocked=True)
    frame = weft.read_stream(url, "events", start_id="$", block_ms=60_000, count=100)
    assert frame["n"].to_list() == ["2"]


@pytest.mark.timing
def test_waiting_for_longer_than_a_socket_would(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.systems.redis import wire

    monkeypatch.setattr(wire, "ANSWER_SECONDS", 0.1)
    assert len(weft.read_stream(url, "events", block_ms=1000)) == 0


def test_one_bad_value(url: str, add: Add, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids = add("events", *({"value": i} for i in range(500)), {"value": "many", "note": "n\r\n"}, {"value": 501})
    bad = ids[500]
    with caplog.at_level(logging.WARNING, "weft.dataframes"):
        frame = weft.read_stream(url, "events", schema={"value": pl.Int64})
    assert frame["value"].to_list() == [*range(500), None, 501]
    assert bad in caplog.text
    with pytest.raises(SchemaError, match=f"(?s){bad}.*'many'.*int64") as refused:
        weft.read_stream(url, "events", schema={"value": pl.Int64}, on_error="raise")
    assert refused.value.field == "value"
    for _ in range(2):  # it is put aside once
        frame = weft.read_stream(url, "events", schema={"value": pl.Int64}, on_error="quarantine")
        assert frame["value"].to_list() == [*range(500), 501]
        ((aside, fields),) = client.xrange("events__quarantine")
        assert aside.decode() == bad
        assert fields[b"value"] == b"many"
        assert fields[b"note"] == b"n\r\n"
        assert b"int64" in fields[b"_weft_error"]


@pytest.mark.parametrize(
    ("name", "kind", "other"), [("v", "string", "bytes"), ("v", "int64", "bytes"), ("w", "int64", "string")]
)
def test_the_error_names_a_type_that_fits(url: str, add: Add, name: str, kind: str, other: str) -> None:
    add("events", {"v": "text", "w": "text"}, {"v": b"\xff", "w": "1"})
    with pytest.raises(SchemaError, match=f"schema={{'{name}': \"{other}\"}} reads them as"):
        weft.read_stream(url, "events", schema={name: kind}, on_error="raise")
    assert weft.read_stream(url, "events", schema={name: other}, on_error="raise")[name].null_count() == 0


def test_what_is_no_stream(url: str, client: Any) -> None:
    client.set("text", "x")
    with pytest.raises(WeftError, match="WRONGTYPE"):
        weft.read_stream(url, "text")
    with pytest.raises(SettingsError, match="key"):
        weft.read_stream(url, 5)  # type: ignore[arg-type]


def test_no_server_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first connection that fails is an error at once, with what to check."""
    import servers

    monkeypatch.setattr("weft.systems.redis.group_member.PATIENCE_SECONDS", math.inf)
    url = f"redis://:secret@127.0.0.1:{servers.free_port()}"
    for ask in (
        lambda: weft.read_stream(url, "events"),
        lambda: weft.read_streams(url, "events*"),
        lambda: weft.write_hashes(url, pl.DataFrame({"key": ["a"], "n": [1]})),
    ):
        with pytest.raises(ConnectionFailedError, match="Check that the server runs") as failed:
            ask()
        assert "secret" not in str(failed.value)


@pytest.mark.timing
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_a_server_that_says_nothing(scheme: str) -> None:
    """It accepts connections, as one does that hangs, or that does not speak TLS."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ConnectionFailedError):
            weft.read_stream(f"{scheme}://127.0.0.1:{port}/?connect_timeout=0.2", "events")


def test_by_connection_and_by_name(url: str, add: Add) -> None:
    add("events", {"n": 1})
    connection = weft.connect(url=url, name="cache")
    assert len(weft.read_stream(connection, "events")) == 1
    assert len(weft.read_stream("cache", "events")) == 1


def test_putting_aside_between_pages(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": "bad" if i in (100, 1500) else i} for i in range(2_000)))
    schema = {"n": pl.Int64}
    frame = weft.read_stream(url, "events", schema=schema, on_error="quarantine")
    assert frame["_id"].to_list() == [each for i, each in enumerate(ids) if i not in (100, 1500)]
    batches = weft.iter_stream(url, "events", schema=schema, on_error="quarantine", batch_size=500, count=1_998)
    assert sum(len(batch) for batch in batches) == 1_998
    assert [entry[0].decode() for entry in client.xrange("events__quarantine")] == [ids[100], ids[1500]]


def test_a_page_that_ends_in_something_like_an_entry_of_no_id(url: str, add: Add) -> None:
    fake = b"x\r\n*2\r\n$30\r\n999999999999999999999999999999-0\r\n*"
    ids = add("events", *({"n": fake if i == 511 else b"y"} for i in range(2_000)))
    frame = weft.read_stream(url, "events", schema={"n": pl.Binary})
    assert frame["_id"].to_list() == ids


def test_a_frame_without_columns(url: str) -> None:
    with pytest.raises(SettingsError, match="without any column"):
        weft.read_stream(url, "events", schema={}, include_id=False, include_timestamp=False)


def test_keys_that_are_no_text(url: str, client: Any) -> None:
    ids = [client.xadd(key, {"n": "bad"}).decode() for key in (b"\xff", "x")]
    frame = weft.read_streams(url, "*", schema={"n": pl.Int64}, on_error="quarantine")
    assert len(frame) == 0
    assert client.xlen(b"\xff__quarantine") == client.xlen("x__quarantine") == 1
    assert weft.read_streams(url)["_stream"].to_list() == ["x", "\\xff"]
    assert weft.read_stream(url, b"\xff")["_id"].to_list() == ids[:1]
    assert weft.read_stream(url, b"\xff", group="g", consumer="c", auto_ack=True)["_id"].to_list() == ids[:1]
    assert client.xpending(b"\xff", "g")["pending"] == 0
    with pytest.raises(SettingsError, match="has a name"):
        weft.read_stream(weft.connect(url="sqlite:///other.db"), b"x")


@pytest.mark.parametrize(
    ("kind", "texts", "values"),
    [
        # Arrow would make other numbers of what is too large.
        ("decimal", ["299821390259251217439.5", "1e3", "+4"], [None, Decimal(1000), Decimal(4)]),
        ("decimal(38,0)", ["9" * 39, "1" * 38 + ".0"], [None, Decimal("1" * 38)]),
        ("decimal(10,2)", ["-7628441247E-41", "1.005", "1.25"], [None, None, Decimal("1.25")]),
        ("int64", ["0xFFFFFFFFFFFFFFFF", "0x10", "-7"], [None, 16, -7]),
        ("float64", ["1e309", "inf", "1.5"], [None, math.inf, 1.5]),
    ],
)
def test_numbers_that_are_too_large_are_no_others(
    url: str, add: Add, kind: str, texts: list[str], values: list[Any]
) -> None:
    add("events", *({"v": text} for text in texts))
    assert weft.read_stream(url, "events", schema={"v": kind})["v"].to_list() == values


ODD_TEXTS = [
    *("1_000", "1_0.0", "0x1_0", "１", "٣.0", "+5", "+4.0", " 7", "7 ", "7\n", "2", "007", "-0", "-0.0", "-1", "4.0"),
    *("4.5", "1e3", "1E+3", "5.", ".5", "1e99999999999999999999", "1e300", "1e-3", "0x10", "-0x10", "0xff", "0x", ""),
    *("0xFFFFFFFFFFFFFFFF", "inf", "nan", "1.005", "1e39", "true", "1", "2026-01-31", "2026-01-31T12:00:00Z"),
    "2026-01-31T12:00:00",
]


@pytest.mark.parametrize(
    "kind",
    ["int64", pa.int8(), pa.uint64(), "float32", "float64", "decimal(10,2)", "bool", "timestamp", "date"],
    ids=str,
)
def test_what_a_text_is_does_not_depend_on_others(url: str, add: Add, kind: Any) -> None:
    ids = add("events", *({"v": text} for text in ODD_TEXTS))

    def read(**options: Any) -> list[str]:
        return list(
            map(repr, weft.read_stream(url, "events", schema={"v": kind}, to="arrow", **options)["v"].to_pylist())
        )

    alone = [each for entry in ids for each in read(start_id=entry, end_id=entry)]
    if kind == "int64":
        numbers = {text: int(value) for text, value in zip(ODD_TEXTS, alone, strict=True) if value != "None"}
        plain = {text: int(text) for text in ("2", "007", "-0", "-1", "1")}
        other = {"-0.0": 0, "4.0": 4, "1e3": 1000, "1E+3": 1000, "5.": 5, "0x10": 16, "0xff": 255}
        assert numbers == plain | other
    assert read() == alone
    for size in (2, 3, 7):
        for first in range(0, len(ids), size):
            assert read(start_id=ids[first], count=size) == alone[first : first + size]


@pytest.mark.parametrize("url", ["http://localhost:8000", "https://weft.example/api/v1/streams/orders"])
def test_the_url_of_a_service_is_not_that_of_a_database(url: str) -> None:
    """Nothing is asked of it."""
    advice = "(?s)cannot hold a stream.*URL of the database that holds the stream, such as postgres.*HTTP"
    for read in (weft.read_stream, weft.iter_stream):
        with pytest.raises(weft.DeclarationError, match=advice):
            read(url, "orders")
    with pytest.raises(weft.DeclarationError, match=advice):
        weft.ack_entries(url, "orders", "g", ["1"])
    with pytest.raises(weft.DeclarationError, match=advice):
        asyncio.run(weft.connect(url=url).xconsumer(streams=["orders"]).get_entry())


@pytest.mark.timing
def test_ctrl_c_ends_a_read_that_waits_indefinitely(url: str, client: Any) -> None:
    """The handler of signals that polars installs has the system go on with a call that has no end."""
    command = [sys.executable, "-c", WAIT.format(url=url)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: client.info("clients")["blocked_clients"] > 0, "a client that waits for entries")
            process.send_signal(signal.SIGINT)
            assert process.wait(20) != 0
        finally:
            process.kill()


WAIT = """
import signal, weft
signal.signal(signal.SIGINT, signal.default_int_handler)
weft.read_stream("{url}", "events", block_ms=0, schema={{"n": "int64"}})
"""
