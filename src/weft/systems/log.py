"""The log protocol: what a system must do to hold streams.

Everything in `weft.streams` is written once over these two interfaces. `Store` is one database as one process sees it,
`Log` is one stream in it. All calls block; the asyncio side of `weft.streams` runs them in threads. All may be called
from any thread.

Offsets (`_weft_rowid`) are 64-bit integers that only grow and are never used twice. A reader may read up to `head()`:
no event at or below it will appear later, whatever other writers do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from weft.errors import SettingsError, WeftError
from weft.types import FieldType

if TYPE_CHECKING:
    import pyarrow as pa

ROWID = "_weft_rowid"
PUBLISHED_AT = "_weft_published_at"
PUBLISH_ID = "_weft_publish_id"
EXTRA = "_weft_extra"
META_TYPES = {
    ROWID: FieldType("int64"),
    PUBLISHED_AT: FieldType("timestamp"),
    PUBLISH_ID: FieldType("string"),
    EXTRA: FieldType("json"),
}
RESERVED_PREFIX = "_weft_"
EVENT_TIME = "_event_ts"
"""The column that the rows of every source of a streaming pipeline have: when a row happened, as far as its source
knows."""
# The suffixes of the streams next to a stream.
QUARANTINE_SUFFIX, DEAD_LETTER_SUFFIX = "__quarantine", "__dead_letter"

_REFUSALS = {
    "never": "nothing was ever delivered to this consumer",
    "unread": "they were not delivered to this consumer yet",
    "late": "their lease ran out {:.1f} seconds ago",
    "returned": "they were given back and wait to be delivered again",
    "other": "they were delivered again, and member {!r} holds them now",
    "gone": "their lease is gone: another member acknowledged them, or the consumer was reset",
}
_LATE = {"late", "returned", "other", "gone"}


@dataclass(slots=True)
class Batch:
    """Events for one stream, of one publish or of several, as columns of canonical values."""

    log: Log
    publishes: list[tuple[str, int]]
    """The id of each publish and how many events it has, in the order of the rows."""
    columns: tuple[str, ...]
    values: list[list[Any]]
    extra: list[str | None] | None = None
    """The values that no column holds, as JSON texts."""
    keys: list[bytes | None] | None = None
    """Idempotency keys, one an event; an event whose key was seen within `key_horizon` seconds is not stored again."""
    publish_keys: tuple[bytes, bytes] | None = None
    """Two hashes of a publish with a key: of the key, and of key and events. If the first alone was seen, the key
    came again with other events: `append` raises the error that `reused_key` returns."""
    key_horizon: float = 0.0
    nulls: tuple[bool, ...] | None = None
    """By column, whether it has nulls; `None` if that is unknown."""

    @property
    def count(self) -> int:
        """How many events there are."""
        return sum(count for _, count in self.publishes)


def reused_key(stream: str) -> SettingsError:
    """Return the error for a publish under the key of another one."""
    return SettingsError(
        f"The idempotency key of this publish to {stream!r} is that of an earlier one with other events. "
        "Nothing was stored.",
        hint="Take a new key for other events, and the old one to send the same events again.",
    )


class ColumnsChangedError(WeftError):
    """The columns of a stream's table are not those for which a batch was encoded: it must be encoded again."""


class Appended(NamedTuple):
    """The result of a publish: its first and last offset, and how many events were stored or were duplicates."""

    first: int | None
    last: int | None
    stored: int
    deduplicated: int = 0


@dataclass(frozen=True, slots=True)
class LogPage:
    """Events as columns of canonical values. JSON fields are decoded, `_weft_extra` holds dicts or `None`."""

    names: tuple[str, ...]
    columns: list[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Span:
    """A leased range of offsets, both ends included, that holds `events` events."""

    first: int
    last: int
    events: int
    deliveries: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to a lease request. `exhausted` spans were delivered too often: the caller makes them dead letters."""

    token: str
    spans: list[Span]
    exhausted: list[Span]
    lost: int
    """Events that retention removed, not reported to this consumer yet. Non-zero only when nothing is leased."""
    epoch: int
    """Counts the resets of this consumer: the same offset in another epoch is another delivery."""


@dataclass(frozen=True, slots=True)
class Release:
    """How a nack gives events back, to be delivered again after `delay` seconds."""

    delay: float = 0
    reason: str | None = None
    undelivered: bool = False
    """The events never reached anybody: this delivery does not count."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Offsets whose ack or nack was refused, and why, in words. `late`: a longer lease would have helped."""

    rowids: Sequence[int]
    why: str
    late: bool = False

    @classmethod
    def because(cls, rowids: Sequence[int], reason: str, detail: object = None) -> Self:
        """Return the refusal for a reason of `_REFUSALS`."""
        return cls(rowids, _REFUSALS[reason].format(detail), late=reason in _LATE)


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a group and what it holds."""

    member: str
    pending: int
    expires_at: datetime
    deliveries: int


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer: the last offset delivered, how many events are not delivered (`lag`) or not acked (`pending`)."""

    consumer: str
    position: int
    lag: int
    pending: int
    lost: int
    members: list[Member] = field(default_factory=list)


class StreamSample(NamedTuple):
    """The size of a stream, without a count of its events: where offsets have gaps, the numbers are somewhat larger."""

    published: int
    """As `Log.published` returns it."""
    events: int
    lag: int
    """The lag of the slowest consumer."""


class Log(Protocol):
    """One stream in one database."""

    schema: str
    name: str

    def fields(self, *, fresh: bool = False) -> dict[str, FieldType]:
        """Return the columns of users' fields. `fresh` reads them again: another process may have added some."""

    def add_fields(self, fields: dict[str, FieldType]) -> None:
        """Add columns. A column that another process added meanwhile stays as it is."""

    @property
    def forbidden(self) -> str:
        """Characters that no text column can hold; such a text goes to `_weft_extra`, where they are escaped."""

    def head(self, reached: int = 0) -> int:
        """Return the last offset that a reader may see; 0 for an empty stream. It may go back a little while others
        publish, but not below `reached`, which an earlier head was, unless the stream itself ends before it."""

    def identity(self) -> str | None:
        """Return what no other stream has, also not one that is created after this one was deleted; `None` where the
        offsets of such a one go on, by a clock, and for a stream that nobody has made yet."""

    def published(self) -> int:
        """Return a number that grows by one with each event, or little more where offsets have gaps: for rates."""

    def floor(self) -> int:
        """Return the last offset that retention removed; 0 when nothing was."""

    def removed_after(self, offset: int) -> int:
        """Return at most how many events after an offset retention removed."""

    def lost_after(self, offset: int, following: int | None) -> tuple[int, int]:
        """Return the offset up to which events were removed, and at most how many, for a reader that had read up to
        `offset` and then read the event `following`, or none. Zeros if no loss is known."""

    def count(self) -> int:
        """Return how many events are stored and visible."""

    def size(self) -> int | None:
        """Return about how many bytes the stream takes up, with its index; `None` where that takes a scan."""

    def read(self, after: int, upto: int, limit: int) -> LogPage:
        """Return up to `limit` events with `after < offset <= upto`, in order."""

    def read_arrow(self, after: int, upto: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the range as Arrow batches, in order and in bounded memory. JSON and `_weft_extra` are texts."""

    def bound(self, after: int, upto: int, most: int) -> int:
        """Return an offset up to which a range has at most `most` events, and at least one if it has any."""

    def extent(self, after: int, upto: int, most: int) -> int:
        """Return at most how many events a range has. Where they must be counted one by one, no further than `most`."""

    def first_since(self, moment: datetime, reached: int = 0) -> int:
        """Return the first offset published at or after `moment`; one past the head if there is none. `reached`: as for
        the head."""

    def expired(self, before: datetime, now: datetime) -> int:
        """Return the last offset of the events that are older than a moment; 0 if there are none. An event whose time
        is after `now`, by a clock that was ahead, counts as older if a later event is."""

    def lease(
        self, consumer: str, member: str, limit: int, seconds: float, *, max_deliveries: int | None = None
    ) -> Leased:
        """Lease up to `limit` events to a member: its own unacknowledged ones first, then those whose lease ran out,
        then new ones."""

    def settle(
        self,
        consumer: str,
        rowids: Sequence[int],
        *,
        token: str | None = None,
        member: str | None = None,
        release: Release | None = None,
        again: bool = False,
    ) -> int | Refused:
        """Acknowledge offsets, or with `release` give them back: all or none, if the lease that covers them is still
        the caller's. `again`: the caller may have acknowledged some before, and does not know; until the lease of the
        token ends, those that are acknowledged are skipped. Return how many were not settled before."""

    def report_again(self, consumer: str, lost: int) -> None:
        """Let the next lease report so many lost events: the caller of the last one was gone."""

    def reset(self, consumer: str, position: int) -> None:
        """Forget every lease of a consumer and let it go on after `position`."""

    def groups(self) -> list[Group]:
        """Return every consumer of this stream."""

    def members(self, consumer: str) -> list[Member]:
        """Return the members that hold events of a consumer. Unlike `groups` this counts no event that nobody has."""

    def forget_consumer(self, consumer: str) -> bool:
        """Remove a consumer with its position and its leases; return whether there was one."""

    def trim(self, upto: int, *, keeps_unread: bool = False) -> int:
        """Remove the events up to and including an offset, note the loss for each consumer, and return how many. With
        `keeps_unread` nothing goes that a consumer has not read, also not one that is being created."""

    def remove(self, rowids: Sequence[int]) -> int:
        """Remove these events and no others, note the loss for each consumer that has not read them, and return how
        many there were. The head stays, and no offset is used again."""

    def trim_keys(self, before: float, most: int | None = None, young: float = math.inf) -> None:
        """Forget idempotency keys seen before a moment (seconds of the store's clock). With `most` forget also those
        that are older than the newest so many, and were seen before the moment `young`."""

    def nth_last(self, n: int) -> int | None:
        """Return the offset of the `n`-th event from the end, or `None` where there are fewer."""


class Store(Protocol):
    """A database that holds streams, as one process sees it.

    Made of a connection and of the clock to use where the database has none of its own: `(connection, clock)`. One
    thread at a time calls `append` and `appended`."""

    def open(self, schema: str, name: str, fields: dict[str, FieldType]) -> Log:
        """Return the stream's log, created where it is missing. No change of an existing table loses data."""

    def find(self, schema: str, name: str, fields: dict[str, FieldType]) -> Log | None:
        """Return the stream's log for readers, or `None` where there is no such stream. Nothing is written, and no lock
        of writers is waited for. `fields`: the types of those that the store does not know yet."""

    def names(self) -> list[tuple[str, str]]:
        """(schema, name) of every stream stored here, declared or not."""

    def delete(self, schema: str, name: str) -> bool:
        """Remove a stream, with its events, consumers and keys; return whether it existed. `open` creates it again."""

    def sample(self, names: Sequence[tuple[str, str]]) -> list[StreamSample | None]:
        """Return the sizes of these streams, of (schema, name), zeros where there is no such stream, and `None` for one
        that cannot be read. Cheap enough for all streams every few seconds."""

    def append(self, batches: Sequence[Batch]) -> Sequence[list[Appended] | WeftError]:
        """Store batches of any streams in one transaction, and return the result of each publish of each batch.

        When this returns they are durable, when it raises none is stored. If the connection breaks during the commit,
        that is unknown. Where one transaction cannot hold them all, an error stands for a batch that alone was not
        stored."""

    def appended(self) -> None:
        """Called after a commit of this process: wake the readers of others where the system has a way to."""

    def changed(self, seen: object, timeout: float) -> object:
        """Block until something may have been appended since the state `seen` (`None` at first), or until `timeout`;
        return the new state."""

    def unwatch(self) -> None:
        """Release what `changed` holds: no reader waits for changes any more."""

    def make_room(self) -> bool:
        """Free what is kept back of a full disk, so that events can be removed; return whether there was any."""

    def now(self) -> float:
        """Return the store's clock, in seconds since 1970."""

    def close(self) -> None:
        """Close connections and threads. Later calls raise `ConnectionFailedError`."""
