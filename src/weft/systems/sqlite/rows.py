"""Columns of Arrow as lists of what SQLite stores, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import (
    LOCAL_TIME,
    UTC_TIME,
    has_nan,
    hint_of,
    is_nested,
    leaves_calendar,
    nested_to_json,
    why_no_text,
)
from weft.errors import SchemaError
from weft.systems.sql import decimals
from weft.systems.sqlite.types import is_loose


def stored(array: pa.Array, field: pa.Field) -> list[Any]:
    """The values of a column as sqlite3 takes them."""
    kind = array.type
    if pa.types.is_floating(kind):
        if has_nan(array):
            raise SchemaError(
                f"Column {field.name!r} has NaN, which SQLite would store as null.",
                field=field.name,
                hint="Write null, or leave such rows out.",
            )
        return _numbers(array.cast(pa.float64()))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return _numbers(array.cast(pa.int64()))
    if leaves_calendar(array):
        raise SchemaError(
            f"Column {field.name!r} has a time outside of the years 1 to 9999, which SQLite would store as no time.",
            field=field.name,
            hint="Write null, or leave such rows out.",
        )
    if is_nested(kind):
        array = nested_to_json(array)
    elif kind in (UTC_TIME, LOCAL_TIME):
        array = _timestamps(array)
    elif hint_of(field) == "uuid":
        # They are compared as texts.
        array = pc.ascii_lower(array)
    elif not pa.types.is_binary(kind):
        array = array.cast(pa.string())
    try:
        values: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
    except pa.ArrowException:  # bytes that Spark took for a text
        raise SchemaError(
            why_no_text(field.name),
            field=field.name,
            hint="In Spark's SQL: CASE WHEN is_valid_utf8(…) THEN … END, or make_valid_utf8(…).",
        ) from None
    return values


def _numbers(array: pa.Array) -> list[Any]:
    """Convert by numpy, which creates Python's numbers ten times as fast as Arrow does."""
    if not array.null_count:
        values: list[Any] = array.to_numpy().tolist()
        return values
    numbers = array.fill_null(0).to_numpy().astype(object)
    numbers[np.asarray(array.is_null())] = None
    values = numbers.tolist()
    return values


def _timestamps(array: pa.Array) -> pa.Array:
    """Texts that sort by time, and that SQLite's date functions read: as streams have them."""
    texts = pc.utf8_replace_slice(array.cast(LOCAL_TIME).cast(pa.string()), 10, 11, "T")
    return pc.binary_join_element_wise(texts, "+00:00", "") if array.type == UTC_TIME else texts


def arrow(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """A column that SQLite gave, in its field's type."""
    try:
        return _arrow(values, field)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError) as error:
        raise SchemaError(
            f"Column {field.name!r} does not fit {hint_of(field) or field.type}: {error}.",
            field=field.name,
            hint=f'SQLite lets a column hold values of any type. Read it as text: CAST("{field.name}" AS TEXT).',
        ) from None


def _arrow(values: Sequence[Any], field: pa.Field) -> pa.Array:
    kind = field.type
    if pa.types.is_boolean(kind):
        numbers = pa.array(values, pa.int64())
        ends = pc.min_max(numbers).as_py()
        if ends["min"] is not None and (ends["min"] < 0 or ends["max"] > 1):
            raise ValueError("a boolean is 0 or 1")
        return numbers.cast(kind)
    if pa.types.is_floating(kind):
        return pa.array(values, pa.float64()).cast(kind)
    if pa.types.is_integer(kind) or pa.types.is_binary(kind):
        return pa.array(values, kind)
    try:
        texts = pa.array(values, pa.string())
    except pa.ArrowTypeError:
        # An affinity may have made numbers of texts, where others declared the column.
        if not is_loose(field):
            raise
        texts = pa.array([None if value is None else _text(value) for value in values], pa.string())
    if pa.types.is_string(kind):
        return texts
    if pa.types.is_timestamp(kind) and kind.tz is None and is_loose(field):
        return _foreign_timestamps(texts)
    return decimals.from_texts(texts, kind) if pa.types.is_decimal(kind) else texts.cast(kind)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _foreign_timestamps(texts: pa.Array) -> pa.Array:
    try:
        return texts.cast(LOCAL_TIME)
    except pa.ArrowInvalid:
        # With a zone: the same instant in UTC.
        return texts.cast(UTC_TIME).cast(LOCAL_TIME)
