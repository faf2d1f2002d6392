"""The pages protocol: what a system does to have its own streams read as frames, those that nobody declared.

`weft.read_stream`, `iter_stream`, `scan_stream` and `read_streams` are written once over it. A `System` names its
`Pages`, which open a `PageFeed`: a position in a stream that gives page after page. Declared streams do not need it: on
every system they are read through their log, by a `PageFeed` too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from weft.systems.entries import Membership

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class FeedPage:
    """Entries as columns: their ids as strings, the values of each field, null where an entry has none."""

    ids: pa.Array
    fields: dict[str, pa.Array] = field(default_factory=dict)
    deliveries: list[int] | None = None
    """How often each was delivered; `None` where this is the first time."""
    unfit: dict[str, pa.Array] = field(default_factory=dict)
    """Texts of values that do not fit the type of their field, which is null there."""
    is_typed: ClassVar[bool] = False
    """Whether fields have types of their own: bytes are bytes, also where all of them could be texts."""

    def __len__(self) -> int:
        return len(self.ids)

    def times(self) -> tuple[pa.Array, pa.Array]:
        """Return when each entry was added: milliseconds, and its number within them."""
        raise NotImplementedError


class FieldNames(NamedTuple):
    """Which fields of an entry become columns."""

    reserved: Container[str]
    """Names that a field's column cannot have: a frame has columns of its own."""
    wanted: Container[str] | None
    """The columns to read; `None` is all."""


class Rejected(NamedTuple):
    """An entry that does not fit the schema, and why."""

    id: str
    why: str


class PageFeed:
    """A position in a stream. One thread at a time uses it."""

    finished: bool = False
    """Whether nothing more can come: a range was read to its end."""
    drained: bool = False
    """Whether the last fetch saw the end of what is there now."""

    @property
    def name(self) -> str:
        """The stream of the page that was fetched last."""
        raise NotImplementedError

    @property
    def page_size(self) -> int:
        """How many entries to fetch at once, where the caller does not mind."""
        raise NotImplementedError

    def begin(self) -> None:
        """Fix where to start, and make what must be there."""

    def known_fields(self) -> dict[str, pa.DataType]:
        """Return the columns of fields that are known without an entry, for a frame that has none."""
        return {}

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> FeedPage | None:
        """Return the next entries, up to `limit`; `None` if none came in time (`None` waits indefinitely). `more`:
        there will be another fetch."""
        raise NotImplementedError

    def reject(self, rejected: Sequence[Rejected]) -> None:
        """Put entries of the last page into the stream's quarantine: no frame has them."""
        raise NotImplementedError

    def confirm(self) -> None:
        """Acknowledge what was fetched, without waiting for an answer."""

    def settle(self) -> None:
        """Wait until what was confirmed is stored."""

    def give_back(self) -> None:
        """Release the entries that were fetched last to other members, as undelivered."""

    def close(self) -> None:
        """Close the feed's connection."""


class Pages(Protocol):
    """The streams of a system that nobody declared, made of a connection. Spark sends it to its workers."""

    def __init__(self, connection: Any) -> None: ...

    def read_range(
        self, stream: Any, names: FieldNames, start: str, end: str, stopped: Callable[[], bool] = ...
    ) -> PageFeed:
        """Open the entries between two ids. `stopped` is asked while a server that is gone is waited for."""

    def read_group(
        self,
        stream: Any,
        names: FieldNames,
        membership: Membership,
        *,
        iterates: bool,
        confirms: bool,
        stopped: Callable[[], bool],
    ) -> PageFeed:
        """Open the entries that a member of a group is given. `iterates`: they are fetched repeatedly. `confirms`:
        `confirm` will be called."""

    def read_matching(self, pattern: str, names: FieldNames, start: str, end: str) -> PageFeed:
        """Open every stream whose name matches a pattern, one after the other."""

    def partition(self, stream: Any, start: str, end: str, count: int) -> list[tuple[str, str]]:
        """Return up to `count` ranges of ids, of about the same size, that hold all entries of now."""

    def acknowledge(self, stream: Any, group: str, ids: Sequence[str]) -> int:
        """Acknowledge entries, and return how many were pending."""


def name_columns(names: Sequence[bytes], reserved: Container[str]) -> list[str]:
    """Name a column for each field of an entry. A second one of a name is `name#2`, so that none hides another."""
    columns: dict[str, None] = {}
    for name in names:
        text = name.decode(errors="backslashreplace")
        numbered = (text if number == 1 else f"{text}#{number}" for number in count(1))
        columns[next(each for each in numbered if each not in reserved and each not in columns)] = None
    return list(columns)
