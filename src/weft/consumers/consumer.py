"""`Consumer` and `GroupConsumer` fetch entries ahead by a reader, hand them out, acknowledge them, give them back."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import monotonic
from typing import Any, Self

from weft.errors import EventsLostError, LeaseLostError, SettingsError, WeftError, did_you_mean
from weft.project import current
from weft.streams.declare import Stream
from weft.streams.runtime import is_declared_on
from weft.systems.base import Connection, System, system_for, systems
from weft.systems.entries import EntryReader, GroupReader, Membership, Part, StreamEntry

_log = logging.getLogger("weft.consumers")
# With the one that is asked for, as many as a request to a database may have.
_MAX_BUFFER = 99_999


class Consumer:
    """Reads one stream or many, from their ends on.

    `client` is a client of Redis or a connection that holds streams. A request fetches up to `buffer_size` entries of
    each stream more than the one that is asked for, and waits up to `timeout` milliseconds for the first; without a
    `timeout` it does not wait. Other keywords are names of streams: `orders={"identifier": "0"}` begins after that
    entry.

    An async iterator of `(stream, entry)` that ends when there is nothing to read; iterating again goes on. Also an
    async context manager.
    """

    _membership: Membership | None = None

    def __init__(
        self,
        client: Any,
        streams: Iterable[Any],
        *,
        buffer_size: int = 0,
        timeout: int | None = None,
        **stream_parameters: Mapping[str, Any],
    ) -> None:
        _check_number("buffer_size", buffer_size, 0, _MAX_BUFFER)
        if timeout is not None:
            _check_number("timeout", timeout, 0)
        self.client = current().connection(client) if isinstance(client, Connection) else client
        self.streams: list[Any] = _distinct(streams)
        self._buffer_size = buffer_size
        self._timeout = timeout
        self._identifiers = self._check_parameters(stream_parameters)
        self._reader: EntryReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beginning = asyncio.Lock()
        self._begun: set[Any] = set()
        self._parts: list[Part] = []
        self._reads: dict[Part, asyncio.Task[tuple[float, list[StreamEntry]]]] = {}
        self._buffer: deque[StreamEntry] = deque()
        self._closed = 0
        """How many times it was closed. A call that waits meanwhile returns nothing, and opens nothing again."""

    def _check_parameters(self, stream_parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        names = [_text(stream) for stream in self.streams]
        for name, parameters in stream_parameters.items():
            if name in names:
                if isinstance(parameters, Mapping) and set(parameters) == {"identifier"}:
                    continue
                raise SettingsError(
                    f"The parameters of stream {name!r} must be {{'identifier': …}}, not {parameters!r}."
                )
            options = [*inspect.signature(GroupConsumer).parameters][:-1]
            if name in options:
                raise SettingsError(f"{name} is an option of a member of a group.", hint="Give group and consumer too.")
            hint = did_you_mean(name, [*options, *names], f"Its streams: {', '.join(names)}.")
            raise SettingsError(f"A consumer has neither an option nor a stream named {name!r}.", hint=hint)
        return {name: parameters["identifier"] for name, parameters in stream_parameters.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(streams={[_text(stream) for stream in self.streams]!r})"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[Any, StreamEntry]:
        if not await self._ready():
            raise StopAsyncIteration
        return self._hand_out()

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def get_entry(self) -> tuple[Any, StreamEntry] | tuple[None, None]:
        """Return the next `(stream, entry)`, or `(None, None)` if none comes in time."""
        return self._hand_out() if await self._ready() else (None, None)

    async def get_batch(self, size: int | None = None) -> list[tuple[Any, StreamEntry]]:
        """Return the entries that are fetched already, else those of one request, `size` at most; none if none came."""
        if size is not None:
            _check_number("size", size, 1)
        if not await self._ready():
            return []
        count = len(self._buffer) if size is None else min(size, len(self._buffer))
        return [self._hand_out() for _ in range(count)]

    async def add_stream(self, stream: Any, identifier: Any = None) -> bool:
        """Read this stream too, as one that was named at first; whether it is new here."""
        if _text(stream) in map(_text, self.streams):
            return False
        before, self.streams = self.streams, _distinct([*self.streams, stream])
        if identifier is not None:
            self._identifiers[_text(stream)] = identifier
        try:
            self._system_of_entries()  # refuses a stream of another sort
            await self._begin()
        except BaseException:
            self.streams = before
            raise
        return True

    async def aclose(self) -> None:
        """Stop. Entries that were fetched and not handed out are dropped, or returned to the group as undelivered.
        Entering again starts over."""
        self._closed += 1
        async with self._beginning:
            await self._leave()

    async def _leave(self) -> None:
        for read in self._reads.values():
            read.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        await self._forget()

    async def _forget(self) -> None:
        reader, self._reader = self._reader, None
        self._reads.clear()
        self._begun.clear()
        self._buffer.clear()
        if reader is not None:
            await reader.close()

    def _open(self) -> Any:
        """Open an `EntryReader`, or with a membership a `GroupReader`."""
        system = self._system_of_entries()
        if system is not None:
            return system.load("entries").open(self.client, self._membership)
        from weft.consumers.logs import LogGroupReader, LogReader

        return LogReader(self.client) if self._membership is None else LogGroupReader(self.client, self._membership)

    def _system_of_entries(self) -> System | None:
        """Return the system whose own streams these are; `None` for declared ones, which are read through their log."""
        if not isinstance(self.client, Connection):
            return _system_of_client(self.client)
        system = system_for(self.client.kind)
        if system.entries is None:
            return None
        names = [_text(stream) for stream in self.streams]
        declared = [
            name
            for name, stream in zip(names, self.streams, strict=True)
            if isinstance(stream, Stream) or is_declared_on(name, self.client)
        ]
        own = [name for name in names if name not in declared]
        if declared and own:
            noun = system.load("entries").noun
            raise SettingsError(
                f"{declared[0]!r} is a declared stream and {own[0]!r} {noun}, which one consumer cannot read.",
                hint="Make a consumer for each kind.",
            )
        return None if declared else system

    async def _begin(self, closed: int | None = None) -> None:
        """Begin the streams that have not begun, unless the consumer was closed after its count of closes was
        `closed`."""
        loop = asyncio.get_running_loop()
        if self._reader is not None and self._loop is not loop:
            raise SettingsError(
                f"{self!r} began in another event loop, where its connections are.",
                hint="Use it with `async with`, or `await consumer.aclose()` before that loop ends.",
            )
        self._loop = loop
        if len(self._begun) == len(self.streams):
            return
        closed = self._closed if closed is None else closed
        async with self._beginning:
            if self._closed != closed:
                return
            if self._reader is None:
                self._reader = self._open()
            new = [stream for stream in self.streams if stream not in self._begun]
            for stream in new:
                await self._reader.begin(self._reader.name(stream), self._identifiers.get(_text(stream)))
            # A part that gains a stream must not be read while a request for the part without it runs.
            if new and self._reads:
                await asyncio.wait(self._reads.values())
                self._collect()
            self._parts = self._reader.parts([self._reader.name(stream) for stream in self.streams])
            self._begun.update(new)

    async def _ready(self) -> bool:
        """Return whether there is something to hand out, after waiting for it where that is asked for."""
        return bool(self._buffer) or await self._fill()

    async def _fill(self) -> bool:
        ends, closed = monotonic() + (self._timeout or 0) / 1000, self._closed
        empty: set[Part] = set()
        while not self._buffer:
            await self._begin(closed)  # also while another task adds a stream
            if self._closed != closed:
                return False
            left = max(0.0, ends - monotonic())
            if not left and empty.issuperset(self._parts):
                return False
            for part in self._parts:
                if part not in self._reads and (left or part not in empty):
                    self._reads[part] = asyncio.create_task(self._read(part, left * 1000))
            # Not cancelled with the task that waits here: a group would lose entries. The next call returns them.
            await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
            if self._closed != closed:
                return False
            empty |= self._collect()
        return True

    async def _read(self, part: Part, wait: float) -> tuple[float, list[StreamEntry]]:
        assert self._reader is not None
        entries = await self._reader.read(part, self._buffer_size + 1, wait)
        return monotonic(), entries

    def _collect(self) -> set[Part]:
        """Put the entries of finished requests into the buffer; return the parts that were asked."""
        done = {part for part, read in self._reads.items() if read.done()}
        for part in done:
            fetched_at, entries = self._reads.pop(part).result()
            if entries:
                self._buffer.extend(entries)
                self._fetched(fetched_at)
        return done

    def _fetched(self, at: float) -> None:
        pass

    def _hand_out(self) -> tuple[Any, StreamEntry]:
        entry = self._buffer.popleft()
        return entry.stream, entry


class GroupConsumer(Consumer):
    """A member of a group, which shares the entries of streams: each entry goes to one member, and is pending until it
    is acknowledged.

    `auto_create` creates a missing group at `group_start`: `"0"` is the first entry of the stream, `"$"` the next one
    that is added, an identifier the one after it. A group that is removed meanwhile is created again there.
    `auto_acknowledge` acknowledges entries that were handed out once the buffer is empty, or on leaving.
    `start_from_backlog` begins with this member's unacknowledged entries. `claim_idle` claims entries that any member
    has held for so many milliseconds. An entry that was delivered `max_deliveries` times goes to the stream
    `dead_letter` instead."""

    _reader: GroupReader | None

    def __init__(
        self,
        client: Any,
        streams: Iterable[Any],
        group: Any,
        consumer: Any,
        *,
        buffer_size: int = 0,
        timeout: int | None = None,
        auto_create: bool = True,
        auto_acknowledge: bool = False,
        start_from_backlog: bool = False,
        group_start: str = "0",
        claim_idle: int | None = None,
        max_deliveries: int | None = None,
        dead_letter: Any = None,
        **stream_parameters: Mapping[str, Any],
    ) -> None:
        super().__init__(client, streams, buffer_size=buffer_size, timeout=timeout, **stream_parameters)
        for what, name in (("group", group), ("consumer", consumer)):
            if not isinstance(name, str | bytes) or not name:
                raise SettingsError(f"{what} must be a name, not {name!r}.")
        for what, number in (("claim_idle", claim_idle), ("max_deliveries", max_deliveries)):
            if number is not None:
                _check_number(what, number, 1)
        for what, flag in (
            ("auto_create", auto_create),
            ("auto_acknowledge", auto_acknowledge),
            ("start_from_backlog", start_from_backlog),
        ):
            # A text, as from an environment, would be true whatever it says.
            if flag not in (True, False):
                raise SettingsError(f"{what} must be True or False, not {flag!r}.")
        if dead_letter is not None and max_deliveries is None:
            raise SettingsError("dead_letter needs max_deliveries.", hint="max_deliveries=5 gives up after five.")
        if dead_letter is not None and _text(dead_letter) in map(_text, self.streams):
            raise SettingsError(
                f"The dead letters cannot go to {_text(dead_letter)!r}, which this consumer reads.",
                hint="Name another stream, and read it with a consumer of its own.",
            )
        self.group = group
        self.consumer = consumer
        self.auto_acknowledge = auto_acknowledge
        self._membership = Membership(
            group=group,
            consumer=consumer,
            auto_create=auto_create,
            start_from_backlog=start_from_backlog,
            group_start=group_start,
            claim_idle=claim_idle,
            max_deliveries=max_deliveries,
            dead_letter=dead_letter,
        )
        self._handed_out: list[StreamEntry] = []
        self._stale_at = math.inf
        self._counts = (0, 0)

    @property
    def skipped(self) -> int:
        """How many pending entries were passed over because they were deleted from their stream."""
        return self._counts[0] + (self._reader.skipped if self._reader else 0)

    @property
    def recovered(self) -> int:
        """How many times a group that had vanished was created again."""
        return self._counts[1] + (self._reader.recovered if self._reader else 0)

    async def ack(self, entries: Any) -> int:
        """Acknowledge an entry or many, with one request a stream; how many were not acknowledged before. Takes
        entries, `(stream, entry)` pairs, and what `get_batch` gave."""
        return await self._with_reader(lambda reader: reader.ack(self._settled(entries)))

    async def nack(self, entries: Any) -> int:
        """Give entries back, to be delivered again to any member; how many of them were still this member's."""
        return await self._with_reader(lambda reader: reader.give_back(self._settled(entries), undelivered=False))

    async def _with_reader(self, work: Callable[[GroupReader], Awaitable[int]]) -> int:
        """Do this, also after leaving: what is opened for it is closed again."""
        closed = self._reader is None
        try:
            await self._begin()
            assert self._reader is not None
            return await work(self._reader)
        finally:
            if closed:
                await self.aclose()

    def _settled(self, entries: Any) -> list[StreamEntry]:
        """Return the entries, and remove them from those that `auto_acknowledge` is to acknowledge."""
        listed = _entries(entries)
        if self._handed_out:
            settled = {(_text(entry.stream), entry.identifier) for entry in listed}
            self._handed_out = [
                entry for entry in self._handed_out if (_text(entry.stream), entry.identifier) not in settled
            ]
        return listed

    async def _leave(self) -> None:
        if self._reads:
            await asyncio.wait(self._reads.values())
        for read in self._reads.values():
            if read.cancelled():
                continue
            if (error := read.exception()) is None:
                self._buffer.extend(read.result()[1])
            elif isinstance(error, EventsLostError):  # which is raised once
                _log.warning("%r leaves: %s", self, error.what)
        try:
            await self._acknowledge_handed_out()
            await self._give_back_buffer()
        except WeftError as error:
            # They are pending still: claim_idle and start_from_backlog find them.
            _log.warning("%r leaves %d entries that nobody saw to be claimed: %s", self, len(self._buffer), error)
        finally:
            self._counts = (self.skipped, self.recovered)
            self._handed_out.clear()
            self._stale_at = math.inf
            await self._forget()

    async def _ready(self) -> bool:
        if self._buffer:
            if monotonic() < self._stale_at:
                return True
            # Others may claim them any moment. To hand them out too would be to process them twice.
            await self._give_back_buffer()
        await self._acknowledge_handed_out()
        return await self._fill()

    def _fetched(self, at: float) -> None:
        assert self._reader is not None
        if self._reader.held_for is not None:
            self._stale_at = min(self._stale_at, at + self._reader.held_for / 2000)

    def _hand_out(self) -> tuple[Any, StreamEntry]:
        entry = self._buffer.popleft()
        if not self._buffer:
            self._stale_at = math.inf
        if self.auto_acknowledge:
            self._handed_out.append(entry)
        return entry.stream, entry

    # Both take what they work on away first: another task may ask for entries meanwhile.

    async def _give_back_buffer(self) -> None:
        entries, self._buffer, self._stale_at = self._buffer, deque(), math.inf
        if entries:
            assert self._reader is not None
            try:
                await self._reader.give_back(list(entries), undelivered=True)
            except BaseException:
                self._buffer.extendleft(reversed(entries))
                self._stale_at = -math.inf
                raise

    async def _acknowledge_handed_out(self) -> None:
        entries, self._handed_out = self._handed_out, []
        if entries:
            assert self._reader is not None
            try:
                await self._reader.ack(entries)
            except LeaseLostError as error:
                _log.warning("%r handed out entries that are delivered again: %s", self, error)
            except BaseException:
                self._handed_out = entries + self._handed_out
                raise


def xconsumer(
    client: Any,
    *names: Any,
    streams: Iterable[Any] | None = None,
    group: Any = None,
    consumer: Any = None,
    **options: Any,
) -> Consumer | GroupConsumer:
    """Return a `Consumer` of these streams, or with `group` and `consumer` a `GroupConsumer`. `options` are theirs."""
    # Some name the client again, as where the classes are made directly.
    named = [each for each in names if each is not client]
    if streams is not None:
        named.append(streams)
    if len(named) != 1:
        raise SettingsError("xconsumer needs the streams, once.", hint='xconsumer(streams=["one", "two"])')
    if (group is None) != (consumer is None):
        raise SettingsError("group and consumer go together.", hint="consumer names this member of the group.")
    if group is None:
        return Consumer(client, named[0], **options)
    return GroupConsumer(client, named[0], group, consumer, **options)


def _system_of_client(client: object) -> System:
    readable = {system: system.load("entries") for system in systems().values() if system.entries is not None}
    for system, entries in readable.items():
        if entries.takes(client):
            return system
    raise SettingsError(
        f"A consumer reads through a client or a connection, not a {type(client).__name__}.",
        hint=f"{', '.join(entries.clients for entries in readable.values())} or weft.connect(url=…)",
    )


def _distinct(streams: Iterable[Any]) -> list[Any]:
    if isinstance(streams, str | bytes) or not isinstance(streams, Iterable):
        raise SettingsError(f"streams must be a list of streams, not {streams!r}.", hint='streams=["one", "two"]')
    if isinstance(streams, Mapping):  # as XREAD takes them: the identifiers would be passed over
        raise SettingsError(
            f"streams must be a list of streams, not {streams!r}.",
            hint='streams=["one"], one={"identifier": "0"} begins after an identifier.',
        )
    distinct = list({_text(stream): stream for stream in streams}.values())
    if not distinct:
        raise SettingsError("A consumer needs at least one stream.")
    return distinct


def _text(stream: Any) -> str:
    if isinstance(stream, bytes):
        return stream.decode("utf-8", "surrogateescape")
    name = getattr(stream, "name", stream)
    if not isinstance(name, str) or not name:
        raise SettingsError(f"A stream has a name, not {stream!r}.")
    return name


def _entries(entries: Any) -> list[StreamEntry]:
    if isinstance(entries, StreamEntry) or (_is_pair(entries) and not isinstance(entries[0], tuple)):
        entries = [entries]
    if not isinstance(entries, Iterable) or isinstance(entries, str | bytes | Mapping):
        raise SettingsError(f"Entries that a consumer gave are needed, not {entries!r}.")
    listed = [item[1] if _is_pair(item) else item for item in entries]
    for entry in listed:
        if not isinstance(entry, StreamEntry) or entry.stream is None:
            raise SettingsError(f"Entries that a consumer gave are needed, not {entry!r}.")
    return listed


def _is_pair(item: Any) -> bool:
    return type(item) is tuple and len(item) == 2 and isinstance(item[1], StreamEntry)


def _check_number(what: str, value: object, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise SettingsError(f"{what} must be a whole number {bounds}, not {value!r}.")
