"""Builds models when their inputs change.

The worker compares offsets: what each model has read, stored with its rows, and what its inputs have now. So nothing is
missed when a process dies; a publish only makes it look sooner. Several workers share the models: the claim of a
run in the run log lets one of them build a model at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from weft.errors import ConnectionFailedError, WeftError
from weft.operate.logs import BUILDS
from weft.operate.redaction import clean
from weft.operate.runlog import RunLog
from weft.operate.runner import Outcome, described
from weft.pipelines import graph
from weft.pipelines.models import LEAST_SECONDS, Model

_log = logging.getLogger("weft.worker")

THREADS = 4
"""Models that are built at once: one that takes hours holds up three others at most."""
_LOOK_SECONDS = 1.0
"""A table does not report that a pipeline has loaded it: the worker polls tables this often."""
_RUNS_KEPT = 1000
"""A model that is built each second would fill the run log."""
_AGAIN_SECONDS = 0.5
"""After a claim that was refused, or a look that failed."""


class ModelFreshness(Protocol):
    """Whether a model is fresh against its inputs: `weft.engine.models.freshness.Freshness`."""

    @property
    def model(self) -> Model: ...
    @property
    def why(self) -> str | None: ...
    @property
    def marks(self) -> object: ...
    @property
    def problem(self) -> WeftError | None: ...


@dataclass
class _Pending:
    """A stale model that waits for its build."""

    marks: object
    since: float
    """When it was first seen stale."""
    changed: float
    """When its inputs were last seen to change."""


class Builds(Protocol):
    """Builds a model: a `Runner`, or what has another process do it."""

    log: RunLog

    def run(self, model: Model, *, by_hand: bool | None = None) -> Outcome:
        """Build a model, and return how that ended."""


class ModelWorker:
    """Builds the stale models of a project, until it is stopped."""

    def __init__(
        self,
        runner: Builds,
        models: Sequence[Model],
        look: Callable[[Iterable[Model]], Sequence[ModelFreshness]],
        *,
        threads: int = THREADS,
        built: Callable[[Outcome], None] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.look, self.built, self.clock = runner, look, built, clock
        self.models = [each for each in graph.in_order({each.name: each for each in models}) if isinstance(each, Model)]
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=BUILDS)
        self._slots = threads
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._running: dict[str, Future[None]] = {}
        self._pending: dict[str, _Pending] = {}
        self._began: dict[str, float] = {}
        self._builds: Counter[str] = Counter()
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._given_up: dict[str, tuple[object, str]] = {}
        self._failed: set[str] = set()
        self._stale: set[str] = set()
        self._to_come: set[str] = set()
        self._away: dict[str, str] = {}
        self._blind: str | None = None

    def wake(self) -> None:
        """Look at once: something may have been published."""
        self._wake.set()

    def stop(self) -> None:
        """Begin no build, and end when the running builds are done. Does not wait for them."""
        self._stopping.set()
        self._wake.set()

    def run(self) -> None:
        """Build what is stale until `stop` is called."""
        while not self._stopping.is_set():
            self._wake.clear()
            pause = self.start_due()
            self.runner.log.deliver_meanwhile()
            self._wake.wait(pause)
        self._threads.shutdown(wait=True)

    def run_once(self) -> list[str]:
        """Build until every model is fresh, or fails, or cannot be built now. Return those that failed or are stale."""
        while not self._stopping.is_set():
            self._wake.clear()
            pause = self.start_due()
            if not self._running and not self._to_come:
                break
            self._wake.wait(pause)
        self._threads.shutdown(wait=True)
        return [each.name for each in self.models if each.name in self._failed or each.name in self._stale]

    def join(self) -> None:
        """Wait until the running builds are done."""
        wait(self._running.values())

    # ---------------------------------------------------------------------------------------------------------- rounds

    def start_due(self) -> float:
        """Begin the builds that are due; return the seconds until the next look."""
        now = self.clock()
        # Before the look: a build that ends while this looks may have committed after its model was looked at.
        self._running = {name: each for name, each in self._running.items() if not each.done()}
        try:
            standings = {each.model.name: each for each in self.look(self.models)}
        except WeftError as error:
            if error.what != self._blind:
                _log.warning("the models cannot be looked at, and are in a moment: %s", error.what)
            self._blind = error.what
            self._stale, self._to_come = {each.name for each in self.models if each.trigger == "auto"}, set()
            return _AGAIN_SECONDS
        if self._blind is not None:
            _log.warning("the models can be looked at again")
            self._blind = None
        standing_now = [standings[each.name] for each in self.models if each.trigger == "auto"]
        self._stale, self._to_come = {each.model.name for each in standing_now if each.why is not None}, set()
        self._warn_of_unreachable(standing_now)
        held: set[str] = set()
        pause = _LOOK_SECONDS
        for model in self.models:
            name, standing = model.name, standings[model.name]
            is_held = any(each in held for each in model.depends_on)
            if standing.why is None and not is_held:
                self._pending.pop(name, None)
                self._given_up.pop(name, None)
            if model.trigger != "auto":
                continue
            if is_held or name in self._running or standing.why is not None:
                # Models that depend on this one wait for its new rows.
                held.add(name)
            if is_held or name in self._running or standing.why is None:
                continue
            if isinstance(standing.problem, ConnectionFailedError):
                # Not a failure of the model: it is built as soon as the database answers.
                pause = _AGAIN_SECONDS
                continue
            due = self._due(model, standing, now)
            if due is None:
                continue
            if name not in self._not_before:
                self._to_come.add(name)
            if due <= now and len(self._running) < self._slots:
                self._start(model, standing, now)
            elif due > now:
                pause = min(pause, max(due - now, 0.01))
        return pause

    def _warn_of_unreachable(self, standings: Iterable[ModelFreshness]) -> None:
        """Warn of a database that does not answer, once while that lasts, and when it answers again."""
        away = {
            each.model.name: each.problem.what for each in standings if isinstance(each.problem, ConnectionFailedError)
        }
        for what in dict.fromkeys(away.values()):
            if what not in self._away.values():
                waiting = ", ".join(name for name, each in away.items() if each == what)
                _log.warning("%s Until it answers, these models wait: %s", clean(what), waiting)
        # The text may change while it is away: it answers when its models can be looked at.
        answers = {what: name for name, what in self._away.items() if name not in away}
        for what, name in answers.items():
            if what not in away.values():
                _log.warning("the database of %s answers again", name)
        self._away = away

    def _due(self, model: Model, standing: ModelFreshness, now: float) -> float | None:
        """Return when to build a stale model; `None` where it has no attempt left until something changes."""
        name = model.name
        pending = self._pending.setdefault(name, _Pending(standing.marks, now, now))
        if pending.marks != standing.marks:
            pending.marks, pending.changed = standing.marks, now
        if name in self._given_up:
            if self._given_up[name] == (standing.marks, model.fingerprint):
                return None
            del self._given_up[name]
            self._failures.pop(name, None)
        not_before = self._not_before.get(name, 0.0)
        if model.debounce is None:
            return max(not_before, self._began.get(name, now - LEAST_SECONDS) + LEAST_SECONDS)
        most = model.max_staleness if model.max_staleness is not None else 10 * model.debounce
        return max(not_before, min(pending.changed + model.debounce, pending.since + most))

    def _start(self, model: Model, standing: ModelFreshness, now: float) -> None:
        self._began[model.name] = now
        self._pending.pop(model.name, None)
        build = self._running[model.name] = self._threads.submit(self._build, model, standing)
        # Then it is done: woken before, the worker would count it among those that run.
        build.add_done_callback(lambda _: self._wake.set())

    def _build(self, model: Model, standing: ModelFreshness) -> None:
        name = model.name
        try:
            outcome = self.runner.run(model, by_hand=False)
        except BaseException as error:  # the run log is away, or the process is being stopped
            _log.warning(
                "%s could not be built, and is tried again: %s", name, described(error), extra={"pipeline": name}
            )
            self._failed.add(name)
            self._not_before[name] = self.clock() + _AGAIN_SECONDS
            return
        if outcome.status == "succeeded":
            self._stale.discard(name)  # where this worker is stopped, no look follows
            self._failures.pop(name, None)
            self._not_before.pop(name, None)
            self._builds[name] += 1
            if self._builds[name] % _RUNS_KEPT == 0:
                self.runner.log.forget(name, _RUNS_KEPT)
        elif outcome.status == "refused":
            # Another worker builds it: what it reads may be older than what this one saw.
            self._not_before[name] = self.clock() + _AGAIN_SECONDS
        else:
            self._failed.add(name)
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            self._not_before[name] = self.clock() + model.retry.delay(failures)
            if failures >= model.retry.max_attempts:
                self._given_up[name] = (standing.marks, model.fingerprint)
        self.built(outcome)
