"""Filters that Spark offers to a source, in the words of the source's database."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from weft.engine.readers import SqlReader
from weft.spark_support.sessions import OPERATORS
from weft.systems.sql.tables import SqlTables


def condition(pushed: Any, reader: SqlReader) -> str | None:
    """The condition in SQL, or `None` where the database might mean something else by it: then Spark applies it."""
    kind = type(pushed).__name__
    if kind == "Not":
        inner = condition(pushed.child, reader)
        return None if inner is None else f"NOT ({inner})"
    path: tuple[str, ...] = getattr(pushed, "attribute", ())
    if len(path) != 1 or path[0] not in reader.schema.names:
        return None
    name, field = reader.tables.quote(path[0]), reader.schema.field(path[0])
    if kind in ("IsNull", "IsNotNull"):
        return f"{name} IS {'NOT ' if kind == 'IsNotNull' else ''}NULL"
    if kind in OPERATORS:
        value = _literal(pushed.value, field, reader.tables)
        return None if value is None else f"{name} {OPERATORS[kind]} {value}"
    if kind == "In":
        values = [_literal(value, field, reader.tables) for value in pushed.value]
        return None if not values or None in values else f"{name} IN ({', '.join(map(str, values))})"
    return None


def _literal(value: object, field: pa.Field, tables: SqlTables) -> str | None:
    """Return a literal, for the types whose values the database compares as Spark does.

    Not texts: they are compared by collations, which may ignore case or trailing spaces.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and pa.types.is_integer(field.type):
        return str(value)
    if not tables.native_decimals:
        return None
    if isinstance(value, Decimal) and pa.types.is_decimal(field.type) and value.is_finite():
        return f"{value:f}"
    if isinstance(value, date) and not isinstance(value, datetime) and pa.types.is_date32(field.type):
        return f"DATE '{value.isoformat()}'"
    return None
