"""Constraints of a table of MySQL or MariaDB, by the information schema."""

from __future__ import annotations

import re
from itertools import groupby

from weft.systems.sql.constraints import Constraint
from weft.systems.sql.driver import Session
from weft.systems.sql.tokens import quote_name

_OF_TABLE = "{0}table_schema = coalesce(?, database()) AND {0}table_name = ?"


def of_table(session: Session, schema: str | None, name: str) -> list[Constraint]:
    """Return the constraints of a table, without those that depend on its other rows: unique ones, and foreign keys to
    the table itself."""
    of_table = (schema, name)
    columns = session.rows(
        f"SELECT column_name FROM information_schema.columns WHERE {_OF_TABLE.format('')} AND is_nullable = 'NO'",
        of_table,
    )
    constraints = [Constraint(column) for column in columns]
    on = "c.constraint_schema = t.constraint_schema AND c.constraint_name = t.constraint_name"
    is_mariadb = session.driver.is_mariadb()
    if is_mariadb:
        on += " AND c.table_name = t.table_name"  # names of constraints are those of one table
    for (clause,) in session.rows(
        "SELECT c.check_clause FROM information_schema.check_constraints c "
        f"JOIN information_schema.table_constraints t ON {on} WHERE {_OF_TABLE.format('t.')}",
        of_table,
    ):
        check = clause if is_mariadb else unescaped(clause)
        constraints.append(Constraint(re.findall(r"`([^`]+)`", check), check))
    keys = session.rows(
        "SELECT constraint_name, referenced_table_schema, referenced_table_name, column_name, referenced_column_name "
        f"FROM information_schema.key_column_usage k WHERE {_OF_TABLE.format('')} "
        "AND (referenced_table_schema <> table_schema OR referenced_table_name <> table_name) "
        "ORDER BY constraint_name, ordinal_position",
        of_table,
    )
    for (_, *place), members in groupby(keys, key=lambda row: row[:3]):
        own, other = zip(*(row[3:] for row in members), strict=True)
        constraints.append(Constraint(own, other=".".join(quote_name(part, "`") for part in place), keys=other))
    return constraints


_CONTROLS = {"0": "\0", "n": "\n", "r": "\r", "Z": "\x1a"}


def unescaped(clause: str) -> str:
    """Return a condition as SQL: MySQL, unlike MariaDB, has it in the information schema as the inside of a text."""
    return re.sub(r"\\(.)", lambda match: _CONTROLS.get(match[1], match[1]), clause, flags=re.DOTALL)
