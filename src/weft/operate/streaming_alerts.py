"""Alerts of a streaming pipeline: that it failed or is started again and again, is behind, rejects rows, or gets none.

The run log counts its failures, so that a process that a service manager starts again and again tells it a few times,
and the one that succeeds tells that too. All of it happens in a thread of its own: no batch waits for a run log, a
source that is asked for its lag, or an alerter.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from weft.operate import freshness
from weft.operate.alerters import open_alerters
from weft.operate.alerts import Alerters, AlertKind, is_worth_telling
from weft.operate.listener import RunListener
from weft.operate.runlog import RunLog, open_run_log
from weft.operate.runner import described
from weft.pipelines.streaming.execution import Lag, Report
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current
from weft.settings import read_project_file

_log = logging.getLogger("weft.operate")
_LOOK_SECONDS = 15.0
_DEAD_LETTER_SECONDS = 3600.0
_MOST_WAITING = 1000
# At the end: a run log that hangs does not keep the process.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """`[alerts]` of weft.toml."""

    restarts: int = 3
    lag: int | None = None
    dead_letters: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], pipeline: str) -> Self:
        """Return those of a pipeline, by the settings of the project."""
        said = dict(settings.get("alerts", {}))
        own = said.pop("pipelines", {}).get(pipeline, {})
        return cls(**{**said, **own})


class StreamingAlerts(RunListener):
    """Reports what goes wrong with one pipeline, and that it goes well again."""

    def __init__(
        self,
        name: str,
        log: RunLog,
        told: Alerters,
        *,
        limits: Limits | None = None,
        expect_within: float | None = None,
        look_seconds: float = _LOOK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.log, self.told, self.limits = name, log, told, limits or Limits()
        self.expect_within, self.clock = expect_within, clock
        self._key = freshness.streaming_key(name)
        # A tenth of what is expected, so that rows are noted in time.
        self._look_seconds = min(look_seconds, (expect_within or look_seconds * 10) / 10)
        self._events: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="weft alerts", daemon=True)
        self._lag: Lag | None = None
        self._noted_at: float | None = None
        self._has_told = False
        self._starts = 0
        self._over: set[AlertKind] = set()
        self._dead: deque[tuple[float, int]] = deque()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._put(None)
        self._thread.join(_END_SECONDS)

    # --------------------------------------------------------------------------------------------- called by the engine

    def started(self, lag: Lag) -> None:
        self._lag = lag

    def batch(self, report: Report) -> None:
        self._put(lambda: self._note_batch(report))

    def failed(self, error: Exception, again_in: float | None) -> None:
        self._put(lambda: self._note_failure(described(error), again_in))

    def _put(self, event: Callable[[], None] | None) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            _log.warning("Alerts of %s are behind: one event is left out.", self.name)

    # --------------------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        look_at = self.clock()
        while True:
            event: Callable[[], None] | None = self.look
            left = look_at - self.clock()
            if left <= 0:
                look_at = self.clock() + self._look_seconds
            else:
                try:
                    event = self._events.get(timeout=left)
                except queue.Empty:
                    continue
            if event is None:
                return
            try:
                event()
            except Exception as error:  # whatever it is: alerts come later, and the pipeline goes on
                _log.warning("Alerts of %s: %s", self.name, described(error))

    def _note_batch(self, report: Report) -> None:
        now = self.clock()
        if report.dead:
            self._dead.append((now, report.dead))
            self._judge_dead_letters()
        is_due = self.expect_within is not None and now - (self._noted_at or 0.0) >= self._look_seconds
        if self._noted_at is not None and not is_due:
            return
        failures = self.log.note_rows(self._key)
        # It is not known what an earlier process that failed has told.
        if failures and (self._has_told or failures > self._starts):
            text = f"{self.name} has rows again, after {failures} failure{'s' if failures > 1 else ''}"
            self.told.notice("recovered", self.name, text, failures=failures)
        self._noted_at, self._has_told, self._starts = now, False, 0

    def _note_failure(self, error: str, again_in: float | None) -> None:
        self._noted_at = None  # the next batch is noted at once
        times = self.log.note_failure(self._key)
        if again_in is None:
            # A process that gives up after many starts does so rarely; one that fails at once may be started again.
            if self._starts or is_worth_telling(times):
                self._has_told = True
                text = f"{self.name} failed, and has ended"
                self.told.notice("gave_up", self.name, text, error=error, failures=times)
            return
        self._starts += 1
        if self._starts % self.limits.restarts == 0 and is_worth_telling(self._starts // self.limits.restarts):
            self._has_told = True
            text = f"{self.name} failed {times} times in a row, and is started again"
            self.told.notice("failed", self.name, text, error=error, failures=times)

    def look(self) -> None:
        """Compare the lag, the dead letters and the time of the last rows with their limits."""
        if self.limits.lag is not None and self._lag is not None:
            behind = self._lag.now()
            if behind:
                name, most = max(behind.items(), key=lambda each: each[1])
                self._judge("lag", most, self.limits.lag, f"{self.name} is {most:,} behind in {name}")
        self._judge_dead_letters()
        if self.expect_within is not None and self.told:
            states = self.log.latest([self._key])
            freshness.check(self.log, {self._key: self.expect_within}, states, self.told)

    def _judge_dead_letters(self) -> None:
        if self.limits.dead_letters is None:
            return
        while self._dead and self.clock() - self._dead[0][0] > _DEAD_LETTER_SECONDS:
            self._dead.popleft()
        count = sum(each for _, each in self._dead)
        text = f"{self.name} rejected {count:,} rows within an hour"
        self._judge("dead_letters", count, self.limits.dead_letters, text)

    def _judge(self, kind: AlertKind, value: int, limit: int, text: str) -> None:
        """Report a value above its limit once; and that it is over at half of the limit, so that one that goes up and
        down around it is reported once too."""
        if value > limit and kind not in self._over:
            self._over.add(kind)
            self.told.notice(kind, self.name, f"{text}; the limit is {limit:,}")
        elif value <= limit // 2 and kind in self._over:
            self._over.remove(kind)
            self.told.notice("recovered", self.name, text)


@contextmanager
def reported(
    pipeline: StreamingPipeline, alerters: Sequence[str] = (), run_log: str | None = None
) -> Iterator[list[RunListener]]:
    """Yield the listener that reports on a pipeline, for the alerters and the run log of the project unless others are
    named; none where nobody is to be told."""
    settings = read_project_file(current().root)
    told = open_alerters(alerters or settings.get("alerters", ()))
    if not told and pipeline.expect_within is None:
        yield []
        return
    with (
        told,
        open_run_log(run_log or settings.get("run_log"), or_memory=True) as log,
        StreamingAlerts(
            pipeline.name,
            log,
            told,
            limits=Limits.of(settings, pipeline.name),
            expect_within=pipeline.expect_within,
        ) as listener,
    ):
        yield [listener]
