"""What a process holds open: one hub a connection, with its store, the threads that commit for everybody, and the watch
for new events."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from weft.errors import ConnectionFailedError, StorageError, WeftError, unknown
from weft.project import Project, current
from weft.streams.declare import Stream
from weft.systems.base import Connection, system_for
from weft.systems.log import Appended, Batch, Log, Store

T = TypeVar("T")

# What one commit takes at most: a longer one would make everybody in it wait for its slowest part.
_GROUP_EVENTS = 20_000
_BLOCKING_THREADS = 16


class _Ticket:
    """One publish that waits for its commit, in a thread or in an event loop."""

    __slots__ = ("batches", "error", "future", "lock", "loop", "results")

    def __init__(self, batches: Sequence[Batch], loop: asyncio.AbstractEventLoop | None) -> None:
        self.batches = batches
        self.loop = loop
        self.results: list[Appended] = []
        self.error: BaseException | None = None
        if loop is None:
            self.lock = threading.Lock()
            self.lock.acquire()
        else:
            self.future = loop.create_future()

    def settle(self) -> None:
        """Wake who waits. In its loop's thread for asyncio, in any for the others."""
        if self.loop is None:
            self.lock.release()
        elif not self.future.done():
            if self.error is None:
                self.future.set_result(self.results)
            else:
                self.future.set_exception(self.error)


class Committer:
    """A thread that stores what is queued in one transaction, again and again: many publishers, one wait for the disk.

    It never waits for more to arrive: while it commits, the next group gathers by itself.
    """

    def __init__(self, store: Store, committed: Callable[[], None]) -> None:
        self._store = store
        self._committed = committed
        self._queue: SimpleQueue[_Ticket | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def publish(self, batches: Sequence[Batch]) -> list[Appended]:
        """Store batches, all or none, and return once they are durable."""
        ticket = _Ticket(batches, None)
        self._put(ticket)
        ticket.lock.acquire()
        if ticket.error is not None:
            raise ticket.error
        return ticket.results

    async def publish_async(self, batches: Sequence[Batch]) -> list[Appended]:
        """The same for asyncio."""
        ticket = _Ticket(batches, asyncio.get_running_loop())
        self._put(ticket)
        results: list[Appended] = await ticket.future
        return results

    def _put(self, ticket: _Ticket) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="weft-commit", daemon=True)
                    self._thread.start()
        self._queue.put(ticket)

    def close(self) -> None:
        """Commit what is queued, then end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            ticket = self._queue.get()
            if ticket is None:
                return
            group, events, last = [ticket], _events(ticket), False
            try:
                while events < _GROUP_EVENTS:
                    ticket = self._queue.get_nowait()
                    if ticket is None:
                        last = True
                        break
                    group.append(ticket)
                    events += _events(ticket)
            except Empty:
                pass
            self._commit(group)
            self._wake(group)
            if last:
                return

    def _commit(self, group: list[_Ticket]) -> None:
        try:
            results = self._store.append([batch for ticket in group for batch in ticket.batches])
        except BaseException as error:
            outside = isinstance(error, (ConnectionFailedError, StorageError)) or not isinstance(error, Exception)
            if len(group) == 1 or outside:
                for ticket in group:
                    ticket.error = _copy(error) if len(group) > 1 else error
            else:
                # One of them is to blame: alone, each gets its own answer.
                for ticket in group:
                    self._commit([ticket])
            return
        at = 0
        for ticket in group:
            ticket.results = results[at : at + len(ticket.batches)]
            at += len(ticket.batches)
        self._committed()

    @staticmethod
    def _wake(group: list[_Ticket]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Ticket]] = {}
        for ticket in group:
            if ticket.loop is None:
                ticket.settle()
            else:
                by_loop.setdefault(ticket.loop, []).append(ticket)
        for loop, tickets in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(_settle_all, tickets)


def _settle_all(tickets: list[_Ticket]) -> None:
    for ticket in tickets:
        ticket.settle()


def _events(ticket: _Ticket) -> int:
    return sum(batch.count for batch in ticket.batches)


def _copy(error: BaseException) -> BaseException:
    """An error for each of several callers: they would otherwise write their tracebacks into one."""
    if not isinstance(error, WeftError):
        return error
    twin = type(error).__new__(type(error))
    twin.__dict__.update(error.__dict__)
    twin.args = error.args
    return twin


class Watch:
    """Tells readers that something may have been appended, by this process or another. Readers look for themselves."""

    # After this long without a reader the thread ends; the next reader starts another.
    _LINGER_SECONDS = 5.0

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._futures: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._closed = False
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
        """The same for asyncio; `None` waits for as long as it takes."""
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
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="weft-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        seen: object = None
        needed = time.monotonic()
        while True:
            with self._changed:
                if self._waiting:
                    needed = time.monotonic()
                if self._closed or time.monotonic() - needed > self._LINGER_SECONDS:
                    self._thread = None
                    break
            now = self._store.changed(seen, 1.0)
            if now != seen:
                seen = now
                self.bump()
        self._store.unwatch()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Hub:
    """Everything that one process holds open for one connection."""

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self.connection = connection
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
        future = _threads().submit(function, *arguments)
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
            otherwise="Declare it with @stream in a module that weft.toml lists or --module names.",
        )
    raise WeftError(f"A stream or its name is needed, not a {type(stream).__name__}.")


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
        find(stream)
        raise


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


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call of the log protocol beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), function, *arguments)
