"""The service as an ASGI application."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match
from starlette.routing import Route as PlainRoute

from weft.server import (
    actions,
    changes,
    consuming,
    cors,
    dead_letters,
    graph,
    health,
    metrics,
    model_actions,
    models,
    openapi,
    overview,
    pages,
    pipelines,
    processes,
    quarantine,
    rejected,
    schedule,
    streaming,
)
from weft.server.access import opened_by
from weft.server.audit import Audit
from weft.server.consuming import flag, moment, query, whole
from weft.server.filters import filter_of
from weft.server.limits import Limits
from weft.server.live import EventStream
from weft.server.problems import Problem
from weft.server.publishing import publish
from weft.server.requests import QuickRequest, Requests
from weft.server.run_log import in_thread
from weft.server.service import Service, json_response, load_modules, service_of
from weft.server.tickets import SECONDS as TICKET_SECONDS
from weft.streams.declare import Stream
from weft.streams.events import with_texts
from weft.streams.rejected import owners, places
from weft.streams.retention import aware
from weft.streams.runtime import OpenedStream

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_STREAMS = "/api/v1/streams"


def app(
    modules: Iterable[str] = (),
    *,
    limits: Limits | None = None,
    runtime: str | Path | None = None,
    guarded: bool = False,
    origins: Iterable[str] | None = None,
) -> Starlette:
    """Return the service for the streams of this project: those of `modules` and of the modules that weft.toml lists.

    Mount it, or give it to any ASGI server; `weft serve` does the latter. `limits` are otherwise those of weft.toml.
    Several processes share rate limits and tickets through the folder `runtime`. `guarded` refuses requests for other
    names than those of this machine while a stream is open: for a service that others should not reach. Pages of
    `origins` (otherwise those of weft.toml) may use it from a browser.
    """
    allowed, modules = cors.checked(origins), tuple(modules)
    service = Service(limits, runtime, load_modules(modules))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Before the first request needs them: to open their database takes a while.
        await service.access.keys.refresh()
        # In a thread of its own: a database that hangs does not delay the start.
        close = partial(Audit().close_abandoned, datetime.now(UTC))
        threading.Thread(target=close, name="weft-audit", daemon=True).start()
        service.history.begin()
        try:
            yield
        finally:
            await service.stop()

    stream = f"{_STREAMS}/{{name}}"
    publishing = Route(stream, publish, methods=["POST"])
    application = _App(
        service,
        Requests(_publish, guarded=guarded, origins=allowed),
        publishing,
        routes=[
            publishing,
            Route(f"{stream}/consume", consuming.consume, methods=["POST"]),
            Route(f"{stream}/ack", consuming.ack, methods=["POST"]),
            Route(f"{stream}/nack", consuming.nack, methods=["POST"]),
            Route(f"{stream}/reset", consuming.reset, methods=["POST"]),
            Route(f"{stream}/groups", consuming.groups),
            Route(f"{stream}/events", consuming.events),
            Route(f"{stream}/rejected", rejected.rejected),
            Route(f"{stream}/replay", rejected.replay, methods=["POST"]),
            Route(f"{stream}/purge", rejected.purge, methods=["POST"]),
            Route(f"{stream}/history", stream_history),
            Route(f"{stream}/subscribe", subscribe),
            Route(f"{stream}/ticket", ticket, methods=["POST"]),
            Route(stream, details),
            Route(_STREAMS, streams),
            Route("/api/v1/overview", overview.overview),
            Route("/api/v1/pipelines", pipelines.pipelines),
            Route("/api/v1/pipelines/{pipeline}", pipelines.pipeline),
            Route("/api/v1/pipelines/{pipeline}/run", actions.run, methods=["POST"]),
            Route("/api/v1/pipelines/{pipeline}/pause", actions.pause, methods=["POST"]),
            Route("/api/v1/pipelines/{pipeline}/resume", actions.resume, methods=["POST"]),
            Route("/api/v1/pipelines/{pipeline}/quarantine", quarantine.quarantine),
            Route("/api/v1/pipelines/{pipeline}/quarantine/replay", quarantine.replay, methods=["POST"]),
            Route("/api/v1/pipelines/{pipeline}/quarantine/purge", quarantine.purge, methods=["POST"]),
            Route("/api/v1/pipelines/{pipeline}/plan", model_actions.plan),
            Route("/api/v1/pipelines/{pipeline}/backfill", model_actions.backfill, methods=["POST"]),
            Route("/api/v1/runs", pipelines.runs),
            Route("/api/v1/runs/{run_id}", pipelines.run),
            Route("/api/v1/runs/{run_id}/log", pipelines.log),
            Route("/api/v1/runs/{run_id}/cancel", actions.cancel, methods=["POST"]),
            Route("/api/v1/audit", actions.audit),
            Route("/api/v1/audit/{action}", actions.audited),
            Route("/api/v1/me", actions.me),
            Route("/api/v1/dead-letters", dead_letters.dead_letters),
            Route("/api/v1/dead-letters/{pipeline}", dead_letters.pipeline_letters),
            Route("/api/v1/dead-letters/{pipeline}/replay", dead_letters.replay, methods=["POST"]),
            Route("/api/v1/dead-letters/{pipeline}/purge", dead_letters.purge, methods=["POST"]),
            Route("/api/v1/dead-letters/{pipeline}/{letter_id}", dead_letters.letter),
            Route("/api/v1/streaming", streaming.streaming_pipelines),
            Route("/api/v1/streaming/{pipeline}", streaming.streaming_pipeline),
            Route("/api/v1/streaming/{pipeline}/history", streaming.streaming_history),
            Route("/api/v1/models/{model}", models.model),
            Route("/api/v1/state", streaming.states),
            Route("/api/v1/scheduler", schedule.scheduler),
            Route("/api/v1/changes", changes.changes),
            Route("/api/v1/processes", processes.processes),
            Route("/api/v1/graph", graph.graph),
            Route("/healthz", health.healthz),
            Route("/readyz", health.readyz),
            Route("/metrics", metrics.metrics),
            Route("/openapi.json", openapi.openapi),
            Route("/", partial(pages.page, name="dashboard.html")),
            Route("/docs", partial(pages.page, name="docs.html")),
            Route("/docs/", lambda _: RedirectResponse("../docs"), include_in_schema=False),
            Route("/static/{file}", pages.page),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    application.router.redirect_slashes = False  # a redirect would name any host that the client names
    application.state.overview = overview.Overview()
    application.state.streaming = streaming.Streaming()
    application.state.dead_letters = dead_letters.DeadLetterCache()
    application.state.commands = actions.Commands(modules)
    application.state.models = models.Models()
    application.state.plans = model_actions.Plans()
    application.state.scheduler = schedule.schedule_probe()
    application.state.changes = changes.changes_probe()
    application.state.processes = processes.processes_probe()
    application.state.health = health.Health()
    application.state.metrics = metrics.ServerMetrics()
    application.add_middleware(Requests, guarded=guarded, origins=allowed)
    return application


class Route(PlainRoute):
    """A route whose names may have slashes, written `%2F`: those of pipelines do. Servers decode a path as a whole."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        raw = scope.get("raw_path", b"")
        if b"%2f" not in raw.lower():
            return super().matches(scope)
        # No name has the character 0.
        parts = [unquote(part).replace("/", "\0") for part in raw.decode("latin-1").rstrip("/").split("/")]
        match, found = super().matches({**scope, "path": "/".join(parts)})
        for name, value in found.get("path_params", {}).items():
            found["path_params"][name] = value.replace("\0", "/")
        return match, found


class _App(Starlette):
    """With a shortcut for publishes: the search for a route and four layers of middleware take a fifth of one."""

    def __init__(self, service: Service, publishing: ASGIApp, route: Route, **options: Any) -> None:
        super().__init__(**options)
        self.state.service = service
        self._history = service.history
        self._publishing = publishing
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._history.begin()
        if scope["type"] == "http" and scope["path"].endswith("/"):
            # Forgiven, but not where relative links of a page would lead elsewhere. A redirect would lose a body.
            path = scope["path"].rstrip("/")
            if path.removeprefix(scope.get("root_path", "")) not in ("", "/docs"):
                scope["path"] = path
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            path = scope["path"]
            name = path[len(_STREAMS) + 1 :]
            if name and "/" not in name and path.startswith(f"{_STREAMS}/"):
                scope.update(app=self, route=self._route, path_params={"name": name})
                await self._publishing(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


async def _publish(scope: Scope, receive: Receive, send: Send) -> None:
    answer = await publish(QuickRequest(scope, receive, send))
    await answer(scope, receive, send)


async def streams(request: Request) -> Response:
    """List every declared stream that the caller may read; `?tag=a&tag=b`: those with all of these tags."""
    query(request, "tag", repeated="tag")
    tags = set(request.query_params.getlist("tag"))
    readable = [each for each in await service_of(request).access.readable(request) if tags <= set(each.tags)]
    return json_response({"streams": [_described(stream) for stream in readable], "count": len(readable)})


async def details(request: Request) -> Response:
    """Show a stream, its size, and where its rejected events go; `?history=true`: with what was sampled of late."""
    with_history = flag(query(request, "history"), "history")
    service = service_of(request)
    ready = await service.open(request, "read", to_read=True)
    log, stream = ready.log, ready.stream

    def read() -> dict[str, Any]:
        columns = {name: str(kind) for name, kind in log.fields(fresh=True).items()}
        counts = {"row_count": log.count(), "size_bytes": log.size(), **overview.rejected_counts(stream)}
        state: dict[str, Any] = {"columns": columns, **counts, "head": log.head(), "floor": log.floor()}
        state |= {"published": log.published(), "tail": overview.tail_of(log), "at": datetime.now(UTC)}
        return with_texts(state, "head", "floor")

    letters, misfits = places(stream)
    return json_response(
        _described(stream)
        | {
            "retention": stream.retention,
            "on_schema_drift": stream.on_schema_drift,
            "dead_letter_stream": None if letters is None else letters.name,
            "quarantine_stream": None if misfits is None else misfits.name,
            "holds_rejected_of": [each.name for each in owners(stream.name)],
        }
        | await ready.hub.in_thread(read)
        | ({"history": service.history.of(stream)} if with_history else {})
    )


async def stream_history(request: Request) -> Response:
    """Show how a stream did in the last hours, by what services stored."""
    parameters = query(request, "hours")
    hours = whole(parameters.get("hours", "24"), "hours", 1)
    service = service_of(request)
    stream = (await service.open(request, "read", to_read=True)).stream
    now = datetime.now(UTC)
    since = now - timedelta(hours=min(hours, 24 * 366))
    points = await in_thread(lambda: service.history.read(stream, since), "The history")
    return json_response({"stream": stream.name, "at": now, "points": points})


def _described(stream: Stream) -> dict[str, Any]:
    return {
        "name": stream.name,
        "schema": stream.schema,
        "description": stream.description,
        "tags": list(stream.tags),
        "owner": stream.owner,
        "fields": {name: str(kind) for name, kind in stream.fields.items()},
        "validate_schema": stream.validate_schema,
        "auth": None if stream.auth is None else stream.auth["type"],
        "rate_limit": stream.rate_limit,
    }


async def subscribe(request: Request) -> ASGIApp:
    """Send events as they are published, as Server-Sent Events."""
    service = service_of(request)
    ready = await service.open(request, "read", ticket=request.query_params.get("ticket"), to_read=True)
    wheres = request.query_params.getlist("where")
    parameters = query(request, "since", "where", "ticket", repeated="where")
    # A browser that comes back sends a header that is newer than its address.
    since = request.headers.get("last-event-id") or parameters.get("since")
    position = await ready.hub.in_thread(_position, ready, since)
    resumes = "last-event-id" in request.headers
    accepts = await ready.hub.in_thread(partial(filter_of, ready, wheres, resumes=resumes))
    if request.method == "HEAD":  # its answer has an end
        return Response(media_type="text/event-stream")
    ended = partial(service.access.ended, opened_by(request))
    answer = EventStream(service.feeds, ready, position, accepts, ended)
    counts: metrics.ServerMetrics = request.app.state.metrics
    return counts.following(ready.stream.name, answer)


async def ticket(request: Request) -> Response:
    """Issue a ticket, with which a browser's EventSource subscribes: it cannot send a credential."""
    service = service_of(request)
    ready = await service.open(request, "read", to_read=True)
    query(request)
    issued = await service.access.issue_ticket(ready.stream, opened_by(request))
    return json_response({"stream": ready.stream.name, "ticket": issued, "expires_in": TICKET_SECONDS}, 201)


def _position(ready: OpenedStream, since: str | None) -> int:
    log = ready.log
    if since is None:
        return log.head()
    if since == "start":
        return log.floor()
    if since[:1] == "-" and since[1:].isdigit():
        first = log.nth_last(whole(since[1:], "since", 1))
        return log.floor() if first is None else first - 1
    if since.isdigit():
        return whole(since, "since", 0)
    return log.first_since(aware(moment(since, "since", "'start', an offset or "))) - 1


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind, title = {404: ("not-found", "Not found"), 405: ("method", "Method not allowed")}.get(
        error.status_code, ("http", "Refused")
    )
    text = f"{request.method} {request.url.path[:200]} is not served here."
    headers = dict(error.headers or {})
    if error.status_code == 405:  # several routes have one path, and Starlette names the methods of the first
        routes = [each for each in request.app.routes if isinstance(each, Route)]
        matching = [each for each in routes if each.matches(request.scope)[0] is not Match.NONE]
        headers["Allow"] = ", ".join(sorted({method for each in matching for method in each.methods or ()}))
    problem = Problem(error.status_code, kind, title, text, headers=headers)
    return problem.response(request.scope["weft.request_id"])
