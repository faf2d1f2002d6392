"""What SQLite's statements need of normalizers (`weft.normalize`), as functions of Python.

They take and give values as they are stored: decimals, dates and times are texts, booleans 0 and 1.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from weft.systems.sqlite import casts

# Unicode's White_Space, which is not all that Python's strip() takes off.
_WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
# More digits than any decimal has.
_EXACT = Context(prec=400)
_compiled = lru_cache(maxsize=256)(re.compile)
_zone = lru_cache(maxsize=256)(ZoneInfo)


def register(driver: sqlite3.Connection, refused: Callable[[str], None]) -> None:
    """Add the functions to a connection. `refused` gets the reason where one of them fails: SQLite only reports that
    it did."""

    def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except (ValueError, ArithmeticError) as error:
                refused(str(error))
                raise

        return call

    for name, count, function in _FUNCTIONS:
        driver.create_function(name, count, reporting(function), deterministic=True)


def _of_text(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_text(value: Any, *arguments: Any) -> Any:
        return None if value is None else function(str(value), *arguments)

    return of_text


def stored(value: Any, code: str) -> Any:
    """A value of any storage as one of a type (`casts.code`). Decimals are rounded, halves away from zero."""
    if value is None:
        return None
    if code.startswith("decimal"):
        scale = int(code.split()[2])
        value = _rounded(Decimal(repr(value) if isinstance(value, float) else str(value)), scale)
    elif code.startswith("int") and isinstance(value, float | str):
        value = _rounded(Decimal(repr(value) if isinstance(value, float) else value), 0)
    elif code == "float32":
        from weft.types import round_float32

        return round_float32(float(value))
    return casts.cast(value, "", code)


def _rounded(number: Decimal, digits: int) -> str:
    rounded = number.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, _EXACT)
    return f"{abs(rounded) if rounded == 0 else rounded:f}"


def compare(one: str | None, other: str | None) -> int | None:
    """Less, equal or more than 0, as one stored decimal is to another."""
    return None if one is None or other is None else int(Decimal(one).compare(Decimal(other)))


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_OFFSET = re.compile(r"([+-])(0[0-9]|1[0-4])(?::?([0-5][0-9]))?")


def _day(fields: dict[str, str]) -> date:
    # Two-digit years mean what strptime and POSIX say.
    year = int(fields["Y"]) if "Y" in fields else int(fields["y"]) + (2000 if fields["y"] < "69" else 1900)
    name = fields.get("b") or fields.get("B")
    return date(year, _MONTHS.index(name[:3].lower()) + 1 if name else int(fields["m"]), int(fields["d"]))


def _instant(fields: dict[str, str]) -> datetime:
    hour = int(fields["H"]) if "H" in fields else int(fields.get("I", "0")) % 12
    if fields.get("p", "").lower() == "pm":
        hour += 12
    day, fraction = _day(fields), int(fields.get("f", "0").ljust(6, "0"))
    clock = time(hour, int(fields.get("M", "0")), int(fields.get("S", "0")), fraction, UTC)
    moment = datetime.combine(day, clock)
    zone = fields.get("z", "Z")
    if zone == "Z":
        return moment
    match = _OFFSET.fullmatch(zone)
    if match is None or day in (date.min, date.max):
        raise ValueError
    offset = timedelta(hours=int(match[2]), minutes=int(match[3] or 0))
    return moment - offset if match[1] == "+" else moment + offset


def _reading(make: Callable[[dict[str, str]], date]) -> Callable[[str, str, str], str | None]:
    """Read a text by a pattern whose groups are these fields of strptime's; null where it does not match."""

    def read(text: str, pattern: str, fields: str) -> str | None:
        match = _compiled(pattern).fullmatch(text)
        if match is None:
            return None
        try:
            moment = make(dict(zip(fields, match.groups(), strict=True)))
        except ValueError:
            return None
        return moment.isoformat(timespec="microseconds") if isinstance(moment, datetime) else moment.isoformat()

    return read


def zone(value: str | None, name: str) -> str | None:
    """The time that clocks in a zone show."""
    if value is None:
        return None
    moment = datetime.fromisoformat(value)
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return moment.astimezone(_zone(name)).replace(tzinfo=None).isoformat(timespec="microseconds")


def truncate(value: str | None, unit: str) -> str | None:
    """The beginning of a unit of time."""
    if value is None:
        return None
    if len(value) == 10:
        return _beginning(date.fromisoformat(value), unit).isoformat()
    moment = datetime.fromisoformat(value)
    if unit in ("hour", "minute", "second"):
        moment = moment.replace(
            minute=0 if unit == "hour" else moment.minute,
            second=moment.second if unit == "second" else 0,
            microsecond=0,
        )
    else:
        moment = datetime.combine(_beginning(moment.date(), unit), time(), moment.tzinfo)
    return moment.isoformat(timespec="microseconds")


def _beginning(day: date, unit: str) -> date:
    if unit == "week":
        return day - timedelta(days=day.weekday())
    month = {"year": 1, "quarter": (day.month - 1) // 3 * 3 + 1}.get(unit, day.month)
    return day if unit == "day" else day.replace(month=month, day=1)


def round_number(value: Any, digits: int) -> Any:
    """A stored decimal, or a float as it is written, rounded with halves away from zero."""
    if isinstance(value, float):
        return float(_rounded(Decimal(repr(value)), digits)) if abs(value) < 2**53 else value
    return None if value is None else _rounded(Decimal(value), digits)


def fail(message: str) -> None:
    """An error of the statement."""
    raise ValueError(message)


_FUNCTIONS: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("weft_cast", 3, casts.cast),
    ("weft_lower", 1, _of_text(lambda text: text.lower() if text.isascii() else "".join(c.lower() for c in text))),
    ("weft_upper", 1, _of_text(str.upper)),
    ("weft_trim", 1, _of_text(lambda text: text.strip(_WHITESPACE))),
    ("weft_matches", 2, _of_text(lambda text, pattern: _compiled(pattern).fullmatch(text) is not None)),
    ("weft_substitute", 3, _of_text(lambda text, pattern, replacement: _compiled(pattern).sub(replacement, text))),
    ("weft_instant", 3, _of_text(_reading(_instant))),
    ("weft_day", 3, _of_text(_reading(_day))),
    ("weft_stored", 2, stored),
    ("weft_compare", 2, compare),
    ("weft_zone", 2, zone),
    ("weft_truncate", 2, truncate),
    ("weft_round", 2, round_number),
    ("weft_fail", 1, fail),
)
