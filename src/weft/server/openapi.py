"""`/openapi.json`: every route with its parameters, bodies and answers, and the declared streams with their fields."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.server import consuming, webhooks
from weft.server.overview import readable
from weft.server.schemas import SCHEMAS, array, event_schema, ref
from weft.server.service import json_response
from weft.streams.declare import Stream

STREAM = "/api/v1/streams/{name}"
_JSON = "application/json"
_LINES = "application/x-ndjson"
_PROBLEM = "application/problem+json"

_WHOLE = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "A declared stream, its quarantine or its dead letters.",
    "schema": {"type": "string"},
}
_REASONS = {
    400: "The body is not JSON, or a header is malformed; `position` says where.",
    401: "A credential is missing or wrong.",
    403: "The key has not the scope for this.",
    404: "There is no such stream; `hint` has the nearest name.",
    408: "The body came too slowly.",
    409: "The lease was lost: somebody else may have the events by now.",
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
_ALWAYS = (421, 431, 500)
_CLOSED = (401, 403, 429, 503)
_OF_A_STREAM = (*_CLOSED, 404)
_WITH_BODY = (400, 408, 413, 415, 422)


async def openapi(request: Request) -> Response:
    """The document, with the streams that the caller may read."""
    streams, _ = await readable(request)
    return json_response(document(streams))


def document(streams: Iterable[Stream]) -> dict[str, Any]:
    """OpenAPI 3.1 of the service with these streams."""
    streams = list(streams)
    _, bodies = msgspec.json.schema_components(
        [consuming.Consume, consuming.Ack, consuming.Nack, consuming.Reset], ref_template="#/components/schemas/{name}"
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
            {"name": "service", "description": "How the service itself is."},
        ],
        "paths": paths,
        "components": {
            "schemas": {
                **SCHEMAS,
                **bodies,
                **{f"Event.{stream.name}": event_schema(stream) for stream in streams},
            },
            "securitySchemes": _security_schemes(streams),
            "headers": {
                "Retry-After": {"description": "Seconds to wait.", "required": True, "schema": {"type": "string"}},
                "WWW-Authenticate": {"description": "What to send.", "required": True, "schema": {"type": "string"}},
                "X-Request-Id": {
                    "description": "What the log of the service calls this request.",
                    "required": True,
                    "schema": {"type": "string"},
                },
            },
        },
    }


def _paths() -> dict[str, Any]:
    read = "Needs the scope read."
    since = {"description": "After this offset, from this time on, or from the `start`.", "type": "string"}
    return {
        "/api/v1/streams": {
            "get": _operation("listStreams", "List streams", "streams", 200, "StreamList", (*_CLOSED, 422), about=read)
        },
        STREAM: {
            "parameters": [_NAME],
            "get": _operation("getStream", "Show a stream and its size", "streams", 200, "StreamDetails", _OF_A_STREAM),
            "post": _publish("publish", "Publish events", ref("Event")),
        },
        f"{STREAM}/subscribe": {
            "parameters": [_NAME],
            "get": _operation(
                "subscribe",
                "Follow a stream live (Server-Sent Events)",
                "reading",
                200,
                {
                    "text/event-stream": {
                        "schema": {
                            "type": "string",
                            "description": "`id` is the offset, `event: stream.event`, `data` has stream and event."
                            " `stream.lost`: retention removed events. `stream.rewound`: an older state was restored."
                            " `stream.closing`: the service ends, or the key did.",
                        }
                    }
                },
                (*_OF_A_STREAM, 422),
                parameters=[
                    _query("since", since),
                    _query(
                        "where", array({"type": "string"}), "Only events of which fields have values: action=click."
                    ),
                    _query("ticket", {"type": "string"}, "What `/ticket` gave, in place of a credential."),
                    {"name": "Last-Event-ID", "in": "header", "schema": since, "description": "Goes before `since`."},
                ],
            ),
        },
        f"{STREAM}/ticket": {
            "parameters": [_NAME],
            "post": _operation(
                "ticket",
                "Get a ticket for one subscription",
                "reading",
                201,
                "Ticket",
                _OF_A_STREAM,
                about="For a browser's EventSource, which cannot send headers. It is good once, for some seconds.",
            ),
        },
        f"{STREAM}/events": {
            "parameters": [_NAME],
            "get": _operation(
                "readEvents",
                "Read a page of events",
                "reading",
                200,
                "EventPage",
                (*_OF_A_STREAM, 410, 422),
                parameters=[
                    _query("after", _WHOLE, "The last offset seen; `next` of the page before."),
                    _query("limit", _WHOLE | {"minimum": 1, "default": 100}),
                ],
            ),
        },
        **{
            f"{STREAM}/{name}": {
                "parameters": [_NAME],
                "post": _operation(
                    name, summary, "reading", 200, answer, (*_OF_A_STREAM, *_WITH_BODY, *more), body=ref(name.title())
                ),
            }
            for name, summary, answer, more in (
                ("consume", "Take a batch under a lease", "Batch", (409, 410)),
                ("ack", "Acknowledge events", "Acknowledged", (409,)),
                ("nack", "Give events back", "Returned", (409,)),
                ("reset", "Move a consumer (needs the scope admin)", "Position", ()),
            )
        },
        f"{STREAM}/groups": {
            "parameters": [_NAME],
            "get": _operation("groups", "Show the consumers of a stream", "reading", 200, "Groups", _OF_A_STREAM),
        },
        "/api/v1/overview": {
            "get": _operation(
                "overview",
                "Show how streams and pipelines stand",
                "service",
                200,
                "Overview",
                (*_CLOSED, 422),
                parameters=[
                    _query("history", {"type": "boolean"}, "With what was seen published lately, for a chart.")
                ],
                about="Computed at most once a second. Pipelines are shown to those who may read every stream.",
            )
        },
        "/healthz": {"get": _operation("healthz", "Whether the process lives", "service", 200, "Health", ())},
        "/readyz": {
            "get": _operation("readyz", "Whether the databases answer", "service", 200, "Readiness", ())
            | {"responses": _responses(200, "Readiness", ()) | {"503": _answer("Not now.", "Readiness")}},
        },
        "/metrics": {
            "get": _operation(
                "metrics",
                "Metrics for Prometheus",
                "service",
                200,
                {"text/plain": {"schema": {"type": "string"}}},
                _CLOSED,
                about="Needs the scope read for every stream.",
            )
        },
        "/openapi.json": {
            "get": _operation(
                "openapi", "This document", "service", 200, {_JSON: {"schema": {"type": "object"}}}, _CLOSED
            )
        },
        **{
            path: {
                "get": _operation(
                    operation, summary, "service", 200, {"text/html": {"schema": {"type": "string"}}}, (304,)
                )
            }
            for path, operation, summary in (
                ("/", "dashboard", "A page that shows how everything stands"),
                ("/docs", "docs", "A page to try these requests"),
            )
        },
        "/static/{file}": {
            "parameters": [{"name": "file", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": _operation(
                "static", "What the pages are made of", "service", 200, {"*/*": {"schema": {}}}, (304, 404)
            ),
        },
    }


def _path_of(stream: Stream) -> dict[str, Any]:
    """A stream's own path: what its events are made of, and what opens it."""
    details = _operation(
        f"getStream.{stream.name}", f"Show {stream.name}", "streams", 200, "StreamDetails", _OF_A_STREAM
    )
    publish = _publish(f"publish.{stream.name}", f"Publish to {stream.name}", ref(f"Event.{stream.name}"))
    if stream.description:
        publish["description"] = stream.description
    own: dict[str, list[str]] = {} if stream.auth is None else {_scheme_of(stream): []}
    security = [own, {"key": []}]
    return {"get": details | {"security": security}, "post": publish | {"security": security}}


def _publish(operation: str, summary: str, event: dict[str, Any]) -> dict[str, Any]:
    made = _operation(
        operation,
        summary,
        "streams",
        202,
        "Published",
        (*_OF_A_STREAM, *_WITH_BODY),
        parameters=[
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "A publish with a key that was seen is not stored again.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255},
            },
            {
                "name": "Content-Encoding",
                "in": "header",
                "schema": {"type": "string", "enum": ["identity", "gzip", "zstd"]},
            },
        ],
        about="Answers once the events are durable. Needs the scope write.",
    )
    made["requestBody"] = {
        "required": True,
        "content": {
            _JSON: {"schema": {"anyOf": [event, array(event)]}},
            _LINES: {"schema": {"type": "string", "description": "An event a line."}},
        },
    }
    return made


def _operation(
    operation: str,
    summary: str,
    tag: str,
    status: int,
    answer: str | dict[str, Any],
    refusals: tuple[int, ...],
    *,
    body: dict[str, Any] | None = None,
    parameters: list[dict[str, Any]] | None = None,
    about: str | None = None,
) -> dict[str, Any]:
    made: dict[str, Any] = {"operationId": operation, "summary": summary, "tags": [tag]}
    if about:
        made["description"] = about
    if parameters:
        made["parameters"] = parameters
    if body is not None:
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    if 401 in refusals:
        made["security"] = [{}, {"key": []}, {"stream": []}]
    made["responses"] = _responses(status, answer, refusals)
    return made


def _responses(status: int, answer: str | dict[str, Any], refusals: tuple[int, ...]) -> dict[str, Any]:
    made = {str(status): _answer("Done.", answer)}
    for refusal in sorted({*refusals, *_ALWAYS}):
        if refusal == 304:
            made["304"] = _answer("As it was.", {})
            continue
        made[str(refusal)] = _answer(_REASONS[refusal], {_PROBLEM: {"schema": ref("Problem")}})
        header = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}.get(refusal)
        if header is not None:
            made[str(refusal)]["headers"][header] = {"$ref": f"#/components/headers/{header}"}
    return made


def _answer(description: str, answer: str | dict[str, Any]) -> dict[str, Any]:
    content = {_JSON: {"schema": ref(answer)}} if isinstance(answer, str) else answer
    headers = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    return {"description": description, "headers": headers, **({"content": content} if content else {})}


def _query(name: str, schema: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    made = {"name": name, "in": "query", "schema": schema}
    return made | ({"description": description} if description else {})


def _security_schemes(streams: Iterable[Stream]) -> dict[str, Any]:
    schemes: dict[str, Any] = {
        "key": {"type": "http", "scheme": "bearer", "description": "A key of this service: weft_…"},
        "stream": {"type": "http", "scheme": "bearer", "description": "The token of a stream."},
    }
    for stream in streams:
        auth = stream.auth or {}
        if auth.get("type") == "api_key":
            schemes[_scheme_of(stream)] = {"type": "apiKey", "in": "header", "name": auth["header"]}
        elif auth.get("type") == "hmac":
            about = f"A webhook's signature, with the headers {webhooks.ID} and {webhooks.TIMESTAMP}."
            schemes[_scheme_of(stream)] = {
                "type": "apiKey",
                "in": "header",
                "name": webhooks.SIGNATURE,
                "description": about,
            }
    return schemes


def _scheme_of(stream: Stream) -> str:
    auth = stream.auth or {}
    if auth.get("type") == "api_key":
        return f"header.{auth['header'].lower()}"
    return "webhook" if auth.get("type") == "hmac" else "stream"
