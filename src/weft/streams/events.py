"""Events as users see them: dicts, and for consumers dicts that know the lease they came under."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.systems.log import EXTRA, ROWID, Log, LogPage

_FIRST_ROUND, _LAST_ROUND = 16, 512


@dataclass(eq=False, slots=True)
class Lease:
    """One delivery: its consumer, the token that fences its ack, and the offsets that were acknowledged."""

    stream: str
    consumer: str
    token: str
    acked: set[int] = field(default_factory=set)


class Event(dict[str, Any]):
    """A consumed event: a dict that also has its lease, so that `ack` can check whether it is still held."""

    __slots__ = ("lease",)
    lease: Lease

    def copy(self) -> Event:
        """Return a copy under the same lease."""
        return _restore(self, self.lease)

    def __or__(self, other: Any) -> Any:
        merged = dict.__or__(self, other)
        return merged if merged is NotImplemented else _restore(merged, self.lease)

    def __ror__(self, other: Any) -> Any:
        merged = dict.__ror__(self, other)
        return merged if merged is NotImplemented else _restore(merged, self.lease)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (dict(self), self.lease)


def _restore(values: dict[str, Any], lease: Lease) -> Event:
    event = Event(values)
    event.lease = lease
    return event


def to_dicts(page: LogPage) -> list[dict[str, Any]]:
    """Return a page as plain dicts, the extra keys merged in."""
    names, columns, extra = _split(page)
    return _merge([dict(zip(names, values, strict=False)) for values in zip(*columns, strict=False)], extra)


def to_events(page: LogPage, lease: Lease) -> list[dict[str, Any]]:
    """Return a page as events of a lease."""
    names, columns, extra = _split(page)
    events: list[dict[str, Any]] = []
    for values in zip(*columns, strict=False):
        event = Event(zip(names, values, strict=False))
        event.lease = lease
        events.append(event)
    return _merge(events, extra)


def read_after(log: Log, after: int, limit: int) -> tuple[list[dict[str, Any]], int, int]:
    """Return the events after an offset; or none, the offset up to which they were removed, and at most how many
    were."""
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
    log: Log,
    after: int,
    upto: int,
    limit: int,
    convert: Callable[[LogPage], list[dict[str, Any]]] = to_dicts,
) -> Iterator[dict[str, Any]]:
    """Yield up to `limit` events of a range. They are read in rounds that grow, so that a caller that stops early,
    because they are large, has few more in memory than it took."""
    count = _FIRST_ROUND
    while limit > 0:
        wanted = min(count, limit)
        events = convert(log.read(after, upto, wanted))
        yield from events
        if len(events) < wanted:
            return
        after, limit, count = events[-1][ROWID], limit - wanted, min(2 * count, _LAST_ROUND)


def _split(page: LogPage) -> tuple[list[str], list[Any], Any]:
    names: list[str] = []
    columns: list[Any] = []
    extra: Any = ()
    for name, column in zip(page.names, page.columns, strict=True):
        if name == EXTRA:
            extra = column
        else:
            names.append(name)
            columns.append(column)
    return names, columns, extra


def _merge(events: list[dict[str, Any]], extra: Any) -> list[dict[str, Any]]:
    for event, more in zip(events, extra, strict=False):
        if more:
            event.update(more)
    return events
