"""Unavailable values: an update leaves them out because it did not change them, and the Delta table keeps its own.

If the last change of a key leaves a value out, the notes of the gate have for this column which change the value is
from. A late change that is newer than that one fills the value in. `weft.systems.sql.cdc_unavailable` does it by SQL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from weft.systems.changes import DELETE, FROM, KEEPS, KEY, OP, POSITION, SAID, TS, UNKNOWN, Place, Unavailable, is_late
from weft.systems.load import Load

COLUMN = "_weft_column"
"""In the notes, the column that an entry is about; null of an entry about a row."""
_ENTRY = pa.schema([(KEY, pa.string()), (POSITION, pa.string()), (TS, pa.int64()), (COLUMN, pa.string())])


def apart(entries: pa.Table | None) -> tuple[pa.Table | None, pa.Table]:
    """Return the entries of a gate about rows, and those about values."""
    if entries is None or COLUMN not in entries.column_names:
        return entries, _ENTRY.empty_table()
    of_rows = pc.is_null(entries[COLUMN])
    return entries.filter(of_rows).drop_columns([COLUMN]), entries.filter(pc.invert(of_rows)).select(_ENTRY.names)


def unavailable_in(load: Load, names: Collection[str]) -> list[Unavailable]:
    """Return the columns among these with unavailable values."""
    assert load.changes is not None
    return [each for each in load.changes.kept if each.name in names]


def fills(
    values: pa.Table, rows: pa.Table, late: pa.Table, load: Load, names: Collection[str], truncate: Place | None
) -> dict[str, dict[str, str]]:
    """Return what late changes say that no newer change said: by column, and by key the position of the change.
    `values`, `rows`: the entries of the gate; `names`: the columns of the batch; `truncate`: the last one before it."""
    assert load.changes is not None
    kept, by_column = {each.name: each for each in unavailable_in(load, names)}, dict[str, dict[str, str]]()
    row = rows.take(pc.index_in(late[KEY].combine_chunks(), rows[KEY].combine_chunks()))
    tolerance = load.changes.tolerance_ms
    is_behind = pc.and_(is_late(late, row[POSITION], row[TS], tolerance), pc.not_equal(late[OP], DELETE))
    for name in values[COLUMN].unique().to_pylist():
        if name not in names or name in load.keys:
            continue
        said, is_said = late[POSITION], is_behind
        if (each := kept.get(name)) is not None:
            said, is_said = late[each.position], pc.and_(is_behind, pc.equal(late[each.flag], SAID))
        if truncate is not None:
            place = pa.scalar(truncate[0], pa.string()), pa.scalar(truncate[1], pa.int64())
            there = pa.table({POSITION: said, TS: late[TS]})
            is_said = pc.and_(is_said, pc.invert(is_late(there, *place, tolerance)))
        is_newer = pc.greater(said, _positions(values, late[KEY], name))
        chosen = pc.fill_null(pc.and_(is_said, is_newer), False)
        keys = late[KEY].filter(chosen).to_pylist()
        if keys:
            by_column[name] = dict(zip(keys, said.filter(chosen).to_pylist(), strict=True))
    return by_column


def settled(changes: pa.Table, values: pa.Table, rows: pa.Table, load: Load, names: Collection[str]) -> pa.Table:
    """Return the changes with a decision on each unavailable value: whether that of the batch stands, or that of the
    table, which may be newer."""
    assert load.changes is not None
    has_origins, last = bool(load.changes.origins), changes[POSITION]
    for each in unavailable_in(load, names):
        flag, said = changes[each.flag], changes[each.position]
        if has_origins:
            # The row of the old key is another one, if that key was changed after this.
            was = rows.take(pc.index_in(changes[FROM].combine_chunks(), rows[KEY].combine_chunks()))
            again = is_late(changes, was[POSITION], was[TS], load.changes.tolerance_ms)
            flag = pc.if_else(pc.and_(pc.equal(flag, KEEPS), again), UNKNOWN, flag)
        stored = pc.coalesce(_positions(values, changes[KEY], each.name), _positions(rows, changes[KEY]))
        # The removal of the row may be older, too, such as a truncate that comes again.
        is_replaced = pc.or_(pc.and_(pc.equal(flag, SAID), pc.less(said, last)), pc.equal(flag, UNKNOWN))
        is_older = pc.fill_null(pc.and_(is_replaced, pc.less_equal(said, stored)), False)
        flag = pc.if_else(is_older, KEEPS, flag)
        source = pc.fill_null(stored, "")
        if has_origins:
            # Earlier changes of the new key are about another row.
            source = pc.if_else(pc.is_null(changes[FROM]), source, last)
        said = pc.if_else(pc.equal(flag, KEEPS), source, said)
        for name, array in ((each.flag, flag.cast(pa.int64())), (each.position, said)):
            changes = changes.set_column(changes.schema.get_field_index(name), name, array)
    return changes


def noted(
    values: pa.Table,
    changes: pa.Table,
    filled: Mapping[str, Mapping[str, str]],
    load: Load,
    names: Collection[str],
) -> pa.Table:
    """Return where the values are from that the last changes do not say; not without positions. `changes`: those of the
    batch that are not late, settled."""
    assert load.changes is not None
    oldest, now = load.changes.oldest_ms(load.moment), int(load.moment.timestamp() * 1000)
    is_old = pc.or_(pc.less(values[TS], oldest), pc.is_in(values[KEY], value_set=changes[KEY].combine_chunks()))
    values = values.filter(pc.invert(is_old))
    if filled:
        pairs = zip(*(values[name].to_pylist() for name in (COLUMN, KEY, POSITION)), strict=True)
        places = [filled.get(name, {}).get(key, place) for name, key, place in pairs]
        values = values.set_column(1, POSITION, pa.array(places, pa.string()))
    parts = [values]
    for each in unavailable_in(load, names):
        said, last, ts = changes[each.position], changes[POSITION], pc.fill_null(changes[TS], now)
        is_unavailable = pc.or_kleene(pc.not_equal(changes[each.flag], SAID), pc.less(said, last))
        is_known = pc.and_(pc.is_valid(said), pc.and_(pc.is_valid(last), pc.greater_equal(ts, oldest)))
        chosen = pc.and_(pc.fill_null(is_unavailable, False), pc.and_(is_known, pc.not_equal(changes[OP], DELETE)))
        about = pa.repeat(each.name, changes.num_rows)
        parts.append(pa.table([changes[KEY], said, ts, about], schema=_ENTRY).filter(chosen))
    return pa.concat_tables(parts)


def _positions(entries: pa.Table, keys: pa.ChunkedArray, name: str | None = None) -> pa.ChunkedArray:
    """Return the positions that entries have for keys; null where there is none."""
    if name is not None:
        entries = entries.filter(pc.equal(entries[COLUMN], name))
    return entries[POSITION].take(pc.index_in(keys.combine_chunks(), entries[KEY].combine_chunks()))
