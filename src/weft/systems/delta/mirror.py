"""Changes of another table's rows, as one MERGE into a Delta table, and the gate that drops late ones.

The gate has the last change of each key that was changed lately, deleted keys too. It is a file a batch in a folder of
the table that Delta does not look at. That of a batch is made of the one before it and is there before the MERGE: so a
batch that is tried again, wherever it was cut off, makes the same file, or finds that the table has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.spark_support.folder import Folder
from weft.spark_support.lazy import F
from weft.spark_support.sessions import quoted
from weft.systems.changes import (
    DELETE,
    FROM,
    KEEPS,
    KEY,
    OP,
    POSITION,
    SAID,
    TS,
    Place,
    is_after,
    is_late,
)
from weft.systems.delta import unavailable
from weft.systems.delta.table import writer
from weft.systems.frame_checks import column
from weft.systems.load import Load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STAYS, FILLS = -1, -2
"""The operations of a row that only says that a truncate came before the last change of its key, and of one that came
late and says values that the last change does not."""
_FILLS = "_weft_fills_"
_FOLDER, _TRUNCATED = "_weft_cdc", b"truncated"


@dataclass(frozen=True)
class GatedChanges:
    """A batch behind the gate."""

    late: pa.Array
    """The keys of changes that are older than what the table has, as texts."""
    decided: pa.Table | None
    """By the key of each change that does something what that is, and of each value whether the table keeps its own,
    or is filled in; `None` where all values are said."""
    fills: Mapping[str, str]
    """By the columns that are filled in, the column of `decided` that says of which keys."""
    late_ops: tuple[int, ...]
    """How many creates, updates and deletes of the batch are late, also of those that another one replaces."""
    truncates: bool
    stays: pa.Table
    """Keys that were changed after the truncate, in batches before."""


class Notes:
    """The files in which a pipeline notes what it changed in a table lately: one a batch."""

    def __init__(self, folder: Folder, table: str, load: Load) -> None:
        self._folder, self._batch = folder, load.batch_id
        self._path = f"{table}/{_FOLDER}/{writer(load).partition(':')[2]}"

    def before(self) -> tuple[pa.Table | None, Any]:
        """Return what the batch before noted: a table, and the truncates."""
        numbers = self._numbers()
        if not numbers:
            return None, None
        table = pa.ipc.open_stream(self._folder.read(self._file(numbers[-1]))).read_all()
        return table, json.loads((table.schema.metadata or {}).get(_TRUNCATED, b"null"))

    def write(self, entries: pa.Table, truncated: Any) -> None:
        """Note what is known after this batch, and remove what no batch can ask for."""
        entries = entries.replace_schema_metadata({_TRUNCATED: json.dumps(truncated)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, entries.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
            stream.write_table(entries)
        self._folder.write(self._file(self._batch), sink.getvalue().to_pybytes())
        self._folder.remove(map(self._file, self._numbers()[:-1]))

    def _numbers(self) -> list[int]:
        names = (name.removesuffix(".arrow") for name in self._folder.files_in(self._path))
        return sorted(int(name) for name in names if name.isdigit() and int(name) < self._batch)

    def _file(self, number: int) -> str:
        return f"{self._path}/{number:020}.arrow"


class DeltaGate:
    """The last changes of a table by one pipeline."""

    def __init__(self, notes: Notes, load: Load) -> None:
        self._notes, self._load = notes, load

    def pass_through(self, changes: pa.Table, names: Sequence[str]) -> GatedChanges:
        """Let the newer changes of a batch through and note them. `changes`: the key columns, and those of the gate;
        `names`: all columns of the batch."""
        load = self._load
        assert load.changes is not None
        noted, place_before = self._notes.before()
        entries, values = unavailable.apart(noted)
        last: Place | None = None if place_before is None else (place_before[0], place_before[1])
        late = pa.nulls(changes.num_rows, pa.bool_()).fill_null(False)
        if entries is not None:
            stored = entries.take(pc.index_in(changes[KEY].combine_chunks(), entries[KEY].combine_chunks()))
            late = is_late(changes, stored[POSITION], stored[TS], load.changes.tolerance_ms)
        truncated = load.changes.truncates[-1] if load.changes.truncates else None
        if last is not None:
            place = pa.scalar(last[0], pa.string()), pa.scalar(last[1], pa.int64())
            late = pc.or_(late, is_late(changes, *place, load.changes.tolerance_ms))
            if truncated is not None and not is_after(truncated, last, load.changes.tolerance_ms):
                truncated = None
        new, dropped = changes.filter(pc.invert(late)), changes.filter(late)
        known = changes.slice(0, 0) if entries is None else entries
        stays = changes.slice(0, 0)
        if truncated is not None and entries is not None:
            stays = self._after(entries, truncated, new)
        filled = unavailable.fills(values, known, dropped, load, names, last)
        if truncated is not None:
            # A row that is filled in stays by that; one that does not stay is not filled in.
            here = {*stays[KEY].to_pylist()}
            filled = {name: {key: at for key, at in keys.items() if key in here} for name, keys in filled.items()}
            in_place = {key for keys in filled.values() for key in keys}
            stays = stays.filter(pc.invert(pc.is_in(stays[KEY], value_set=pa.array(sorted(in_place), pa.string()))))
        new = unavailable.settled(new, values, known, load, names)
        values = unavailable.noted(values, new, filled, load, names)
        after = _merged(entries, new.select([*load.keys, OP, KEY, POSITION, TS]), load)
        self._notes.write(pa.concat_tables([after, values], promote_options="permissive"), truncated or last)
        return GatedChanges(
            dropped[KEY].combine_chunks(),
            _decided(new, dropped, filled, load, names),
            {name: f"{_FILLS}{number}" for number, name in enumerate(filled)},
            load.changes.late_of(known, last),
            truncated is not None,
            stays.select(load.keys),
        )

    def _after(self, entries: pa.Table, truncated: Place, new: pa.Table) -> pa.Table:
        assert self._load.changes is not None
        tolerance = self._load.changes.tolerance_ms
        places = zip(entries[POSITION].to_pylist(), entries[TS].to_pylist(), strict=True)
        # At one time without a position, the truncate is what came last.
        after = [is_after(place, truncated, tolerance, at_once=False) for place in places]
        in_batch = pc.is_in(entries[KEY], value_set=new[KEY].combine_chunks())
        is_there = pc.not_equal(entries[OP], DELETE)
        kept = entries.filter(pc.and_(pa.array(after, pa.bool_()), pc.and_(is_there, pc.invert(in_batch))))
        return kept


def _decided(
    new: pa.Table, late: pa.Table, filled: Mapping[str, Mapping[str, str]], load: Load, names: Sequence[str]
) -> pa.Table | None:
    kept = unavailable.unavailable_in(load, names)
    if not kept and not filled:
        return None
    columns = [KEY, OP, *(each.flag for each in kept)]
    keys = {key for of_column in filled.values() for key in of_column}
    filling = late.filter(pc.is_in(late[KEY], value_set=pa.array(sorted(keys), pa.string()))).select(columns)
    filling = filling.set_column(1, OP, pa.repeat(pa.scalar(FILLS, pa.int64()), filling.num_rows))
    decided = pa.concat_tables([new.select(columns), filling], promote_options="permissive")
    is_filling = pc.equal(decided[OP], FILLS)
    for number, of_column in enumerate(filled.values()):
        is_one = pc.is_in(decided[KEY], value_set=pa.array(list(of_column), pa.string()))
        decided = decided.append_column(f"{_FILLS}{number}", pc.and_(is_filling, is_one))
    return decided


def _merged(entries: pa.Table | None, new: pa.Table, load: Load) -> pa.Table:
    """Return what the gate knows after a batch, without what is too old to be asked for."""
    assert load.changes is not None
    now = int(load.moment.timestamp() * 1000)
    new = new.filter(pc.or_(pc.is_valid(new[POSITION]), pc.is_valid(new[TS])))
    new = new.set_column(new.schema.get_field_index(TS), TS, pc.fill_null(new[TS], now))
    if entries is not None:
        entries = entries.filter(pc.invert(pc.is_in(entries[KEY], value_set=new[KEY].combine_chunks())))
        new = pa.concat_tables([entries, new], promote_options="permissive")
    return new.filter(pc.greater_equal(new[TS], load.changes.oldest_ms(load.moment)))


def with_origins(frame: DataFrame, stored: DataFrame, load: Load) -> DataFrame:
    """Return rows of changed keys with the values that the rows of the old keys have, where changes do not say them."""
    changes = load.changes
    assert changes is not None
    kept = [each for each in changes.kept if each.name in frame.columns]
    values = [column(each.name).alias(f"_weft_value_{number}") for number, each in enumerate(kept)]
    keys = [column(key).alias(f"_weft_key_{number}") for number, key in enumerate(load.keys)]
    same = [column(origin) == column(f"_weft_key_{number}") for number, origin in enumerate(changes.origins)]
    if (soft := changes.soft_delete_column) is not None:
        stored = stored.where(_is_there(soft, stored, ""))
    joined = frame.join(stored.select(*keys, *values), same, "left")
    replaced = {}
    # Where no row has the old key, it may have the new one: by a copy, or because the change comes again.
    is_found = column(FROM).isNotNull() & column("_weft_key_0").isNotNull()
    for number, each in enumerate(kept):
        is_taken = is_found & (column(each.flag) == KEEPS)
        replaced[each.name] = F.when(is_taken, column(f"_weft_value_{number}")).otherwise(column(each.name))
    for each in kept:
        is_taken = is_found & (column(each.flag) == KEEPS)
        replaced[each.flag] = F.when(is_taken, SAID).otherwise(column(each.flag))
    return joined.withColumns(replaced).select(*map(column, frame.columns))


def gate_columns(load: Load, names: Sequence[str]) -> list[str]:
    """Return the columns of a batch that the gate looks at."""
    assert load.changes is not None
    kept = (name for each in unavailable.unavailable_in(load, names) for name in (each.flag, each.position))
    return [*load.keys, OP, KEY, POSITION, TS, *([FROM] if load.changes.origins else []), *kept]


def merge_statement(
    table: str, view: str, frame: DataFrame, load: Load, *, truncates: bool, fills: Mapping[str, str]
) -> str:
    """Return the MERGE of changes: rows that are there are written, those that are gone removed or marked so. `fills`:
    as `GatedChanges` has it."""
    changes = load.changes
    assert changes is not None
    names = [name for name in frame.columns if name not in (*changes.own, *fills.values())]
    kept = {each.name: each.flag for each in changes.kept if each.name in names}
    soft = changes.soft_delete_column

    def value(name: str) -> str:
        said = f"s.{quoted(name)}"
        if name not in kept:
            return said
        is_kept = f"s.{quoted(kept[name])} = {KEEPS}{'' if soft is None else f' AND {_is_there(soft, frame)}'}"
        return f"IF({is_kept}, t.{quoted(name)}, {said})"

    on = " AND ".join(f"t.{quoted(key)} = s.{quoted(key)}" for key in load.keys)
    is_row = f"s.{quoted(OP)} NOT IN ({DELETE}, {STAYS}, {FILLS})"
    updates = ", ".join(f"t.{quoted(name)} = {value(name)}" for name in names if name not in load.keys)
    filled = (
        f"t.{quoted(name)} = IF(s.{quoted(flag)}, s.{quoted(name)}, t.{quoted(name)})" for name, flag in fills.items()
    )
    gone = "DELETE" if soft is None else f"UPDATE SET t.{quoted(soft)} = s.{quoted(soft)}"
    is_first = "" if soft is None else f" AND {_is_there(soft, frame)}"
    parts = [
        f"MERGE INTO {table} AS t USING {quoted(view)} AS s ON {on}",
        f"WHEN MATCHED AND s.{quoted(OP)} = {DELETE}{is_first} THEN {gone}",
        f"WHEN MATCHED AND {is_row} THEN UPDATE SET {updates}" if updates else "",
        f"WHEN MATCHED AND s.{quoted(OP)} = {FILLS} THEN UPDATE SET {', '.join(filled)}" if fills else "",
        f"WHEN NOT MATCHED AND {is_row} THEN INSERT ({', '.join(map(quoted, names))}) "
        f"VALUES ({', '.join(f's.{quoted(name)}' for name in names)})",
    ]
    if truncates:
        removed = "DELETE" if soft is None else f"UPDATE SET t.{quoted(soft)} = {_marked(soft, frame, load)}"
        parts.append(f"WHEN NOT MATCHED BY SOURCE{is_first} THEN {removed}")
    return "\n".join(parts)


def _is_there(soft: str, frame: DataFrame, alias: str = "t.") -> str:
    is_flag = frame.schema[soft].dataType.typeName() == "boolean"
    return f"NOT coalesce({alias}{quoted(soft)}, false)" if is_flag else f"{alias}{quoted(soft)} IS NULL"


def _marked(soft: str, frame: DataFrame, load: Load) -> str:
    """Return what a soft delete of a whole table writes."""
    is_flag = frame.schema[soft].dataType.typeName() == "boolean"
    return "true" if is_flag else f"timestamp_micros({int(load.moment.timestamp() * 1_000_000)})"
