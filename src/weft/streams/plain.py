"""Values of other packages, enums and subclasses as the plain Python values that they are."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from operator import is_
from types import NoneType
from typing import Any
from uuid import UUID

_BASES: tuple[Any, ...] = (int, float, Decimal, bytes)
_PLAIN = frozenset({NoneType, str, bool, int, float, Decimal, date, datetime, bytes, UUID})


def plain_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events with plain values."""
    if {type(value) for event in events for value in event.values()} <= _PLAIN:
        return events
    try:
        return [{_text(key): plain(value) for key, value in event.items()} for event in events]
    except RecursionError:  # the field says that it is nested too deeply
        return events


def plain(value: Any) -> Any:
    """Return a value of numpy, pandas, polars or Arrow, of an enum or of a subclass as the plain value that it is.
    Another one stays: its field says that it does not fit."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, dict):
        values = {_text(key): plain(each) for key, each in value.items()}
        is_plain = kind is dict and all(map(is_, values, value)) and all(map(is_, values.values(), value.values()))
        return value if is_plain else values
    if isinstance(value, list):
        items = [plain(each) for each in value]
        return value if kind is list and all(map(is_, items, value)) else items
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, datetime):
        return _moment(value)
    if isinstance(value, date):
        return date(value.year, value.month, value.day)
    if isinstance(value, str):
        return str.__str__(value)  # whatever the subclass makes of it
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    package = kind.__module__.partition(".")[0]
    if package == "numpy":
        return _of_numpy(value)
    if package == "pandas" and kind.__name__ == "NAType":
        return None
    if package == "polars" and hasattr(value, "to_list"):
        return plain(value.to_list())
    return plain(value.as_py()) if package == "pyarrow" and hasattr(value, "as_py") else value


def _text(key: Any) -> Any:
    return plain(key) if isinstance(key, str) else key


def _moment(value: datetime) -> datetime | None:
    if value != value:  # NaT of pandas
        return None
    if getattr(value, "nanosecond", 0):
        return value
    day = (value.year, value.month, value.day)
    return datetime(*day, value.hour, value.minute, value.second, value.microsecond, value.tzinfo, fold=value.fold)


def _of_numpy(value: Any) -> Any:
    if hasattr(value, "tolist") and value.ndim:
        return plain(value.tolist())
    item = value.item() if hasattr(value, "item") else value
    if type(value).__name__ == "datetime64":
        if value != value:  # NaT
            return None
        exact = value.astype("datetime64[us]")
        # numpy turns nanoseconds, and years beyond 9999, into numbers.
        item = exact.item() if isinstance(item, int) and exact == value else item
        return item if isinstance(item, date) else value
    return value if type(item) is type(value) else plain(item)
