"""The entries protocol: what a system does to have its own streams read entry by entry, those that nobody declared.

`weft.Consumer` and `weft.GroupConsumer` are written once over it. A `System` names its `Entries`. An `EntryReader`
belongs to one consumer, and knows where in each stream it is. Declared streams do not need it: on every system they are
read through their log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

Part = tuple[Any, ...]
"""Streams that one request can read."""


class _Pair(NamedTuple):
    identifier: Any
    field_values: dict[Any, Any]


class StreamEntry(_Pair):
    """An entry of a stream: the pair of its `identifier` and its `field_values`.

    One that a consumer gave also knows its `stream`, and one of a group on Redis how often it was delivered."""

    stream: Any = None
    deliveries: int | None = None


def by_stream(entries: Sequence[StreamEntry], half: Literal["identifier", "field_values"]) -> dict[Any, list[Any]]:
    """Return one half of each entry, by their streams."""
    streams: dict[Any, list[Any]] = defaultdict(list)
    for entry in entries:
        streams[entry.stream].append(getattr(entry, half))
    return streams


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A member of a group, and how it reads."""

    group: Any
    consumer: Any
    auto_create: bool = True
    start_from_backlog: bool = False
    group_start: str = "0"
    claim_idle: int | None = None
    max_deliveries: int | None = None
    dead_letter: Any = None
    create_hint: str = "auto_create=True creates it, at group_start."
    """What an error says where there is no such group."""


class EntryReader(Protocol):
    """Reads streams for a consumer that is alone."""

    def name(self, stream: Any) -> Any:
        """Return the stream as this reader knows it: two ways to write one name are one stream."""

    def parts(self, streams: Sequence[Any]) -> list[Part]:
        """Return the streams, parted into those that one request can read."""

    async def begin(self, stream: Any, identifier: Any) -> None:
        """Find out where reading begins: after `identifier`, or with `None` where it usually does."""

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        """Return up to `count` entries of each stream. Waits up to `wait` milliseconds for the first, or less."""

    async def close(self) -> None:
        """Give back what the reader opened itself."""


class GroupReader(EntryReader, Protocol):
    """Reads streams for a member of a group."""

    held_for: float | None
    """After how many milliseconds others may claim this member's entries; `None` if they do not."""
    recovered: int
    """How many times a group that was gone was created again."""

    @property
    def skipped(self) -> int:
        """How many pending entries were passed over because they are deleted."""

    async def ack(self, entries: Sequence[StreamEntry]) -> int:
        """Acknowledge entries, and return how many were not acknowledged before."""

    async def give_back(self, entries: Sequence[StreamEntry], *, undelivered: bool) -> int:
        """Release entries to any member, and return how many. `undelivered`: this delivery does not count."""


class Entries(Protocol):
    """The streams of a system that nobody declared."""

    noun: ClassVar[str]
    """How errors call such a stream: "a key of Redis"."""
    clients: ClassVar[str]
    """Calls that make clients of the system, for hints."""

    @staticmethod
    def takes(client: object) -> bool:
        """Return whether this is a client of the system, as its driver makes them."""

    @staticmethod
    def open(client: Any, membership: Membership | None) -> EntryReader:
        """Open a reader on a client or a connection; with a membership it is a `GroupReader`."""
