"""What the tests of `subscribe` share: publish numbers, and wait for them without waiting for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

import weft
from servers import wait_until

T = TypeVar("T")
NUMBER = {"n": "int64"}


async def soon(awaitable: Awaitable[T]) -> T:
    """What must come, or the test fails; nothing here waits this long."""
    return await asyncio.wait_for(awaitable, 60)


async def some(live: Any, count: int) -> list[int]:
    return [(await soon(anext(live)))["n"] for _ in range(count)]


async def publish(*numbers: int) -> dict[str, Any]:
    return await weft.publish("orders", [{"n": n} for n in numbers])


@contextlib.contextmanager
def waiting(live: Any) -> Iterator[asyncio.Task[Any]]:
    """A task that waits for the next event."""
    task = asyncio.ensure_future(anext(live))
    yield task
    task.cancel()


async def until_it_waits() -> None:
    """Let a task that reads find nothing and go to sleep: somebody then watches for it."""
    await asyncio.to_thread(
        wait_until, lambda: any(thread.name == "weft-watch" for thread in threading.enumerate()), "a watch"
    )
