"""`/api/v1/pipelines` and `/api/v1/runs`: pipelines and models, their runs, and the logs of these."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from weft.errors import NotFoundError
from weft.operate.records import Attempt, Status
from weft.pipelines.declare import Pipeline, find, load_mode
from weft.pipelines.models import Model
from weft.project import current
from weft.server.consuming import query_of_all, whole
from weft.server.overview import Overview, read_pipelines
from weft.server.problems import bad_parameter
from weft.server.run_log import with_run_log
from weft.server.service import json_response

if TYPE_CHECKING:
    from weft.operate.runlog import RunLog

_RUNS, _MOST_RUNS = 50, 1000
# The most bytes of a log in one answer.
_LOG_BYTES = 256 * 1024


async def pipelines(request: Request) -> Response:
    """List pipelines and models with their last runs."""
    await query_of_all(request)
    known: Overview = request.app.state.overview
    return json_response({"at": datetime.now(UTC), **await known.pipelines()})


async def pipeline(request: Request) -> Response:
    """Show one of them: how it stands, what it is declared as, and its last runs."""
    await query_of_all(request)
    declared = find(request.path_params["pipeline"])
    standing, attempts = await with_run_log(
        lambda log: (read_pipelines(log, [declared.name])[0], log.runs(declared.name, limit=_RUNS))
    )
    return json_response(standing | _declared(declared) | {"runs": [_attempt(each) for each in attempts]})


def _declared(pipeline: Pipeline) -> dict[str, Any]:
    """Return what the declaration says of a pipeline."""
    if isinstance(pipeline, Model):
        mode, inputs = str(pipeline.materialise), [each.name for each in pipeline.inputs]
    else:
        mode = ", ".join(dict.fromkeys(map(load_mode, pipeline.targets)))
        inputs = [] if pipeline.source_table is None else [pipeline.source_table]
    return {
        "mode": mode,
        "inputs": inputs,
        "dependents": [each.name for each in current().pipelines.values() if pipeline.name in each.depends_on],
        "attempts_allowed": None if isinstance(pipeline, Model) else pipeline.retry.max_attempts,
        "declared": pipeline.declared_at,
        "owner": pipeline.owner,
        "code": _code(pipeline),
    }


def _code(pipeline: Pipeline) -> str | None:
    """Return the SQL of a model that is a file, or else the function, which makes the SQL when it is called."""
    from weft.operate.redaction import clean

    sql = getattr(pipeline, "sql", None)
    try:
        return clean(sql or inspect.getsource(pipeline.function), most=100_000)
    except (OSError, TypeError):  # declared at a prompt
        return None


# ----------------------------------------------------------------------------------------------------------------- runs


async def runs(request: Request) -> Response:
    """List attempts and skips, the newest first."""
    parameters = await query_of_all(request, "pipeline", "status", "limit")
    limit = min(whole(parameters.get("limit", str(_RUNS)), "limit", 1), _MOST_RUNS)
    status = parameters.get("status")
    if status is not None and status not in get_args(Status):
        raise bad_parameter(f"A run has no status {status[:40]!r}; it is one of {', '.join(get_args(Status))}.")
    attempts = await with_run_log(lambda log: log.runs(parameters.get("pipeline"), status, None, limit))  # type: ignore[arg-type]
    return json_response({"at": datetime.now(UTC), "runs": [_attempt(each) for each in attempts]})


async def run(request: Request) -> Response:
    """Show every attempt at a run."""
    await query_of_all(request)

    def read(log: RunLog) -> tuple[Sequence[Attempt], bool]:
        attempts = attempts_at(log, request.path_params["run_id"])
        name, last = attempts[-1].pipeline, log.latest([attempts[-1].pipeline])[attempts[-1].pipeline].last
        is_last = last is not None and last.run_id == attempts[-1].run_id and name in current().pipelines
        return attempts, is_last and attempts[-1].status in ("failed", "interrupted")

    attempts, retryable = await with_run_log(read)
    described = [_attempt(each) for each in attempts]
    shown = {"run_id": attempts[0].run_id, "pipeline": attempts[0].pipeline, "attempts": described}
    return json_response(shown | {"retryable": retryable})


async def log(request: Request) -> Response:
    """Return a part of what an attempt wrote to its log: what follows `after`, or its end."""
    parameters = await query_of_all(request, "attempt", "after")
    after = None if "after" not in parameters else whole(parameters["after"], "after", 0)
    number = None if "attempt" not in parameters else whole(parameters["attempt"], "attempt", 1)

    def read(run_log: RunLog) -> dict[str, Any]:
        from weft.operate.logs import log_file

        attempts = attempts_at(run_log, request.path_params["run_id"])
        chosen = [each for each in attempts if number in (None, each.attempt)]
        if not chosen:
            raise NotFoundError(f"The run {attempts[0].run_id} has no attempt {number}.")
        last = chosen[-1]
        # Use the id in the run log, not the one in the request: it becomes part of a path.
        file = log_file(current().root, last.run_id, last.attempt)
        return {"run_id": last.run_id, "attempt": last.attempt, **_part(file, after, last.status != "running")}

    return json_response(await with_run_log(read))


def _part(file: Path, after: int | None, has_ended: bool) -> dict[str, Any]:
    """Return whole lines of a file, and where the next part begins."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            start = max(0, size - _LOG_BYTES) if after is None else min(after, size)
            opened.seek(start)
            content = opened.read(_LOG_BYTES)
    except FileNotFoundError:  # of another host, or removed since
        return {"text": None, "next": 0, "ended": has_ended}
    if after is None and start:
        cut = content.find(b"\n") + 1
        start, content = start + cut, content[cut:]
    if start + len(content) < size or not has_ended:
        content = content[: content.rfind(b"\n") + 1] or content[: _LOG_BYTES * (len(content) == _LOG_BYTES)]
    end = start + len(content)
    return {"text": content.decode("utf-8", "replace"), "next": end, "ended": has_ended and end >= size}


def attempts_at(log: RunLog, run_id: str) -> Sequence[Attempt]:
    """Return the attempts at a run; raise where there is no such run."""
    attempts = log.run(run_id)
    if not attempts:
        latest = dict.fromkeys(each.run_id for each in log.runs(limit=5))
        hint = f"The latest: {', '.join(latest)}." if latest else "The run log is empty."
        raise NotFoundError(f"There is no run {run_id[:80]!r}.", hint=hint)
    return attempts


def _attempt(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt as `weft runs show --format json` has it, and how long it took."""
    record = asdict(attempt)
    metrics = record.pop("metrics") or {}
    del record["owner"]
    return record | {
        "seconds": attempt.seconds,
        "targets": metrics.get("targets") or [],
        "steps": metrics.get("steps") or [],
    }
