"""How staged rows are compared with the stored ones of their keys, and the statements of a merge.

The rows that are new or differ are first written into a temporary table, whose counts are the report; then one UPDATE
and one INSERT apply it: an unchanged row costs one comparison and no write.
"""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from weft.systems.load import Counts
from weft.systems.sql.literals import literal
from weft.systems.sql.move import CHANGED, Move
from weft.systems.sql.tables import ROW

HIT, SINCE = "_weft_hit", "_weft_since"
# The most rows that one statement names.
_NAMED_ROWS = 200


class ComparedMove(Move):
    """A move that compares the staged rows with the stored ones of the same keys."""

    can_compare: ClassVar[bool] = True
    is_compared = False
    """Whether all staged rows were compared with the target beforehand, by `compare`."""
    since: ClassVar[str | None] = None
    """The column of a stored row that is taken along."""

    @property
    def stored(self) -> str:
        """The stored rows that are compared: all of the target."""
        return self.target

    def _for_null(self, name: str, default: str) -> str:
        return f"t.{self._q(name)}, {default}"

    def compare(self) -> None:
        """Find the staged rows that are new or differ, so that pieces of them need only be written.

        Each piece that is rejected leaves dead rows in the target: to compare the next one would take ever longer.
        """
        tables = self.tables
        number = {ROW: tables.sql_type(pa.field(ROW, pa.int64()))}
        tables.create_temporary_as(self.session, CHANGED, self._differing(), keys=number)
        self.is_compared = True

    def compare_more(self) -> None:
        """Add what is new or differs of more rows."""
        names = self.tables.listed([*self.names, HIT, *([] if self.since is None else [SINCE]), ROW])
        self.session.run(
            f"INSERT INTO {self.tables.temporary(CHANGED)} ({names}) SELECT {names} FROM ({self._differing()}) AS d"
        )

    def compared_all(self) -> None:
        """Index what was compared, so that pieces of it are found fast."""
        self.tables.index_rows(self.session, CHANGED)
        self.tables.filled(self.session, self.tables.temporary(CHANGED))

    def candidates(self) -> tuple[str, dict[str, str]]:
        """Return the rows that are new or differ: their values have the target's types already."""
        if not self.is_compared:
            return super().candidates()
        return self.tables.temporary(CHANGED), {name: f"s.{self._q(name)}" for name in self.names}

    @property
    def _changes(self) -> str:
        """The rows to move that are new or differ."""
        changed = self.tables.temporary(CHANGED)
        return f"(SELECT * FROM {changed} WHERE {self.condition})" if self.is_compared else changed

    @property
    def _joined_mark(self) -> str:
        """The mark after a join with the target: databases may read all of one side before."""
        key = self._q(self.load.keys[0])
        return (
            self.mark if self.mark == Move.mark else f"CASE WHEN t.{key} IS NULL THEN {self.mark} ELSE {self.mark} END"
        )

    def _differing(self, otherwise: str = "1 = 0") -> str:
        """The staged rows that are new or differ from the stored ones, and whether there is such a one."""
        tables = self.tables
        key = self._q(self.load.keys[0])
        differs = [
            tables.distinct(f"t.{self._q(name)}", self._value(name), self.columns[name])
            for name in self.load.compared(self.names)
        ]
        more = f", t.{self._q(self.since)} AS {self._q(SINCE)}" if self.since else ""
        # Numbers are there where rows are moved piece by piece.
        number = "" if self.condition == "1 = 1" else f", s.{self._q(ROW)}"
        return (
            f"SELECT {self._values()}, CASE WHEN t.{key} IS NULL THEN 0 ELSE 1 END AS {self._q(HIT)}{more}{number} "
            f"FROM {self.source} AS s LEFT JOIN {self.stored} AS t ON {self._on(value=True)} "
            f"WHERE {self._joined_mark} AND (t.{key} IS NULL OR {' OR '.join([*differs, otherwise])})"
        )

    def _delta(self, otherwise: str = "1 = 0") -> tuple[int, int]:
        """Write the staged rows that are new or differ; how many differ, and how many are new."""
        tables = self.tables
        if not self.is_compared:
            tables.create_temporary_as(self.session, CHANGED, self._differing(otherwise))
        ((total, hits),) = self.session.rows(f"SELECT count(*), sum({self._q(HIT)}) FROM {self._changes} AS d")
        total, hits = int(total), int(hits or 0)
        if total and not self.is_compared:
            tables.filled(self.session, tables.temporary(CHANGED))
        return hits, total - hits


class Merge(ComparedMove):
    """The statements of a merge: a key has one row, which is updated."""

    def apply(self) -> Counts:
        load, tables = self.load, self.tables
        hits, new = self._delta()
        changed = self._changes
        updated = load.updated(self.names)
        if hits and updated:
            self.session.run(
                tables.update_from(
                    self.target,
                    changed,
                    f"{self._on()} AND s.{self._q(HIT)} = 1 AND {self._joined_mark}",
                    {name: f"s.{self._q(name)}" for name in updated},
                )
            )
        if new:
            self.session.run(
                f"INSERT INTO {self.target} ({tables.listed(self.names)}) "
                f"SELECT {tables.listed(self.names, 's.')} FROM {changed} AS s "
                f"WHERE s.{self._q(HIT)} = 0 AND {self.mark}"
            )
        return Counts(inserted=new, updated=hits)

    def delete_missing(self) -> Counts:
        """Compare with all rows of the source: rows that were put aside are bad, not missing."""
        if self.load.handle_deletes is None:
            return Counts(deleted=self._remove())
        stage = self.tables.temporary(self.present or self.stage)
        cursor = self.session.run(self.tables.delete_missing(self.target, stage, self._on(value=True)))
        return Counts(deleted=int(cursor.rowcount))

    def _remove(self) -> int:
        """Remove the rows that the load names; return how many there were."""
        named, removed = self.load.deleted_keys, 0
        for first in range(0, len(named), _NAMED_ROWS):
            condition = " OR ".join(
                " AND ".join(self._is(name, value) for name, value in row.items())
                for row in named[first : first + _NAMED_ROWS]
            )
            removed += int(self.session.run(f"DELETE FROM {self.target} WHERE {condition}").rowcount)
        return removed

    def _is(self, name: str, value: int | str) -> str:
        # A quoted literal takes the type of its column.
        is_number = type(value) is int and pa.types.is_integer(self.columns[name].field.type)
        return f"{self._q(name)} = {literal(value if is_number else str(value), self.tables.dialect)}"
