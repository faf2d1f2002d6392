"""Changes of rows, as a load into a table takes them: columns of its rows that are not in the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

Place = tuple[str | None, int | None]
"""Position and time of a change."""
CREATE, UPDATE, DELETE, TRUNCATE, READ = 0, 1, 2, 3, 4
OP, KEY, POSITION, TS, ORDER = "_weft_op", "_weft_key", "_weft_position", "_weft_ts", "_weft_order"
"""What a change is, its key as a text, where it is in the log of its database, when that was in milliseconds since
1970, and its place in the batch. In a history each version has its position in a column of this name."""
FIRST, FIRST_TS = "_weft_first", "_weft_first_ts"
"""Position and time of the first change of the key that the batch has."""
OWN = (OP, KEY, POSITION, TS, ORDER)
AT, END = "_weft_at", "_weft_end"
"""In a history: from when a row is so; of a delete its key, time and position as one text."""
FROM = "_weft_from"
"""For a row whose key was changed, the key of the stored row, as a text."""
SEPARATOR = "\x1f"
"""Between the parts of a key."""
ESCAPES = (("\x1e", "\x1ee"), (SEPARATOR, "\x1es"))
"""What stands in a part for these signs, in the order in which they are replaced."""
HASHED = "\x1eh"
"""Before the hash of a key that is too long."""


SAID, KEEPS, UNKNOWN = 0, 1, 2
"""Whether a batch has a value, the table keeps its own, or nobody knows it, because the row was gone before."""


class Unavailable(NamedTuple):
    """A column whose value is unavailable in some changes of the batch."""

    name: str
    flag: str
    """The column that has SAID, KEEPS or UNKNOWN."""
    position: str
    """The column that has the position of the change that said the value, or made it unknown."""


@dataclass(frozen=True)
class Changes:
    """What a load of changes says besides its rows, of which each key has one; in a history several."""

    tolerance_ms: int
    newest_ms: int | None = None
    """The time of the newest change of the batch."""
    kept: tuple[Unavailable, ...] = ()
    origins: tuple[str, ...] = ()
    """By the key columns, those that have the key of the stored row, where a change of the key says not all values."""
    soft_delete_column: str | None = None
    truncates: tuple[Place, ...] = ()
    """Position and time of each truncate, in their order: what the table had before is removed."""
    is_history: bool = False
    query: str | None = None
    """The checkpoint that the batch is of; `None` where it is of none."""
    wider: tuple[pa.Field, ...] = ()
    """The columns as the values of the batch need them, where the table may follow."""
    counted: pa.Table | None = field(default=None, compare=False, repr=False)
    """OP, KEY, POSITION and TS of each message, also of those that another one of the batch replaces. In a history OP
    alone, by ORDER."""

    @property
    def own(self) -> tuple[str, ...]:
        """The columns of the rows that are not in the table."""
        more = (AT, END) if self.is_history else (FIRST, FIRST_TS)
        origins = (*self.origins, FROM) if self.origins else ()
        return (*OWN, *more, *origins, *(name for each in self.kept for name in (each.flag, each.position)))

    def oldest_ms(self, moment: datetime) -> int:
        """Return the time before which changes are forgotten, for a batch of this moment."""
        newest = int(moment.timestamp() * 1000) if self.newest_ms is None else self.newest_ms
        return newest - self.tolerance_ms

    def late_of(self, known: pa.Table, truncate: Place | None = None) -> tuple[int, ...]:
        """Return how many creates, updates and deletes of the batch are not newer than what is known of their keys
        (KEY, POSITION and TS), or than a truncate."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.counted is None:
            return ()
        stored = known.take(pc.index_in(self.counted[KEY].combine_chunks(), known[KEY].combine_chunks()))
        late = is_late(self.counted, stored[POSITION], stored[TS], self.tolerance_ms)
        if truncate is not None:
            place = pa.scalar(truncate[0], pa.string()), pa.scalar(truncate[1], pa.int64())
            late = pc.or_(late, is_late(self.counted, *place, self.tolerance_ms))
        return by_kind(self.counted[OP].filter(late).to_pylist())


def instant_of(ts_ms: int) -> datetime:
    """Return a time of a change, in milliseconds since 1970, as a `datetime`."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ts_ms)


def by_kind(ops: list[int]) -> tuple[int, ...]:
    """Return how many of these are creates, updates and deletes."""
    return ops.count(CREATE) + ops.count(READ), ops.count(UPDATE), ops.count(DELETE)


def is_late(changes: pa.Table, position: Any, ts: Any, tolerance_ms: int) -> pa.ChunkedArray:
    """Return which changes are not newer than what is known. A position is that of one change; at one time there may be
    several, which come in their order. Positions begin again in a source that was restored: its changes are known by
    their time."""
    import pyarrow.compute as pc

    both = pc.and_(pc.is_valid(changes[POSITION]), pc.is_valid(position))
    is_restored = pc.fill_null(pc.greater(changes[TS], pc.add(ts, tolerance_ms)), False)
    before = pc.and_(pc.less_equal(changes[POSITION], position), pc.invert(is_restored))
    return pc.fill_null(pc.if_else(both, before, pc.less(changes[TS], ts)), False)


def is_after(one: Place, other: Place, tolerance_ms: int, *, at_once: bool = True) -> bool:
    """Return whether a change came after another one in the source. `at_once`: whether it did at the same time, where
    there are no positions."""
    if one[1] is not None and other[1] is not None and one[1] > other[1] + tolerance_ms:
        return True  # as in `is_late`
    if one[0] is not None and other[0] is not None:
        return one[0] > other[0]
    return one[1] is None or other[1] is None or one[1] > other[1] or (at_once and one[1] == other[1])
