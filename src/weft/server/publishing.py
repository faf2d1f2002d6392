"""`POST /api/v1/streams/{name}`: events in, an answer once they are durable."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from weft.server import bodies
from weft.server.access import webhook_id
from weft.server.problems import Problem
from weft.server.service import json_response, service_of
from weft.streams.publishing import KEY_CHARACTERS, publish_to


async def publish(request: Request) -> Response:
    """One event, an array, or a line each."""
    service = service_of(request)
    ready = await service.open(request, "write")
    headers = request.headers
    key, delivery = headers.get("idempotency-key"), webhook_id(request)
    if delivery is not None and key not in (None, delivery):
        # Which nobody signed: the same delivery under another key would be stored again.
        text = "The webhook-id is the key of a signed request. Send no Idempotency-Key, or the same."
        raise Problem(400, "idempotency-key", "Malformed header", text)
    key = delivery or key
    if key is not None and not 1 <= len(key) <= KEY_CHARACTERS:
        text = f"An Idempotency-Key has 1 to {KEY_CHARACTERS} characters."
        raise Problem(400, "idempotency-key", "Malformed header", text)
    body = await service.bodies.read(request)
    unpacked = bodies.unpack(body, headers, service.limits.body_bytes)
    with service.room(ready.stream, len(unpacked)):
        events = bodies.events(unpacked, headers, service.limits.body_events)
        done = await publish_to(ready, events, key)
        request.app.state.metrics.published(done, len(unpacked))
        return json_response(done, 202)
