"""Changes of another table's rows, as one MERGE into a Delta table, and the gate that drops late ones.

The gate has the last change of each key that was changed lately, deleted keys too. It is a file a batch in a folder of
the table that Delta does not look at. That of a batch is made of the one before it and is there before the MERGE: so a
batch that is tried again, wherever it was cut off, makes the same file, or finds that the table has it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.spark_support.folder import Folder
from weft.spark_support.sessions import quoted
from weft.systems.changes import CREATE, DELETE, KEY, OP, POSITION, READ, TS, UPDATE
from weft.systems.delta.table import writer
from weft.systems.load import Load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Place = tuple[str | None, int | None]
"""Position and time of a change."""
STAYS = -1
"""The operation of a row that only says that a truncate came before the last change of its key."""
_FOLDER, _TRUNCATED = "_weft_cdc", b"truncated"


@dataclass(frozen=True)
class Gated:
    """A batch behind the gate."""

    late: pa.Array
    """The keys of changes that are older than what the table has, as texts."""
    late_ops: tuple[int, ...]
    """How many of them are creates, updates and deletes."""
    truncates: bool
    stays: pa.Table
    """Keys that were changed after the truncate, in batches before."""


class Gate:
    """The last changes of a table by one pipeline."""

    def __init__(self, folder: Folder, table: str, load: Load) -> None:
        self._folder, self._load = folder, load
        self._path = f"{table}/{_FOLDER}/{writer(load).partition(':')[2]}"

    def pass_through(self, changes: pa.Table) -> Gated:
        """Let the newer changes of a batch through and note them. `changes`: the key columns, and those of the gate."""
        load = self._load
        assert load.changes is not None
        names = (name.removesuffix(".arrow") for name in self._folder.files_in(self._path))
        before = sorted(int(name) for name in names if name.isdigit() and int(name) < load.batch_id)
        entries, last = self._read(before[-1]) if before else (None, None)
        late = pa.nulls(changes.num_rows, pa.bool_()).fill_null(False)
        if entries is not None:
            found = entries.take(pc.index_in(changes[KEY].combine_chunks(), entries[KEY].combine_chunks()))
            late = _is_late(changes, found[POSITION], found[TS], load.changes.tolerance_ms)
        truncated = load.changes.truncates[-1] if load.changes.truncates else None
        if last is not None:
            place = pa.scalar(last[0], pa.string()), pa.scalar(last[1], pa.int64())
            late = pc.or_(late, _is_late(changes, *place, load.changes.tolerance_ms))
            is_restored = truncated is not None and _is_much_later(truncated, last, load.changes.tolerance_ms)
            if truncated is not None and not is_restored and not _is_after(truncated, last):
                truncated = None
        new = changes.filter(pc.invert(late))
        stays = changes.select(load.keys).slice(0, 0)
        if truncated is not None and entries is not None:
            stays = self._after(entries, truncated, new)
        self._write(_merged(entries, new, load), truncated or last)
        self._folder.remove(f"{self._path}/{self._name(number)}" for number in before[:-1])
        dropped = changes.filter(late)
        counted = {each["values"]: each["counts"] for each in pc.value_counts(dropped[OP]).to_pylist()}
        return Gated(
            dropped[KEY].combine_chunks(),
            (counted.get(CREATE, 0) + counted.get(READ, 0), counted.get(UPDATE, 0), counted.get(DELETE, 0)),
            truncated is not None,
            stays,
        )

    def _after(self, entries: pa.Table, truncated: Place, new: pa.Table) -> pa.Table:
        places = zip(entries[POSITION].to_pylist(), entries[TS].to_pylist(), strict=True)
        is_after = pa.array([_is_after(place, truncated) for place in places], pa.bool_())
        in_batch = pc.is_in(entries[KEY], value_set=new[KEY].combine_chunks())
        is_there = pc.not_equal(entries[OP], DELETE)
        kept = entries.filter(pc.and_(is_after, pc.and_(is_there, pc.invert(in_batch))))
        return kept.select(self._load.keys)

    def _name(self, number: int) -> str:
        return f"{number:020}.arrow"

    def _read(self, number: int) -> tuple[pa.Table, Place | None]:
        data = self._folder.read(f"{self._path}/{self._name(number)}")
        table = pa.ipc.open_stream(data).read_all()
        truncated = json.loads((table.schema.metadata or {}).get(_TRUNCATED, b"null"))
        return table, None if truncated is None else (truncated[0], truncated[1])

    def _write(self, entries: pa.Table, truncated: Place | None) -> None:
        entries = entries.replace_schema_metadata({_TRUNCATED: json.dumps(truncated)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, entries.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
            stream.write_table(entries)
        self._folder.write(f"{self._path}/{self._name(self._load.batch_id)}", sink.getvalue().to_pybytes())


def _is_late(changes: pa.Table, position: Any, ts: Any, tolerance_ms: int) -> pa.ChunkedArray:
    """Return which changes are not newer than what is known. A position is that of one change; at one time there may be
    several, which come in their order. Positions begin anew in a source that was restored: its changes are known by
    their time."""
    both = pc.and_(pc.is_valid(changes[POSITION]), pc.is_valid(position))
    is_restored = pc.fill_null(pc.greater(changes[TS], pc.add(ts, tolerance_ms)), False)
    before = pc.and_(pc.less_equal(changes[POSITION], position), pc.invert(is_restored))
    late = pc.if_else(both, before, pc.less(changes[TS], ts))
    return pc.fill_null(late, False)


def _is_after(one: Place, other: Place) -> bool:
    if one[0] is not None and other[0] is not None:
        return one[0] > other[0]
    return one[1] is None or other[1] is None or one[1] >= other[1]


def _is_much_later(one: Place, other: Place, tolerance_ms: int) -> bool:
    return one[1] is not None and other[1] is not None and one[1] - other[1] > tolerance_ms


def _merged(entries: pa.Table | None, new: pa.Table, load: Load) -> pa.Table:
    """Return what the gate knows after a batch, without what is too old to be asked for."""
    assert load.changes is not None
    now = int(load.moment.timestamp() * 1000)
    oldest = (now if load.changes.newest_ms is None else load.changes.newest_ms) - load.changes.tolerance_ms
    new = new.filter(pc.or_(pc.is_valid(new[POSITION]), pc.is_valid(new[TS])))
    new = new.set_column(new.schema.get_field_index(TS), TS, pc.fill_null(new[TS], now))
    if entries is not None:
        entries = entries.filter(pc.invert(pc.is_in(entries[KEY], value_set=new[KEY].combine_chunks())))
        new = pa.concat_tables([entries, new], promote_options="permissive")
    return new.filter(pc.greater_equal(new[TS], oldest))


def merge_statement(table: str, view: str, frame: DataFrame, load: Load, *, truncates: bool) -> str:
    """Return the MERGE of changes: rows that are there are written, those that are gone removed or marked so."""
    changes = load.changes
    assert changes is not None
    names = [name for name in frame.columns if name not in changes.own]
    kept = dict(changes.kept)
    soft = changes.soft_delete_column

    def value(name: str) -> str:
        said = f"s.{quoted(name)}"
        return f"IF(s.{quoted(kept[name])}, t.{quoted(name)}, {said})" if name in kept else said

    on = " AND ".join(f"t.{quoted(key)} = s.{quoted(key)}" for key in load.keys)
    is_row = f"s.{quoted(OP)} NOT IN ({DELETE}, {STAYS})"
    updates = ", ".join(f"t.{quoted(name)} = {value(name)}" for name in names if name not in load.keys)
    whole = "".join(f" AND NOT s.{quoted(flag)}" for flag in kept.values())
    gone = "DELETE" if soft is None else f"UPDATE SET t.{quoted(soft)} = s.{quoted(soft)}"
    is_first = "" if soft is None else f" AND {_is_there(soft, frame)}"
    parts = [
        f"MERGE INTO {table} AS t USING {quoted(view)} AS s ON {on}",
        f"WHEN MATCHED AND s.{quoted(OP)} = {DELETE}{is_first} THEN {gone}",
        f"WHEN MATCHED AND {is_row} THEN UPDATE SET {updates}" if updates else "",
        f"WHEN NOT MATCHED AND {is_row}{whole} THEN INSERT ({', '.join(map(quoted, names))}) "
        f"VALUES ({', '.join(f's.{quoted(name)}' for name in names)})",
    ]
    if truncates:
        removed = "DELETE" if soft is None else f"UPDATE SET t.{quoted(soft)} = {_marked(soft, frame, load)}"
        parts.append(f"WHEN NOT MATCHED BY SOURCE{is_first} THEN {removed}")
    return "\n".join(parts)


def _is_there(soft: str, frame: DataFrame) -> str:
    is_flag = frame.schema[soft].dataType.typeName() == "boolean"
    return f"NOT coalesce(t.{quoted(soft)}, false)" if is_flag else f"t.{quoted(soft)} IS NULL"


def _marked(soft: str, frame: DataFrame, load: Load) -> str:
    """Return what a soft delete of a whole table writes."""
    is_flag = frame.schema[soft].dataType.typeName() == "boolean"
    return "true" if is_flag else f"timestamp_micros({int(load.moment.timestamp() * 1_000_000)})"
