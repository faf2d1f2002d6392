"""State in the memory of a process."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.systems.pairs_in_memory import pairs_in_memory
from weft.systems.state_store import BATCH, CLOSED, END, KEY, Pairs, Selection, StateBatch, StateStore, overtaken


class InMemoryState(StateStore):
    """State in this process: a restart loses it."""

    def __init__(self) -> None:
        self._rows: pa.Table | None = None
        self._last: StateBatch | None = None

    def last(self) -> StateBatch | None:
        return self._last

    def schema(self) -> pa.Schema | None:
        return None if self._rows is None else self._rows.schema

    def append(self, rows: pa.Table, batch: StateBatch, replaced: Selection | None = None) -> None:
        if self._last is not None and not batch.follows(self._last):
            raise overtaken(batch)
        if self._rows is None:
            self._rows = rows.slice(0, 0)
        kept = self._rows if replaced is None else self._rows.filter(pc.invert(mask(self._rows, replaced)))
        self._rows, self._last = pa.concat_tables([kept, rows]), batch

    def retype(self, schema: pa.Schema) -> None:
        assert self._rows is not None
        self._rows = retyped(self._rows, schema)

    def read(self, wanted: Selection) -> pa.Table:
        assert self._rows is not None
        return self._rows.filter(mask(self._rows, wanted))

    def pairs(self, wanted: Pairs) -> pa.Table:
        assert self._rows is not None
        return pairs_in_memory(self._rows, wanted)

    def counts(self) -> dict[int, int]:
        if self._rows is None:
            return {}
        ends = self._rows[END].value_counts().to_pylist()
        return {each["values"]: each["counts"] for each in ends if each["values"] > CLOSED // 2}

    def remove(self, upto: int) -> None:
        if self._rows is not None:
            self._rows = self._rows.filter(pc.greater(self._rows[END], upto))


def retyped(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with other types of their columns, and with those that are new."""
    for each in schema:
        if each.name not in rows.column_names:
            rows = rows.append_column(each, pa.nulls(len(rows), each.type))
    return pa.table([rows[name].cast(schema.field(name).type) for name in schema.names], schema=schema)


def mask(rows: pa.Table, wanted: Selection) -> Any:
    """Return which rows of a table are wanted."""
    ends = rows[END]
    if wanted.ends:
        return pc.is_in(ends, pa.array(wanted.ends, pa.int64()))
    mask = pa.chunked_array([pa.repeat(pa.scalar(True), len(rows))])
    if wanted.after is not None:
        mask = pc.greater(ends, wanted.after)
    if wanted.after is not None and wanted.batch is not None:
        touched = rows.filter(pc.equal(rows[BATCH], wanted.batch))[END].combine_chunks()
        mask = pc.or_(mask, pc.is_in(ends, touched))
    mask = mask if wanted.upto is None else pc.and_(mask, pc.less_equal(ends, wanted.upto))
    if not wanted.whole_keys:
        return mask
    keys = pa.array([*rows.filter(mask)[KEY].to_pylist(), *wanted.keys], pa.string())
    is_there = pc.is_in(rows[KEY], keys)
    return is_there if wanted.after is None else pc.and_(is_there, pc.greater(ends, wanted.after))
