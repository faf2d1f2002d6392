"""Of several schedulers one leads, by a lease in the run log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from servers import wait_until
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
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.scheduler import LEADER


@pytest.fixture
def log(clock: Clock) -> Iterator[RunLog]:
    with open_run_log(None) as opened:
        yield opened


def test_only_the_leader_starts(log: RunLog, clock: Clock) -> None:
    declare("orders")
    first, second = Runs(), Runs()
    leader, follower = scheduler(log, first, clock), scheduler(log, second, clock)

    assert leader.tick() == ["orders"]
    assert follower.tick() == []
    leader.hand_over()
    succeed(log, "orders", NOON.replace(second=0))
    clock.move(minutes=1)
    assert follower.tick() == ["orders"]
    assert leader.tick() == []
    assert (len(first.started), len(second.started)) == (1, 1)


def test_leader_that_lost_its_lease_starts_nothing(log: RunLog, clock: Clock) -> None:
    declare("orders")
    declare("items")
    first, second = Runs(), Runs()
    sleeper, other = scheduler(log, first, clock), scheduler(log, second, clock)

    class Asleep(Runs):
        """While it starts the first run, its lease ends and another scheduler takes over."""

        def start(self, dispatch: Dispatch) -> Any:
            run = super().start(dispatch)
            assert sleeper.lease is not None
            log.finish(sleeper.lease, "interrupted")
            other.tick()
            return run

    sleeper.executor = Asleep()
    assert sleeper.tick() == ["orders"]
    assert sleeper.lease is None
    assert second.started == ["orders", "items"]
    assert sleeper.tick() == []


@pytest.mark.parametrize("is_granted", [True, False])
def test_claim_whose_answer_was_lost(
    log: RunLog, clock: Clock, monkeypatch: pytest.MonkeyPatch, is_granted: bool
) -> None:
    """It would else be refused by itself until its lease ends, and nobody would lead."""
    declare("orders")
    metrics = Metrics()
    made = scheduler(log, Runs(), clock, metrics=metrics)
    locked = log._book.locked

    def lost(pipeline: str, work: Any) -> Any:
        if is_granted:
            locked(pipeline, work)
        raise ConnectionFailedError("The connection is lost.")

    with monkeypatch.context() as patch:
        patch.setattr(log._book, "locked", lost)
        with pytest.raises(ConnectionFailedError):
            made.tick()
    assert made.lease is None and log.latest([LEADER])[LEADER].is_live is is_granted
    assert made.tick() == ["orders"]
    assert made.lease is not None and made.lease.fence == 1 + is_granted
    assert [each.status for each in log.runs(LEADER)][1:] == ["interrupted"] * is_granted
    # Only then: another scheduler in this process has the lease by right.
    assert scheduler(log, Runs(), clock).tick() == [] and made.tick() == [] and made.lease is not None


def test_leader_that_lost_its_lease_records_no_skip(log: RunLog, clock: Clock) -> None:
    declare("raw")
    declare("report", depends_on="raw")
    sleeper = scheduler(log, Runs(), clock)

    class Asleep(Runs):
        def start(self, dispatch: Dispatch) -> Any:
            assert sleeper.lease is not None
            log.finish(sleeper.lease, "interrupted")
            return super().start(dispatch)

    sleeper.executor = Asleep()
    assert sleeper.tick() == ["raw"]
    assert sleeper.lease is None and log.runs("report") == []


def test_lease_is_handed_over_after_the_start_in_hand(
    log: RunLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.operate.scheduler._STOP_SECONDS", 120)
    made = scheduler(log, Runs(), clock)
    made.tick()
    handing = threading.Thread(target=made.hand_over)
    with made._starting:  # as a thread that starts a build
        handing.start()
        handing.join(0.2)
        assert handing.is_alive() and log.latest([LEADER])[LEADER].is_live
    handing.join(120)
    assert not log.latest([LEADER])[LEADER].is_live


def test_new_leader_is_reported(log: RunLog, clock: Clock) -> None:
    declare("orders")
    told = Told()
    first, second, third = (scheduler(log, Runs(), clock, alerters=Alerters([told])) for _ in range(3))
    first.tick()
    first.hand_over()
    second.tick()
    assert told.texts == []  # the first ever, and one that was started again on its host
    assert second.lease is not None
    log.finish(second.lease, "interrupted")  # as the next one finds it after its lease
    third.tick()
    assert len(told.texts) == 1 and "ended or was silent for longer than its lease" in told.texts[0]


def test_a_leader_with_other_pipelines(log: RunLog, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """What only a follower has declared would never run, and nobody said so."""
    declare("orders")
    leader = scheduler(log, Runs(), clock)
    assert leader.tick() == ["orders"]
    same = scheduler(log, Runs(), clock)
    assert same.tick() == [] and "same modules" not in caplog.text
    declare("stock")
    other = scheduler(log, Runs(), clock)
    for _ in range(2):
        assert other.tick() == []
    assert caplog.text.count("has declared 1 pipeline (") == caplog.text.count("this scheduler 2 pipelines (") == 1


@pytest.mark.parametrize(("poll", "lease"), [(10, 10), (600, 300)])
def test_a_lease_that_is_not_renewed_in_time(log: RunLog, clock: Clock, poll: float, lease: float) -> None:
    """Of two such schedulers, each would lead by turns."""
    with pytest.raises(SettingsError, match="renews its lease"):
        scheduler(log, Runs(), clock, poll_seconds=poll, lease_seconds=lease)


def test_interrupt_ends_the_scheduler(log: RunLog, clock: Clock) -> None:
    declare("orders")
    runs = Runs()
    made = scheduler(log, runs, clock, poll_seconds=0)

    def interrupted(dispatch: Dispatch) -> Any:
        raise KeyboardInterrupt

    runs.start = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert not log.latest([LEADER])[LEADER].is_live


def test_nobody_leads_after_a_clean_stop(log: RunLog, clock: Clock) -> None:
    declare("orders")
    made = scheduler(log, Runs(), clock, poll_seconds=0.01)
    made.tick()
    assert log.latest([LEADER])[LEADER].is_live
    made.stop()
    made.run()
    assert not log.latest([LEADER])[LEADER].is_live


def test_lease_is_handed_over_by_a_stop_within_a_tick(log: RunLog, clock: Clock) -> None:
    declare("orders")
    declare("items")
    made = scheduler(log, Runs(), clock, poll_seconds=0.01)

    class Stopping(Runs):
        def start(self, dispatch: Dispatch) -> Any:
            made.stop()
            return super().start(dispatch)

    made.executor = Stopping()
    made.run()
    assert made.executor.started == ["orders"]
    assert not log.latest([LEADER])[LEADER].is_live
    assert log.runs(LEADER)[0].status == "succeeded"


@pytest.mark.every_system
def test_a_dead_leader_whose_lease_the_clock_made_long(log_url: str, clock: Clock) -> None:
    """Nobody led for an hour."""
    declare("orders")
    with open_run_log(log_url) as log:
        paused, first, second = (scheduler(log, Runs(), clock, lease_seconds=1) for _ in range(3))
        lease = paused.lease = claimed_before_the_clock_went_back(log, LEADER, lease_seconds=1, resume=False)
        assert first.tick() == [] and first.lease is None
        wait_until(lambda: first.tick() == ["orders"], "the lease to end")
        assert first.lease is not None and first.lease.fence == lease.fence + 1
        assert "was silent for longer than its lease" in (log.run(lease.run_id)[0].error or "")
        # The other one goes on after a pause: it neither starts nor records anything.
        assert not log.finish(lease, "succeeded")
        first.lease_seconds = second.lease_seconds = paused.lease_seconds = 300
        assert first.tick() == [] and first.lease is not None
        first.lease = replace(first.lease, lease_seconds=300)
        assert first.tick() == second.tick() == paused.tick() == []
        assert first.lease is not None and second.lease is None and paused.lease is None


@pytest.mark.every_system
def test_a_leader_that_lives_while_the_clock_is_set_back(log_url: str, clock: Clock) -> None:
    with open_run_log(log_url) as log:
        lease = claimed_before_the_clock_went_back(log, LEADER, lease_seconds=300, resume=False)
        follower = scheduler(log, Runs(), clock)
        for _ in range(3):
            assert follower.tick() == [] and follower.lease is None
            assert log.renew(lease)
