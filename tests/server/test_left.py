"""A client that leaves while it waits for events: what comes then is for others, at once, and was not delivered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import weft
from weft.project import Project
from weft.server import app

PATIENCE = 60


async def test_events_of_a_client_that_left(streams: Project) -> None:
    @weft.stream(fields={"n": "int64"}, max_deliveries=1)
    def orders() -> None: ...

    await weft.publish(orders, {"n": 1})
    await weft.ack(orders, "workers", await weft.consume(orders, "workers"))
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
    await weft.publish(orders, {"n": 2})
    await asyncio.wait_for(request, PATIENCE)
    events = await weft.consume(orders, "workers")
    assert [event["n"] for event in events] == [2]
    await application.state.service.stop()
