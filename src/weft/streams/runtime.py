"""What a process holds open: a hub for each connection, with its store, its committer and its watch for new events."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from weft.errors import SettingsError, WeftError, unknown
from weft.project import Project, current
from weft.streams.commit import Committer
from weft.streams.declare import Stream
from weft.streams.threads import Threads, await_calls
from weft.streams.watch import Watch
from weft.systems.awaited_log import open_to_read
from weft.systems.base import Connection, system_for
from weft.systems.log import DEAD_LETTER_SUFFIX, Log, Store
from weft.types import FieldType

P = ParamSpec("P")
T = TypeVar("T")

_BLOCKING_THREADS = 16
# A server that answers does so within this. One that does not must not keep a process that is to end.
_END_SECONDS = 2.0


class Hub:
    """Everything that one process holds open for one connection."""

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self.connection = connection
        self.real_time = clock is time.time
        """False in a test that moves its own clock."""
        self.store: Store = system_for(connection.kind).load_log()(connection, clock)
        self.watch = Watch(self.store)
        self._beginning: set[Future[Any]] = set()
        self.committer = Committer(self.store, self._committed, connection.label, self._begin_readers)
        # Each has its own: a database that hangs holds the threads that wait for it, and none of another's.
        self._threads = Threads(_BLOCKING_THREADS, "weft-io")
        # A thread of its own: the others may wait for a commit, which waits for this one.
        self._beginner = Threads(1, "weft-begin")
        self._background: set[Future[object]] = set()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a blocking call of the log protocol in a thread."""
        return self._threads.submit(function, *arguments)

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call of the log protocol in a thread, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def before_commits(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a blocking call in a thread, before anything that this process publishes from now on is stored."""
        future = self._beginner.submit(function, *arguments)
        self._beginning.add(future)
        future.add_done_callback(self._beginning.discard)
        return future

    def _begin_readers(self) -> None:
        if self._beginning:
            wait_for_all(set(self._beginning))

    def _committed(self) -> None:
        self.watch.bump()
        self.store.appended()

    def in_background(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run something that nobody waits for. It is finished before the hub is closed and before the process ends."""
        try:
            future = self.submit(function, *arguments)
        except RuntimeError:  # the interpreter is shutting down: the next process will do it
            return
        self._background.add(future)
        future.add_done_callback(self._background.discard)

    def close(self) -> None:
        """Commit what is queued, end the threads, close the connections."""
        self.committer.close()
        wait_for_all(set(self._background))
        self.watch.close()
        self.store.close()


@dataclass(slots=True)
class OpenedStream:
    """A stream that is ready for use."""

    stream: Stream
    hub: Hub
    log: Log
    trimmed_at: float = 0.0
    keyed: bool = False
    """Whether a publish of this process had a key of its own, which must be forgotten one day."""
    triggered: tuple[str, ...] | None = None
    """The models that a publish has built again; `None` until the first one."""


@dataclass(slots=True)
class _Held:
    """What one project holds open."""

    hubs: dict[Connection, Hub] = field(default_factory=dict)
    streams: dict[Any, OpenedStream] = field(default_factory=dict)
    """By the stream and connection that the caller named; valid while `declarations` is the project's."""
    read: dict[Any, OpenedStream] = field(default_factory=dict)
    """What `streams` is for publishers, for readers."""
    declarations: int = 0


_held: WeakKeyDictionary[Project, _Held] = WeakKeyDictionary()
# Around the tables above, never around a database: one that does not answer would hold up all the others.
_opening = threading.RLock()


def find(stream: str | Stream) -> Stream:
    """Return the declared stream of that name; quarantines and dead letters are known by their streams."""
    if isinstance(stream, Stream):
        return stream
    streams = current().streams
    if isinstance(stream, str):
        if stream in streams:
            return streams[stream]
        for declared in streams.values():
            for derived in derived_streams(declared):
                if derived.name == stream:
                    return derived
        # A consumer of Python can have letters of a stream that is not declared with them: `xconsumer`.
        owner = streams.get(stream.removesuffix(DEAD_LETTER_SUFFIX))
        if owner is not None and owner.dead_letters.name == stream:
            return owner.dead_letters
        raise unknown(
            "stream",
            stream,
            streams,
            otherwise="Import the module that declares it (commands import those of weft.toml and --module).",
        )
    raise SettingsError(
        f"A stream or its name is needed, not a {type(stream).__name__}.",
        hint="The stream comes first: publish(stream, events), consume(stream, consumer).",
    )


def is_declared_on(name: object, connection: Connection) -> bool:
    """Return whether a stream of that name is declared, and on this connection."""
    declared = current().streams.get(name) if isinstance(name, str) else None
    try:
        return declared is not None and current().connection(declared.connection).is_same_place(connection)
    except WeftError:  # its connection is not defined here
        return False


def derived_streams(declared: Stream) -> list[Stream]:
    """Return the streams that a declared one brings along."""
    derived = []
    if declared.on_schema_drift == "quarantine":
        derived.append(declared.quarantine)
    if declared.max_deliveries is not None and declared.dead_letter not in current().streams:
        derived.append(declared.dead_letters)
    return derived


def opened(
    stream: str | Stream, connection: str | Connection | None = None, *, to_read: bool = False
) -> OpenedStream | None:
    """Return the stream if this process has it open already."""
    project = current()
    held = _held_by(project)
    try:
        if held.declarations != project.declarations:
            return None
        # All readers of a process have the same, also when it begins to write.
        ready = held.read.get((stream, connection)) if to_read else None
        return ready or held.streams.get((stream, connection))
    except TypeError:  # not hashable, so not a stream
        return None


def open_stream(
    stream: str | Stream, connection: str | Connection | None = None, *, to_read: bool = False
) -> OpenedStream:
    """Return the stream, opened where it is not yet; its table is created at first use, but not by readers."""
    project = current()
    ready = opened(stream, connection, to_read=to_read)
    while ready is None:
        declarations, declared = project.declarations, find(stream)
        hub = open_hub(project.connection(connection if connection is not None else declared.connection))
        open_it = partial(open_to_read, hub.store) if to_read else hub.store.open
        log = open_it(declared.schema, declared.name, _columns(declared))
        with _opening:
            held = _held_by(project)
            if held.declarations != project.declarations:
                held.declarations, held.streams, held.read = project.declarations, {}, {}
            # Else it was closed or declared again meanwhile.
            if held.hubs.get(hub.connection) is hub and declarations == held.declarations:
                known = held.read if to_read else held.streams
                ready = known.setdefault((stream, connection), OpenedStream(declared, hub, log))
    return ready


def _columns(stream: Stream) -> dict[str, FieldType]:
    return {name: replace(kind, nullable=False) for name, kind in stream.fields.items()}


def stored_log(stream: Stream, connection: str | Connection | None = None) -> Log | None:
    """Return the stream's log, or `None` if nothing was ever published. Unlike `open_stream` this creates nothing."""
    return hub_of(stream, connection).store.find(stream.schema, stream.name, _columns(stream))


async def open_stream_async(
    stream: str | Stream, connection: str | Connection | None = None, *, to_read: bool = False
) -> OpenedStream:
    """`open_stream` for asyncio."""
    ready = opened(stream, connection, to_read=to_read)
    if ready is None:
        open_it = partial(open_stream, stream, connection, to_read=to_read)
        ready = await hub_of(stream, connection).in_thread(open_it)
    return ready


def hub_of(stream: str | Stream, connection: str | Connection | None = None) -> Hub:
    """Return the hub of a stream's connection. The database is not asked for anything."""
    ready = opened(stream, connection, to_read=True)
    if ready is not None:
        return ready.hub
    return open_hub(current().connection(connection if connection is not None else find(stream).connection))


def for_asyncio(blocking: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that calls `blocking` in a thread of the hub of its first parameter, the stream."""

    @wraps(blocking)
    async def call(*arguments: P.args, **named: P.kwargs) -> T:
        options: dict[str, Any] = named
        stream: Any = arguments[0] if arguments else options.get("stream")
        hub = hub_of(stream, options.get("connection"))
        return await hub.in_thread(partial(blocking, *arguments, **named))

    call.__name__ = call.__qualname__ = blocking.__name__.removesuffix("_sync")
    call.__doc__ = f"`{blocking.__name__}` for asyncio."
    return call


def open_hub(connection: Connection) -> Hub:
    project = current()
    with _opening:
        hubs = _held_by(project).hubs
        hub = hubs.get(connection)
        if hub is None:
            hub = hubs[connection] = Hub(connection, project.clock)
        return hub


def _held_by(project: Project) -> _Held:
    held = _held.get(project)
    if held is None:
        with _opening:
            held = _held.setdefault(project, _Held())
    return held


def forget_opened() -> None:
    """Look for every stream again at its next use."""
    with _opening:
        held = _held_by(current())
        held.streams, held.read = {}, {}


def close(project: Project | None = None) -> None:
    """Close everything that a project holds open. It opens again at the next use."""
    project = project or current()
    with _opening:
        held = _held.pop(project, _Held())
    for hub in held.hubs.values():
        hub.close()


def _close_all() -> None:
    await_calls(_END_SECONDS)
    for project in list(_held):
        close(project)


# A forked child keeps its parent's connections as they are: to close or forget them would end them for the parent.
_inherited: list[_Held] = []


def _after_fork() -> None:
    """A child must not use its parent's connections, and has none of its threads."""
    global _held, _opening
    _opening = threading.RLock()
    _inherited.extend(_held.values())
    _held = WeakKeyDictionary()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
