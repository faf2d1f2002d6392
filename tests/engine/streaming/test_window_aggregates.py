"""Aggregates of windows beyond sums and counts, and what is written of the rows that a window emits."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.letters import letters_of
from weft.engine.streaming import windows as windows_module
from weft.engine.streaming.aggregates import steps
from weft.engine.streaming.spark_engine import SparkEngine
from weft.errors import DeclarationError, LoadRefusedError
from weft.pipelines.streaming import toml
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Report
from weft.pipelines.streaming.windows import aggregate_in

START = datetime(2026, 11, 1, 12, tzinfo=UTC)
COUNT = weft.Aggregation(agg="count", as_="n")


@weft.udaf(args=("Int64", "Int64"), state=("Int64", "Int64"), returns="Float64")
class Weighted:
    """The average of values, each with a weight."""

    def __init__(self) -> None:
        self.total = self.weight = 0

    def update_batch(self, values: pa.Array, weights: pa.Array) -> None:
        for value, weight in zip(values.to_pylist(), weights.to_pylist(), strict=True):
            self.total += value * weight
            self.weight += weight

    def merge_batch(self, totals: pa.Array, weights: pa.Array) -> None:
        self.total += sum(totals.to_pylist())
        self.weight += sum(weights.to_pylist())

    def state(self) -> tuple[pa.Array, pa.Array]:
        return pa.array([self.total]), pa.array([self.weight])

    def evaluate(self) -> pa.Array:
        return pa.array([self.total / self.weight if self.weight else None], pa.float64())


def window(**options: Any) -> weft.Window:
    defaults = {"kind": "tumbling", "duration_ms": 60_000, "group_by": "user", "event_time_column": "at"}
    return weft.Window(**{**defaults, "aggregations": [COUNT], **options})


def publish(stream: Any, *events: tuple[str, float, int | None]) -> None:
    """Publish events of a user, at seconds after START, with a number."""
    weft.publish_sync(
        stream, [{"user": user, "at": START + timedelta(seconds=at), "v": value} for user, at, value in events]
    )


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "streams")
def test_aggregates_that_are_merged() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = window(
        aggregations=[
            weft.Aggregation(agg="approx_percentile", column="v", percentage=0.5, as_="median"),
            weft.Aggregation(agg="approx_percentile", column="v", percentage=1.0, as_="most"),
            weft.Aggregation(agg="collect", column="v", max_values_per_group=3, as_="first_three"),
            weft.Aggregation(agg="collect", column="at", max_values_per_group=1, as_="since"),
            weft.Aggregation(agg=Weighted, column=("v", "v"), as_="weighted"),
        ]
    )
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    options["transform_sql"] = "SELECT * FROM source WHERE v IS NOT NULL OR user = 'none'"
    publish(events, ("ann", 30, 5), ("ann", 2, 1), ("bob", 1, 7))
    run_once(**options)
    publish(events, ("ann", 1, 3), ("ann", 40, 2), ("ann", 50, 4), ("bob", 61, 1))
    run_once(**options)
    publish(events, ("ann", 3, 1000), ("ann", 61, 1))  # late: it is aggregated nowhere
    run_once(**options)
    found = {each[2]: each[3:] for each in rows("counts")}
    assert found["ann"][:2] == (3.0, 5.0)
    assert json.loads(found["ann"][2]) == [3, 1, 5]
    assert json.loads(found["ann"][3]) == ["2026-11-01T12:00:01.000000Z"]
    assert found["ann"][4] == pytest.approx(55 / 15)
    assert (found["bob"][0], json.loads(found["bob"][2]), found["bob"][4]) == (7.0, [7], 7.0)


@pytest.mark.usefixtures("plain_spark", "here")
def test_aggregates_of_nothing_and_of_much() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = window(
        aggregations=[
            weft.Aggregation(agg="approx_percentile", column="v", percentage=0.9, as_="p90"),
            weft.Aggregation(agg="collect", column="v", max_values_per_group=2, as_="two"),
        ]
    )
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    publish(events, ("ann", 1, None), *(("bob", 1 + n / 100, n) for n in range(2000)))
    run_once(**options)
    publish(events, ("ann", 2, None), ("ann", 61, 1))
    run_once(**options)
    found = {each[2]: each[3:] for each in rows("counts")}
    assert found["ann"] == (None, "[]")
    assert found["bob"][0] == pytest.approx(1800, abs=40)
    assert found["bob"][1] == "[0,1]"


def test_which_values_are_distinct(plain_spark: Any) -> None:
    from pyspark.sql import functions as F

    frame = plain_spark.sql(
        "SELECT * FROM VALUES ('', X'', X'ff', 0D), ('a', X'01', X'fe', -0D), (NULL, NULL, NULL, double('NaN')) "
        "AS t(s, b, c, d)"
    )
    exact = {"mode": "exact", "max_distinct_values_per_group": 9}
    made = [
        steps(
            weft.Aggregation(agg="count_distinct", column=column, as_=f"{column}_{len(mode)}", **mode), frame.schema, F
        )
        for column in "sbcd"
        for mode in ({}, exact)
    ]
    stored = frame.agg(*(each.alias(name) for step in made for name, each in step.stored.items()))
    merged = stored.union(stored).agg(*(each.alias(name) for step in made for name, each in step.merged.items()))
    assert list(merged.select(*(step.result for step in made)).first()) == [2] * len(made)


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_aggregates_of_sessions() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = weft.Window(
        kind="session",
        gap_ms=10_000,
        max_session_duration_ms=60_000,
        group_by="user",
        event_time_column="at",
        aggregations=[
            weft.Aggregation(agg="approx_percentile", column="v", percentage=0.5, as_="median"),
            weft.Aggregation(agg="collect", column="v", max_values_per_group=2, as_="two"),
            weft.Aggregation(agg=Weighted, column=("v", "v"), as_="weighted"),
        ],
    )
    options: dict[str, Any] = {"name": "visits", "source": events, "target_table": "visits", "window": own}
    for more in ((("ann", 1, 1), ("bob", 1, 2)), (("ann", 8, 3), ("ann", 5, 2)), (("bob", 40, 1),)):
        publish(events, *more)
        run_once(**options)
    found = {each[3]: each[4:] for each in rows("visits")}
    assert found == {"ann": (2.0, "[1,2]", pytest.approx(14 / 6)), "bob": (2.0, "[2]", 2.0)}


@weft.udaf(args=("Int64",), state=("Int64",), returns="Int64")
class Positive:
    """A sum of values, of which none may be negative."""

    def __init__(self) -> None:
        self.total = 0

    def update_batch(self, values: pa.Array) -> None:
        for value in values.to_pylist():
            if value < 0:
                raise ValueError(f"{value} is negative")
            self.total += value

    def merge_batch(self, totals: pa.Array) -> None:
        self.total += sum(totals.to_pylist())

    def state(self) -> tuple[pa.Array]:
        return (pa.array([self.total]),)

    def evaluate(self) -> pa.Array:
        return pa.array([self.total])


@pytest.mark.brief("some")
@pytest.mark.parametrize("sql", [None, "SELECT * FROM source WHERE user <> 'bob'"], ids=["all", "some"])
@pytest.mark.usefixtures("plain_spark", "here")
def test_an_aggregate_that_fails_for_a_row(sql: str | None) -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = window(aggregations=[weft.Aggregation(agg=Positive, column="v", as_="total"), COUNT])
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    options |= {"transform_sql": sql} if sql else {}
    publish(events, ("ann", 1, 5), ("ann", 2, -1), ("cid", 3, 7), ("ann", 4, 6), ("ann", 61, 1))
    with pytest.raises(weft.WeftError, match="-1 is negative"):
        run_once(**options)
    options["dead_letter_table"] = "failed"
    run_once(**options)
    assert [each[2:] for each in rows("counts")] == [("ann", 11, 2), ("cid", 7, 1)]
    (letter,) = letters_of(make(target="default", **options))
    assert (json.loads(letter.payload)["v"], letter.offset) == (-1, "2")
    assert "-1 is negative" in letter.error


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_rows_are_counted_where_an_aggregate_fails_for_one(project: Path) -> None:
    (project / "in").mkdir()
    lines = [json.dumps({"user": "ann", "at": "2026-11-01 12:00:01", "v": n}) for n in (-1, 2, 3)]
    (project / "in" / "a.json").write_text("\n".join(lines))
    events = declare(user="string", at="timestamp", v="int64")
    publish(events, ("ann", 1, 5), ("ann", 2, -1))
    lake = weft.ObjectStoreLocalConnection(name="lake", path=str(project), format="json_lines")
    pipeline = make(
        name="per_minute",
        sources=[weft.Source(query=events), weft.Source(connection=lake, query="in")],
        target="default",
        target_table="counts",
        transform_sql="SELECT user, CAST(at AS TIMESTAMP) AS at, v FROM source WHERE v <> 2",
        transform_on_error="fail",
        window=window(aggregations=[weft.Aggregation(agg=Positive, column="v", as_="total")]),
        dead_letter_table="failed",
    )
    reports: list[Report] = []
    engine = SparkEngine(pipeline)
    with engine.locked():
        engine.start(once=True, committed=lambda: None, report=reports.append, idle=None)
        engine.wait()
    assert sum(each.consumed for each in reports) == 5
    assert len(letters_of(pipeline)) == 2


@weft.udaf(args=("Int64",), state=("UInt8", "Utf8"), returns="Int64")
class Fragile:
    """Counts rows; a group with 2 in all cannot be merged, and one with 3 has no result."""

    def __init__(self) -> None:
        self.rows = 0

    def update_batch(self, values: pa.Array) -> None:
        self.rows += len(values)

    def merge_batch(self, rows: pa.Array, names: pa.Array) -> None:
        assert names.null_count == 0
        self.rows += sum(rows.to_pylist())
        if self.rows == 2:
            raise ValueError("two are too few")

    def state(self) -> tuple[pa.Array, pa.Array]:
        return pa.array([self.rows], pa.uint8()), pa.array(["é"])

    def evaluate(self) -> pa.Array:
        return pa.array([1 // (self.rows - 3)]) if self.rows != 1 else pa.array([1])


@pytest.mark.brief("session")
@pytest.mark.parametrize("kind", ["tumbling", "session", "update", "compacted"])
@pytest.mark.usefixtures("plain_spark", "here")
def test_an_aggregate_that_fails_for_a_group(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other windows are written; a group that cannot be merged does not stop those of later batches either."""
    if kind == "compacted":
        monkeypatch.setattr(windows_module, "_COMPACT_ROWS", 0)
        monkeypatch.setattr(windows_module, "_COMPACT_RATIO", 1)
    events = declare(user="string", at="timestamp", v="int64")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts"}
    limits: dict[str, Any] = {"emit": "update"} if kind == "update" else {}
    if kind == "session":
        limits = {"kind": "session", "gap_ms": 10_000, "max_session_duration_ms": 60_000, "duration_ms": None}
    own = window(aggregations=[weft.Aggregation(agg=Fragile, column="v", as_="rows")], **limits)
    options |= {"window": own} | ({"mode": "merge", "keys": list(own.keys)} if kind == "update" else {})
    publish(events, ("ann", 1, 0), ("bob", 1, 0), ("bob", 2, 0), ("cid", 1, 0), ("dan", 2, 0))
    publish(events, *(("eve", n, 0) for n in range(4)))
    with_place = {**options, "dead_letter_table": "failed"}
    run_once(**(with_place if kind == "update" else options))
    publish(events, ("ann", 3, 0), ("bob", 3, 0))
    run_once(**(with_place if kind == "update" else options))
    publish(events, ("ann", 4, 0), ("eve", 61, 0))
    if kind != "update":
        with pytest.raises(LoadRefusedError, match=r"two are too few|by zero"):
            run_once(**options)
    run_once(**with_place)
    found = {(each[-2], each[-1]) for each in rows("counts")}
    expected = {("cid", 1), ("dan", 1), ("eve", 1)}
    assert found == (expected | {("ann", None), ("bob", None)} if kind == "update" else expected)
    letters = letters_of(make(target="default", **with_place))
    assert {json.loads(each.payload)["user"] for each in letters} == {"ann", "bob"}
    why = r"The window (is left out|has a null in its place): The UDF 'Fragile' failed in line \d+ of .*Error"
    assert all(re.match(why, each.error) for each in letters)


@pytest.mark.usefixtures("plain_spark", "here")
def test_what_is_written_of_windows(project: Path) -> None:
    events = declare(user="string", at="timestamp", v="int64")

    @weft.udf(args=("Utf8",), returns="Utf8")
    def shout(names: pa.Array) -> pa.Array:
        return pa.array([each.upper() for each in names.to_pylist()])

    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "udfs": [shout]}
    own = window(emit_sql="SELECT window_start, shout(user) AS who, n * 2 AS twice FROM windows WHERE n > 1")
    publish(events, ("ann", 1, 1), ("ann", 2, 1), ("bob", 3, 1), ("bob", 61, 1), ("bob", 121, 1))
    run_once(window=own, **options)
    assert rows("counts") == [(START, "ANN", 4)]
    publish(events, ("bob", 181, 1))  # what closes is left out
    run_once(window=own, **options)
    assert len(rows("counts")) == 1
    for sql, message in [
        ("SELECT usr FROM windows", "usr"),
        ("SELECT * FROM window", "emit_sql reads a table that is not there: `window`"),
        ("SELECT loud(user) FROM windows", "emit_sql calls a function that is not there: loud"),
        ("SELECT FROM windows WHERE", "Syntax error"),
    ]:
        with pytest.raises(weft.WeftError, match=message):
            run_once(window=window(emit_sql=sql), **options)


@pytest.mark.usefixtures("plain_spark", "here")
def test_keys_that_are_not_written() -> None:
    events = declare(user="string", at="timestamp")
    with pytest.raises(DeclarationError, match="key 'user' is not a column"):
        run_once(
            name="per_minute",
            source=events,
            target_table="counts",
            mode="merge",
            keys=["user", "window_start"],
            window=window(emit="update", emit_sql="SELECT window_start, n FROM windows"),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agg": "approx_percentile", "column": "v"}, "approx_percentile requires percentage"),
        ({"agg": "approx_percentile", "column": "v", "percentage": 95}, "percentage must be a number from 0 to 1"),
        ({"agg": "sum", "column": "v", "percentage": 0.5}, "percentage is for approx_percentile, not for sum"),
        ({"agg": "collect", "column": "v"}, "collect requires max_values_per_group"),
        ({"agg": "sum", "column": ("v", "w")}, "sum takes 1 column, not 2"),
        ({"agg": Weighted, "column": "v"}, "Weighted takes 2 columns, not 1"),
        ({"agg": Weighted}, "Weighted needs a column"),
        ({"agg": dict, "column": "v"}, "not a class decorated with @udaf"),
    ],
)
def test_an_aggregation_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        weft.Aggregation(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"emit_sql": "SELECT sum(n) FROM windows"}, r"emit_sql depends on several rows \(sum\)"),
        ({"emit_sql": "SELECT * FROM windows WHERE n > 1", "emit": "update"}, r"emit_sql leaves rows out \(WHERE\)"),
    ],
)
def test_sql_over_windows_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        window(**options)


@pytest.mark.usefixtures("here")
def test_aggregates_in_a_file() -> None:
    own = window(
        event_time_column="_event_ts",
        aggregations=[
            weft.Aggregation(agg="approx_percentile", column="v", percentage=0.95, as_="p95"),
            weft.Aggregation(agg="collect", column="v", max_values_per_group=10, as_="all"),
        ],
        emit_sql="SELECT * FROM windows WHERE p95 > 3",
    )
    options: dict[str, Any] = {"name": "per_minute", "source": declare(user="string"), "target": "default"}
    pipeline = make(target_table="counts", window=own, **options)
    assert toml.parse(toml.to_toml(pipeline)).window == own
    own = window(aggregations=[weft.Aggregation(agg=Weighted, column=("a", "b"))])
    with pytest.raises(DeclarationError, match="UDFs, which a TOML file cannot hold"):
        toml.to_toml(make(target_table="counts", window=own, **options))


def test_every_aggregate_of_spark_is_known(plain_spark: Any) -> None:
    """Over the rows of one batch its result would be wrong, without an error."""
    jvm = plain_spark._jvm
    registry = jvm.org.apache.spark.sql.catalyst.analysis.FunctionRegistry.builtin()
    names = [name for (name,) in plain_spark.sql("SHOW SYSTEM FUNCTIONS").collect()]
    identifier = jvm.org.apache.spark.sql.catalyst.FunctionIdentifier
    found = {name: registry.lookupFunction(identifier(name)) for name in names}
    aggregates = [name for name, each in found.items() if each.isDefined() and each.get().getGroup() == "agg_funcs"]
    assert len(aggregates) > 80

    def is_unknown(name: str) -> bool:
        calls = (f"SELECT {name}({arguments}) FROM source" for arguments in ("a", "a, b"))
        return all(aggregate_in(sql) is None for sql in calls)  # sqlglot knows how many arguments some take

    assert list(filter(is_unknown, aggregates)) == []
    assert aggregate_in("SELECT a FROM source WHERE a LIKE ANY ('x', 'y')") is None
    assert aggregate_in("SELECT a FROM source OFFSET 1") == "OFFSET"
