"""Group commit: many publishers, one wait for the disk.

Publishes are not only stored but also checked by the group: the events of all that wait for one stream become one set
of columns, whose types are looked at together. Where that finds something odd, each publish is looked at by itself, so
that an error reaches the one that caused it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from weft.errors import ConnectionFailedError, StorageError, WeftError
from weft.streams.encode import encode_quickly, to_batch
from weft.systems.log import Appended, Batch, ColumnsChangedError, Log, Store

if TYPE_CHECKING:
    from weft.streams.runtime import OpenedStream

_log = logging.getLogger("weft.streams")

# The most events and bytes of one commit, unless one publish alone is larger: all publishes wait for the slowest.
_GROUP_EVENTS = 20_000
_GROUP_BYTES = 64 * 1024 * 1024
# How large a publish is shows in some of its events.
_WEIGHED_EVENTS = 16
_WEIGHED_DEPTH = 4


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """One publish that waits for its commit. Either its events are still to be encoded, or its batches are ready."""

    ready: OpenedStream
    publish_id: str
    events: list[dict[str, Any]]
    encode: Callable[[Ticket], list[Batch]]
    key: str | None = None
    """Names the publish; under the same one again its events are duplicates."""
    is_recomputed: bool = False
    """Whether other events under the same key are duplicates too."""
    has_looked: bool = False
    """Whether the caller has just read the columns of the stream's table again."""
    keys: Set[str] | None = None
    """The keys of its events, if they were computed."""
    batches: list[Batch] | None = None
    appended: Appended | None = None
    """The result for the events that went to the stream itself, not to its quarantine."""
    error: BaseException | None = None
    weight: int = 0
    """About how many bytes the events have."""
    loop: asyncio.AbstractEventLoop | None = None
    future: asyncio.Future[None] = field(init=False)
    lock: threading.Lock = field(init=False)


class Committer:
    """A thread that stores what is queued in one transaction, again and again.

    It never waits for more to arrive: while it commits, the next group gathers by itself.
    """

    def __init__(
        self, store: Store, committed: Callable[[], None], name: str, committing: Callable[[], None] = lambda: None
    ) -> None:
        self._committing = committing
        self._store = store
        self._committed = committed
        self._name = name
        self._queue: SimpleQueue[Ticket | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Nothing is queued behind the end. Reentrant: a signal's handler may close while its own thread publishes.
        self._lock = threading.RLock()
        self._closed = False

    def publish(self, ticket: Ticket) -> None:
        """Store a publish, all or nothing, and return once it is durable."""
        ticket.lock = threading.Lock()
        ticket.lock.acquire()
        self._put(ticket)
        ticket.lock.acquire()
        if ticket.error is not None:
            raise ticket.error

    def publish_async(self, ticket: Ticket) -> asyncio.Future[None]:
        """Store a publish; the returned future is done once it is durable."""
        ticket.loop = asyncio.get_running_loop()
        ticket.future = ticket.loop.create_future()
        self._put(ticket)
        return ticket.future

    def _put(self, ticket: Ticket) -> None:
        ticket.weight = _weigh(ticket.events)
        with self._lock:
            if self._closed:
                raise self._too_late()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="weft-commit", daemon=True)
                thread.start()
                self._thread = thread
            self._queue.put(ticket)
            self._refuse_rest()

    def close(self) -> None:
        """Commit what is queued, then end the thread. A later publish raises an error."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
            thread = self._thread
        if thread is not None:
            thread.join()
        self._refuse_rest()

    def _too_late(self) -> ConnectionFailedError:
        return ConnectionFailedError(
            f"Nothing was published: {self._name} was closed.", hint="Publish again: the next use opens it."
        )

    def _refuse_rest(self) -> None:
        """Once this is closed, fail every publish that was queued after the end."""
        if not self._closed:
            return
        rest = []
        with suppress(Empty):
            while True:
                ticket = self._queue.get_nowait()
                if ticket is not None:
                    ticket.error = self._too_late()
                    rest.append(ticket)
        _wake(rest)

    def _run(self) -> None:
        following: list[Ticket | None] = []
        while True:
            ticket = following.pop() if following else self._queue.get()
            if ticket is None:
                return
            group, events, weight = [ticket], len(ticket.events), ticket.weight
            with suppress(Empty):
                while events < _GROUP_EVENTS:
                    ticket = self._queue.get_nowait()
                    if ticket is None or weight + ticket.weight > _GROUP_BYTES:
                        following.append(ticket)
                        break
                    group.append(ticket)
                    events += len(ticket.events)
                    weight += ticket.weight
            try:
                self._commit(group)
            except BaseException as error:  # a defect of ours, after the commit: better an error than an endless wait
                for ticket in group:
                    ticket.error = ticket.error or _copy(error)
            _wake(group)

    def _commit(self, group: list[Ticket], *, again: bool = False) -> None:
        unencoded = [ticket for ticket in group if ticket.batches is None]
        batches: list[Batch] = []
        try:
            self._committing()
            batches, owners = _encode(group)
            results = self._store.append(batches) if batches else []
        except BaseException as error:
            # An error that ended this thread would leave all publishers waiting, so it goes to one of them.
            waiting = [ticket for ticket in group if ticket.error is None]
            if _from_outside(error):
                for ticket in waiting:
                    ticket.error = _copy(error)
            elif not again and (isinstance(error, ColumnsChangedError) or _altered(batches)):
                for ticket in unencoded:
                    ticket.batches = None
                self._commit(waiting, again=True)
            elif len(waiting) > 1:
                # One of them is to blame: alone, each gets its own answer.
                for ticket in waiting:
                    self._commit([ticket], again=True)
            else:
                for ticket in waiting:
                    ticket.error = _copy(error)
            return
        refused = {number for number, appended in enumerate(results) if isinstance(appended, WeftError)}
        stored = {id(ticket) for number, tickets in enumerate(owners) if number not in refused for ticket in tickets}
        for batch, tickets, appended in zip(batches, owners, results, strict=True):
            if isinstance(appended, WeftError):
                for ticket in tickets:
                    ticket.error = _copy(_partly_stored(appended) if id(ticket) in stored else appended)
                continue
            for ticket, result in zip(tickets, appended, strict=True):
                if batch.log is ticket.ready.log:
                    ticket.appended = result if ticket.appended is None else _both(ticket.appended, result)
        if batches:
            try:
                self._committed()
            except BaseException as error:
                # The events are stored. Readers look for themselves, if somewhat later.
                _log.warning("waking the readers of new events failed: %s", error)


def _both(one: Appended, behind: Appended) -> Appended:
    """Return the result of two batches of one publish."""
    return Appended(
        behind.first if one.first is None else one.first,
        one.last if behind.last is None else behind.last,
        one.stored + behind.stored,
        one.deduplicated + behind.deduplicated,
    )


def _from_outside(error: BaseException) -> bool:
    """Return whether the database is to blame, so that trying each publish alone would only wait for it again."""
    return isinstance(error, (ConnectionFailedError, StorageError)) or not isinstance(error, Exception)


def _partly_stored(error: WeftError) -> ConnectionFailedError:
    """The error of a publish to two streams, of which one refused it."""
    return ConnectionFailedError(
        error.what, hint="A part of these events is stored: their streams are on several nodes."
    )


def _altered(batches: Sequence[Batch]) -> bool:
    """Read the columns of these batches' tables again; return whether somebody altered them."""
    logs = {batch.log: batch.log.fields() for batch in batches}
    try:
        changed = [log for log, known in logs.items() if log.fields(fresh=True) != known]
    except WeftError:
        return False
    return bool(changed) or any(not batch.log.fields().keys() >= set(batch.columns) for batch in batches)


def _encode(group: Sequence[Ticket]) -> tuple[list[Batch], list[list[Ticket]]]:
    """Return the batches of a group, and the tickets behind the publishes of each batch."""
    batches: list[Batch] = []
    owners: list[list[Ticket]] = []
    streams: dict[Log, list[Ticket]] = {}
    for ticket in group:
        streams.setdefault(ticket.ready.log, []).append(ticket)
    for log, tickets in streams.items():
        # Runs, not heaps: the publishes of a process keep their order. A table may have been declared again meanwhile:
        # each publish is checked as its own declaration says.
        for (is_ready, _), run in groupby(tickets, key=lambda t: (t.batches is not None, id(t.ready.stream))):
            members = list(run)
            together = None
            if not is_ready:
                stream = members[0].ready.stream
                events, keys = members[0].events, members[0].keys
                if len(members) > 1:
                    events, keys = [event for ticket in members for event in ticket.events], None
                encoded = encode_quickly(stream, log, events, keys)
                if encoded is not None:
                    publishes = [(ticket.publish_id, len(ticket.events)) for ticket in members]
                    together = to_batch(stream, log, publishes, encoded)
            if together is not None:
                batches.append(together)
                owners.append(members)
                continue
            for ticket in members:
                try:
                    if ticket.batches is None:
                        ticket.batches = ticket.encode(ticket)
                except BaseException as error:
                    ticket.error = error
                    continue
                for batch in ticket.batches:
                    batches.append(batch)
                    owners.append([ticket])
    return batches, owners


def _weigh(events: list[dict[str, Any]]) -> int:
    """About how many bytes the events have, by some of them."""
    if len(events) == 1:
        return _length(events[0].values(), _WEIGHED_DEPTH)
    step = len(events) // _WEIGHED_EVENTS + 1
    return step * sum([_length(event.values(), _WEIGHED_DEPTH) for event in events[::step]])


def _length(values: Iterable[Any], depth: int) -> int:
    total = 0
    for value in values:
        kind = type(value)
        if kind is str or kind is bytes:
            total += len(value)
        elif depth and (kind is dict or kind is list):
            total += _length(value.values() if kind is dict else value, depth - 1)
    return total


def _wake(group: list[Ticket]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
    for ticket in group:
        if ticket.loop is None:
            ticket.lock.release()
        else:
            by_loop.setdefault(ticket.loop, []).append(ticket)
    for loop, tickets in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed: nothing waits any more
            loop.call_soon_threadsafe(_finish, tickets)


def _finish(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        if not ticket.future.done():
            if ticket.error is None:
                ticket.future.set_result(None)
            else:
                ticket.future.set_exception(ticket.error)


def _copy(error: BaseException) -> BaseException:
    """Return an error for each of several callers: they would otherwise write their tracebacks into one."""
    if not isinstance(error, WeftError):
        return error
    twin = type(error).__new__(type(error))
    twin.__dict__.update(error.__dict__)
    twin.args = error.args
    return twin
