"""The runner on a project: clocks that jump, logs that cannot be written, alerters that hang, and what is due when."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

import servers
import weft
from weft.cli.pipelines import stopped_by_signals
from weft.engine import run as engine
from weft.operate import alerts
from weft.operate.alerts import Alert, Alerter, Alerters
from weft.operate.records import Attempt, ClaimedRun
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.runner import Outcome, Runner
from weft.operate.spool import FILE
from weft.pipelines.declare import Pipeline
from weft.project import Project, use
from weft.testing import table_rows

NOON = datetime(2060, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Told(Alerter):
    """Remembers."""

    shown = "told"
    is_local = True

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def deliver(self, event: Alert) -> None:
        self.events.append((event.event, event.pipeline))


@dataclass
class Site:
    """A project on SQLite, its log, and a clock that the test sets."""

    project: Project
    log: RunLog
    told: Told = field(default_factory=Told)

    @property
    def runner(self) -> Runner:
        return Runner(self.log, engine.PipelineRun, Alerters([self.told]), project=self.project)

    def at(self, moment: datetime) -> None:
        self.project.clock = moment.timestamp

    def due(self, moment: datetime) -> list[Outcome]:
        """What `weft run-due` does at a moment."""
        self.at(moment)
        return list(self.runner.run_due())

    def slots(self, pipeline: str) -> list[datetime]:
        """The slots that were run with success, in the order in which they were."""
        runs = [each for each in self.log.runs(pipeline, limit=1000) if each.status == "succeeded" and each.slot]
        return [each.slot for each in sorted(runs, key=_began) if each.slot is not None]


def _began(attempt: Attempt) -> datetime:
    return attempt.started_at


@pytest.fixture
def site(project: Path) -> Iterator[Site]:
    with use(Project()) as fresh, open_run_log() as log:
        made = Site(fresh, log)
        made.at(NOON)
        yield made


def hourly(name: str, rows: Callable[[], Any] = lambda: [{"n": 1}], **options: Any) -> Pipeline:
    made: Pipeline = weft.pipeline(name=name, target=name, schedule="0 * * * *", **options)(lambda: rows())
    return made


def statuses(outcomes: list[Outcome]) -> dict[str, str]:
    return {each.pipeline: each.status for each in outcomes}


# --------------------------------------------------------------------------------------------------------------- clocks


def test_a_clock_that_jumps(site: Site) -> None:
    """No slot twice, and none that is current when somebody asks is missed."""
    hourly("copy")
    moments = [0, 0.5, 1, 24, 24.9, 1.5, 2, 2.1, -5, -5, 3, 24, 25, 87_600, 4, 25.2, 26, -4.5]
    wanted = dict.fromkeys(NOON.replace(minute=0) + timedelta(hours=int(each // 1)) for each in moments)
    for hours in moments:
        for outcome in site.due(NOON + timedelta(hours=hours)):
            assert outcome.status == "succeeded" or (outcome.reason or "").endswith("has run for this slot.")
    assert site.slots("copy") == list(wanted)
    assert len(table_rows("copy")) == len(wanted)


def test_the_slot_is_that_of_the_moment_when_its_turn_comes(site: Site) -> None:
    """What ran before took hours: the slots that passed meanwhile are not run after all."""

    def slow() -> list[dict[str, int]]:
        site.at(NOON + 3 * HOUR)
        return [{"n": 1}]

    hourly("first", slow)
    hourly("second")
    assert statuses(site.due(NOON)) == {"first": "succeeded", "second": "succeeded"}
    assert site.slots("first") == [NOON]
    assert site.slots("second") == [NOON + 3 * HOUR]


@pytest.mark.parametrize("hours", [-1000 * 24, 1000 * 24])
def test_upstream_by_a_clock_that_differs_from_the_logs(site: Site, hours: int) -> None:
    """The log's clock says when a run succeeded, this host's what day it is. Slots are the same for both."""
    moment = datetime.now(UTC).replace(minute=30) + timedelta(hours=hours)
    hourly("first")
    hourly("second", depends_on=["first"])
    hourly("third", depends_on=["second"], upstream_freshness_secs=3600)
    assert statuses(site.due(moment)) == {"first": "succeeded", "second": "succeeded", "third": "succeeded"}


def test_what_waits_for_what_failed(site: Site) -> None:
    answers: list[Any] = [RuntimeError("no"), [{"n": 1}]]

    def first() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    hourly("first", first, retry={"max_attempts": 2, "base": 0})
    hourly("second", depends_on=["first"])
    (failed, skipped) = site.due(NOON)
    assert (failed.status, skipped.status, skipped.reason) == ("failed", "skipped", "waiting on upstream: first")
    assert len(site.log.runs("second", status="skipped")) == 1
    assert statuses(site.due(NOON)) == {"first": "succeeded", "second": "succeeded"}
    assert site.told.events == [("failed", "first"), ("recovered", "first")]


# ------------------------------------------------------------------------------------------------------------- attempts


def test_a_run_by_hand_leaves_the_attempts_of_its_slot(site: Site) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    copy = hourly("copy", fail, retry={"max_attempts": 3, "base": 0})
    assert statuses(site.due(NOON)) == {"copy": "failed"}
    by_hand = site.runner.run(copy)
    assert (by_hand.status, by_hand.attempt, by_hand.slot) == ("failed", 2, NOON)
    assert by_hand.retry_at is not None
    (last,) = site.due(NOON)
    assert (last.attempt, last.retry_at) == (3, None)
    assert site.due(NOON) == []
    assert [event for event, _ in site.told.events] == ["failed", "failed", "gave_up"]


def test_the_first_to_give_up_tells_it_whatever_failed_before(site: Site) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    copy = hourly("copy", fail, retry={"max_attempts": 3, "base": 0})
    for _ in range(3):
        site.runner.run(copy, resume=False)
    for hours in range(2):
        for _ in range(3):
            site.due(NOON + hours * HOUR)
    # Of the failures 1, 2, 4, 6 and 8: the slot of 6 was the first to give up, that of 9 was not.
    assert [event for event, _ in site.told.events] == ["failed", "failed", "failed", "gave_up", "failed"]


def test_a_function_that_ends_the_process(site: Site) -> None:
    """It has loaded nothing, so it has failed: the code that it gives must not be the command's."""

    def leave() -> None:
        raise SystemExit(0)

    hourly("copy", leave)
    (outcome,) = site.due(NOON)
    assert outcome.status == "failed"
    (run,) = site.log.runs("copy")
    assert run.status == "failed" and run.error is not None and run.error.startswith("SystemExit: 0")


def test_an_interrupt_ends_the_rest_too(site: Site) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    hourly("first", stop)
    hourly("second")
    with pytest.raises(KeyboardInterrupt):
        site.due(NOON)
    (run,) = site.log.runs()
    assert (run.pipeline, run.status, run.error) == ("first", "interrupted", "Stopped by an interrupt.")
    assert site.told.events == []


def test_one_that_fails_does_not_stop_the_others(site: Site) -> None:
    hourly("first", lambda: 1 / 0)
    hourly("second")
    assert statuses(site.due(NOON)) == {"first": "failed", "second": "succeeded"}
    (run,) = site.log.runs("first")
    assert run.error is not None
    assert run.error.startswith("ZeroDivisionError: division by zero (") and "test_runner.py, line " in run.error


def test_taken_over_while_it_works(site: Site) -> None:
    """Whoever lost its claim says so, and tells nobody of what is another's."""

    def rows() -> list[dict[str, int]]:
        book = site.log._book
        with book.session("publish") as session:
            book.update(session, book.claims, {"expires_at": datetime(2000, 1, 1, tzinfo=UTC)}, "1 = 1", ())
        assert isinstance(site.log.claim("copy", slot=NOON), ClaimedRun)
        return [{"n": 1}]

    outcome = site.runner.run(hourly("copy", rows), slot=NOON)
    assert outcome.status == "interrupted"
    assert "Another process took over copy" in str(outcome.reason)
    log = [(each.attempt, each.status) for each in site.log.run(str(outcome.run_id))]
    assert log == [(1, "interrupted"), (2, "running")]
    assert site.told.events == []


def test_what_is_stale_is_told_at_the_end(site: Site) -> None:
    weft.pipeline(name="by_hand", target="by_hand", expect_within="2h")(lambda: [{"n": 1}])
    hourly("copy", expect_within="2h")
    site.due(NOON)
    assert site.told.events == []
    for name, moment in (("by_hand", "watched_at"), ("copy", "succeeded_at")):
        site.log._book.locked(name, lambda each, at=moment: each.change({at: each.claim.now - 3 * HOUR}))  # type: ignore[misc]
    list(site.runner.run_due(["copy"]))
    assert site.told.events == []  # that is the scheduler's
    site.due(NOON + HOUR)
    site.due(NOON + HOUR)
    assert site.told.events == [("stale", "by_hand")]


def test_failures_of_many_slots_are_grouped(site: Site) -> None:
    hourly("copy", lambda: 1 / 0, retry={"max_attempts": 1})
    for hours in range(9):
        site.due(NOON + hours * HOUR)
    assert site.told.events == [("failed", "copy")] * 4  # of 1, 2, 4 and 8


# ---------------------------------------------------------------------------------------------------- the log, alerters


def _under_a_file(folder: Path) -> str:
    (folder / "file").write_text("")
    return f"sqlite:///{folder / 'file' / 'runs.db'}"


def _no_database(folder: Path) -> str:
    (folder / "runs.db").write_bytes(b"this is no database" * 100)
    return f"sqlite:///{folder / 'runs.db'}"


def _a_folder(folder: Path) -> str:
    (folder / "runs.db").mkdir()
    return f"sqlite:///{folder / 'runs.db'}"


def _nobody_listens(folder: Path) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"postgres://weft@127.0.0.1:{port}/weft"


@pytest.mark.parametrize("url", [_under_a_file, _no_database, _a_folder, _nobody_listens])
def test_a_log_that_cannot_be_written(
    project: Path, caplog: pytest.LogCaptureFixture, url: Callable[[Path], str]
) -> None:
    """It is warned about, and the work is done: once, however many processes do not know of each other."""
    place = url(project)
    with use(Project()) as fresh:
        fresh.clock = NOON.timestamp
        hourly("copy")
        for _ in range(2):
            (project / FILE).unlink(missing_ok=True)
            with caplog.at_level(logging.WARNING), open_run_log(place, or_memory=True) as log:
                (outcome,) = Runner(log, engine.PipelineRun).run_due()
            assert outcome.status == "succeeded"
        assert [record.message.startswith("The run log ") for record in caplog.records] == [True, True]
        assert table_rows("copy") == [{"n": 1}]


def test_a_user_who_may_read_the_log_alone(
    project: Path, shared_server: Callable[[str], servers.Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = shared_server("postgres")
    with server.database() as url, use(Project()) as fresh:
        fresh.clock = NOON.timestamp
        hourly("copy")
        open_run_log(url).close()
        name = f"reader_{os.getpid()}"
        with server.connect(url.rpartition("/")[2]) as connection:
            connection.execute(f"CREATE ROLE {name} LOGIN")
            connection.execute(f"GRANT USAGE ON SCHEMA weft TO {name}")
            connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA weft TO {name}")
        try:
            with open_run_log(url.replace("//weft@", f"//{name}@"), or_memory=True) as log:
                (outcome,) = Runner(log, engine.PipelineRun).run_due()
        finally:
            with server.connect(url.rpartition("/")[2]) as connection:
                connection.execute(f"DROP OWNED BY {name}")
                connection.execute(f"DROP ROLE {name}")
        assert outcome.status == "succeeded"
        assert table_rows("copy") == [{"n": 1}]
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert "permission denied" in warning
        with open_run_log(url) as log:
            assert log.runs() == []


class _Hangs(Alerter):
    shown = "hangs"

    def __init__(self) -> None:
        self.released = threading.Event()

    def deliver(self, event: Alert) -> None:
        self.released.wait()


class _Broken(Alerter):
    shown = "broken"

    def deliver(self, event: Alert) -> None:
        raise RuntimeError("no")


@pytest.mark.timing
def test_alerters_that_hang_or_fail(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is recorded before anybody is told, and the next one begins."""
    monkeypatch.setattr(alerts, "WAIT_SECONDS", 0.2)
    hourly("first", lambda: 1 / 0)
    hourly("second")
    hangs = _Hangs()
    with Alerters([_Broken(), hangs, site.told]) as told:
        runner = Runner(site.log, engine.PipelineRun, told, project=site.project)
        assert statuses(list(runner.run_due())) == {"first": "failed", "second": "succeeded"}
    hangs.released.set()
    assert site.told.events == [("failed", "first")]
    messages = [record.message for record in caplog.records if record.name == "weft.operate"]
    assert any("hangs" in each for each in messages)
    assert any("broken failed" in each for each in messages)
    assert [(each.pipeline, each.status) for each in site.log.runs()] == [("second", "succeeded"), ("first", "failed")]


# ---------------------------------------------------------------------------------------------------- pause and cancel


def test_a_paused_pipeline_is_not_due(site: Site) -> None:
    hourly("copy")
    site.log.pause("copy")
    assert site.due(NOON) == []
    assert [each.why for each in site.runner.due()] == ["paused"]
    assert site.runner.run(site.project.pipelines["copy"]).status == "succeeded"
    site.log.resume("copy")
    assert statuses(site.due(NOON + HOUR)) == {"copy": "succeeded"}


@pytest.mark.timing
def test_a_run_is_cancelled_while_it_works(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLog, "claim", partialmethod(RunLog.claim, lease_seconds=0.6))
    ended = threading.Event()

    def rows() -> list[dict[str, int]]:
        state = site.log.latest(["copy"])["copy"]
        assert state.last is not None
        assert site.log.cancel("copy", state.last.run_id) == "asked"
        ended.wait(60)
        return [{"n": 1}]

    runner, outcomes = site.runner, []
    with stopped_by_signals(runner, outcomes, "json"):
        outcome = runner.run(hourly("copy", rows), slot=NOON)
    assert outcome.status == "cancelled" and "was cancelled" in str(outcome.error)
    assert [each.status for each in site.log.runs("copy")] == ["cancelled"]
    assert site.due(NOON) == [] and site.told.events == []
    assert not Path(".weft/weft.db").exists()


@pytest.mark.timing
def test_a_cancelled_run_commits_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread that cannot be interrupted, as those of a worker."""
    monkeypatch.setattr(RunLog, "claim", partialmethod(RunLog.claim, lease_seconds=0.6))

    def rows() -> list[dict[str, int]]:
        state = site.log.latest(["copy"])["copy"]
        assert state.last is not None
        site.log.cancel("copy", state.last.run_id)
        return [{"n": 1}]

    outcome = site.runner.run(hourly("copy", rows), slot=NOON)
    assert outcome.status == "cancelled"
    assert [each.status for each in site.log.runs("copy")] == ["cancelled"]
    assert not Path(".weft/weft.db").exists()


# ------------------------------------------------------------------------------------------------------------- catch up


def test_missed_slots_are_caught_up(site: Site) -> None:
    hourly("all", catchup=True)
    hourly("latest")
    site.due(NOON)
    site.due(NOON + 4 * HOUR)
    assert site.slots("all") == [NOON + n * HOUR for n in range(5)]
    assert site.slots("latest") == [NOON, NOON + 4 * HOUR]
    assert site.due(NOON + 4 * HOUR) == []


def test_a_slot_that_fails_holds_up_the_later_ones_until_it_is_given_up(site: Site) -> None:
    fails = iter([False, True, True, False, False])

    def rows() -> list[dict[str, int]]:
        if next(fails):
            raise ValueError("no")
        return [{"n": 1}]

    hourly("all", rows, catchup=True, retry={"max_attempts": 2, "backoff": "fixed", "base": 0.001})
    site.due(NOON)
    assert [each.status for each in site.due(NOON + 3 * HOUR)] == ["failed"]
    outcomes = site.due(NOON + 3 * HOUR)
    assert [(each.slot, each.status) for each in outcomes] == [
        (NOON + HOUR, "failed"),
        (NOON + 2 * HOUR, "succeeded"),
        (NOON + 3 * HOUR, "succeeded"),
    ]
