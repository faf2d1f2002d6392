"""The scheduler starts what is due, each slot once, and only while it leads."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import weft
from tests.operate.scheduling import (
    NOON,
    Clock,
    Runs,
    Told,
    claimed_before_the_clock_went_back,
    declare,
    scheduler,
    succeed,
)
from weft.errors import ConnectionFailedError, SettingsError
from weft.operate.alerts import Alerters
from weft.operate.executors import Dispatch
from weft.operate.metrics import Metrics
from weft.operate.records import ClaimedRun
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.runner import Runner
from weft.operate.scheduler import _pause


@pytest.fixture
def log(clock: Clock) -> Iterator[RunLog]:
    with open_run_log(None) as opened:
        yield opened


def test_starts_each_slot_once(log: RunLog, clock: Clock) -> None:
    declare("orders")
    runs = Runs()
    made = scheduler(log, runs, clock)

    assert made.tick() == ["orders"]
    # It was started, and has not claimed its slot yet.
    assert made.tick() == []
    succeed(log, "orders", NOON.replace(second=0))
    runs.codes["orders"] = 0
    assert made.tick() == []
    clock.move(minutes=1)
    assert made.tick() == ["orders"]
    assert runs.started == ["orders", "orders"]


@pytest.mark.parametrize("who", ["scheduler", "run-due"])
def test_a_dead_run_that_the_clock_keeps_claimed(log: RunLog, clock: Clock, who: str) -> None:
    declare("orders")
    claimed_before_the_clock_went_back(log, "orders", slot=NOON.replace(second=0))
    made = scheduler(log, Runs(), clock)
    if who == "scheduler":
        assert made.tick() == []
    else:
        assert list(Runner(log, lambda *_, **__: pytest.fail("it ran")).run_due()) == []
    state = log.latest(["orders"])["orders"]
    assert state.is_live and state.expires_at is not None and state.now is not None
    assert state.expires_at - state.now <= timedelta(seconds=60)


def test_a_retry_that_the_clock_puts_off(log: RunLog, clock: Clock) -> None:
    declare("orders", retry={"max_attempts": 2})
    failed = log.claim("orders", slot=NOON.replace(second=0), attempts_allowed=2)
    assert isinstance(failed, ClaimedRun) and log.finish(failed, "failed", retry_in=30)
    made = scheduler(log, Runs(), clock)
    assert made.tick() == []
    hour = timedelta(hours=1)
    log._book.locked(
        "orders",
        lambda records: records.end(
            failed.run_id, 1, {"finished_at": failed.started_at + hour, "retry_at": failed.started_at + hour}, "failed"
        ),
    )
    assert made.tick() == ["orders"]


@pytest.mark.parametrize("status", ["succeeded", "failed"])
def test_schedule_that_becomes_rarer_waits_for_its_next_slot(log: RunLog, clock: Clock, status: str) -> None:
    """The last slot is of the old schedule, and later than the last one of the new."""
    midnight, last = NOON.replace(hour=0, second=0), NOON.replace(second=0)
    succeed(log, "orders", midnight)
    claimed = log.claim("orders", slot=last, attempts_allowed=2)
    assert isinstance(claimed, ClaimedRun)
    log.finish(claimed, status, retry_in=0.0 if status == "failed" else None)

    @weft.pipeline(name="orders", target="orders", schedule="0 0 * * *", retry={"max_attempts": 2})
    def load():  # type: ignore[no-untyped-def]
        return [{"id": 1}]

    runs = Runs()
    made = scheduler(log, runs, clock)
    (due,) = made.due()
    assert (due.slot, due.why) == (last, "done" if status == "succeeded" else "retry")
    assert made.tick() == ([] if status == "succeeded" else ["orders"])
    clock.now = midnight + timedelta(days=1, seconds=30)
    runs.codes["orders"] = 0
    assert made.due()[0].slot == midnight + timedelta(days=1)
    assert made.tick() == ["orders"]


def test_run_whose_slot_was_done_is_not_started_at_every_tick(log: RunLog, clock: Clock) -> None:
    """A clock that was an hour ahead has claimed a slot that is still to come."""
    declare("orders")
    succeed(log, "orders", NOON.replace(second=0))
    succeed(log, "orders", NOON.replace(second=0) + timedelta(hours=1))
    made = scheduler(log, runs := Runs(), clock)

    assert made.tick() == ["orders"]
    runs.codes["orders"] = 0  # its claim was refused
    assert made.tick() == []
    clock.move(seconds=6)
    assert made.tick() == ["orders"]
    runs.codes["orders"] = 0
    clock.move(seconds=60)
    assert made.tick() == ["orders"]  # the next slot


def test_follows_the_graph(log: RunLog, clock: Clock) -> None:
    declare("raw")
    declare("report", depends_on="raw")
    runs = Runs()
    made = scheduler(log, runs, clock)

    assert made.tick() == ["raw"]
    assert log.latest(["report"])["report"].skipped is not None
    # The log has its own clock: upstream_freshness_secs would be needed for another day.
    clock.now = datetime.now(UTC)
    runs.codes["raw"] = 0
    succeed(log, "raw", clock.now.replace(second=0, microsecond=0))
    assert made.tick() == ["report"]


def test_limits_what_runs_at_once(log: RunLog, clock: Clock) -> None:
    for number in range(5):
        declare(f"p{number}")
    runs = Runs()
    made = scheduler(log, runs, clock, most_running=2)

    assert made.tick() == ["p0", "p1"]
    succeed(log, "p0", NOON.replace(second=0))
    runs.codes["p0"] = 0
    assert made.tick() == ["p2"]


def test_run_that_ends_before_its_claim_is_started_again_later(log: RunLog, clock: Clock) -> None:
    declare("orders")
    runs = Runs()
    made = scheduler(log, runs, clock)

    assert made.tick() == ["orders"]
    runs.codes["orders"] = 1
    assert made.tick() == []
    clock.move(seconds=6)
    assert made.tick() == ["orders"]
    runs.codes["orders"] = 1
    clock.move(seconds=6)
    assert made.tick() == []
    clock.move(seconds=6)
    assert made.tick() == ["orders"]


def test_run_that_claimed_and_failed_is_tried_again_by_its_policy(log: RunLog, clock: Clock) -> None:
    declare("orders", retry={"max_attempts": 9, "backoff_seconds": 1})
    runs = Runs()
    made = scheduler(log, runs, clock)

    for _ in range(4):
        assert made.tick() == ["orders"]
        claimed = log.claim("orders", slot=NOON.replace(second=0), attempts_allowed=9)
        assert isinstance(claimed, ClaimedRun)
        log.finish(claimed, "failed", retry_in=0.0)
        runs.codes["orders"] = 1


@pytest.mark.parametrize(("years", "retry_in", "started"), [(-20, 0.0, ["orders"]), (20, 3600.0, [])])
def test_retry_waits_by_the_clock_of_the_log(
    log: RunLog, clock: Clock, years: int, retry_in: float, started: list[str]
) -> None:
    """That of this host may be wrong."""
    clock.move(days=365 * years)
    declare("orders", retry={"max_attempts": 9})
    runs = Runs()
    made = scheduler(log, runs, clock)
    assert made.tick() == ["orders"]
    claimed = log.claim("orders", slot=clock.now.replace(second=0), attempts_allowed=9)
    assert isinstance(claimed, ClaimedRun)
    log.finish(claimed, "failed", retry_in=retry_in)
    runs.codes["orders"] = 1
    assert made.tick() == started


def test_next_slot_does_not_wait_for_what_the_last_one_waits_for(log: RunLog, clock: Clock) -> None:
    declare("orders")
    runs = Runs()
    runs.error = OSError("no memory")
    made = scheduler(log, runs, clock)
    clock.now = NOON.replace(second=58)
    assert made.tick() == []
    runs.error = None
    clock.move(seconds=1)
    assert made.tick() == []
    clock.move(seconds=1)
    assert made.tick() == ["orders"]


def test_executor_that_fails_is_reported(log: RunLog, clock: Clock) -> None:
    declare("orders")
    runs, told = Runs(), Told()
    runs.error = OSError("no memory")
    made = scheduler(log, runs, clock, alerters=Alerters([told]))

    assert made.tick() == []
    assert told.texts == ["orders could not be started: no memory"]
    assert made.tick() == []
    for _ in range(4):  # of five in a row, the first, second and fourth
        clock.move(minutes=1)
        assert made.tick() == []
    assert told.texts == ["orders could not be started: no memory"] * 3
    runs.error = None
    clock.move(minutes=1)
    assert made.tick() == ["orders"]
    assert told.texts[3:] == ["orders was started after 5 failed starts"]


def test_tick_reports_what_is_stale(log: RunLog, clock: Clock) -> None:
    declare("orders", expect_within="2h")
    declare("other")
    told = Told()
    made = scheduler(log, Runs(), clock, alerters=Alerters([told]))
    made.tick()
    log._book.locked("orders", lambda each: each.change({"watched_at": each.claim.now - timedelta(hours=3)}))
    made.tick()
    made.tick()
    assert len(told.texts) == 1 and told.texts[0].startswith("orders had no success for 3:0")


def test_known_pipelines_are_limited_too(log: RunLog, clock: Clock) -> None:
    for number in range(4):
        declare(f"p{number}")
    runs = Runs()
    made = scheduler(log, runs, clock, most_running=1)

    for number in range(4):
        assert made.tick() == [f"p{number}"]
        runs.codes[f"p{number}"] = 1
    clock.move(seconds=50)
    # All four are due again, and known.
    assert len(made.tick()) == 1
    assert len(made.tick()) == 0


def test_pause_is_bounded() -> None:
    assert [_pause(failures) for failures in (0, 1, 4, 1024, 10**9)] == [5, 10, 60, 60, 60]


@pytest.mark.parametrize("is_claimed", [True, False])
def test_executor_that_cannot_tell_the_end(log: RunLog, clock: Clock, is_claimed: bool) -> None:
    declare("orders")
    declare("items")
    runs = Runs()
    made = scheduler(log, runs, clock, most_running=2)

    for _ in range(10):
        assert made.tick() == ["orders", "items"]
        assert made.tick() == []
        if is_claimed:
            for name in ("orders", "items"):
                succeed(log, name, clock.now.replace(second=0))
            made.tick()
            assert not made._running
        clock.move(minutes=1)


def test_executor_that_cannot_tell_the_end_starts_a_retry_once(log: RunLog, clock: Clock) -> None:
    declare("orders", retry={"max_attempts": 3, "backoff_seconds": 1})
    made = scheduler(log, Runs(), clock)

    assert made.tick() == ["orders"]
    claimed = log.claim("orders", slot=NOON.replace(second=0), attempts_allowed=3)
    assert isinstance(claimed, ClaimedRun)
    # It runs, and counts.
    assert made.tick() == [] and len(made._running) == 1
    log.finish(claimed, "failed", retry_in=0.0)
    assert made.tick() == ["orders"]
    assert made.tick() == []


def test_run_that_tells_its_end_is_waited_for(log: RunLog, clock: Clock) -> None:
    declare("orders")
    runs = Runs()
    runs.tells_end = True
    made = scheduler(log, runs, clock)

    assert made.tick() == ["orders"]
    clock.move(minutes=1)
    # The process is still about to claim its slot.
    assert made.tick() == []
    runs.codes["orders"] = 0
    assert made.tick() == ["orders"]


def test_process_that_lingers_delays_no_retry(log: RunLog, clock: Clock) -> None:
    """As where an alerter does not answer, for which it waits at its end."""
    declare("orders", retry={"max_attempts": 3})
    runs = Runs()
    runs.tells_end = True
    made = scheduler(log, runs, clock, most_running=1)

    assert made.tick() == ["orders"]
    claimed = log.claim("orders", slot=NOON.replace(second=0), attempts_allowed=3)
    assert isinstance(claimed, ClaimedRun)
    assert made.tick() == []
    log.finish(claimed, "failed", retry_in=0.0)
    assert made.tick() == ["orders"]
    assert made.tick() == []


def test_error_of_one_pipeline_leaves_the_others_alone(
    log: RunLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    declare("broken")
    declare("orders")
    runs = Runs()
    start = runs.start

    def fail_broken(dispatch: Dispatch) -> Any:
        if dispatch.pipeline == "broken":
            raise OSError("no memory")
        return start(dispatch)

    runs.start = fail_broken  # type: ignore[method-assign]
    made = scheduler(log, runs, clock)
    assert made.tick() == ["orders"]
    assert "broken could not be started: no memory" in caplog.text
    # Not at every tick: what could not be started waits.
    caplog.clear()
    assert made.tick() == []
    assert not caplog.records


def test_executor_whose_runs_raise_when_asked(log: RunLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    declare("orders")
    declare("items")
    runs = Runs()
    made = scheduler(log, runs, clock)
    assert made.tick() == ["orders", "items"]
    del runs.codes["orders"]
    runs.codes["items"] = 0

    clock.move(minutes=1)
    assert made.tick() == ["orders", "items"]
    assert "does not know whether orders has ended: KeyError" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("odd"), ConnectionFailedError("away"), OverflowError("too large")])
def test_error_of_a_tick_does_not_end_the_scheduler(
    log: RunLog, clock: Clock, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    made = scheduler(log, Runs(), clock, poll_seconds=0)
    ticks: list[int] = []

    def tick() -> list[str]:
        ticks.append(1)
        if len(ticks) == 1:
            raise error
        made.stop()
        return []

    made.tick = tick  # type: ignore[method-assign]
    made.run()
    assert len(ticks) == 2
    assert "this tick failed, and the next one comes" in caplog.text and str(error) in caplog.text


def test_metrics_have_what_ended_wherever_it_ran(log: RunLog, clock: Clock) -> None:
    declare("orders")
    declare("customers")
    runs, counted = Runs(), Metrics()
    made = scheduler(log, runs, clock, metrics=counted)
    made.tick()
    slot = clock.now.replace(second=0)
    for name, status in (("orders", "succeeded"), ("customers", "failed")):
        claimed = log.claim(name, slot=slot)
        assert isinstance(claimed, ClaimedRun)
        log.finish(claimed, status, counts={"inserted": 5})
    for _ in range(2):
        made.tick()
    assert counted.value("weft_scheduler_leads") == 1
    assert counted.value("weft_scheduler_dispatches_total", pipeline="orders") == 1
    assert counted.value("weft_pipeline_runs_total", pipeline="orders", status="succeeded") == 1
    assert counted.value("weft_pipeline_rows_total", pipeline="orders", kind="inserted") == 5
    assert counted.value("weft_pipeline_failures", pipeline="customers") == 1
    runs.error = OSError("no room")
    clock.move(minutes=1)
    made.tick()
    assert counted.value("weft_scheduler_dispatch_failures_total", pipeline="orders") == 1


def test_metrics_of_who_begins_to_lead(log: RunLog, clock: Clock) -> None:
    """How pipelines stand is in the log. Of what has ended, only what ends from now on is counted."""
    declare("orders")
    for hour in range(3):
        succeed(log, "orders", clock.now - timedelta(hours=9 - hour))
    running = log.claim("orders", slot=clock.now.replace(second=0))
    assert isinstance(running, ClaimedRun)
    counted = Metrics()
    made = scheduler(log, Runs(), clock, metrics=counted)

    def value(name: str, **labels: str) -> float | None:
        return counted.value(f"weft_pipeline_{name}", pipeline="orders", **labels)

    made.tick()
    succeeded_at = log.latest(["orders"])["orders"].succeeded_at
    assert succeeded_at is not None and value("last_success_timestamp_seconds") == succeeded_at.timestamp()
    assert (value("failures"), value("runs_total", status="succeeded")) == (0, None)
    log.finish(running, "failed")
    made.tick()
    assert (value("failures"), value("runs_total", status="failed")) == (1, 1)
    assert value("runs_total", status="succeeded") is None
    # One that leads no longer knows nothing: its last values would raise alerts for ever.
    assert made.lease is not None
    log.finish(made.lease, "interrupted")
    other = scheduler(log, Runs(), clock)
    other.tick()
    made.tick()
    assert made.lease is None
    assert value("failures") is value("last_success_timestamp_seconds") is value("attempt") is None
    assert value("runs_total", status="failed") == 1


def test_a_pool_limits_what_runs_at_once(log: RunLog, clock: Clock) -> None:
    for name in ("a", "b", "c"):
        declare(name, pool="warehouse")
    declare("free")
    with pytest.raises(SettingsError, match=r"the pool 'warehouse', which has no size"):
        scheduler(log, Runs(), clock)
    runs = Runs()
    made = scheduler(log, runs, clock, pools={"warehouse": 2})
    by_hand = log.claim("c")
    assert isinstance(by_hand, ClaimedRun)
    assert made.tick() == ["a", "free"]
    log.finish(by_hand, "succeeded")
    assert made.tick() == ["b"]
    assert made.tick() == []
    succeed(log, "a", clock.now.replace(second=0))
    runs.codes["a"] = 0
    assert made.tick() == ["c"]


def test_a_run_that_nobody_hears_of_is_started_again(log: RunLog, clock: Clock) -> None:
    declare("orders", catchup=True)
    runs = Runs()
    made = scheduler(log, runs, clock)
    assert made.tick() == ["orders"]
    clock.move(seconds=10)
    assert made.tick() == []
    clock.move(minutes=21)
    assert made.tick() == ["orders"]


def test_metrics_count_all_that_ended_between_two_looks(log: RunLog, clock: Clock) -> None:
    declare("orders")
    counted = Metrics()
    made = scheduler(log, Runs(), clock, metrics=counted)
    made.tick()
    for minute in range(3):
        run = log.claim("orders", slot=clock.now.replace(second=0) - timedelta(minutes=minute))
        assert isinstance(run, ClaimedRun)
        log.finish(run, "succeeded", counts={"inserted": 2})
    made.tick()
    assert counted.value("weft_pipeline_runs_total", pipeline="orders", status="succeeded") == 3
    assert counted.value("weft_pipeline_rows_total", pipeline="orders", kind="inserted") == 6
