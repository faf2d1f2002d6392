"""What a run log tells: how pipelines stand, what ran, what was skipped; and texts that are safe to keep."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta

import pytest

import weft
from weft.errors import DeclarationError
from weft.operate import runlog_tables
from weft.operate.records import Attempt, ClaimedRun
from weft.operate.redaction import clean
from weft.operate.runlog import RunLog, open_run_log
from weft.project import Project, use

SLOT = datetime(2025, 6, 1, 2, tzinfo=UTC)


def run_once(log: RunLog, pipeline: str, status: str = "succeeded", slot: datetime | None = SLOT) -> ClaimedRun:
    run = log.claim(pipeline, slot=slot, attempts_allowed=100)
    assert isinstance(run, ClaimedRun)
    assert log.finish(run, status, error=None if status == "succeeded" else "no")
    return run


def test_columns_are_those_of_an_attempt() -> None:
    assert [each.name for each in fields(Attempt)] == runlog_tables._RUNS.names


def test_nothing_is_known_of_a_new_pipeline(log: RunLog) -> None:
    state = log.latest(["orders"])["orders"]
    assert (state.last, state.scheduled, state.skipped, state.succeeded_at) == (None, None, None, None)
    assert (state.status, state.failures, state.is_live, state.last) == (None, 0, False, None)
    assert log.runs() == [] and log.run("nope") == [] and log.latest([]) == {}


def test_how_a_pipeline_stands(log: RunLog) -> None:
    run_once(log, "orders")
    for _ in range(2):
        run_once(log, "orders", "failed", SLOT + timedelta(hours=1))
    manual = log.claim("orders", resume=False)
    assert isinstance(manual, ClaimedRun)
    state = log.latest(["orders", "others"])["orders"]
    assert (state.status, state.is_live, state.failures) == ("running", True, 2)
    assert state.last is not None and (state.last.run_id, state.last.slot) == (manual.run_id, None)
    assert state.scheduled is not None
    assert (state.scheduled.slot, state.scheduled.status) == (SLOT + timedelta(hours=1), "failed")
    assert (state.scheduled.attempt, state.scheduled.error) == (2, "no")
    first = log.runs("orders", "succeeded")[0]
    assert state.succeeded_at == first.finished_at
    assert log.finish(manual, "succeeded")
    state = log.latest(["orders"])["orders"]
    assert (state.status, state.failures) == ("succeeded", 0)


def test_a_thousand_pipelines(log: RunLog) -> None:
    names = [f"pipeline_{number}" for number in range(1000)]
    for name in names[::100]:
        run_once(log, name)
    found = log.latest(names)
    assert list(found) == names
    assert [name for name, state in found.items() if state.status == "succeeded"] == names[::100]
    assert {name: found[name] for name in names[:150]} == log.latest(names[:150])


def test_runs_are_listed_newest_first(log: RunLog) -> None:
    run_once(log, "orders")
    run_once(log, "orders", "failed", SLOT + timedelta(hours=1))
    run_once(log, "customers")
    assert [attempt.pipeline for attempt in log.runs()] == ["customers", "orders", "orders"]
    assert [attempt.status for attempt in log.runs("orders")] == ["failed", "succeeded"]
    assert [attempt.pipeline for attempt in log.runs(status="failed")] == ["orders"]
    assert len(log.runs(limit=2)) == 2
    newest = log.runs()[0].started_at
    assert [attempt.pipeline for attempt in log.runs(since=newest)] == ["customers"]
    assert log.runs(since=newest + timedelta(seconds=1)) == []
    (one,) = log.runs("customers")
    assert one.seconds is not None and one.seconds >= 0


def test_a_skip_does_not_come_after_a_run_that_it_did_not_see(log: RunLog) -> None:
    for _ in range(2):
        seen = log.latest(["rollups"])["rollups"]
        claimed = log.claim("rollups")
        assert isinstance(claimed, ClaimedRun)
        log.finish(claimed, "succeeded")
        log.skip("rollups", SLOT, "waiting on upstream: orders", seen)
        assert log.runs("rollups", "skipped") == []
    log.skip("rollups", SLOT, "waiting on upstream: orders", log.latest(["rollups"])["rollups"])
    assert len(log.runs("rollups", "skipped")) == 1


def test_a_skip_is_recorded_once_a_slot_and_reason(log: RunLog) -> None:
    for _ in range(3):
        log.skip("rollups", SLOT, "waiting on upstream: orders")
    log.skip("rollups", SLOT, "waiting on upstream: customers")
    log.skip("rollups", SLOT + timedelta(hours=1), "waiting on upstream: customers")
    skipped = log.runs("rollups", "skipped")
    assert len(skipped) == 3 and {each.attempt for each in skipped} == {0}
    state = log.latest(["rollups"])["rollups"]
    assert state.skipped is not None and state.skipped.reason == "waiting on upstream: customers"
    assert (state.skipped.slot, state.last) == (SLOT + timedelta(hours=1), None)
    # The slot can be run all the same, and then nothing is skipped any more.
    run_once(log, "rollups")
    assert log.latest(["rollups"])["rollups"].skipped is None
    # It waits again, for the same: that is recorded already, and is how it stands now.
    log.skip("rollups", SLOT, "waiting on upstream: orders")
    assert len(log.runs("rollups", "skipped")) == 3
    again = log.latest(["rollups"])["rollups"].skipped
    assert again is not None and again.reason == "waiting on upstream: orders"


def test_metrics_and_odd_texts_come_back(log: RunLog) -> None:
    name = "bö'se\"`; -- %s ?"
    run = log.claim(name)
    assert isinstance(run, ClaimedRun)
    assert log.finish(run, "failed", error="a\0b \ud800 ✓ 100% ?", metrics={"targets": [{"rows": 3, "é": None}]})
    (attempt,) = log.run(run.run_id)
    assert (attempt.pipeline, attempt.error) == (name, "a\ufffdb ? ✓ 100% ?")
    assert attempt.metrics == {"targets": [{"rows": 3, "é": None}]}
    assert log.latest([name])[name].status == "failed"


def test_what_cannot_be_recorded(log: RunLog) -> None:
    run = log.claim("orders")
    assert isinstance(run, ClaimedRun)
    with pytest.raises(DeclarationError, match=r"no count 'inserts'.*\n.*'inserted'"):
        log.finish(run, "succeeded", counts={"inserts": 1})
    with pytest.raises(DeclarationError, match="cannot end as 'done'"):
        log.finish(run, "done")
    assert log.finish(run, "succeeded", counts={"inserted": 2**40})
    assert log.runs()[0].inserted == 2**40


def test_memory_logs_are_apart() -> None:
    with open_run_log("memory://") as one, open_run_log("memory://") as other:
        run_once(one, "orders")
        assert other.runs() == []


@pytest.mark.brief("memory", "sqlite", "mysql")
def test_old_runs_are_forgotten(log: RunLog) -> None:
    failed = log.claim("orders")
    assert isinstance(failed, ClaimedRun)
    log.finish(failed, "failed", error="no")
    for _ in range(30):
        run_once(log, "orders", slot=None)
    run_once(log, "other", slot=None)

    log.forget("orders", 3)

    *succeeded, first = log.runs("orders")
    # Those that began in the same moment as the oldest of the three are kept too.
    assert 3 <= len(succeeded) < 20
    assert first.status == "failed"
    assert len(log.runs("other")) == 1
    assert log.latest(["orders"])["orders"].status == "succeeded"


# ---------------------------------------------------------------------------------------------------------------- texts


def test_errors_are_bounded(log: RunLog) -> None:
    run = log.claim("orders")
    assert isinstance(run, ClaimedRun)
    assert log.finish(run, "failed", error="begin" + "x" * 100_000 + "end")
    error = log.runs()[0].error
    assert error is not None and len(error) == 10_000
    assert error.startswith("beginx") and error.endswith("xend")


def test_errors_hold_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    monkeypatch.setenv("WEFT_DSN_RAW", "mysql://me:hunter4@raw/x")
    with use(Project()):
        weft.connect(url="postgres://me:${DB_PASSWORD}@db/x", name="warehouse")
        weft.connect(url="postgres://me:${NOT_SET}@db/x", name="unset")
        text = clean("no hunter2, no hunter4; at postgres://a:hunter3@b/c?sslmode=x&password=hunter5 and on")
    assert text == "no ***, no ***; at postgres://a:***@b/c?sslmode=x&password=*** and on"
