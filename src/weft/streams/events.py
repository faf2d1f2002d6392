"""Events as users see them: dicts, and for consumers dicts that know the lease they came under."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import EventsLostError
from weft.streams.declare import LETTER_FIELDS
from weft.systems.log import EXTRA, ROWID, Log, LogPage

ROWID_TEXT = f"{ROWID}_text"
"""The offset of an event as a text, in JSON: a reader whose numbers are 64-bit floats rounds one beyond 2^53."""
_FIRST_ROUND, _LAST_ROUND = 16, 512


@dataclass(eq=False, slots=True)
class Lease:
    """One delivery: its consumer, the token that fences its ack, and the offsets that were acknowledged."""

    stream: str
    consumer: str
    token: str
    acked: set[int] = field(default_factory=set)
    is_original: bool = False
    """Whether `acked` has all that was acknowledged of it; not of a copy in another process, or that went over HTTP."""
    unanswered: int = 0
    """How many acks of it wait for their answer, or never got one: the connection broke, or the task was cancelled and
    its thread goes on. Who repeats one of these is not refused where it was done."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Lease, (self.stream, self.consumer, self.token, self.acked)


class Event(dict[str, Any]):
    """A consumed event: a dict that also has its lease, so that `ack` can check whether it is still held."""

    __slots__ = ("lease",)
    lease: Lease

    def copy(self) -> Event:
        """Return a copy under the same lease."""
        return restore(self, self.lease)

    def __or__(self, other: Any) -> Any:
        merged = dict.__or__(self, other)
        return merged if merged is NotImplemented else restore(merged, self.lease)

    def __ror__(self, other: Any) -> Any:
        merged = dict.__ror__(self, other)
        return merged if merged is NotImplemented else restore(merged, self.lease)

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (dict(self), self.lease)


def restore(values: Mapping[str, Any] | Iterable[tuple[str, Any]], lease: Lease) -> Event:
    event = Event(values)
    event.lease = lease
    return event


def to_dicts(page: LogPage, lease: Lease | None = None) -> list[dict[str, Any]]:
    """Return a page as plain dicts, or as events of a lease, the extra keys merged in."""
    columns = dict(zip(page.names, page.columns, strict=True))
    extra, names = columns.pop(EXTRA, ()), list(columns)
    rows = zip(*columns.values(), strict=False)
    events: list[dict[str, Any]]
    if lease is None:
        events = [dict(zip(names, values, strict=False)) for values in rows]
    else:
        events = [restore(zip(names, values, strict=False), lease) for values in rows]
    for event, more in zip(events, extra, strict=False):
        if more:
            event.update(more)
    return events


def as_offset(value: object) -> int | None:
    """Return an offset that is a whole number or its digits; `None` for anything else."""
    if type(value) is str and len(value) <= 19 and value.isascii() and value.isdigit():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def offset_of(event: Mapping[str, Any]) -> int | None:
    """Return the offset of an event. A text is exact, a number may have been rounded on its way."""
    return as_offset(event.get(ROWID_TEXT) or event.get(ROWID))


def with_texts(answer: dict[str, Any], *offsets: str) -> dict[str, Any]:
    """Add each of these offsets as a text too, for clients whose numbers are 64-bit floats."""
    for name in offsets:
        answer[f"{name}_text"] = None if answer[name] is None else str(answer[name])
    return answer


def in_json(event: dict[str, Any]) -> dict[str, Any]:
    """Add the offset as a text too, of a dead letter also that of the event that it is about."""
    if "delivery" in event and event.keys() >= LETTER_FIELDS.keys():
        event.setdefault("rowid_text", str(event["rowid"]))
    return with_texts(event, ROWID)


def events_lost(reader: str, stream: str, lost: int) -> EventsLostError:
    """Return the error for a reader that retention overtook."""
    return EventsLostError(
        f"A {reader} of stream {stream!r} lost up to {lost:,} events: retention removed them before they were read.",
        lost=lost,
        hint="Iterate again to go on with what is left.",
    )


def moved(reader: str, stream: str, before: int, to: int, lost: int) -> EventsLostError:
    """Return the error for a reader that goes on after another offset than the one that it had reached."""
    if to > before:
        return events_lost(reader, stream, lost)
    return EventsLostError(
        f"The stream {stream!r} ends at offset {to}, before {before}, after which a {reader} waits for events: an "
        "older state was restored, or the stream was created again.",
        lost=0,
        hint=f"Iterate again to go on after offset {to}.",
    )


def read_on(log: Log, after: int, limit: int) -> tuple[list[dict[str, Any]], int | None, int]:
    """Return the events after an offset; or none, the offset to go on after, and at most how many were removed: some
    were, or the log ends before the offset."""
    events, floor, lost = read_after(log, after, limit)
    if floor:
        return [], floor, lost
    if not events and (head := log.head(after)) < after:
        return [], head, 0
    return events, None, 0


def read_after(log: Log, after: int, limit: int) -> tuple[list[dict[str, Any]], int, int]:
    """Return the events after an offset; or none, the offset up to which they were removed, and at most how many."""
    head = log.head()
    if head <= after:
        return [], 0, 0
    events = to_dicts(log.read(after, head, limit))
    first = events[0][ROWID] if events else None
    if first != after + 1:
        floor, lost = log.lost_after(after, first)
        if floor:
            return [], floor, lost
    return events, 0, 0


def in_rounds(
    log: Log, after: int, upto: int, limit: int, lease: Lease | None = None, *, gapless: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield up to `limit` events of a range. They are read in rounds that grow, so that a caller that stops early,
    because they are large, has few more in memory than it took. `gapless`: end before what retention removes between
    two rounds."""
    count = _FIRST_ROUND
    while limit > 0:
        wanted = min(count, limit)
        events = to_dicts(log.read(after, upto, wanted), lease)
        if gapless and events and events[0][ROWID] != after + 1 and log.floor() > after:
            return
        yield from events
        if len(events) < wanted:
            return
        after, limit, count = events[-1][ROWID], limit - wanted, min(2 * count, _LAST_ROUND)
