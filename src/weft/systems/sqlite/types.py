"""Types of SQLite as canonical Arrow fields, and back.

SQLite stores numbers, texts and bytes; the declared type of a column says what they mean. Tables that Weft makes
declare types of its own, which read back exactly. Others are taken by SQLite's rules and by what is in them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import pyarrow as pa

from weft.columns import LOCAL_TIME, UTC_TIME, hint_of, hinted, is_nested

# A name that holds TEXT has text affinity, so that '1.10' stays as it is.
_OWN: dict[pa.DataType, str] = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "INTEGER_8",
    pa.int16(): "INTEGER_16",
    pa.int32(): "INTEGER_32",
    pa.int64(): "INTEGER",
    pa.float32(): "REAL_32",
    pa.float64(): "REAL",
    pa.date32(): "DATE_TEXT",
    UTC_TIME: "TIMESTAMP_TEXT",
    LOCAL_TIME: "LOCAL_TIMESTAMP_TEXT",
    pa.string(): "TEXT",
    pa.binary(): "BLOB",
}
_HINTED = {"uuid": "UUID_TEXT", "json": "JSON_TEXT", "time": "TIME_TEXT"}
_KINDS = {name: kind for kind, name in _OWN.items()}
_HINTS = {name: hint for hint, name in _HINTED.items()}

# Marks a column that others declared: its values may be written in other ways than ours, though they mean the same.
_LOOSE = {b"weft.loose": b"1"}
# Marks a column without values so far, which may become numbers.
_UNSEEN = {**_LOOSE, b"weft.unseen": b"1"}

# Type names that other programs use; SQLite has no such types.
_FOREIGN: dict[str, pa.DataType] = {
    "BOOL": pa.bool_(),
    "DATE": pa.date32(),
    "DATETIME": LOCAL_TIME,
    "TIMESTAMP": LOCAL_TIME,
}


def sql_type(field: pa.Field) -> str:
    """The declared type of a new column; none where it is unknown, so that it stores each value as it is."""
    if b"weft.unseen" in (field.metadata or {}):
        return ""
    if is_nested(field.type):
        return "JSON_TEXT"
    if pa.types.is_decimal(field.type):
        return f"DECIMAL_TEXT({field.type.precision},{field.type.scale})"
    hint = hint_of(field)
    return _HINTED[hint] if hint in _HINTED else _OWN[field.type]


def makes_floats(declared: str) -> bool:
    """Whether SQLite makes floats of the decimals in a column of this declared type."""
    base = declared.upper().partition("(")[0].strip()
    is_known = base in _KINDS or base in _HINTS or base == "DECIMAL_TEXT" or base in _FOREIGN
    return bool(base) and not is_known and _by_affinity(base) is None


def is_loose(field: pa.Field) -> bool:
    """Whether others may have written the values of this field in their own way."""
    return bool((field.metadata or {}).get(b"weft.loose"))


def declared_field(name: str, declared: str, *, nullable: bool = True) -> pa.Field | None:
    """The field of a column by its declared type, or `None` where that says nothing: look at the values."""
    base, _, arguments = declared.upper().partition("(")
    base = base.strip()
    numbers = [int(number) for number in re.findall(r"\d+", arguments)]
    if base in _HINTS:
        return hinted(name, _HINTS[base], nullable=nullable)
    if base == "DECIMAL_TEXT":
        return pa.field(name, pa.decimal128(*(numbers[:2] or (38, 18))), nullable=nullable)
    if base in _KINDS:
        return pa.field(name, _KINDS[base], nullable=nullable)
    kind = _by_affinity(base)
    if base in ("DECIMAL", "NUMERIC") and numbers and numbers[0] <= 38:
        kind = pa.decimal128(numbers[0], numbers[1] if len(numbers) > 1 else 0)
    return None if kind is None else pa.field(name, kind, nullable=nullable, metadata=_LOOSE)


def _by_affinity(base: str) -> pa.DataType | None:
    """https://sqlite.org/datatype3.html#determination_of_column_affinity, after the names that mean something."""
    if base in _FOREIGN:
        return _FOREIGN[base]
    if "INT" in base:
        return pa.int64()
    if "CHAR" in base or "CLOB" in base or "TEXT" in base:
        return pa.string()
    if "BLOB" in base:
        return pa.binary()
    if "REAL" in base or "FLOA" in base or "DOUB" in base:
        return pa.float64()
    return None


def needs_look(declared: str) -> bool:
    """Whether values of this declared type may be of several kinds, so that some must be looked at."""
    base = declared.upper().partition("(")[0].strip()
    if base in _KINDS or base in _HINTS or base == "DECIMAL_TEXT":
        return False
    return base in _FOREIGN or _by_affinity(base) is None


def seen_field(name: str, declared: str, kinds: Collection[str], parsed: pa.DataType | None = None) -> pa.Field | None:
    """The field of a column in which values of these storage classes were seen; `None` where no type holds them.
    `parsed`: the type where there are none."""
    classes = set(kinds) - {"null"}
    expected = declared_field(name, declared)
    if expected is not None and classes <= _STORED.get(expected.type, {"text", "integer", "real"}):
        return expected
    if classes and classes <= {"integer"}:
        kind = pa.int64()
    elif classes and classes <= {"integer", "real"}:
        kind = pa.float64()
    elif "blob" in classes:
        if classes != {"blob"}:
            return None
        kind = pa.binary()
    elif not classes and "JSON" in declared.upper():
        return hinted(name, "json")
    elif not classes and parsed is not None:
        kind = parsed
    else:
        return pa.field(name, pa.string(), metadata=_LOOSE if classes else _UNSEEN)
    return pa.field(name, kind, metadata=_LOOSE)


_STORED = {
    pa.bool_(): {"integer"},
    pa.date32(): {"text"},
    LOCAL_TIME: {"text"},
}
