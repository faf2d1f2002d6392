"""What the routes of one process share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.server.access import Access, Scope
from weft.server.live import Feeds
from weft.server.problems import later
from weft.streams.declare import Stream
from weft.streams.runtime import Opened, find, in_thread, open_stream, opened
from weft.types import to_json

_encoder = msgspec.json.Encoder(enc_hook=to_json)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one client, and what all of them together, may take."""

    body_bytes: int = 16 * 1024 * 1024
    """Of one request, unpacked."""
    body_seconds: float = 30.0
    """In which it must arrive."""
    waiting_requests: int = 2_000
    waiting_bytes: int = 64 * 1024 * 1024
    """Publishes to one stream that wait for its database. More are told to come again: memory has an end."""
    wait_seconds: float = 60.0
    """The longest long poll."""
    page_events: int = 10_000
    """Of one answer."""
    send_seconds: float = 30.0
    """In which a subscriber must take what is sent to it."""
    keep_alive_seconds: float = 15.0


class Service:
    """The state of the service in one process."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.access = Access()
        self.feeds = Feeds(self.limits)
        self._waiting: dict[str, list[int]] = {}

    async def open(self, request: Request, scope: Scope) -> Opened:
        """The stream that a request names, if it may use it."""
        stream = find(request.path_params["name"])
        self.access.admit(request, stream, scope)
        ready = opened(stream)
        return await in_thread(open_stream, stream) if ready is None else ready

    @contextmanager
    def room(self, stream: Stream, size: int) -> Iterator[None]:
        """A place among those who wait for a stream's database, or a refusal."""
        waiting = self._waiting.setdefault(stream.name, [0, 0])
        limits = self.limits
        if waiting[0] >= limits.waiting_requests or (waiting[0] and waiting[1] + size > limits.waiting_bytes):
            text = f"The database of {stream.name!r} cannot keep up: {waiting[0]:,} requests wait for it."
            raise later(503, "overloaded", "Too much at once", text, 1.0)
        waiting[0] += 1
        waiting[1] += size
        try:
            yield
        finally:
            waiting[0] -= 1
            waiting[1] -= size

    async def stop(self) -> None:
        """Tell subscribers, and end what runs beside the requests."""
        self.feeds.stop()
        await asyncio.sleep(0)


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    service: Service = request.app.state.service
    return service


def json_response(value: Any, status: int = 200) -> Response:
    """JSON, also of times, decimals and bytes."""
    return Response(_encoder.encode(value), status, media_type="application/json")
