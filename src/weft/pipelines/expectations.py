"""What must hold for the rows of a load: `expectations=[not_null("email"), range("amount", min=0)]`.

Each is a condition that a bad row meets, in SQL that every database and Spark understand alike. They are tried on the
very rows that are about to be written, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from weft.errors import DeclarationError
from weft.systems.expectation import Expectation, Reaction


def not_null(*columns: str, on_failure: Reaction | None = None) -> Expectation:
    """No row is null in these columns."""
    return Expectation("not_null", _columns(columns, "not_null"), reaction=on_failure)


def unique(*columns: str, on_failure: Reaction | None = None) -> Expectation:
    """No two rows of the load agree in all of these columns. Rows with a null in them are not compared."""
    return Expectation("unique", _columns(columns, "unique"), reaction=on_failure)


def accepted(column: str, values: Sequence[Any], *, on_failure: Reaction | None = None) -> Expectation:
    """A column holds one of these values, or null."""
    if isinstance(values, str) or not values:
        raise DeclarationError(f'accepted takes a list of values: accepted({column!r}, ["a", "b"]).')
    return Expectation(
        "accepted", _columns((column,), "accepted"), tuple(_plain(each) for each in values), "", on_failure
    )


def range(column: str, min: Any = None, max: Any = None, *, on_failure: Reaction | None = None) -> Expectation:
    """A column is at least `min` and at most `max`, or null."""
    if min is None and max is None:
        raise DeclarationError(f"range({column!r}) needs min, max or both.")
    bounds = tuple(None if each is None else _plain(each) for each in (min, max))
    return Expectation("range", _columns((column,), "range"), bounds, "", on_failure)


def sql(condition: str, *, on_failure: Reaction | None = None) -> Expectation:
    """A condition that holds for every row, in the SQL of the target; one that is null counts as kept."""
    if not isinstance(condition, str) or not condition.strip():
        raise DeclarationError('sql takes a condition: sql("total = price * quantity").')
    return Expectation("sql", (), (), condition, on_failure)


def row_count(min: int | None = None, max: int | None = None, *, on_failure: Reaction | None = None) -> Expectation:
    """The load has at least `min` and at most `max` rows."""
    if min is None and max is None:
        raise DeclarationError("row_count needs min, max or both.")
    for each in (min, max):
        if each is not None and (type(each) is not int or each < 0):
            raise DeclarationError(f"row_count takes numbers of rows, not {each!r}.")
    return Expectation("row_count", (), (min, max), "", on_failure)


def freshness(column: str, max_age: timedelta | float, *, on_failure: Reaction | None = None) -> Expectation:
    """The latest value of a column of times is not older than `max_age` (a timedelta or seconds)."""
    seconds = max_age.total_seconds() if isinstance(max_age, timedelta) else max_age
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise DeclarationError(f"freshness takes a timedelta or seconds, not {max_age!r}.")
    return Expectation("freshness", _columns((column,), "freshness"), (float(seconds),), "", on_failure)


def _columns(columns: tuple[str, ...], kind: str) -> tuple[str, ...]:
    if not columns or not all(isinstance(name, str) and name for name in columns):
        raise DeclarationError(f'{kind} takes names of columns: {kind}("id").')
    return columns


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | Decimal | date | datetime):
        return value
    raise DeclarationError(f"An expectation compares with numbers, texts, dates and times, not {type(value).__name__}.")
