"""`/api/v1/changes`: what became different within a day: which pipelines began to fail or recovered, were cancelled or
paused, and which processes started. It is what the run log has; actions over HTTP are in the audit log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.operate.records import Attempt, PipelineState, Status
from weft.project import current
from weft.server.cached_probe import CachedProbe
from weft.server.consuming import query_of_all
from weft.server.run_log import answered_or_not, open_log
from weft.server.service import json_response

_FRESH_SECONDS = 15.0
_DAY = timedelta(days=1)
_ENDED: tuple[Status, ...] = ("failed", "interrupted", "cancelled")
# The most attempts of each status that are read, and the most changes of an answer.
_READ, _MOST = 500, 100


async def changes(request: Request) -> Response:
    """Show what changed within the last day, the newest first."""
    await query_of_all(request)
    known: CachedProbe[list[dict[str, Any]]] = request.app.state.changes
    shown, problem = await answered_or_not(known, "The run log")
    return json_response({"at": datetime.now(UTC), "changes": shown, "problem": problem})


def changes_probe() -> CachedProbe[list[dict[str, Any]]]:
    """Return what reads them, once for all who ask."""
    return CachedProbe(read_changes, fresh_seconds=_FRESH_SECONDS)


def read_changes() -> list[dict[str, Any]]:
    """Return what the run log has of the last day."""
    from weft.operate import presence

    since = datetime.now(UTC) - _DAY
    ended: dict[str, list[Attempt]] = defaultdict(list)
    with open_log() as log:
        states = log.latest(current().pipelines)
        for status in _ENDED:
            for attempt in log.runs(status=status, since=since, limit=_READ):
                ended[attempt.pipeline].append(attempt)
        processes = [each for each in presence.processes(log) if each["since"] and each["since"] >= since]
    found = [change for name, state in states.items() for change in _of_pipeline(state, ended[name], since)]
    for each in processes:
        found.append(_change(each["since"], "started", each["kind"], f"{each['host']}, process {each['pid']}"))
    return sorted(found, key=lambda each: each["at"], reverse=True)[:_MOST]


def _of_pipeline(state: PipelineState, ended: Sequence[Attempt], since: datetime) -> Iterator[dict[str, Any]]:
    name = state.pipeline
    for each in ended:
        if each.status == "cancelled":
            yield _change(each.finished_at or each.started_at, "cancelled", name, run_id=each.run_id)
    if state.paused_at is not None and state.paused_at >= since:
        yield _change(state.paused_at, "paused", name)
    failed = sorted((each for each in ended if each.status != "cancelled"), key=lambda each: each.started_at)
    if not failed:
        return
    in_a_row = [each for each in failed if state.succeeded_at is None or each.started_at > state.succeeded_at]
    last = failed[-1]
    if not in_a_row:
        yield _change(
            last.finished_at or last.started_at, "recovered", name, _first_line(last), last.run_id, len(failed)
        )
    # What fails for longer, or so often that not all of it was read, is no news.
    elif len(in_a_row) >= state.failures:
        began = in_a_row[0].started_at
        yield _change(began, "began to fail", name, _first_line(last), last.run_id, len(in_a_row))


def _first_line(attempt: Attempt) -> str:
    return (attempt.error or "").partition("\n")[0]


def _change(
    at: datetime, what: str, name: str, note: str = "", run_id: str | None = None, failures: int | None = None
) -> dict[str, Any]:
    return {"at": at, "what": what, "name": name, "note": note, "run_id": run_id, "failures": failures}
