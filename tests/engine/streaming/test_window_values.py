"""Values that a window meets and a database would refuse, and what a crash leaves of its state."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
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


@pytest.mark.parametrize("kind", ["tumbling", "session"])
@pytest.mark.brief("mysql-tumbling")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_values_that_a_database_refuses(kind: str) -> None:
    events = declare(user="string", at="timestamp", v="int64")
    sql = (
        "SELECT concat(user, char(0), 'é', char(26), '0') AS user, double('NaN') AS f, repeat('x', 1000000) AS big, "
        "at, IF(v = 1, double('-Infinity'), double('Infinity')) AS v FROM source"
    )
    of_session = {"kind": kind, "gap_ms": 10_000, "max_session_duration_ms": 60_000, "duration_ms": None}
    own = window(
        **(of_session if kind == "session" else {}),
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


@pytest.mark.full
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_sum_of_decimals_that_is_too_large(batches: int) -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = window(aggregations=[weft.Aggregation(agg="sum", column="v", as_="total")])
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    options["transform_sql"] = "SELECT user, at, CAST(v AS DECIMAL(38, 0)) * 10000000000000000000 AS v FROM source"
    options["dead_letter_table"] = "failed"
    publish(events, ("ann", 1, MOST), ("bob", 1, 7), ("bob", 2, 1), *([("ann", 2, MOST)] if batches == 1 else []))
    run_once(**options)
    publish(events, ("ann", 3, MOST), ("bob", 61, 1))
    run_once(**options)
    assert [each[2:] for each in rows("counts")] == [("bob", 8 * 10**19)]
    (letter,) = letters_of(make(target="default", **options))
    assert json.loads(letter.payload)["user"] == "ann"


@pytest.mark.full
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


HALF = 1 << 62


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "streams")
def test_a_sum_that_is_too_large_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "_COMPACT_ROWS", 0)  # stored sums are folded into larger ones
    monkeypatch.setattr(windows_module, "_COMPACT_RATIO", 1)
    events = declare(user="string", at="timestamp", v="int64")
    own = window(aggregations=[weft.Aggregation(agg="sum", column="v", as_="total")])
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    of_batch = [("ann", 1, HALF), ("ann", 2, HALF), ("ann", 3, HALF), ("ann", 4, -HALF), ("ann", 5, -HALF - 3)]
    publish(events, *of_batch, ("bob", 1, MOST), ("bob", 2, MOST), ("cid", 1, -MOST), ("cid", 2, -MOST))
    run_once(**options)
    publish(events, ("bob", 3, MOST), ("cid", 3, -MOST))
    run_once(**options)
    publish(events, *(("bob", 4 + n, -MOST) for n in range(2)), *(("cid", 4 + n, MOST) for n in range(3)))
    publish(events, ("cid", 9, -MOST - 1), ("dan", 61, 1))
    run_once(**options)
    assert [each[2:] for each in rows("counts")] == [("ann", HALF - 3), ("bob", MOST), ("cid", -MOST - 1)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tumbling", "session"])
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_window_that_is_written_again_has_no_older_sum(kind: str) -> None:
    events = declare(user="string", at="timestamp", v="int64")
    total = [COUNT, weft.Aggregation(agg="sum", column="v", as_="total")]
    own = window(emit="update", aggregations=total)
    if kind == "session":
        limits = {"gap_ms": 10_000, "max_session_duration_ms": 60_000, "duration_ms": None}
        own = window(kind="session", emit="update", aggregations=total, **limits)
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    options |= {"mode": "merge", "keys": list(own.keys), "dead_letter_table": "failed"}
    seen = []
    for more in (MOST, 1, -2):
        publish(events, ("ann", 1 + len(seen), more))
        run_once(**options)
        seen.append([each[-2:] for each in rows("counts")])
    assert seen == [[(1, MOST)], [(2, None)], [(3, MOST - 1)]]
    (letter,) = letters_of(make(target="default", **options))
    assert letter.error == "The window has a null in its place: a sum is larger than its type can hold (total)."


@pytest.mark.full
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


@pytest.mark.brief("mysql")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_integers_after_decimals() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = window(aggregations=[weft.Aggregation(agg=each, column="v", as_=each) for each in ("sum", "max", "first")])
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    publish(events, ("ann", 1, 3))
    run_once(transform_sql="SELECT user, at, CAST(v + 0.25 AS DECIMAL(4, 2)) AS v FROM source", **options)
    publish(events, ("ann", 2, MOST), ("ann", 61, 1))
    run_once(**options)
    total, most, first = rows("counts")[0][3:]
    assert (total, most, first) == (MOST + Decimal("3.25"), MOST, Decimal("3.25"))


@pytest.mark.brief("mysql-tumbling")
@pytest.mark.parametrize("kind", ["tumbling", "session"])
@pytest.mark.usefixtures("plain_spark", "streams")
def test_sums_whose_first_rows_have_no_value(kind: str) -> None:
    """They have the type of the values that come later, also where windows were written before that."""
    events = declare(user="string", at="timestamp", v="int64")
    limits = {"gap_ms": 10_000, "max_session_duration_ms": 60_000, "duration_ms": None} if kind == "session" else {}
    own = window(
        kind=kind, aggregations=[COUNT, weft.Aggregation(agg="sum", column="v", as_="total")], group_by="user", **limits
    )
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    publish(events, ("ann", 1, 1), ("ann", 61, 1))
    run_once(transform_sql="SELECT user, at, NULL AS v FROM source", **options)
    assert rows("counts", "n") == [(1,)]
    publish(events, ("ann", 62, MOST - 1), ("ann", 121, 1))
    run_once(transform_sql="SELECT user, at, v FROM source", **options)
    assert rows("counts", "n, total") == [(1, None), (2, MOST - 1)]


@pytest.mark.brief("count")
@pytest.mark.parametrize("agg", ["count", "sum"])
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_state_of_an_older_version(agg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only aggregates that are stored otherwise now are refused."""
    events = declare(user="string", at="timestamp", v="int64")
    own = window(aggregations=[weft.Aggregation(agg=agg, column="v", as_="n")])
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    publish(events, ("ann", 1, 1))
    with monkeypatch.context() as older:
        older.setattr(windows_module, "_FORM", 2)
        older.setattr(windows_module, "_FORMS", {})
        run_once(**options)
    publish(events, ("ann", 2, 1), ("ann", 61, 1))
    if agg == "sum":
        with pytest.raises(WeftError, match="is another one than that of its state"):
            run_once(**options)
    else:
        run_once(**options)
        assert rows("counts", "n") == [(2,)]


@pytest.mark.brief("sqlite", "mysql")
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


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "streams")
def test_times_that_no_database_gives_back() -> None:
    events = declare(user="string", at="timestamp", v="int64")
    sql = (
        "SELECT *, timestamp_micros(v * 1000000) AS t, date_from_unix_date(CAST(v div 86400 AS INT)) AS d, "
        "CAST(timestamp_micros(v * 1000000) AS timestamp_ntz) AS z FROM source"
    )
    own = window(
        group_by=("user", "d"),
        aggregations=[weft.Aggregation(agg=agg, column=name, as_=name) for agg, name in (("max", "t"), ("last", "z"))],
    )
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    options |= {"transform_sql": sql, "dead_letter_table": "failed"}
    last, first = 253_402_300_799, -62_135_596_800
    publish(events, ("ann", 1, last), ("bob", 1, last + 1), ("cid", 1, first), ("dan", 1, first - 1), ("ann", 61, 1))
    run_once(**options)
    publish(events, ("ann", 121, 1))
    run_once(**options)
    assert sorted((each[2], str(each[4])[:4], str(each[5])[:4]) for each in rows("counts")) == [
        ("ann", "1970", "1970"),
        ("ann", "9999", "9999"),
        ("cid", "0001", "0001"),
    ]
    letters = letters_of(make(target="default", **options))
    assert [(json.loads(each.payload)["user"], json.loads(each.payload)["t"]) for each in letters] == [
        ("bob", "10000-01-01 00:00:00.000000Z"),
        ("dan", "0000-12-31 23:59:59.000000Z"),
    ]
    assert letters[0].error == "The row has a time outside of the years 1 to 9999."


@pytest.mark.full
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
    assert not again._long(rows.slice(0, 4), None)
    for number in (1, 2, 3, 4):
        store.append(rows.cast(first._first_schema(rows.schema)), StateBatch(number, None, None))
    assert Windows(pipeline, store)._long(rows, None) == (60,)
    assert not Windows(pipeline, store)._long(rows, 60), "it closes with this batch"


def publish_texts(stream: Any, *texts: str | None) -> None:
    """Publish a text for each second of START's minute, and a row of the next minute."""
    weft.publish_sync(
        stream,
        [{"user": "ann", "at": START + timedelta(seconds=at), "v": text} for at, text in enumerate(texts)]
        + [{"user": "ann", "at": START + timedelta(seconds=61), "v": "1"}],
    )


NUMBERS = [weft.Aggregation(agg=each, column="v", as_=each) for each in ("sum", "avg", "stddev")]
NUMBERS += [weft.Aggregation(agg="approx_percentile", column="v", percentage=1.0, as_="most"), COUNT]


@pytest.mark.full
@pytest.mark.parametrize("sql", [None, "SELECT * FROM source WHERE user <> 'bob'"], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["tumbling", "session"])
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_text_that_is_no_number_is_a_bad_row(kind: str, sql: str | None) -> None:
    events = declare(user="string", at="timestamp", v="string")
    limits = {"gap_ms": 10_000, "max_session_duration_ms": 60_000, "duration_ms": None} if kind == "session" else {}
    own = window(kind=kind, aggregations=NUMBERS, **limits)
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    publish_texts(events, "1", "abc", None, "3", "")
    with pytest.raises(LoadRefusedError, match="takes no row that has a text that is no number in v: 2 rows"):
        run_once(**options, transform_sql=sql)
    options["dead_letter_table"] = "failed"
    run_once(**options, transform_sql=sql)
    assert [each[-5:] for each in rows("counts")] == [(4.0, 2.0, pytest.approx(2**0.5), 3.0, 3)]
    letters = letters_of(make(target="default", **options))
    assert [(json.loads(each.payload)["v"], each.offset, each.error) for each in letters] == [
        ("abc", "2", "The row has a text that is no number in v."),
        ("", "5", "The row has a text that is no number in v."),
    ]


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_text_that_is_no_number_is_dropped() -> None:
    events = declare(user="string", at="timestamp", v="string")
    publish_texts(events, "1", "abc", "3")
    run_once(
        name="per_minute",
        source=events,
        target_table="counts",
        window=window(aggregations=NUMBERS),
        transform_sql="SELECT * FROM source",
        transform_on_error="drop",
    )
    assert [each[-5:] for each in rows("counts")] == [(4.0, 2.0, pytest.approx(2**0.5), 3.0, 2)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_an_average_that_its_type_cannot_hold() -> None:
    events = declare(user="string", at="timestamp", v="string")
    own = window(aggregations=[weft.Aggregation(agg="avg", column="v", as_="mean")])
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    options |= {"transform_sql": "SELECT user, at, CAST(v AS DECIMAL(38, 0)) AS v FROM source"}
    publish_texts(events, "9" * 38)
    run_once(**options, dead_letter_table="failed")
    (letter,) = letters_of(make(target="default", **options, dead_letter_table="failed"))
    assert "larger than its type can hold (mean)" in letter.error


@pytest.mark.brief("update")
@pytest.mark.parametrize("emit", ["close", "update"])
@pytest.mark.usefixtures("plain_spark", "here")
def test_sql_that_fails_for_an_emitted_row(emit: str) -> None:
    events = declare(user="string", at="timestamp", v="int64")
    own = window(
        emit=emit,
        aggregations=[weft.Aggregation(agg="sum", column="v", as_="total")],
        emit_sql="SELECT window_start, user, 12 / total AS part FROM windows",
    )
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    options |= {"mode": "merge", "keys": ["user", "window_start"]} if emit == "update" else {}
    publish(events, ("ann", 1, 3), ("bob", 1, 0), ("cid", 1, 4), *([("ann", 61, 12)] if emit == "close" else []))
    with pytest.raises(WeftError, match=r"could not run the emit_sql of per_minute.*DIVIDE_BY_ZERO"):
        run_once(**options)
    options["dead_letter_table"] = "failed"
    run_once(**options)
    assert [each[1:] for each in rows("counts")] == [("ann", 4.0), ("cid", 3.0)]
    (letter,) = letters_of(make(target="default", **options))
    assert (json.loads(letter.payload)["user"], letter.stage) == ("bob", "transform")
    assert "DIVIDE_BY_ZERO" in letter.error and ("stays" in letter.error) == (emit == "update")
    if emit == "update":
        publish(events, ("bob", 2, 6), ("ann", 3, -3))  # ann's sum is 0 now
        run_once(**options)
        assert [each[1:] for each in rows("counts")] == [("ann", 4.0), ("bob", 2.0), ("cid", 3.0)]
