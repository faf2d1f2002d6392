"""Field types: what each takes from a caller, and what it is in Arrow and in each SQL dialect.

A type has one *canonical* Python form, which is what a reader gets back: `str`, `bool`, `int`, `float`, `Decimal`,
`date`, `datetime` (aware, UTC), any JSON value, `bytes`, `UUID`. `check_column` turns what a caller gave into that
form or says why it cannot; nothing is altered on the way except where the type itself says so (a float32 is rounded to
32 bits, a timestamp with an offset becomes the same instant in UTC, one without is UTC).
"""

from __future__ import annotations

import json
import math
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from operator import countOf
from typing import TYPE_CHECKING, Any
from uuid import UUID as PythonUUID

# What columns of declared tables are annotated with.
from weft.column_types import (
    JSON,
    JSONB,
    UUID,
    BigInt,
    Boolean,
    Bytes,
    Date,
    Double,
    Float,
    Integer,
    Numeric,
    SmallInt,
    String,
    Text,
    Timestamp,
    TimestampTZ,
)
from weft.errors import DeclarationError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "JSON",
    "JSONB",
    "UUID",
    "BigInt",
    "Boolean",
    "Bytes",
    "Date",
    "Double",
    "FieldType",
    "Float",
    "Integer",
    "Numeric",
    "SmallInt",
    "String",
    "Text",
    "Timestamp",
    "TimestampTZ",
]

# Deeper values are refused: Python's own JSON reader gives up near a thousand, PostgreSQL at its stack limit, and a
# value that one process can write and another cannot read back would stop every reader of the stream.
MAX_JSON_DEPTH = 200

# The longest value of one field, as UTF-8 or bytes. Below the smallest limit of the databases (MariaDB's default packet
# is 16 MiB).
MAX_VALUE_BYTES = 8 * 1024 * 1024

_DECIMAL_INFERRED = (38, 18)


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of a field of a stream: `FieldType.parse("decimal(10,2)")`. With a trailing `?` the field may be null or
    missing."""

    base: str
    precision: int = 0
    scale: int = 0
    nullable: bool = False

    @staticmethod
    def parse(text: object, *, field: str = "") -> FieldType:
        """Return the type that `text` names; a `DeclarationError` names the nearest valid one."""
        where = f" of field {field!r}" if field else ""
        if not isinstance(text, str):
            close = _ELSEWHERE.get(getattr(text, "__name__", ""))
            raise DeclarationError(
                f"The type{where} must be a string such as 'string' or 'decimal(10,2)', not {type(text).__name__}.",
                hint=f"Did you mean {close!r}?" if close else None,
            )
        match = re.fullmatch(r"\s*([A-Za-z0-9_]+)\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?\s*(\?)?\s*", text)
        base = match.group(1).lower() if match else text
        if match is None or base not in BASES:
            close = _ELSEWHERE.get(base) or nearest(base, BASES)
            raise DeclarationError(
                f"The type{where} is {text!r}, which is not a field type.",
                hint=(f"Did you mean {close!r}? " if close else "")
                + f"Types: {', '.join(BASES)}; 'decimal(p,s)'; add '?' for nullable.",
            )
        precision, scale = int(match.group(2) or 0), int(match.group(3) or 0)
        if base == "decimal":
            if match.group(2) is None:
                precision, scale = _DECIMAL_INFERRED
            if not (1 <= precision <= 38 and scale <= precision):
                raise DeclarationError(
                    f"The type{where} is {text!r}: a decimal has 1 to 38 digits, and no more decimals than digits."
                )
        elif match.group(2) is not None:
            raise DeclarationError(f"The type{where} is {text!r}: only decimal takes (precision, scale).")
        return FieldType(base, precision, scale, match.group(4) is not None)

    def __str__(self) -> str:
        name = f"decimal({self.precision},{self.scale})" if self.base == "decimal" else self.base
        return name + ("?" if self.nullable else "")

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type that a range read gives this column."""
        import pyarrow as pa

        if self.base == "decimal":
            return pa.decimal128(self.precision, self.scale)
        return {
            "bool": pa.bool_(),
            "int32": pa.int32(),
            "int64": pa.int64(),
            "float32": pa.float32(),
            "float64": pa.float64(),
            "date": pa.date32(),
            "timestamp": pa.timestamp("us", "UTC"),
            "bytes": pa.binary(),
        }.get(self.base, pa.string())

    def sql(self, dialect: str) -> str:
        """Return the column type in a dialect: `sqlite`, `postgres` or `mysql`."""
        return _SQL[self.base][_DIALECTS.index(dialect)].format(p=self.precision, s=self.scale)


_DIALECTS = ("sqlite", "postgres", "mysql")

# SQLite: a name that holds TEXT has text affinity, so that '1.10' stays as it is; the rest of the name says what the
# text means. MySQL: FLOAT prints six digits only, and its JSON refuses depth 32; comments carry what the type cannot
# say.
_SQL: dict[str, tuple[str, str, str]] = {
    "string": ("TEXT", "text", "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"),
    "bool": ("BOOLEAN", "boolean", "TINYINT(1) COMMENT 'bool'"),
    "int32": ("INTEGER_32", "integer", "INT"),
    "int64": ("INTEGER", "bigint", "BIGINT"),
    "float32": ("REAL_32", "real", "DOUBLE COMMENT 'float32'"),
    "float64": ("REAL", "double precision", "DOUBLE"),
    "decimal": ("DECIMAL_TEXT({p},{s})", "numeric({p},{s})", "DECIMAL({p},{s})"),
    "date": ("DATE_TEXT", "date", "DATE"),
    "timestamp": ("TIMESTAMP_TEXT", "timestamp with time zone", "DATETIME(6)"),
    "json": ("JSON_TEXT", "json", "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin COMMENT 'json'"),
    "bytes": ("BLOB", "bytea", "LONGBLOB"),
    "uuid": ("UUID_TEXT", "uuid", "CHAR(36) CHARACTER SET ascii COMMENT 'uuid'"),
}
BASES: tuple[str, ...] = tuple(_SQL)
# What the same types are called in Python and in SQL.
_ELSEWHERE = {
    **dict.fromkeys(("str", "text", "varchar", "char"), "string"),
    **dict.fromkeys(("int", "integer", "bigint", "long"), "int64"),
    **dict.fromkeys(("float", "double", "real", "number"), "float64"),
    **dict.fromkeys(("dict", "list", "object", "jsonb", "array"), "json"),
    **dict.fromkeys(("datetime", "timestamptz"), "timestamp"),
    **dict.fromkeys(("binary", "blob", "bytea"), "bytes"),
    **dict.fromkeys(("numeric", "Decimal"), "decimal(p,s)"),
    "boolean": "bool",
    "smallint": "int32",
    "UUID": "uuid",
}


def comparable(name: str) -> str:
    """Return what SQLite and MySQL compare column names by: no case, and in MySQL no accents either, and ß is s."""
    letters = (c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    return "".join(letters).translate(_MYSQL_LETTERS).casefold()


_MYSQL_LETTERS = str.maketrans("ßẞı", "ssi")


@lru_cache(maxsize=1024)
def from_sql(dialect: str, column_type: str, comment: str = "") -> FieldType:
    """Return the field type of a stream's column, read back from the database. A foreign column reads as a string."""
    if comment in _SQL:
        return FieldType(comment)
    numbers = [int(n) for n in re.findall(r"\d+", column_type.partition("(")[2])]
    name = column_type.upper().partition("(")[0].strip()
    for base, spellings in _SQL.items():
        spelling = spellings[_DIALECTS.index(dialect)].upper()
        if name in (spelling, spelling.partition("(")[0].strip(), spelling.partition(" CHARACTER")[0]):
            return FieldType(base, *(numbers[:2] if base == "decimal" else ()))
    return FieldType("string")


# --------------------------------------------------------------------------------------------------------------- values


def infer(values: Iterable[object]) -> FieldType | None:
    """Return the type of a new field, by the first values seen under it; `None` where it is not clear."""
    kinds = {type(v) for v in values if v is not None}
    if kinds == {int, float}:
        return FieldType("float64")
    for v in values:
        if v is not None:
            base = _INFERRED.get(type(v))
            if base is None or (base == "int64" and not -(2**63) <= v < 2**63):  # type: ignore[operator]
                return None
            return FieldType(base, *_DECIMAL_INFERRED) if base == "decimal" else FieldType(base)
    return None


PYTHON_TYPES: dict[str, type] = {
    "string": str,
    "bool": bool,
    "int32": int,
    "int64": int,
    "float32": float,
    "float64": float,
    "decimal": Decimal,
    "date": date,
    "timestamp": datetime,
    "bytes": bytes,
    "uuid": PythonUUID,
}
"""The type of a canonical value. A `json` field takes several."""
# Of two that are one type in Python, the wider one comes last and counts.
_INFERRED: dict[type, str] = {kind: base for base, kind in PYTHON_TYPES.items()} | dict.fromkeys((dict, list), "json")


def dump_json(value: object) -> str:
    """`value` as JSON that reads back equal; `ValueError` says why where it cannot be."""
    try:
        text = _to_json(value)
        # Keys that are not strings, tuples and subclasses are not JSON: they would come back as something else.
        if json.loads(text) != value:
            raise ValueError("it is not plain JSON (string keys, lists, strings, numbers, booleans, null)")
        text.encode()
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise ValueError(_SURROGATE) from None
    except TypeError as error:
        kind = re.search(r"type (\w+) is not", str(error))
        raise ValueError(f"it is not JSON: it holds a {kind[1]}" if kind else "its keys are not texts") from None
    except ValueError as error:
        if "JSON compliant" in str(error):
            raise ValueError(f"it holds {_NOT_FINITE}") from None
        raise
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _depth(value) > MAX_JSON_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")
    return text


_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_NOT_FINITE = "NaN or infinity, which not every database can store; send null instead"
# Escapes; the group is half of a pair of UTF-16, without the other half.
_HALVES = re.compile(rb"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(\\u[dD][89a-fA-F]\w\w)|\\.")
_SURROGATE = "it holds a lone surrogate, which no encoding can store"


def half_character(text: bytes) -> re.Match[bytes] | None:
    """Return where a text of JSON has the escape of half a character, as its group 1."""
    return next((each for each in _HALVES.finditer(text) if each[1]), None)


def _depth(value: object) -> int:
    level, layer = 0, [value]
    while layer:
        level += 1
        layer = [
            inner
            for outer in layer
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return level - 1


def _string(value: Any, _: FieldType) -> str:
    if type(value) is not str:
        raise _wrong(value)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError(_SURROGATE) from None
    _bounded(size)
    return value


def _bounded(size: int) -> None:
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"it is {size:,} bytes long; a value may have {MAX_VALUE_BYTES:,}")


def _bool(value: Any, _: FieldType) -> bool:
    if type(value) is not bool:
        raise _wrong(value)
    return value


def _int(value: Any, kind: FieldType) -> int:
    if type(value) is not int:
        raise _wrong(value)
    bits = 31 if kind.base == "int32" else 63
    if not -(1 << bits) <= value < 1 << bits:
        raise ValueError(f"it is out of range for {kind.base}")
    return value


def _float(value: Any, kind: FieldType) -> float:
    if type(value) is int:
        try:
            as_float = float(value)
        except OverflowError:
            raise ValueError(f"it is out of range for {kind.base}") from None
        if kind.base == "float32":
            as_float = _as_float32(as_float)
        if int(as_float) != value:
            raise ValueError(f"as a {kind.base} it would be another number")
        value = as_float
    if type(value) is not float:
        raise _wrong(value)
    if not math.isfinite(value):
        raise ValueError(f"it is {_NOT_FINITE}")
    if _is_negative_zero(value):
        raise ValueError("it is -0.0, whose sign not every database keeps; send 0.0 instead")
    if kind.base == "float32":
        return _as_float32(value) + 0.0  # what is rounded to nothing has no sign either
    return value


def _as_float32(value: float) -> float:
    try:
        return round_float32(value)
    except OverflowError:
        raise ValueError("it is out of range for float32") from None


def _is_negative_zero(value: float) -> bool:
    return value == 0 and math.copysign(1, value) < 0


_FLOAT32 = struct.Struct("<f")  # of a fixed byte order: the native one makes infinity of what is too large


def round_float32(value: float) -> float:
    """Return the nearest 32-bit float, as Python's float."""
    return float(_FLOAT32.unpack(_FLOAT32.pack(value))[0])


# Bounded, and without the underscores and foreign digits that Python's Decimal would take.
_DECIMAL_TEXT = re.compile(r"\s*[+-]?(?=[.0-9])[0-9]{0,100}(\.[0-9]{0,100})?([eE][+-]?[0-9]{1,4})?\s*")


def _decimal(value: Any, kind: FieldType) -> Decimal:
    if type(value) is float:
        value = repr(value)
    if type(value) not in (Decimal, int, str):
        raise _wrong(value)
    if type(value) is str and not _DECIMAL_TEXT.fullmatch(value):
        raise ValueError("it is not a decimal number")
    try:
        number = Decimal(value)
    except InvalidOperation:
        raise ValueError("it is not a decimal number") from None
    if not number.is_finite():
        raise ValueError("NaN and infinity are not decimal numbers")
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    stripped = len(digits)
    while stripped > 1 and exponent < -kind.scale and digits[stripped - 1] == 0:
        stripped, exponent = stripped - 1, exponent + 1
    if any(digits) and (-exponent > kind.scale or stripped + exponent > kind.precision - kind.scale):
        raise ValueError(f"it does not fit decimal({kind.precision},{kind.scale}) without rounding")
    if not any(digits):
        return Decimal((0, (0,), -kind.scale))
    padding = exponent + kind.scale
    return Decimal((sign, digits[:stripped] + (0,) * padding, -kind.scale))


def _date(value: Any, _: FieldType) -> date:
    if type(value) is str:
        try:
            return date.fromisoformat(value)
        except ValueError:
            raise ValueError("it is not a date such as '2026-01-31'") from None
    if type(value) is not date:
        raise _wrong(value)
    return value


# More than six digits of a second would be cut off: refuse them rather than change the instant.
_TOO_FINE = re.compile(r"[.,]\d{6}\d*[1-9]")


def _timestamp(value: Any, _: FieldType) -> datetime:
    if type(value) is str:
        if _TOO_FINE.search(value):
            raise ValueError("it is finer than a microsecond")
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("it is not a timestamp such as '2026-01-31T12:00:00Z'") from None
    if getattr(value, "nanosecond", 0):  # of a pandas Timestamp
        raise ValueError("it is finer than a microsecond")
    if type(value) is not datetime:
        raise _wrong(value)
    try:
        moment: datetime = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        # UTC repeats no hour: `fold` means nothing there, but two equal times would not look the same.
        return moment.replace(fold=0) if moment.fold else moment
    except OverflowError:
        raise ValueError("in UTC it is outside the years 1 to 9999") from None


def _json(value: Any, _: FieldType) -> str:
    text = dump_json(value)
    _bounded(len(text.encode()))
    return text


def _bytes(value: Any, _: FieldType) -> bytes:
    if type(value) is str:
        raise ValueError("it is a text; in JSON, bytes are base64")
    if type(value) is not bytes:
        raise _wrong(value)
    _bounded(len(value))
    return value


def _uuid(value: Any, _: FieldType) -> PythonUUID:
    if type(value) is str:
        try:
            return PythonUUID(value)
        except ValueError:
            raise ValueError("it is not a UUID") from None
    if type(value) is not PythonUUID:
        raise _wrong(value)
    return value


def _wrong(value: object) -> ValueError:
    return ValueError(f"it is of type {type(value).__name__}")


_CHECKS: dict[str, Callable[[Any, FieldType], Any]] = {
    "string": _string,
    "bool": _bool,
    "int32": _int,
    "int64": _int,
    "float32": _float,
    "float64": _float,
    "decimal": _decimal,
    "date": _date,
    "timestamp": _timestamp,
    "json": _json,
    "bytes": _bytes,
    "uuid": _uuid,
}


def check_value(value: object, kind: FieldType) -> Any:
    """Return the canonical form of one value (JSON fields: its text); `ValueError` says why it cannot be."""
    return None if value is None else _CHECKS[kind.base](value, kind)


_NONE = type(None)
# To count one type takes three quarters of the time that a set of all takes.
_USUAL: dict[str, type] = {"string": str, "bool": bool, "int32": int, "int64": int, "float64": float}


def check_column(values: list[Any], kind: FieldType) -> tuple[list[Any] | None, bool]:
    """Return the canonical column, or `None` where a value does not fit (`check_value` reports which); and whether it
    has nulls.

    The common types are checked a column at a time, at the speed of C: their types, then their bounds.
    """
    usual = _USUAL.get(kind.base)
    kinds = {usual} if usual and 0 < countOf(map(type, values), usual) == len(values) else set(map(type, values))
    if _NONE not in kinds:
        return _checked(values, values, kinds, kind), False
    kinds.discard(_NONE)
    if not kinds:
        return values, True
    return _checked(values, [v for v in values if v is not None], kinds, kind), True


def _checked(values: list[Any], present: list[Any], kinds: set[type], kind: FieldType) -> list[Any] | None:
    base = kind.base
    if base == "string":
        if kinds == {str}:
            text = "".join(present)
            try:
                if text.isascii() or text.encode():
                    return values if len(text) * 4 <= MAX_VALUE_BYTES else _one_by_one(values, kind)
            except UnicodeEncodeError:
                return None
        return None
    if base == "bool":
        return values if kinds == {bool} else None
    if base in ("int64", "int32"):
        limit = 1 << (63 if base == "int64" else 31)
        return values if kinds == {int} and -limit <= min(present) and max(present) < limit else None
    if base == "float64" and kinds == {float}:
        # An infinite or undefined sum has one among its terms, or is too large itself: look at each.
        plain = math.isfinite(sum(present)) and (0.0 not in present or not any(map(_is_negative_zero, present)))
        return values if plain else _one_by_one(values, kind)
    return _one_by_one(values, kind)


def _one_by_one(values: Sequence[Any], kind: FieldType) -> list[Any] | None:
    check = _CHECKS[kind.base]
    try:
        return [None if v is None else check(v, kind) for v in values]
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------------ JSON in and out


def to_json(value: object) -> object:
    """What JSON can hold of a canonical value: timestamps and dates as ISO text, decimals and UUIDs as text, bytes as
    base64."""
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, (Decimal, PythonUUID)):
        return str(value)
    if isinstance(value, bytes):
        import base64

        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not JSON")


def to_json_or_text(value: object) -> object:
    """What JSON can hold of any value: of a time of day or an interval, its text."""
    try:
        return to_json(value)
    except TypeError:
        return str(value)


def exact_number(number: float, text: str) -> float | Decimal:
    """Return the number that a JSON text has: the float that it was read as, or a `Decimal` where that is another
    number."""
    # A float keeps fifteen digits, whatever they are; only an exponent can take it out of range.
    if len(text) <= 15 and "e" not in text and "E" not in text:
        return number
    try:
        written = Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        return Decimal("NaN")
    return number if written == Decimal(repr(number)) else written


def from_json(value: object, kind: FieldType) -> object:
    """The inverse of `to_json` for one field: text that stands for bytes becomes bytes. The other types are read by
    `check_value`."""
    if kind.base == "bytes" and isinstance(value, str):
        import base64

        try:
            return base64.b64decode(value, validate=True)
        except ValueError:  # also for text that is not ASCII
            raise ValueError("it is not base64") from None
    return value
