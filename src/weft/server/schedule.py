"""`/api/v1/scheduler`: who leads, what runs, what waits, what is due next and what is paused."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from weft.server.cached_probe import CachedProbe
from weft.server.consuming import query_of_all
from weft.server.run_log import answered, open_log
from weft.server.service import json_response

if TYPE_CHECKING:
    from weft.operate.due import Due
    from weft.operate.runlog import RunLog

_IS_OVER = ("done", "gave up", "cancelled", "no schedule", "running", "paused")


async def scheduler(request: Request) -> Response:
    """Show what `weft scheduler status` and `weft status` say of schedules."""
    await query_of_all(request)
    known: CachedProbe[dict[str, Any]] = request.app.state.scheduler
    return json_response(await answered(known, "The run log"))


def schedule_probe() -> CachedProbe[dict[str, Any]]:
    """Return what reads the schedules, once for all who ask at the same time: of many it takes a while."""

    def read() -> dict[str, Any]:
        with open_log() as log:
            return read_schedule(log)

    return CachedProbe(read, fresh_seconds=0)


def read_schedule(log: RunLog) -> dict[str, Any]:
    """Return how the schedules of the project stand."""
    from weft.operate.due import Planner
    from weft.operate.scheduler import leader_status

    planner = Planner(log)
    plans, now = planner.due(), planner.now
    running = [
        {
            "pipeline": each.pipeline.name,
            "run_id": each.state.last.run_id,
            "attempt": each.state.last.attempt,
            "host": each.state.last.host,
            "started_at": each.state.last.started_at,
        }
        for each in plans
        if each.state.is_live and each.state.last is not None
    ]
    return {
        "at": now,
        "leader": leader_status(log),
        "running": running,
        "queue": [_waiting(each) for each in plans if each.is_due or each.why not in _IS_OVER],
        "next": sorted(
            (_next(each, now) for each in plans if each.pipeline.schedule is not None and each.state.paused_at is None),
            key=lambda row: (row["next_due"], row["pipeline"]),
        ),
        "paused": [
            {"pipeline": each.pipeline.name, "paused_at": each.state.paused_at}
            for each in plans
            if each.state.paused_at is not None
        ],
    }


def _waiting(due: Due) -> dict[str, Any]:
    return {
        "pipeline": due.pipeline.name,
        "slot": due.slot,
        "why": due.why,
        "is_due": due.is_due,
        "waits_for": list(due.waits_for),
        "pool": due.pipeline.pool,
    }


def _next(due: Due, now: datetime) -> dict[str, Any]:
    schedule = due.pipeline.schedule
    assert schedule is not None
    return {
        "pipeline": due.pipeline.name,
        "next_due": schedule.next(now),
        "schedule": f"{schedule.cron} {schedule.timezone}",
        "state": due.why,
    }
