"""Constraints of a table of PostgreSQL, by its catalogue."""

from __future__ import annotations

from weft.systems.sql.constraints import Constraint
from weft.systems.sql.driver import Session


def of_table(session: Session, table: str) -> list[Constraint]:
    """Return the constraints of a table, without those that depend on its other rows: unique ones, and foreign keys to
    the table itself."""
    names = (
        "ARRAY(SELECT attname::text FROM unnest({0}) WITH ORDINALITY AS k (number, at) "
        "JOIN pg_attribute ON attrelid = {1} AND attnum = number ORDER BY at)"
    )
    declared = session.rows(
        f"SELECT {names.format('conkey', 'conrelid')}, pg_get_expr(conbin, conrelid), "
        f"CASE contype WHEN 'f' THEN confrelid::regclass::text END, {names.format('confkey', 'confrelid')} "
        "FROM pg_constraint WHERE conrelid = to_regclass(?) AND contype IN ('c', 'f') AND confrelid <> conrelid",
        (table,),
    )
    required = session.rows(
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0 AND attnotnull", (table,)
    )
    return [*(Constraint(*each) for each in declared), *(Constraint(column) for column in required)]
