"""The capability to keep the state of a streaming pipeline: rows that wait until their window closes.

State is only added to, a batch at a time: a batch puts its rows there together with what it decided, in one transaction
(`append`). What a window needs when it closes is read, and removed once every target has it. So each step can be
carried out again after a crash, and finds what the one before it did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from weft.errors import WeftError

KEY = "_weft_key"
"""Identifies the group of a stored row, where rows are found by their group."""
BATCH, END = "_weft_batch", "_weft_end"
"""The columns of every stored row: the batch that it came with, and the end of its window in µs since 1970."""


CODED = {b"weft.coded": b"1"}
"""Marks a column of which a database may refuse values (NaN, a null character): it is stored as a text."""
CLOSED = -(1 << 62)
"""Ends before half of this are no times: they mark rows that wait to be removed."""


@dataclass(frozen=True)
class StateBatch:
    """What the last batch in the state decided. A batch that is carried out again must decide the same, whatever the
    clock says by then."""

    number: int
    watermark: int | None
    """Windows that end up to here are closed; in microseconds since 1970."""
    previous: int | None
    """The watermark of the batch before it: rows were late against that one."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """By source, the greatest time of its rows."""
    late: int = 0
    """How many rows of the batch were late."""
    removed: int | None = None
    """Windows that end up to here are no longer in the state: they cannot be reopened."""
    offsets: str = ""
    """A digest of what the batch was to read: another batch of the same number is of another checkpoint."""
    rows: int = 0
    """How many rows the batch has read."""
    ticks: int = 0
    """How often the watermark was moved between batches, since a source was idle."""
    is_tick: bool = False
    """Whether that was the last decision, after the batch of this number."""
    open_sessions: int = 0
    """How many rows the state has of sessions that have not ended: others are kept for late rows."""

    @property
    def added(self) -> int:
        """The batch whose rows are new; none has this number where no rows came."""
        return -1 if self.is_tick else self.number

    def follows(self, last: StateBatch) -> bool:
        """Return whether this is the decision after another one."""
        return (self.number, self.ticks) in ((last.number + 1, last.ticks), (last.number, last.ticks + 1))


@dataclass(frozen=True)
class Selection:
    """Which stored rows are meant: of windows that end up to `upto`, and after `after` or with a row of `batch`; or of
    those with these `ends`.

    With `whole_keys` all rows of the groups that have such a row, and of those with these `keys`."""

    after: int | None = None
    upto: int | None = None
    batch: int | None = None
    whole_keys: bool = False
    keys: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()


SIDE, TIME, CHECK = "_weft_side", "_weft_time", "_weft_check"
"""The columns of a stored row of a join: 0 for the left and 1 for the right side, its time in µs since 1970, and more
bits of its key: `KEY` is a number there, which an index finds fast."""


@dataclass(frozen=True)
class UnmatchedRange:
    """Which rows of a side are emitted if they have no partner: those after one time, unless it is `None`, and up to
    another, and those of the batch up to that. Their ends are after and up to these."""

    after: int | None
    upto: int
    end_after: int
    end_upto: int


@dataclass(frozen=True)
class Pairs:
    """Which stored rows of a join a batch emits: those that belong together, if one of them came with the batch, and
    those that have no partner."""

    batch: int
    least: int
    """How much later than the left row the right one is at least, in microseconds."""
    most: int
    left: tuple[str, ...]
    """The columns of the left side."""
    right: tuple[str, ...]
    alone: Mapping[int, UnmatchedRange] = field(default_factory=dict)
    """By side, which rows without a partner are emitted."""


class StateStore(ABC):
    """The state of one pipeline under one checkpoint."""

    @abstractmethod
    def last(self) -> StateBatch | None:
        """Return what the last batch decided; `None` before the first one."""

    @abstractmethod
    def schema(self) -> pa.Schema | None:
        """Return the columns of the stored rows; `None` before the first batch."""

    @abstractmethod
    def append(self, rows: pa.Table, batch: StateBatch, replaced: Selection | None = None) -> None:
        """Store the rows of a batch and what it decided, and remove the `replaced` rows of earlier batches, all of it
        or nothing. Raise where the state does not end with the batch before it: another process has gone on."""

    def append_joined(self, rows: pa.Table, batch: StateBatch, wanted: Pairs) -> pa.Table | None:
        """Store the rows of a batch as `append` does. Return its pairs, where they were found meanwhile."""
        self.append(rows, batch)
        return None

    @abstractmethod
    def retype(self, schema: pa.Schema) -> None:
        """Give columns another type, to which stored values are converted, and add those that are new."""

    @abstractmethod
    def read(self, wanted: Selection) -> pa.Table:
        """Return stored rows."""

    @abstractmethod
    def pairs(self, wanted: Pairs) -> pa.Table:
        """Return stored rows of two sides that belong together, the columns of the left side first."""

    @abstractmethod
    def counts(self) -> dict[int, int]:
        """Return how many rows are stored of windows that are not marked as closed, by the end of their window."""

    def groups(self, columns: Sequence[str], wanted: Selection) -> dict[int, int]:
        """Return how many different values these columns, of which one is the end, have in stored rows, by the end of
        their window."""
        ends = self.read(wanted).select(columns).group_by(columns).aggregate([])[END]
        return {each["values"]: each["counts"] for each in ends.value_counts().to_pylist()}

    def refuses_name(self, name: str) -> str | None:
        """Return why no column can have this name; `None` where one can."""
        return None

    def can_hold(self, columns: Sequence[pa.Field]) -> bool:
        """Return whether rows can have these columns."""
        return True

    @abstractmethod
    def remove(self, upto: int) -> None:
        """Remove the rows of windows that end up to a time."""

    def is_remembered(self) -> None:  # noqa: B027 - optional
        """Drop what helps to find pairs: the process has all rows in memory, and finds them there."""

    def release(self) -> None:  # noqa: B027 - optional
        """Let others open what one process at a time may have: a batch is done with it."""

    def close(self) -> None:  # noqa: B027 - optional
        """Close what is open."""


def overtaken(batch: StateBatch) -> WeftError:
    """Return the error of a batch that the state does not wait for."""
    return WeftError(
        f"The state does not end with batch {batch.number - 1}: another process has gone on, or the checkpoint and the "
        "state are not of the same time.",
        hint="Run the pipeline once at a time, and keep its checkpoint. To begin again: weft checkpoints reset NAME.",
    )
