"""Alerts about failures and recoveries. An alerter that fails or hangs neither fails the work nor delays it: alerts
wait in a bounded queue, and a thread delivers them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Self
from urllib.error import HTTPError, URLError

from weft.operate.records import Attempt, ClaimedRun
from weft.operate.redaction import clean

logger = logging.getLogger("weft.operate")

WAIT_SECONDS = 5.0
"""How long an alerter has for one alert, and the end of a process waits for all of its alerters together."""
_MOST_WAITING = 1000
"""Alerts that wait for one alerter. Later ones are dropped."""
_ERROR_CHARACTERS = 1500

EXAMPLES = "For example stdout://, slack://hooks.slack.com/services/… or https://example.com/hook."

AlertKind = Literal[
    "failed", "gave_up", "recovered", "stale", "lag", "dead_letters", "dispatch_failed", "leader_changed"
]


@dataclass(frozen=True)
class Alert:
    """What is sent. `failed`: an attempt failed. `gave_up`: the last one did. `recovered`: one succeeded after some
    that did not, or what another alert was about is over. docs/running.md has the others."""

    event: AlertKind
    pipeline: str
    run_id: str | None
    slot: datetime | None
    attempt: int | None
    max_attempts: int | None
    failures: int | None
    """How many attempts in a row did not succeed."""
    error: str | None
    next_retry: datetime | None
    at: datetime
    message: str | None = None
    """What it says, where that is not about an attempt."""

    def __str__(self) -> str:
        if self.message is not None:
            return f"{self.message}: {self.error}" if self.error else self.message
        attempts = f"attempt {self.attempt}" + (f" of {self.max_attempts}" if self.max_attempts else "")
        if self.event == "recovered":
            return f"{self.pipeline} succeeded after {self.failures} failed attempt{'s' if self.failures != 1 else ''}"
        what = "failed" if self.event == "failed" else "failed for good"
        after = f"; next attempt at {shown_time(self.next_retry)}" if self.next_retry else ""
        again = f"; {self.failures} failures in a row" if (self.failures or 0) > (self.attempt or 0) else ""
        about = f" ({attempts}{again}{after})" if self.attempt else ""
        return f"{self.pipeline} {what}{about}" + (f": {self.error}" if self.error else "")

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the alert, with times in ISO form, and its text."""
        fields = {
            name: value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value
            for name, value in asdict(self).items()
        }
        del fields["message"]
        return {**fields, "text": str(self)}


class Alerter(ABC):
    """Delivers alerts. `deliver` may fail; `Alerters` keeps that from the work."""

    shown: str
    """Where they go, without secrets."""
    is_local = False
    """Whether it asks nobody, so that it is called at once."""

    @abstractmethod
    def deliver(self, event: Alert) -> None:
        """Deliver an alert."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


class _Outbox:
    """The alerts that wait for one alerter. A thread delivers them, one after the other."""

    def __init__(self, alerter: Alerter) -> None:
        self.alerter = alerter
        self._waiting: queue.Queue[Alert] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, event: Alert) -> None:
        """Have an alert delivered; return at once."""
        if self.alerter.is_local:
            _deliver(self.alerter, event)
            return
        with self._starting:
            if self._thread is None:
                name = f"weft alerts to {self.alerter.shown}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            logger.warning("The alerter %s is too slow: an alert was dropped.", self.alerter.shown)

    def _run(self) -> None:
        while True:
            event = self._waiting.get()
            # A thread of its own, because a name server or a slow answer can take longer than any timeout of a socket.
            name = f"weft alert to {self.alerter.shown}"
            delivery = threading.Thread(target=_deliver, args=(self.alerter, event), name=name, daemon=True)
            delivery.start()
            delivery.join(WAIT_SECONDS)
            if delivery.is_alive():
                logger.warning("The alerter %s did not answer within %g s.", self.alerter.shown, WAIT_SECONDS)
            self._waiting.task_done()
            # The next one would only hang too, and threads would pile up.
            delivery.join()

    def wait(self, deadline: float) -> bool:
        """Wait until all were delivered or had their time; return whether that is so."""
        with self._waiting.all_tasks_done:
            while self._waiting.unfinished_tasks:
                left = deadline - time.monotonic()
                if left <= 0 or not self._waiting.all_tasks_done.wait(left):
                    return False
        return True


class Alerters:
    """All alerters of a process. Its methods never raise, and do not wait for an answer; `flush` does, and the end of
    the block."""

    def __init__(self, alerters: Iterable[Alerter] = ()) -> None:
        self._outboxes = [_Outbox(each) for each in alerters]

    def __bool__(self) -> bool:
        return bool(self._outboxes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all alerts were delivered, for some seconds at most."""
        deadline = time.monotonic() + (WAIT_SECONDS if seconds is None else seconds)
        for each in self._outboxes:
            if not each.wait(deadline):
                logger.warning("Some alerts have not reached %s.", each.alerter.shown)

    def failed(self, pipeline: str, run: ClaimedRun, error: str, next_retry: datetime | None = None) -> None:
        self._alert("failed", pipeline, run, error=error, next_retry=next_retry)

    def gave_up(self, pipeline: str, last: ClaimedRun | Attempt | None, error: str | None = None) -> None:
        """The last attempt failed, or its process died."""
        self._alert("gave_up", pipeline, last, error=error)

    def recovered(self, pipeline: str, run: ClaimedRun) -> None:
        """An attempt succeeded. There is no alert where the one before it did so too."""
        if run.failures >= 1:
            self._alert("recovered", pipeline, run)

    def notice(
        self, event: AlertKind, pipeline: str, message: str, *, error: str | None = None, failures: int | None = None
    ) -> None:
        """Report what is not about an attempt at a run."""
        self._alert(event, pipeline, None, error=error, message=message, failures=failures)

    def _alert(
        self,
        event: AlertKind,
        pipeline: str,
        about: ClaimedRun | Attempt | None,
        *,
        error: str | None = None,
        next_retry: datetime | None = None,
        message: str | None = None,
        failures: int | None = None,
    ) -> None:
        if not self._outboxes:
            return
        try:
            run = about if isinstance(about, ClaimedRun) else None
            error = about.error if error is None and isinstance(about, Attempt) else error
            if run is not None:
                failures = run.failures + (event != "recovered")
            alert = Alert(
                event,
                pipeline,
                run_id=about.run_id if about else None,
                slot=about.slot if about else None,
                attempt=about.attempt if about else None,
                max_attempts=run.attempts_allowed if run else None,
                failures=failures,
                error=clean(error, most=_ERROR_CHARACTERS) if error else None,
                next_retry=next_retry,
                at=datetime.now(UTC),
                message=message,
            )
            for each in self._outboxes:
                each.put(alert)
        except Exception as problem:
            logger.warning("No alert was sent that %s %s: %s", pipeline, event, type(problem).__name__)


def is_worth_telling(repeats: int) -> bool:
    """Return whether to report the same again: the first, second, fourth, eighth … time in a row."""
    return repeats > 0 and repeats & (repeats - 1) == 0


def _deliver(alerter: Alerter, event: Alert) -> None:
    try:
        alerter.deliver(event)
    except Exception as error:
        logger.warning("The alerter %s failed: %s", alerter.shown, _reason(error))


def _reason(error: Exception) -> str:
    """Return what went wrong, without texts that may hold the URL."""
    if isinstance(error, HTTPError):
        error.close()
        return f"it answered {error.code}"
    reason = error.reason if isinstance(error, URLError) else error
    return str(reason.strerror or reason) if isinstance(reason, OSError) else type(error).__name__


def shown_time(moment: datetime) -> str:
    """Return a time as alerts have it."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
