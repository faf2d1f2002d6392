"""Schedulers that are stopped, killed (-9), cut off from their run log or misled by their clock, with cron beside them:
every slot is run, and none twice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from faults.schedulers import LEASE_SECONDS, LOGS, Fleet, Wire, fleet  # noqa: F401 - fixture

pytestmark = pytest.mark.timing

Count = Callable[..., int]
ON_SERVERS = [each for each in LOGS if each != "sqlite"]
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)


@pytest.mark.brief("sqlite")
@pytest.mark.parametrize("fleet", LOGS, indirect=True)
def test_leaders_that_are_paused_or_killed(fleet: Fleet, count: Count) -> None:  # noqa: F811
    """Three replicas and cron. By turns the leader is paused past its lease, and killed."""
    wanted = count(200, 2)
    fleet.add(3)
    for slot in range(wanted):
        leader = fleet.leader()
        if random.random() < 0.5:  # else while it waits for the next look
            fleet.at(slot * MINUTE)
            time.sleep(random.random() / 2)
        if slot % 2:
            leader.kill()
            leader.wait()
            fleet.running.remove(leader)
        else:
            fleet.pause(leader)
        fleet.at(slot * MINUTE)
        if slot % 3 == 1:
            fleet.cron()
        fleet.leader(but=leader.pid)
        fleet.done(slot + 1)
        if slot % 2:
            fleet.add()
        else:
            leader.send_signal(signal.SIGCONT)
    fleet.check(wanted)


@pytest.mark.full
@pytest.mark.parametrize("fleet", ["postgres", "mysql", "seaweed"], indirect=True)
def test_a_run_log_that_is_restarted(fleet: Fleet, count: Count) -> None:  # noqa: F811
    wanted = count(10)
    fleet.add(2)
    fleet.ready()
    for slot in range(wanted):
        fleet.leader()
        fleet.at(slot * MINUTE)
        time.sleep(random.random())
        (fleet.server.kill if slot % 2 else fleet.server.stop)()
        fleet.server.start()
        fleet.done(slot + 1)
    fleet.check(wanted)


@pytest.mark.full
@pytest.mark.parametrize("fleet", ON_SERVERS, indirect=True)
def test_a_network_that_is_cut(fleet: Fleet, count: Count) -> None:  # noqa: F811
    """For two of three schedulers and what they start, by chance for longer than the lease."""
    wanted = count(10)
    fleet.add(1)  # this one has a line of its own
    fleet.wire = Wire(fleet.server.port)
    fleet.add(2)
    fleet.ready()
    for slot in range(wanted):
        fleet.leader()
        fleet.at(slot * MINUTE)
        time.sleep(random.random())
        fleet.wire.cut()
        time.sleep(random.choice([0.1, 1.5]) * LEASE_SECONDS)
        fleet.wire.mend()
        fleet.done(slot + 1)
    fleet.check(wanted)


@pytest.mark.full
@pytest.mark.parametrize("fleet", LOGS, indirect=True)
def test_a_clock_that_is_moved_by_an_hour(fleet: Fleet, count: Count) -> None:  # noqa: F811
    """What an hour ahead makes due is done early, and not again when the clock is right, nor when it is behind."""
    wanted = count(10)
    fleet.add(2)
    for slot in range(wanted):
        now = slot * 2 * HOUR
        fleet.at(now)
        fleet.done(2 * slot + 1)
        fleet.at(now + HOUR)
        fleet.done(2 * slot + 2)
        for moved in (now, max(now - HOUR, HOUR), now + HOUR):
            fleet.at(moved)
            fleet.cron()
            fleet.others[-1].wait(120)
            assert fleet.slots().total() == 2 * slot + 2
    fleet.check(2 * wanted)
