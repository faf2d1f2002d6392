"""Which pipelines are due: by schedules, by earlier runs in the run log, and by upstream pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from weft.operate.records import PipelineState
from weft.operate.runlog import RunLog
from weft.pipelines import graph
from weft.pipelines.declare import Pipeline, find
from weft.project import Project, current


@dataclass(frozen=True)
class Due:
    """Whether a pipeline is due, and if not, why."""

    pipeline: Pipeline
    slot: datetime | None
    state: PipelineState
    is_due: bool
    why: str
    """`due`, `retry`, `done`, `running`, `waiting on upstream: …`, `retry at …`, `gave up`, `cancelled`, `paused`,
    `no schedule`."""
    waits_for: tuple[str, ...] = ()
    """The upstream pipelines without a success that is new enough, where only these keep it from being due."""


class Planner:
    """Decides which pipelines of a project are due under a run log."""

    def __init__(self, log: RunLog, project: Project | None = None) -> None:
        self.log, self.project = log, project or current()

    @property
    def now(self) -> datetime:
        """The time by the project's clock."""
        return datetime.fromtimestamp(self.project.clock(), UTC)

    def due(self, names: Sequence[str] = ()) -> list[Due]:
        """Return whether each pipeline is due now, in the order in which they run."""
        graph.refuse_unknown_dependencies(self.project.pipelines)
        states, now = self.log.latest(list(self.project.pipelines)), self.now
        return [due_now(each, states, now) for each in self.chosen(names)]

    def chosen(self, names: Iterable[str]) -> list[Pipeline]:
        """Return the pipelines of these names, or all, each after those that it depends on."""
        wanted = {find(name, self.project).name for name in names}
        return [each for each in graph.in_order(self.project.pipelines) if not wanted or each.name in wanted]


def due_now(pipeline: Pipeline, states: dict[str, PipelineState], now: datetime) -> Due:
    """Return whether a pipeline is due, by the states of all that it depends on."""
    state = states[pipeline.name]
    if pipeline.schedule is None:
        return Due(pipeline, None, state, False, "no schedule" if state.paused_at is None else "paused")
    slot = pipeline.schedule.latest(now)
    done = state.scheduled
    if done is not None and done.slot is not None and slot < done.slot <= now:
        # The schedule has become rarer since: its own slots begin after the last that was claimed.
        slot = done.slot
    if pipeline.catchup and done is not None and done.slot is not None and done.slot < slot:
        has_ended = done.status in ("succeeded", "cancelled") or (done.status == "failed" and done.retry_at is None)
        slot = pipeline.schedule.next(done.slot) if has_ended else done.slot
    is_due, why = True, "due"
    if state.is_live:
        is_due, why = False, "running"
    elif state.paused_at is not None:
        is_due, why = False, "paused"
    elif done is not None and done.slot == slot:
        if done.status == "succeeded":
            is_due, why = False, "done"
        elif done.status == "cancelled":
            is_due, why = False, "cancelled"
        elif done.status == "failed" and done.retry_at is None:
            is_due, why = False, "gave up"
        elif done.retry_at is not None and done.waits(state.now or now):  # by the log's clock, which set it
            is_due, why = False, f"retry at {done.retry_at:%H:%M:%S}"
        else:
            why = "retry"
    waits_for = _not_ready(pipeline, states, now) if is_due and pipeline.waits_for_upstream else ()
    if waits_for:
        is_due, why = False, f"waiting on upstream: {', '.join(waits_for)}"
    return Due(pipeline, slot, state, is_due, why, waits_for)


def _not_ready(pipeline: Pipeline, states: dict[str, PipelineState], now: datetime) -> tuple[str, ...]:
    """Return the upstream pipelines without a success of today, or of the last `upstream_freshness_secs`."""
    if pipeline.upstream_freshness_secs is not None:
        since = now - timedelta(seconds=pipeline.upstream_freshness_secs)
    else:
        assert pipeline.schedule is not None
        zone = ZoneInfo(pipeline.schedule.timezone)
        since = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0).astimezone(UTC)
    return tuple(
        name
        for name in pipeline.depends_on
        if states[name].status in ("failed", "interrupted") or not _has_succeeded(states[name], since)
    )


def _has_succeeded(state: PipelineState, since: datetime) -> bool:
    """Return whether it succeeded since then, or for a slot since then: the log's clock may be behind this host's."""
    done = state.scheduled
    slot = done.slot if done is not None and done.status == "succeeded" else None
    return any(moment is not None and moment >= since for moment in (state.succeeded_at, slot))
