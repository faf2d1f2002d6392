"""What a process holds open: one hub a connection, with its store, the threads that commit for everybody, and the watch
for new events."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.errors import SettingsError, unknown
from weft.project import Project, current
from weft.streams.commit import Committer
from weft.streams.declare import Stream
from weft.streams.watch import Watch
from weft.systems.base import Connection, system_for
from weft.systems.log import Log, Store

T = TypeVar("T")

_BLOCKING_THREADS = 16


class Hub:
    """Everything that one process holds open for one connection."""

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self.connection = connection
        self.real_time = clock is time.time
        """Not so in a test that moves its own clock."""
        self.store: Store = system_for(connection.kind).load_log()(connection, clock)
        self.watch = Watch(self.store)
        self._committers = [Committer(self.store, self._committed) for _ in range(self.store.committers)]
        self._background: set[Future[object]] = set()

    def committer(self, stream: Stream) -> Committer:
        """The thread that commits a stream's events: always the same one, so that publishes keep their order."""
        return self._committers[hash((stream.schema, stream.name)) % len(self._committers)]

    def _committed(self) -> None:
        self.watch.bump()
        self.store.appended()

    def in_background(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run something that nobody waits for. It is finished before the hub is closed and before the process ends."""
        try:
            future = _threads().submit(function, *arguments)
        except RuntimeError:  # the interpreter is shutting down: the next process will do it
            return
        self._background.add(future)
        future.add_done_callback(self._background.discard)

    def close(self) -> None:
        """Commit what is queued, end the threads, close the connections."""
        for committer in self._committers:
            committer.close()
        wait_for_all(set(self._background))
        self.watch.close()
        self.store.close()


@dataclass(slots=True)
class Opened:
    """A stream that is ready for use."""

    stream: Stream
    hub: Hub
    log: Log
    trimmed_at: float = 0.0


_opening = threading.RLock()


def find(stream: str | Stream) -> Stream:
    """The declared stream of that name; quarantines and dead letters are known by their streams."""
    if isinstance(stream, Stream):
        return stream
    streams = current().streams
    if isinstance(stream, str):
        found = streams.get(stream)
        if found is not None:
            return found
        for declared in streams.values():
            for derived in derived_streams(declared):
                if derived.name == stream:
                    return derived
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


def derived_streams(declared: Stream) -> list[Stream]:
    """The streams that a declared one brings along."""
    derived = []
    if declared.on_schema_drift == "quarantine":
        derived.append(declared.quarantine)
    if declared.max_deliveries is not None and declared.dead_letter not in current().streams:
        derived.append(declared.dead_letters)
    return derived


def opened(stream: str | Stream, connection: str | Connection | None = None) -> Opened | None:
    """The stream if this process has it open already."""
    try:
        return _cache(current()).get((stream, connection))
    except TypeError:  # not hashable, so not a stream
        return None


def open_stream(stream: str | Stream, connection: str | Connection | None = None) -> Opened:
    """The stream, opened where it is not yet; its table is created at first use."""
    project = current()
    cache = _cache(project)
    ready = opened(stream, connection)
    if ready is None:
        declared = find(stream)
        hub = open_hub(project.connection(connection if connection is not None else declared.connection))
        with _opening:
            ready = cache.get((stream, connection))
            if ready is None:
                log = hub.store.open(declared.schema, declared.name, _plain(declared))
                ready = cache[stream, connection] = Opened(declared, hub, log)
    return ready


def _plain(declared: Stream) -> dict[str, Any]:
    from dataclasses import replace

    return {name: replace(kind, nullable=False) for name, kind in declared.fields.items()}


def open_hub(connection: Connection) -> Hub:
    """The hub of a connection, one a process."""
    project = current()
    with _opening:
        hub = project.opened.get(connection)
        if hub is None:
            hub = project.opened[connection] = Hub(connection, project.clock)
        assert isinstance(hub, Hub)
        return hub


def _cache(project: Project) -> dict[Any, Opened]:
    return project.opened_streams


def close(project: Project | None = None) -> None:
    """Close everything that a project holds open. It opens again at the next use."""
    project = project or current()
    with _opening:
        project.opened_streams.clear()
        hubs = list(project.opened.values())
        project.opened.clear()
    for hub in hubs:
        hub.close()


def _after_fork() -> None:
    """A child must not use its parent's connections, and has none of its threads."""
    global _opening, _blocking
    _opening = threading.RLock()
    _blocking = None
    project = current()
    project.opened = {}
    project.opened_streams = {}


os.register_at_fork(after_in_child=_after_fork)
atexit.register(close)


_blocking: ThreadPoolExecutor | None = None


def _threads() -> ThreadPoolExecutor:
    global _blocking
    if _blocking is None:
        _blocking = ThreadPoolExecutor(_BLOCKING_THREADS, thread_name_prefix="weft-io")
    return _blocking


def submit(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run a blocking call of the log protocol in a thread."""
    return _threads().submit(function, *arguments)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call of the log protocol beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), function, *arguments)
