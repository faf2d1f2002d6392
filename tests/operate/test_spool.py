"""A run log that is away: the work goes on, and the log gets to know of it later."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import servers
from tests.operate.scheduling import Clock, Runs, scheduler
from weft.errors import ConnectionFailedError
from weft.operate.model_worker import ModelWorker
from weft.operate.records import ClaimedRun, RefusedClaim
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.runner import Runner
from weft.operate.spool import FILE, Spool

SLOT = datetime(2025, 6, 1, 2, tzinfo=UTC)


@contextmanager
def away(log: RunLog) -> Iterator[None]:
    """As if the database could not be reached."""

    def locked(*_: Any) -> Any:
        raise ConnectionFailedError("nobody is there")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log._book, "locked", locked)
        yield


def claimed(log: RunLog, slot: datetime | None = SLOT) -> ClaimedRun:
    run = log.claim("orders", slot=slot, attempts_allowed=2)
    assert isinstance(run, ClaimedRun)
    return run


def test_an_end_is_recorded_later(log_url: str, project: Path) -> None:
    with open_run_log(log_url) as log:
        run = claimed(log)
        with away(log):
            assert log.finish(run, "succeeded", counts={"inserted": 7}, metrics={"targets": []})
        assert log.latest(["orders"])["orders"].status == "running"
    assert (project / FILE).exists()
    with open_run_log(log_url, read_only=True) as log:
        assert log.latest(["orders"])["orders"].status == "running"
    with open_run_log(log_url) as log:
        state = log.latest(["orders"])["orders"]
        assert state.last is not None
        assert (state.status, state.is_live, state.last.inserted) == ("succeeded", False, 7)
        refused = log.claim("orders", slot=SLOT)
        assert isinstance(refused, RefusedClaim) and refused.why == "succeeded"
    assert not (project / FILE).exists()


def test_a_failure_is_recorded_after_the_run_was_given_up(project: Path) -> None:
    """Another process took it for killed: what it says is corrected, and its own attempt is left alone."""
    with open_run_log("sqlite://runs.db") as log:
        run = log.claim("orders", slot=SLOT, attempts_allowed=2, lease_seconds=0)
        assert isinstance(run, ClaimedRun)
        with away(log):
            log.finish(run, "failed", error="no", retry_in=5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Spool, "deliver", lambda *_: 0)
            other = claimed(log)
    with open_run_log("sqlite://runs.db") as log:
        assert [(each.attempt, each.status, each.error) for each in log.run(run.run_id)] == [
            (1, "failed", "no"),
            (2, "running", None),
        ]
        assert log.finish(other, "succeeded")
        state = log.latest(["orders"])["orders"]
        assert state.last is not None and (state.last.attempt, state.status) == (2, "succeeded")


def test_runs_of_a_log_in_memory(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    (project / "file").write_text("")
    with open_run_log("sqlite://file/runs.db", or_memory=True) as log:
        run = claimed(log)
        assert log.finish(run, "succeeded", counts={"inserted": 3})
        failed = claimed(log, SLOT + timedelta(days=1))
        assert log.finish(failed, "failed", error="no")
    (project / "file").unlink()
    with open_run_log("sqlite://other.db") as log:
        assert log.runs() == []  # they are not this log's
    with open_run_log("sqlite://file/runs.db") as log:
        assert [(each.status, each.inserted) for each in log.runs()] == [("failed", None), ("succeeded", 3)]
        state = log.latest(["orders"])["orders"]
        assert (state.status, state.failures) == ("failed", 1)
        refused = log.claim("orders", slot=SLOT)
        assert isinstance(refused, RefusedClaim) and refused.why == "succeeded"
    assert "has now the 2 attempts" in caplog.text
    with open_run_log("sqlite://file/runs.db") as log:
        assert len(log.runs()) == 2


def test_a_slot_does_not_run_at_every_call(project: Path) -> None:
    """Each call is a process of its own, with a log of its own."""
    (project / "file").write_text("")
    with open_run_log("sqlite://file/runs.db", or_memory=True) as log:
        assert log.finish(claimed(log), "failed", error="no")
    with open_run_log("sqlite://file/runs.db", or_memory=True) as log:
        again = claimed(log)
        assert again.attempt == 2
        assert log.finish(again, "succeeded")
    with open_run_log("sqlite://file/runs.db", or_memory=True) as log:
        assert isinstance(log.claim("orders", slot=SLOT), RefusedClaim)
    (project / "file").unlink()
    with open_run_log("sqlite://file/runs.db") as log:
        found = [(each.attempt, each.status) for each in log.run(again.run_id)]
        assert found == [(1, "failed"), (2, "succeeded")]


def test_a_damaged_line(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_run_log("sqlite://runs.db") as log:
        run = claimed(log)
        (project / FILE).parent.mkdir(exist_ok=True)
        (project / FILE).write_bytes(b"\0" * 50)
        with away(log):
            assert log.finish(run, "succeeded")
    with open_run_log("sqlite://runs.db") as log:
        assert log.latest(["orders"])["orders"].status == "succeeded"
    assert "is damaged" in caplog.text


def unrecorded(log: RunLog) -> ClaimedRun:
    """A run whose end the log does not know."""
    run = claimed(log)
    with away(log):
        assert log.finish(run, "succeeded")
    assert log.latest(["orders"])["orders"].status == "running"
    return run


def test_a_scheduler_delivers_once_the_log_answers(log_url: str, clock: Clock) -> None:
    """It may be the only process of its host that opens the log, and it does so once."""
    with open_run_log(log_url) as log:
        made, follower = scheduler(log, Runs(), clock), scheduler(log, Runs(), clock)
        made.tick()
        unrecorded(log)
        with away(log), pytest.raises(ConnectionFailedError):
            made.tick()
        made.tick()
        assert log.latest(["orders"])["orders"].status == "succeeded"
        assert not Path(FILE).exists()
        second = log.claim("items")
        assert isinstance(second, ClaimedRun)
        with away(log):
            log.finish(second, "succeeded")
        follower.tick()
        assert follower.lease is None and log.latest(["items"])["items"].status == "succeeded"


def test_a_worker_delivers_once_the_log_answers(project: Path) -> None:
    with open_run_log(None) as log:
        unrecorded(log)
        worker = ModelWorker(Runner(log, lambda *_, **__: None), [], lambda models: [])  # type: ignore[arg-type,return-value]
        thread = threading.Thread(target=worker.run)
        thread.start()
        servers.wait_until(lambda: not Path(FILE).exists(), "the spool is delivered")
        worker.stop()
        thread.join()
        assert log.latest(["orders"])["orders"].status == "succeeded"


def test_who_delivers_waits_for_nobody(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped while it delivers would hold up the scheduler that takes over from it."""
    monkeypatch.setattr("weft.operate.runlog._DELIVER_AGAIN_SECONDS", 0.0)
    with open_run_log(None) as log:
        unrecorded(log)
        with open(Path(FILE).with_suffix(".lock"), "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            log.deliver_meanwhile()
            assert log.latest(["orders"])["orders"].status == "running"
        log.deliver_meanwhile()
        assert log.latest(["orders"])["orders"].status == "succeeded"


def test_a_delivery_goes_on_where_it_stopped(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler delivers between its looks, which thousands of attempts would hold up for minutes."""
    monkeypatch.setattr("weft.operate.runlog._DELIVER_SECONDS", 0.0)
    monkeypatch.setattr("weft.operate.runlog._DELIVER_AGAIN_SECONDS", 0.0)
    with open_run_log(None) as log:
        names = ["a", "b", "c"]
        for name in names:
            run = log.claim(name)
            assert isinstance(run, ClaimedRun)
            with away(log):
                log.finish(run, "succeeded")
        log.deliver_meanwhile()
        assert [log.latest([name])[name].status for name in names] == ["succeeded", "running", "running"]
        caplog.clear()
        with away(log):
            log.deliver_meanwhile()
            log.deliver_meanwhile()
        assert caplog.text.count("waits on") == 1
        log.deliver_meanwhile()
        log.deliver_meanwhile()
        assert [log.latest([name])[name].status for name in names] == ["succeeded"] * 3
        assert not Path(FILE).exists()
