"""The statements that apply changes to a mirror: late ones are dropped by the gate, the others merged and deleted."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from weft.systems.changes import DELETE, FIRST, FIRST_TS, KEY, OP, POSITION, TS, Place, is_after
from weft.systems.load import Counts
from weft.systems.sql.cdc_gate import FIELDS, SURVIVORS
from weft.systems.sql.cdc_unavailable import UnavailableValues
from weft.systems.sql.merge import Merge
from weft.systems.sql.move import Move
from weft.systems.sql.tables import Column

Cast = Callable[[str, pa.Field, Column], str]
_KNOWN = pa.schema([(KEY, pa.string()), (POSITION, pa.string()), (TS, pa.int64())])


class Mirror(Merge, UnavailableValues):
    """Merges the newest change of each key, and deletes the rows that are gone."""

    late: tuple[int, ...] = ()
    """The creates, updates and deletes that are not newer than what the gate had."""

    def check_keys(self, rows: int, reject: Callable[[], None] | None = None) -> int:
        left_out = super().check_keys(rows, reject)
        self._begin()
        self.late = self._late()
        self._fill_late()
        self._drop_late()
        if self._kept:
            self._settle_kept()
            self._drop_partial()
        return left_out + self._dropped

    def delete_missing(self) -> Counts:
        self._note()
        return Counts(late=self.late)

    # ------------------------------------------------------------------------------------------------------------- late

    def _late(self) -> tuple[int, ...]:
        """Count the changes of the batch that are not newer than the gate, also those that another one replaces."""
        gate = self.gate
        truncates = self._known_truncates()
        entries = f"SELECT changed_key, {self._q('position')}, ts_ms FROM {gate.table} AS g WHERE {gate.of_rows}"
        if not self.changes.truncates:
            # Changes before a truncate of the batch are not staged.
            first = gate.is_late(f"s.{self._q(FIRST)}", f"s.{self._q(FIRST_TS)}")
            stage = self.tables.temporary(self.stage)
            entries = (
                f"SELECT g.changed_key, g.{self._q('position')}, g.ts_ms FROM {stage} AS s JOIN {gate.table} AS g "
                f"ON {gate.of(gate.rows, 'g.')} AND g.changed_key = s.{self._q(KEY)} WHERE {first}"
            )
        known = self.session.rows(entries)
        if not known and not truncates:
            return ()
        columns = zip(*known, strict=True) if known else ((), (), ())
        arrays = [pa.array(each, kind) for each, kind in zip(columns, _KNOWN.types, strict=True)]
        return self.changes.late_of(pa.table(arrays, schema=_KNOWN), truncates[0] if truncates else None)

    def _drop_late(self) -> None:
        """Drop the staged changes that are older than what the table has."""
        gate, position, ts = self.gate, f"s.{self._q(POSITION)}", f"s.{self._q(TS)}"
        late = (
            f"EXISTS (SELECT 1 FROM {gate.table} AS g WHERE {gate.of_rows} AND g.changed_key = s.{self._q(KEY)} "
            f"AND {gate.is_late(position, ts)})"
        )
        for truncate in self._known_truncates():
            late = f"({late} OR {gate.is_before(position, ts, truncate)})"
        self._drop(late)

    def _note(self) -> None:
        """Note the staged changes in the gate, and forget those that are too old."""
        gate, now, oldest = self.gate, self._now_ms, self._oldest
        stage = self.tables.temporary(self.stage)
        key, position, ts, op = (self._q(name) for name in (KEY, POSITION, TS, OP))
        self._forget(KEY)
        deleted = f"CASE WHEN s.{op} = {DELETE} THEN {self.tables.true} ELSE {self.tables.false} END"
        # Where the table takes different letters for the same, the stored key may have others.
        is_exact = all(self._is_exact(self.columns[name]) for name in self.load.keys)
        stored = "" if is_exact else f" LEFT JOIN {self.target} AS t ON {self._on(value=True)}"
        keys = {name: Move._value(self, name) if is_exact else f"t.{self._q(name)}" for name in self.load.keys}
        self._insert_staged(
            f"SELECT {gate.pipeline}, {gate.rows}, s.{key}, s.{position}, "
            f"COALESCE(s.{ts}, {now}), {deleted}, {self._hash(keys)} FROM {stage} AS s{stored} "
            f"WHERE (s.{position} IS NOT NULL OR s.{ts} IS NOT NULL) AND COALESCE(s.{ts}, {now}) >= {oldest}"
        )
        self._note_unavailable()
        if (truncated := self._truncated) is not None:
            self._note_truncate(truncated)

    def _is_exact(self, column: Column) -> bool:
        """Whether only equal keys are the same to the table."""
        collated = column.sql.lower().partition("collate")[2]
        return self.tables.as_key("x", column) == "x" and (not collated or "_bin" in collated)

    # ------------------------------------------------------------------------------------------------------ truncates

    @property
    def _truncated(self) -> Place | None:
        """Position and time of the truncate of the batch; `None` where there is none, or a later one was applied."""
        if not self.changes.truncates:
            return None
        truncated, last = self.changes.truncates[-1], self._known_truncates()
        return truncated if not last or is_after(truncated, last[0], self.changes.tolerance_ms) else None

    def clear(self) -> Counts:
        """Remove what a truncate of the source removed: not rows that were changed after it."""
        truncated = self._truncated
        if truncated is None:
            return Counts()
        tables, soft = self.tables, self.changes.soft_delete_column
        source = self._survivors(truncated)
        on = f"s.row_key = {self._hash({name: f't.{self._q(name)}' for name in self.load.keys})}"
        if soft is not None:
            others = "1 = 1" if source is None else f"NOT EXISTS (SELECT 1 FROM {source} AS s WHERE {on})"
            statement = tables.update(self.target, {soft: self._gone}, f"{self._is_there(soft)} AND {others}")
        elif source is None:
            statement = f"DELETE FROM {self.target}"
        else:
            statement = tables.delete_missing(self.target, source, on)
        return Counts(deleted=int(self.session.run(statement).rowcount))

    def _survivors(self, truncated: Place) -> str | None:
        """Write the keys that were changed after a truncate into a temporary table; return its name, `None` where there
        are none."""
        gate, tables, run = self.gate, self.tables, self.session.run
        kind = tables.sql_type(FIELDS.field("row_key"), key=True)
        tables.create_temporary(self.session, SURVIVORS, f"row_key {kind} NOT NULL PRIMARY KEY")
        # At one time without a position, the truncate is what came last.
        before = gate.is_before(f"g.{self._q('position')}", "g.ts_ms", truncated, at_once=True)
        survivors = tables.temporary(SURVIVORS)
        stay = run(
            f"INSERT INTO {survivors} SELECT DISTINCT g.row_key FROM {gate.table} AS g "
            f"WHERE {gate.of_rows} AND g.is_deleted = {tables.false} AND g.row_key IS NOT NULL AND NOT ({before})"
        ).rowcount
        return survivors if int(stay) else None

    # --------------------------------------------------------------------------------------------------- the statements

    @property
    def source(self) -> str:
        """The staged rows that are to be merged."""
        return self._staged(f"<> {DELETE}")

    def _value(self, name: str, cast: Cast | None = None) -> str:
        """A staged value; what the stored row has where a change does not say it."""
        value = super()._value(name, cast)
        unavailable = next((each for each in self._kept if each.name == name), None)
        return value if unavailable is None else self._kept_value(unavailable, value)

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

    @property
    def _gone(self) -> str:
        """What a soft delete writes, for all rows."""
        assert self.changes.soft_delete_column is not None
        is_flag = pa.types.is_boolean(self.columns[self.changes.soft_delete_column].field.type)
        return self.tables.true if is_flag else self.tables.moment(self.load.moment)
