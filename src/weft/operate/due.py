"""What is due: by schedules, by what the run log says of earlier runs, and by upstream pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from weft.operate.records import State
from weft.operate.runlog import RunLog
from weft.pipelines import graph
from weft.pipelines.declare import Pipeline, find
from weft.project import Project, current


@dataclass(frozen=True)
class Due:
    """Whether a pipeline is due, and if not, why."""

    pipeline: Pipeline
    slot: datetime | None
    state: State | None
    is_due: bool
    why: str
    """`due`, `retry`, `done`, `running`, `waiting on upstream: …`, `retry at …`, `gave up`, `no schedule`."""
    waits_for: tuple[str, ...] = ()
    """The upstream pipelines without a success that is new enough, where only these keep it from being due."""


class Planner:
    """Says which pipelines of a project are due under a run log."""

    def __init__(self, log: RunLog, project: Project | None = None) -> None:
        self.log, self.project = log, project or current()

    @property
    def now(self) -> datetime:
        """The time by the project's clock."""
        return datetime.fromtimestamp(self.project.clock(), UTC)

    def due(self, names: Sequence[str] = ()) -> list[Due]:
        """How every pipeline stands now, in the order in which they run."""
        graph.refuse_unknown(self.project.pipelines)
        states, now = self.log.latest(list(self.project.pipelines)), self.now
        wanted = {each.name for each in self.chosen(names)}
        return [due_now(each, states, now) for each in graph.in_order(self.project.pipelines) if each.name in wanted]

    def chosen(self, names: Iterable[str]) -> list[Pipeline]:
        """The pipelines of these names, or all, each after those that it waits for."""
        asked = {find(name, self.project).name for name in names}
        return [each for each in graph.in_order(self.project.pipelines) if not asked or each.name in asked]


def due_now(pipeline: Pipeline, states: dict[str, State], now: datetime) -> Due:
    """Whether a pipeline is due, by the states of all that it waits for."""
    state = states.get(pipeline.name)
    if pipeline.schedule is None:
        return Due(pipeline, None, state, False, "no schedule")
    slot = pipeline.schedule.latest(now)
    done = state.scheduled if state is not None else None
    is_due, why = True, "due"
    if state is not None and state.is_live:
        is_due, why = False, "running"
    elif done is not None and done.slot == slot:
        if done.status == "succeeded":
            is_due, why = False, "done"
        elif done.status == "failed" and done.retry_at is None:
            is_due, why = False, "gave up"
        elif done.retry_at is not None and done.retry_at > now:
            is_due, why = False, f"retry at {done.retry_at:%H:%M:%S}"
        else:
            why = "retry"
    waits_for = _not_ready(pipeline, states, now) if is_due else ()
    if waits_for:
        is_due, why = False, f"waiting on upstream: {', '.join(waits_for)}"
    return Due(pipeline, slot, state, is_due, why, waits_for)


def _not_ready(pipeline: Pipeline, states: dict[str, State], now: datetime) -> tuple[str, ...]:
    """The upstream pipelines without a success that is new enough: of today, or of the last so many seconds."""
    if pipeline.upstream_freshness_secs is not None:
        since = now - timedelta(seconds=pipeline.upstream_freshness_secs)
    else:
        assert pipeline.schedule is not None
        zone = ZoneInfo(pipeline.schedule.timezone)
        since = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0).astimezone(UTC)
    return tuple(
        name
        for name in pipeline.depends_on
        if (state := states.get(name)) is None
        or state.status in ("failed", "interrupted")
        or not _has_succeeded(state, since)
    )


def _has_succeeded(state: State, since: datetime) -> bool:
    """Whether it succeeded since then, or for a slot since then: the log's clock may be behind this host's."""
    done = state.scheduled
    slot = done.slot if done is not None and done.status == "succeeded" else None
    return any(moment is not None and moment >= since for moment in (state.succeeded_at, slot))
