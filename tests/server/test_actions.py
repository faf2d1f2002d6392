"""Actions on pipelines over HTTP: who may, what they do, and what the audit log says of them."""

from __future__ import annotations

import json
import queue
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import warm_python
import weft
from operations_project import declare_project, make_key, run_once
from servers import wait_until
from weft.engine.models.build import ModelRun
from weft.operate.log_format import JsonFormatter
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.scheduler import LEADER
from weft.pipelines.models import find
from weft.project import Project
from weft.server.actions import Commands
from weft.server.audit import Audit
from weft.server.keys import key_table
from weft.server.problems import Problem
from weft.server.service_tables import service_tables
from weft.streams.runtime import stored_log
from weft.systems.sql.system_tables import system_table
from workers import next_millisecond

ACTIONS = ("pipelines/nightly/run", "pipelines/nightly/pause", "pipelines/nightly/resume", "runs/x/cancel")
on_sqlite = pytest.mark.parametrize("system", ["sqlite"], indirect=True)


@on_sqlite
def test_they_are_off_without_a_key_of_the_scope_admin(streams: Project, http: Any) -> None:
    declare_project()
    for action in ACTIONS:
        assert http.post(f"/api/v1/{action}").status_code == 401, action
    assert http.get("/api/v1/audit").status_code == 401
    headers = [make_key("read", "write"), make_key("admin", streams=("orders",))]
    for header in headers:
        for action in ACTIONS:
            assert http.post(f"/api/v1/{action}", headers=header).status_code == 403, action
        assert http.get("/api/v1/audit", headers=header).status_code == 403
    with open_run_log(read_only=True) as log:
        assert log.latest(["nightly"])["nightly"].paused_at is None


@on_sqlite
def test_no_page_of_another_site_may(streams: Project, http: Any) -> None:
    """A browser asks before it sends an Authorization header elsewhere, and is not answered with leave."""
    declare_project()
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization"
    answer = http.request("OPTIONS", "/api/v1/pipelines/nightly/pause", headers=asked)
    assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-headers" not in answer.headers


@on_sqlite
def test_pause_and_resume_are_recorded(streams: Project, http: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "weft.audit")
    declare_project()
    key = make_key("admin", name="Ann")
    done = [http.post(f"/api/v1/pipelines/nightly/{each}", headers=key).json()["done"] for each in ("pause", "pause")]
    assert done == ["paused", "was paused already"]
    assert http.get("/api/v1/pipelines/nightly", headers=key).json()["state"] == "paused"
    assert http.post("/api/v1/pipelines/nightly/resume", headers=key).json()["done"] == "resumed"
    assert http.post("/api/v1/pipelines/nothing/pause", headers=key).status_code == 404
    actions = http.get("/api/v1/audit", headers=key).json()["actions"]
    assert [(each["key_name"], each["action"], each["object"], each["outcome"]) for each in actions] == [
        ("Ann", "resume", "nightly", "resumed"),
        ("Ann", "pause", "nightly", "was paused already"),
        ("Ann", "pause", "nightly", "paused"),
    ]
    assert http.get("/api/v1/audit?limit=1", headers=key).json()["actions"] == actions[:1]
    first, ended = [json.loads(JsonFormatter().format(each)) for each in caplog.records if each.name == "weft.audit"][
        :2
    ]
    assert (first["key_name"], first["action"], first["object"]) == ("Ann", "pause", "nightly")
    assert first["key_id"] and (ended["id"], ended["outcome"]) == (first["id"], "paused")


@on_sqlite
def test_the_environment_names_the_run_log(
    streams: Project, http: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for commands: what is paused here is what the scheduler finds paused."""
    declare_project()
    url = f"sqlite:///{tmp_path / 'other.db'}"
    monkeypatch.setenv("WEFT_RUN_LOG", url)
    key = make_key("admin")
    assert http.post("/api/v1/pipelines/nightly/pause", headers=key).json()["done"] == "paused"
    assert http.get("/api/v1/pipelines/nightly", headers=key).json()["state"] == "paused"
    with open_run_log(url, read_only=True) as named, open_run_log(read_only=True) as default:
        paused = [each.latest(["nightly"])["nightly"].paused_at is not None for each in (named, default)]
    assert paused == [True, False]


@on_sqlite
def test_a_run_is_cancelled_once(streams: Project, http: Any) -> None:
    declare_project()
    key = make_key("admin")
    with open_run_log() as log:
        ended = run_once(log, "nightly")
        claimed: Any = log.claim("customers", resume=False)
        assert http.post(f"/api/v1/runs/{ended}/cancel", headers=key).status_code == 409
        lease: Any = log.claim(LEADER)
        assert http.post(f"/api/v1/runs/{lease.run_id}/cancel", headers=key).status_code == 409
        answer = http.post(f"/api/v1/runs/{claimed.run_id}/cancel", headers=key).json()
        assert (answer["pipeline"], answer["done"]) == ("customers", "ends within 20 seconds")
        log.heartbeat(claimed)
        assert log.is_cancelled(claimed)
        # What runs is not run a second time.
        assert http.post("/api/v1/pipelines/customers/run", headers=key).status_code == 409
    outcomes = [each["outcome"] for each in http.get("/api/v1/audit", headers=key).json()["actions"]]
    assert outcomes == [
        "customers is being run.",
        "ends within 20 seconds",
        f"{lease.run_id} is the lease of a scheduler, and no run.",
        f"The run {ended} of nightly has ended.",
    ]


@pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)
def test_the_audit_log_of_each_database(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with key_table() as table:
        key, _ = table.create(name=None, scopes=["admin"])
    audit = Audit()
    assert audit.latest(10) == []
    first, second = (audit.begin(key, "127.0.0.1", action, "nightly") for action in ("pause", "resume"))
    audit.end(first, "paused" * 1000)
    found = {each["id"]: each for each in audit.latest(10)}
    assert (found[first]["key_id"], found[first]["client"], found[first]["action"]) == (key.id, "127.0.0.1", "pause")
    assert found[first]["outcome"].startswith("pausedpaused")
    assert found[second]["outcome"] is None  # it did not end, or nobody knows
    assert len(audit.latest(1)) == 1
    assert [each["id"] for each in audit.latest(10, action="pause")] == [first]
    # The next service of this machine says so of what another one had begun; of what it begins itself it does not.
    audit.close_abandoned(found[second]["at"])
    assert audit.latest(10, id=second)[0]["outcome"] is None
    audit.close_abandoned(datetime.now(UTC) + timedelta(seconds=1))
    assert "service ended" in audit.latest(10, id=second)[0]["outcome"]
    assert audit.latest(10, id=first)[0]["outcome"] == found[first]["outcome"]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "another")
        third = audit.begin(key, None, "pause", "nightly")
    audit.close_abandoned(datetime.now(UTC) + timedelta(seconds=1))
    assert audit.latest(10, id=third)[0]["outcome"] is None
    # One word finds the purges of whatever it was.
    purges = ("dlq purge", "quarantine purge", "streams purge")
    for action in (*purges, "purge_all", "streams replay"):
        audit.begin(key, None, action, "nightly")
    assert sorted(each["action"] for each in audit.latest(10, action="purge")) == sorted(purges)
    for part in ("urge", "%", "_urge", "s purg_"):
        assert audit.latest(10, action=part) == []


@on_sqlite
def test_so_many_commands_at_once(streams: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests come at the same moment."""
    commands, busy = Commands(), []
    said: queue.Queue[str] = queue.Queue()
    done, lasting = tmp_path / "done", tmp_path / "lasting"
    lasting.write_text(f"#!/bin/sh\nwhile [ ! -e {done} ]; do sleep 0.1; done\n")
    lasting.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(lasting))

    def start(_: int) -> None:
        try:
            commands.start([], said.put)
        except Problem as problem:
            busy.append(problem.status)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(start, range(12)))
    done.touch()
    assert busy == [429] * 8
    assert [said.get(timeout=120) for _ in range(4)] == [""] * 4


@on_sqlite
def test_what_was_done_is_answered_though_the_audit_log_fails(
    streams: Project, http: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_project()
    key = make_key("admin")
    pause = RunLog.pause

    def pause_and_break(log: RunLog, pipeline: str) -> bool:
        with service_tables() as tables, tables.driver.session("publish") as session:
            session.run(f"DROP TABLE {system_table(tables, 'audit')}")
        return pause(log, pipeline)

    monkeypatch.setattr(RunLog, "pause", pause_and_break)
    answer = http.post("/api/v1/pipelines/nightly/pause", headers=key)
    assert (answer.status_code, answer.json()["done"]) == (200, "paused")
    assert "does not say how an action ended" in caplog.text


PIPELINE = """
from typing import Annotated
from weft import pk
from weft.types import BigInt

@weft.stream
def clicks(): ...

@weft.table
class Totals:
    id: Annotated[BigInt, pk()]

@weft.pipeline(target=Totals, mode="append", engine="pushdown")
def totals(conn):
    return "SELECT 1 AS id"
"""


def test_a_pipeline_is_run(server: Callable[..., Any]) -> None:
    served = server(PIPELINE)
    key = _key_of(served)
    answer = served.client.post("/api/v1/pipelines/totals/run", headers=key)
    assert (answer.status_code, answer.json()["done"]) == (202, "started")

    def status() -> Any:
        return served.client.get("/api/v1/pipelines/totals", headers=key).json()["status"]

    wait_until(lambda: status() in ("succeeded", "failed"), "the run to end", 120)
    assert status() == "succeeded", served.log_file.read_text()
    action = f"/api/v1/audit/{answer.json()['action']}"
    wait_until(lambda: served.client.get(action, headers=key).json()["outcome"], "what came of it", 120)
    assert "totals" in served.client.get(action, headers=key).json()["outcome"]


def _key_of(served: Any) -> dict[str, str]:
    create = [sys.executable, "-m", "weft", "apikey", "create", "--scope", "admin"]
    token = warm_python.run(create, cwd=served.folder, check=True, capture_output=True, text=True).stdout.strip()
    wait_until(lambda: served.client.get("/api/v1/pipelines").status_code == 401, "the service to know the key")
    return {"authorization": f"Bearer {token}"}


def test_the_command_names_the_run_log(server: Callable[..., Any], tmp_path: Path) -> None:
    """Its workers have it, and so has what they start."""
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    served = server(PIPELINE, "--run-log", url)
    key = _key_of(served)
    assert served.client.post("/api/v1/pipelines/totals/pause", headers=key).json()["done"] == "paused"
    assert served.client.post("/api/v1/pipelines/totals/run", headers=key).status_code == 202
    with open_run_log(url) as log:
        assert log.latest(["totals"])["totals"].paused_at is not None
        wait_until(lambda: bool(log.runs("totals", "succeeded")), "the run to end", 120)
    assert served.client.get("/api/v1/pipelines/totals", headers=key).json()["status"] == "succeeded"
    assert not (served.folder / ".weft" / "runs.db").exists()


@on_sqlite
def test_a_failed_run_can_be_retried_while_it_is_the_last(streams: Project, http: Any) -> None:
    declare_project()
    with open_run_log() as log:
        first = run_once(log, "nightly", "failed", error="no luck")
        assert http.get(f"/api/v1/runs/{first}").json()["retryable"]
        second = run_once(log, "nightly")
    assert [http.get(f"/api/v1/runs/{each}").json()["retryable"] for each in (first, second)] == [False, False]


@pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)
def test_actions_are_found_by_who_what_and_when(streams: Project) -> None:
    with key_table() as table:
        ann, bob = (table.create(name=name, scopes=["admin"])[0] for name in ("Ann", "Bob"))
    audit = Audit()
    for key, action, named in (
        (ann, "pause", "nightly"),
        (bob, "dlq purge", "night --error=it's 100%_"),
        (ann, "run", "night"),
    ):
        next_millisecond()
        audit.begin(key, None, action, named)

    def found(**wanted: Any) -> list[str]:
        return [each["action"] for each in audit.latest(10, **wanted)]

    assert found() == ["run", "dlq purge", "pause"]
    assert found(key="Ann") == found(key=ann.id) == ["run", "pause"]
    assert found(action="pause") == found(object="nightly") == ["pause"]
    assert found(object="night") == ["run", "dlq purge"]
    assert found(object="night", key="Bob") == ["dlq purge"]
    assert found(object="x' OR 1=1 --") == []
    (last,) = audit.latest(1)
    assert found(before=last["at"]) == ["dlq purge", "pause"]
    assert audit.latest(1, id=last["id"]) == [last]


@on_sqlite
def test_the_audit_log_over_http(streams: Project, http: Any) -> None:
    declare_project()
    key = make_key("admin", name="Ann")
    done = http.post("/api/v1/pipelines/nightly/pause", headers=key).json()
    (shown,) = http.get("/api/v1/audit?key=Ann&object=nightly&before=2100-01-01T00:00:00Z", headers=key).json()[
        "actions"
    ]
    assert http.get(f"/api/v1/audit/{done['action']}", headers=key).json() == shown
    assert shown["outcome"] == "paused"
    assert http.get("/api/v1/audit?key=Bob", headers=key).json()["actions"] == []
    assert http.get("/api/v1/audit/nothing", headers=key).status_code == 404
    assert http.get("/api/v1/audit?before=now", headers=key).status_code == 422
    assert http.get(f"/api/v1/audit/{done['action']}").status_code == 401


@on_sqlite
def test_who_looks_at_a_model_changes_nothing(streams: Project, http: Any) -> None:
    """No table is created for a stream that nobody has published to, and no function without inputs is called."""
    called = []

    @weft.stream(name="sales", fields={"id": "int64", "total": "float64"})
    def sales() -> None: ...

    @weft.model(name="sums", dependencies=["sales"], trigger="manual")
    def sums(sales: Any) -> str:
        return "SELECT id, total FROM sales"

    @weft.model(name="fetched", trigger="manual")
    def fetched() -> str:
        called.append(1)
        return "SELECT 1 AS n"

    for name, columns in (("sums", ["id", "total"]), ("fetched", [])):
        shown = http.get(f"/api/v1/models/{name}").json()
        assert (shown["problem"], [each["column"] for each in shown["columns"]]) == (None, columns)
        step = http.get(f"/api/v1/pipelines/{name}/plan").json()["step"]
        assert (step["problem"], step["change"]) == (None, "new")
    assert called == []
    assert stored_log(streams.streams["sales"]) is None


@on_sqlite
def test_who_looks_at_a_model_starts_no_spark(
    streams: Project, http: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spark() -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("weft.engine.session.spark", spark)
    weft.connect(kind="object_store_local", path=str(tmp_path), name="lake")

    @weft.stream(name="sales", fields={"id": "int64"})
    def sales() -> None: ...

    @weft.model(name="of_files", dependencies=["lake.raw"])
    def of_files(raw: Any) -> Any:
        return raw.count()

    @weft.model(name="in_lake", dependencies=["sales"], connection="lake")
    def in_lake(sales: Any) -> Any:
        return sales.select("id")

    @weft.model(name="behind", dependencies=["in_lake"])
    def behind(in_lake: Any) -> Any:
        return in_lake.count()

    for name, file in (("of_files", "lake.raw"), ("behind", "in_lake")):
        shown = http.get(f"/api/v1/models/{name}")
        assert shown.status_code == 200
        assert f"weft models show {name}" in shown.json()["problem"]
        step = http.get(f"/api/v1/pipelines/{name}/plan").json()["step"]
        assert step["problem"] is None and f"{name} reads {file}" in step["unknown"]
    # What is built into files is no problem.
    shown = http.get("/api/v1/models/in_lake").json()
    assert (shown["problem"], [(each["column"], each["type"]) for each in shown["columns"]]) == (
        None,
        [("id", "bigint")],
    )


@on_sqlite
def test_the_plan_of_a_model_and_what_a_backfill_reads(streams: Project, http: Any) -> None:
    @weft.stream(name="sales", fields={"id": "int64", "total": "float64"})
    def sales() -> None: ...

    @weft.model(name="sums", materialise="merge", key="id", dependencies=["sales"], trigger="manual")
    def sums(sales: Any) -> str:
        return "SELECT id, total FROM sales"

    @weft.model(name="whole", dependencies=["sales"], trigger="manual")
    def whole(sales: Any) -> str:
        return "SELECT count(*) AS n FROM sales"

    weft.publish_sync("sales", [{"id": 1, "total": 1.0}, {"id": 2, "total": 2.0}])
    key = make_key("admin")

    def step() -> Any:
        return http.get("/api/v1/pipelines/sums/plan", headers=key).json()["step"]

    def planned(model: str = "sums", **body: Any) -> Any:
        path = f"/api/v1/pipelines/{model}/backfill"
        return http.post(path, headers=key, json={"since": "2020-01-01T00:00:00Z", "dry_run": True} | body)

    assert (step()["change"], step()["outcome"], set(step()["added"])) == ("new", "created", {"id", "total"})
    never = planned()
    assert (never.status_code, never.json()["hint"]) == (409, "weft run sums")
    assert "never built" in never.json()["detail"]
    ModelRun(find("sums"), "first", datetime.now(UTC)).execute()
    assert step() is None
    plan = planned().json()
    assert (plan["events"], plan["others"], plan["target"]) == ({"sales": 2}, [], "sums")
    assert planned(until="2020-01-02T00:00:00Z").json()["events"] == {"sales": 0}
    ends = {"since": "0001-01-01T00:00:00Z", "until": "9999-12-31T23:59:59Z"}
    assert planned(**ends).json()["events"] == {"sales": 2}
    assert planned("whole").status_code == 409
    assert planned("nobody").status_code == 404
    for wrong in (
        {"until": "2019-01-01T00:00:00Z"},
        {"since": "2020-01-01"},
        {"since": "2020-01-01T00:00:00"},
        {"since": "0001-01-01T00:00:00+14:00"},
        {"until": "9999-12-31T23:59:59-14:00"},
        {"to": 1},
    ):
        assert planned(**wrong).status_code == 422, wrong
    assert http.post("/api/v1/pipelines/sums/backfill", json={"since": "2020-01-01T00:00:00Z"}).status_code == 401
