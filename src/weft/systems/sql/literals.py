"""Values as SQL literals, where a statement takes no parameters (COPY, CREATE TABLE AS, a query inside another)."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from weft.errors import DeclarationError


def literal(value: Any, dialect: str) -> str:
    """Write a value as the database would read it back; raise where that is not possible, never alter it."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return {"sqlite": str(int(value))}.get(dialect, str(value).upper())
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        # With an exponent it is a floating-point number to every database; without, a decimal to some.
        return f"{value!r}e0" if "e" not in repr(value) else repr(value)
    if isinstance(value, Decimal) and value.is_finite():
        # SQLite's decimals are texts: the collation compares them as numbers, also in a user's own query.
        return f"'{value:f}' COLLATE weft_decimal" if dialect == "sqlite" else f"{value:f}"
    if isinstance(value, datetime):
        return _time(value, dialect)
    if isinstance(value, date):
        return f"'{value.isoformat()}'" if dialect == "sqlite" else f"DATE '{value.isoformat()}'"
    if isinstance(value, str) and "\0" not in value:
        return _text(value, dialect)
    raise DeclarationError(f"A {type(value).__name__} cannot be written into a query: {value!r}")


def _time(value: datetime, dialect: str) -> str:
    if value.tzinfo is None:
        if dialect == "sqlite":
            # In the form in which SQLite stores them.
            return f"'{value.isoformat('T', 'microseconds')}'"
        kind = "TIMESTAMP_NTZ" if dialect == "spark" else "TIMESTAMP"
        return f"{kind} '{value.isoformat(' ', 'microseconds')}'"
    text = value.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
    if dialect == "mysql":
        return f"TIMESTAMP '{text}'"
    if dialect == "sqlite":
        # In the form in which SQLite stores timestamps.
        return f"'{value.astimezone(UTC).isoformat(timespec='microseconds')}'"
    kind = "TIMESTAMP" if dialect == "spark" else "TIMESTAMP WITH TIME ZONE"
    return f"{kind} '{text}+00:00'"


def _text(value: str, dialect: str) -> str:
    if dialect == "mysql":
        # Whatever the server's mode says about backslashes; and a literal, which takes the collation of the column that
        # it is compared with.
        return f"_utf8mb4 X'{value.encode().hex()}'" if value else "''"
    if dialect == "spark":
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return "'" + value.replace("'", "''") + "'"
