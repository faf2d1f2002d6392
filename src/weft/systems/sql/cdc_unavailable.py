"""Unavailable values: an update leaves them out because it did not change them, and the mirror keeps its own.

Debezium leaves out large values of PostgreSQL (TOAST). If the last change of a key leaves a value out, the gate stores
for this column which change the value is from. A late change that is newer than that one fills the value in.
"""

from __future__ import annotations

import logging

import pyarrow as pa

from weft.systems.changes import DELETE, FROM, KEEPS, KEY, OP, POSITION, SAID, TS, UNKNOWN, Unavailable
from weft.systems.sql.cdc_gate import GatedMove
from weft.systems.sql.literals import literal
from weft.systems.sql.move import LINE, Move
from weft.systems.sql.tables import Column

_log = logging.getLogger("weft.engine")
_ORIGIN, _FILL = "_weft_origin_", "weft_fill"
# The most keys that one statement names.
_NAMED = 500


class UnavailableValues(GatedMove):
    """A move of changes some of which have unavailable values."""

    _columns: list[str]
    """The columns that the gate has entries about, or had."""

    @property
    def _kept(self) -> list[Unavailable]:
        """The columns with unavailable values that the table has."""
        return [each for each in self.changes.kept if each.name in self.names]

    @property
    def _origin_on(self) -> str:
        """The condition that `o` is the stored row that a staged row `q` was, before its key was changed."""
        tables = self.tables
        return " AND ".join(
            f"o.{self._q(key)} = {tables.cast(f'q.{self._q(origin)}', self.fields[origin], self.columns[key])}"
            for key, origin in zip(self.load.keys, self.changes.origins, strict=True)
        )

    def _staged(self, op: str) -> str:
        """The staged rows of an operation, with the values of the rows that they were."""
        stage, condition = self.tables.temporary(self.stage), f"{self._q(OP)} {op} AND {self.condition}"
        if not self.changes.origins or op.startswith("="):
            return f"(SELECT * FROM {stage} WHERE {condition})"
        kept = (f"o.{self._q(each.name)} AS {self._q(_ORIGIN + each.name)}" for each in self._kept)
        there = f"CASE WHEN {self._is_stored('o')} THEN 1 ELSE 0 END AS {self._q(_ORIGIN)}"
        return (
            f"(SELECT q.*, {', '.join(kept)}, {there} FROM (SELECT * FROM {stage} WHERE {condition}) AS q "
            f"LEFT JOIN {self.target} AS o ON {self._origin_on})"
        )

    def _is_stored(self, alias: str) -> str:
        """The condition that a joined row is there, and not soft deleted."""
        there, soft = f"{alias}.{self._q(self.load.keys[0])} IS NOT NULL", self.changes.soft_delete_column
        return there if soft is None else f"({there} AND {self._is_there(soft, alias)})"

    def _is_there(self, soft: str, alias: str = "t") -> str:
        """The condition that a row is not soft deleted yet."""
        column = f"{alias}.{self._q(soft)}"
        is_flag = pa.types.is_boolean(self.columns[soft].field.type)
        return f"({column} IS NULL OR {column} = {self.tables.false})" if is_flag else f"{column} IS NULL"

    def _kept_value(self, each: Unavailable, value: str) -> str:
        """A staged value, or that of the stored row."""
        stored = f"CASE WHEN {self._is_stored('t')} THEN t.{self._q(each.name)} END"
        if self.changes.origins:
            # Where no row has the old key, it may have the new one: by a copy, or because the change comes again.
            stored = f"CASE WHEN s.{self._q(_ORIGIN)} = 1 THEN s.{self._q(_ORIGIN + each.name)} ELSE {stored} END"
        flag = f"s.{self._q(each.flag)}"
        return f"CASE {flag} WHEN {KEEPS} THEN {stored} WHEN {UNKNOWN} THEN NULL ELSE {value} END"

    # ------------------------------------------------------------------------------------------------- before the merge

    def _fill_late(self) -> None:
        """Fill values in that late changes say, and that no newer change said."""
        gate, stage, run = self.gate, self.tables.temporary(self.stage), self.session.run
        self._columns = gate.listed_columns(self.session)
        kept, place = {each.name: each for each in self._kept}, self._q("position")
        key, last, ts = f"s.{self._q(KEY)}", f"s.{self._q(POSITION)}", f"s.{self._q(TS)}"
        for name in self._columns:
            if name not in self.names or name in self.load.keys:
                continue
            said, is_said = last, f"s.{self._q(OP)} <> {DELETE}"
            if (each := kept.get(name)) is not None:
                said, is_said = f"s.{self._q(each.position)}", f"{is_said} AND s.{self._q(each.flag)} = {SAID}"
            of_column = f"{gate.of(gate.column(name), 'c.')} AND c.changed_key = {key}"
            of_row = f"{gate.of(gate.rows, 'g.')} AND g.changed_key = {key}"
            late = gate.is_late(last, ts)
            for truncate in self._known_truncates():
                late = f"{late} AND NOT ({gate.is_before(said, ts, truncate)})"
            newer = f"{said} IS NOT NULL AND {gate.ordered(said)} > {gate.ordered(f'c.{place}')}"
            filled = self.tables.create_temporary_as(
                self.session,
                LINE,
                f"SELECT s.*, {said} AS {self._q('_said')} FROM {stage} AS s JOIN {gate.table} AS c ON {of_column} "
                f"JOIN {gate.table} AS g ON {of_row} WHERE {is_said} AND {late} AND {newer}",
            )
            if not filled:
                continue
            line = self.tables.temporary(LINE)
            if not self._fill(name, line):
                continue
            entry = f"{gate.of(gate.column(name), 't.')} AND t.changed_key = {key}"
            run(self.tables.update_from(gate.table, line, entry, {"position": f"s.{self._q('_said')}"}))

    def _fill(self, name: str, line: str) -> bool:
        """Write late values of a column; return whether the table takes them. Bad ones must not stop the pipeline, and
        are no dead letters: the change itself is late."""
        tables, run = self.tables, self.session.run
        value = Move._value(self, name, tables.try_cast)
        fits = f"{self._on(value=True)} AND (s.{self._q(name)} IS NULL OR {value} IS NOT NULL)"
        if tables.savepoints:
            run(f"SAVEPOINT {_FILL}")
        try:
            run(tables.update_from(self.target, line, fits, {name: value}))
        except Exception as error:
            if not tables.savepoints or not tables.is_rejection(error):
                raise
            run(f"ROLLBACK TO SAVEPOINT {_FILL}")
            _log.warning("Late changes say values of %r that %s rejects: they are left out.", name, self.load.name)
            return False
        return True

    def _settle_kept(self) -> None:
        """Decide by the gate which values are those of the table: a batch may say a value that is older than that."""
        gate, stage, run = self.gate, self.tables.temporary(self.stage), self.session.run
        place = self._q("position")
        for each in self._kept:
            flag, said, last = (f"t.{self._q(name)}" for name in (each.flag, each.position, POSITION))
            column, row = (
                f"(SELECT g.{place} FROM {gate.table} AS g WHERE {gate.of(target, 'g.')} "
                f"AND g.changed_key = t.{self._q(KEY)})"
                for target in (gate.column(each.name), gate.rows)
            )
            # The row of the old key is another one, if that key was changed after this.
            if self.changes.origins:
                again = (
                    f"EXISTS (SELECT 1 FROM {gate.table} AS g WHERE {gate.of_rows} "
                    f"AND g.changed_key = t.{self._q(FROM)} AND {gate.is_late(last, f't.{self._q(TS)}')})"
                )
                run(self.tables.update(stage, {each.flag: str(UNKNOWN)}, f"{flag} = {KEEPS} AND {again}"))
            stored = f"COALESCE({column}, {row})"
            # The removal of the row may be older, too, such as a truncate that comes again.
            is_older = (
                f"(({flag} = {SAID} AND {gate.ordered(said)} < {gate.ordered(last)}) OR {flag} = {UNKNOWN}) "
                f"AND {gate.ordered(said)} <= {gate.ordered(stored)}"
            )
            run(self.tables.update(stage, {each.flag: str(KEEPS)}, is_older))
            source = f"COALESCE({stored}, '')"
            if self.changes.origins:
                # Earlier changes of the new key are about another row.
                source = f"CASE WHEN t.{self._q(FROM)} IS NULL THEN {source} ELSE {last} END"
            run(self.tables.update(stage, {each.position: source}, f"{flag} = {KEEPS}"))

    def _drop_partial(self) -> None:
        """Drop the changes that do not say a value which may not be null, where there is no row that has it; warn of
        those whose other values are written."""
        required = [each for each in self._kept if self._is_required(self.columns[each.name])]
        joined = f"{self._staged(f'<> {DELETE}')} AS s LEFT JOIN {self.target} AS t ON {self._on(value=True)}"
        there = self._is_stored("t")
        if self.changes.origins:
            there = f"({there} OR s.{self._q(_ORIGIN)} = 1)"

        def lost(columns: list[Unavailable]) -> str:
            flags = (f"s.{self._q(each.flag)}" for each in columns)
            return " OR ".join(f"{flag} = {UNKNOWN} OR ({flag} = {KEEPS} AND NOT ({there}))" for flag in flags)

        partial = self.session.value(f"SELECT count(*) FROM {joined} WHERE {lost(self._kept)}")
        if not partial:
            return
        left_out = []
        if required:
            left_out = self.session.rows(f"SELECT s.{self._q(KEY)} FROM {joined} WHERE {lost(required)}")
            self._drop_keys([key for (key,) in left_out])
        _log.warning(
            "%s updates of %s do not say all values of a row that the table does not have: these values are null until "
            "a change says them. %s of them are left out, because such a value may not be null.",
            f"{int(partial):,}",
            self.load.name,
            f"{len(left_out):,}",
        )

    def _is_required(self, column: Column) -> bool:
        return column.required or not column.field.nullable

    def _drop_keys(self, keys: list[str]) -> None:
        for first in range(0, len(keys), _NAMED):
            named = ", ".join(literal(key, self.tables.dialect) for key in keys[first : first + _NAMED])
            self._drop(f"s.{self._q(KEY)} IN ({named})")

    # -------------------------------------------------------------------------------------------------- after the merge

    def _note_unavailable(self) -> None:
        """Note where the values are from that the last changes do not say; not without positions."""
        gate, stage = self.gate, self.tables.temporary(self.stage)
        kept = {each.name: each for each in self._kept}
        for name in {*self._columns, *kept}:
            self._forget_staged(gate.column(name), KEY)
            forgotten = f"{gate.of(gate.column(name))} AND ts_ms < {self._oldest}"
            self.session.run(f"DELETE FROM {gate.table} WHERE {forgotten}")
            if (each := kept.get(name)) is None:
                continue
            if name not in self._columns:
                self._insert(gate.columns, name, None, None)
            said, last = f"s.{self._q(each.position)}", f"s.{self._q(POSITION)}"
            unavailable = f"(s.{self._q(each.flag)} <> {SAID} OR {gate.ordered(said)} < {gate.ordered(last)})"
            self._insert_staged(
                f"SELECT {gate.pipeline}, {gate.column(name)}, s.{self._q(KEY)}, {said}, "
                f"COALESCE(s.{self._q(TS)}, {self._now_ms}), {self.tables.false}, NULL FROM {stage} AS s "
                f"WHERE {unavailable} AND {said} IS NOT NULL AND {last} IS NOT NULL AND s.{self._q(OP)} <> {DELETE} "
                f"AND COALESCE(s.{self._q(TS)}, {self._now_ms}) >= {self._oldest}"
            )
