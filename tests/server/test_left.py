"""A client that leaves while it waits for events: what comes then is for others, at once, and was not delivered."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.server import app
from weft.streams import Stream
from weft.streams.runtime import open_stream

PATIENCE = 60


@pytest.fixture
def orders(streams: Project) -> Any:
    @weft.stream(fields={"n": "int64"}, max_deliveries=1)
    def orders() -> None: ...

    weft.publish_sync(orders, {"n": 1})
    weft.ack_sync(orders, "workers", weft.consume_sync(orders, "workers"))
    return orders


async def leave(meanwhile: Callable[[], Awaitable[object]]) -> None:
    """Ask for events, leave while the service waits for them, and do something before it notices."""
    body = [json.dumps({"consumer": "workers", "wait": 60}).encode()]
    application, has_left, looked = app(), asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        looked.set()  # the service asks whether the client is still there: it found nothing, and will wait
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    path = "/api/v1/streams/orders/consume"
    scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
    scope |= {"client": ("127.0.0.1", 1), "server": ("localhost", 80)}
    request = asyncio.create_task(application(scope, receive, send))
    await asyncio.wait_for(looked.wait(), PATIENCE)
    has_left.set()
    await meanwhile()
    await asyncio.wait_for(request, PATIENCE)
    await application.state.service.stop()


async def test_events_are_for_others(orders: Stream) -> None:
    await leave(lambda: weft.publish(orders, {"n": 2}))
    assert [event["n"] for event in await weft.consume(orders, "workers")] == [2]


async def test_a_loss_is_told_to_others(orders: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    log, removed = open_stream(orders).log, threading.Event()
    lease = log.lease

    async def publish_and_trim() -> None:
        monkeypatch.setattr(log, "lease", lambda *args, **named: removed.wait(PATIENCE) and lease(*args, **named))
        await weft.publish(orders, {"n": 2})
        await weft.trim(orders, max_rows=0)
        removed.set()

    await leave(publish_and_trim)
    with pytest.raises(weft.EventsLostError) as told:
        await weft.consume(orders, "workers")
    assert told.value.lost == 1
