"""`/api/v1/streaming`: streaming pipelines, how far each has come, and what waits in its state.

The process that runs one may be on another machine. What is known here is what it leaves behind: its checkpoint, its
state and its dead letters, as `weft checkpoints`, `weft state` and `weft dlq` show them.
"""

from __future__ import annotations

from concurrent.futures import wait
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.errors import WeftError
from weft.pipelines.streaming.declare import find
from weft.pipelines.streaming.spec import Source, StreamingPipeline, Target
from weft.project import current
from weft.server.cached_probe import CachedProbe
from weft.server.consuming import query, query_of_all, whole
from weft.server.dead_letters import read_letters
from weft.server.problems import later
from weft.server.run_log import in_thread
from weft.server.service import json_response, service_of

_LIST_FRESH_SECONDS, _ONE_FRESH_SECONDS = 2.0, 5.0
_ANSWER_SECONDS = 10.0
# The lag of one that does not run: some sources read what waits to count it.
_LAG_FRESH_SECONDS = 10.0
# One that runs writes its own every two seconds.
_SAYS = timedelta(seconds=20)
# The list waits so long for sources; what a source that hangs would say is not known.
_LAG_SECONDS = 1.0
# How many open windows are shown, the oldest first.
_WAITING = 100


class Streaming:
    """What this process last read of the streaming pipelines."""

    def __init__(self) -> None:
        self.all = CachedProbe(self._read_all, fresh_seconds=_LIST_FRESH_SECONDS)
        self.states = CachedProbe(_read_states, fresh_seconds=_ONE_FRESH_SECONDS)
        self._each: dict[str, CachedProbe[dict[str, Any]]] = {}
        self._lags: dict[str, CachedProbe[dict[str, int]]] = {}

    def one(self, pipeline: StreamingPipeline) -> CachedProbe[dict[str, Any]]:
        """Return the probe of one: its sources and its state may be in databases that hang."""
        probe = CachedProbe(lambda: read_one(find(pipeline.name)), fresh_seconds=_ONE_FRESH_SECONDS)
        return self._each.setdefault(pipeline.name, probe)

    def _read_all(self) -> list[dict[str, Any]]:
        pipelines = list(current().streaming_pipelines.values())
        standings = [_standing(each) for each in pipelines]
        looks = [
            None if _says_lag(standing) else self._lag(each).begun()
            for each, standing in zip(pipelines, standings, strict=True)
        ]
        wait([each for each in looks if each], _LAG_SECONDS)
        for standing, look in zip(standings, looks, strict=True):
            known = standing["activity"]["lag"] if look is None else look.result() if look.done() else {}
            lags = {} if isinstance(known, Exception) else known
            sources = [each["name"] for each in standing["sources"]]
            standing["lag"] = [{"source": name, "lag": lags.get(name)} for name in sources]
        return standings

    def _lag(self, pipeline: StreamingPipeline) -> CachedProbe[dict[str, int]]:
        probe = CachedProbe(lambda: _look_at_lag(find(pipeline.name)), fresh_seconds=_LAG_FRESH_SECONDS)
        return self._lags.setdefault(pipeline.name, probe)


async def streaming_pipelines(request: Request) -> Response:
    """List the streaming pipelines with their checkpoints."""
    await query_of_all(request)
    known: Streaming = request.app.state.streaming
    return json_response({"at": datetime.now(UTC), "pipelines": await _answer(known.all) if _any() else []})


async def streaming_pipeline(request: Request) -> Response:
    """Show one: its lag by source, its watermark and state, its dead letters by error, and its SQL."""
    await query_of_all(request)
    known: Streaming = request.app.state.streaming
    return json_response(await _answer(known.one(find(request.path_params["pipeline"]))))


async def states(request: Request) -> Response:
    """List what windows and joins keep, and what holds their watermarks: `weft state list` and `weft state why`."""
    await query_of_all(request)
    known: Streaming = request.app.state.streaming
    return json_response({"at": datetime.now(UTC), "states": await _answer(known.states) if _any() else []})


async def streaming_history(request: Request) -> Response:
    """Show how a streaming pipeline did in the last hours, by what services stored."""
    parameters = query(request, "hours")
    hours = whole(parameters.get("hours", "24"), "hours", 1)
    service = service_of(request)
    await service.access.admit_to_all(request)
    name, now = find(request.path_params["pipeline"]).name, datetime.now(UTC)
    since = now - timedelta(hours=min(hours, 24 * 366))
    points = await in_thread(lambda: service.history.read_flow(name, since), "The history")
    return json_response({"pipeline": name, "at": now, "points": [[at, *flow] for at, flow in points]})


def _any() -> bool:
    return bool(current().streaming_pipelines)


async def _answer(probe: CachedProbe[Any]) -> Any:
    try:
        return await probe.get(_ANSWER_SECONDS)
    except TimeoutError:
        text = "A source or the state of this pipeline does not answer."
        raise later(503, "unavailable", "Not available", text, _ONE_FRESH_SECONDS) from None


def _read_states() -> list[dict[str, Any]]:
    pipelines = list(current().streaming_pipelines.values())
    return [{"pipeline": each.name, "step": _step(each), **_read_state(each)} for each in pipelines if each.step]


def _step(pipeline: StreamingPipeline) -> str | None:
    window = pipeline.window
    if window is not None:
        return "session" if window.kind == "session" else "window"
    return "join" if pipeline.join else "cdc" if pipeline.cdc else None


def _standing(pipeline: StreamingPipeline) -> dict[str, Any]:
    """Return what a pipeline is, and what its checkpoint says."""
    from weft.engine.streaming.activity import read_activity
    from weft.engine.streaming.checkpoint import Checkpoint
    from weft.engine.streaming.status import checkpoint_status

    status: dict[str, Any] = dict.fromkeys(("running", "committed", "planned", "last_batch", "location"))
    problem = activity = None
    try:
        checkpoint = Checkpoint.of(pipeline)
        status["location"] = checkpoint.location
        if checkpoint.is_open:
            status |= checkpoint_status(checkpoint, pipeline)
            activity = read_activity(checkpoint)
        else:
            problem = f"Its checkpoint is read by Spark: weft checkpoints show {pipeline.name}"
    except WeftError as error:
        problem = error.what
    return {
        "name": pipeline.name,
        "description": pipeline.description,
        "sources": [_place(each) for each in pipeline.sources],
        "targets": [_place(each) | {"mode": each.mode} for each in pipeline.targets],
        "step": _step(pipeline),
        "running": status["running"],
        "committed": status["committed"],
        "planned": status["planned"],
        "last_batch": status["last_batch"],
        "activity": activity,
        "problem": problem,
    }


def _place(end: Source | Target) -> dict[str, Any]:
    connection = end.connection
    name = connection if connection is None or isinstance(connection, str) else connection.name or connection.kind
    return {"name": end.name, "connection": name or "default"}


def read_one(pipeline: StreamingPipeline) -> dict[str, Any]:
    """Return all that is known of a pipeline here."""
    from weft.operate.redaction import clean

    sql = pipeline.transform_sql
    return {
        "at": datetime.now(UTC),
        **_standing(pipeline),
        "declared": pipeline.declared_at,
        "every_seconds": pipeline.every_seconds,
        "delivery": pipeline.delivery,
        "sql": None if sql is None else clean(sql, most=100_000),
        **_read_lag(pipeline),
        **_read_state(pipeline),
        **_read_mirrors(pipeline),
        "dead_letters": read_letters(pipeline),
    }


def _says_lag(standing: dict[str, Any]) -> bool:
    """Return whether the process that runs it, here or elsewhere, says its lag: it did of late."""
    activity = standing["activity"]
    return bool(activity and activity["lag"]) and datetime.now(UTC) - activity["at"] < _SAYS


def _look_at_lag(pipeline: StreamingPipeline) -> dict[str, int]:
    from weft.engine.streaming.checkpoint import Checkpoint
    from weft.engine.streaming.progress import SourceLag

    checkpoint = Checkpoint.of(pipeline)
    return SourceLag(pipeline.sources, checkpoint).now() if checkpoint.is_open else {}


def _read_lag(pipeline: StreamingPipeline) -> dict[str, Any]:
    from weft.engine.streaming.checkpoint import Checkpoint
    from weft.engine.streaming.progress import SourceLag
    from weft.engine.streaming.sources import show_position

    positions: dict[str, str] = {}
    lag: dict[str, int] = {}
    words: dict[str, str] = {}
    partitions: dict[str, dict[str, int]] = {}
    try:
        checkpoint = Checkpoint.of(pipeline)
        if checkpoint.is_open:
            for number, (source, position) in enumerate(
                zip(pipeline.sources, checkpoint.state().offsets, strict=False)
            ):
                positions[source.name] = show_position(position, checkpoint.source_log(number), source)
            progress = SourceLag(pipeline.sources, checkpoint)
            lag = progress.now()
            words = progress.in_words()
            partitions = progress.by_partition()
    except WeftError:  # the standing has the reason
        pass
    return {
        "lag": [
            {
                "source": each.name,
                "position": positions.get(each.name),
                "lag": lag.get(each.name),
                "words": words.get(each.name),
                "partitions": partitions.get(each.name),
            }
            for each in pipeline.sources
        ]
    }


def _read_state(pipeline: StreamingPipeline) -> dict[str, Any]:
    """Return what the window or join keeps, what of it waits, and what holds its watermark."""
    from weft.engine.streaming.checkpoint import Checkpoint
    from weft.engine.streaming.status import (
        current_state,
        refuse_without_state,
        states_of,
        waiting_in,
        watermark_status,
    )

    nothing: dict[str, Any] = {"state": None, "watermark": None, "waiting": [], "state_problem": None}
    if pipeline.step is None:
        return nothing
    try:
        refuse_without_state(pipeline)
        if not Checkpoint.of(pipeline).is_open:
            return nothing | {"state_problem": f"Its checkpoint is read by Spark: weft state why {pipeline.name}"}
        states = states_of(pipeline)
        with current_state(pipeline, f"It has one after its first rows: weft consume {pipeline.name}") as stored:
            watermark, waiting = watermark_status(pipeline, stored), waiting_in(pipeline, stored)
    except WeftError as error:
        return nothing | {"state_problem": str(error.what)}
    kept = {name: states[0][name] for name in ("batch", "windows", "rows", "oldest")}
    return nothing | {"state": kept, "watermark": watermark, "waiting": waiting[:_WAITING]}


def _read_mirrors(pipeline: StreamingPipeline) -> dict[str, Any]:
    """Return what the last comparison of each mirror with its source found."""
    from weft.engine.streaming.checkpoint import Checkpoint
    from weft.engine.streaming.checkpoint_files import Verified

    if pipeline.cdc is None:
        return {"verified": None}
    try:
        checkpoint = Checkpoint.of(pipeline)
        comparisons = Verified(checkpoint.home).all() if checkpoint.is_open else {}
    except (WeftError, OSError, ValueError):  # the standing has the reason
        comparisons = {}
    return {"verified": [{"target": name, **each} for name, each in comparisons.items()]}
