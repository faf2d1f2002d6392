"""`/api/v1/pipelines`, `/runs`, `/streaming` and `/graph`: what the views of the page show."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

import warm_python
import weft
from operations_project import declare_project, make_key, run_once
from servers import wait_until
from tests.engine.models.built import build
from weft.engine.run import PipelineRun
from weft.engine.streaming.activity import Activity
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.checkpoint_files import Verified
from weft.operate.logs import captured, log_file
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.scheduler import LEADER
from weft.pipelines.streaming.declare import find
from weft.pipelines.streaming.execution import Report, WindowReport
from weft.project import Project, current
from weft.server import changes, history, pipelines, streaming
from weft.server.history_table import STREAMING, Flow, HistoryTable
from weft.streams.rejected import common
from workers import declare

# Where streams are does not matter to any of it.
pytestmark = pytest.mark.parametrize("system", ["sqlite"], indirect=True)


KILLED = """
import os, signal, sys
from pathlib import Path
from weft.engine.streaming.lock import Lock

Lock("loader", Path(sys.argv[1]), "").take()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def log(streams: Project) -> Any:
    declare_project()
    with open_run_log() as opened:
        yield opened


def test_pipelines_and_models(log: RunLog, http: Any) -> None:
    run_once(log, "nightly", counts={"rows_read": 7, "inserted": 5})
    failed = run_once(log, "nightly", "failed", error="no luck")
    log.pause("customers")
    found = {each["name"]: each for each in http.get("/api/v1/pipelines").json()["pipelines"]}
    assert {name: each["kind"] for name, each in found.items()} == {
        "customers": "pipeline",
        "nightly": "pipeline",
        "revenue": "model",
    }
    assert found["customers"]["paused_at"] is not None
    assert found["customers"]["next_due"] is None
    nightly = found["nightly"]
    assert (nightly["status"], nightly["failures"], nightly["tags"]) == ("failed", 1, ["daily"])
    assert nightly["next_due"].endswith("T02:00:00Z")
    assert [each["status"] for each in nightly["runs"]] == ["succeeded", "failed"]
    assert nightly["runs"][-1]["run_id"] == failed


def test_one_pipeline_with_its_code_and_runs(log: RunLog, http: Any) -> None:
    run_once(log, "nightly", counts={"rows_read": 7}, metrics={"targets": [{"target": "totals", "rows_read": 7}]})
    run_once(log, "customers")
    shown = http.get("/api/v1/pipelines/nightly").json()
    assert (shown["mode"], shown["depends_on"], shown["targets"]) == ("merge", ["customers"], ["totals"])
    assert "SELECT 2 AS id" in shown["code"]
    (run,) = shown["runs"]
    assert (run["rows_read"], run["targets"]) == (7, [{"target": "totals", "rows_read": 7}])
    assert "owner" not in run
    assert http.get("/api/v1/pipelines/customers").json()["dependents"] == ["nightly"]
    assert http.get("/api/v1/pipelines/revenue").json()["inputs"] == ["orders", "totals"]
    missing = http.get("/api/v1/pipelines/nightl")
    assert missing.status_code == 404
    assert "nightly" in missing.json()["hint"]


def test_names_with_slashes(log: RunLog, http: Any) -> None:
    """Pipelines have any name that can be printed; in a path its slash is `%2F`."""
    for name in ("sales/daily", "<script>alert(1)</script>", "a/b/", "50%2F"):
        weft.pipeline(target="t", name=name)(list)
        part = quote(name, safe="")
        assert http.get(f"/api/v1/pipelines/{part}").json()["name"] == name
        assert http.get(f"/api/v1/pipelines/{part}/quarantine/").json()["tables"] == []
        assert http.post(f"/api/v1/pipelines/{part}/pause").status_code == 401
        assert http.get(f"/api/v1/pipelines/{part}/nothing").status_code == 404
    assert http.get("/api/v1/pipelines/sales/daily").status_code == 404


def test_runs_are_listed_and_shown(log: RunLog, http: Any) -> None:
    first = run_once(log, "customers")
    second = run_once(log, "nightly", "failed", error="no luck")
    assert [each["run_id"] for each in http.get("/api/v1/runs").json()["runs"]] == [second, first]
    assert [each["run_id"] for each in http.get("/api/v1/runs?limit=1").json()["runs"]] == [second]
    assert [each["run_id"] for each in http.get("/api/v1/runs?pipeline=customers").json()["runs"]] == [first]
    assert [each["error"] for each in http.get("/api/v1/runs?status=failed").json()["runs"]] == ["no luck"]
    assert http.get("/api/v1/runs?status=odd").status_code == 422
    shown = http.get(f"/api/v1/runs/{second}").json()
    assert (shown["pipeline"], [each["status"] for each in shown["attempts"]]) == ("nightly", ["failed"])
    missing = http.get("/api/v1/runs/none")
    assert missing.status_code == 404
    assert second in missing.json()["hint"]


def test_the_log_of_a_run_as_it_comes(
    log: RunLog, http: Any, streams: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: Any = log.claim("nightly", resume=False)
    url = f"/api/v1/runs/{claimed.run_id}/log"
    assert http.get(url).json()["text"] is None
    with captured(streams.root, claimed.run_id, 1):
        logging.getLogger("weft.runner").info("the first line")
    file = log_file(streams.root, claimed.run_id, 1)
    with file.open("a") as opened:
        opened.write("half of")
    part = http.get(url).json()
    assert part["text"].endswith("the first line\n")
    assert not part["ended"]
    with file.open("a") as opened:
        opened.write(" a line, öäü\nand more")
    rest = http.get(f"{url}?after={part['next']}&attempt=1").json()
    assert rest["text"] == "half of a line, öäü\n"
    log.finish(claimed, "succeeded")
    last = http.get(f"{url}?after={rest['next']}").json()
    assert (last["text"], last["ended"]) == ("and more", True)
    # A long one in parts, none of which cuts a line, and at first its end.
    monkeypatch.setattr(pipelines, "_LOG_BYTES", 100)
    file.write_text("".join(f"line {number:03}\n" for number in range(100)))
    assert http.get(url).json()["text"].splitlines()[-1] == "line 099"
    text, after = "", 0
    while True:
        part = http.get(f"{url}?after={after}").json()
        text, after = text + part["text"], part["next"]
        if part["ended"]:
            break
    assert text == file.read_text()
    assert http.get(f"{url}?attempt=2").status_code == 404
    assert http.get(f"{url}?after=x").status_code == 422


def test_no_file_but_a_log_is_read(log: RunLog, http: Any, streams: Project) -> None:
    run_once(log, "nightly")
    secret = Path(streams.root, ".weft", "secret-1.log")
    secret.write_text("secret")
    for run_id in ("..%2Fsecret", "../secret", "%2e%2e%2Fsecret"):
        answer = http.get(f"/api/v1/runs/{run_id}/log")
        assert answer.status_code == 404
        assert answer.json().get("text") is None


def test_streaming_pipelines(log: RunLog, http: Any) -> None:
    weft.publish_sync("orders", [{"id": 1}, {"id": 2}])
    (listed,) = http.get("/api/v1/streaming").json()["pipelines"]
    assert (listed["name"], listed["committed"], listed["running"], listed["problem"]) == ("loader", None, None, None)
    shown = http.get("/api/v1/streaming/loader").json()
    assert shown["targets"] == [{"name": "clean", "connection": "default", "mode": "append"}]
    assert shown["sql"] == "SELECT id FROM source"
    assert (shown["state"], shown["watermark"], shown["dead_letters"]) == (None, None, None)
    assert [each["source"] for each in shown["lag"]] == ["orders"]
    assert http.get("/api/v1/streaming/nobody").status_code == 404


def test_one_that_does_not_run_is_behind(log: RunLog, http: Any) -> None:
    """Its process no longer says how far it is behind, so the service looks."""
    weft.publish_sync("orders", [{"id": 1}, {"id": 2}, {"id": 3}])
    checkpoint = Checkpoint.of(find("loader"))
    for name, text in (("metadata", '{"id": "7"}'), ("offsets/0", 'v1\n{}\n{"offset": 1}'), ("commits/0", "v1\n{}")):
        file = checkpoint.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (listed,) = http.get("/api/v1/streaming").json()["pipelines"]
    assert (listed["committed"], listed["running"]) == (0, None)
    assert listed["lag"] == [{"source": "orders", "lag": 2}]


def test_one_that_runs_says_its_lag(log: RunLog, http: Any) -> None:
    checkpoint = Checkpoint.of(find("loader"))
    checkpoint.path.mkdir(parents=True)
    counts = dict.fromkeys(("batches", "rows_in", "rows_out", "busy_ms", "dead_letters"), 1)
    said = {"at": datetime.now(UTC).isoformat(), "lag": {"orders": 9}, "last": None, "windows": None, "cdc": None}
    (checkpoint.path / "activity.json").write_text(json.dumps(counts | said))
    (listed,) = http.get("/api/v1/streaming").json()["pipelines"]
    assert listed["lag"] == [{"source": "orders", "lag": 9}]


def test_which_processes_run(log: RunLog, http: Any) -> None:
    """The process that runs a streaming pipeline is known by the lock of its checkpoint."""
    assert http.get("/api/v1/processes").json()["processes"] == []
    log.attend("process:worker:1")
    held = Checkpoint.of(find("loader")).lock
    held.take()
    wait_until(lambda: len(http.get("/api/v1/processes").json()["processes"]) == 2, "both to be known")
    worker, loader = http.get("/api/v1/processes").json()["processes"]
    assert (worker["kind"], worker["pid"], worker["lives"]) == ("worker", os.getpid(), True)
    assert (loader["kind"], loader["pipeline"], loader["lives"]) == ("streaming", "loader", True)
    assert loader["failing"] is False
    held.release()
    log.leave("process:worker:1")
    wait_until(lambda: http.get("/api/v1/processes").json()["processes"] == [], "both to be gone")
    warm_python.run([sys.executable, "-c", KILLED, str(held._file)])
    wait_until(lambda: http.get("/api/v1/processes").json()["processes"] != [], "it to be seen")
    (killed,) = http.get("/api/v1/processes").json()["processes"]
    assert (killed["pipeline"], killed["lives"], killed["heard"]) == ("loader", False, killed["since"])


def test_what_a_streaming_pipeline_did(log: RunLog, http: Any, streams: Project) -> None:
    """The process that runs it may be another one: what it wrote is shown, and kept over the day."""
    checkpoint = Checkpoint.of(find("loader"))
    checkpoint.path.mkdir(parents=True)
    done = Activity(checkpoint)
    windows = WindowReport(0, 2, 9, 0, "drop", 1_700_000_000_000_000, {})
    with done.kept(SimpleNamespace(now=dict)):  # type: ignore[arg-type]
        done.note(Report("loader", 0, 5, {"clean": 4}, 1, False, 0.5, datetime.now(UTC), windows))
    (listed,) = http.get("/api/v1/streaming").json()["pipelines"]
    assert (listed["activity"]["rows_in"], listed["activity"]["last"]["rows_out"]) == (5, 4)
    assert listed["activity"]["failure"] is None
    assert history.read_flows() == {"loader": Flow(5, 4, 1, 500, 1, None, 9, 1_700_000_000_000)}
    minute = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=5)
    HistoryTable(STREAMING, 7).write(minute, history.read_flows())
    points = http.get("/api/v1/streaming/loader/history?hours=1").json()["points"]
    assert points[0] == [minute.timestamp(), 5, 4, 1, 500, 1, None, 9, 1_700_000_000_000]
    assert http.get("/api/v1/streaming/loader/history?hours=0").status_code == 422
    assert http.get("/api/v1/streaming/nobody/history").status_code == 404


def test_where_the_columns_of_a_model_come_from(log: RunLog, http: Any) -> None:
    """As `weft models show` says it, through other models, and with links to streams."""

    @weft.model(name="doubled")
    def doubled(orders: Any) -> str:
        return "SELECT id, id * 2 AS twice FROM orders"

    @weft.model(name="summed")
    def summed(doubled: Any) -> str:
        return "SELECT sum(twice) AS total, 1 AS one FROM doubled"

    weft.publish_sync("orders", [{"id": 1}])
    shown = http.get("/api/v1/models/summed").json()
    assert (shown["state"], shown["rows"], shown["problem"], shown["engine"]) == ("stale", None, None, "pushdown")
    assert shown["inputs"] == [{"name": "doubled", "kind": "model", "new": None}]
    origin = {"kind": "stream", "name": "orders", "table": "events.orders", "column": "id"}
    assert {each["column"]: each["comes_from"] for each in shown["columns"]} == {"total": [origin], "one": []}
    assert http.get("/api/v1/models/doubled").json()["dependents"] == ["summed"]
    # Of a table, what writes it.
    weft.pipeline(target="lines", name="writes_lines")(lambda: [{"n": 1}])
    PipelineRun(current().pipelines["writes_lines"], "first", datetime.now(UTC)).execute()

    @weft.model(name="copied")
    def copy(lines: Any) -> str:
        return "SELECT n FROM lines"

    copied = http.get("/api/v1/models/copied").json()
    assert copied["problem"] is None
    (column,) = copied["columns"]
    assert column["comes_from"] == [{"kind": "pipeline", "name": "writes_lines", "table": "lines", "column": "n"}]
    # Not a model, and one whose table is not there.
    assert http.get("/api/v1/models/nightly").status_code == 404
    assert "totals" in http.get("/api/v1/models/revenue").json()["problem"]


def test_what_a_model_leaves_out_of_a_stream(log: RunLog, http: Any) -> None:
    """Values that a column has no place for, in the words of `weft models show`."""
    weft.stream(name="prices", fields={"price": "float64"})(lambda: None)

    @weft.model(name="priced")
    def priced(prices: Any) -> str:
        return "SELECT price FROM prices"

    weft.publish_sync("prices", [{"price": 1.5}, {"price": "1,5"}])
    build(priced)
    assert http.get("/api/v1/models/priced").json()["left_out"] == [
        "prices: 1 event with a value of 'price' that its column has no place for: it is null here. "
        "Look: weft streams tail prices --since 1"
    ]


def test_what_changed_within_a_day(log: RunLog, http: Any, streams: Project) -> None:
    run_once(log, "nightly")
    run_once(log, "nightly", "failed", error="no luck\nat all")
    last = run_once(log, "nightly", "failed", error="no luck again")
    run_once(log, "customers", "failed", error="once")
    run_once(log, "customers")
    log.pause("customers")
    cancelled: Any = log.claim("revenue", resume=False)
    log.finish(cancelled, "cancelled")
    log.attend("process:worker:1")
    answer = http.get("/api/v1/changes").json()
    assert answer["problem"] is None
    assert [each["at"] for each in answer["changes"]] == sorted(
        (each["at"] for each in answer["changes"]), reverse=True
    )
    shown = {(each["what"], each["name"]): each for each in answer["changes"]}
    assert shown.keys() == {
        ("began to fail", "nightly"),
        ("recovered", "customers"),
        ("paused", "customers"),
        ("cancelled", "revenue"),
        ("started", "worker"),
    }
    failing = shown["began to fail", "nightly"]
    assert (failing["failures"], failing["note"], failing["run_id"]) == (2, "no luck again", last)
    assert shown["recovered", "customers"]["failures"] == 1
    # What fails for longer than a day is no news, and needs attention all the same.
    with closing(sqlite3.connect(streams.root / ".weft/runs.db")) as database, database:
        database.execute(
            "UPDATE \"weft.runs\" SET started_at = datetime('now', '-2 days') WHERE error LIKE 'no luck%at all'"
        )
    assert ("began to fail", "nightly") not in {(each["what"], each["name"]) for each in changes.read_changes()}


def test_the_scheduler(log: RunLog, http: Any) -> None:
    shown = http.get("/api/v1/scheduler").json()
    assert shown["leader"] == {"leads": False, "host": None, "pid": None, "since": None}
    assert (shown["running"], shown["paused"]) == ([], [])
    (waiting,) = shown["queue"]
    assert (waiting["pipeline"], waiting["is_due"], waiting["waits_for"]) == ("nightly", False, ["customers"])
    (planned,) = shown["next"]
    assert (planned["pipeline"], planned["schedule"]) == ("nightly", "0 2 * * * UTC")
    run_once(log, "customers")
    leads: Any = log.claim(LEADER, resume=False)
    shown = http.get("/api/v1/scheduler").json()
    assert (shown["leader"]["leads"], shown["queue"][0]["why"]) == (True, "due")
    log.finish(leads, "succeeded")
    claimed: Any = log.claim("nightly", resume=False)
    shown = http.get("/api/v1/scheduler").json()
    assert [each["run_id"] for each in shown["running"]] == [claimed.run_id]
    assert (shown["leader"]["leads"], shown["queue"]) == (False, [])
    log.finish(claimed, "succeeded")
    log.pause("nightly")
    shown = http.get("/api/v1/scheduler").json()
    assert ([each["pipeline"] for each in shown["paused"]], shown["next"]) == (["nightly"], [])
    assert http.get("/api/v1/pipelines/nightly").json()["next_due"] is None


def test_states_and_mirrors(log: RunLog, http: Any) -> None:
    assert http.get("/api/v1/state").json()["states"] == []
    window = weft.Window(
        kind="session",
        gap_ms=1000,
        max_session_duration_ms=60_000,
        group_by=("id",),
        aggregations=[weft.Aggregation(agg="count", as_="n")],
    )
    cdc = weft.CDC(envelope="debezium", key_field="after.id")
    for name, table, step in (("visits", "visits", {"window": window}), ("mirror", "copy", {"cdc": cdc})):
        orders: Any = current().streams["orders"]
        given: dict[str, Any] = {"name": name, "source": orders, "target": "default", "target_table": table, **step}
        weft.streaming_pipeline(**given)(lambda: None)
    shown = http.get("/api/v1/streaming/mirror").json()
    assert (shown["verified"], shown["step"]) == ([], "cdc")
    checkpoint = Checkpoint.of(find("mirror"))
    checkpoint.path.mkdir(parents=True)
    Verified(checkpoint.home).note("copy", at="2026-11-01T12:00:00+00:00", rows=3, differ=1, mended=0)
    found = streaming.read_one(find("mirror"))["verified"]
    assert found == [{"target": "copy", "at": "2026-11-01T12:00:00+00:00", "rows": 3, "differ": 1, "mended": 0}]
    (state,) = streaming._read_states()
    assert (state["pipeline"], state["step"], state["state"]) == ("visits", "session", None)
    assert "visits has no state yet" in state["state_problem"]


def test_the_graph(log: RunLog, http: Any) -> None:
    found = http.get("/api/v1/graph").json()
    edges = {(each["from"], each["to"]) for each in found["edges"]}
    assert edges == {
        ("pipeline:customers", "table:default.customers"),
        ("pipeline:customers", "pipeline:nightly"),
        ("pipeline:nightly", "table:default.totals"),
        ("table:default.totals", "model:revenue"),
        ("stream:orders", "model:revenue"),
        ("stream:orders", "streaming:loader"),
        ("streaming:loader", "table:default.clean"),
    }
    assert {end for edge in edges for end in edge} == {each["id"] for each in found["nodes"]}


PATHS = (
    *("pipelines", "pipelines/nightly", "runs", "runs/x", "runs/x/log"),
    *("streaming", "streaming/loader", "streaming/loader/history", "models/revenue", "state", "scheduler"),
    *("processes", "changes", "graph"),
)


def test_they_are_for_those_who_may_read_every_stream(log: RunLog, http: Any) -> None:
    declare("closed", auth={"type": "bearer", "token": "s3cret"})
    for path in PATHS:
        assert http.get(f"/api/v1/{path}").status_code == 401, path
    answer = http.get("/api/v1/pipelines", headers={"authorization": "Bearer s3cret"})
    assert answer.status_code == 200
    for path in PATHS:
        assert http.get(f"/api/v1/{path}?odd=1", headers={"authorization": "Bearer s3cret"}).status_code == 422, path


def test_reasons_without_what_is_of_one_event(streams: Project) -> None:
    began = "Event 3 of the publish to 'strict', field 'n' ="
    for value in ("'two'", "'a: it = : it '", "': the stream has no such field'"):
        assert common(f"{began} {value}: it must be int64.", "n") == "field 'n': it must be int64."
        unknown = "the stream has no such field."
        assert common(f"{began} {value}: {unknown}", "n") == f"field 'n': {unknown}"
    assert common("no = such n: it is", "billing") == "no = such n: it is"
    # A consumer may say anything, at any length.
    assert len(common("field 'billing' = " + " = : " * 1_000_000, "billing")) <= 2000


def test_rejected_events_by_their_reasons(streams: Project, http: Any) -> None:
    declare("strict", fields={"n": "int64"}, on_schema_drift="quarantine", max_deliveries=1)
    weft.publish_sync(
        "strict", [{"n": 1}, {"n": "two"}, {"n": "three = 3: it is"}, {"n": 4, "more": 5}, {"n": 4, "more": 6}]
    )
    url = "/api/v1/streams/strict"
    taken = http.post(f"{url}/consume", json={"consumer": "billing", "batch_size": 1}).json()
    http.post(f"{url}/nack", json={"consumer": "billing", "events": taken["events"], "delay": 0, "reason": "no such n"})
    http.post(f"{url}/consume", json={"consumer": "billing"})
    groups = http.get(f"{url}/rejected").json()["groups"]
    assert [(each["kind"], each["of"], each["count"]) for each in groups] == [
        ("quarantined", "n", 2),
        ("quarantined", "more", 2),
        ("dead letter", "billing", 1),
    ]
    assert groups[0]["reason"].startswith("field 'n': it must be int64")
    assert groups[1]["reason"] == "field 'more': the stream has no such field."
    assert groups[2]["payload"].startswith('{"n":1')
    shown = http.get(url).json()
    assert (shown["dead_letter_stream"], shown["quarantine_stream"]) == ("strict__dead_letter", "strict__quarantine")
    assert shown["holds_rejected_of"] == []
    held = http.get("/api/v1/streams/strict__quarantine").json()["holds_rejected_of"]
    assert held == ["strict"]


def test_what_would_be_done_with_rejected_events(streams: Project, http: Any) -> None:
    declare("strict", fields={"n": "int64"}, on_schema_drift="quarantine")
    weft.publish_sync("strict", [{"n": "one"}, {"n": 1, "more": 5}, {"n": "two"}])
    place, admin, reader = "/api/v1/streams/strict__quarantine", make_key("admin"), make_key("read", "write")
    groups = http.get("/api/v1/streams/strict/rejected", headers=reader).json()["groups"]
    for action in ("replay", "purge"):
        for group, count in ({}, 3), *(({"group": each["group"]}, each["count"]) for each in groups):
            asked = {"dry_run": True, **group}
            assert http.post(f"{place}/{action}", json=asked).status_code == 401
            assert http.post(f"{place}/{action}", json=asked, headers=reader).status_code == 403
            plan = http.post(f"{place}/{action}", json=asked, headers=admin).json()
            assert (plan["letters"], plan["of"]) == (count, ["strict"])
        wrong = {"dry_run": True, "group": "--all"}
        assert http.post(f"{place}/{action}", json=wrong, headers=admin).status_code == 422
