"""What people do to pipelines over HTTP: run, pause, resume, cancel. Each needs a key, and is in the audit log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from weft.pipelines.declare import find
from weft.project import current
from weft.server.audit import Audit
from weft.server.consuming import query, whole
from weft.server.pipelines import attempts_at
from weft.server.problems import Problem, later
from weft.server.run_log import in_thread, open_log
from weft.server.service import json_response, service_of

if TYPE_CHECKING:
    from weft.operate.runlog import RunLog

# Each run is a process with memory of its own. More than these wait for the scheduler.
_MOST_RUNS = 4
_AUDITED = 100


class Runs:
    """The runs that this process started by request."""

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        self._modules = modules
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, pipeline: str) -> int:
        """Start `weft run`, which goes on when the service ends, and return the number of its process."""
        self._started = [each for each in self._started if each.poll() is None]
        if len(self._started) >= _MOST_RUNS:
            text = f"{_MOST_RUNS} runs that were started here go on."
            raise later(429, "busy", "Too many runs", text, 5.0)
        modules = [word for name in self._modules for word in ("--module", name)]
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", "run", pipeline, *modules],
            cwd=current().root,
            env={**os.environ, "WEFT_METRICS": "null://"},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )
        self._started.append(process)
        return process.pid


async def run(request: Request) -> Response:
    """Run a pipeline or model now; one whose last run failed goes on with it."""
    runs: Runs = request.app.state.runs

    def start(log: RunLog, name: str) -> dict[str, Any]:
        if log.latest([name])[name].is_live:
            raise Problem(409, "running", "It runs already", f"{name} is being run.")
        return {"pipeline": name, "done": "started", "pid": runs.start(name)}

    return await _act(request, "run", _pipeline, start, status=202)


async def pause(request: Request) -> Response:
    """Stop following the schedule of a pipeline, or the inputs of a model."""
    return await _act(request, "pause", _pipeline, partial(_set_paused, paused=True))


async def resume(request: Request) -> Response:
    """Follow it again."""
    return await _act(request, "resume", _pipeline, partial(_set_paused, paused=False))


async def cancel(request: Request) -> Response:
    """End a run, wherever it runs, and do not try it again."""

    def end(log: RunLog, run_id: str) -> dict[str, Any]:
        last = attempts_at(log, run_id)[-1]
        found = log.cancel(last.pipeline, last.run_id)
        if found == "ended":
            raise Problem(409, "ended", "It has ended", f"The run {last.run_id} of {last.pipeline} has ended.")
        done = "ends within 20 seconds" if found == "asked" else "cancelled"
        return {"pipeline": last.pipeline, "done": done, "pid": last.pid}

    return await _act(request, "cancel", lambda request: str(request.path_params["run_id"])[:100], end)


def _pipeline(request: Request) -> str:
    return find(request.path_params["pipeline"]).name


def _set_paused(log: RunLog, name: str, *, paused: bool) -> dict[str, Any]:
    if paused:
        done = "paused" if log.pause(name) else "was paused already"
    else:
        done = "resumed" if log.resume(name) else "was not paused"
    return {"pipeline": name, "done": done, "pid": None}


async def _act(
    request: Request,
    action: str,
    named: Callable[[Request], str],
    work: Callable[[RunLog, str], dict[str, Any]],
    *,
    status: int = 200,
) -> Response:
    """Carry out an action, with a record of it before and after."""
    key = await service_of(request).access.admit_action(request)
    query(request)
    name = named(request)
    client = None if request.client is None else request.client.host

    def carry_out() -> dict[str, Any]:
        records, outcome = Audit(), "failed"
        record = records.begin(key, client, action, name)
        try:
            with open_log(read_only=False) as log:
                done = work(log, name)
            outcome = done["done"]
        except Problem as problem:
            outcome = str(problem)
            raise
        finally:
            records.end(record, outcome)
        return done

    return json_response(await in_thread(carry_out, "The run log"), status)


async def audit(request: Request) -> Response:
    """List the last actions, the newest first."""
    parameters = query(request, "limit")
    limit = min(whole(parameters.get("limit", "50"), "limit", 1), _AUDITED)
    await service_of(request).access.admit_action(request)
    return json_response({"actions": await in_thread(lambda: Audit().latest(limit), "The audit log")})
