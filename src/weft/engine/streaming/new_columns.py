"""The columns of a batch that its table does not have: which of them it gets, and which rows are put aside for theirs.

Without a limit, one message with two thousand keys would widen a table for good, and one with a key that no column of
the database can have would stop the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import python_rows
from weft.engine import frames, inputs
from weft.engine.inputs import Input
from weft.spark_support import outcome
from weft.spark_support.sessions import quoted
from weft.systems.stream_source import EVENT_TIME

# A new table gets so many columns of its first rows, where most rows have them: each database can store such a row.
_MOST_USUAL = 1000


@dataclass(frozen=True)
class ColumnLimits:
    """What a table takes of columns that it does not have."""

    refused: Mapping[str, str]
    """The columns of the batch that it cannot have, and why."""
    room: int
    """How many it may get."""
    most: int
    """How many of them a row may have."""
    is_made: bool
    """Whether there is no table yet. It gets the columns that at least half of its first rows have, too."""
    can_hold: Callable[[Collection[str]], bool]
    """Whether a table can have these columns of the batch."""
    got: Collection[str] = ()
    """The columns, in lower case, that the table got since the batch was first tried."""


class Fitted(NamedTuple):
    """The rows and columns of a batch that a table takes."""

    rows: Input
    aside: list[tuple[dict[str, Any], str]]
    """The rows that it cannot take, each with the reason."""
    added: int
    """How many columns it gets that count."""
    left_out: list[str]
    """The columns that it does not get, and whose values are left out."""
    dropped: Collection[str] = ()
    """All columns that it does not get."""
    is_nothing: bool = False
    """Whether no row is left for a table that is not there: it is made of the first row that it can take."""


def fitted(rows: Input, new: Sequence[str], limits: ColumnLimits) -> Fitted:
    """Return what a table takes of rows with these `new` columns."""
    refused, room = limits.refused, limits.room
    if not refused and (not new or (len(new) <= room and limits.can_hold(new))):
        return Fitted(rows, [], 0 if limits.is_made else len(new), [])
    held = _held(rows)
    extra = [name for name in new if name not in refused]
    kept: list[str] = []
    if limits.is_made:
        counts, size = held.counts(extra), held.size
        usual = [name for name in extra if 2 * counts[name] >= size]
        if len(usual) <= _MOST_USUAL and limits.can_hold(usual):
            kept, common = usual, set(usual)
            extra = [name for name in extra if name not in common]
    aside, held = held.split(list(refused), extra, limits.most)
    # Rows that were put aside decide nothing: what only they have is no column. The columns of many rows come first.
    counts = held.counts(extra)
    filled = sorted(filter(counts.__getitem__, extra), key=counts.__getitem__, reverse=True)
    got = [name for name in filled if name.lower() in limits.got]
    kept += got
    added = len(got)
    for name in filled:
        if added < room and name not in got and limits.can_hold([*kept, name]):
            kept.append(name)
            added += 1
    dropped = {*new, *refused} - set(kept)
    left_out = [name for name in extra if counts[name] and name in dropped]
    reasons = [(row, _reason(row, limits)) for row in python_rows(aside)]
    rest = held.selecting([name for name in held.names if name not in dropped])
    is_nothing = bool(limits.is_made and reasons and not held.size)
    return Fitted(rest, reasons, added, left_out, dropped, is_nothing)


def _reason(row: Mapping[str, Any], limits: ColumnLimits) -> str:
    for name, why in limits.refused.items():
        if row[name] is not None:
            return f"It has the column {_shown(name)}: {why}."
    # Not how many of them are new: a batch that is tried again has the same letters, and a table may have some by then.
    values = sum(value is not None for name, value in row.items() if name != EVENT_TIME)
    return f"It has {values:,} columns, and more than {limits.most} are new to the table (max_new_columns)."


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}…")


def names_of(rows: Input) -> list[str]:
    """Return the names of the columns of rows."""
    return list(rows.frame.columns if isinstance(rows, inputs.Frame) else inputs.schema_of(rows).names)


# ----------------------------------------------------------------------------------------- rows here, and rows of Spark


class _Here:
    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.names, self.size = table.column_names, len(table)

    def counts(self, names: Collection[str]) -> dict[str, int]:
        """Return how many values each of these columns has."""
        return {name: self.size - self._table[name].null_count for name in names}

    def split(self, refused: Sequence[str], extra: Sequence[str], most: int) -> tuple[pa.Table, _Here]:
        """Return the rows with a value in a refused column, or in more than `most` of the others; and the rest."""
        if not self.size:
            return self._table, self
        many = reduce(pc.add, (self._table[name].is_valid().cast(pa.int32()) for name in extra), pa.scalar(0))
        is_aside = pc.greater(many, most)
        for name in refused:
            is_aside = pc.or_(is_aside, self._table[name].is_valid())
        if isinstance(is_aside, pa.Scalar):
            is_aside = pa.repeat(is_aside, self.size)
        return self._table.filter(is_aside), _Here(self._table.filter(pc.invert(is_aside)))

    def selecting(self, names: list[str]) -> Input:
        table = self._table.select(names)
        return inputs.Memory(table.schema, table.to_batches())


class _InSpark:
    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.names = list(frame.columns)

    @property
    def size(self) -> int:
        with outcome.explained("count the rows of a batch"):
            return int(self._frame.count())

    def counts(self, names: Collection[str]) -> dict[str, int]:
        from pyspark.sql import functions as F

        if not names:
            return {}
        with outcome.explained("count the values of a batch"):
            (row,) = self._frame.agg(*(F.count(quoted(name)) for name in names)).collect()
        return dict(zip(names, row, strict=True))

    def split(self, refused: Sequence[str], extra: Sequence[str], most: int) -> tuple[pa.Table, _InSpark]:
        from pyspark.sql import functions as F

        conditions = [F.col(quoted(name)).isNotNull() for name in refused]
        if len(extra) > most:
            # One array instead of a sum: Spark walks a sum of a thousand terms by recursion.
            values = F.array(*(F.when(F.col(quoted(name)).isNotNull(), F.lit(1)) for name in extra))
            conditions.append(F.size(F.array_compact(values)) > most)
        is_aside = reduce(or_, conditions, F.lit(False))
        with outcome.explained("read the rows of a batch"):
            return self._frame.where(is_aside).toArrow(), _InSpark(self._frame.where(~is_aside))

    def selecting(self, names: list[str]) -> Input:
        return inputs.Frame(self._frame.select(*map(quoted, names)))


def _held(rows: Input) -> _Here | _InSpark:
    if isinstance(rows, inputs.Memory):
        return _Here(pa.Table.from_batches(rows.batches, rows.schema))
    return _InSpark(frames.of(rows, rows.reader if isinstance(rows, inputs.Readable) else None, None))
