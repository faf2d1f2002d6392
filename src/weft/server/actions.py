"""What people do over HTTP: run, pause, resume, cancel, and commands of others. Each needs a key, and is in the audit
log."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import NotFoundError
from weft.operate.redaction import clean
from weft.pipelines.declare import find
from weft.project import current
from weft.server import bodies
from weft.server.audit import FILTERS, Audit
from weft.server.consuming import moment, query, whole
from weft.server.keys import ApiKey
from weft.server.pipelines import attempts_at
from weft.server.problems import Problem, later
from weft.server.run_log import in_thread, open_log
from weft.server.service import json_response, service_of
from weft.streams.retention import aware

if TYPE_CHECKING:
    from weft.operate.runlog import RunLog

S = TypeVar("S", bound=msgspec.Struct)
# Each command is a process with memory of its own. More than these wait for the scheduler.
_MOST_COMMANDS = 4
_AUDITED, _MOST_AUDITED = 50, 200
_OUTCOME = 500
_FAILED = "failed: "


class Commands:
    """The commands that this process started by request: runs, replays and the like, which may need Spark."""

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        self._modules = modules
        self._started: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def start(self, words: Sequence[str], ended: Callable[[str], None]) -> int:
        """Start `weft WORDS`, which goes on when the service ends, and return the number of its process. `ended` is
        called with what it said."""
        with self._lock:  # requests come in threads, and the limit is for all of them
            return self._start(words, ended)

    def _start(self, words: Sequence[str], ended: Callable[[str], None]) -> int:
        self._started = [each for each in self._started if each.poll() is None]
        if len(self._started) >= _MOST_COMMANDS:
            text = f"{_MOST_COMMANDS} commands that were started here go on."
            raise later(429, "busy", "Too many commands", text, 5.0)
        # A file, not a pipe: a command whose service ended goes on, and nobody reads its pipe.
        said = tempfile.TemporaryFile()  # noqa: SIM115 - what waits closes it
        modules = [word for name in self._modules for word in ("--module", name)]
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", *words, *modules],
            cwd=current().root,
            env={**os.environ, "WEFT_METRICS": "null://"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        self._started.append(process)
        threading.Thread(target=_wait, args=(process, said, ended), name="weft-command", daemon=True).start()
        return process.pid


def _wait(process: subprocess.Popen[bytes], said: IO[bytes], ended: Callable[[str], None]) -> None:
    code = process.wait()
    with said:
        said.seek(0)
        text = clean(said.read(1024 * 1024).decode("utf-8", "replace").strip())
    if code:
        # A library may have warned before.
        _, separator, error = f"\n{text}".rpartition("\nerror: ")
        ended(_FAILED + (error if separator else text[-_OUTCOME:] or f"exit code {code}"))
    else:
        ended(text)


async def run(request: Request) -> Response:
    """Run a pipeline or model now; one whose last run failed goes on with it."""
    key = await service_of(request).access.admit_action(request)
    query(request)
    name = _pipeline(request)

    def refuse_second() -> None:
        with open_log() as log:
            if log.latest([name])[name].is_live:
                raise Problem(409, "running", "It runs already", f"{name} is being run.")

    return await start_command(request, key, "run", name, ["run", name], name, check=refuse_second)


async def pause(request: Request) -> Response:
    """Stop following the schedule of a pipeline, or the inputs of a model."""
    return await _act(request, "pause", _pipeline, partial(_set_paused, paused=True))


async def resume(request: Request) -> Response:
    """Follow it again."""
    return await _act(request, "resume", _pipeline, partial(_set_paused, paused=False))


async def cancel(request: Request) -> Response:
    """End a run, wherever it runs, and do not try it again."""

    from weft.operate.scheduler import LEADER

    def end(log: RunLog, run_id: str) -> dict[str, Any]:
        last = attempts_at(log, run_id)[-1]
        if last.pipeline == LEADER:
            raise Problem(409, "refused", "Refused", f"{last.run_id} is the lease of a scheduler, and no run.")
        outcome = log.cancel(last.pipeline, last.run_id)
        if outcome == "ended":
            raise Problem(409, "ended", "It has ended", f"The run {last.run_id} of {last.pipeline} has ended.")
        done = "ends within 20 seconds" if outcome == "asked" else "cancelled"
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
) -> Response:
    """Carry out an action on the run log, with a record of it before and after."""
    key = await service_of(request).access.admit_action(request)
    query(request)
    name = named(request)

    def carry_out() -> dict[str, Any]:
        records, outcome = Audit(), "failed"
        record = records.begin(key, _client(request), action, name)
        try:
            with open_log(read_only=False) as log:
                done = work(log, name)
            outcome = done["done"]
        except Problem as problem:
            outcome = str(problem)
            raise
        finally:
            records.end(record, outcome)
        return done | {"action": record}

    return json_response(await in_thread(carry_out, "The run log"))


async def admit_body(request: Request, kind: type[S]) -> tuple[ApiKey, S]:
    """Return the key of a request that may act, and its body."""
    service = service_of(request)
    key = await service.access.admit_action(request)
    query(request, body=kind.__struct_fields__)
    bodies.require_json(bodies.media_type(request.headers))
    body = await service.bodies.read(request)
    return key, bodies.parse(bodies.unpack(body, request.headers, service.limits.body_bytes), kind)


async def start_command(
    request: Request,
    key: ApiKey,
    action: str,
    named: str,
    words: Sequence[str],
    pipeline: str,
    *,
    check: Callable[[], None] | None = None,
) -> Response:
    """Start a command, with a record of it before, and after it ended of what it said: `/api/v1/audit/ID`. `check`
    raises what is refused."""
    commands: Commands = request.app.state.commands

    def carry_out() -> dict[str, Any]:
        records = Audit()
        record = records.begin(key, _client(request), action, named[:_OUTCOME])
        try:
            if check is not None:
                check()
            pid = commands.start(words, partial(records.end, record))
        except Exception as error:
            records.end(record, str(error) if isinstance(error, Problem) else "failed")
            raise
        return {"pipeline": pipeline, "done": "started", "pid": pid, "action": record}

    return json_response(await in_thread(carry_out, "The audit log"), 202)


def _client(request: Request) -> str | None:
    return None if request.client is None else request.client.host


# --------------------------------------------------------------------------------------------------------- who did what


async def audit(request: Request) -> Response:
    """List the last actions, the newest first: all, or those of one key, kind or object."""
    parameters = query(request, "limit", "before", *FILTERS)
    limit = min(whole(parameters.get("limit", str(_AUDITED)), "limit", 1), _MOST_AUDITED)
    before = None if "before" not in parameters else aware(moment(parameters["before"], "before"))
    await service_of(request).access.admit_action(request)
    wanted = {name: value[:_OUTCOME] for name, value in parameters.items() if name in FILTERS}
    actions = await in_thread(lambda: Audit().latest(limit, before=before, **wanted), "The audit log")
    return json_response({"actions": actions})


async def audited(request: Request) -> Response:
    """Show one action: what came of it, as soon as that is known."""
    query(request)
    await service_of(request).access.admit_action(request)
    record = str(request.path_params["action"])[:100]
    actions = await in_thread(lambda: Audit().latest(1, id=record), "The audit log")
    if not actions:
        raise NotFoundError(f"There is no action {record!r} in the audit log.", hint="GET /api/v1/audit lists them.")
    return json_response(actions[0])


async def me(request: Request) -> Response:
    """Show what the caller may do: the key that a request has, and why actions are off, if they are."""
    query(request)
    access = service_of(request).access
    key, why_not = await access.actor(request)
    shown = None if key is None else {"id": key.id, "name": key.name, "scopes": key.scopes, "streams": key.streams}
    answer = {"key": shown, "reads_all": await access.reads_all(request)}
    return json_response(answer | {"may_act": why_not is None, "why_not": why_not})
