"""How a load moves staged rows into its target: what all modes share, and the statements of append and truncate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from weft.errors import LoadRefusedError
from weft.systems.load import Counts, Load
from weft.systems.sql.driver import Session
from weft.systems.sql.tables import Column, SqlTables

CHANGED, LINE, KEPT, CHAIN = "_weft_changed", "_weft_line", "_weft_kept", "_weft_chain"
_UNIQUE, _PRESENT, _RANK = "_weft_unique", "_weft_present", "_weft_rank"


@dataclass(frozen=True)
class LoadTransaction:
    """What every step of a load works with."""

    tables: SqlTables
    session: Session
    load: Load
    schema: pa.Schema
    """The schema of the rows as the target has them."""
    is_alone: bool = True
    """Whether no other load shares the transaction, whose rows may refer to those of this one."""

    def check_deferred(self) -> None:
        if self.is_alone:
            self.tables.check_deferred(self.session)


class Move:
    """The statements that move the rows of a staging table into the target; those of an append."""

    TEMPORARY: ClassVar[tuple[str, ...]] = (CHANGED, LINE, KEPT, CHAIN, _UNIQUE)
    """The temporary tables of all moves."""
    can_compare: ClassVar[bool] = False
    """Whether no row changes what becomes of another one, so that all may be compared before any is moved."""
    condition = "1 = 1"
    """The condition on the staged rows to move."""
    mark = "1 = 1"
    """A condition that is true, by which the database notes the rows that a statement reads."""
    present: str | None = None
    """The table of all keys that the source has, where some rows do not stay in the staging table."""

    def __init__(
        self, transaction: LoadTransaction, columns: dict[str, Column], stage: str, staged_as: dict[str, str]
    ) -> None:
        self.tables, self.session, self.load = transaction.tables, transaction.session, transaction.load
        self.columns, self.stage, self.staged_as = columns, stage, staged_as
        self.fields = {field.name: field for field in transaction.schema}
        self.names = self.load.stored(transaction.schema).names
        self.target = self.tables.table(self.load.schema, self.load.table)

    def _hash(self, values: dict[str, str]) -> str:
        """The hash of some values of a row, in SQL. `values`: by column, the expression of its value."""
        tables = self.tables
        return tables.row_hash([tables.as_hashed(value, self.columns[name]) for name, value in values.items()])

    @property
    def source(self) -> str:
        """The staged rows that are to be moved."""
        table = self.tables.temporary(self.stage)
        return table if self.condition == "1 = 1" else f"(SELECT * FROM {table} WHERE {self.condition})"

    def run(self) -> Counts:
        """Move the rows; return the counts."""
        return self.clear() + self.apply() + self.delete_missing()

    def clear(self) -> Counts:
        """Remove what the rows replace as a whole.

        Not by TRUNCATE: it commits (MySQL), or shows an empty table to readers that began before (PostgreSQL)."""
        if not self.load.replaces_all and self.load.mode != "truncate":
            return Counts()
        return Counts(deleted=int(self.session.run(f"DELETE FROM {self.target}").rowcount))

    def apply(self) -> Counts:
        """Move the rows without removing any: what may be done piece by piece."""
        return self.insert()

    def delete_missing(self) -> Counts:
        """Remove the rows whose key the source no longer has."""
        return Counts()

    def insert(self) -> Counts:
        """Insert the staged rows as they are."""
        values = ", ".join(self._value(name) for name in self.names)
        cursor = self.session.run(
            f"INSERT INTO {self.target} ({self.tables.listed(self.names)}) "
            f"SELECT {values} FROM {self.source} AS s WHERE {self.mark}"
        )
        return Counts(inserted=int(cursor.rowcount))

    def into_new_table(self, rows: int) -> Counts:
        """Return what so many staged rows would do to a table that is not there yet."""
        return Counts(inserted=rows)

    def candidates(self) -> tuple[str, dict[str, str]]:
        """Return a table of the rows to move, to be called `s`, and their values as the target has them."""
        return self.tables.temporary(self.stage), {name: self._value(name, self.tables.try_cast) for name in self.names}

    # ------------------------------------------------------------------------------------------------------ expressions

    def _q(self, name: str) -> str:
        return self.tables.quote(name)

    def _value(self, name: str, cast: Callable[[str, pa.Field, Column], str] | None = None) -> str:
        """A staged value as the type of its column."""
        column = self.columns[name]
        expression = f"s.{self._q(name)}"
        if self.staged_as.get(name) != column.sql:
            expression = (cast or self.tables.cast)(expression, self.fields[name], column)
        if column.default is None or not self.load.null_is_default or name in self.load.keys:
            return expression
        return f"COALESCE({expression}, {self._for_null(name, column.default)})"

    def _for_null(self, name: str, default: str) -> str:
        """The values that stand for a null in a column with a default."""
        return default

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
        column = self.columns.get(key)  # there is none where the target does not exist yet
        return expression if column is None else self.tables.as_key(expression, column)

    # ----------------------------------------------------------------------------------------------------------- checks

    @property
    def identity(self) -> list[str]:
        """The columns of which no two staged rows may have the same values."""
        return list(self.load.keys)

    def check_keys(self, rows: int, reject: Callable[[], None] | None = None) -> int:
        """Refuse null keys and rows that share one, or keep the right one of them; return how many were left out.

        `reject` takes rows without a key from the staging table, where they are not refused."""
        load, tables = self.load, self.tables
        if not load.keys:
            return 0
        stage = tables.temporary(self.stage)
        keys = self.identity
        listed = self._same(keys)
        if len(keys) == 1 and tables.sorts_fast(self.fields[keys[0]]):
            distinct = self.session.value(f"SELECT count(DISTINCT {listed}) FROM {stage}")
            if distinct == rows:  # a null would not be counted either
                return 0
        null = " OR ".join(f"{self._same([key])} IS NULL" for key in load.keys)
        # One pass finds both; which of them it was is only queried where there is something. Drivers do not know types
        # that compare texts in their own way, as citext.
        shown = ", ".join(
            f"CAST({self._same([key])} AS text)" if self._same([key]) != self._q(key) else self._q(key) for key in keys
        )
        shared = self.session.rows(
            f"SELECT {shown}, count(*) FROM {stage} GROUP BY {listed} HAVING count(*) > 1 OR {null} LIMIT 5"
        )
        if not shared:
            return 0
        if nulls := self.session.value(f"SELECT count(*) FROM {stage} WHERE {null}"):
            if reject is not None:
                reject()
                return int(nulls) + self.check_keys(rows - nulls)
            raise LoadRefusedError(
                f"{nulls:,} of {rows:,} source rows of {load.name} have no key ({', '.join(load.keys)} is null).",
                hint=f"Filter them out in the source, or choose other keys.{load.about_nulls}",
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
        """Keep the greatest row of each key by `deduplicate_by`; all columns break ties, so that a re-run agrees."""
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
        kept = tables.create_temporary_as(
            self.session,
            _UNIQUE,
            f"SELECT * FROM ({ranked}) AS r WHERE {self._q(_RANK)} = 1",
            keys=tables.stage_keys([self.fields[name] for name in load.keys], self.columns),
        )
        tables.filled(self.session, tables.temporary(_UNIQUE))
        self.stage = _UNIQUE
        return rows - kept

    def remember_keys(self) -> None:
        """Keep what the source has, before rows are put aside."""
        tables, keys = self.tables, self.load.keys
        tables.create_temporary_as(
            self.session,
            _PRESENT,
            f"SELECT {tables.listed(keys)} FROM {tables.temporary(self.stage)}",
            keys=tables.stage_keys([self.fields[name] for name in keys], self.columns),
        )
        tables.filled(self.session, tables.temporary(_PRESENT))
        self.present = _PRESENT
