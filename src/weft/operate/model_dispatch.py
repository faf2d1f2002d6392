"""Builds of models that a scheduler dispatches: of those that follow their inputs (`trigger="auto"`), which changed.

`ModelWorker` decides what is stale and when it is due. Where a worker builds itself, this has an executor start
`weft run-due MODEL`, which looks again and claims the build in the run log: schedulers and workers beside each other
build each change once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from weft.operate.executors import Started
from weft.operate.model_worker import ModelFreshness, ModelWorker
from weft.operate.runlog import RunLog
from weft.operate.runner import Outcome, described
from weft.operate.scheduler import Scheduler
from weft.pipelines.models import Model

_log = logging.getLogger("weft.scheduler")
_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.5, 5.0
"""How often it looks whether a build that it started has ended: at first, and after a while."""
_STOP_SECONDS = 5.0
"""How long the end of a scheduler waits for a look at models: a database may hang."""


class ModelDispatch:
    """Has a scheduler start the builds of models while it leads, from a thread: a database that hangs holds up models
    alone."""

    def __init__(
        self, scheduler: Scheduler, models: Sequence[Model], look: Callable[[Iterable[Model]], Sequence[ModelFreshness]]
    ) -> None:
        self._scheduler, self._ended = scheduler, threading.Event()
        started = _Dispatches(scheduler, self._ended)
        self._models = ModelWorker(started, models, look, threads=scheduler.most_running)
        self._thread = threading.Thread(target=self._run, name="weft models", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._models.stop()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            pause = self._scheduler.poll_seconds
            if self._scheduler.lease is None:
                continue
            try:
                pause = max(self._models.start_due(), min(1.0, pause))
                pause = min(pause, self._scheduler.poll_seconds)
            except Exception as error:
                _log.error("the models could not be looked at: %s", described(error))


class _Dispatches:
    """What the worker takes for a runner: it starts a build elsewhere, and returns when that has ended."""

    def __init__(self, scheduler: Scheduler, ended: threading.Event) -> None:
        self.log: RunLog = scheduler.log
        self._scheduler, self._ended = scheduler, ended

    def run(self, model: Model, *, by_hand: bool | None = None) -> Outcome:
        name = model.name
        refused = Outcome(name, "refused")
        before = self.log.latest([name])[name]
        if before.is_live or before.paused_at is not None:
            return refused
        started = self._scheduler.start_build(model)
        if started is None:
            return refused
        known = None if before.last is None else (before.last.run_id, before.last.attempt)
        outcome = None
        try:
            outcome = self._outcome(name, started, known)
            return outcome or refused
        finally:
            self._scheduler.build_ended(name, claimed=outcome is not None)

    def _outcome(self, name: str, started: Started, known: tuple[str, int] | None) -> Outcome | None:
        """Wait for the end of a build; `None` where it recorded none of its own, or this process stops."""
        tells_end, pause = getattr(started, "tells_end", False), _LOOK_SECONDS
        while not self._ended.wait(pause):
            pause = min(pause * 2, _MOST_LOOK_SECONDS)
            try:
                code, last = started.ended(), self.log.latest([name])[name].last
            except Exception as error:  # the log or the cluster is away for now
                _log.warning("it is not known whether %s has ended: %s", name, described(error))
                continue
            is_new = last is not None and (last.run_id, last.attempt) != known
            # One that was killed or evicted is no failure of the model, and uses up no attempt of it.
            if last is not None and is_new and last.status not in ("running", "interrupted"):
                return Outcome(name, last.status, run_id=last.run_id, attempt=last.attempt, seconds=last.seconds)
            is_interrupted = last is not None and is_new and last.status == "interrupted"
            if code is not None or is_interrupted or (not tells_end and self._scheduler.is_silent(name)):
                # With 0 it found another one at work, or nothing to do.
                if code != 0:
                    ended = "was interrupted" if code is None else f"ended with code {code}"
                    _log.error("%s %s and recorded no result", name, ended, extra={"pipeline": name})
                return None
        return None
