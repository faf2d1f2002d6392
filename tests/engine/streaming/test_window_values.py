"""Values that a window meets and a database would refuse, and what a crash leaves of its state."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import weft
from engine.streaming.conftest import declare, forget_last_commit, rows, run_once
from engine.streaming.letters import letters_of
from weft.engine.readers import open_tables, stored_columns
from weft.engine.streaming import windows as windows_module
from weft.engine.streaming.spark_engine import SparkEngine
from weft.engine.streaming.windows import Windows
from weft.errors import LoadRefusedError, WeftError
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Report
from weft.project import current
from weft.systems.sql.state_store import SqlState
from weft.systems.state_in_memory import InMemoryState
from weft.systems.state_store import BATCH, END, StateBatch

START = datetime(2026, 11, 1, 12, tzinfo=UTC)
COUNT = weft.Aggregation(agg="count", as_="n")
MOST = (1 << 63) - 1


def window(**options: Any) -> weft.Window:
    defaults = {"kind": "tumbling", "duration_ms": 60_000, "group_by": "user", "event_time_column": "at"}
    return weft.Window(**{**defaults, "aggregations": [COUNT], **options})


def publish(stream: Any, *events: tuple[str, float, int]) -> None:
    """Publish events of a user, at seconds after START, with a number."""
    weft.publish_sync(
        stream, [{"user": user, "at": START + timedelta(seconds=at), "v": value} for user, at, value in events]
    )


@pytest.mark.usefixtures("plain_spark", "streams")
def test_values_that_a_database_refuses() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    sql = (
        "SELECT concat(user, char(0), 'é', char(26), '0') AS user, double('NaN') AS f, repeat('x', 1000000) AS big, "
        "at, IF(v = 1, double('-Infinity'), double('Infinity')) AS v FROM source"
    )
    own = window(
        group_by=("user", "f", "big"),
        aggregations=[
            weft.Aggregation(agg="min", column="v", as_="least"),
            weft.Aggregation(agg="last", column="v", as_="last"),
            weft.Aggregation(agg="sum", column="v", as_="total"),
            weft.Aggregation(agg="max", column="user", as_="name"),
        ],
        emit_sql="SELECT hex(user) AS who, CAST(f AS string) AS f, length(big) AS big, CAST(least AS string) AS least, "
        "CAST(last AS string) AS last, CAST(total AS string) AS total, hex(name) AS name FROM windows",
    )
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    for more in ((("ann", 1, 1),), (("ann", 2, 2), ("ann", 61, 1))):
        publish(events, *more)
        run_once(transform_sql=sql, **options)
    name = "ann\0é\x1a0".encode().hex().upper()
    assert rows("counts") == [(name, "NaN", 1_000_000, "-Infinity", "Infinity", "NaN", name)]


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_sum_that_is_too_large(batches: int) -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = window(aggregations=[weft.Aggregation(agg="sum", column="v", as_="total")])
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    first, second = [("ann", 1, MOST), ("bob", 1, 7)], [("ann", 2, 1)]
    publish(events, *first, *(second if batches == 1 else ()))
    run_once(**options)
    publish(events, *(second if batches == 2 else ()), ("bob", 61, MOST))
    with pytest.raises(LoadRefusedError, match=r"a sum is larger than its type can hold \(total\).*\"user\": \"ann\""):
        run_once(**options)
    options["dead_letter_table"] = "failed"
    run_once(**options)
    assert [each[2:] for each in rows("counts")] == [("bob", 7)]
    (letter,) = letters_of(make(target="default", **options))
    assert json.loads(letter.payload)["user"] == "ann"
    publish(events, ("bob", 121, 1))
    run_once(**options)
    assert [each[2:] for each in rows("counts")] == [("bob", 7), ("bob", MOST)]


@pytest.mark.brief("sqlite", "mysql")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_a_column_that_becomes_wider() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = window(aggregations=[weft.Aggregation(agg=each, column="v", as_=each) for each in ("sum", "max", "first")])
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    publish(events, ("ann", 1, 3))
    run_once(transform_sql="SELECT user, at, v FROM source", **options)
    publish(events, ("ann", 2, 4), ("ann", 61, 1))
    run_once(transform_sql="SELECT user, at, v + 0.5D AS v FROM source", **options)
    assert [each[2:] for each in rows("counts")] == [("ann", 7.5, 4.5, 3.0)]


@pytest.mark.usefixtures("plain_spark", "streams")
def test_a_group_that_is_a_time_without_a_zone() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    options: dict[str, Any] = {"name": "per_day", "source": events, "target_table": "counts"}
    sql = "SELECT at, timestamp_ntz'2026-03-29 02:30:00' AS day FROM source"
    publish(events, ("ann", 1, 1), ("ann", 61, 1))
    run_once(transform_sql=sql, window=window(group_by="day"), **options)
    read = weft.read("SELECT day FROM counts", source="default")
    assert read.schema["day"].dataType.typeName() == "timestamp_ntz"
    assert [each.day for each in read.collect()] == [datetime(2026, 3, 29, 2, 30)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_too_many_distinct_values_in_several_batches() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = weft.Aggregation(agg="count_distinct", column="v", mode="exact", max_distinct_values_per_group=2, as_="d")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts"}
    options["window"] = window(aggregations=[own])
    for more in ((("ann", 1, 1), ("ann", 2, 2), ("bob", 1, 1)), (("ann", 3, 3),)):
        publish(events, *more)
        run_once(**options)
    publish(events, ("bob", 61, 1))
    with pytest.raises(WeftError, match=r'max_distinct_values_per_group=2 reached by d of the group \{"user":"ann"\}'):
        run_once(**options)


@pytest.mark.usefixtures("streams")
def test_a_crash_before_the_first_batch() -> None:
    def opened() -> SqlState:
        return SqlState(open_tables(current().connection("default")), "per_minute", "query")

    data, batch = pa.table({END: [60], BATCH: [0], "n": [1]}), StateBatch(0, None, None)
    crashed, slow, second = opened(), opened(), opened()
    assert crashed.last() is slow.last() is None
    crashed._announce("state_crashed", data.schema, batch)
    crashed._create("state_crashed", data.schema)
    assert second.last() is None
    second.append(data, batch)
    tables = open_tables(current().connection("default"))
    assert stored_columns(tables, "weft", "state_crashed") is None
    # What it began is no longer announced.
    with pytest.raises(WeftError, match="another process has gone on"), tables.driver.session("publish") as session:
        crashed._note(session, batch, "state_crashed")
    with pytest.raises(WeftError, match="another process has gone on"):
        slow.append(data, batch)
    second.append(data, StateBatch(1, None, None))
    assert second.counts() == {60: 2}
    for each in (crashed, slow, second, tables):
        each.close()


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_batch_that_comes_again_is_counted_once() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    pipeline = make(name="per_minute", source=events, target="default", target_table="counts", window=window())
    reports: list[Report] = []

    def run() -> None:
        engine = SparkEngine(pipeline)
        with engine.locked():
            engine.start(once=True, committed=lambda: None, report=reports.append, idle=None)
            engine.wait()

    publish(events, ("ann", 1, 1), ("ann", 61, 1))
    run()
    publish(events, ("ann", 2, 1), ("ann", 121, 1))
    run()
    forget_last_commit("per_minute")
    run()
    found = [(each.consumed, each.windows.late, each.windows.emitted) for each in reports if each.windows is not None]
    assert found == [(2, 0, 1), (2, 1, 1), (0, 0, 0)]


@pytest.mark.usefixtures("here")
def test_a_restart_does_not_fold_what_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "_COMPACT_ROWS", 10)
    pipeline = make(name="p", source=declare(user="string"), target="default", target_table="counts", window=window())
    store = InMemoryState()
    groups = [str(n) for n in range(20)]
    rows = pa.table({END: [60] * 20, BATCH: [0] * 20, "user": groups, "n": [1] * 20})
    first = Windows(pipeline, store)
    store.append(rows.cast(first._first_schema(rows.schema)), StateBatch(0, None, None))
    again = Windows(pipeline, store)
    assert not again._is_long(rows.slice(0, 10))
    for number in (1, 2, 3, 4):
        store.append(rows.cast(first._first_schema(rows.schema)), StateBatch(number, None, None))
    assert Windows(pipeline, store)._is_long(rows)
