"""A look at something outside that many ask for and that may hang: one thread looks, all get what it saw."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class CachedProbe(Generic[T]):
    """What `look` saw, at most `fresh_seconds` old.

    Its thread is its own and a daemon: a database that hangs takes no thread from those that work, and holds up
    nobody's exit.
    """

    def __init__(self, look: Callable[[], T], *, fresh_seconds: float) -> None:
        self._look = look
        self._fresh_seconds = fresh_seconds
        self._seen: Future[T | Exception] | None = None
        self._seen_at = 0.0

    async def get(self, seconds: float) -> T:
        """What was seen; `TimeoutError` where that takes longer than `seconds`."""
        seen = self._seen
        if seen is None or (seen.done() and time.monotonic() - self._seen_at >= self._fresh_seconds):
            seen = self._seen = Future()
            threading.Thread(target=self._run, args=(seen,), name="weft-look", daemon=True).start()
        done, _ = await asyncio.wait([asyncio.wrap_future(seen)], timeout=seconds)
        if not done:
            raise TimeoutError
        found = seen.result()
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self, seen: Future[T | Exception]) -> None:
        # An error is kept as a value: Python complains of a future's error that nobody waits for any more.
        found: T | Exception
        try:
            found = self._look()
        except Exception as error:
            found = error
        self._seen_at = time.monotonic()
        seen.set_result(found)
