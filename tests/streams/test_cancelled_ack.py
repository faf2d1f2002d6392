"""An ack whose task was cancelled goes on in its thread. Who repeats it is not told that the lease was lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.streams.runtime import open_stream
from workers import declare

pytestmark = pytest.mark.timing


async def test_an_ack_is_repeated_before_the_answer_to_the_first(
    streams: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = declare()
    await weft.publish(orders, [{"n": n} for n in range(3)])
    events = await weft.consume(orders, "worker")
    log = open_stream(orders).log
    settle, settled, repeated = log.settle, threading.Event(), threading.Event()

    def slow_answer(*arguments: Any, **named: Any) -> Any:
        # The real one, whose answer is held up until the ack was repeated.
        outcome = settle(*arguments, **named)
        settled.set()
        assert repeated.wait(60)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(log, "settle", slow_answer)
        task = asyncio.create_task(weft.ack(orders, "worker", events))
        await asyncio.to_thread(settled.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    try:
        assert await weft.ack(orders, "worker", events) == 0
    finally:
        repeated.set()
    assert await weft.consume(orders, "worker", member="another") == []
