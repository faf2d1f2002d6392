"""What consumers ask of the place where their streams are. A reader belongs to one consumer, and knows where in each
stream it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.consumers.entries import StreamEntry

Part = tuple[Any, ...]


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


class Reader(Protocol):
    """Reads streams for a consumer that is alone."""

    def name(self, stream: Any) -> Any:
        """The stream as this reader knows it: two ways to write one name are one stream."""

    def parts(self, streams: Sequence[Any]) -> list[Part]:
        """The streams, parted into those that one request can read."""

    async def begin(self, stream: Any, identifier: Any) -> None:
        """Find out where reading begins: after `identifier`, or with `None` where it usually does."""

    async def read(self, part: Part, count: int, wait: float) -> list[StreamEntry]:
        """Up to `count` entries of each stream. Waits up to `wait` milliseconds for the first, or less."""

    async def close(self) -> None:
        """Give back what the reader opened itself."""


class GroupReader(Reader, Protocol):
    """Reads streams for a member of a group."""

    held_for: float | None
    """After so many milliseconds others may take what this member was given; `None` if they do not."""
    recovered: int
    """How many times a group that was gone was created again."""

    @property
    def skipped(self) -> int:
        """How many pending entries were passed over because they are deleted."""

    async def ack(self, entries: Sequence[StreamEntry]) -> int:
        """Acknowledge entries; how many were not before."""

    async def give_back(self, entries: Sequence[StreamEntry], *, undelivered: bool) -> int:
        """Let any member have the entries at once; how many. `undelivered`: nobody saw them, so that this delivery
        does not count."""
