"""The statements that apply changes to a mirror: late ones are dropped by the gate, the others merged and deleted.

The gate `weft.cdc_gate` has the last change of each key that was changed lately, deleted keys too. It is read and
written in the transaction of the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pyarrow as pa

from weft.errors import LoadRefusedError
from weft.systems.changes import (
    CREATE,
    DELETE,
    ESCAPES,
    HASHED,
    KEY,
    OP,
    POSITION,
    READ,
    SEPARATOR,
    TS,
    UPDATE,
    Changes,
)
from weft.systems.load import Counts, Load
from weft.systems.sql.literals import literal
from weft.systems.sql.merge import ComparedMove, Merge
from weft.systems.sql.move import Move
from weft.systems.sql.system_tables import create_system_table, system_table
from weft.systems.sql.tables import Column, SqlTables

_log = logging.getLogger("weft.engine")
Cast = Callable[[str, pa.Field, Column], str]
FIELDS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("target", pa.string(), nullable=False),
        pa.field("changed_key", pa.string(), nullable=False),
        pa.field("position", pa.string()),
        pa.field("ts_ms", pa.int64()),
        pa.field("is_deleted", pa.bool_(), nullable=False),
    ]
)
_KEY = ("pipeline", "target", "changed_key")
SURVIVORS = "_weft_survivors"
# With so many new entries the planner of a database should know of them.
_MANY = 1000
# By bytes, as positions are made: a language may order letters and signs in its own way.
_BY_BYTES = {"postgres": ' COLLATE "C"'}


def prepare(tables: SqlTables) -> None:
    """Create the gate where it is missing."""
    create_system_table(tables, "cdc_gate", FIELDS, _KEY)


def forget(tables: SqlTables, load: Load) -> None:
    """Empty the gate of a target that is created again: its rows are gone."""
    gate = _Gate(tables, load)
    with tables.driver.session("publish") as session:
        session.run(f"DELETE FROM {gate.table} WHERE {gate.of_rows}")
        session.run(f"DELETE FROM {gate.table} WHERE {gate.of_truncates}")


class _Gate:
    """The SQL about the entries of one target."""

    def __init__(self, tables: SqlTables, load: Load) -> None:
        self.table = system_table(tables, "cdc_gate")
        self.pipeline = literal(load.pipeline, tables.dialect)
        self.rows = literal(load.name, tables.dialect)
        self.truncates = literal(f"{load.name}{SEPARATOR}", tables.dialect)
        self.of_rows = f"pipeline = {self.pipeline} AND target = {self.rows}"
        self.query = literal(f"{load.name}{SEPARATOR}{SEPARATOR}", tables.dialect)
        self.of_truncates = f"pipeline = {self.pipeline} AND target = {self.truncates}"
        self.of_query = f"pipeline = {self.pipeline} AND target = {self.query}"
        self._position = tables.quote("position")
        self._dialect = tables.dialect
        self._bytes = _BY_BYTES.get(tables.dialect, "")
        self._tolerance = 0 if load.changes is None else load.changes.tolerance_ms

    def is_late(self, position: str, ts: str) -> str:
        """The condition that a change of this position and time is not newer than an entry `g`. A position is that of
        one change; at one time there may be several, which come in their order. Positions begin anew in a source that
        was restored: its changes are known by their time."""
        stored = f"g.{self._position}"
        return (
            f"(({position} IS NOT NULL AND {stored} IS NOT NULL "
            f"AND {position}{self._bytes} <= {stored}{self._bytes} "
            f"AND ({ts} IS NULL OR {ts} <= g.ts_ms + {self._tolerance})) "
            f"OR (({position} IS NULL OR {stored} IS NULL) AND {ts} < g.ts_ms))"
        )

    def is_before(self, position: str, ts: str, change: tuple[str | None, int | None]) -> str:
        """The condition that a change of this position and time is before another one."""
        earlier = "1 = 0" if change[1] is None else f"{ts} < {change[1]}"
        if change[0] is None:
            return earlier
        place = f"{position}{self._bytes} <= {literal(change[0], self._dialect)}"
        if change[1] is not None:
            place = f"{place} AND ({ts} IS NULL OR {ts} <= {change[1] + self._tolerance})"
        return f"CASE WHEN {position} IS NULL THEN {earlier} ELSE {place} END"


class Gated(ComparedMove):
    """A move of changes, which the gate knows."""

    @property
    def changes(self) -> Changes:
        """What the load says of its changes."""
        assert self.load.changes is not None
        return self.load.changes

    @property
    def gate(self) -> _Gate:
        """The gate of this target."""
        return _Gate(self.tables, self.load)

    def _begin(self) -> None:
        """Forget what an earlier checkpoint applied: a pipeline that was reset applies its changes again."""
        gate, query = self.gate, self.changes.query
        if query is None:
            return
        known = self.session.value(f"SELECT {self._q('position')} FROM {gate.table} WHERE {gate.of_query}")
        if known == query:
            return
        for each in (gate.of_rows, gate.of_truncates, gate.of_query):
            self.session.run(f"DELETE FROM {gate.table} WHERE {each}")
        self._insert(gate.query, "", query, None)

    def _insert(self, target: str, key: str, position: str | None, ts: int | None) -> None:
        """Add an entry that is of no row."""
        named, where, when = (literal(each, self.tables.dialect) for each in (key, position, ts))
        self.session.run(
            f"INSERT INTO {self.gate.table} ({self.tables.listed(FIELDS.names)}) "
            f"VALUES ({self.gate.pipeline}, {target}, {named}, {where}, {when}, {self.tables.true})"
        )

    def _forget(self, column: str) -> None:
        """Remove the entries that are too old, and those of the keys that a staged column has."""
        gate = self.gate
        self.session.run(f"DELETE FROM {gate.table} WHERE {gate.of_rows} AND ts_ms < {self._oldest}")
        same = {"pipeline": gate.pipeline, "target": gate.rows, "changed_key": f"s.{self._q(column)}"}
        on = " AND ".join(f"t.{name} = {value}" for name, value in same.items())
        self.session.run(self.tables.delete_from(gate.table, self.tables.temporary(self.stage), on, same))

    def _insert_staged(self, statement: str) -> None:
        """Add entries of staged changes."""
        if int(self.session.run(statement).rowcount) >= _MANY:
            self.tables.filled(self.session, self.gate.table)

    @property
    def _now_ms(self) -> int:
        return int(self.load.moment.timestamp() * 1000)

    @property
    def _oldest(self) -> int:
        """Changes before this time are forgotten."""
        newest = self.changes.newest_ms
        return (self._now_ms if newest is None else newest) - self.changes.tolerance_ms

    def _note_truncate(self, position: str | None, ts: int | None, key: str = "") -> None:
        """Note a truncate in the gate, in the place of one that has this key."""
        gate, named = self.gate, literal(key, self.tables.dialect)
        self.session.run(f"DELETE FROM {gate.table} WHERE {gate.of_truncates} AND changed_key = {named}")
        self._insert(gate.truncates, key, position, ts)

    @property
    def _truncated(self) -> tuple[str | None, int | None] | None:
        """Position and time of the truncate of the batch; `None` where there is none, or a later one was applied."""
        if not self.changes.truncates:
            return None
        truncated, last = self.changes.truncates[-1], self._known_truncates()
        if not last or _is_after(truncated, last[0]):
            return truncated
        # As in `is_late`: the source was restored.
        ts, before = truncated[1], last[0][1]
        is_restored = ts is not None and before is not None and ts - before > self.changes.tolerance_ms
        return truncated if is_restored else None

    def _known_truncates(self) -> list[tuple[str | None, int | None]]:
        """Position and time of the truncates that were applied: the last one, in a history all."""
        gate = self.gate
        rows = self.session.rows(f"SELECT {self._q('position')}, ts_ms FROM {gate.table} WHERE {gate.of_truncates}")
        return [(position, ts) for position, ts in rows]


class Mirror(Merge, Gated):
    """Merges the newest change of each key, and deletes the rows that are gone."""

    late: tuple[int, ...] = ()
    """The creates, updates and deletes that the gate dropped."""

    def check_keys(self, rows: int, reject: Callable[[], None] | None = None) -> int:
        left_out = super().check_keys(rows, reject)
        self._begin()
        self._drop_late()
        if self.changes.kept:
            self._warn_of_partial()
        return left_out + sum(self.late)

    def delete_missing(self) -> Counts:
        self._note()
        return Counts(late=self.late)

    def _drop_late(self) -> None:
        """Drop the staged changes that are older than what the table has."""
        gate, stage = self.gate, self.tables.temporary(self.stage)
        position, ts = f"s.{self._q(POSITION)}", f"s.{self._q(TS)}"
        late = (
            f"EXISTS (SELECT 1 FROM {gate.table} AS g WHERE {gate.of_rows} AND g.changed_key = s.{self._q(KEY)} "
            f"AND {gate.is_late(position, ts)})"
        )
        for truncate in self._known_truncates():
            late = f"({late} OR {gate.is_before(position, ts, truncate)})"
        dropped = dict(
            self.session.rows(f"SELECT {self._q(OP)}, count(*) FROM {stage} AS s WHERE {late} GROUP BY {self._q(OP)}")
        )
        if dropped:
            self.session.run(self.tables.delete_where(stage, late))
            kinds = ((CREATE, READ), (UPDATE,), (DELETE,))
            self.late = tuple(sum(int(dropped.get(op, 0)) for op in kind) for kind in kinds)

    def _note(self) -> None:
        """Note the staged changes in the gate, and forget those that are too old."""
        gate, now, oldest = self.gate, self._now_ms, self._oldest
        stage = self.tables.temporary(self.stage)
        key, position, ts, op = (self._q(name) for name in (KEY, POSITION, TS, OP))
        self._forget(KEY)
        names = self.tables.listed(FIELDS.names)
        deleted = f"CASE WHEN s.{op} = {DELETE} THEN {self.tables.true} ELSE {self.tables.false} END"
        self._insert_staged(
            f"INSERT INTO {gate.table} ({names}) SELECT {gate.pipeline}, {gate.rows}, s.{key}, s.{position}, "
            f"COALESCE(s.{ts}, {now}), {deleted} FROM {stage} AS s "
            f"WHERE (s.{position} IS NOT NULL OR s.{ts} IS NOT NULL) AND COALESCE(s.{ts}, {now}) >= {oldest}"
        )
        if (truncated := self._truncated) is not None:
            self._note_truncate(*truncated)

    # ------------------------------------------------------------------------------------------------------ truncates

    def clear(self) -> Counts:
        """Remove what a truncate of the source removed: not rows that were changed after it."""
        truncated = self._truncated
        if truncated is None:
            return Counts()
        gate, soft = self.gate, self.changes.soft_delete_column
        changed = self.session.rows(
            f"SELECT changed_key, {self._q('position')}, ts_ms FROM {gate.table} "
            f"WHERE {gate.of_rows} AND is_deleted = {self.tables.false}"
        )
        # At one time without a position, the truncate is what came last.
        stay = [key for key, *change in changed if _is_after(tuple(change), truncated, at_once=False)]
        source = self._survivors(stay) if stay else None
        if soft is not None:
            others = "1 = 1" if source is None else f"NOT EXISTS (SELECT 1 FROM {source} AS s WHERE {self._on()})"
            statement = self.tables.update(self.target, {soft: self._gone}, f"{self._is_there(soft)} AND {others}")
        elif source is None:
            statement = f"DELETE FROM {self.target}"
        else:
            statement = self.tables.delete_missing(self.target, source, self._on())
        return Counts(deleted=int(self.session.run(statement).rowcount))

    def _survivors(self, keys: list[str]) -> str:
        """Write keys into a temporary table of the target's types; return its name."""
        tables, fields = self.tables, [self.columns[name].field for name in self.load.keys]
        definitions = [f"{self._q(each.name)} {self.columns[each.name].sql}" for each in fields]
        tables.create_temporary(self.session, SURVIVORS, ", ".join(definitions))
        parts = zip(*([_unescaped(part) for part in key.split(SEPARATOR)] for key in keys), strict=True)
        try:
            if any(key.startswith(HASHED) for key in keys):
                raise ValueError("a key is too long")
            columns = [pa.array(part).cast(each.type) for part, each in zip(parts, fields, strict=True)]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            # To go on would remove rows that are newer than the truncate.
            raise LoadRefusedError(
                f"A truncate of {self.load.name} came late, and the gate does not have the keys of the rows that were "
                f"changed after it as the table has them: {error}.",
                hint="Empty the table and start again by `weft checkpoints reset`, or truncate the source again.",
            ) from None
        batch = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
        tables.copy_in(self.session, tables.temporary(SURVIVORS), batch.schema, [batch])
        return tables.temporary(SURVIVORS)

    # --------------------------------------------------------------------------------------------------- the statements

    @property
    def source(self) -> str:
        """The staged rows that are to be merged."""
        return self._staged(f"<> {DELETE}")

    def _staged(self, op: str) -> str:
        return f"(SELECT * FROM {self.tables.temporary(self.stage)} WHERE {self._q(OP)} {op} AND {self.condition})"

    def _value(self, name: str, cast: Cast | None = None) -> str:
        """A staged value; what the stored row has where a change does not say it."""
        value = super()._value(name, cast)
        flag = dict(self.changes.kept).get(name)
        if flag is None:
            return value
        return f"CASE WHEN s.{self._q(flag)} = {self.tables.true} THEN t.{self._q(name)} ELSE {value} END"

    def _differing(self, otherwise: str = "1 = 0") -> str:
        """Without changes that do not say the whole row, where there is no row."""
        partial = f" AND NOT ({self._is_partial})" if self.changes.kept else ""
        return super()._differing(otherwise) + partial

    @property
    def _is_partial(self) -> str:
        """The condition that a change does not say the whole row, and there is no row."""
        flags = (f"s.{self._q(flag)} = {self.tables.true}" for _, flag in self.changes.kept)
        return f"t.{self._q(self.load.keys[0])} IS NULL AND ({' OR '.join(flags)})"

    def _warn_of_partial(self) -> None:
        joined = f"{self.source} AS s LEFT JOIN {self.target} AS t ON {self._on(value=True)}"
        if partial := self.session.value(f"SELECT count(*) FROM {joined} WHERE {self._is_partial}"):
            _log.warning(
                "%s updates of %s do not say the whole row, and the table does not have it: they are left out.",
                f"{int(partial):,}",
                self.load.name,
            )

    def candidates(self) -> tuple[str, dict[str, str]]:
        source, values = super().candidates()
        if not self.is_compared:
            # There is no stored row to take a value from.
            values = {name: Move._value(self, name, self.tables.try_cast) for name in self.names}
        return source, values

    def apply(self) -> Counts:
        """Merge the rows that are there, and delete those that are gone."""
        counts, tables, soft = super().apply(), self.tables, self.changes.soft_delete_column
        deleted, on = self._staged(f"= {DELETE}"), self._on(value=True)
        if soft is None:
            values = {name: super(Mirror, self)._value(name) for name in self.load.keys}
            statement = tables.delete_from(self.target, deleted, on, values)
        else:
            gone = super()._value(soft)
            statement = tables.update_from(self.target, deleted, f"{on} AND {self._is_there(soft)}", {soft: gone})
        return counts + Counts(deleted=int(self.session.run(statement).rowcount))

    def _is_there(self, soft: str) -> str:
        """The condition that a row is not soft deleted yet."""
        column = f"t.{self._q(soft)}"
        is_flag = pa.types.is_boolean(self.columns[soft].field.type)
        return f"({column} IS NULL OR {column} = {self.tables.false})" if is_flag else f"{column} IS NULL"

    @property
    def _gone(self) -> str:
        """What a soft delete writes, for all rows."""
        assert self.changes.soft_delete_column is not None
        is_flag = pa.types.is_boolean(self.columns[self.changes.soft_delete_column].field.type)
        return self.tables.true if is_flag else self.tables.moment(self.load.moment)


def _unescaped(part: str) -> str:
    for sign, escaped in reversed(ESCAPES):
        part = part.replace(escaped, sign)
    return part


def _is_after(
    one: tuple[str | None, int | None], other: tuple[str | None, int | None], *, at_once: bool = True
) -> bool:
    """Whether a change came after another one in the source. `at_once`: whether it did at the same time."""
    if one[0] is not None and other[0] is not None:
        return one[0] > other[0]
    return one[1] is None or other[1] is None or one[1] > other[1] or (at_once and one[1] == other[1])
