"""How readers learn that something may have been appended, by this process or another."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress

from weft.systems.log import Store

_log = logging.getLogger("weft.streams")
# After a failure the database may be away for long: no need to ask it more often.
_PAUSE_SECONDS = 0.5
# A look takes a second. One at a server that answers no more ends with its connection, which is the store's to close.
_END_SECONDS = 3.0


class Watch:
    """Wakes readers when something may have been appended, by any process. They then look for themselves."""

    # After this long without a reader the thread ends; the next reader starts another.
    _LINGER_SECONDS = 5.0

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._futures: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self.closed = False
        self.version = 0

    def bump(self) -> None:
        """Something may have been appended."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()
            futures, self._futures = self._futures, []
        for loop, future in futures:
            with suppress(RuntimeError):  # its loop was closed
                loop.call_soon_threadsafe(_finish, future)

    def wait(self, version: int, timeout: float) -> None:
        """Block until the version differs from `version`, or for `timeout` seconds."""
        with self._changed:
            self._watching()
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self.version != version, timeout)
            finally:
                self._waiting -= 1

    async def wait_async(self, version: int, timeout: float | None) -> None:
        """Wait for asyncio as `wait` does; `None` waits indefinitely."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self.version != version:
                return
            self._watching()
            self._waiting += 1
            self._futures.append((loop, future))
        handle = None if timeout is None else loop.call_later(timeout, _finish, future)
        try:
            await future
        finally:
            if handle is not None:
                handle.cancel()
            with self._changed:
                self._waiting -= 1
                self._futures = [each for each in self._futures if each[1] is not future]

    def _watching(self) -> None:
        if self._thread is None and not self.closed:
            thread = threading.Thread(target=self._run, name="weft-watch", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        seen: object = None
        needed = time.monotonic()
        while True:
            with self._changed:
                if self._waiting:
                    needed = time.monotonic()
                if self.closed or time.monotonic() - needed > self._LINGER_SECONDS:
                    self._thread = None
                    break
            try:
                now = self._store.changed(seen, 1.0)
            except Exception as error:
                # Readers look for themselves and raise the error; without a watch they would sleep indefinitely.
                now = object()
                if not self.closed:
                    _log.warning("watching for new events failed, and is tried again: %s", error)
                    time.sleep(_PAUSE_SECONDS)
            if now != seen:
                seen = now
                self.bump()
        self._store.unwatch()

    def close(self) -> None:
        """End the thread, and wake all that wait."""
        with self._changed:
            self.closed = True
            thread = self._thread
        self.bump()
        if thread is not None:
            thread.join(_END_SECONDS)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
