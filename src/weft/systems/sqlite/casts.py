"""Values of one type as another, inside SQLite's statements: its own CAST never fails, it makes something up.

`weft_cast(value, from, to)` takes and gives values as they are stored. Only columns whose type differs from the
staged one go through it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from hashlib import md5
from math import isinf, isnan
from typing import Any
from uuid import UUID

import pyarrow as pa

from weft.columns import UTC_TIME, hint_of, is_nested
from weft.systems.sql.spellings import pattern_of


def code(field: pa.Field) -> str:
    """A field's type in one word, for `cast`."""
    if is_nested(field.type):
        return "json"
    hint = hint_of(field)
    if hint is not None:
        return hint
    if pa.types.is_decimal(field.type):
        return f"decimal {field.type.precision} {field.type.scale}"
    if pa.types.is_timestamp(field.type):
        return "timestamp" if field.type == UTC_TIME else "local"
    return {"date32[day]": "date", "float": "float32", "double": "float64"}.get(str(field.type), str(field.type))


def cast(value: Any, source: str, target: str) -> Any:
    """A stored value of one type as it is stored in another; `ValueError` where it would be another value."""
    if value is None:
        return None
    try:
        if source == "string" and (spelled := _SPELLED.get(target.partition(" ")[0])) and not spelled(value):
            raise ValueError
        return _TARGETS[target.partition(" ")[0]](value, source, target)
    except (ValueError, ArithmeticError):
        shown = repr(value) if len(repr(value)) < 100 else repr(value)[:100] + "…"
        kind, *numbers = target.split()
        raise ValueError(f"{shown} does not fit {kind}({','.join(numbers)})".removesuffix("()")) from None


def _int(value: Any, source: str, target: str) -> int:
    number = Decimal(value) if isinstance(value, str | float) else value
    if number != int(number):
        raise ValueError
    bits = int(target[3:]) - 1
    if not -(1 << bits) <= number < 1 << bits:
        raise ValueError
    return int(number)


def _decimal(value: Any, source: str, target: str) -> str:
    precision, scale = map(int, target.split()[1:])
    number = Decimal(repr(value) if isinstance(value, float) else value)
    if not number.is_finite() or (number and number.adjusted() >= precision - scale):
        raise ValueError
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    shift = exponent + scale
    whole = int("".join(map(str, digits)))
    if shift >= 0:
        whole *= 10**shift
    else:
        whole, rest = divmod(whole, 10**-shift)
        if rest:
            raise ValueError
    return str(Decimal((sign if whole else 0, tuple(map(int, str(whole))), -scale)))


def _numeric(value: Any, source: str, target: str) -> int | float:
    """A decimal for a column of which SQLite would make it the nearest float."""
    number = Decimal(_decimal(value, source, target))
    if number == int(number) and -(1 << 63) <= number < 1 << 63:
        return int(number)
    if Decimal(repr(float(number))) != number:
        raise ValueError
    return float(number)


def _float(value: Any, source: str, target: str) -> float:
    number = float(value)
    is_too_large = isinf(number) and isinstance(value, str) and "inf" not in value.lower()
    if is_too_large or isnan(number):  # which SQLite would store as null
        raise ValueError
    return number


def _bool(value: Any, source: str, target: str) -> int:
    if isinstance(value, str):
        return int(value.lower() in ("true", "t", "1"))
    if value not in (0, 1):
        raise ValueError
    return int(value)


def _moment(value: Any) -> datetime:
    if not isinstance(value, str):
        raise ValueError
    moment = datetime.fromisoformat(value)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _date(value: Any, source: str, target: str) -> str:
    moment = _moment(value)
    if moment.time() != time():
        raise ValueError
    return moment.date().isoformat()


def _string(value: Any, source: str, target: str) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if source == "bool":
        return "true" if value else "false"
    return str(value)


def _json(value: Any, source: str, target: str) -> str:
    text = _string(value, source, target)
    if source in ("date", "timestamp", "local", "uuid", "time"):
        return json.dumps(text)
    json.loads(text)
    return text


_KINDS = {
    **dict.fromkeys(("decimal", "numeric"), pa.decimal128(38, 9)),
    **dict.fromkeys(("timestamp", "local"), UTC_TIME),
    **dict.fromkeys(("json", "uuid", "time"), pa.string()),
    "date": pa.date32(),
}
_TARGETS: dict[str, Callable[[Any, str, str], Any]] = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), _int),
    **dict.fromkeys(("float32", "float64"), _float),
    "decimal": _decimal,
    "numeric": _numeric,
    "bool": _bool,
    "date": _date,
    "timestamp": lambda value, source, target: _moment(value).isoformat(timespec="microseconds"),
    "local": lambda value, source, target: _moment(value).replace(tzinfo=None).isoformat(timespec="microseconds"),
    "string": _string,
    "binary": lambda value, source, target: value if isinstance(value, bytes) else str(value).encode(),
    "json": _json,
    "uuid": lambda value, source, target: str(UUID(bytes=value) if isinstance(value, bytes) else UUID(value)),
    "time": lambda value, source, target: time.fromisoformat(value).isoformat(),
}


_SPELLED = {
    name: re.compile(pattern).fullmatch
    for name in _TARGETS
    if (pattern := pattern_of(_KINDS.get(name) or pa.type_for_alias(name))) is not None
}
"""What finds whether a text is spelled as a value of a type."""


def row_hash(*values: Any) -> str:
    """Hash the values' `repr`: null, empty, shifted and differently typed values all differ in it."""
    return hash_of_parts(hash_part(*values) + (b"," if len(values) == 1 else b""))


def hash_part(*values: Any) -> bytes:
    """Return what `row_hash` takes of some of the values: a function of SQLite has no more than 127 arguments."""
    return ", ".join(map(repr, values)).encode("utf-8", "surrogatepass")


def hash_of_parts(*parts: bytes) -> str:
    """Return the `row_hash` of all values."""
    return md5(b"(%s)" % b", ".join(parts), usedforsecurity=False).hexdigest()


def add_seconds(value: str | None, seconds: float) -> str | None:
    """A stored instant some seconds later: SQLite's own functions drop microseconds."""
    if value is None:
        return None
    return (datetime.fromisoformat(value) + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


def compare_decimals(one: str, other: str) -> int:
    """Return -1, 0 or 1, as a collation of SQLite does. Other texts come after all numbers, by their letters."""
    left, right = _sortable(one), _sortable(other)
    return (left > right) - (left < right)


def _sortable(text: str) -> tuple[bool, Decimal, str]:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return True, Decimal(0), text
    return (False, number, "") if number.is_finite() else (True, Decimal(0), text)
