"""Constraints of a table, and the conditions by which rows break them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.systems.sql.driver import Session
from weft.systems.sql.tables import ROW, SqlTables, Suspect


@dataclass(frozen=True)
class Constraint:
    """One of these: the columns may not be null, a check, or a foreign key."""

    columns: Sequence[str]
    check: str | None = None
    other: str | None = None
    """The quoted table that a foreign key references."""
    keys: Sequence[str] = ()
    """The columns there."""

    def broken(self, tables: SqlTables) -> str:
        """Return the condition that a row of `v` breaks it."""
        present = " AND ".join(f"v.{tables.quote(name)} IS NOT NULL" for name in self.columns)
        if self.check is not None:
            return f"NOT ({self.check})"
        if self.other is None:
            return f"NOT ({present})"
        there = f"SELECT 1 FROM {self.other} AS t WHERE {same(tables, self.columns, self.keys)}"
        return f"({present} AND NOT EXISTS ({there}))"


def same(tables: SqlTables, columns: Iterable[str], keys: Iterable[str]) -> str:
    """Return the condition that columns of `v` have the values of others of `t`."""
    pairs = zip(columns, keys, strict=True)
    return " AND ".join(f"t.{tables.quote(key)} = v.{tables.quote(column)}" for column, key in pairs)


def breaking(
    tables: SqlTables, session: Session, source: str, values: dict[str, str], constraints: Iterable[Constraint]
) -> list[Suspect]:
    """Return the rows of `source` as `s` that break any of these constraints, in order."""
    broken = [each.broken(tables) for each in constraints if set(each.columns) <= set(values)]
    if not broken:
        return []
    row = tables.quote(ROW)
    listed = ", ".join(f"{value} AS {tables.quote(name)}" for name, value in values.items())
    rows = f"SELECT s.{row}, {listed} FROM {source} AS s"
    numbers = session.rows(f"SELECT {row} FROM ({rows}) AS v WHERE {' OR '.join(broken)} ORDER BY {row}")
    return [Suspect(number) for (number,) in numbers]
