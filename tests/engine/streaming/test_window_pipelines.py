"""Pipelines with windows, from a stream to a table."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import generate_latest

import weft
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.letters import letters_of
from weft.engine.readers import open_tables
from weft.engine.streaming.spark_engine import SparkEngine
from weft.errors import DeclarationError, LoadRefusedError, WeftError
from weft.operate.streaming_metrics import StreamingMetrics
from weft.pipelines.streaming import toml
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Report
from weft.project import current
from weft.systems.sql.state_store import SqlState
from weft.systems.state_store import BATCH, END, StateBatch

START = datetime(2026, 11, 1, 12, tzinfo=UTC)
COUNT = weft.Aggregation(agg="count", as_="n")


def window(**options: Any) -> weft.Window:
    defaults = {"kind": "tumbling", "duration_ms": 60_000, "group_by": "user", "event_time_column": "at"}
    return weft.Window(**{**defaults, "aggregations": [COUNT], **options})


def publish(stream: Any, *events: tuple[str | None, float]) -> None:
    """Publish events of users at seconds after START."""
    weft.publish_sync(stream, [{"user": user, "at": START + timedelta(seconds=at)} for user, at in events])


def minutes(table: str = "counts") -> list[tuple[Any, ...]]:
    """Return minute, user and count of each row."""
    found = [(each[0], *each[2:]) for each in rows(table)]
    return sorted(((start - START) // timedelta(minutes=1), user, n) for start, user, n in found)


@pytest.mark.brief("sqlite")
@pytest.mark.usefixtures("plain_spark", "streams")
def test_a_late_row_is_dropped() -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": window()}
    publish(events, ("ann", 1), ("ann", 2), ("bob", 59), ("ann", 61))
    run_once(**options)
    assert minutes() == [(0, "ann", 2), (0, "bob", 1)]
    publish(events, ("ann", 3), ("ann", 119), ("ann", 120))
    run_once(**options)
    assert minutes() == [(0, "ann", 2), (0, "bob", 1), (1, "ann", 2)]


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "streams")
def test_a_late_row_reopens_its_window() -> None:
    events = declare(user="string", at="timestamp")
    own = window(late_data="reopen", allowed_lateness_ms=60_000)
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": own}
    options |= {"mode": "merge", "keys": ["user", "window_start"]}
    publish(events, ("ann", 1), ("bob", 2), ("ann", 61))
    run_once(**options)
    publish(events, ("ann", 3))
    run_once(**options)
    assert minutes() == [(0, "ann", 2), (0, "bob", 1)]
    publish(events, ("ann", 121))
    run_once(**options)
    publish(events, ("bob", 4))  # a minute after its window's end and more
    run_once(**options)
    assert minutes() == [(0, "ann", 2), (0, "bob", 1), (1, "ann", 1)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_rows_that_are_in_no_window_are_dead_letters() -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {
        "name": "per_minute",
        "source": events,
        "target_table": "counts",
        "window": window(late_data="dlq"),
        "dead_letter_table": "failed",
    }
    publish(events, ("ann", 1), ("ann", 61))
    run_once(**options)
    weft.publish_sync(events, [{"user": "bob"}, {"user": "cid", "at": datetime(2200, 1, 1, tzinfo=UTC)}])
    publish(events, ("ann", 2))
    run_once(**options)
    assert minutes() == [(0, "ann", 1)]
    letters = letters_of(make(target="default", **options))
    assert [(json.loads(each.payload)["user"], each.offset, each.error) for each in letters] == [
        ("ann", "5", "The row is late: its window has closed."),
        ("bob", "3", "The row has no event time."),
        ("cid", "4", "The row has a time that is further in the future than max_future_ms allows."),
    ]


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_row_without_a_time_and_no_place_for_it() -> None:
    events = declare(user="string", at="timestamp")
    weft.publish_sync(events, [{"user": "bob"}])
    with pytest.raises(LoadRefusedError, match="takes no row that has no event time: 1 row"):
        run_once(name="per_minute", source=events, target_table="counts", window=window())


@pytest.mark.usefixtures("plain_spark", "here")
def test_more_groups_than_a_window_may_have() -> None:
    events = declare(user="string", at="timestamp")
    own = window(max_groups_per_window=2)
    publish(events, ("ann", 1), ("bob", 2))
    run_once(name="per_minute", source=events, target_table="counts", window=own)
    publish(events, ("ann", 3), ("bob", 4))  # more stored rows than groups
    run_once(name="per_minute", source=events, target_table="counts", window=own)
    publish(events, ("cid", 5), ("ann", 70))
    with pytest.raises(LoadRefusedError, match=r"max_groups_per_window=2 reached \(3 groups\)"):
        run_once(name="per_minute", source=events, target_table="counts", window=own)
    run_once(name="per_minute", source=events, target_table="counts", window=window(max_groups_per_window=3))
    assert minutes() == [(0, "ann", 2), (0, "bob", 2), (0, "cid", 1)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_window_that_was_changed() -> None:
    events = declare(user="string", at="timestamp")
    publish(events, ("ann", 1))
    run_once(name="per_minute", source=events, target_table="counts", window=window())
    # When it starts, though no rows wait.
    with pytest.raises(DeclarationError, match="another one than that of its state"):
        run_once(name="per_minute", source=events, target_table="counts", window=window(duration_ms=30_000))
    elsewhere = weft.StateStore(kind="files")
    with pytest.raises(DeclarationError, match=r"The windows of per_minute are in .*, and now its state would be in"):
        run_once(name="per_minute", source=events, target_table="counts", window=window(), state_store=elsewhere)


@pytest.mark.usefixtures("plain_spark", "here")
def test_columns_that_the_rows_do_not_have() -> None:
    events = declare(user="string", at="timestamp")
    publish(events, ("ann", 1))
    for options, message in [
        ({"group_by": "usr"}, "group_by of the window 'usr' is not a column of the rows"),
        ({"event_time_column": "att"}, "event_time_column of the window 'att' is not a column"),
        ({"event_time_column": "user"}, "needs a time, and the column 'user' is string"),
    ]:
        with pytest.raises(DeclarationError, match=message):
            run_once(name="per_minute", source=events, target_table="counts", window=window(**options))


@pytest.mark.usefixtures("plain_spark", "here")
def test_every_batch_updates_its_windows() -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts"}
    options |= {"window": window(emit="update"), "mode": "merge", "keys": ["user", "window_start"]}
    publish(events, ("ann", 1), ("bob", 2))
    run_once(**options)
    assert minutes() == [(0, "ann", 1), (0, "bob", 1)]
    publish(events, ("ann", 3), ("ann", 61))
    run_once(**options)
    assert minutes() == [(0, "ann", 2), (0, "bob", 1), (1, "ann", 1)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_metrics(project: Path) -> None:
    events = declare(user="string", at="timestamp")
    publish(events, ("ann", 1), ("bob", 2), ("ann", 61), ("ann", 121))
    pipeline = make(name="per_minute", source=events, target="default", target_table="counts", window=window())
    reports: list[Report] = []
    engine = SparkEngine(pipeline)
    metrics = StreamingMetrics(engine)
    for more in ((), (("ann", 5), ("bob", 122))):
        publish(events, *more)
        with engine.locked():
            engine.start(once=True, committed=lambda: None, report=reports.append, idle=None)
            engine.wait()
    for each in reports:
        metrics.batch(each)
    text = generate_latest(metrics.registry).decode()
    found = dict(re.findall(r"^weft_streaming_(\w+)\{pipeline=\"per_minute\"[^}]*\} (\S+)$", text, re.MULTILINE))
    assert 'late_rows_dropped_total{pipeline="per_minute",policy="drop"} 1.0' in text
    newest = START.timestamp() * 1e6 + 122e6
    for name, value in {
        "windows_emitted_total": 3,
        "late_rows_dropped_total": 1,
        "windows_active": 1,
        "state_groups_total": 2,
        "global_watermark_micros": newest,
        "per_source_watermark_micros": newest,
        "rows_consumed_total": 6,
        "batches_total": 2,
    }.items():
        assert float(found[name]) == value, name


@pytest.mark.usefixtures("spark", "here")
def test_state_beside_the_checkpoint(project: Path) -> None:
    lake = weft.DeltaLocalConnection(str(project / "lake"))
    events = declare(user="string", at="timestamp")
    publish(events, ("ann", 1), ("ann", 61))
    run_once(name="per_minute", source=events, target=lake, target_table="counts", window=window())
    assert [row.n for row in weft.read("counts", source=lake).collect()] == [1]


SHAPES = [
    "SELECT user, CAST(text AS timestamp) AS at FROM source",
    "WITH x AS (SELECT user, CAST(text AS timestamp) AS at FROM source) SELECT user, at FROM x",
    "SELECT user, at FROM (SELECT user, CAST(text AS timestamp) AS at FROM source) y",
    "SELECT user, CAST(text AS timestamp) AS at FROM source UNION ALL SELECT user, NULL FROM source WHERE false",
]


@pytest.mark.parametrize("sql", SHAPES, ids=["plain", "cte", "subquery", "union"])
@pytest.mark.brief("cte")
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_late_row_beside_one_that_sql_fails_for(sql: str) -> None:
    events = declare(user="string", text="string")
    options: dict[str, Any] = {
        "name": "per_minute",
        "source": events,
        "target_table": "counts",
        "transform_sql": sql,
        "transform_on_error": "dlq",
        "window": window(late_data="dlq"),
        "dead_letter_table": "failed",
    }
    times = {0: "2026-11-01T12:00:01Z", 1: "2026-11-01T12:01:01Z"}
    weft.publish_sync(events, [{"user": "ann", "text": text} for text in times.values()])
    run_once(**options)
    weft.publish_sync(events, [{"user": "bob", "text": times[0]}, {"user": "cid", "text": "soon"}])
    run_once(**options)
    assert minutes() == [(0, "ann", 1)]
    letters = letters_of(make(target="default", **options))
    assert sorted(json.loads(each.payload)["user"] for each in letters) == ["bob", "cid"]


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_rows_that_are_left_out_are_not_too_many_for_an_aggregate() -> None:
    events = declare(user="string", at="timestamp", page="string")
    own = weft.Aggregation(agg="count_distinct", column="page", mode="exact", max_distinct_values_per_group=1, as_="n")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts"}
    options["window"] = window(aggregations=[own])

    def publish_pages(*seen: tuple[str, float]) -> None:
        rows = [{"user": "ann", "page": page, "at": START + timedelta(seconds=at)} for page, at in seen]
        weft.publish_sync(events, rows)

    publish_pages(("a", 1), ("a", 61))
    run_once(**options)
    publish_pages(("b", 2), ("c", 3))
    run_once(**options)
    assert minutes() == [(0, "ann", 1)]


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_column_of_nulls_gets_its_type_later(project: Path) -> None:
    lake = weft.ObjectStoreLocalConnection(str(project / "in"), format="json_lines")
    (project / "in" / "raw").mkdir(parents=True)
    own = window(
        group_by=(),
        aggregations=[weft.Aggregation(agg=each, column="v", as_=each) for each in ("min", "max", "sum", "last")],
    )
    for number, value in enumerate(("null", "10", "9", "1")):
        at = (START + timedelta(seconds=number if number < 3 else 90)).isoformat()
        (project / "in" / "raw" / f"{number}.json").write_text(f'{{"at": "{at}", "v": {value}}}\n')
        run_once(
            name="per_minute",
            source=lake,
            source_query="raw",
            target="default",
            target_table="counts",
            transform_sql="SELECT v, CAST(at AS timestamp) AS at FROM source",
            window=own,
        )
    assert [each[2:] for each in rows("counts")] == [(9, 10, 19, 9)]


@pytest.mark.full
@pytest.mark.usefixtures("plain_spark", "here")
def test_windows_that_are_gone_cannot_be_reopened() -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "mode": "merge"}
    options["keys"] = ["user", "window_start"]
    publish(events, ("ann", 1), ("ann", 2), ("ann", 61))
    run_once(window=window(), **options)
    publish(events, ("ann", 121))
    run_once(window=window(), **options)
    publish(events, ("ann", 3), ("ann", 63))
    run_once(window=window(late_data="reopen", allowed_lateness_ms=600_000), **options)
    assert minutes() == [(0, "ann", 2), (1, "ann", 2)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_state_that_is_elsewhere(project: Path) -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": window()}
    publish(events, ("ann", 1))
    run_once(**options)
    publish(events, ("ann", 61))
    other = weft.StateStore(connection=weft.SQLiteConnection(str(project / "other.db")))
    with pytest.raises(DeclarationError, match="and now its state would be in sqlite"):
        run_once(**options, state_store=other)
    run_once(**options)
    assert minutes() == [(0, "ann", 1)]


@pytest.mark.parametrize("place", ["database", "files"])
@pytest.mark.brief("database")
@pytest.mark.usefixtures("plain_spark", "here")
def test_a_state_that_is_gone(place: str, project: Path) -> None:
    """The rows of open windows are nowhere else: without an error nobody would notice that they are missing."""
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": window()}
    kept = project / "other.db"
    store = weft.StateStore(kind="files")
    if place == "database":
        store = weft.StateStore(connection=weft.SQLiteConnection(str(kept)))
    else:
        kept = project / ".weft" / "checkpoints" / "per_minute" / "state"
    run_once(**options, state_store=store)  # no rows, and no state
    publish(events, ("ann", 1))
    run_once(**options, state_store=store)
    kept.rename(project / "aside")
    publish(events, ("ann", 61))
    with pytest.raises(DeclarationError, match=r"The state of per_minute is gone from .*(other\.db|state)"):
        run_once(**options, state_store=store)
    if kept.is_dir():
        shutil.rmtree(kept)
    (project / "aside").rename(kept)
    run_once(**options, state_store=store)
    assert minutes() == [(0, "ann", 1)]


@pytest.mark.usefixtures("plain_spark", "here")
def test_an_old_checkpoint_that_is_brought_back(project: Path) -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"name": "per_minute", "source": events, "target_table": "counts", "window": window()}
    checkpoint = project / ".weft" / "checkpoints" / "per_minute"
    publish(events, ("ann", 1))
    run_once(**options)
    shutil.copytree(checkpoint, project / "old")
    publish(events, ("ann", 2))
    run_once(**options)
    shutil.rmtree(checkpoint)
    shutil.copytree(project / "old", checkpoint)
    publish(events, ("ann", 3))
    with pytest.raises(WeftError, match="not of the same time"):
        run_once(**options)


@pytest.mark.usefixtures("plain_spark", "here")
def test_a_pipeline_that_was_renamed_has_its_windows(project: Path) -> None:
    events = declare(user="string", at="timestamp")
    options: dict[str, Any] = {"source": events, "target_table": "counts", "window": window()}
    options["checkpoint"] = str(project / "cp")
    publish(events, ("ann", 1))
    run_once(name="old", **options)
    (project / "cp" / "sources.json").unlink()
    publish(events, ("ann", 2), ("ann", 61))
    run_once(name="new", **options)
    assert minutes() == [(0, "ann", 2)]


@pytest.mark.usefixtures("here")
def test_a_process_that_comes_too_late_removes_nothing() -> None:
    def opened() -> SqlState:
        return SqlState(open_tables(current().connection("default")), "per_minute", "query")

    rows = pa.table({END: [60], BATCH: [0], "n": [1]})
    late, first = opened(), opened()
    assert late.last() is first.last() is None
    first.append(rows, StateBatch(0, None, None))
    with pytest.raises(WeftError, match="another process has gone on"):
        late.append(rows, StateBatch(0, None, None))
    first.append(rows, StateBatch(1, None, None))
    assert first.counts() == {60: 2}
    first.close()
    late.close()


def test_a_window_in_a_file() -> None:
    text = """
pipeline_name = "per_minute"
[source]
query = "events"
[target]
connection = "default"
[target.table]
name = "counts"
[transform.window]
kind = "hopping"
duration_ms = 60000
hop_ms = 30000
group_by = ["user"]
[[transform.window.aggregations]]
agg = "count"
as = "n"
[watermark]
lateness_ms = 0
source_idleness_ms = 1000
[state_store]
kind = "postgres"
url = "postgres://localhost/state"
"""
    pipeline = toml.parse(text)
    assert pipeline.window == weft.Window(
        kind="hopping", duration_ms=60_000, hop_ms=30_000, group_by="user", aggregations=[COUNT]
    )
    assert pipeline.watermark == weft.Watermark(source_idleness_ms=1000)
    again = toml.parse(toml.to_toml(pipeline))
    assert (again.window, again.watermark, again.state_store) == (
        pipeline.window,
        pipeline.watermark,
        pipeline.state_store,
    )
    with pytest.raises(DeclarationError, match=r"\[\[transform.window.aggregations\]\].*count_distint"):
        toml.parse(text.replace('"count"', '"count_distint"'))
    with pytest.raises(DeclarationError, match=r"\[transform.window\].*hop_ms"):
        toml.parse(text.replace("hop_ms = 30000", ""))
    assert toml.parse(
        text.replace('kind = "postgres"\nurl = "postgres://localhost/state"', 'kind = "in_memory"')
    ).state_store


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"late_data": "reopen"}, 'late_data = "reopen" requires allowed_lateness_ms'),
        ({"kind": "hopping"}, 'kind = "hopping" requires hop_ms'),
        ({"hop_ms": 1}, 'hop_ms is for kind = "hopping"'),
        ({"kind": "hopping", "hop_ms": 60_001}, "rows between two windows would be in none"),
        ({"duration_ms": 0}, "duration_ms must be a whole number"),
        ({"aggregations": []}, "aggregations is empty"),
        ({"aggregations": [COUNT, COUNT]}, "two columns of the result are called 'n'"),
        ({"agregations": []}, "has no option 'agregations'"),
        (
            {"group_by": ("user", "_weft_publish_id")},
            "group_by has the column '_weft_publish_id': names .* belong to Weft",
        ),
        ({"group_by": "window_start"}, "two columns of the result are called 'window_start'"),
        ({"allowed_lateness_ms": 5}, 'is for late_data = "reopen"'),
        ({"kind": "session", "duration_ms": None}, 'kind = "session" requires gap_ms'),
        ({"kind": "session", "gap_ms": 5}, 'kind = "session" requires max_session_duration_ms'),
        ({"kind": "session", "gap_ms": 5, "max_session_duration_ms": 9, "group_by": ()}, "requires group_by"),
        ({"kind": "session", "gap_ms": 5, "max_session_duration_ms": 9}, "duration_ms is that of other windows"),
        ({"gap_ms": 5}, 'are for kind = "session"'),
        ({"duration_ms": None}, 'kind = "tumbling" requires duration_ms'),
    ],
)
def test_a_window_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        window(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agg": "sum"}, "sum needs a column"),
        ({"agg": "median", "column": "a"}, "agg is 'median'"),
        ({"agg": "count_distinct", "column": "a", "mode": "exact"}, "requires max_distinct_values_per_group"),
        ({"agg": "sum", "column": "a", "mode": "exact"}, "are for count_distinct"),
        ({}, "agg is missing"),
    ],
)
def test_an_aggregation_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        weft.Aggregation(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watermark": weft.Watermark()}, "watermark is for window"),
        ({"window": window(late_data="dlq")}, "no place for dead letters"),
        ({"window": window(late_data="reopen", allowed_lateness_ms=1)}, "its target must merge"),
        ({"window": window(emit="update")}, "its target must merge"),
        ({"window": window(emit="update"), "mode": "merge", "keys": ["user"]}, "the keys of a window"),
        ({"window": window(), "transform_sql": "SELECT max(at) AS at FROM source"}, r"several rows \(max\)"),
        ({"window": window(), "transform_sql": "SELECT * FROM source LIMIT 5"}, r"several rows \(LIMIT\)"),
        ({"window": window(), "transform_sql": "SELECT * FROM source UNION SELECT * FROM source"}, "not UNION ALL"),
        ({"window": "tumbling"}, "window is a str"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_window_that_does_not_fit_its_pipeline(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        make(name="per_minute", source=declare(user="string"), target="default", target_table="counts", **options)
