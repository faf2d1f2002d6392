"""Who may run what: one caller a slot, attempts, retries, take-overs, and what a lost claim may no longer do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from servers import wait_until
from tests.operate.scheduling import claimed_before_the_clock_went_back
from weft.errors import ConnectionFailedError, DeclarationError
from weft.operate import runlog_tables
from weft.operate.heartbeat import heartbeat
from weft.operate.records import ClaimedRun, RefusedClaim
from weft.operate.run_store import LockedPipeline
from weft.operate.runlog import RunLog, open_run_log
from weft.pipelines.schedule import Schedule
from workers import start, started

SLOT = datetime(2025, 6, 1, 2, tzinfo=UTC)
NEXT = SLOT + timedelta(days=1)
PIPELINE = "daily_rollups"


def granted(log: RunLog, slot: datetime | None = SLOT, **options: Any) -> ClaimedRun:
    run = log.claim(PIPELINE, slot=slot, **options)
    assert isinstance(run, ClaimedRun), run
    return run


def refused(log: RunLog, slot: datetime | None = SLOT, **options: Any) -> RefusedClaim:
    answer = log.claim(PIPELINE, slot=slot, **options)
    assert isinstance(answer, RefusedClaim), answer
    return answer


# ---------------------------------------------------------------------------------------------------------------- slots


def test_a_slot_that_succeeded_is_done(log: RunLog) -> None:
    run = granted(log)
    assert (run.attempt, run.key, run.failures) == (1, "2025-06-01T02:00:00+00:00", 0)
    assert log.finish(run, "succeeded", counts={"rows_read": 3, "inserted": 2, "late": 1}, engine="pushdown")
    answer = refused(log)
    assert (answer.why, str(answer)) == ("succeeded", f"{PIPELINE} has run for this slot.")
    (done,) = log.run(run.run_id)
    assert (done.status, done.rows_read, done.inserted, done.late, done.updated) == ("succeeded", 3, 2, 1, None)
    assert (done.engine, done.slot, done.pipeline) == ("pushdown", SLOT, PIPELINE)
    assert done.finished_at is not None and done.finished_at >= done.started_at
    assert done.pid is not None and done.host


def test_a_slot_is_the_same_in_every_zone(log: RunLog) -> None:
    run = granted(log, SLOT.astimezone(ZoneInfo("Asia/Tokyo")))
    assert log.finish(run, "succeeded")
    assert refused(log).why == "succeeded"


def test_one_works_on_a_pipeline_at_a_time(log: RunLog) -> None:
    run = granted(log)
    for slot in (SLOT, NEXT, None):
        answer = refused(log, slot)
        assert answer.why == "running"
        assert answer.last is not None and answer.last.owner == run.owner
        assert str(answer).startswith(f"{PIPELINE} is being run by process {answer.last.pid} on {answer.last.host} ")
    # Others are not concerned.
    assert isinstance(log.claim("another", slot=SLOT), ClaimedRun)
    assert log.finish(run, "succeeded")
    assert granted(log, NEXT).run_id != run.run_id


def test_attempts_are_used_up(log: RunLog) -> None:
    first = granted(log, attempts_allowed=2)
    assert first.attempts_allowed == 2
    assert log.finish(first, "failed", error="no")
    second = granted(log, attempts_allowed=2)
    assert (second.attempt, second.run_id, second.key, second.failures) == (2, first.run_id, first.key, 1)
    assert log.finish(second, "failed", error="no")
    answer = refused(log, attempts_allowed=2)
    assert (answer.why, answer.gave_up) == ("exhausted", False)
    # The next slot begins afresh, and knows of the failures before it.
    third = granted(log, NEXT, attempts_allowed=2)
    assert (third.attempt, third.failures) == (1, 2)
    assert log.finish(third, "succeeded")
    assert log.latest([PIPELINE])[PIPELINE].failures == 0


def test_a_retry_waits_for_its_time(log: RunLog) -> None:
    assert log.finish(granted(log, attempts_allowed=3), "failed", error="no", retry_in=3600)
    answer = refused(log, attempts_allowed=3)
    assert answer.why == "waiting" and answer.last is not None
    assert f"{PIPELINE} is tried again at " in str(answer)
    state = log.latest([PIPELINE])[PIPELINE]
    assert state.last is not None and state.last.retry_at is not None and state.last.finished_at is not None
    assert state.last.retry_at == answer.last.retry_at
    assert state.last.retry_at - state.last.finished_at == timedelta(hours=1)
    # A person need not wait.
    again = granted(log, None)
    assert (again.slot, again.attempt) == (SLOT, 2)
    assert log.finish(again, "failed", error="no", retry_in=0)
    assert granted(log, attempts_allowed=3).attempt == 3


def test_a_clock_that_jumps_makes_nothing_run_twice(log: RunLog) -> None:
    schedule, now = Schedule("0 * * * *"), datetime(2025, 6, 1, 12, 30, tzinfo=UTC)
    done: list[datetime] = []
    for hours in (0, 1, 2, -1, 0, 2, 48, 1, 47, 48, -1):
        slot = schedule.latest(now + timedelta(hours=hours))
        answer = log.claim(PIPELINE, slot=slot)
        if isinstance(answer, ClaimedRun):
            done.append(slot)
            assert log.finish(answer, "succeeded")
        else:
            assert answer.why == "succeeded"
    assert len(done) == len(set(done)) == 6


def test_a_slot_needs_a_zone(log: RunLog) -> None:
    with pytest.raises(DeclarationError, match="time zone"):
        log.claim(PIPELINE, slot=datetime(2025, 6, 1))


# --------------------------------------------------------------------------------------------------------------- manual


def test_manual_runs_are_new_ones(log: RunLog) -> None:
    first = granted(log, None)
    assert (first.slot, first.key, first.attempts_allowed) == (None, first.run_id, None)
    assert log.finish(first, "succeeded")
    second = granted(log, None)
    assert second.run_id != first.run_id and second.attempt == 1


@pytest.mark.parametrize("end", ["failed", "interrupted"])
def test_a_manual_run_goes_on_with_what_did_not_succeed(log: RunLog, end: Any) -> None:
    first = granted(log, None)
    assert log.finish(first, end, error="no")
    second = granted(log, None)
    assert (second.run_id, second.key, second.attempt) == (first.run_id, first.key, 2)
    assert log.finish(second, end)
    anew = granted(log, None, resume=False)
    assert (anew.run_id != first.run_id, anew.attempt) == (True, 1)
    assert [attempt.status for attempt in log.run(first.run_id)] == [end, end]


def test_a_manual_run_goes_on_with_a_slot(log: RunLog) -> None:
    scheduled = granted(log)
    assert log.finish(scheduled, "failed", error="no")
    manual = granted(log, None)
    assert (manual.slot, manual.key, manual.run_id) == (SLOT, scheduled.key, scheduled.run_id)
    assert log.finish(manual, "succeeded")
    assert refused(log).why == "succeeded"


# ------------------------------------------------------------------------------------------------------------ take-over


def test_a_lease_that_ended_is_taken_over(log: RunLog) -> None:
    silent = granted(log, lease_seconds=0)
    taken = granted(log)
    assert (taken.run_id, taken.attempt, taken.key) == (silent.run_id, 2, silent.key)
    assert log.run(silent.run_id)[0].status == "interrupted"
    # Who lost it changes nothing any more.
    assert not log.heartbeat(silent)
    assert not log.finish(silent, "succeeded", counts={"inserted": 7})
    assert log.heartbeat(taken)
    assert log.finish(taken, "failed", error="mine")
    assert not log.finish(taken, "succeeded")
    first, second = log.run(silent.run_id)
    assert (first.status, first.inserted, first.finished_at is not None) == ("interrupted", None, True)
    assert first.error is not None and "silent for longer than its lease" in first.error
    assert (second.status, second.error) == ("failed", "mine")


@pytest.mark.every_system
def test_a_claim_that_the_clock_made_long(log: RunLog) -> None:
    """The log's clock was set back, and the process died: its run stayed claimed for an hour more."""
    dead = claimed_before_the_clock_went_back(log, PIPELINE, slot=SLOT, lease_seconds=1)
    assert refused(log, lease_seconds=1).why == "running"
    taken: Any = None

    def is_taken() -> bool:
        nonlocal taken
        taken = log.claim(PIPELINE, slot=SLOT)
        return isinstance(taken, ClaimedRun)

    wait_until(is_taken, "the claim to end")
    assert (taken.run_id, taken.attempt) == (dead.run_id, 2)
    assert not log.heartbeat(dead) and not log.finish(dead, "succeeded")
    first, _ = log.run(dead.run_id)
    assert first.status == "interrupted" and "silent for longer than its lease" in (first.error or "")
    assert log.finish(taken, "succeeded")


@pytest.mark.every_system
def test_a_lease_is_as_long_as_its_holder_says(log: RunLog) -> None:
    """Of two schedulers with other leases, the one that waits does not take the lead from one that lives."""
    run = granted(log, lease_seconds=300)

    def ends() -> timedelta:
        return log._book.locked(PIPELINE, lambda records: (records.claim.expires_at or SLOT) - records.claim.now)

    for seconds in (1, 60, 3600):
        assert refused(log, lease_seconds=seconds).why == "running"
        assert timedelta(seconds=240) < ends() <= timedelta(seconds=300)
    assert log.finish(run, "succeeded")
    # What follows is not held for as long.
    assert isinstance(log.claim(PIPELINE, slot=NEXT, lease_seconds=30), ClaimedRun)
    assert ends() <= timedelta(seconds=30)


@pytest.mark.every_system
def test_a_process_that_lives_while_the_clock_is_set_back(log: RunLog) -> None:
    claimed = claimed_before_the_clock_went_back(log, PIPELINE, slot=SLOT)
    for _ in range(3):
        assert refused(log).why == "running"
        log.shorten(log.latest([PIPELINE]).values())
        assert log.heartbeat(claimed)
    assert log.finish(claimed, "succeeded")


@pytest.mark.every_system
def test_who_looks_shortens_a_claim_that_the_clock_made_long(log: RunLog) -> None:
    """`run-due` and the scheduler claim nothing that another process seems to work on."""
    claimed_before_the_clock_went_back(log, PIPELINE, slot=SLOT)

    def left() -> timedelta:
        state = log.latest([PIPELINE])[PIPELINE]
        assert state.is_live and state.expires_at is not None and state.now is not None
        return state.expires_at - state.now

    assert left() > timedelta(minutes=59)
    log.shorten(log.latest([PIPELINE]).values())
    assert timedelta(0) < left() <= timedelta(seconds=60)


@pytest.mark.every_system
def test_a_retry_that_the_clock_puts_off(log: RunLog) -> None:
    """The log's clock was set back: nobody knows how long it is until the moment that it named."""
    run = granted(log, attempts_allowed=2)
    assert log.finish(run, "failed", error="no", retry_in=30)
    assert refused(log, attempts_allowed=2).why == "waiting"
    hour = timedelta(hours=1)

    def set_back(records: LockedPipeline) -> None:
        (last,) = records.attempts_at(run.run_id)
        assert last.finished_at is not None and last.retry_at is not None
        later = {"finished_at": last.finished_at + hour, "retry_at": last.retry_at + hour}
        records.end(run.run_id, 1, {"started_at": last.started_at + hour, **later}, "failed")

    log._book.locked(PIPELINE, set_back)
    assert granted(log, attempts_allowed=2).attempt == 2


def test_a_manual_run_takes_over_and_is_taken_over(log: RunLog) -> None:
    scheduled = granted(log, lease_seconds=0)
    manual = granted(log, None, lease_seconds=0)
    assert (manual.run_id, manual.slot, manual.attempt) == (scheduled.run_id, SLOT, 2)
    assert granted(log, NEXT).attempt == 1
    assert [attempt.status for attempt in log.run(scheduled.run_id)] == ["interrupted", "interrupted"]


def test_killed_attempts_are_not_failed_ones_but_not_without_end(log: RunLog) -> None:
    for number in range(1, 5):
        run = granted(log, lease_seconds=0)
        assert (run.attempt, run.attempts_allowed) == (number, number if number > 1 else 1)
    answer = refused(log)
    assert (answer.why, answer.gave_up) == ("exhausted", True)
    assert answer.last is not None and answer.last.status == "interrupted"
    # Once: the next caller has nothing to tell anybody.
    assert (refused(log).why, refused(log).gave_up) == ("exhausted", False)
    assert log.latest([PIPELINE])[PIPELINE].failures == 4


@pytest.mark.timing
def test_a_heart_keeps_a_short_lease(log: RunLog) -> None:
    run = granted(log, lease_seconds=1.5)

    def lease_end() -> datetime | None:
        return log._book.locked(run.pipeline, lambda records: records.claim.expires_at)

    began = lease_end()
    with heartbeat(log, run):
        wait_until(lambda: lease_end() != began, "a beat")
        assert refused(log, NEXT).why == "running"
    assert log.finish(run, "succeeded")


@pytest.mark.timing
def test_a_heartbeat_ends_when_its_claim_is_lost(log: RunLog) -> None:
    silent = granted(log, lease_seconds=0)
    taken = granted(log)
    name = f"weft heartbeat of {silent.pipeline}"
    with heartbeat(log, replace(silent, lease_seconds=0.1)):
        wait_until(lambda: name not in {each.name for each in threading.enumerate()}, "the heartbeat to end")
    assert log.finish(taken, "succeeded")


# ------------------------------------------------------------------------------------------------------------ processes

CLAIM_AND_WAIT = """
    from weft.operate.runlog import open_run_log
    url, slot, lease = args
    log = open_run_log(url)
    run = log.claim("daily_rollups", slot=slot, lease_seconds=lease)
    log.close()
    line()
"""


@pytest.mark.timing
def test_a_killed_process_is_taken_over_before_its_lease_ends(log_url: str) -> None:
    worker = start(CLAIM_AND_WAIT, log_url, SLOT, 3600)
    worker.ready()
    with open_run_log(log_url) as log:
        assert refused(log).why == "running"
        worker.kill()
        assert log.latest([PIPELINE])[PIPELINE].status == "interrupted"
        run = granted(log)
        killed, _ = log.run(run.run_id)
        assert (run.attempt, killed.pid, killed.status) == (2, worker.process.pid, "interrupted")
        assert killed.error is not None and "has ended" in killed.error


def test_a_restart_keeps_attempts(log_url: str) -> None:
    for number in (1, 2, 3):
        with open_run_log(log_url) as log:
            run = granted(log, attempts_allowed=3)
            assert (run.attempt, run.failures) == (number, number - 1)
            assert log.finish(run, "failed", error="no", retry_in=0)
    with open_run_log(log_url) as log:
        assert refused(log, attempts_allowed=3).why == "exhausted"


RACE = """
    from weft.operate.records import ClaimedRun
    from weft.operate.runlog import open_run_log
    number, url, slot, count = args
    log = open_run_log(url)
    line()
    won = []
    for each in range(count):
        run = log.claim(f"raced_{each}", slot=slot)
        if isinstance(run, ClaimedRun):
            won.append(each)
            assert log.finish(run, "succeeded")
        else:
            assert run.why in ("running", "succeeded"), run
    answer(won)
"""


@pytest.mark.full
@pytest.mark.timing
def test_eight_processes_and_each_slot_runs_once(
    log_url: str, count: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # DuckDB lets one process at a time open its file, so each claim is a wait for that.
    monkeypatch.setattr("workers.PATIENCE", 1200)
    slots = count(100, 3 if log_url.startswith("duckdb") else 10)
    with started(8, RACE, log_url, SLOT, slots) as workers:
        for worker in workers:
            worker.ready()
        for worker in workers:
            worker.tell()
        won = [each for worker in workers for each in worker.answer()]
    assert sorted(won) == list(range(slots))
    with open_run_log(log_url) as log:
        attempts = log.runs(limit=1000)
        assert len(attempts) == slots and {attempt.status for attempt in attempts} == {"succeeded"}


# ----------------------------------------------------------------------------------------------------- pause and cancel


def test_a_pipeline_that_is_paused(log: RunLog) -> None:
    assert log.pause(PIPELINE) and not log.pause(PIPELINE)
    assert refused(log).why == "paused"
    assert log.latest([PIPELINE])[PIPELINE].paused_at is not None
    by_hand = log.claim(PIPELINE)
    assert isinstance(by_hand, ClaimedRun)
    assert log.finish(by_hand, "succeeded")
    worker = log.claim(PIPELINE, by_hand=False)
    assert isinstance(worker, RefusedClaim) and worker.why == "paused"
    assert log.resume(PIPELINE) and not log.resume(PIPELINE)
    assert log.finish(granted(log), "succeeded")
    assert log.latest([PIPELINE])[PIPELINE].paused_at is None


def test_a_run_that_is_cancelled_while_it_works(log: RunLog) -> None:
    run = granted(log, attempts_allowed=3)
    assert log.heartbeat(run) and not log.is_cancelled(run)
    assert log.cancel(PIPELINE, run.run_id) == "asked"
    assert not log.is_cancelled(run)
    assert log.heartbeat(run) and log.is_cancelled(run)
    assert log.finish(run, "cancelled", error="The run was cancelled.")
    assert refused(log, attempts_allowed=3).why == "cancelled"
    state = log.latest([PIPELINE])[PIPELINE]
    assert (state.status, state.failures) == ("cancelled", 0)
    assert log.cancel(PIPELINE, run.run_id) == "ended"
    # The next slot is another run, and a manual one does not go on with what was cancelled.
    again = granted(log, NEXT)
    assert log.heartbeat(again) and not log.is_cancelled(again)
    assert log.finish(again, "failed")
    assert log.cancel(PIPELINE, again.run_id) == "cancelled"
    manual = log.claim(PIPELINE)
    assert isinstance(manual, ClaimedRun) and manual.run_id not in (run.run_id, again.run_id)


def test_a_retry_that_is_cancelled(log: RunLog) -> None:
    run = granted(log, attempts_allowed=3)
    assert log.finish(run, "failed", error="no", retry_in=0)
    assert log.cancel(PIPELINE, run.run_id) == "cancelled"
    assert refused(log, attempts_allowed=3).why == "cancelled"
    (attempt,) = log.run(run.run_id)
    assert (attempt.status, attempt.error, attempt.retry_at) == ("cancelled", "no", None)
    assert log.cancel(PIPELINE, "no such run") == "ended"


def test_a_dead_run_that_is_cancelled(log: RunLog) -> None:
    run = granted(log, attempts_allowed=3, lease_seconds=0)
    assert log.cancel(PIPELINE, run.run_id) == "cancelled"
    assert not log.heartbeat(run)
    assert refused(log, attempts_allowed=3).why == "cancelled"


def test_a_cancel_that_the_run_did_not_hear_of(log: RunLog) -> None:
    run = granted(log, attempts_allowed=3)
    assert log.cancel(PIPELINE, run.run_id) == "asked"
    assert log.finish(run, "failed", error="no", retry_in=0)
    assert refused(log, attempts_allowed=3).why == "cancelled"
    killed = granted(log, NEXT, attempts_allowed=3, lease_seconds=60)
    assert log.cancel(PIPELINE, killed.run_id) == "asked"
    log._book.locked(PIPELINE, lambda records: records.change({"expires_at": datetime(2000, 1, 1, tzinfo=UTC)}))
    assert refused(log, NEXT, attempts_allowed=3).why == "cancelled"
    assert log.latest([PIPELINE])[PIPELINE].failures == 0


def test_attempts_that_are_used_up_are_over(log: RunLog) -> None:
    for _ in range(4):
        granted(log, attempts_allowed=1, lease_seconds=0)
    assert refused(log, attempts_allowed=1).why == "exhausted"
    last = log.latest([PIPELINE])[PIPELINE].scheduled
    assert last is not None and (last.status, last.retry_at) == ("failed", None)


@pytest.mark.parametrize("log_url", ["postgres", "mysql"], indirect=True)
def test_a_process_that_is_stopped_inside_a_transaction(log_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends what it had begun, and another process takes over."""
    with open_run_log(log_url) as second, ExitStack() as closing:
        monkeypatch.setattr(runlog_tables, "_SILENT_SECONDS", 1)
        first = closing.enter_context(open_run_log(log_url))
        held, goes_on = threading.Event(), threading.Event()

        def stand_still(records: Any) -> None:
            held.set()
            goes_on.wait(120)
            records.change({"failures": 5})

        with ThreadPoolExecutor(1) as threads:
            stopped = threads.submit(first._book.locked, "load", stand_still)
            try:
                assert held.wait(60)
                assert isinstance(second.claim("load"), ClaimedRun)
            finally:
                goes_on.set()
            with pytest.raises(ConnectionFailedError):
                stopped.result(60)
        assert second.latest(["load"])["load"].failures == 0


def test_a_heartbeat_whose_transaction_the_server_ended(log_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks once more: meanwhile another process may have taken over."""
    with open_run_log(log_url) as first, open_run_log(log_url) as second:
        claimed = first.claim("load", lease_seconds=0.01)
        assert isinstance(claimed, ClaimedRun)
        renew, calls = RunLog.renew, []

        def stood_still(log: RunLog, run: ClaimedRun) -> bool:
            calls.append(run)
            if len(calls) == 1:
                wait_until(lambda: isinstance(second.claim("load"), ClaimedRun), "the lease to end")
                raise ConnectionFailedError("The server ended the transaction.")
            return renew(log, run)

        monkeypatch.setattr(RunLog, "renew", stood_still)
        assert first.heartbeat(claimed) is False
