"""`/openapi.json`: every route with its parameters, bodies and answers, and the declared streams with their fields."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.operate.records import Status
from weft.server import consuming, webhooks
from weft.server.dead_letters import Chosen
from weft.server.model_actions import Backfill
from weft.server.overview import readable
from weft.server.quarantine import ChosenRows
from weft.server.rejected import UpTo
from weft.server.schemas import SCHEMAS, array, event_schema, ref
from weft.server.service import json_response
from weft.streams.declare import Stream
from weft.systems.dead_letter_store import STAGES

STREAM = "/api/v1/streams/{name}"
_JSON = "application/json"
_LINES = "application/x-ndjson"
_PROBLEM = "application/problem+json"
_Answer = str | dict[str, Any]
"""The name of a schema, or the content by media type."""

_WHOLE = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "A declared stream, its quarantine or its dead letters.",
    "schema": {"type": "string"},
}
_HISTORY = {
    "name": "history",
    "in": "query",
    "description": "With what was sampled lately, for a chart.",
    "schema": {"type": "boolean"},
}
_KEY = {"type": "http", "scheme": "bearer", "description": "A key of this service: weft_…"}
_TOKEN = {"type": "http", "scheme": "bearer", "description": "The token of a stream."}
_REASONS = {
    400: "The body is not JSON, or a header is malformed; `position` says where.",
    401: "A credential is missing or wrong.",
    403: "The key lacks the scope for this.",
    404: "There is nothing of that name; `hint` has the nearest one.",
    408: "The body came too slowly.",
    409: "Another state is in the way: the lease was lost, the pipeline runs already, or the run has ended.",
    410: "Retention has removed events after that offset.",
    413: "The body is too large; `limit` says how large it may be.",
    415: "The content type or coding is not known.",
    421: "This service answers under names of its own machine alone.",
    422: "An event or a parameter does not fit; `index` and `field` say which.",
    429: "Too many requests; `retry_after` says in how many seconds to come again.",
    431: "The headers are too large.",
    500: "It failed here. The log of the service has the reason under `request_id`.",
    503: "The database does not answer or cannot keep up; `retry_after` says when to come again.",
}
_HEADERS = {
    "Retry-After": "Seconds to wait.",
    "WWW-Authenticate": "What to send.",
    "X-Request-Id": "What the log of the service calls this request.",
}
_ACTION = "Needs a key with the scope admin for every stream; without keys there are no actions."
_ALWAYS = (421, 431, 500)
_CLOSED = (401, 403, 429, 503)
_OF_A_STREAM = (*_CLOSED, 404)
_WITH_BODY = (400, 408, 413, 415, 422)


async def openapi(request: Request) -> Response:
    """Answer with the document, with the streams that the caller may read."""
    streams, _ = await readable(request)
    return json_response(document(streams))


def document(streams: Sequence[Stream]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the service with these streams."""
    _, bodies = msgspec.json.schema_components(
        [consuming.Consume, consuming.Ack, consuming.Nack, consuming.Reset, Chosen, ChosenRows, Backfill, UpTo],
        ref_template="#/components/schemas/{name}",
    )
    paths = _paths()
    for stream in streams:
        paths[STREAM.format(name=stream.name)] = _path_of(stream)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Weft",
            "version": version("weft"),
            "description": "Durable streams of events over HTTP. Errors are problem details (RFC 9457).",
        },
        "servers": [{"url": "."}],
        "tags": [
            {"name": "streams", "description": "What there is, and events in."},
            {"name": "reading", "description": "Events out: live, by pages, or by consumers that acknowledge."},
            {"name": "pipelines", "description": "Pipelines, models, streaming pipelines and their runs."},
            {"name": "service", "description": "How the service itself is."},
        ],
        "paths": paths,
        "components": {
            "schemas": {
                **SCHEMAS,
                **bodies,
                **{f"Event.{stream.name}": event_schema(stream) for stream in streams},
            },
            "securitySchemes": {"key": _KEY, "stream": _TOKEN, **dict(map(_security_scheme, streams))},
            "headers": {
                name: {"description": text, "required": True, "schema": {"type": "string"}}
                for name, text in _HEADERS.items()
            },
        },
    }


def _paths() -> dict[str, Any]:
    text = {"type": "string"}
    since = {
        "description": "After this offset, from this time on, from the `start`, or with the last 100 (`-100`).",
        "type": "string",
    }
    live = {
        "type": "string",
        "description": "`id` is the offset, `event: stream.event`, `data` has stream and event."
        " `stream.lost`: retention removed events. `stream.rewound`: an older state was restored."
        " `stream.closing`: the service ends, or the key did.",
    }
    return {
        "/api/v1/streams": {
            "get": _operation(
                "listStreams",
                "List streams",
                "streams",
                "StreamList",
                (*_CLOSED, 422),
                parameters=[
                    _query("tag", array({"type": "string"}), "Only streams with this tag; with all of several.")
                ],
                about="Needs the scope read.",
            )
        },
        STREAM: {
            "parameters": [_NAME],
            "get": _show("getStream", "Show a stream and its size"),
            "post": _publish("publish", "Publish events", ref("Event")),
        },
        f"{STREAM}/subscribe": _reading(
            "get",
            "subscribe",
            "Follow a stream live (Server-Sent Events)",
            {"text/event-stream": {"schema": live}},
            422,
            parameters=[
                _query("since", since),
                _query("where", array(text), "Only events of which fields have values: action=click."),
                _query("ticket", text, "What `/ticket` gave, in place of a credential."),
                {"name": "Last-Event-ID", "in": "header", "schema": since, "description": "Goes before `since`."},
            ],
        ),
        f"{STREAM}/ticket": _reading(
            "post",
            "ticket",
            "Get a ticket for one subscription",
            "Ticket",
            status=201,
            about="For a browser's EventSource, which cannot send headers. It is good once, for some seconds.",
        ),
        f"{STREAM}/events": _reading(
            "get",
            "readEvents",
            "Read a page of events",
            "EventPage",
            410,
            422,
            parameters=[
                _query("after", _WHOLE, "The last offset seen; `next` of the page before."),
                _query("limit", _WHOLE | {"minimum": 1, "default": 100}),
            ],
        ),
        **{
            f"{STREAM}/{name}": _reading("post", name, summary, answer, *_WITH_BODY, *more, body=ref(name.title()))
            for name, summary, answer, more in (
                ("consume", "Take a batch under a lease", "Batch", (409, 410)),
                ("ack", "Acknowledge events", "Acknowledged", (409,)),
                ("nack", "Give events back", "Returned", (409,)),
                ("reset", "Move a consumer (needs the scope admin)", "Position", ()),
            )
        },
        f"{STREAM}/rejected": _reading(
            "get",
            "rejected",
            "Group dead letters and quarantined events by their reasons",
            "Rejected",
            422,
            about="Of the newest 2,000 of each.",
        ),
        f"{STREAM}/replay": _of_rejected(
            "replayRejected",
            "Publish rejected events to their streams again",
            "Events that are there already, or whose key another event has, are dropped, and counted. ",
        ),
        f"{STREAM}/purge": _of_rejected("purgeRejected", "Remove rejected events, from a quarantine or dead letters"),
        f"{STREAM}/history": _reading(
            "get",
            "streamHistory",
            "Show how a stream did in the last hours",
            "StreamHistory",
            422,
            parameters=[_query("hours", _WHOLE | {"minimum": 1, "default": 24})],
        ),
        f"{STREAM}/groups": _reading("get", "groups", "Show the consumers of a stream", "Groups"),
        "/api/v1/overview": _service(
            "overview",
            "Show how streams and pipelines stand",
            "Overview",
            (*_CLOSED, 422),
            parameters=[_HISTORY],
            about="Computed at most once a second. Pipelines are shown to those who may read every stream.",
        ),
        **_operations(),
        "/healthz": _service("healthz", "Whether the process lives", "Health"),
        "/readyz": {
            "get": _operation("readyz", "Whether the databases answer", "service", "Readiness", ())
            | {"responses": _responses(200, "Readiness", ()) | {"503": _answer("Not now.", "Readiness")}},
        },
        "/metrics": _service(
            "metrics",
            "Metrics for Prometheus",
            {"text/plain": {"schema": text}},
            _CLOSED,
            about="Needs the scope read for every stream.",
        ),
        "/openapi.json": _service("openapi", "This document", {_JSON: {"schema": {"type": "object"}}}, _CLOSED),
        "/": _service("dashboard", "A page that shows how everything stands", {"text/html": {"schema": text}}, (304,)),
        "/docs": _service("docs", "A page to try these requests", {"text/html": {"schema": text}}, (304,)),
        "/static/{file}": {
            "parameters": [{"name": "file", "in": "path", "required": True, "schema": text}],
            **_service("static", "What the pages are made of", {"*/*": {"schema": {}}}, (304, 404)),
        },
    }


def _operations() -> dict[str, Any]:
    """Return the paths of pipelines, runs and streaming pipelines."""
    text = {"type": "string"}
    statuses = {"type": "string", "enum": list(get_args(Status))}

    def path(
        name: str, summary: str, answer: str, parameter: str | None = None, *queries: dict[str, Any], about: str = ""
    ) -> dict[str, Any]:
        refusals = (*_CLOSED, 422, *(() if parameter is None else (404,)))
        about = f"Needs the scope read for every stream. {about}".strip()
        shared = {"name": parameter, "in": "path", "required": True, "schema": text}
        operation = _operation(
            name, summary, "pipelines", answer, refusals, parameters=list(queries) or None, about=about
        )
        return {**({} if parameter is None else {"parameters": [shared]}), "get": operation}

    def action(
        name: str, summary: str, parameter: str, status: int = 200, *refusals: int, **more: Any
    ) -> dict[str, Any]:
        shared = {"name": parameter, "in": "path", "required": True, "schema": text}
        codes = (*_CLOSED, 404, 422, *refusals)
        operation = _operation(name, summary, "pipelines", "Action", codes, status=status, about=_ACTION, **more)
        return {"parameters": [shared], "post": operation | {"security": [{"key": []}]}}

    def command(name: str, summary: str, body: str, planned: str) -> dict[str, Any]:
        """Return the path of an action that starts a command, or with `dry_run` says what it would do."""
        path = action(name, summary, "pipeline", 202, 409, *_WITH_BODY, body=ref(body))
        path["post"]["responses"]["200"] = _answer("What it would do: `dry_run`.", planned)
        return path

    def closed(
        name: str, summary: str, answer: str, *queries: dict[str, Any], parameter: str | None = None
    ) -> dict[str, Any]:
        operations = path(name, summary, answer, parameter, *queries)
        operations["get"] |= {"security": [{"key": []}], "description": _ACTION}
        return operations

    limit = _query("limit", _WHOLE | {"minimum": 1, "default": 50}, "At most 1,000.")
    refused = _answer(_REASONS[409], {_PROBLEM: {"schema": ref("Problem")}})
    plan = path("plan", "Show what has changed in a model since it was built", "ModelPlan", "pipeline")
    plan["get"]["responses"]["409"] = refused
    aside = path("quarantine", "Group the rows that targets rejected by their errors", "Quarantined", "pipeline")
    aside["get"]["responses"]["409"] = refused
    letter = path("letter", "Show a dead letter", "DeadLetter", "pipeline")
    letter["parameters"].append({"name": "letter_id", "in": "path", "required": True, "schema": text})
    letter["get"]["responses"]["409"] = refused
    return {
        "/api/v1/pipelines": path("pipelines", "List pipelines and models", "Pipelines"),
        "/api/v1/pipelines/{pipeline}": path(
            "pipeline", "Show a pipeline or model with its last runs", "PipelineDetails", "pipeline"
        ),
        "/api/v1/pipelines/{pipeline}/plan": plan,
        "/api/v1/pipelines/{pipeline}/quarantine": aside,
        "/api/v1/pipelines/{pipeline}/quarantine/replay": command(
            "replayRows", "Load rows of the quarantine once more", "ChosenRows", "Planned"
        ),
        "/api/v1/pipelines/{pipeline}/quarantine/purge": command(
            "purgeRows", "Remove rows of the quarantine for good", "ChosenRows", "Planned"
        ),
        "/api/v1/pipelines/{pipeline}/backfill": command(
            "backfill", "Build again what came to a model in a range of time", "Backfill", "BackfillPlan"
        ),
        "/api/v1/runs": path(
            "runs",
            "List runs, the newest first",
            "Runs",
            None,
            _query("pipeline", text),
            _query("status", statuses),
            limit,
        ),
        "/api/v1/runs/{run_id}": path("run", "Show every attempt at a run", "RunDetails", "run_id"),
        "/api/v1/runs/{run_id}/log": path(
            "runLog",
            "Read the log of a run",
            "RunLog",
            "run_id",
            _query("attempt", _WHOLE | {"minimum": 1}, "Of this attempt; otherwise of the last."),
            _query("after", _WHOLE, "`next` of the answer before; otherwise the end of the log."),
            about="The log of a run is on the machine that ran it.",
        ),
        "/api/v1/pipelines/{pipeline}/run": action("runNow", "Run a pipeline or model now", "pipeline", 202, 409),
        "/api/v1/pipelines/{pipeline}/pause": action("pause", "Stop following its schedule", "pipeline"),
        "/api/v1/pipelines/{pipeline}/resume": action("resume", "Follow its schedule again", "pipeline"),
        "/api/v1/runs/{run_id}/cancel": action("cancel", "End a run", "run_id", 200, 409),
        "/api/v1/audit": closed(
            "audit",
            "List the last actions, the newest first",
            "Audit",
            _query("limit", _WHOLE | {"minimum": 1, "default": 50}, "At most 200."),
            _query("before", {"type": "string", "format": "date-time"}, "Only those before."),
            _query("key", text, "Of the key with this id or name."),
            _query("action", text, "Such as `run` or `dlq replay`."),
            _query("object", text, "A pipeline or a run."),
        ),
        "/api/v1/audit/{action}": closed("audited", "Show an action, and how it ended", "Audited", parameter="action"),
        "/api/v1/me": _service("me", "Show what the key of a request may do", "Me", (*_CLOSED, 422)),
        "/api/v1/dead-letters": path("deadLetters", "List what was put aside", "DeadLetters"),
        "/api/v1/dead-letters/{pipeline}": path(
            "pipelineLetters",
            "Show the dead letters of a streaming pipeline, by error and the newest",
            "PipelineLetters",
            "pipeline",
            _query("error", text, "Only letters with this text in their error."),
            _query("stage", {"enum": list(STAGES)}),
            _query("limit", _WHOLE | {"minimum": 1, "default": 20}, "At most 100."),
            about="Of 10,000 letters.",
        ),
        "/api/v1/dead-letters/{pipeline}/{letter_id}": letter,
        "/api/v1/dead-letters/{pipeline}/replay": command(
            "replay", "Run dead letters through their pipeline once more", "Chosen", "Planned"
        ),
        "/api/v1/dead-letters/{pipeline}/purge": command("purge", "Remove dead letters for good", "Chosen", "Planned"),
        "/api/v1/streaming": path("streaming", "List streaming pipelines", "StreamingPipelines"),
        "/api/v1/streaming/{pipeline}": path(
            "streamingPipeline",
            "Show a streaming pipeline with its lag, state and dead letters",
            "StreamingPipelineDetails",
            "pipeline",
        ),
        "/api/v1/streaming/{pipeline}/history": path(
            "streamingHistory",
            "Show how a streaming pipeline did in the last hours",
            "StreamingHistory",
            "pipeline",
            _query("hours", _WHOLE | {"minimum": 1, "default": 24}),
        ),
        "/api/v1/models/{model}": path(
            "model", "Show whether a model is fresh, and where its columns come from", "ModelDetails", "model"
        ),
        "/api/v1/state": path("states", "List what windows and joins keep, and what holds their watermarks", "States"),
        "/api/v1/scheduler": path("scheduler", "Show who leads, what runs, waits and is due next", "Schedule"),
        "/api/v1/changes": path(
            "changes",
            "Show what began to fail, recovered, was cancelled or paused, or started within a day",
            "Changes",
            about="By the run log, of the last 500 attempts that failed. Actions over HTTP are in `/api/v1/audit`.",
        ),
        "/api/v1/processes": path(
            "processes",
            "Show which services, workers, schedulers and streaming pipelines run, and which are silent",
            "Processes",
            about="A streaming pipeline is shown if its checkpoint is on the machine of the service.",
        ),
        "/api/v1/graph": path("graph", "Show what flows from where to where", "Graph"),
    }


def _reading(method: str, name: str, summary: str, answer: _Answer, *refusals: int, **more: Any) -> dict[str, Any]:
    """Return a path below that of a stream."""
    operation = _operation(name, summary, "reading", answer, (*_OF_A_STREAM, *refusals), **more)
    return {"parameters": [_NAME], method: operation}


def _of_rejected(name: str, summary: str, about: str = "") -> dict[str, Any]:
    """Return a path that does something with rejected events."""
    more: dict[str, Any] = {"status": 202, "body": ref("UpTo"), "about": f"{about}{_ACTION}"}
    path = _reading("post", name, summary, "Action", *_WITH_BODY, 409, **more)
    path["post"]["responses"]["200"] = _answer("What it would do: `dry_run`.", "RejectedPlan")
    path["post"]["security"] = [{"key": []}]
    return path


def _service(name: str, summary: str, answer: _Answer, refusals: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    """Return a path of the service itself."""
    return {"get": _operation(name, summary, "service", answer, refusals, **more)}


def _path_of(stream: Stream) -> dict[str, Any]:
    """Return a stream's own path: the fields of its events, and the credentials that open it."""
    details = _show(f"getStream.{stream.name}", f"Show {stream.name}")
    publish = _publish(f"publish.{stream.name}", f"Publish to {stream.name}", ref(f"Event.{stream.name}"))
    if stream.description:
        publish["description"] = stream.description
    own: dict[str, list[str]] = {} if stream.auth is None else {_security_scheme(stream)[0]: []}
    security = [own, {"key": []}]
    return {"get": details | {"security": security}, "post": publish | {"security": security}}


def _show(name: str, summary: str) -> dict[str, Any]:
    return _operation(name, summary, "streams", "StreamDetails", (*_OF_A_STREAM, 422), parameters=[_HISTORY])


def _publish(operation: str, summary: str, event: dict[str, Any]) -> dict[str, Any]:
    published = _operation(
        operation,
        summary,
        "streams",
        "Published",
        (*_OF_A_STREAM, *_WITH_BODY),
        status=202,
        parameters=[
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "The same events under the same key are stored once; others are refused with 422.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255},
            },
            {
                "name": "Content-Encoding",
                "in": "header",
                "schema": {"type": "string", "enum": ["identity", "gzip", "zstd"]},
            },
            {
                "name": "traceparent",
                "in": "header",
                "description": "The trace of the publish, where the service traces. What cannot be read is ignored.",
                "schema": {"type": "string"},
            },
        ],
        about="Answers once the events are durable. Needs the scope write.",
    )
    published["requestBody"] = {
        "required": True,
        "content": {
            _JSON: {"schema": {"anyOf": [event, array(event)]}},
            _LINES: {"schema": {"type": "string", "description": "An event a line."}},
        },
    }
    return published


def _operation(
    name: str,
    summary: str,
    tag: str,
    answer: _Answer,
    refusals: tuple[int, ...],
    *,
    status: int = 200,
    body: dict[str, Any] | None = None,
    parameters: list[dict[str, Any]] | None = None,
    about: str | None = None,
) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "tags": [tag]}
    if about:
        operation["description"] = about
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    if 401 in refusals:
        operation["security"] = [{}, {"key": []}, {"stream": []}]
    operation["responses"] = _responses(status, answer, refusals)
    return operation


def _responses(status: int, answer: _Answer, refusals: tuple[int, ...]) -> dict[str, Any]:
    responses = {str(status): _answer("Done.", answer)}
    for refusal in sorted({*refusals, *_ALWAYS}):
        if refusal == 304:
            responses["304"] = _answer("As it was.", {})
            continue
        responses[str(refusal)] = _answer(_REASONS[refusal], {_PROBLEM: {"schema": ref("Problem")}})
        header = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}.get(refusal)
        if header is not None:
            responses[str(refusal)]["headers"][header] = {"$ref": f"#/components/headers/{header}"}
    return responses


def _answer(description: str, answer: _Answer) -> dict[str, Any]:
    content = {_JSON: {"schema": ref(answer)}} if isinstance(answer, str) else answer
    headers = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    return {"description": description, "headers": headers, **({"content": content} if content else {})}


def _query(name: str, schema: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    parameter = {"name": name, "in": "query", "schema": schema}
    return parameter | ({"description": description} if description else {})


def _security_scheme(stream: Stream) -> tuple[str, dict[str, Any]]:
    """Return how a stream's own credential is sent, by its name in the document."""
    auth = stream.auth or {}
    if auth.get("type") == "api_key":
        return f"header.{auth['header'].lower()}", {"type": "apiKey", "in": "header", "name": auth["header"]}
    if auth.get("type") == "hmac":
        text = f"A webhook's signature, with the headers {webhooks.ID} and {webhooks.TIMESTAMP}."
        return "webhook", {"type": "apiKey", "in": "header", "name": webhooks.SIGNATURE, "description": text}
    return "stream", _TOKEN
