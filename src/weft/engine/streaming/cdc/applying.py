"""The changes of a micro-batch, as its targets take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import nested_to_json, python_rows
from weft.engine import inputs
from weft.engine.inputs import Input
from weft.engine.streaming import dead_letters
from weft.engine.streaming.cdc import envelopes
from weft.engine.streaming.cdc.debezium_types import typed
from weft.engine.streaming.cdc.envelopes import OpenedChanges, Stored
from weft.engine.streaming.cdc.newest import Newest, is_unavailable, newest, ordered, versions
from weft.engine.streaming.cdc.row_sql import RunSql, selected
from weft.engine.streaming.row_origin import ORIGIN, origin_of
from weft.engine.streaming.transform import Transformed, TypedRows
from weft.errors import LoadRefusedError
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.execution import CdcReport
from weft.spark_support import outcome
from weft.systems.changes import AT, DELETE, OP, ORDER, Changes
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.load import Counts, Load
from weft.systems.sql.tables import Column
from weft.systems.sql.target import length_in
from weft.systems.stream_source import ReaderRows

_WORDS = ("create", "update", "delete", "truncate", "read")
"""What each operation is called, by its number."""
_INTEGERS = ((15, pa.int16()), (31, pa.int32()))


@dataclass(frozen=True)
class ChangeBatch:
    """The changes of a batch as a set, and the messages that are no changes."""

    cdc: CDC
    opened: OpenedChanges
    set: Newest
    rejected: list[DeadLetter]
    """The malformed messages."""
    skipped: int
    """The messages that are no change."""

    @property
    def is_empty(self) -> bool:
        """Whether no target changes."""
        return not self.set.rows.num_rows and not self.set.truncates

    def of_load(self, mode: str, query: str | None = None) -> Changes:
        """Return what a load says of the changes."""
        return Changes(
            tolerance_ms=self.cdc.out_of_order_tolerance_ms,
            newest_ms=self.set.newest_ms,
            query=query,
            is_history=mode == "scd2",
            kept=self.set.kept if mode == "merge" else (),
            origins=self.set.origins if mode == "merge" else (),
            counted=self.set.counted if mode == "merge" else None,
            soft_delete_column=self.cdc.soft_delete_column,
            truncates=self.set.truncates,
        )

    def planned(
        self, load: Load, columns: Mapping[str, Column | None] | None, query: str | None = None
    ) -> tuple[inputs.Memory, Load]:
        """Return the rows for a table with these columns, and the load that applies them. `query`: the id of the
        checkpoint that they are of."""
        changes = self.of_load(load.mode, query)
        if self.cdc.schema_evolution == "evolve":
            changes = replace(changes, wider=tuple(_wider(self._typed(self.set.rows, columns), columns or {})))
        if load.mode == "scd2":
            rows, counted = self.history(columns)
            changes = replace(changes, counted=counted)
            return rows, replace(load, changes=changes, event_timestamp_column=AT)
        return self.rows_for(columns, load.moment), replace(load, changes=changes, deduplicate_by=(ORDER,))

    def _typed(self, rows: pa.Table, columns: Mapping[str, Column | None] | None) -> pa.Table:
        """Return rows with the values that the messages mean."""
        fields = {name: each.field for name, each in (columns or {}).items() if each is not None}
        meanings = dict(self.opened.meanings)
        for key, origin in zip(self.cdc.keys, self.set.origins, strict=False):
            # The key that a row had is of the type of the key.
            meanings |= {origin: meanings[key]} if key in meanings else {}
            fields |= {origin: fields[key.lower()].with_name(origin)} if key.lower() in fields else {}
        has_bits = self.cdc.envelope == "debezium"
        return typed(rows, meanings, fields.values(), self.cdc.time_unit, has_bits=has_bits)

    def history(self, columns: Mapping[str, Column | None] | None = None) -> tuple[inputs.Memory, pa.Table]:
        """Return all changes, for a table that keeps the versions of rows, and what each counts as."""
        # Each change is a version, not the last one of a key alone.
        if unavailable := [name for name, each in self.opened.columns.items() if is_unavailable(each)]:
            raise LoadRefusedError(
                f"Updates do not say the values of {', '.join(unavailable)}, which they did not change, so that a "
                "version of the row cannot be written.",
                hint="Have the source send whole rows: ALTER TABLE … REPLICA IDENTITY FULL.",
            )
        rows, counted = versions(self.opened)
        table = inputs.understand(self._typed(rows, columns), has_source=False)
        assert isinstance(table, inputs.Memory)
        return inputs.Memory(table.schema, list(table.batches)), counted

    def rows_for(self, columns: Mapping[str, Column | None] | None, moment: datetime) -> inputs.Memory:
        """Return the rows for a table with these columns, by their names in small letters; `None` for a new one."""
        rows, soft = self._typed(self.set.rows, columns), self.cdc.soft_delete_column
        if soft is not None:
            stored = (columns or {}).get(soft.lower())
            is_flag = stored is not None and pa.types.is_boolean(stored.field.type)
            gone = pc.equal(rows[OP], DELETE)
            at = pa.scalar(moment, pa.timestamp("us", "UTC"))
            value = gone if is_flag else pc.if_else(gone, at, pa.scalar(None, at.type))
            rows = rows.drop_columns([soft]) if soft in rows.column_names else rows
            rows = rows.append_column(soft, value)
        table = inputs.understand(rows, has_source=False)
        assert isinstance(table, inputs.Memory)
        return inputs.Memory(table.schema, list(table.batches))

    def clean(self, spark: Any) -> inputs.Frame:
        """Return the changes themselves, for a stream or a topic: what happened to which key, and the row before and
        after, all in the order of the source."""
        changes = self.opened
        order = pa.array(ordered(changes))
        columns = {
            "op": pa.array(_WORDS).take(pa.array(changes.op)),
            "key": nested_to_json(pa.StructArray.from_arrays(list(changes.keys.values()), list(changes.keys))),
            "before": changes.before,
            "after": changes.after,
            "ts_ms": changes.ts,
        }
        rows = pa.table({name: each.take(order) for name, each in columns.items() if each is not None})
        # One task sends them: of several, the last change of a key could be sent first.
        return inputs.Frame(spark.createDataFrame(rows).coalesce(1))

    def report(self, counts: Iterable[Counts], dropped: int = 0) -> CdcReport:
        """Return what the batch did. `dropped`: how many messages no route named, and no table got."""
        # Targets that have the same batches drop the same ones.
        late = [max(each) for each in zip((0, 0, 0), *(each.late or (0, 0, 0) for each in counts), strict=True)]
        lag = None
        if self.set.newest_ms is not None:
            lag = max(datetime.now(UTC).timestamp() - self.set.newest_ms / 1000, 0.0)
        return CdcReport(
            # The delete of a key that an update changed is late as a delete, and counts as an update.
            creates=max(self.set.creates - late[0], 0),
            updates=max(self.set.updates - late[1], 0),
            deletes=max(self.set.deletes - late[2], 0),
            skipped=self.skipped + dropped,
            idempotent_skipped=self.set.repeated + sum(late),
            lag_seconds=lag,
        )


def _wider(rows: pa.Table, columns: Mapping[str, Column | None]) -> Iterator[pa.Field]:
    """Yield the columns that the values of a batch do not fit, with a type that they fit."""
    for each in rows.schema:
        column = columns.get(each.name.lower())
        if column is None:
            continue
        stored, kind = column.field.type, each.type
        if pa.types.is_integer(stored) and pa.types.is_integer(kind):
            bounds = pc.min_max(rows[each.name]).as_py()
            most = max(abs(value or 0) for value in bounds.values())
            yield pa.field(column.name, next((one for bits, one in _INTEGERS if most < 1 << bits), kind))
        elif pa.types.is_string(stored) and pa.types.is_string(kind) and (length := length_in(column)) is not None:
            if (pc.max(pc.utf8_length(rows[each.name])).as_py() or 0) > length:
                yield pa.field(column.name, kind)
        elif pa.types.is_decimal(stored) and pa.types.is_decimal(kind):
            yield pa.field(column.name, kind)


def changes_of(
    transformed: Transformed, parts: Sequence[TypedRows], cdc: CDC, run: RunSql, stored: Stored = tuple
) -> ChangeBatch:
    """Open the messages of a batch. `run` runs the SQL over their rows."""
    messages = gathered(transformed.rows, parts)
    if cdc.row_sql is not None:
        stored = tuple  # the columns are those of the SQL
    opened = envelopes.opened(messages, cdc, stored)
    rejected: list[DeadLetter] = []
    if opened.bad:
        # Again with the origin of each, which takes longer.
        messages = transformed.with_origins()
        opened = envelopes.opened(messages, cdc, stored)
        unknown = origin_of(", ".join(each.source for each in parts), None)
        for row, why in zip(python_rows(messages.take(list(opened.bad))), opened.bad.values(), strict=True):
            rejected.append(dead_letters.letter_of({ORIGIN: unknown, **row}, why))
    counted = newest(opened)
    if cdc.row_sql is not None:
        opened = selected(opened, cdc.row_sql, run)
        # The counts are of the changes in the source, before `row_sql`.
        counts = {name: getattr(counted, name) for name in ("creates", "updates", "deletes", "repeated", "counted")}
        counted = replace(newest(opened), **counts)
    return ChangeBatch(cdc, opened, counted, rejected, opened.skipped)


def tombstones(parts: Sequence[TypedRows]) -> int:
    """Return how many messages have no value: they are no rows."""
    return sum(getattr(getattr(each, "parsed", None), "tombstones", 0) for each in parts)


def gathered(rows: Input, parts: Sequence[TypedRows]) -> pa.Table:
    """Return the rows in this process."""
    if isinstance(rows, inputs.Memory):
        return pa.Table.from_batches(rows.batches, rows.schema)
    if isinstance(rows, inputs.Readable):
        (part,) = parts
        assert isinstance(part, ReaderRows)
        return part.gather()
    assert isinstance(rows, inputs.Frame)
    with outcome.explained("read the changes of a batch"):
        if rows.packed is None:
            return rows.frame.toArrow()
        packed = rows.packed
        return pa.Table.from_batches(packed.unpack(packed.schema, packed.frame.toArrow().to_batches()), packed.schema)
