"""`/api/v1/processes`: services, workers, schedulers and streaming pipelines that run, and those that ended without a
word."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.errors import WeftError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import current
from weft.server.cached_probe import CachedProbe
from weft.server.consuming import query_of_all
from weft.server.run_log import answered_or_not, open_log
from weft.server.service import json_response
from weft.systems import process

_FRESH_SECONDS = 2.0
# A streaming pipeline that runs writes what it does every two seconds, also on another machine.
_SAYS = timedelta(seconds=20)


async def processes(request: Request) -> Response:
    """Show what runs, since when and when it was last heard of, and what is silent."""
    await query_of_all(request)
    known: CachedProbe[list[dict[str, Any]]] = request.app.state.processes
    shown, problem = await answered_or_not(known, "The run log")
    return json_response({"at": datetime.now(UTC), "processes": shown, "problem": problem})


def processes_probe() -> CachedProbe[list[dict[str, Any]]]:
    """Return what reads them, once for all who ask."""
    return CachedProbe(read_processes, fresh_seconds=_FRESH_SECONDS)


def read_processes() -> list[dict[str, Any]]:
    """Return them by the run log, and by the checkpoints of this machine."""
    from weft.operate import presence

    with open_log() as log:
        shown = presence.processes(log)
    streaming = map(_streaming, list(current().streaming_pipelines.values()))
    return shown + [each for each in streaming if each is not None]


def _streaming(pipeline: StreamingPipeline) -> dict[str, Any] | None:
    """Return the process that runs a pipeline, or was killed; `None` where none does, or its checkpoint is at a URL."""
    from weft.engine.streaming.activity import read_activity
    from weft.engine.streaming.checkpoint import Checkpoint

    try:
        checkpoint = Checkpoint.of(pipeline)
        if checkpoint.is_url:
            return None
        holder, activity = checkpoint.lock.last_holder(), read_activity(checkpoint)
    except WeftError:  # the view of the pipeline has the reason
        return None
    if holder is None:
        return None
    owner, since = holder
    host, pid = process.host_of(owner)
    now = datetime.now(UTC)
    heard = max(activity["at"], since) if activity else since
    if process.is_on_this_machine(owner):
        lives = not process.has_ended(owner)
        heard = now if lives else heard
    else:
        lives = now - heard < _SAYS
    return {
        "kind": "streaming",
        "pipeline": pipeline.name,
        "host": host,
        "pid": pid,
        "since": since,
        "heard": heard,
        "lives": lives,
        "failing": bool(activity and activity["failure"]),
    }
