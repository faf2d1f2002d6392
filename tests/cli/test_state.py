"""`weft state`: what waits in windows, why, and how it is removed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.engine.readers import opened_tables
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.project import Project, current
from weft.server.streaming import read_one
from weft.systems.sql.state_store import SqlState
from weft.systems.state_store import BATCH, END, StateBatch

pytestmark = pytest.mark.spark

pytest.importorskip("pyspark")
START = datetime(2026, 11, 1, 12, tzinfo=UTC)


@pytest.fixture
def events(local: Project) -> Any:
    """Two streams, and a pipeline that counts their events by the minute."""
    streams = [weft.stream(name=name, fields={"at": "timestamp"})(lambda: None) for name in ("left", "right")]

    @weft.streaming_pipeline(
        sources=[weft.Source(query=each) for each in streams],
        target="default",
        target_table="counts",
        window=weft.Window(
            kind="tumbling",
            duration_ms=60_000,
            event_time_column="at",
            aggregations=[weft.Aggregation(agg="count", as_="n")],
        ),
        watermark=weft.Watermark(lateness_ms=5_000),
    )
    def per_minute() -> None:
        pass

    return streams


def publish(stream: Any, *seconds: float) -> None:
    weft.publish_sync(stream, [{"at": START + timedelta(seconds=second)} for second in seconds])


def run() -> None:
    supervise(SparkEngine(current().streaming_pipelines["per_minute"]), Running(once=True))


def listed(call: Any, *arguments: str) -> Any:
    return json.loads(call(*arguments, "--format", "json").stdout)


def test_what_waits_and_why(call: Any, events: Any) -> None:
    left, right = events
    assert "No declared pipeline has a state" in call("state", "list").stderr
    assert "per_minute has no state yet" in call("state", "show", "per_minute", code=1).stderr
    publish(left, 1, 61, 200)
    run()
    assert "source right: no rows yet, holds the watermark" in call("state", "why", "per_minute").stdout
    publish(right, 2, 90)
    run()
    (row,) = listed(call, "state", "list")
    assert (row["pipeline"], row["of"], row["batch"], row["windows"]) == ("per_minute", "this checkpoint", 1, 2)
    assert row["watermark"] == "2026-11-01T12:01:25+00:00"
    shown = call("state", "show", "per_minute").stdout
    assert "2026-11-01 12:03" in shown
    assert [each["rows"] for each in listed(call, "state", "show", "per_minute")] == [2, 1]
    why = call("state", "why", "per_minute").stdout
    assert "source left: rows up to 2026-11-01 12:03:20" in why
    assert "source right: rows up to 2026-11-01 12:01:30" in why
    assert "It closes with a row of right at 2026-11-01 12:02:05" in why
    # The page of the service shows the same.
    page = read_one(current().streaming_pipelines["per_minute"])
    assert (page["committed"], page["state_problem"], page["running"]) == (1, None, None)
    assert [(each["source"], each["lag"]) for each in page["lag"]] == [("left", 0), ("right", 0)]
    assert (page["state"]["windows"], page["watermark"]["held_by"]) == (2, ["right"])
    assert page["watermark"]["next_window_ends"] == START + timedelta(minutes=2)
    minute = {"window_start": START + timedelta(minutes=1), "window_end": START + timedelta(minutes=2), "rows": 2}
    assert page["waiting"][0] == minute
    # What the batches did is told by the process that ran them.
    activity = page["activity"]
    assert (activity["batches"], activity["rows_in"], activity["last"]["batch"]) == (2, 5, 1)
    assert (activity["windows"]["open"], activity["windows"]["emitted"]) == (2, 1)


def test_a_watermark_before_the_year_1(call: Any, local: Project) -> None:
    ancient = weft.stream(name="ancient", fields={"at": "timestamp"})(lambda: None)

    @weft.streaming_pipeline(
        source=ancient,
        target="default",
        target_table="counts",
        window=weft.Window(
            kind="tumbling",
            duration_ms=60_000,
            event_time_column="at",
            aggregations=[weft.Aggregation(agg="count", as_="n")],
        ),
        watermark=weft.Watermark(lateness_ms=30 * 86_400_000),
    )
    def per_minute() -> None:
        pass

    weft.publish_sync(ancient, {"at": datetime(1, 1, 5, tzinfo=UTC)})
    run()
    assert "watermark: 1-01-01 00:00 UTC" in call("state", "why", "per_minute").stdout
    assert listed(call, "state", "list")[0]["watermark"] == "0001-01-01T00:00:00+00:00"


@pytest.mark.full
def test_earlier_states_are_removed(call: Any, events: Any) -> None:
    left, right = events
    publish(left, 1)
    publish(right, 1)
    run()
    call("checkpoints", "reset", "per_minute")
    run()
    assert [each["of"] for each in listed(call, "state", "list")] == ["this checkpoint", "an earlier one"]
    call("state", "drop", "per_minute", "--yes")
    assert "The key of per_minute has 0 columns" in call("state", "show", "per_minute", "--key", "1", code=1).stderr
    (kept,) = listed(call, "state", "list")
    assert kept["of"] == "this checkpoint"
    assert "nothing to remove" in call("state", "drop", "per_minute", "--yes").stderr
    publish(left, 66)
    publish(right, 66)
    run()
    assert [row.n for row in weft.read("SELECT n FROM counts", source="default").collect()] == [2]


def test_a_pipeline_that_is_no_longer_declared(call: Any, local: Project) -> None:
    assert "No pipeline in default has a state" in call("state", "list", "--connection", "default").stderr
    schema = pa.schema([(END, pa.int64()), (BATCH, pa.int64())])
    row = pa.Table.from_pylist([{END: 5, BATCH: 0}], schema)
    with opened_tables(current().connection("default")) as tables:
        for name in ("gone", "other"):
            state = SqlState(tables, name, f"query of {name}", "here:checkpoints")
            state.last()
            state.append(row, StateBatch(0, None, None))
    assert "No declared pipeline has a state" in call("state", "list").stderr
    found = listed(call, "state", "list", "--connection", "default")
    assert [(each["pipeline"], each["of"], each["rows"]) for each in found] == [
        ("gone", "here:checkpoints", 1),
        ("other", "here:checkpoints", 1),
    ]
    missing = call("state", "drop", "gon", "--connection", "default", "--yes", code=1).stderr
    assert "There is no state of gon in default" in missing and "gone" in missing
    assert "Removed 1 state" in call("state", "drop", "gone", "--connection", "default", "--yes").stderr
    (kept,) = listed(call, "state", "list", "--connection", "default")
    assert kept["pipeline"] == "other"
    with opened_tables(current().connection("default")) as tables, tables.driver.session("read") as session:
        assert [name for name in tables.names(session, "weft") if name.startswith("state_gone")] == []


def test_one_that_is_declared_is_not_gone(call: Any, events: Any) -> None:
    refused = call("state", "drop", "per_minute", "--connection", "default", "--yes", code=1)
    assert "per_minute is declared" in refused.stderr


def test_a_rewind_is_refused(call: Any, events: Any) -> None:
    found = call("checkpoints", "rewind", "per_minute", "--to-offset", "1", "--source", "left", code=1)
    assert "what is read again would be in its state twice" in found.stderr


def test_state_in_files(call: Any, local: Project) -> None:
    stream = weft.stream(name="left", fields={"at": "timestamp"})(lambda: None)
    counted = weft.Window(
        kind="tumbling", duration_ms=60_000, event_time_column="at", aggregations=[weft.Aggregation(agg="count")]
    )
    options: dict[str, Any] = {"source": stream, "target": "default", "target_table": "counts", "window": counted}
    weft.streaming_pipeline(name="per_minute", state_store=weft.StateStore(kind="files"), **options)(lambda: None)
    assert "per_minute has no state yet" in call("state", "show", "per_minute", code=1).stderr
    publish(stream, 1, 61)
    run()
    (row,) = listed(call, "state", "list")
    assert (row["rows"], row["windows"], "/state/" in row["table"]) == (1, 1, True)
    assert [each["rows"] for each in listed(call, "state", "show", "per_minute")] == [1]
    assert listed(call, "state", "why", "per_minute")["held_by"] == ["left"]
    assert "nothing to remove" in call("state", "drop", "per_minute", "--yes").stderr
