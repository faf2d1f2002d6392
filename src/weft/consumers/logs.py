"""Streams in databases, read entry by entry: the identifier of an entry is its offset, its values are the event."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from weft.errors import ConnectionFailedError, LeaseLostError, NotFoundError, SettingsError
from weft.streams import Stream, ack, consume, groups, nack
from weft.streams.consuming import LONGEST_SECONDS, return_undelivered
from weft.streams.events import moved, read_on
from weft.streams.runtime import OpenedStream, find, open_stream_async
from weft.systems.base import Connection, system_for
from weft.systems.entries import Membership, Part, StreamEntry, by_stream
from weft.systems.log import ROWID, Member
from weft.systems.reader_retries import Patience

T = TypeVar("T")

_LOOK_SECONDS = 1.0
_LEASE_MILLISECONDS = 60_000
_MEMBER_SEPARATOR = "#"


def lease_milliseconds(claim_idle: int | None) -> float:
    """Return the length of the leases of a member."""
    longest = LONGEST_SECONDS * 1000
    if claim_idle is not None and claim_idle > longest:
        raise SettingsError(
            f"claim_idle is {claim_idle:,}; the lease of a declared stream is at most a year, {longest:,} milliseconds."
        )
    return float(_LEASE_MILLISECONDS if claim_idle is None else max(claim_idle, 1))


class LogReader:
    """Reads a log from its head on."""

    only_reads = True

    def __init__(self, connection: Connection) -> None:
        system_for(connection.kind).load_log()  # raises for a connection that holds no streams, whatever their names
        self._connection = connection
        self._streams: dict[str, Stream] = {}
        self._positions: dict[str, int] = {}
        self._answered = False

    def name(self, stream: Any) -> str:
        declared = find(stream.decode() if isinstance(stream, bytes) else stream)
        self._streams.setdefault(declared.name, self._as_read(declared))
        return declared.name

    def _as_read(self, declared: Stream) -> Stream:
        return declared

    def parts(self, streams: Sequence[Any]) -> list[Part]:
        """Return a part for each stream: a log holds one stream."""
        return [(stream,) for stream in streams]

    async def begin(self, stream: str, identifier: Any) -> None:
        """After `identifier`, or at the head."""
        if identifier is None or identifier == "$":
            self._positions[stream] = await self.with_retries(lambda: self._head(stream))
        else:
            self._positions[stream] = check_offset(identifier)
            await self.with_retries(lambda: self._opened(stream))

    async def _head(self, stream: str) -> int:
        ready = await self._opened(stream)
        return await ready.hub.in_thread(ready.log.head)

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        """Return a page of the log, once there is one."""
        (stream,) = part
        ready = await self.with_retries(lambda: self._opened(stream))
        after, ends = self._positions[stream], monotonic() + wait / 1000
        read = partial(ready.hub.in_thread, read_on, ready.log, after, count)
        while True:
            version = ready.hub.watch.version
            events, other, lost = await self.with_retries(read)
            if other is not None:
                self._positions[stream] = other
                raise moved("consumer", stream, after, other, lost)
            left = ends - monotonic()
            if events or left <= 0:
                break
            await ready.hub.watch.wait_async(version, min(left, _LOOK_SECONDS))
        if events:
            self._positions[stream] = events[-1][ROWID]
        return [entry_of(stream, event) for event in events]

    async def with_retries(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request until the database answers it, for as long as a restart may take. One that never answered is
        not waited for."""
        patience = Patience()
        while True:
            try:
                reply = await request()
                self._answered = True
                return reply
            except ConnectionFailedError as error:
                if not self._answered:
                    raise
                await asyncio.sleep(patience.pause_after(error))

    async def close(self) -> None:
        """The connection is the project's, and stays open."""

    async def _opened(self, stream: str) -> OpenedStream:
        return await open_stream_async(self._streams[stream], self._connection, to_read=self.only_reads)


class LogGroupReader(LogReader):
    """Reads with `consume`, for a member of a group."""

    only_reads = False

    def __init__(self, connection: Connection, membership: Membership) -> None:
        super().__init__(connection)
        if membership.group_start != "0":
            raise SettingsError(
                f"A group in a database begins at the start of its stream, not at {membership.group_start!r}.",
                hint="weft.reset(stream, group, 'end') moves it.",
            )
        self._member = membership
        self._group, self._consumer = as_text(membership.group), as_text(membership.consumer)
        self.held_for: float | None = lease_milliseconds(membership.claim_idle)
        self.skipped = 0
        self.recovered = 0
        self._backlogs: dict[str, list[tuple[str, int]]] = {}
        self._asking_as: dict[str, str] = {}

    def _as_read(self, declared: Stream) -> Stream:
        if self._member.max_deliveries is None:
            return declared
        place = None if self._member.dead_letter is None else as_text(self._member.dead_letter)
        return replace(declared, max_deliveries=self._member.max_deliveries, dead_letter=place or declared.dead_letter)

    async def begin(self, stream: str, identifier: Any) -> None:
        """Look for the group, and for what this member holds."""
        if identifier not in (None, ">"):
            raise SettingsError(
                f"A member of a group cannot begin at {identifier!r} of stream {stream!r}.",
                hint="start_from_backlog=True begins with what it has not acknowledged.",
            )
        if self._member.auto_create and not self._member.start_from_backlog:
            return
        if not self._member.auto_create:
            known = await self.with_retries(lambda: groups(self._streams[stream], connection=self._connection))
            if not any(each["consumer"] == self._group for each in known):
                raise NotFoundError(
                    f"The stream {stream!r} has no group {self._group!r}.", hint="auto_create=True creates it."
                )
        if self._member.start_from_backlog:
            self._backlogs[stream] = await self.with_retries(lambda: self._backlog(stream))

    async def _backlog(self, stream: str) -> list[tuple[str, int]]:
        ready = await open_stream_async(self._streams[stream], self._connection, to_read=True)
        return backlog_of(self._consumer, await ready.hub.in_thread(ready.log.members, self._group))

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        """Return what this member held before a restart, else what no member holds.

        Each request is made under another name: under one name the member would be given again what it holds."""
        (stream,) = part
        backlog = self._backlogs.get(stream)
        if backlog:
            member, pending = backlog[-1]
            events = await self._consume(stream, min(pending, 100_000), member, 0)
            backlog.pop()
            if events:
                return events
        # The same one until it has got something: what it was given in an answer that is lost, it gets again.
        member = self._asking_as.setdefault(stream, new_member(self._consumer))
        events = await self._consume(stream, count, member, wait)
        if events:
            del self._asking_as[stream]
        return events

    async def _consume(self, stream: str, count: int, member: str, wait: float) -> list[StreamEntry]:
        events = await self.with_retries(
            lambda: consume(
                self._streams[stream],
                self._group,
                count,
                self._connection,
                member,
                lease=(self.held_for or 0) / 1000,
                wait=min(wait / 1000, _LOOK_SECONDS),
            )
        )
        return [entry_of(stream, event) for event in events]

    async def ack(self, entries: Sequence[StreamEntry]) -> int:
        """Acknowledge the events, one transaction a delivery."""
        done = 0
        for stream, events in by_stream(entries, "field_values").items():
            acknowledge = partial(ack, self._streams[stream], self._group, events, connection=self._connection)
            done += await self.with_retries(acknowledge)
        return done

    async def give_back(self, entries: Sequence[StreamEntry], *, undelivered: bool) -> int:
        done = 0
        for stream, events in by_stream(entries, "field_values").items():
            if undelivered:
                done += await self.with_retries(partial(self._return, stream, events))
            else:
                done += await self._release(stream, events)
        return done

    async def _release(self, stream: str, events: list[Any]) -> int:
        may_be_done = False

        async def release() -> int:
            nonlocal may_be_done
            try:
                return await nack(self._streams[stream], self._group, events, connection=self._connection)
            except ConnectionFailedError:
                may_be_done = True
                raise
            except LeaseLostError:
                if may_be_done:  # by a try whose answer was lost: nobody holds them any more
                    return len(events)
                raise

        return await self.with_retries(release)

    async def _return(self, stream: str, events: list[Any]) -> int:
        ready = await self._opened(stream)
        return await ready.hub.in_thread(return_undelivered, ready, self._group, events)


def entry_of(stream: str, event: dict[str, Any]) -> StreamEntry:
    entry = StreamEntry(event[ROWID], event)
    entry.stream = stream
    return entry


def check_offset(identifier: Any) -> int:
    """Return an offset, as a number or as its digits."""
    try:
        offset = int(identifier)
    except (TypeError, ValueError):
        offset = -1
    if offset < 0:
        raise SettingsError(f"An entry of a database has an offset as its identifier, not {identifier!r}.")
    return offset


def new_member(consumer: str) -> str:
    """Return a name for one request of a consumer. Names sort as the requests came."""
    return f"{consumer}{_MEMBER_SEPARATOR}{time.time_ns() // 1000:014x}{secrets.token_hex(3)}"


def backlog_of(consumer: str, members: Sequence[Member]) -> list[tuple[str, int]]:
    """Return under which names a consumer holds events of a group, and how many each, the oldest last."""
    # A consumer may be called as another one with more behind it.
    own = re.compile(re.escape(consumer) + f"({_MEMBER_SEPARATOR}[0-9a-f]{{20}})?")
    return sorted([(each.member, each.pending) for each in members if own.fullmatch(each.member)], reverse=True)


def as_text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
