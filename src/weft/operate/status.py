"""The status of pipelines: what `weft status` prints, and what the page of the service shows."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from weft.operate import freshness
from weft.operate.due import Due
from weft.operate.records import PipelineState
from weft.operate.runlog import RunLog
from weft.pipelines.streaming.spec import StreamingPipeline


def standing(state: PipelineState) -> dict[str, Any]:
    """Return what the run log knows of a pipeline."""
    last = state.last
    return {
        "pipeline": state.pipeline,
        "status": state.status or "never run",
        "last_run": last.started_at if last is not None else None,
        "last_success": state.succeeded_at,
        "attempts": last.attempt if last is not None else 0,
        "failures": state.failures,
        "quarantined": last.quarantined if last is not None else None,
        "error": last.error if last is not None and last.status != "succeeded" else None,
    }


def next_due(due: Due, now: datetime) -> datetime | None:
    """Return the next moment of a pipeline's schedule, which is not followed while it is paused."""
    schedule = due.pipeline.schedule
    return None if schedule is None or due.state.paused_at is not None else schedule.next(now)


def now_text(due: Due, now: datetime) -> str:
    """Return whether a pipeline is due, and what it waits for."""
    sla, succeeded_at = due.pipeline.freshness_sla, due.state.succeeded_at
    stale = sla is not None and (succeeded_at is None or (now - succeeded_at).total_seconds() > sla)
    stale = stale or freshness.late_by(due.state, due.pipeline.expect_within) is not None
    return due.why + (", stale" if stale else "")


def streaming_standing(log: RunLog, pipeline: StreamingPipeline) -> dict[str, Any]:
    """Return when the run log last heard of rows of a streaming pipeline."""
    key = freshness.streaming_key(pipeline.name)
    state = log.latest([key])[key]
    stands = "fresh" if state.succeeded_at is not None else "no rows yet"
    if freshness.late_by(state, pipeline.expect_within) is not None:
        stands = "stale"
    last = {"pipeline": pipeline.name, "status": "streaming", "last_run": state.succeeded_at}
    return standing(state) | last | {"next_due": None, "now": stands}
