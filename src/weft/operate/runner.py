"""Runs pipelines: claims a run, keeps the claim, does the work, records the outcome, and sends alerts.

The commit of the data decides what was done (`weft.engine.run`): a run that is repeated under its key, because a
process was killed or lost its claim, changes nothing twice. The run log records which process does what and when.
"""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from weft import tracing
from weft.errors import LeaseLostError, WeftError, stop_behind
from weft.operate import freshness
from weft.operate.alerts import Alerters, is_worth_telling
from weft.operate.due import Planner, due_now
from weft.operate.heartbeat import heartbeat
from weft.operate.hints import hint_for
from weft.operate.logs import captured
from weft.operate.metrics import Metrics
from weft.operate.records import COUNTS, ClaimedRun, RefusedClaim, counts_text
from weft.operate.redaction import clean
from weft.operate.runlog import RunLog
from weft.pipelines import graph
from weft.pipelines.declare import Pipeline
from weft.pipelines.execution import Execution, ExecutionFactory
from weft.project import Project, short_path, user_frames

_log = logging.getLogger("weft.runner")
# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.run")


class Terminated(KeyboardInterrupt):
    """Raised in the main thread on SIGTERM. It is an interrupt, because Spark's client hangs up where an interrupt ends
    a call; after any other exception its next call waits until Spark's job is done."""


class _TakenOverError(LeaseLostError):
    """Another process works on this run."""


class CancelledError(WeftError):
    """Somebody cancelled the run."""


@dataclass
class Outcome:
    """How the run of one pipeline ended."""

    pipeline: str
    status: str
    """`succeeded`, `failed`, `interrupted`, `cancelled`, `skipped` (its upstream is not ready) or `refused`."""
    run_id: str | None = None
    attempt: int | None = None
    slot: datetime | None = None
    reason: str | None = None
    error: BaseException | None = None
    retry_at: datetime | None = None
    seconds: float | None = None
    targets: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        return self.status in ("failed", "interrupted")


class Runner(Planner):
    """Runs the pipelines of a project under a run log, by an executor."""

    def __init__(
        self,
        log: RunLog,
        executor: ExecutionFactory,
        alerters: Alerters | None = None,
        *,
        metrics: Metrics | None = None,
        project: Project | None = None,
    ) -> None:
        super().__init__(log, project)
        self.executor, self.alerters, self.metrics = executor, alerters or Alerters(), metrics or Metrics()
        self.stopped: Outcome | None = None
        """The run that an interrupt or SIGTERM ended; the exception itself goes on to the caller."""
        self.has_signals = False
        """Whether SIGTERM raises `Terminated` in the main thread: so a run there that is cancelled ends at once."""

    # ------------------------------------------------------------------------------------------------------ one of them

    def run(
        self, pipeline: Pipeline, *, slot: datetime | None = None, resume: bool = True, by_hand: bool | None = None
    ) -> Outcome:
        """Run a pipeline now, for a slot of its schedule or by hand. One by hand goes on with the last run if that did
        not succeed; not with `resume=False`."""
        claimed = self.log.claim(
            pipeline.name,
            slot=slot,
            attempts_allowed=pipeline.retry.max_attempts,
            resume=resume,
            by_hand=by_hand,
        )
        if isinstance(claimed, RefusedClaim):
            if claimed.gave_up:
                self.alerters.gave_up(pipeline.name, claimed.last)
            return Outcome(pipeline.name, "refused", slot=slot, reason=str(claimed))
        _steps.debug("claimed")
        return self._attempt(pipeline, claimed)

    def _attempt(self, pipeline: Pipeline, claimed: ClaimedRun) -> Outcome:
        def keep() -> None:
            """Renew the claim; raise where this process is not to go on with the run."""
            if not self.log.heartbeat(claimed):
                raise _TakenOverError(_taken_over(claimed), hint="The run log has its outcome.")
            if self.log.is_cancelled(claimed):
                raise _cancelled(claimed)

        def interrupt() -> None:
            """End a call of the main thread, such as a query of hours."""
            if is_main and self.has_signals:
                signal.pthread_kill(main.ident or 0, signal.SIGTERM)

        execution = self.executor(pipeline, claimed.key, self.now, keep=keep)
        outcome = Outcome(pipeline.name, "succeeded", run_id=claimed.run_id, attempt=claimed.attempt, slot=claimed.slot)
        known = {"pipeline": pipeline.name, "run_id": claimed.run_id, "attempt": claimed.attempt}
        started = self.now
        main = threading.main_thread()
        is_main = threading.current_thread() is main
        try:
            with (
                tracing.span(f"run {pipeline.name}", "consumer", _described_run(claimed)),
                heartbeat(self.log, claimed, interrupt),
                captured(self.project.root, claimed.run_id, claimed.attempt),
            ):
                _log.info("%s: attempt %d, run %s", pipeline.name, claimed.attempt, claimed.run_id, extra=known)
                try:
                    execution.execute()
                except BaseException as error:
                    _log.info("%s: %s", pipeline.name, described(error), extra=known)
                    raise
                for each in execution.loaded:
                    said = "; ".join([counts_text(vars(each.counts)), *each.counts.warnings])
                    _log.info("%s: %s: %s", pipeline.name, each.target, said, extra=known)
            _steps.debug("executed")
        except _TakenOverError as error:
            outcome.status, outcome.error = "interrupted", error
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            outcome.error = stop_behind(error)
            if self.log.is_cancelled(claimed) and (outcome.error is not None or isinstance(error, CancelledError)):
                outcome.status, outcome.error = "cancelled", _cancelled(claimed)
            elif outcome.error is not None:
                # Asked to stop: what was not committed is not there, and the next run does it.
                outcome.status, self.stopped = "interrupted", outcome
                self._record(pipeline, claimed, outcome, execution)
                raise outcome.error from None
            else:
                # A pipeline's function that ends the process by sys.exit() has not loaded anything.
                outcome.status, outcome.error = "failed", error
        outcome.seconds = (self.now - started).total_seconds()
        if self._record(pipeline, claimed, outcome, execution):
            _steps.debug("recorded")
            self._alert(pipeline, claimed, outcome)
        else:
            outcome.status, outcome.reason, outcome.retry_at = "interrupted", _taken_over(claimed), None
        return outcome

    def _record(self, pipeline: Pipeline, claimed: ClaimedRun, outcome: Outcome, execution: Execution) -> bool:
        """Record how the attempt ended; `False` where another process has the run by now."""
        outcome.targets = [
            {
                "target": each.target,
                "engine": each.engine,
                **{name: getattr(each.counts, name) for name in COUNTS if name != "late"},
                "late": each.late,
                "without_value": each.without_value,
                "seconds": round(each.seconds, 3),
                "replayed": each.counts.replayed,
                "warnings": list(each.counts.warnings),
            }
            for each in execution.loaded
        ]
        outcome.steps = [
            {"step": clean(each.text), "seconds": round(each.seconds, 3), "replayed": each.replayed}
            for each in execution.steps
        ]
        retry_in = None
        allowed = _allowed(pipeline, claimed)
        if outcome.status == "failed" and allowed is not None and claimed.attempt < allowed:
            retry_in = pipeline.retry.delay(claimed.attempt)
            outcome.retry_at = self.now + timedelta(seconds=retry_in)
        counts = {name: sum(each[name] for each in outcome.targets) for name in COUNTS}
        engines = {each["engine"] for each in outcome.targets}
        is_recorded = self.log.finish(
            claimed,
            outcome.status,
            counts=counts,
            engine=engines.pop() if len(engines) == 1 else ("mixed" if engines else None),
            error=None if outcome.error is None else described(outcome.error),
            retry_in=retry_in,
            metrics={"targets": outcome.targets, "steps": outcome.steps},
        )
        if is_recorded:
            name, number, failures = pipeline.name, claimed.attempt, claimed.failures
            self.metrics.ended(name, outcome.status, number, failures, outcome.seconds, counts)
        return is_recorded

    def _alert(self, pipeline: Pipeline, claimed: ClaimedRun, outcome: Outcome) -> None:
        if outcome.status == "succeeded":
            self.alerters.recovered(pipeline.name, claimed)
            return
        if outcome.status == "cancelled":
            return
        error = described(outcome.error) if outcome.error is not None else ""
        allowed = _allowed(pipeline, claimed)
        is_last = allowed is not None and claimed.attempt >= allowed > 1
        if not is_worth_telling(claimed.failures + 1) and not (is_last and self._is_first_to_give_up(claimed)):
            return
        if is_last:
            self.alerters.gave_up(pipeline.name, claimed, error)
        else:
            self.alerters.failed(pipeline.name, claimed, error, outcome.retry_at)

    def _is_first_to_give_up(self, claimed: ClaimedRun) -> bool:
        """Return whether no slot before gave up since the last success."""
        if claimed.failures < claimed.attempt:
            return True
        try:
            before = self.log.runs(claimed.pipeline)
        except WeftError:
            return True  # an alert may come twice rather than never
        for each in before:
            if each.status == "succeeded":
                return True
            if each.run_id != claimed.run_id and each.status == "failed" and each.slot and each.retry_at is None:
                return False
        return True

    # ------------------------------------------------------------------------------------------------------ all of them

    def run_due(self, names: Sequence[str] = ()) -> Iterator[Outcome]:
        """Run the pipelines that are due, each after those that it depends on."""
        graph.refuse_unknown_dependencies(self.project.pipelines)
        chosen = self.chosen(names)
        states = self.log.latest(list(self.project.pipelines))
        self.log.shorten(states.values())
        for pipeline in chosen:
            # The time now, not at the beginning: earlier pipelines may have run for hours.
            due = due_now(pipeline, states, self.now)
            if due.waits_for:
                assert due.slot is not None
                # Many pipelines may wait, and run-due asks every minute: each skip is recorded once.
                known = due.state.skipped
                if known is None or (known.slot, known.reason) != (due.slot, due.why):
                    self.log.skip(pipeline.name, due.slot, due.why, due.state)
                yield Outcome(pipeline.name, "skipped", slot=due.slot, reason=due.why)
            while due.is_due:
                yield self.run(pipeline, slot=due.slot)
                # For its downstream pipelines. A log that does not answer was warned about already.
                with suppress(WeftError):
                    states.update(self.log.latest([pipeline.name]))
                before, due = due.slot, due_now(pipeline, states, self.now)
                if not pipeline.catchup or due.slot == before:
                    break
        if not names:
            self.check_freshness()

    def check_freshness(self) -> None:
        """Report which pipelines had no success in time, and which have one again."""
        expected = freshness.expected(self.project)
        if not expected or not self.alerters:
            return
        try:
            freshness.check(self.log, expected, self.log.latest(expected), self.alerters)
        except WeftError as error:
            _log.warning("What is stale could not be found out: %s", error.what)


def _allowed(pipeline: Pipeline, claimed: ClaimedRun) -> int | None:
    """Return the number of the last attempt that a slot has, also where one is manual; `None` for a manual run."""
    if claimed.slot is None or claimed.attempts_allowed is not None:
        return claimed.attempts_allowed
    return pipeline.retry.max_attempts


def _described_run(claimed: ClaimedRun) -> dict[str, str | int | float | bool]:
    """Return what the span of an attempt says."""
    slot = {} if claimed.slot is None else {"weft.slot": claimed.slot.isoformat()}
    return {"weft.pipeline": claimed.pipeline, "weft.run_id": claimed.run_id, "weft.attempt": claimed.attempt, **slot}


def _cancelled(claimed: ClaimedRun) -> CancelledError:
    return CancelledError(f"The run {claimed.run_id} of {claimed.pipeline} was cancelled.")


def _taken_over(claimed: ClaimedRun) -> str:
    return (
        f"Another process took over {claimed.pipeline} from this one, which was silent for longer than its lease of "
        f"{claimed.lease_seconds:g} s."
    )


def described(error: BaseException) -> str:
    """Return an error for people and the log, without secrets: a `WeftError` as it is, others with their place in the
    user's code."""
    if isinstance(error, WeftError):
        hint = hint_for(error.what)
        return clean(str(error) if hint is None else f"{error.what}\n  {hint}")
    if isinstance(error, KeyboardInterrupt):
        return f"Stopped by {'SIGTERM' if isinstance(error, Terminated) else 'an interrupt'}."
    place = user_frames(error) or traceback.extract_tb(error.__traceback__)
    where = f" ({short_path(place[-1].filename)}, line {place[-1].lineno})" if place else ""
    return clean(f"{type(error).__name__}: {error}{where}")
