"""`subscribe`: live events, read from the log at the reader's own pace."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from weft.errors import ConnectionFailedError, SettingsError
from weft.streams.declare import Stream
from weft.streams.events import as_offset, moved, read_on
from weft.streams.retention import aware
from weft.streams.runtime import OpenedStream, hub_of, open_stream
from weft.systems.base import Connection
from weft.systems.log import ROWID

# At most this many events wait in memory for a slow reader; the others wait in the log.
_PAGE_EVENTS = 500
# A reader also looks without being woken: the database may be away, which no watch reports.
_LOOK_SECONDS = 2.0
# A database answers within this; one that is away must not hold an event loop up for longer.
_LOOP_SECONDS = 0.1


def subscribe(
    stream: str | Stream,
    batch_size: int = 1,
    timeout: float | None = None,
    filter_fn: Callable[[dict[str, Any]], Any] | None = None,
    since: int | datetime | str | None = None,
    *,
    connection: str | Connection | None = None,
) -> Subscription:
    """Events as they are published, by this process or any other: `async for event in subscribe("user_events")`.

    The subscription begins where the stream ends when this is called, not at the first iteration. `since` begins
    earlier: after an offset (the last `_weft_rowid` seen), at a moment, or at the `"start"`. With `batch_size` above 1
    it yields lists, of fewer events when none came for `timeout` seconds. Only events for which `filter_fn` is true
    are yielded.

    A thread asks the database where the stream ends. In an event loop this waits for the answer for a tenth of a second
    at most: then publishes of this process wait for it, and so does the beginning of an `async with` block. If the
    database does not tell, the subscription begins with what was published since this call, by the database's clock.
    """
    if type(batch_size) is not int or batch_size < 1:
        raise SettingsError(f"batch_size must be a whole number of at least 1, not {batch_size!r}.")
    if timeout is not None and (type(timeout) not in (int, float) or not timeout >= 0):
        raise SettingsError(f"timeout must be a number of seconds or None, not {timeout!r}.")
    if filter_fn is not None and (not callable(filter_fn) or inspect.iscoroutinefunction(filter_fn)):
        # A coroutine is true, whatever it would return.
        kind = "a coroutine function" if callable(filter_fn) else type(filter_fn).__name__
        raise SettingsError(f"filter_fn must be a function of an event, not {kind}.")
    offset = as_offset(since)
    if not (since is None or since == "start" or isinstance(since, datetime) or offset is not None):
        raise SettingsError(f"since takes an offset, a datetime or 'start', not {since!r}.")
    called = time.monotonic()
    subscription = Subscription(
        lambda again: hub_of(stream, connection).before_commits(
            _begin, stream, connection, since if offset is None else offset, called if again else None
        ),
        batch_size,
        timeout,
        filter_fn,
    )
    with suppress(TimeoutError):
        subscription.begun.result(_LOOP_SECONDS if _is_in_loop() else None)
    return subscription


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _begin(
    stream: str | Stream,
    connection: str | Connection | None,
    since: int | datetime | str | None,
    called: float | None,
) -> tuple[OpenedStream, int]:
    """Return the stream, and the offset after which a subscription begins. `called`: when it was called for, if it did
    not learn at once where the stream ended then."""
    ready = open_stream(stream, connection, to_read=True)
    if since is None and called is not None:
        # In the database's time, which events have; on Redis these are whole milliseconds.
        moment = ready.hub.store.now() - (time.monotonic() - called)
        since = datetime.fromtimestamp(math.floor(moment * 1000) / 1000, UTC)
    if since is None:
        return ready, ready.log.head()
    if isinstance(since, datetime):
        return ready, ready.log.first_since(aware(since)) - 1
    return ready, since if isinstance(since, int) else ready.log.floor()


class Subscription:
    """An async iterator over a stream's events; also an async context manager."""

    _ready: OpenedStream

    def __init__(
        self,
        begin: Callable[[bool], Future[tuple[OpenedStream, int]]],
        batch_size: int,
        timeout: float | None,
        filter_fn: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        self._ask = begin
        self.begun = begin(False)
        """The stream, and where the subscription begins, once the database has told it."""
        self._batch_size = batch_size
        self._timeout = timeout
        self._filter = filter_fn
        self._batch: list[dict[str, Any]] = []
        self._page: deque[dict[str, Any]] = deque()
        self._position: int | None = None
        self._seen = 0
        self._quiet_since = 0.0
        self._closed = False

    @property
    def position(self) -> int:
        """The offset up to which everything was yielded, filtered out or lost; `since=` this to go on later."""
        return self.begun.result()[1] if self._position is None else self._position

    def __aiter__(self) -> Subscription:
        return self

    async def __aenter__(self) -> Subscription:
        await self._begin()
        return self

    async def _begin(self) -> None:
        if self._position is None:
            if self.begun.done() and self.begun.exception() is not None:
                self.begun = self._ask(True)
            # Shielded: a task that is cancelled here does not take the beginning from the next one.
            ready, position = await asyncio.shield(asyncio.wrap_future(self.begun))
            if self._position is None:
                self._ready, self._position, self._seen = ready, position, position

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the iteration, also that of a task which waits for the next event."""
        self._closed = True
        if self._position is not None:
            self._ready.hub.watch.bump()

    async def __anext__(self) -> Any:
        await self._begin()
        watch = self._ready.hub.watch
        while not self._closed:
            while self._page and len(self._batch) < self._batch_size:
                event = self._page.popleft()
                self._seen = event[ROWID]
                if self._filter is None or self._filter(event):
                    self._batch.append(event)
                    self._quiet_since = time.monotonic()
            patience = _LOOK_SECONDS
            if self._batch and self._timeout is not None:
                patience = min(patience, self._quiet_since + self._timeout - time.monotonic())
            if len(self._batch) >= self._batch_size or patience <= 0:
                return self._take()
            if not self._batch:
                self._position = self._seen
            if watch.closed:
                raise ConnectionFailedError(
                    f"A subscriber of stream {self._ready.stream.name!r} waits for events, and its project was closed.",
                    hint=f"Subscribe again with since={self.position} to go on.",
                )
            version, after = watch.version, self._seen
            page, other, lost = await self._ready.hub.in_thread(read_on, self._ready.log, after, _PAGE_EVENTS)
            if self._page or self._seen != after:
                continue  # another task that uses this subscription was faster
            if other is not None:
                self._move(other, lost)
            if page:
                self._page.extend(page)
            else:
                await watch.wait_async(version, patience)
        raise StopAsyncIteration

    def _take(self) -> Any:
        batch, self._batch = self._batch, []
        self._position = self._seen
        return batch[0] if self._batch_size == 1 else batch

    def _move(self, to: int, lost: int) -> None:
        """Go on after another offset, and say so."""
        before, self._seen = self._seen, to
        if not self._batch:
            self._position = to
        raise moved("subscriber", self._ready.stream.name, before, to, lost)
