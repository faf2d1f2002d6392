"""Parts of the tests of the scheduler: runs that end as a test says, and a clock that it moves."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import weft
from weft.operate.alerts import Alert, Alerter
from weft.operate.executors import Dispatch
from weft.operate.records import ClaimedRun
from weft.operate.run_store import LockedPipeline
from weft.operate.runlog import RunLog
from weft.operate.scheduler import Scheduler

NOON = datetime(2030, 5, 1, 12, 0, 30, tzinfo=UTC)


class Runs:
    """An executor that starts nothing: the test says how its runs end."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.codes: dict[str, int | None] = {}
        self.error: Exception | None = None
        self.tells_end = False

    def start(self, dispatch: Dispatch) -> Any:
        if self.error is not None:
            raise self.error
        self.started.append(dispatch.pipeline)
        self.codes[dispatch.pipeline] = None
        runs, name = self, dispatch.pipeline

        class Run:
            tells_end = self.tells_end

            def ended(self) -> int | None:
                return runs.codes[name]

        return Run()


class Told(Alerter):
    """Remembers."""

    shown = "told"
    is_local = True

    def __init__(self) -> None:
        self.texts: list[str] = []

    def deliver(self, event: Alert) -> None:
        self.texts.append(str(event))


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def move(self, **by: float) -> None:
        self.now += timedelta(**by)


def declare(name: str, **options: Any) -> None:
    @weft.pipeline(name=name, target=name, schedule="* * * * *", **options)
    def load():  # type: ignore[no-untyped-def]
        return [{"id": 1}]


def scheduler(log: RunLog, runs: Runs, clock: Clock, **options: Any) -> Scheduler:
    options = {"poll_seconds": 0.01, **options}
    return Scheduler(log, runs, clock=lambda: clock.now.timestamp(), **options)


def succeed(log: RunLog, name: str, slot: datetime) -> None:
    claimed = log.claim(name, slot=slot)
    assert isinstance(claimed, ClaimedRun)
    log.finish(claimed, "succeeded")


def claimed_before_the_clock_went_back(log: RunLog, name: str, **options: Any) -> ClaimedRun:
    """The claim of a process on another host, as it is after the log's clock was set back by an hour."""
    claimed = log.claim(name, **options)
    assert isinstance(claimed, ClaimedRun)
    hour, elsewhere = timedelta(hours=1), "elsewhere:7:1:another/machine"

    def set_back(records: LockedPipeline) -> None:
        began = {"started_at": claimed.started_at + hour, "owner": elsewhere}
        records.end(claimed.run_id, claimed.attempt, began)
        records.change(
            {"owner": elsewhere, "expires_at": began["started_at"] + timedelta(seconds=claimed.lease_seconds)}
        )

    log._book.locked(name, set_back)
    return replace(claimed, owner=elsewhere)
