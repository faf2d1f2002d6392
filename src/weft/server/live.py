"""Server-Sent Events: each new event is read and encoded once, for all subscribers of its stream.

A subscriber has no queue. It has a position: the events after it come from the newest ones that its feed keeps, or from
the log where it is behind those. So a slow subscriber costs no memory, and misses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from weft.errors import ConnectionFailedError, StorageError, WeftError
from weft.server import bodies
from weft.server.answers import Answers
from weft.server.keys import CACHED_SECONDS
from weft.server.limits import Limits
from weft.server.problems import Problem
from weft.streams.events import in_json, read_on, with_texts
from weft.streams.runtime import OpenedStream
from weft.systems.log import ROWID

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


logger = logging.getLogger("weft.server")

Event = dict[str, Any]
Filter = Callable[[Event], bool]
Ended = Callable[[], Awaitable[str | None]]
"""Why a subscriber may not follow any longer, if so."""

# The newest events that a feed keeps for subscribers that are up to date.
_KEPT_EVENTS = 2_000
_KEPT_BYTES = 4 * 1024 * 1024
# How much a feed reads at once, and sends to a subscriber at once: about one socket buffer, since many may be slow.
_READ_EVENTS = 500
_READ_BYTES = 1024 * 1024
_SENT_BYTES = 64 * 1024
# The size of the first event is unknown: the first page has a few of them.
_FIRST_MEAN = 64 * 1024
# A feed that is not woken reads by itself: the database may be away, and no watch reports that.
_LOOK_SECONDS = 2.0
_PAUSE_SECONDS = 1.0
# How often the credential of a subscriber is checked again: while events are sent, and while none are.
_ASK_SECONDS = 1.0
_IDLE_SECONDS = CACHED_SECONDS / 2
# Unicode's line separators: some clients split lines at them too. JSON has them in texts alone.
_SEPARATORS = [(each.encode(), b"\\u%04x" % ord(each)) for each in "\x85\u2028\u2029"]


class Moved(Exception):
    """The log does not go on at a position: retention removed what follows, or an older state was restored."""

    def __init__(self, to: int, lost: int = 0) -> None:
        super().__init__(to)
        self.to = to
        self.lost = lost


class Feeds:
    def __init__(self, limits: Limits, answers: Answers) -> None:
        self.limits = limits
        self.answers = answers
        self._feeds: dict[int, Feed] = {}
        self.stopping = False

    def feed(self, ready: OpenedStream) -> Feed:
        """Return the feed of a stream; a process has one."""
        self._feeds = {key: feed for key, feed in self._feeds.items() if feed.followers}
        feed = self._feeds.get(id(ready))
        if feed is None:
            feed = self._feeds[id(ready)] = Feed(ready)
        return feed

    @property
    def followers(self) -> int:
        return sum(feed.followers for feed in self._feeds.values())

    def stop(self) -> None:
        """Let every subscriber know that the service ends."""
        self.stopping = True
        for feed in self._feeds.values():
            feed.wake()


class Feed:
    """The newest events of a stream, as they are sent."""

    def __init__(self, ready: OpenedStream) -> None:
        self.ready = ready
        self.followers = 0
        self._offsets: deque[int] = deque()
        self._events: deque[tuple[Event, bytes]] = deque()
        self._bytes = 0
        self._before: int | None = None
        """The offset before the first of them; `None` while there is no subscriber."""
        self._last = 0
        self._changed: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._mean = float(_FIRST_MEAN)
        """Bytes of an event, in the last page that was read."""

    def is_closed(self) -> bool:
        """Return whether the application that mounted the service closed the stream in this process. Subscribers that
        come back get a new feed."""
        return self.ready.hub.watch.closed

    def enter(self) -> None:
        """Count a new subscriber. The first one starts the reading."""
        self.followers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self) -> None:
        """Count a subscriber that left. The last one ends the reading."""
        self.followers -= 1
        if not self.followers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._clear(None)

    def _clear(self, position: int | None) -> None:
        self._before, self._last = position, position or 0
        self._offsets.clear()
        self._events.clear()
        self._bytes = 0

    def wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Wait until there may be new events, at most so long."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        # Not wait_for: it would cancel the future that all subscribers wait for.
        await asyncio.wait([self._changed], timeout=seconds)

    def is_behind(self, position: int) -> bool:
        """Return whether the events after a position must be read from the log."""
        return self._before is not None and position < self._before

    async def after(self, position: int) -> list[tuple[Event, bytes]]:
        """Return a page of the events after a position; nothing where there are none yet."""
        if self._before is None:
            return []
        if position < self._before:
            return await self.ready.hub.in_thread(self._read, position, _SENT_BYTES)
        if position >= self._last:
            if position > self._last:  # the feed has yet to read these events, or they are removed
                head = await self.ready.hub.in_thread(self.ready.log.head, position)
                if position > head:
                    raise Moved(head)
            return []
        page, left = [], _SENT_BYTES
        for index in range(bisect_right(self._offsets, position), len(self._events)):
            page.append(self._events[index])
            left -= len(page[-1][1])
            if left <= 0:
                break
        return page

    def _read(self, after: int, size: int) -> list[tuple[Event, bytes]]:
        """Read a page of about `size` bytes, by the mean size of the last one."""
        page = read(self.ready, after, max(1, min(_READ_EVENTS, int(size / self._mean))))
        if page:
            self._mean = sum([len(frame) for _, frame in page]) / len(page)
        return page

    async def _run(self) -> None:
        watch, log = self.ready.hub.watch, self.ready.log
        while not self.is_closed():
            version = watch.version
            try:
                if self._before is None:
                    self._before = self._last = await self.ready.hub.in_thread(log.head)
                    self.wake()
                page = await self.ready.hub.in_thread(self._read, self._last, _READ_BYTES)
            except Moved as moved:
                # Subscribers notice by themselves that their position is before the kept events, or after them.
                self._clear(moved.to)
                self.wake()
                continue
            except Exception as error:  # without a feed its subscribers would wait indefinitely
                if self.is_closed():
                    break
                cause = None if isinstance(error, WeftError) else error
                name = self.ready.stream.name
                logger.warning("the events of %s cannot be read, and are tried again: %s", name, error, exc_info=cause)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if not page:
                await watch.wait_async(version, _LOOK_SECONDS)
                continue
            for event, frame in page:
                self._offsets.append(event[ROWID])
                self._events.append((event, frame))
                self._bytes += len(frame)
            self._last = self._offsets[-1]
            while len(self._offsets) > _KEPT_EVENTS or (self._bytes > _KEPT_BYTES and len(self._offsets) > 1):
                self._before = self._offsets.popleft()
                self._bytes -= len(self._events.popleft()[1])
            self.wake()
        logger.warning("%s was closed, and its subscribers have to come back", self.ready.stream.name)
        self.wake()


def read(ready: OpenedStream, after: int, limit: int) -> list[tuple[Event, bytes]]:
    """Read the events after an offset with their frames. `Moved`: retention removed some of them, or the log ends
    before the offset."""
    events, other, lost = read_on(ready.log, after, limit)
    if other is not None:
        raise Moved(other, lost)
    name = ready.stream.name
    return [(event, frame("stream.event", {"stream": name, "event": in_json(event)}, event[ROWID])) for event in events]


def frame(kind: str, data: object, offset: int | None = None) -> bytes:
    """Encode one Server-Sent Event."""
    number = b"" if offset is None else b"id: %d\n" % offset
    text = bodies.encode(data)
    for separator, escape in _SEPARATORS:
        if separator in text:
            text = text.replace(separator, escape)
    return number + b"event: " + kind.encode() + b"\ndata: " + text + b"\n\n"


class EventStream:
    """An answer that goes on until the subscriber leaves, is too slow, may not follow any longer, or the service
    ends."""

    def __init__(self, feeds: Feeds, ready: OpenedStream, position: int, accepts: Filter | None, ended: Ended) -> None:
        self.feeds = feeds
        self.ready = ready
        self.position = position
        self.accepts = accepts
        self.ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        feed = self.feeds.feed(self.ready)
        feed.enter()
        gone = asyncio.create_task(_disconnected(receive))
        sending = asyncio.create_task(self._send(feed, send))
        try:
            await asyncio.wait([gone, sending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            feed.leave()
            for task in (gone, sending):
                task.cancel()
            _, sent = await asyncio.gather(gone, sending, return_exceptions=True)
            if isinstance(sent, TimeoutError):
                logger.warning("a subscriber of %s was cut off: it does not read", self.ready.stream.name)
            elif isinstance(sent, Exception):
                logger.error("a subscriber of %s was cut off", self.ready.stream.name, exc_info=sent)

    async def _send(self, feed: Feed, send: Send) -> None:
        limits, answers, now = self.feeds.limits, self.feeds.answers, asyncio.get_running_loop().time
        silent_at = 0.0

        async def write(body: bytes, *, more: bool = True) -> None:
            nonlocal silent_at
            await answers.send(body, send, more=more)
            silent_at = now() + limits.keep_alive_seconds

        # At once, so that a client knows that it is subscribed: what is published from now on is sent. A browser
        # remembers an id without an event too: it comes back with the last one, also where it got no event yet.
        await write(b": subscribed\nid: %d\n\n" % self.position)
        ask_at, reason = now() + _ASK_SECONDS, "the service ends"
        while not self.feeds.stopping:
            if feed.is_closed():
                reason = "the stream was closed here"
                break
            if now() >= silent_at:
                await write(b": keep-alive\nid: %d\n\n" % self.position)
            try:
                if now() >= ask_at:
                    ended = await self.ended()
                    if ended is not None:
                        reason = ended
                        break
                    ask_at = now() + _ASK_SECONDS
                if feed.is_behind(self.position):
                    # Nothing is read for a client that has yet to receive earlier events, nor while others fill the
                    # memory.
                    await answers.drain(send)
                    answers.require_room()
                body = await self._next(feed)
            except Moved as moved:
                notice = {"stream": self.ready.stream.name, "resumed_after": moved.to}
                with_texts(notice, "resumed_after")
                if moved.to > self.position:
                    await write(frame("stream.lost", {**notice, "lost": moved.lost}, moved.to))
                else:
                    await write(frame("stream.rewound", notice, moved.to))
                self.position = moved.to
                continue
            except (ConnectionFailedError, StorageError, Problem):
                # The log or the keys cannot be read, or there is no room for the events now.
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if body is not None:
                if body:
                    await write(body)
                del body  # not held until there is more
                continue
            # The service may have begun to stop while the log was read: nothing would wake this subscriber.
            if not self.feeds.stopping:
                await feed.wait(min(_IDLE_SECONDS, max(0.0, silent_at - now())))
        closing = {"stream": self.ready.stream.name, "reason": reason, "resume_after": self.position}
        last = frame("stream.closing", with_texts(closing, "resume_after"))
        await write(b"retry: 1000\n" + last, more=False)

    async def _next(self, feed: Feed) -> bytes | None:
        """Return the bytes to send next: `None` where there is no event yet, empty where the filter drops them all."""
        page = await feed.after(self.position)
        if not page:
            return None
        self.position = page[-1][0][ROWID]
        accepts = self.accepts
        return b"".join([frame for event, frame in page if accepts is None or accepts(event)])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
