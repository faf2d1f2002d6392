"""How staged rows meet the rows of a target: append, truncate, merge and scd2 as set-based statements.

Merge and scd2 first write the rows that differ into a temporary table, whose counts are the report, then apply it by
one UPDATE and one INSERT: an unchanged row costs one comparison and no write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import ClassVar

import pyarrow as pa

from weft.errors import LoadRefusedError
from weft.systems.load import IS_CURRENT, ROW_HASH, VALID_FROM, VALID_TO, Counts, Load
from weft.systems.sql.driver import Session
from weft.systems.sql.tables import ROW, Column, SqlTables

_DELTA, _UNIQUE, _LINE, _KEPT, _CHAIN = "_weft_delta", "_weft_unique", "_weft_line", "_weft_kept", "_weft_chain"
_PRESENT = "_weft_present"
_HIT, _SINCE, _RANK = "_weft_hit", "_weft_since", "_weft_rank"
# Later than every instant that a database holds: the end of what has no end.
_NEVER = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)


class Move:
    """The statements that bring a staging table's rows into the target."""

    OF_A_PIECE: ClassVar[tuple[str, ...]] = (_DELTA, _LINE, _KEPT, _CHAIN)
    """The temporary tables that moving a piece makes anew."""
    TEMPORARY: ClassVar[tuple[str, ...]] = (*OF_A_PIECE, _UNIQUE)

    def __init__(
        self,
        tables: SqlTables,
        session: Session,
        load: Load,
        schema: pa.Schema,
        columns: dict[str, Column],
        stage: str,
        staged_as: dict[str, str],
    ) -> None:
        self.tables, self.session, self.load, self.columns = tables, session, load, columns
        self.fields = {field.name: field for field in schema}
        self.names = list(schema.names)
        self.staged_as = staged_as
        self.stage = stage
        self.condition = "1 = 1"
        """Which of the staged rows to move."""
        self.target = tables.table(load.schema, load.table)
        self.is_compared = False
        """Whether all staged rows were compared with the target beforehand, by `compare`."""
        self.present: str | None = None
        """The table of all keys that the source has, where some rows do not stay in the staging table."""

    @property
    def source(self) -> str:
        """The staged rows that are to be moved."""
        table = self.tables.temporary(self.stage)
        return table if self.condition == "1 = 1" else f"(SELECT * FROM {table} WHERE {self.condition})"

    def run(self) -> Counts:
        """Move the rows, and say what became of them."""
        if self.load.mode == "merge":
            return self._merge() + self.delete_missing()
        if self.load.mode == "scd2":
            return self._scd2() + self.delete_missing()
        return self.clear() + self.insert()

    # ------------------------------------------------------------------------------------------------------ expressions

    def _q(self, name: str) -> str:
        return self.tables.quote(name)

    def _list(self, names: Sequence[str], alias: str = "") -> str:
        return ", ".join(f"{alias}{self._q(name)}" for name in names)

    def _value(self, name: str) -> str:
        """A staged value as the type of its column."""
        column = self.columns[name]
        expression = f"s.{self._q(name)}"
        if self.staged_as.get(name) == column.sql:
            return expression
        return self.tables.cast(expression, self.fields[name], column)

    def _values(self) -> str:
        return ", ".join(f"{self._value(name)} AS {self._q(name)}" for name in self.names)

    def _on(self, value: bool = False) -> str:
        """The condition that joins by keys; `value`: with raw staged values, else with those of a temporary table."""
        return " AND ".join(
            f"t.{self._q(key)} = {self._value(key) if value else f's.{self._q(key)}'}" for key in self.load.keys
        )

    def _same(self, keys: Sequence[str]) -> str:
        """Keys to group by, so that those are together which the target takes for the same."""
        return ", ".join(self._as_key(key, self._q(key)) for key in keys)

    def _as_key(self, key: str, expression: str) -> str:
        column = self.columns.get(key)  # there is none where the target is yet to be made
        return expression if column is None else self.tables.as_key(expression, column)

    def _hash(self, values: dict[str, str]) -> str:
        """The hash of a row, by the columns that its values are of."""
        tables = self.tables
        return tables.row_hash([tables.as_hashed(value, self.columns[name]) for name, value in values.items()])

    def _count(self, sql: str) -> int:
        row = self.session.row(sql)
        return int(row[0] or 0) if row else 0

    # ----------------------------------------------------------------------------------------------------------- checks

    def check_keys(self, rows: int, put_aside: Callable[[], None] | None = None) -> int:
        """Refuse null keys and rows that share one, or keep the right one of them; gives how many were left out.

        `put_aside` takes rows without a key from the staging table, where they are not refused."""
        load, tables = self.load, self.tables
        if not load.keys:
            return 0
        stage = tables.temporary(self.stage)
        keys = list(load.keys)
        if load.mode == "scd2" and load.event_timestamp_column and not load.deduplicate_by:
            # Several events of one key are its history. Two at one instant would be a contradiction.
            keys.append(load.event_timestamp_column)
        listed = self._same(keys)
        if len(keys) == 1 and tables.sorts_fast(self.fields[keys[0]]):
            distinct = self._count(f"SELECT count(DISTINCT {listed}) FROM {stage}")
            if distinct == rows:  # a null would not be counted either
                return 0
        null = " OR ".join(f"{self._same([key])} IS NULL" for key in load.keys)
        # One pass finds both; which of them it was is only asked where there is something. A type of its own that
        # compares texts, as citext, is none that a driver knows.
        shown = ", ".join(
            f"CAST({self._same([key])} AS text)" if self._same([key]) != self._q(key) else self._q(key) for key in keys
        )
        shared = self.session.rows(
            f"SELECT {shown}, count(*) FROM {stage} GROUP BY {listed} HAVING count(*) > 1 OR {null} LIMIT 5"
        )
        if not shared:
            return 0
        if nulls := self._count(f"SELECT count(*) FROM {stage} WHERE {null}"):
            if put_aside is not None:
                put_aside()
                return nulls + self.check_keys(rows - nulls)
            raise LoadRefusedError(
                f"{nulls:,} of {rows:,} source rows of {load.name} have no key ({', '.join(load.keys)} is null).",
                hint="Filter them out in the source, or choose other keys.",
            )
        if not load.deduplicate_by:
            examples = "; ".join(
                f"{', '.join(f'{key}={value!s}' for key, value in zip(keys, row, strict=False))} ({row[-1]} rows)"
                for row in shared
            )
            raise LoadRefusedError(
                f"Rows of the source of {load.name} share a key: {examples}{' …' if len(shared) == 5 else ''}.",
                hint='Say which of them counts: deduplicate_by="updated_at" keeps the greatest.',
            )
        return self._keep_greatest(rows)

    def _keep_greatest(self, rows: int) -> int:
        """Of rows with one key, the greatest by `deduplicate_by`; ties go by all columns, so that a re-run agrees."""
        load, tables = self.load, self.tables
        by = [
            f"{self._q(name)} IS NULL, {tables.ordered(self._q(name), self.fields[name])} DESC"
            for name in load.deduplicate_by
        ]
        rest = [
            f"{self._q(name)} DESC"
            for name in self.names
            if name not in (*load.keys, *load.deduplicate_by) and tables.is_sortable(self.fields[name])
        ]
        # All of the staging table, its row numbers too.
        ranked = (
            f"SELECT q.*, row_number() OVER (PARTITION BY {self._same(load.keys)} ORDER BY {', '.join([*by, *rest])}) "
            f"AS {self._q(_RANK)} FROM {tables.temporary(self.stage)} AS q"
        )
        tables.drop_temporary(self.session, _UNIQUE)
        kept = tables.create_temporary_as(
            self.session,
            _UNIQUE,
            f"SELECT * FROM ({ranked}) AS r WHERE {self._q(_RANK)} = 1",
            keys=tables.stage_keys([self.fields[name] for name in load.keys], self.columns),
        )
        tables.filled(self.session, tables.temporary(_UNIQUE))
        self.stage = _UNIQUE
        return rows - kept

    # ------------------------------------------------------------------------------------------------- append, truncate

    def clear(self) -> Counts:
        """Remove what a truncate replaces."""
        if self.load.mode != "truncate":
            return Counts()
        return Counts(deleted=int(self.session.run(f"DELETE FROM {self.target}").rowcount))

    def insert(self) -> Counts:
        """Insert the staged rows as they are."""
        values = ", ".join(self._value(name) for name in self.names)
        cursor = self.session.run(
            f"INSERT INTO {self.target} ({self._list(self.names)}) SELECT {values} FROM {self.source} AS s"
        )
        return Counts(inserted=int(cursor.rowcount))

    # ------------------------------------------------------------------------------------------------------------ merge

    def apply(self) -> Counts:
        """Move the rows without removing any: what may be done piece by piece."""
        return {"merge": self._merge, "scd2": self._scd2}.get(self.load.mode, self.insert)()

    @property
    def can_compare(self) -> bool:
        """Whether no row changes what becomes of another one, so that all may be compared before any is moved."""
        return self.load.mode == "merge" or (self.load.mode == "scd2" and self.load.event_timestamp_column is None)

    def compare(self) -> None:
        """Find the staged rows that are new or differ, so that pieces of them need only be written.

        Each piece that is rejected leaves dead rows in the target: to compare the next one would take ever longer.
        """
        tables = self.tables
        tables.drop_temporary(self.session, _DELTA)
        number = {ROW: tables.sql_type(pa.field(ROW, pa.int64()))}
        tables.create_temporary_as(self.session, _DELTA, self._differing(), keys=number)
        self.is_compared = True

    def compare_more(self) -> None:
        """Add what is new or differs of more rows."""
        names = [*self.names, _HIT, *([] if self._since is None else [_SINCE]), ROW]
        self.session.run(
            f"INSERT INTO {self.tables.temporary(_DELTA)} ({self._list(names)}) "
            f"SELECT {self._list(names)} FROM ({self._differing()}) AS d"
        )

    def compared_all(self) -> None:
        """Nothing more is to be compared: make pieces easy to find."""
        self.tables.index_rows(self.session, _DELTA)
        self.tables.filled(self.session, self.tables.temporary(_DELTA))

    @property
    def of_a_piece(self) -> tuple[str, ...]:
        """The temporary tables that moving a piece of these rows makes anew."""
        return self.OF_A_PIECE if self.load.tracks_rows and not self.is_compared else ()

    @property
    def _changes(self) -> str:
        """What is new or differs, of the rows that are to be moved."""
        delta = self.tables.temporary(_DELTA)
        return f"(SELECT * FROM {delta} WHERE {self.condition})" if self.is_compared else delta

    def _merge(self) -> Counts:
        load, tables = self.load, self.tables
        hits, new = self._delta()
        delta = self._changes
        updated = load.updated(self.names)
        if hits and updated:
            self.session.run(
                tables.update_from(
                    self.target,
                    delta,
                    f"{self._on()} AND s.{self._q(_HIT)} = 1",
                    {name: f"s.{self._q(name)}" for name in updated},
                )
            )
        if new:
            self.session.run(
                f"INSERT INTO {self.target} ({self._list(self.names)}) "
                f"SELECT {self._list(self.names, 's.')} FROM {delta} AS s WHERE s.{self._q(_HIT)} = 0"
            )
        return Counts(inserted=new, updated=hits)

    @property
    def _since(self) -> str | None:
        return VALID_FROM if self.load.mode == "scd2" else None

    def _differing(self, otherwise: str = "1 = 0") -> str:
        """The staged rows that are new or differ from the stored ones, and whether there is such a one."""
        tables = self.tables
        stored = self._current() if self.load.mode == "scd2" else self.target
        key = self._q(self.load.keys[0])
        differs = [
            tables.distinct(f"t.{self._q(name)}", self._value(name), self.columns[name])
            for name in self.load.compared(self.names)
        ]
        more = f", t.{self._q(self._since)} AS {self._q(_SINCE)}" if self._since else ""
        # Numbers are there where rows are moved piece by piece.
        number = "" if self.condition == "1 = 1" else f", s.{self._q(ROW)}"
        return (
            f"SELECT {self._values()}, CASE WHEN t.{key} IS NULL THEN 0 ELSE 1 END AS {self._q(_HIT)}{more}{number} "
            f"FROM {self.source} AS s LEFT JOIN {stored} AS t ON {self._on(value=True)} "
            f"WHERE t.{key} IS NULL OR {' OR '.join([*differs, otherwise])}"
        )

    def _delta(self, otherwise: str = "1 = 0") -> tuple[int, int]:
        """Write the staged rows that are new or differ; how many differ, and how many are new."""
        tables = self.tables
        if not self.is_compared:
            tables.drop_temporary(self.session, _DELTA)
            tables.create_temporary_as(self.session, _DELTA, self._differing(otherwise))
        found = self.session.row(f"SELECT count(*), sum({self._q(_HIT)}) FROM {self._changes} AS d")
        assert found is not None
        total, hits = int(found[0]), int(found[1] or 0)
        if total and not self.is_compared:
            tables.filled(self.session, tables.temporary(_DELTA))
        return hits, total - hits

    def remember_keys(self) -> None:
        """Keep what the source has, before rows are put aside."""
        tables, keys = self.tables, self.load.keys
        tables.drop_temporary(self.session, _PRESENT)
        tables.create_temporary_as(
            self.session,
            _PRESENT,
            f"SELECT {self._list(keys)} FROM {tables.temporary(self.stage)}",
            keys=tables.stage_keys([self.fields[name] for name in keys], self.columns),
        )
        tables.filled(self.session, tables.temporary(_PRESENT))
        self.present = _PRESENT

    def delete_missing(self) -> Counts:
        """Remove (merge) or close (scd2) the rows whose key the source no longer has; close what is too old."""
        load, tables = self.load, self.tables
        deleted = 0
        # Against all rows of the source: those that were put aside are bad, not gone.
        stage = tables.temporary(self.present or self.stage)
        if load.handle_deletes == "hard":
            cursor = self.session.run(tables.delete_missing(self.target, stage, self._on(value=True)))
            deleted += int(cursor.rowcount)
        if load.handle_deletes == "soft":
            deleted += self._close(
                self._later_of(self._now()), f"NOT EXISTS (SELECT 1 FROM {stage} AS s WHERE {self._on(value=True)})"
            )
        if load.ttl_seconds is not None:
            oldest = tables.add_seconds(self._now(), -load.ttl_seconds)
            ends = tables.add_seconds(f"t.{self._q(VALID_FROM)}", load.ttl_seconds)
            deleted += self._close(ends, f"t.{self._q(VALID_FROM)} < {oldest}")
        return Counts(deleted=deleted)

    # ------------------------------------------------------------------------------------------------------------- scd2

    def _now(self) -> str:
        return self.tables.moment(self.load.moment)

    def _later_of(self, moment: str) -> str:
        """No version ends before it began, even if the clock went back or an event is of the future."""
        since = f"t.{self._q(VALID_FROM)}"
        return f"CASE WHEN {since} > {moment} THEN {since} ELSE {moment} END"

    def _close(self, valid_to: str, condition: str) -> int:
        tables = self.tables
        cursor = self.session.run(
            tables.update(
                self.target,
                {VALID_TO: valid_to, IS_CURRENT: tables.false},
                f"t.{self._q(IS_CURRENT)} = {tables.true} AND {condition}",
            )
        )
        return int(cursor.rowcount)

    def _current(self) -> str:
        wanted = dict.fromkeys((*self.load.keys, *self.load.compared(self.names), VALID_FROM))
        return (
            f"(SELECT {self._list(list(wanted))} FROM {self.target} WHERE {self._q(IS_CURRENT)} = {self.tables.true})"
        )

    def _scd2(self) -> Counts:
        event = self.load.event_timestamp_column
        if event is None:
            return self._scd2_by_load()
        # Of the column's type, whatever the source had.
        began = self.tables.instant(self._value(event), self.columns[event].field)
        if nulls := self._count(f"SELECT count(*) FROM {self.source} AS s WHERE {began} IS NULL"):
            raise LoadRefusedError(
                f"{nulls:,} source rows of {self.load.name} have no event time ({event} is null).",
                hint="Filter them out in the source, or load without event_timestamp_column.",
            )
        # A row that says what the current version says, and not of an earlier time, changes nothing. (Where a key has
        # several rows of which one does, all of them are looked at again below.)
        earlier = f"{began} < t.{self._q(VALID_FROM)}"
        self._delta(earlier)
        if not self._count(f"SELECT count(*) FROM {self.tables.temporary(_DELTA)}"):
            return Counts()
        return self._scd2_by_event(began)

    def _scd2_by_load(self) -> Counts:
        load, tables = self.load, self.tables
        hits, new = self._delta()
        if not hits and not new:
            return Counts()
        delta, now = self._changes, self._now()
        if self._count(f"SELECT count(*) FROM {delta} AS d WHERE {self._q(_SINCE)} >= {now}"):
            # The clock went back: this load is later than what is stored, whatever the clock says.
            last = f"(SELECT max({self._q(_SINCE)}) FROM {delta} AS d)"
            (latest,) = self.session.row(f"SELECT {tables.add_seconds(last, 0.000_001)}") or (None,)
            now = tables.moment(latest if isinstance(latest, datetime) else datetime.fromisoformat(str(latest)))
        if hits:
            self.session.run(
                tables.update_from(
                    self.target,
                    delta,
                    f"{self._on()} AND s.{self._q(_HIT)} = 1 AND t.{self._q(IS_CURRENT)} = {tables.true}",
                    {VALID_TO: now, IS_CURRENT: tables.false},
                )
            )
        names = self._list([*self.names, VALID_FROM, VALID_TO, IS_CURRENT, ROW_HASH])
        digest = self._hash({name: f"s.{self._q(name)}" for name in load.compared(self.names)})
        self.session.run(
            f"INSERT INTO {self.target} ({names}) "
            f"SELECT {self._list(self.names, 's.')}, {now}, NULL, {tables.true}, {digest} FROM {delta} AS s"
        )
        return Counts(inserted=new, updated=hits)

    def _scd2_by_event(self, began: str) -> Counts:
        """Put events into the history of their keys: each begins a version where it changes something, ends the one
        before it, and is ended by the one after it, whatever order they come in."""
        tables, load, run = self.tables, self.load, self.session.run
        for name in (_LINE, _KEPT, _CHAIN):
            tables.drop_temporary(self.session, name)
        keys, listed = list(load.keys), self._list(load.keys)
        ts, until, src, digest = (self._q(name) for name in ("_ts", "_until", "_src", "_hash"))
        never = tables.moment(_NEVER)
        distinct = ", ".join(f"{self._same([key])} AS {self._q(key)}" for key in keys)
        touched = f"(SELECT DISTINCT {distinct} FROM {tables.temporary(_DELTA)})"
        compared = load.compared(self.names)
        stored_hash = self._hash({name: f"t.{self._q(name)}" for name in compared})
        staged_hash = self._hash({name: self._value(name) for name in compared})
        # The stored versions of the keys in question, then what is staged of them.
        line = tables.temporary(_LINE)
        tables.create_temporary_as(
            self.session,
            _LINE,
            f"SELECT {self._list(keys, 't.')}, t.{self._q(VALID_FROM)} AS {ts}, t.{self._q(VALID_TO)} AS {until}, "
            f"0 AS {src}, {stored_hash} AS {digest} FROM {self.target} AS t JOIN {touched} AS s ON {self._on()}",
        )
        raw_keys = ", ".join(self._value(key) for key in keys)
        same = " AND ".join(f"{self._as_key(key, self._value(key))} = k.{self._q(key)}" for key in keys)
        known = (
            f"EXISTS (SELECT 1 FROM {self.target} AS t WHERE {self._on(value=True)} "
            f"AND t.{self._q(VALID_FROM)} = {began} AND {stored_hash} = {staged_hash})"
        )
        run(
            f"INSERT INTO {line} ({listed}, {ts}, {until}, {src}, {digest}) "
            f"SELECT {raw_keys}, {began}, NULL, 1, {staged_hash} FROM {self.source} AS s "
            f"JOIN {touched} AS k ON {same} WHERE NOT {known}"
        )
        order = f"PARTITION BY {self._same(keys)} ORDER BY {ts}, {src}, COALESCE({until}, {never})"
        # Where the version that began last before this row ends: stored versions never overlap.
        cover = (
            f"MAX(CASE WHEN {src} = 0 THEN COALESCE({until}, {never}) END) "
            f"OVER ({order} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
        )
        tables.create_temporary_as(
            self.session,
            _KEPT,
            f"SELECT * FROM (SELECT l.*, {cover} AS {self._q('_cover')}, LAG({digest}) OVER ({order}) AS "
            f"{self._q('_before')}, LAG({ts}) OVER ({order}) AS {self._q('_before_ts')}, "
            f"MIN({src}) OVER (PARTITION BY {self._same(keys)}) AS {self._q('_is_new')} FROM {line} AS l) AS w "
            f"WHERE {src} = 0 OR {self._q('_before')} IS NULL OR {self._q('_before')} <> {digest} "
            # The key had gone and is back, with the values it had.
            f"OR ({self._q('_cover')} <= {ts} AND {self._q('_before_ts')} < {self._q('_cover')})",
        )
        own_end = f"CASE WHEN {self._q('_cover')} > {ts} AND {self._q('_cover')} < {never} THEN {self._q('_cover')} END"
        following = f"LEAD({ts}) OVER ({order})"
        tables.create_temporary_as(
            self.session,
            _CHAIN,
            f"SELECT c.*, CASE WHEN {self._q('_end')} IS NULL THEN {self._q('_next')} "
            f"WHEN {self._q('_next')} IS NULL OR {self._q('_end')} < {self._q('_next')} THEN {self._q('_end')} "
            f"ELSE {self._q('_next')} END AS {self._q('_to')} FROM "
            f"(SELECT k.*, {own_end} AS {self._q('_end')}, {following} AS {self._q('_next')} "
            f"FROM {tables.temporary(_KEPT)} AS k) AS c",
        )
        chain = tables.temporary(_CHAIN)
        current = f"CASE WHEN s.{self._q('_to')} IS NULL THEN {tables.true} ELSE {tables.false} END"
        moved = (
            f"SELECT * FROM {chain} WHERE {src} = 0 "
            f"AND COALESCE({self._q('_to')}, {never}) <> COALESCE({until}, {never})"
        )
        run(
            tables.update_from(
                self.target,
                f"({moved})",
                f"{self._on()} AND t.{self._q(VALID_FROM)} = s.{ts} "
                f"AND COALESCE(t.{self._q(VALID_TO)}, {never}) = COALESCE(s.{until}, {never})",
                {VALID_TO: f"s.{self._q('_to')}", IS_CURRENT: current},
            )
        )
        names = self._list([*self.names, VALID_FROM, VALID_TO, IS_CURRENT, ROW_HASH])
        values = ", ".join(self._value(name) for name in self.names)
        matching = " AND ".join(f"{self._value(key)} = c.{self._q(key)}" for key in keys)
        to = f"c.{self._q('_to')}"
        cursor = run(
            f"INSERT INTO {self.target} ({names}) SELECT {values}, c.{ts}, {to}, "
            f"CASE WHEN {to} IS NULL THEN {tables.true} ELSE {tables.false} END, c.{digest} "
            f"FROM {self.source} AS s JOIN {chain} AS c ON {matching} AND {began} = c.{ts} WHERE c.{src} = 1"
        )
        added = int(cursor.rowcount)
        fresh = self._count(f"SELECT count(*) FROM {chain} WHERE {src} = 1 AND {self._q('_is_new')} = 1")
        return replace(Counts(), inserted=fresh, updated=added - fresh)
