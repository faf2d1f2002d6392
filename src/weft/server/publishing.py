"""`POST /api/v1/streams/{name}`: events in, an answer once they are durable."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft import tracing
from weft.server import bodies
from weft.server.access import webhook_id
from weft.server.consuming import query
from weft.server.problems import Problem
from weft.server.service import json_response, service_of
from weft.streams.encode import keys_of
from weft.streams.events import with_texts
from weft.streams.publishing import KEY_CHARACTERS, publish_to
from weft.streams.runtime import OpenedStream
from weft.types import from_json


async def publish(request: Request) -> Response:
    """Publish one event, an array, or a line each."""
    service = service_of(request)
    ready = await service.open(request, "write")
    if request.scope["query_string"]:  # to parse an empty one takes time
        query(request)
    headers = request.headers
    key, delivery = headers.get("idempotency-key"), webhook_id(request)
    if key is not None and len({value for name, value in request.scope["headers"] if name == b"idempotency-key"}) > 1:
        raise Problem(400, "idempotency-key", "Malformed header", "There are two different headers Idempotency-Key.")
    if delivery is not None and key not in (None, delivery):
        # The signature does not cover this key: the same delivery under another one would be stored again.
        text = "The webhook-id is the key of a signed request. Send no Idempotency-Key, or the same."
        raise Problem(400, "idempotency-key", "Malformed header", text)
    key = delivery or key
    if key is not None and not 1 <= len(key) <= KEY_CHARACTERS:
        text = f"An Idempotency-Key has 1 to {KEY_CHARACTERS} characters."
        raise Problem(400, "idempotency-key", "Malformed header", text)
    body = await service.bodies.read(request)
    unpacked = bodies.unpack(body, headers, service.limits.body_bytes)
    with service.room(ready.stream, len(unpacked), publishing=True):
        events = bodies.events(unpacked, headers, service.limits.body_events)
        has_looked = await _decode_fields(events, unpacked, headers, ready)
        with tracing.received(headers):
            done = await publish_to(ready, events, key, has_looked=has_looked)
        request.app.state.metrics.published(done, len(unpacked))
        return json_response(with_texts(done, "first_rowid", "last_rowid"), 202)


async def _decode_fields(events: Any, body: bytes, headers: Mapping[str, str], ready: OpenedStream) -> bool:
    """Decode the numbers of fields that hold decimals, and the base64 of those that hold bytes. Another text stays, and
    the stream refuses it. Return whether the columns were read again."""
    several: list[dict[str, Any]] = events if isinstance(events, list) else [events]
    fields = ready.log.fields()
    has_looked = bool(several) and not keys_of(several) <= fields.keys()
    if has_looked:  # another process may have added columns
        fields = await ready.hub.in_thread(partial(ready.log.fields, fresh=True))
    decimals = tuple(name for name, kind in fields.items() if kind.base == "decimal")
    if decimals:
        bodies.restore_decimals(several, body, headers, decimals)
    binary = [(name, kind) for name, kind in fields.items() if kind.base == "bytes"]
    if binary:
        for event in several:
            for name, kind in binary:
                if name in event:
                    with suppress(ValueError):
                        event[name] = from_json(event[name], kind)
    return has_looked
