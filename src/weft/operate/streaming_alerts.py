"""Alerts of a streaming pipeline: that it failed or is started again and again, is behind, rejects rows, or gets none.

The run log counts its failures: a process that a service manager restarts again and again reports a few of them, and
the one that succeeds reports the recovery. All of it happens in a thread of its own: no batch waits for a run log, a
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
from functools import partial
from typing import Any, Self, TypeVar

from weft.operate import freshness
from weft.operate.alerters import open_alerters
from weft.operate.alerts import Alerters, AlertKind, is_worth_telling
from weft.operate.listener import RunListener
from weft.operate.runlog import RunLog, open_run_log, project_log_url
from weft.operate.runner import described
from weft.pipelines.streaming.execution import Lag, Report
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current
from weft.settings import read_project_file

T = TypeVar("T")
_log = logging.getLogger("weft.operate")
_LOOK_SECONDS = 15.0
_DEAD_LETTER_SECONDS = 3600.0
_MOST_WAITING = 1000
# Where so many batches wait, there is room left for failures.
_ROOM = 100
# At the end: a run log that hangs does not keep the process.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class AlertLimits:
    """`[alerts]` of weft.toml."""

    restarts: int = 3
    lag: int | None = None
    dead_letters: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], pipeline: str) -> Self:
        """Return the limits of a pipeline, by the settings of the project."""
        said = dict(settings.get("alerts", {}))
        own = said.pop("pipelines", {}).get(pipeline, {})
        return cls(**{**said, **own})


class StreamingAlerts(RunListener):
    """Reports what goes wrong with one pipeline, and that it goes well again. Where the run log does not answer, it
    counts by itself, and opens the log again by `open_log`."""

    def __init__(
        self,
        name: str,
        log: RunLog | None,
        alerters: Alerters,
        *,
        open_log: Callable[[], RunLog] | None = None,
        limits: AlertLimits | None = None,
        expect_within: float | None = None,
        look_seconds: float = _LOOK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.alerters, self.limits = name, alerters, limits or AlertLimits()
        self._log, self._open_log, self._open_at, self._is_away = log, open_log, 0.0, log is None
        self.expect_within, self.clock = expect_within, clock
        self._key = freshness.streaming_key(name)
        # A tenth of what is expected, so that rows are noted in time.
        self._look_seconds = min(look_seconds, (expect_within or look_seconds * 10) / 10)
        self._events: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING + _ROOM)
        self._thread = threading.Thread(target=self._work, name="weft alerts", daemon=True)
        self._lag: Lag | None = None
        self._asking: threading.Thread | None = None
        self._noted_at: float | None = None
        self._has_told = False
        self._starts = 0
        self._failures = 0
        """Since rows came, in this process."""
        self._is_unheard = False
        """Whether rows came that the run log has not heard of."""
        self._over: set[AlertKind] = set()
        self._dead: deque[tuple[float, int]] = deque()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._put(None)
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive() and self._log is not None and self._open_log is not None:
            self._log.close()

    # --------------------------------------------------------------------------------------------- called by the engine

    def started(self, lag: Lag) -> None:
        self._lag = lag

    def batch(self, report: Report) -> None:
        if self._events.qsize() < _MOST_WAITING:
            self._put(lambda: self._note_batch(report))
        else:
            self._warn_left_out()

    def failed(self, error: Exception, again_in: float | None) -> None:
        self._put(lambda: self._note_failure(described(error), again_in))

    def _put(self, event: Callable[[], None] | None) -> None:
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._warn_left_out()

    def _warn_left_out(self) -> None:
        _log.warning("Alerts of %s are behind: one event is left out.", self.name)

    # --------------------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        look_at = self.clock()
        while True:
            # First what waits already: looks at a log that is slow must not take all of the time.
            for _ in range(max(1, self._events.qsize())):
                try:
                    event = self._events.get(timeout=max(0.0, look_at - self.clock()))
                except queue.Empty:
                    break
                if event is None:
                    return
                self._try(event)
            if self.clock() >= look_at:
                self._try(self.look)
                look_at = self.clock() + self._look_seconds

    def _try(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception as error:  # whatever it is: alerts come later, and the pipeline goes on
            _log.warning("Alerts of %s: %s", self.name, described(error))

    def _in_log(self, work: Callable[[RunLog], T]) -> T | None:
        """Return what `work` returns for the run log; `None` where that does not answer, which is warned about once."""
        try:
            if self._log is None:
                if self._open_log is None or self.clock() < self._open_at:
                    return None
                self._log = self._open_log()
            result = work(self._log)
        except Exception as error:
            if not self._is_away:
                _log.warning("Alerts of %s go on without the run log: %s", self.name, described(error))
            self._is_away = True
            if self._open_log is not None:
                opened, self._log = self._log, None
                self._open_at = self.clock() + self._look_seconds
                if opened is not None:
                    opened.close()
            return None
        self._is_away = False
        return result

    def _note_batch(self, report: Report) -> None:
        now = self.clock()
        if report.dead:
            self._dead.append((now, report.dead))
            self._judge_dead_letters()
        if not report.consumed or report.replayed:
            return
        is_due = self.expect_within is not None and now - (self._noted_at or 0.0) >= self._look_seconds
        if self._noted_at is None or is_due:
            self._note_rows()

    def _note_rows(self) -> None:
        noted = self._in_log(lambda log: log.note_rows(self._key))
        # If the log hears of the recovery later, the alerters have heard of it already.
        failures = self._failures if self._is_unheard else max(noted or 0, self._failures)
        # It is not known what an earlier process that failed has reported.
        if failures and (self._has_told or failures > self._starts):
            text = f"{self.name} has rows again, after {failures} failure{'s' if failures > 1 else ''}"
            self.alerters.notice("recovered", self.name, text, failures=failures)
        self._has_told, self._starts, self._failures = False, 0, 0
        self._is_unheard = noted is None
        self._noted_at = None if noted is None else self.clock()

    def _note_failure(self, error: str, again_in: float | None) -> None:
        self._noted_at = None  # the next batch is noted at once
        self._failures += 1
        times = max(self._in_log(lambda log: log.note_failure(self._key)) or 0, self._failures)
        if again_in is None:
            # A process that gives up after many starts does so rarely; one that fails at once may be started again.
            if self._starts or is_worth_telling(times):
                self._has_told = True
                text = f"{self.name} failed, and has ended"
                self.alerters.notice("gave_up", self.name, text, error=error, failures=times)
            return
        self._starts += 1
        if self._starts % self.limits.restarts == 0 and is_worth_telling(self._starts // self.limits.restarts):
            self._has_told = True
            text = f"{self.name} failed {times} times in a row, and is started again"
            self.alerters.notice("failed", self.name, text, error=error, failures=times)

    def look(self) -> None:
        """Compare the lag, the dead letters and the time of the last rows with their limits."""
        self._ask_for_lag()
        self._judge_dead_letters()
        if self._is_unheard and not self._failures:
            self._note_rows()
        self._in_log(lambda log: log.deliver_meanwhile())
        if self.expect_within is not None and self.alerters:
            self._in_log(self._check_freshness)

    def _check_freshness(self, log: RunLog) -> None:
        assert self.expect_within is not None
        freshness.check(log, {self._key: self.expect_within}, log.latest([self._key]), self.alerters)

    def _ask_for_lag(self) -> None:
        """Ask in a thread of its own: a source that does not answer holds up no other alert."""
        if self.limits.lag is None or self._lag is None or (self._asking is not None and self._asking.is_alive()):
            return
        lag = self._lag

        def ask() -> None:
            try:
                behind = lag.now()
            except Exception as error:  # whatever it is: it is asked again
                _log.warning("Alerts of %s: %s", self.name, described(error))
                return
            self._put(lambda: self._judge_lag(behind))

        self._asking = threading.Thread(target=ask, name="weft lag", daemon=True)
        self._asking.start()

    def _judge_lag(self, behind: Mapping[str, int]) -> None:
        if behind and self.limits.lag is not None:
            name, most = max(behind.items(), key=lambda each: each[1])
            self._judge("lag", most, self.limits.lag, f"{self.name} is {most:,} behind in {name}")

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
            self.alerters.notice(kind, self.name, f"{text}; the limit is {limit:,}")
        elif value <= limit // 2 and kind in self._over:
            self._over.remove(kind)
            self.alerters.notice("recovered", self.name, text)


@contextmanager
def reported(
    pipeline: StreamingPipeline, alerters: Sequence[str] = (), run_log: str | None = None
) -> Iterator[list[RunListener]]:
    """Yield the listener that reports on a pipeline, for the alerters and the run log of the project unless others are
    named; none if there are no alerters."""
    settings = read_project_file(current().root)
    opened = open_alerters(alerters or settings.get("alerters", ()))
    if not opened and pipeline.expect_within is None:
        yield []
        return
    url = project_log_url(run_log)
    log: RunLog | None = open_run_log(url, or_memory=True)
    if log is not None and log.is_stand_in:
        # Rows that one in memory noted would be missed by all who share the log.
        log.close()
        log = None
    with (
        opened,
        StreamingAlerts(
            pipeline.name,
            log,
            opened,
            open_log=partial(open_run_log, url),
            limits=AlertLimits.of(settings, pipeline.name),
            expect_within=pipeline.expect_within,
        ) as listener,
    ):
        yield [listener]
