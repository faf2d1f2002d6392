"""A cached check of another system, which many requests need and which may hang: one thread checks for all of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class CachedProbe(Generic[T]):
    """The result of `probe`, at most `fresh_seconds` old.

    It has a daemon thread of its own: a database that hangs takes no thread from others, and does not delay the exit.
    """

    def __init__(self, probe: Callable[[], T], *, fresh_seconds: float) -> None:
        self._probe = probe
        self.fresh_seconds = fresh_seconds
        self._latest: Future[T | Exception] | None = None
        self._ended_at = 0.0

    async def get(self, seconds: float) -> T:
        """Return the result or raise the error of the probe; `TimeoutError` where it takes longer than `seconds`."""
        result = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self.begun())), seconds)
        if isinstance(result, Exception):
            raise result
        return result

    def begun(self) -> Future[T | Exception]:
        """Return the result, an error as a value, once it is there."""
        latest = self._latest
        if latest is None or (latest.done() and time.monotonic() - self._ended_at >= self.fresh_seconds):
            latest = self._latest = Future()
            threading.Thread(target=self._run, args=(latest,), name="weft-probe", daemon=True).start()
        return latest

    def _run(self, future: Future[T | Exception]) -> None:
        # An error is kept as a value: Python complains of a future's error that nobody waits for any more.
        result: T | Exception
        try:
            result = self._probe()
        except Exception as error:
            result = error
        self._ended_at = time.monotonic()
        future.set_result(result)
