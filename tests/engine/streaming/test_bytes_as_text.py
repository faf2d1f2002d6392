"""Texts that are not UTF-8, which Spark makes of any bytes: rows with one are bad rows, and no others."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.letters import letters_of, replay_all
from weft.columns import not_utf8, python_rows
from weft.engine.payload_rows import SHOWN
from weft.errors import LoadRefusedError, SchemaError
from weft.pipelines.streaming.declare import make

START = datetime(2026, 11, 1, 12, tzinfo=UTC)
SQL = "SELECT n, at, CAST(body AS STRING) AS body FROM source"
GOOD, BAD = b"4", b"\xff\xfe"


@weft.udaf(args=("Utf8",), state=("Utf8",), returns="Utf8")
class Longest:
    """The longest text, whose bytes it does not look at."""

    def __init__(self) -> None:
        self.longest = pa.scalar("")

    def update_batch(self, values: pa.Array) -> None:
        self.longest = max([self.longest, *values.drop_null()], key=lambda each: len(each.as_buffer() or b""))

    merge_batch = update_batch

    def evaluate(self) -> Any:
        return pa.array([self.longest], pa.string())

    def state(self) -> tuple[Any, ...]:
        return (pa.array([self.longest], pa.string()),)


def published(*events: tuple[int, bytes | None, float], stream: str = "events") -> Any:
    """Publish events with a number, a body and a second; return their stream."""
    source = declare(stream, n="int64", body="bytes", at="timestamp")
    weft.publish_sync(
        source, [{"n": n, "body": body, "at": START + timedelta(seconds=second)} for n, body, second in events]
    )
    return source


def letters(options: dict[str, Any], name: str = "body") -> list[tuple[Any, ...]]:
    found = [(json.loads(each.payload), each) for each in _letters(options)]
    return sorted((row.get("n", row.get("left_n")), row[name], each.error) for row, each in found)


def _letters(options: dict[str, Any]) -> list[Any]:
    return letters_of(make(**{"target": "default", **options}))


def windowed(group_by: str, *aggregations: weft.Aggregation, **window: Any) -> dict[str, Any]:
    window = window or {"kind": "tumbling", "duration_ms": 60_000}
    count = weft.Aggregation(agg="count", as_="count")
    return {
        "name": "windows",
        "source": declare(n="int64", body="bytes", at="timestamp"),
        "transform_sql": SQL,
        "window": weft.Window(
            group_by=(group_by,), event_time_column="at", aggregations=[count, *aggregations], **window
        ),
        "target_table": "copies",
    }


@pytest.mark.brief("postgres-tumbling")
@pytest.mark.usefixtures("plain_spark", "streams")
@pytest.mark.parametrize("kind", ["tumbling", "session"])
def test_a_group_of_a_window(kind: str) -> None:
    session = {"gap_ms": 10_000, "max_session_duration_ms": 86_400_000}
    options = windowed("body", **({"kind": kind, **session} if kind == "session" else {}))
    published((1, GOOD, 0), (2, BAD, 1), (3, b"\xff\xfd", 2), (4, None, 3), (5, GOOD, 4))
    with pytest.raises(LoadRefusedError, match="takes no row that has a text that is not UTF-8 in body: 2 rows"):
        run_once(**options)
    options["dead_letter_table"] = "failed"
    run_once(**options)
    published((6, b"x", 100))
    run_once(**options)
    assert rows("copies", "body, count") == [("4", 2), (None, 1)]
    why = "The row has a text that is not UTF-8 in body."
    assert letters(options) == [(2, "\\xff\\xfe", why), (3, "\\xff\\xfd", why)]


@pytest.mark.brief("max-")
@pytest.mark.parametrize(
    ("aggregation", "result"),
    [
        ({"agg": "first"}, "4"),
        ({"agg": "last"}, "5"),
        ({"agg": "max"}, "5"),
        ({"agg": "sum", "column": "body"}, 13),
        ({"agg": "collect", "max_values_per_group": 9}, '["4","4","5"]'),
        ({"agg": "count_distinct", "mode": "exact", "max_distinct_values_per_group": 9}, 2),
        ({"agg": Longest}, "4"),
    ],
    ids=lambda each: getattr(each.get("agg"), "__name__", each.get("agg")) if isinstance(each, dict) else "",
)
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_value_of_a_window(aggregation: dict[str, Any], result: Any) -> None:
    options = windowed("zero", weft.Aggregation(as_="result", **{"column": "body", **aggregation}))
    options |= {"transform_sql": f"SELECT 0 AS zero, * FROM ({SQL})", "dead_letter_table": "failed"}
    published((1, BAD, 0), (2, GOOD, 1), (3, None, 1), (4, GOOD, 2), (5, b"5", 3), (6, BAD, 4))
    run_once(**options)
    published((7, b"9", 100))
    run_once(**options)
    assert rows("copies", "count, result") == [(4, result)]
    assert [each[:2] for each in letters(options)] == [(1, "\\xff\\xfe"), (6, "\\xff\\xfe")]


@pytest.mark.brief("postgres")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_rows_of_a_join() -> None:
    published((1, GOOD, 0), (2, BAD, 0), (3, b"3", 0), stream="one")
    published((1, GOOD, 1), (2, BAD, 1), (3, b"3", 1), stream="two")
    options: dict[str, Any] = {
        "name": "joined",
        "sources": [
            weft.Source(query=declare(name, n="int64", body="bytes", at="timestamp")) for name in ("one", "two")
        ],
        "transform_sql": SQL,
        "join": weft.Join(
            left_source="one",
            right_source="two",
            left_keys="n",
            right_keys="n",
            left_event_time_column="at",
            right_event_time_column="at",
            time_window_ms=60_000,
        ),
        "target_table": (None, "copies"),
    }
    with pytest.raises(LoadRefusedError, match="'left_body' has a text that is not UTF-8"):
        run_once(**options)
    options["dead_letter_table"] = (None, "failed")
    run_once(**options)
    assert rows("copies", "left_n, left_body, right_body") == [(1, "4", "4"), (3, "3", "3")]
    payloads = [json.loads(payload) for (payload,) in rows("failed", "payload")]
    assert [(each["left_n"], each["left_body"], each["right_n"], each["right_body"]) for each in payloads] == [
        (2, "\\xff\\xfe", None, None),
        (None, None, 2, "\\xff\\xfe"),
    ]


@pytest.mark.brief("postgres")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_events_of_a_stream() -> None:
    published((1, GOOD, 0), (2, BAD, 1), (3, b"fine", 2))
    copies = declare("copies", n="int64", body="string")
    options: dict[str, Any] = {
        "name": "copied",
        "source": declare(n="int64", body="bytes", at="timestamp"),
        "target": copies,
        "transform_sql": "SELECT n, CAST(body AS STRING) AS body FROM source",
    }
    with pytest.raises(SchemaError, match="'body' has a text that is not UTF-8"):
        run_once(**options)
    options["dead_letter_table"] = (None, "failed")
    run_once(**options)
    assert [(each["n"], each["body"]) for each in weft.consume_sync(copies, "me")] == [(1, "4"), (3, "fine")]
    assert letters(options) == [(2, "\\xff\\xfe", "Column 'body' has a text that is not UTF-8.")]
    (letter,) = _letters(options)
    assert letter.offset is not None  # so that it can be looked up in its source


def test_values_in_values() -> None:
    texts = pa.array(["a", "b\x01", None]).cast(pa.binary())
    bad = pa.array([b"\xff" if each == b"b\x01" else each for each in texts.to_pylist()]).cast(pa.string(), safe=False)
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2, 3], bad)], ["some"])
    whole = pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["k"] * 3), bad)
    table = pa.table({"n": [1, 2, 3], "nested": nested, "whole": whole})
    assert not_utf8(table) == {1: "nested"}
    assert python_rows(table)[1] == {"n": 2, "nested": {"some": ["\\xff"]}, "whole": [("k", "\\xff")]}


@pytest.mark.brief("csv")
@pytest.mark.usefixtures("plain_spark", "here", "project")
@pytest.mark.parametrize("format", ["csv", "json_lines", "parquet", "orc"])
def test_rows_of_files(format: str) -> None:
    published((1, GOOD, 0), (2, BAD, 1), (3, b"fine", 2))
    lake = weft.ObjectStoreLocalConnection("lake", format=format)
    options: dict[str, Any] = {
        "name": "copied",
        "source": declare(n="int64", body="bytes", at="timestamp"),
        "targets": [weft.Target(connection=lake, prefix="copies")],
        "transform_sql": "SELECT n, named_struct('some', array(CAST(body AS STRING))) AS nested, CAST(body AS STRING) "
        "AS body FROM source",
    }
    with pytest.raises(LoadRefusedError, match="copies have a text that is not UTF-8 in 'nested': 1"):
        run_once(**options)
    options["dead_letter_path"] = "failed"
    run_once(**options)
    found = weft.read("copies", source=lake).toArrow().to_pylist()
    assert sorted((each["n"], each["nested"]["some"], each["body"]) for each in found) == [
        (1, ["4"], "4"),
        (3, ["fine"], "fine"),
    ]
    (letter,) = letters_of(make(**options))
    assert (json.loads(letter.payload)["body"], letter.error) == (
        "\\xff\\xfe",
        "Column 'nested' has a text that is not UTF-8.",
    )
    done = replay_all(make(**options))
    assert (done.letters, [*done.held.values()]) == (0, [SHOWN])
