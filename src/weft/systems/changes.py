"""Changes of rows, as a load into a table takes them: columns of its rows that are none of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

CREATE, UPDATE, DELETE, TRUNCATE, READ = 0, 1, 2, 3, 4
OP, KEY, POSITION, TS, ORDER = "_weft_op", "_weft_key", "_weft_position", "_weft_ts", "_weft_order"
"""What a change is, its key as a text, where it is in the log of its database, when that was in milliseconds since
1970, and its place in the batch."""
OWN = (OP, KEY, POSITION, TS, ORDER)
AT, END = "_weft_at", "_weft_end"
"""In a history: from when a row is so; of a delete its key and time as one text."""
SEPARATOR = "\x1f"
"""Between the parts of a key."""
ESCAPES = (("\x1e", "\x1ee"), (SEPARATOR, "\x1es"))
"""What stands in a part for these signs, in the order in which they are replaced."""
HASHED = "\x1eh"
"""Before the hash of a key that is too long."""


@dataclass(frozen=True)
class Changes:
    """What a load of changes says besides its rows, of which each key has one; in a history several."""

    tolerance_ms: int
    newest_ms: int | None = None
    """The time of the newest change of the batch."""
    kept: tuple[tuple[str, str], ...] = ()
    """Columns that some changes do not say, each with the column that is true for those."""
    soft_delete_column: str | None = None
    truncates: tuple[tuple[str | None, int | None], ...] = ()
    """Position and time of each truncate, in their order: what the table had before is removed."""
    is_history: bool = False
    query: str | None = None
    """The checkpoint that the batch is of; `None` where it is of none."""
    wider: tuple[pa.Field, ...] = ()
    """The columns as the values of the batch need them, where the table may follow."""

    @property
    def own(self) -> tuple[str, ...]:
        """The columns of the rows that are none of the table."""
        return (*OWN, *((AT, END) if self.is_history else ()), *(flag for _, flag in self.kept))
