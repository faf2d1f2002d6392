"""`consume`, `ack`, `nack`, `reset`, `groups`: leased batches of events for the members of named consumers."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from itertools import count
from operator import itemgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from weft.errors import ConnectionFailedError, EventsLostError, LeaseLostError, SchemaError, SettingsError, WeftError
from weft.project import current
from weft.streams import retention
from weft.streams.declare import Stream
from weft.streams.events import Event, Lease, as_offset, in_rounds, offset_of, to_dicts
from weft.streams.publishing import publish_once
from weft.streams.retention import aware
from weft.streams.runtime import OpenedStream, for_asyncio, open_stream, open_stream_async, opened
from weft.systems.base import Connection
from weft.systems.log import PUBLISH_ID, PUBLISHED_AT, RESERVED_PREFIX, ROWID, Leased, Refused, Release, Span
from weft.types import FieldType, check_value, to_json

_MAX_BATCH = 100_000
LONGEST_SECONDS = 365 * 86_400
"""The longest lease, wait or delay: a year."""
LEFT_OUT = "too long or deep for a dead letter, and left out"
"""In the reason of a dead letter without some of its event: a replay leaves it where it is. Reasons are stored."""
# How often a call that waits for events also looks for leases that ran out and delays that ended.
_LOOK_SECONDS = 0.5
# A read may bring so many events for each that is wanted.
_READ_FOR_ONE = 4

T = TypeVar("T")

Consumed = Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""An event or many, as `consume` returned them."""
HasRoom = Callable[[dict[str, Any]], bool]
"""Whether a batch has room for one more event. It must have some for the first."""


def consume_sync(
    stream: str | Stream | None = None,
    consumer: str | None = None,
    batch_size: int = 100,
    connection: str | Connection | None = None,
    member: str | None = None,
    lease: float = 60,
    wait: float = 0,
    *,
    stream_name: str | Stream | None = None,
    consumer_name: str | None = None,
) -> list[dict[str, Any]]:
    """Return up to `batch_size` unacknowledged events of `consumer`, leased to this member for `lease` seconds.

    First come this member's own unacknowledged events, then those whose lease ran out, then new ones. Workers that
    share a consumer's name share its events. `member` names this worker, so that it gets its events back at once after
    a restart; by default every thread or task is a member of its own. With `wait` the call waits so many seconds for
    the first event. Raises `EventsLostError` once if retention removed events before they were consumed.
    `stream_name` and `consumer_name` are other names of the first two."""
    of: str | Stream = _either("stream", stream, stream_name)
    by: str = _either("consumer", consumer, consumer_name)
    ready = opened(of, connection) or open_stream(of, connection)
    member = _checked(by, batch_size, member, lease, wait)
    deadline = time.monotonic() + wait
    while True:
        version = ready.hub.watch.version
        events = _take(ready, by, member, batch_size, lease)
        left = deadline - time.monotonic()
        if events or left <= 0:
            return events
        ready.hub.watch.wait(version, min(left, _LOOK_SECONDS))


async def consume(
    stream: str | Stream | None = None,
    consumer: str | None = None,
    batch_size: int = 100,
    connection: str | Connection | None = None,
    member: str | None = None,
    lease: float = 60,
    wait: float = 0,
    *,
    stream_name: str | Stream | None = None,
    consumer_name: str | None = None,
) -> list[dict[str, Any]]:
    """`consume_sync` for asyncio; waiting takes no thread."""
    of: str | Stream = _either("stream", stream, stream_name)
    by: str = _either("consumer", consumer, consumer_name)
    ready = await open_stream_async(of, connection)
    member = _checked(by, batch_size, member, lease, wait)
    deadline = time.monotonic() + wait
    while True:
        version = ready.hub.watch.version
        events = await consume_now(ready, by, batch_size, member=member, lease=lease)
        left = deadline - time.monotonic()
        if events or left <= 0:
            return events
        await ready.hub.watch.wait_async(version, min(left, _LOOK_SECONDS))


def _either(name: str, *values: object) -> Any:
    """Return the argument that was given, under either of its names."""
    named = [each for each in values if each is not None]
    if len(named) != 1:
        raise SettingsError(f"consume takes {name}, or {name}_name in its place: {'both' if named else 'none'} given.")
    return named[0]


async def consume_now(
    ready: OpenedStream,
    consumer: str,
    batch_size: int,
    *,
    member: str | None,
    lease: float,
    has_room: HasRoom | None = None,
) -> list[dict[str, Any]]:
    """Consume without waiting. The batch ends before the first event that there is no room for."""
    member = _checked(consumer, batch_size, member, lease, 0)
    future = ready.hub.submit(_take, ready, consumer, member, batch_size, lease, has_room)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        # The thread goes on, and leases to a task that is gone.
        future.add_done_callback(lambda done: _give_back(ready, consumer, done))
        raise


def _give_back(ready: OpenedStream, consumer: str, done: Future[list[dict[str, Any]]]) -> None:
    if done.cancelled():
        return
    error = done.exception()
    with suppress(WeftError):  # else they come back when the lease ends
        if error is None:
            return_undelivered(ready, consumer, done.result())
        elif isinstance(error, EventsLostError):
            ready.log.report_again(consumer, error.lost)


def return_undelivered(ready: OpenedStream, consumer: str, events: Consumed) -> int:
    """Give back events that nobody received, as if they had not been delivered; return how many."""
    returned = 0
    for lease, rowids in _by_lease(ready, events).items():
        token = None if lease is None else lease.token
        outcome = ready.log.settle(consumer, rowids, token=token, release=Release(undelivered=True))
        # Refused where their lease ran out: then they are on their way to others already.
        returned += 0 if isinstance(outcome, Refused) else outcome
    return returned


def _checked(consumer: str, batch_size: int, member: str | None, lease: float, wait: float) -> str:
    _check_name("consumer", consumer)
    if member is not None:
        _check_name("member", member)
    if type(batch_size) is not int or not 1 <= batch_size <= _MAX_BATCH:
        raise SettingsError(f"batch_size must be a whole number from 1 to {_MAX_BATCH:,}, not {batch_size!r}.")
    for name, value, least in (("lease", lease, 0.001), ("wait", wait, 0)):
        if type(value) not in (int, float) or not least <= value <= LONGEST_SECONDS:
            raise SettingsError(f"{name} must be a number of seconds from {least} to a year, not {value!r}.")
    return member or default_member()


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable() or name != name.strip():
        raise SettingsError(f"A {what} has a name of 1 to 200 printable characters, not {name!r}.")


_boot = secrets.token_hex(3)
_numbers = count(1)
_by_thread = threading.local()
_by_task: WeakKeyDictionary[asyncio.Task[Any], tuple[int, str]] = WeakKeyDictionary()


def default_member() -> str:
    """Return a name that only this task or thread has: two that share a name would get the same events."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    pid = os.getpid()
    known = getattr(_by_thread, "name", None) if task is None else _by_task.get(task)
    if known is not None and known[0] == pid:
        return str(known[1])
    name = f"{socket.gethostname()[:80]}:{pid}:{_boot}:{next(_numbers)}"
    if task is None:
        _by_thread.name = (pid, name)
    else:
        _by_task[task] = (pid, name)
    return name


def _take(
    ready: OpenedStream, consumer: str, member: str, limit: int, seconds: float, has_room: HasRoom | None = None
) -> list[dict[str, Any]]:
    log, stream = ready.log, ready.stream
    while True:
        leased = log.lease(consumer, member, limit, seconds, max_deliveries=stream.max_deliveries)
        if leased.lost:
            raise EventsLostError(
                f"Consumer {consumer!r} of stream {stream.name!r} lost {leased.lost:,} events: "
                "they were removed before they were consumed.",
                lost=leased.lost,
                hint="Consume again to go on with what is left. Keep events for longer, or consume faster.",
            )
        if leased.exhausted:
            _move_to_dead_letters(ready, consumer, member, leased)
        if leased.spans:
            # One for all spans: their ack is one transaction.
            lease = Lease(stream.name, consumer, leased.token, is_original=True)
            try:
                events = _read_all(ready, consumer, leased.spans, lease, has_room)
            except ConnectionFailedError:
                # Nobody saw them: without this, tries that fail would use up max_deliveries.
                with suppress(WeftError):  # else they come back when the lease ends
                    for span in leased.spans:
                        rowids = range(span.first, span.last + 1)
                        log.settle(consumer, rowids, token=lease.token, release=Release(undelivered=True))
                raise
            if events:
                retention.enforce_soon(ready)
                return events
        elif not leased.exhausted:
            return []


def _read_all(
    ready: OpenedStream, consumer: str, spans: list[Span], lease: Lease, has_room: HasRoom | None
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for at, event in _read(ready, consumer, spans, lease, in_steps=has_room is not None):
        if has_room is not None and not has_room(event):
            rowids = list(_rowids(ready, [replace(spans[at], first=event[ROWID]), *spans[at + 1 :]]))
            with suppress(WeftError):  # else they come back when the lease ends
                ready.log.settle(consumer, rowids, token=lease.token, release=Release(undelivered=True))
            break
        events.append(event)
    return events


def _read(
    ready: OpenedStream, consumer: str, spans: list[Span], lease: Lease, *, in_steps: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the events of leased spans, each with the index of its span."""
    log = ready.log
    done = 0
    for run in _runs(spans):
        after, upto, count = run[0].first - 1, run[-1].last, _events_in(run)
        events = (
            in_rounds(log, after, upto, count, lease) if in_steps else to_dicts(log.read(after, upto, count), lease)
        )
        empty = dict(enumerate(run))
        for at, event in _inside(run, events, itemgetter(ROWID)):
            empty.pop(at, None)
            yield done + at, event
        done += len(run)
        # Their rows were deleted, by hand or by retention: they would be leased again indefinitely.
        for span in empty.values():
            log.settle(consumer, range(span.first, span.last + 1), token=lease.token, release=Release())


def _rowids(ready: OpenedStream, spans: list[Span]) -> Iterator[int]:
    for run in _runs(spans):
        batches = ready.log.read_arrow(run[0].first - 1, run[-1].last, [ROWID])
        rowids = (rowid for batch in batches for rowid in batch.column(0).to_pylist())
        yield from (rowid for _, rowid in _inside(run, rowids, int))


def _runs(spans: list[Span]) -> Iterator[list[Span]]:
    """Cut spans into runs, each of which is read at once: where offsets were left scattered, a read for each span
    could outlast the lease. At most three of four events that a read brings are of others."""
    run: list[Span] = []
    events = 0
    for span in spans:
        events += span.events
        if run and not (run[-1].last < span.first and span.last - run[0].first < _READ_FOR_ONE * events):
            yield run
            run, events = [], span.events
        run.append(span)
    yield run


def _events_in(run: list[Span]) -> int:
    """The most events that a read of a run brings."""
    return run[0].events if len(run) == 1 else run[-1].last - run[0].first + 1


def _inside(run: list[Span], items: Iterable[T], rowid_of: Callable[[T], int]) -> Iterator[tuple[int, T]]:
    """Yield what lies in a span of a run, with the span's index: others hold or have acknowledged what is between."""
    at = 0
    for item in items:
        rowid = rowid_of(item)
        while run[at].last < rowid:
            at += 1
        if run[at].first <= rowid:
            yield at, item


def _move_to_dead_letters(ready: OpenedStream, consumer: str, member: str, leased: Leased) -> None:
    """Move events that were delivered too often to the dead letters: stored there first, then acknowledged here.

    A crash in between repeats the first step, which the key of each record makes harmless.
    """
    stream = ready.stream
    declared = current().streams.get(stream.dead_letter or "")
    target, connection = (declared, None) if declared is not None else (stream.dead_letters, ready.hub.connection)
    lease = Lease(stream.name, consumer, leased.token)
    records, rowids = [], []
    for at, event in _read(ready, consumer, leased.exhausted, lease):
        span = leased.exhausted[at]
        rowids.append(event[ROWID])
        # With the publish: a stream that was deleted and created again has the same offsets again.
        origin = f"{stream.schema}.{stream.name}/{consumer}/{leased.epoch}/{event[ROWID]}/{event.get(PUBLISH_ID)}"
        body, left_out = _body(event)
        reason = span.reason or f"delivered {span.deliveries} times and never acknowledged"
        if left_out:
            reason += f" ({LEFT_OUT}: {', '.join(map(repr, left_out))})"
        records.append(
            {
                "stream": stream.name,
                "consumer": consumer,
                "rowid": event[ROWID],
                "published_at": event[PUBLISHED_AT],
                "deliveries": span.deliveries,
                "reason": reason,
                "event": body,
                "delivery": origin,
            }
        )
    if records:
        publish_once(target, connection, records, "delivery")
        ready.log.settle(consumer, rowids, token=leased.token, member=member)


def _body(event: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return an event as the JSON of its dead letter, and the keys that were left out: JSON takes more room than
    columns.

    Every event must fit a dead letter, or its consumer would stop there indefinitely."""
    fields = {key: value for key, value in event.items() if not key.startswith(RESERVED_PREFIX)}
    body = json.loads(json.dumps(fields, default=to_json))
    if _fits(body):
        return body, []
    left_out = [key for key, value in body.items() if not _fits({key: value})]
    largest = sorted(body, key=lambda key: len(json.dumps(body[key])), reverse=True)
    for key in dict.fromkeys([*left_out, *largest]):
        if key not in left_out:
            left_out.append(key)
        del body[key]
        if _fits(body):
            break
    return body, [key[:100] for key in left_out]


def _fits(body: dict[str, Any]) -> bool:
    try:
        check_value(body, _JSON)
    except ValueError:
        return False
    return True


_JSON = FieldType("json")


# --------------------------------------------------------------------------------------------------------- ack and nack


def ack_sync(
    stream: str | Stream,
    consumer: str,
    events: Consumed,
    *,
    connection: str | Connection | None = None,
    member: str | None = None,
) -> int:
    """Acknowledge consumed events, in any order and any part of a batch: they are not delivered to this consumer again.

    Takes the consumed dicts, or dicts that have `_weft_rowid` alone. Raises `LeaseLostError` for events whose lease ran
    out or went to another member. Returns how many were acknowledged now: a repeated ack counts nothing."""
    ready = opened(stream, connection) or open_stream(stream, connection)
    return _settle(ready, consumer, events, member, None)


ack = for_asyncio(ack_sync)


def nack_sync(
    stream: str | Stream,
    consumer: str,
    events: Consumed,
    *,
    delay: float = 0,
    reason: str | None = None,
    connection: str | Connection | None = None,
    member: str | None = None,
) -> int:
    """Give events back, to be delivered again after `delay` seconds; how many. Dead letters keep the `reason`."""
    if type(delay) not in (int, float) or not 0 <= delay <= LONGEST_SECONDS:
        raise SettingsError(f"delay must be a number of seconds, not {delay!r}.")
    if reason is not None:
        reason = str(reason).encode("utf-8", "replace").decode().replace("\x00", "�")[:2000]
    ready = opened(stream, connection) or open_stream(stream, connection)
    return _settle(ready, consumer, events, member, Release(delay, reason))


nack = for_asyncio(nack_sync)


def _by_lease(ready: OpenedStream, events: Consumed) -> dict[Lease | None, list[int]]:
    if isinstance(events, Mapping):
        events = [events]
    elif not hasattr(events, "__iter__"):
        raise SchemaError(
            f"Consumed events are needed for {ready.stream.name!r}, not {type(events).__name__}.",
            hint="Pass the events that consume returned.",
        )
    by_lease: dict[Lease | None, dict[int, None]] = {}
    for index, event in enumerate(events):
        rowid = offset_of(event) if isinstance(event, Mapping) else None
        if rowid is None or not 0 < rowid < 2**63:
            raise SchemaError(
                f"Event {index} of the ack to {ready.stream.name!r} has no {ROWID} that is an offset.",
                index=index,
                field=ROWID,
                value=event.get(ROWID) if isinstance(event, Mapping) else None,
                hint="Pass the events that consume returned.",
            )
        by_lease.setdefault(event.lease if isinstance(event, Event) else None, {})[rowid] = None
    return {lease: list(rowids) for lease, rowids in by_lease.items()}


def _settle(ready: OpenedStream, consumer: str, events: Consumed, member: str | None, release: Release | None) -> int:
    """Ack or nack lease by lease; what was refused is raised once the others are settled."""
    done = 0
    refused: list[Refused] = []
    for lease, rowids in _by_lease(ready, events).items():
        if lease is not None and (lease.stream, lease.consumer) != (ready.stream.name, consumer):
            why = f"they were delivered to consumer {lease.consumer!r} of stream {lease.stream!r}"
            refused.append(Refused(rowids, why))
            continue
        acked = lease.acked if lease is not None and release is None else set()
        left = [rowid for rowid in rowids if rowid not in acked]
        token = None if lease is None else lease.token
        again = lease is not None and release is None and (not lease.is_original or lease.unanswered > 0)
        if lease is not None and left:
            lease.unanswered += 1
        outcome = (
            ready.log.settle(consumer, left, token=token, member=member, release=release, again=again) if left else 0
        )
        if isinstance(outcome, Refused):
            refused.append(replace(outcome, rowids=left))  # all of a delivery or nothing
        else:
            done += outcome
            acked.update(left)
        if lease is not None and left:
            lease.unanswered -= 1
    if refused:
        raise _lease_lost(ready, consumer, "ack" if release is None else "nack", refused)
    return done


def _lease_lost(ready: OpenedStream, consumer: str, action: str, refused: list[Refused]) -> LeaseLostError:
    rowids = sorted(rowid for each in refused for rowid in each.rowids)
    count = "1 event" if len(rowids) == 1 else f"{len(rowids):,} events"
    shown = str(rowids[0]) if len(rowids) == 1 else f"{rowids[0]} to {rowids[-1]}"
    late = any(each.late for each in refused)
    return LeaseLostError(
        f"The {action} of {count} ({ROWID} {shown}) by consumer {consumer!r} of stream {ready.stream.name!r} "
        "was refused: "
        f"{'; '.join(dict.fromkeys(each.why for each in refused))}.",
        rowids=tuple(rowids),
        hint="If the work takes longer than the lease, take a longer one: lease=…, in frames and consumers claim_idle."
        if late
        else None,
    )


# ----------------------------------------------------------------------------------------------------- reset and groups


def reset_sync(
    stream: str | Stream,
    consumer: str,
    to: str | int | datetime = "start",
    *,
    connection: str | Connection | None = None,
) -> int:
    """Move a consumer: to the `"start"`, to the `"end"`, or so that the next event is the first at or after an offset
    or a moment.

    What its members hold is taken from them: their acks are refused. Returns the position, after which the consumer
    goes on.
    """
    ready = open_stream(stream, connection)
    _check_name("consumer", consumer)
    log = ready.log
    if to == "start":
        position = log.floor()
    elif to == "end":
        position = log.head()
    elif isinstance(to, datetime):
        position = log.first_since(aware(to)) - 1
    elif (offset := as_offset(to)) is not None:
        # Never past the head: events that are published later must not be skipped.
        position = min(offset - 1, log.head())
    else:
        raise SettingsError(f"reset takes 'start', 'end', an offset or a datetime, not {to!r}.")
    position = max(position, log.floor(), 0)
    log.reset(consumer, position)
    ready.hub.watch.bump()
    return position


reset = for_asyncio(reset_sync)


def groups_sync(stream: str | Stream, *, connection: str | Connection | None = None) -> list[dict[str, Any]]:
    """Return the consumers of a stream: `position` (the last offset delivered), `lag` (events not delivered yet),
    `pending` (delivered, not acknowledged), `lost` (removed by retention before they were consumed) and `members`."""
    return [asdict(group) for group in open_stream(stream, connection, to_read=True).log.groups()]


groups = for_asyncio(groups_sync)
