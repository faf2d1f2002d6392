"""Freshness: what was expected within some time, and did not come.

`expect_within` of a pipeline or model asks for a run that succeeds, that of a streaming pipeline for rows. The run log
has when each came last, and when it was reported that none came, so one of all processes that look reports it. Times
are those of the log's clock alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from weft.operate.alerts import Alerters
from weft.operate.records import PipelineState
from weft.operate.runlog import RunLog
from weft.project import Project

# Each is a transaction: those that are left over are watched from the next look on.
_NEW_AT_ONCE = 100


def streaming_key(name: str) -> str:
    """Return the name under which the run log knows a streaming pipeline: a pipeline may have the same name."""
    return f"streaming:{name}"


def expected(project: Project) -> dict[str, float]:
    """Return the seconds within which something is expected of each pipeline, by its name in the run log."""
    within = {each.name: each.expect_within for each in project.pipelines.values()}
    within |= {streaming_key(each.name): each.expect_within for each in project.streaming_pipelines.values()}
    return {name: seconds for name, seconds in within.items() if seconds is not None}


def late_by(state: PipelineState, within: float | None) -> float | None:
    """Return the seconds since the last success, or since somebody waits for one, where these are too many."""
    moments = [each for each in (state.succeeded_at, state.watched_at) if each is not None]
    if within is None or state.now is None or not moments or state.paused_at is not None:
        return None
    seconds = (state.now - max(moments)).total_seconds()
    return seconds if seconds > within else None


def check(
    log: RunLog, expectations: Mapping[str, float], states: Mapping[str, PipelineState], alerters: Alerters
) -> None:
    """Report what is stale: when it becomes so, and again each time that it has been for twice as long. Report once
    that it no longer is."""
    if not log.has_notes:
        return
    new = 0
    for name, within in expectations.items():
        state = states[name]
        if state.paused_at is not None:
            continue
        if state.succeeded_at is None and state.watched_at is None:
            new += 1
            if new <= _NEW_AT_ONCE:
                log.watch(name)
            continue
        seconds = late_by(state, within)
        if seconds is None:
            if state.stale_at is None or not log.note_stale(name, state.stale_at, is_stale=False):
                continue
            # Else it was paused and resumed, or is expected less often: nothing came.
            # A success of the moment of the report is a later one: clocks of databases count milliseconds.
            if state.succeeded_at is not None and state.succeeded_at >= state.stale_at:
                alerters.notice("recovered", _shown(name), f"{_shown(name)} is fresh again")
            continue
        assert state.now is not None
        # How late it was at the last report; below 0 where there was a success since, which nobody has reported.
        reported_at = -1.0 if state.stale_at is None else seconds - (state.now - state.stale_at).total_seconds()
        if reported_at > 0 and seconds < 2 * reported_at:
            continue
        if log.note_stale(name, state.stale_at, is_stale=True):
            age, limit = (str(timedelta(seconds=round(each))) for each in (seconds, within))
            what = "row" if name != _shown(name) else "success"
            text = f"{_shown(name)} had no {what} for {age}; one is expected within {limit}"
            alerters.notice("stale", _shown(name), text)


def _shown(name: str) -> str:
    return name.removeprefix(streaming_key(""))
