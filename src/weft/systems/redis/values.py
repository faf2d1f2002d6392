"""Values as the texts of entries, and back.

What Weft wrote reads back the same. What others wrote is read as the declared types say, and what does not fit goes to
`_weft_extra` as the text it is. Bytes that are not UTF-8 in a field of texts go there as `{"base64": …}`: an escaped
text would be taken for the field's value.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec

from weft.systems.log import EXTRA, PUBLISH_ID, PUBLISHED_AT, RESERVED_PREFIX, ROWID, LogPage
from weft.systems.pages import name_columns
from weft.systems.redis import ids
from weft.types import FieldType, check_value

Entry = tuple[bytes, list[bytes]]
"""An id, and names and values in turn."""

_OWN = {PUBLISH_ID, EXTRA}
_JSON = FieldType("json")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# From the canonical value to text. Texts, JSON and bytes are themselves.
_TO_TEXT: dict[str, Callable[[Any], str]] = {
    "bool": lambda value: "true" if value else "false",
    "int32": str,
    "int64": str,
    "float32": repr,
    "float64": repr,
    "decimal": lambda value: format(value, "f"),
    "date": date.isoformat,
    "timestamp": datetime.isoformat,
    "uuid": str,
}


NUMBERS = ("int32", "int64", "float32", "float64")
_numbers = msgspec.json.Encoder().encode


def join_numbers(values: list[Any]) -> bytes:
    """Texts of numbers without nulls, each with a zero byte behind it. In one piece it takes a tenth of the time."""
    return _numbers(values)[1:-1].replace(b",", b"\0") + b"\0"


def to_texts(values: list[Any], kind: FieldType) -> list[Any]:
    """Return a column of canonical values as what entries hold; a null has no field there."""
    write = _TO_TEXT.get(kind.base)
    return values if write is None else [None if v is None else write(v) for v in values]


def _document(raw: bytes) -> Any:
    """Return JSON that Weft wrote, or somebody in its name: an escape may be half of a character, which no answer can
    hold."""
    value = json.loads(raw)
    if b"\\u" in raw:
        check_value(value, _JSON)
    return value


# From a text that Weft wrote.
_FROM_TEXT: dict[str, Callable[[bytes], Any]] = {
    "string": bytes.decode,
    "bool": {b"true": True, b"false": False}.__getitem__,
    "int32": int,
    "int64": int,
    "float32": float,
    "float64": float,
    "decimal": lambda raw: Decimal(raw.decode()),
    "date": lambda raw: date.fromisoformat(raw.decode()),
    "timestamp": lru_cache(maxsize=4096)(lambda raw: datetime.fromisoformat(raw.decode())),
    "json": _document,
    "bytes": lambda raw: raw,
    "uuid": lambda raw: UUID(raw.decode()),
}

# The errors for a text of another type, or one that is nested too deeply.
_NOT_OURS = (ValueError, KeyError, ArithmeticError, RecursionError)
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_TRUE, _FALSE = ("true", "1", "yes", "t"), ("false", "0", "no", "f")


def read_foreign(raw: bytes, kind: FieldType) -> Any:
    """Return a text of any writer as a value of a type; raise `ValueError` if it cannot be parsed."""
    if kind.base == "bytes":
        return raw
    text = raw.decode()
    value: Any = text
    if kind.base == "bool":
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError("it is not a bool")
        value = text.lower() in _TRUE
    elif kind.base in ("int32", "int64") and _INTEGER.fullmatch(text):
        value = int(text)
    elif kind.base in ("float32", "float64") and _FLOAT.fullmatch(text):
        value = float(text)
    elif kind.base == "json":
        value = json.loads(text)
        check_value(value, kind)
        return value
    return check_value(value, kind)


def page_of(entries: Sequence[Entry], fields: dict[str, FieldType], stream: str, *, is_trusted: bool = True) -> LogPage:
    """Entries as columns: the fields, then what Weft adds. An entry that looks like one of Weft is taken as it is if
    `is_trusted`; else its values are checked too, as somebody may have copied and changed it."""
    offsets = [ids.to_offset(entry[0], stream) for entry in entries]
    published: dict[int, datetime] = {}
    for ms in {ids.milliseconds_of(offset) for offset in offsets}:
        published[ms] = _EPOCH + timedelta(milliseconds=ms)
    columns: dict[str, list[Any]] = {name: [None] * len(entries) for name in (*fields, PUBLISH_ID, EXTRA)}
    shapes: dict[tuple[bytes, ...], list[int]] = {}
    for row, entry in enumerate(entries):
        shapes.setdefault(tuple(entry[1][::2]), []).append(row)
    for names, rows in shapes.items():
        values = list(zip(*(entries[row][1][1::2] for row in rows), strict=True))
        is_own = PUBLISH_ID.encode() in names
        for name, column in zip(name_columns(names, ()), values, strict=True):
            _place(name, column, rows, is_own, fields, columns, is_trusted)
    return LogPage(
        (*fields, ROWID, PUBLISHED_AT, PUBLISH_ID, EXTRA),
        [
            *(columns[name] for name in fields),
            offsets,
            [published[ids.milliseconds_of(offset)] for offset in offsets],
            columns[PUBLISH_ID],
            columns[EXTRA],
        ],
    )


def _place(
    name: str,
    values: tuple[bytes, ...],
    rows: list[int],
    is_own: bool,
    fields: dict[str, FieldType],
    columns: dict[str, list[Any]],
    is_trusted: bool,
) -> None:
    kind = fields.get(name)
    if name in _OWN and is_own:
        for row, raw in zip(rows, values, strict=True):
            try:
                if name == PUBLISH_ID:
                    columns[PUBLISH_ID][row] = raw.decode()
                else:
                    extra = _extra(raw)
                    if not is_trusted:
                        check_value(extra, _JSON)
                    columns[EXTRA][row] = {**extra, **(columns[EXTRA][row] or {})}
            except _NOT_OURS:
                _keep(columns[EXTRA], row, name, raw)
        return
    if is_own and kind is not None:
        try:
            decoded = list(map(_FROM_TEXT[kind.base], values))
            if not is_trusted:
                for value in decoded:
                    check_value(value, kind)
        except _NOT_OURS:
            pass  # another writer's entry after all
        else:
            if len(rows) == len(columns[name]):
                columns[name] = decoded
            else:
                for row, value in zip(rows, decoded, strict=True):
                    columns[name][row] = value
            return
    for row, raw in zip(rows, values, strict=True):
        try:
            if kind is None:
                raise ValueError("no such field")
            columns[name][row] = read_foreign(raw, kind)
        except _NOT_OURS:
            _keep(columns[EXTRA], row, name, raw, kind)


def _extra(raw: bytes) -> dict[str, Any]:
    extra = _document(raw)
    if not isinstance(extra, dict) or any(name.startswith(RESERVED_PREFIX) for name in extra):
        raise ValueError("Weft did not write it")
    return extra


def _keep(extra: list[Any], row: int, name: str, raw: bytes, kind: FieldType | None = None) -> None:
    """Keep a text that fits nowhere; under another name where it would take the place of what Weft adds."""
    name = f"{name}#2" if name.startswith(RESERVED_PREFIX) else name
    try:
        value: Any = raw.decode()
    except UnicodeDecodeError:
        is_text = kind is not None and kind.base == "string"
        value = {"base64": base64.b64encode(raw).decode()} if is_text else raw.decode(errors="backslashreplace")
    extra[row] = {**(extra[row] or {}), name: value}
