"""The scheduler: decides what is due and has an executor start it. It runs no pipeline itself.

Several schedulers may run. Each tries to hold the lease of the leader, a claim in the run log; the holder dispatches.
Every dispatch is preceded by a renewal of the lease in the run log: a leader that slept past its lease, and was
replaced, finds its fence gone and dispatches nothing. What is started claims its slot in the run log too, so that
schedulers, cron and people together run each slot once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Any

from weft import tracing
from weft.errors import ConnectionFailedError, SettingsError, WeftError, listed
from weft.operate import freshness
from weft.operate.alerts import Alerters, is_worth_telling
from weft.operate.due import Due, Planner, due_now
from weft.operate.executors import Dispatch, Executor, Started
from weft.operate.metrics import (
    ATTEMPT,
    DISPATCH_FAILURES,
    DISPATCHES,
    FAILURES,
    LEADS,
    RUNNING,
    SUCCEEDED_AT,
    Metrics,
)
from weft.operate.records import COUNTS, ENDS, Attempt, ClaimedRun, PipelineState, RefusedClaim
from weft.operate.runlog import RunLog
from weft.operate.runner import described
from weft.pipelines import graph
from weft.pipelines.declare import Pipeline
from weft.project import Project
from weft.settings import PROJECT_FILE
from weft.systems import process

_log = logging.getLogger("weft.scheduler")

LEADER = "_scheduler_singleton"
"""The name under which the run log keeps the lease of the leader."""
_MOST_PAUSE_SECONDS = 60.0
# A run that cannot be asked about, as one of Lambda, and has claimed nothing after so long is started again.
_SILENT_SECONDS = 1200.0
_COUNTED_AT_ONCE = 100
_STOP_SECONDS = 5.0


def leader_status(log: RunLog) -> dict[str, Any]:
    """Return which scheduler leads, or led last."""
    state = log.latest([LEADER])[LEADER]
    last = state.last
    return {
        "leads": state.is_live,
        "host": None if last is None else last.host,
        "pid": None if last is None else last.pid,
        "since": None if last is None else last.started_at,
    }


@dataclass
class _Dispatched:
    """A run that this scheduler started."""

    slot: object
    started: Started | None
    """`None` where it could not be started."""
    failures: int = 0
    not_before: float = 0.0
    code: int | None = None
    """How it had ended when this tick began; `None` while it runs, or where it is not known."""
    before: tuple[str, int] | None = None
    """The last attempt for a slot that the run log had when it was started."""
    began: float = 0.0


class Scheduler(Planner):
    """Dispatches what is due while it is the leader."""

    def __init__(
        self,
        log: RunLog,
        executor: Executor,
        *,
        modules: Sequence[str] = (),
        run_log: str | None = None,
        run_alerters: Sequence[str] = (),
        traces: str | None = None,
        poll_seconds: float = 10.0,
        lease_seconds: float = 300.0,
        most_running: int = 16,
        pools: Mapping[str, int] | None = None,
        metrics: Metrics | None = None,
        alerters: Alerters | None = None,
        project: Project | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(log, project)
        self.executor, self.clock, self.metrics = executor, clock, metrics or Metrics()
        self.alerters = alerters or Alerters()
        self.pools = pools or {}
        for each in self.project.pipelines.values():
            if each.pool is not None and each.pool not in self.pools:
                hint = listed(each.pool, self.pools, f"Add it to [pools] in {PROJECT_FILE}: {each.pool} = 2")
                raise SettingsError(f"{each.name} is in the pool {each.pool!r}, which has no size.", hint=hint)
        self.modules, self.run_log, self.traces = tuple(modules), run_log, traces
        if poll_seconds >= lease_seconds:
            raise SettingsError(
                f"A leader renews its lease of {lease_seconds:g} s each {poll_seconds:g} s, which is too late.",
                hint="--poll-interval must be shorter than --lease-seconds.",
            )
        self.run_alerters = tuple(run_alerters)
        """The alerters that runs report to; the scheduler itself reports to `alerters`."""
        self.poll_seconds, self.lease_seconds, self.most_running = poll_seconds, lease_seconds, most_running
        self.lease: ClaimedRun | None = None
        """The lease of the leader; `None` where another scheduler leads."""
        self._may_lead = False
        """Whether the answer to its last claim was lost: it may hold the lease, and not know it."""
        self._warned_of: str | None = None
        """The lease of a leader with other pipelines that was warned of."""
        self._stopping = threading.Event()
        self._running: dict[str, _Dispatched] = {}
        """What was started last of each pipeline, until it has ended and the run log says so."""
        self._building: dict[str, float] = {}
        """When each build of a model was started that has not ended."""
        self._unclaimed: Counter[str] = Counter()
        """How many builds of each model in a row ended without a result."""
        self._starting = threading.Lock()
        """Held while it is decided whether one more may run: builds of models are started by threads."""
        self._leader: str | None = None
        self._counted: dict[str, tuple[str, int, bool] | None] = {}
        """The last attempt of each pipeline at the last look, and whether it had ended."""
        self._not_started: Counter[str] = Counter()
        """How often in a row each pipeline could not be started."""

    def run(self) -> None:
        """Dispatch until `stop` is called, then hand the lease over. Runs that were started go on."""
        try:
            while not self._stopping.is_set():
                try:
                    self.tick()
                except WeftError as error:
                    _log.warning("this tick failed, and the next one comes: %s", error.what)
                except Exception as error:
                    _log.error("this tick failed, and the next one comes: %s", described(error))
                self._stopping.wait(self.poll_seconds)
        finally:
            self.hand_over()

    def stop(self) -> None:
        """End after the current dispatch. Does not wait."""
        self._stopping.set()

    # ----------------------------------------------------------------------------------------------------------- leader

    def tick(self) -> list[str]:
        """Dispatch what is due now, if this is the leader; return the names of it."""
        leads = False
        try:
            leads = self._is_leader()
            self.log.deliver_meanwhile()
        finally:  # while the log is away, nobody knows
            self.metrics.set(LEADS, leads)
        if leads:
            return self._dispatch_due()
        # Of the leader alone: nobody would correct them here, and alerts go by them.
        self.metrics.forget(ATTEMPT, FAILURES, SUCCEEDED_AT, RUNNING)
        return []

    def _is_leader(self) -> bool:
        lease = self.lease  # a thread that starts builds may find that it is lost
        if lease is not None:
            if self.log.renew(lease):
                return True
            _log.warning("this scheduler was silent for longer than its lease, and another one leads")
            self.lease = None
        again, self._may_lead = self._may_lead, True
        claimed = self.log.claim(LEADER, lease_seconds=self.lease_seconds, resume=False, again=again)
        self._may_lead = False
        if isinstance(claimed, RefusedClaim):
            last = claimed.last
            leader = f"process {last.pid} on {last.host}" if last is not None else "another one"
            if leader != self._leader:
                _log.info("the leader is %s", leader)
            self._leader = leader
            if last is not None:
                self._warn_of_others(leader, last)
            return False
        self.lease, self._leader = claimed, None
        self._counted.clear()  # another one has counted meanwhile
        _log.info("this scheduler leads")
        if self.alerters:
            self._tell_new_leader(claimed)
        self.log.describe(claimed, self._declared())
        return True

    def _declared(self) -> str:
        """Return a text that is the same for schedulers with the same pipelines."""
        names = sorted(self.project.pipelines)
        digest = blake2b("\0".join(names).encode(), digest_size=4).hexdigest()
        return f"{len(names)} pipeline{'' if len(names) == 1 else 's'} ({digest})"

    def _warn_of_others(self, leader: str, lease: Attempt) -> None:
        """Warn where the leader has declared other pipelines, because nobody starts those that only this one has."""
        if lease.reason in (None, self._declared()) or lease.run_id == self._warned_of:
            return
        self._warned_of = lease.run_id
        _log.warning(
            "the leader, %s, has declared %s, and this scheduler %s: only those of the leader are started. Give all "
            "schedulers of a run log the same modules, or each its own run log",
            *(leader, lease.reason, self._declared()),
        )

    def _tell_new_leader(self, claimed: ClaimedRun) -> None:
        host, pid = process.host_of(claimed.owner)
        before = next((each for each in self.log.runs(LEADER, limit=2) if each.run_id != claimed.run_id), None)
        # One that was stopped, and started again on its host, is no news.
        if before is None or (before.status == "succeeded" and before.host == host):
            return
        ended = "was stopped" if before.status == "succeeded" else "ended or was silent for longer than its lease"
        text = f"the scheduler is led by process {pid} on {host}: process {before.pid} on {before.host} {ended}"
        self.alerters.notice("leader_changed", LEADER, text)

    def hand_over(self) -> None:
        """Release the lease, so that another scheduler takes over at its next tick."""
        if (lease := self.lease) is None:
            return
        # A thread may be about to start a build, which is not to come after. One that hangs is not waited for.
        is_quiet = self._starting.acquire(timeout=_STOP_SECONDS)
        self.lease = None
        if is_quiet:
            self._starting.release()
        self.log.finish(lease, "succeeded")
        self.log.forget(LEADER, 100)

    # --------------------------------------------------------------------------------------------------------- dispatch

    def _dispatch_due(self) -> list[str]:
        graph.refuse_unknown_dependencies(self.project.pipelines)
        expected = freshness.expected(self.project) if self.alerters else {}
        states = self.log.latest(dict.fromkeys((*self.project.pipelines, *expected)))
        self.log.shorten(states.values())
        self._count(states)
        dues = [each for each in (self._due(pipeline, states) for pipeline in self.chosen(())) if each is not None]
        # Before anything is started: what has ended makes room for pipelines that come earlier in the order.
        for due in dues:
            self._forget_ended(due)
        dispatched = []
        for due in dues:
            name = due.pipeline.name
            try:
                if due.waits_for and not self._skip(due):
                    break
                if not due.is_due:
                    continue
                with self._starting:
                    if not self._may_start(due.pipeline, due.slot, states):
                        continue
                    if not self._still_leads():
                        break
                    if self._start(due):
                        dispatched.append(name)
            except ConnectionFailedError:
                raise  # the log is away, for all of them
            except Exception as error:
                _log.error("%s is left out of this tick: %s", name, described(error), extra={"pipeline": name})
        self.metrics.set(RUNNING, len(self._at_work()))
        if self.lease is not None:
            freshness.check(self.log, expected, states, self.alerters)
        return dispatched

    def _still_leads(self) -> bool:
        """Renew the lease. Right before each start: a process that was stopped for long in between starts nothing."""
        lease = self.lease
        if lease is None or self._stopping.is_set():
            return False  # the lease is handed over
        if not self.log.renew(lease):
            # Another thread may have won a new lease meanwhile, which stays.
            if self.lease is lease:
                self.lease = None
            return False
        return True

    def _count(self, states: dict[str, PipelineState]) -> None:
        """Count the attempts that have ended since the last look, wherever they ran."""
        for name, state in states.items():
            last = state.last
            now = None if last is None else (last.run_id, last.attempt, last.status != "running")
            if name not in self._counted:
                self._counted[name] = now
                self._show(name, state)
            before = self._counted[name]
            if now is None or now == before or not now[2]:
                continue
            self._counted[name] = now
            for each in self.log.runs(name, limit=_COUNTED_AT_ONCE):
                is_before = before is not None and (each.run_id, each.attempt) == before[:2]
                if is_before and before is not None and before[2]:
                    break
                if each.status in ENDS:
                    counts = {count: getattr(each, count) or 0 for count in COUNTS}
                    self.metrics.ended(name, each.status, each.attempt, 0, each.seconds, counts)
                if is_before:
                    break  # it ran at the last look
            self._show(name, state)

    def _show(self, name: str, state: PipelineState) -> None:
        """Show how a pipeline stands, by the run log: who begins to lead has counted nothing yet."""
        if state.last is None:
            return
        self.metrics.set(FAILURES, state.failures, pipeline=name)
        self.metrics.set(ATTEMPT, state.last.attempt, pipeline=name)
        if state.succeeded_at is not None:
            self.metrics.set(SUCCEEDED_AT, state.succeeded_at.timestamp(), pipeline=name)

    def _due(self, pipeline: Pipeline, states: dict[str, PipelineState]) -> Due | None:
        try:
            return due_now(pipeline, states, self.now)
        except Exception as error:
            _log.error(
                "%s is left out of this tick: %s", pipeline.name, described(error), extra={"pipeline": pipeline.name}
            )
            return None

    def _skip(self, due: Due) -> bool:
        """Record a skip that is new; `False` where another one leads."""
        assert due.slot is not None
        known = due.state.skipped
        if known is None or (known.slot, known.reason) != (due.slot, due.why):
            if not self._still_leads():
                return False
            self.log.skip(due.pipeline.name, due.slot, due.why, due.state)
        return True

    def _forget_ended(self, due: Due) -> None:
        """Forget the run of a pipeline that has ended with a claim, or of which only the run log knows."""
        name = due.pipeline.name
        known = self._running.get(name)
        if known is None or known.started is None:
            return
        try:
            known.code = known.started.ended()
        except Exception as error:
            _log.error("the executor does not know whether %s has ended: %s", name, described(error))
            known.code = None
        if known.code is not None:
            is_same = known.slot == due.slot and _last_attempt(due.state) == known.before
            if not is_same or (known.code == 0 and not due.is_due):
                del self._running[name]  # when it is tried again is in the run log
            return  # one that was refused, as by a clock that is behind, is not started again at once
        # One that claimed its slot may take seconds to end after its attempt, for an alerter that does not answer.
        # With catchup it goes on with the next slot.
        has_claimed = _last_attempt(due.state) != known.before and not due.pipeline.catchup
        if due.state.is_live or (getattr(known.started, "tells_end", False) and not has_claimed):
            return
        if known.slot != due.slot or _last_attempt(due.state) != known.before:
            del self._running[name]
        elif self.clock() - known.began > _SILENT_SECONDS:
            known.code = 1  # it ended before it claimed anything

    def _may_start(self, pipeline: Pipeline, slot: datetime | None, states: dict[str, PipelineState]) -> bool:
        known = self._running.get(pipeline.name)
        if known is not None and (known.code is None or (known.slot == slot and self.clock() < known.not_before)):
            return False
        running = self._at_work()
        if pipeline.pool is not None:
            # Wherever they run: cron and people may have started some.
            working = running | {name for name, each in states.items() if each.is_live}
            pool = [name for name in working if self.project.pipelines[name].pool == pipeline.pool]
            if len(pool) >= self.pools[pipeline.pool]:
                return False
        return len(running) < self.most_running

    def _at_work(self) -> set[str]:
        """Return what this scheduler started and has not ended."""
        running = [*self._running.items()]  # at once: another thread may start a build
        return {name for name, each in running if each.code is None} | {*self._building}

    # ----------------------------------------------------------------------------------------------------------- models

    def start_build(self, model: Pipeline) -> Started | None:
        """Start the build of a model whose inputs have changed; `None` where there is no room for it, or it could not
        be started. Any thread may call it."""
        name, states = model.name, {} if model.pool is None else self.log.latest(list(self.project.pipelines))
        with self._starting:
            if name in self._at_work() or not self._may_start(model, None, states) or not self._still_leads():
                return None
            known = self._running.pop(name, None)
            failures = known.failures if known is not None and known.slot is None else 0
            started = self._started(name, None)
            if started is None:
                not_before = self.clock() + _pause(failures)
                self._running[name] = _Dispatched(None, None, failures + 1, not_before, 1)
            else:
                self._building[name] = self.clock()
            return started

    def build_ended(self, name: str, *, claimed: bool = True) -> None:
        """Make room for others. A build without a result of its own is started again, but not at once: it may find
        nothing to do each time, as where its code is newer than that of this process."""
        with self._starting:
            self._building.pop(name, None)
            if claimed:
                self._unclaimed.pop(name, None)
                return
            self._unclaimed[name] += 1
            if name not in self._at_work():  # a run for a slot may have been started meanwhile
                times = self._unclaimed[name]
                self._running[name] = _Dispatched(None, None, times, self.clock() + _pause(times - 1), 1)

    def is_silent(self, name: str) -> bool:
        """Return whether a build that cannot be asked about claimed nothing for so long that it must have ended."""
        return self.clock() - self._building.get(name, self.clock()) > _SILENT_SECONDS

    def _start(self, due: Due) -> bool:
        name, slot, before = due.pipeline.name, due.slot, _last_attempt(due.state)
        known = self._running.get(name)
        failures = known.failures if known is not None and known.slot == slot else 0
        # A run that ends without a claim is started again, but not at once.
        not_before = self.clock() + _pause(failures)
        started = self._started(name, slot)
        if started is None:
            self._running[name] = _Dispatched(slot, None, failures + 1, not_before, 1, before)
            return False
        self._running[name] = _Dispatched(slot, started, failures + 1, not_before, None, before, self.clock())
        return True

    def _started(self, name: str, slot: datetime | None) -> Started | None:
        """Start a run for a slot, or a build; return it, or `None` where that failed, which is reported."""
        about = {"weft.pipeline": name} | ({} if slot is None else {"weft.slot": str(slot)})
        try:
            with tracing.span(f"dispatch {name}", "producer", about):
                trace = tracing.environment()
                started = self.executor.start(
                    Dispatch(name, self.modules, self.run_log, self.run_alerters, self.traces, trace)
                )
        except Exception as error:
            _log.error("%s could not be started: %s", name, error, extra={"pipeline": name})
            self.metrics.add(DISPATCH_FAILURES, pipeline=name)
            self._not_started[name] += 1
            if is_worth_telling(times := self._not_started[name]):
                self.alerters.notice(
                    "dispatch_failed", name, f"{name} could not be started", error=str(error), failures=times
                )
            return None
        known = {"pipeline": name} | ({} if slot is None else {"slot": slot})
        _log.info("%s was started for %s", name, slot or "new inputs", extra=known)
        if times := self._not_started.pop(name, 0):
            self.alerters.notice("recovered", name, f"{name} was started after {times} failed starts", failures=times)
        self.metrics.add(DISPATCHES, pipeline=name)
        return started


def _last_attempt(state: PipelineState) -> tuple[str, int] | None:
    return None if state.scheduled is None else (state.scheduled.run_id, state.scheduled.attempt)


def _pause(failures: int) -> float:
    # A run may fail thousands of times: 2.0**1024 is more than a float holds.
    return float(min(5.0 * 2 ** min(failures, 10), _MOST_PAUSE_SECONDS))
