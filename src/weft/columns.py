"""Columns of tables as Arrow fields: the one form in which rows travel between systems.

A column is of one of the types that Spark has as well: bool, int8 to int64, float32, float64, decimal128, date32,
timestamp in microseconds with UTC or without a zone, string, binary, and lists, structs and maps of them. What has no
Arrow type of its own (UUID, JSON, time of day) travels as a string whose field says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from weft.errors import SchemaError

_HINT = b"weft.type"
_LENGTH = b"weft.length"
_VARIANT = b"weft.variant"
_NO_TEXT = "has a text that is not UTF-8"
UTC_TIME = pa.timestamp("us", "UTC")
LOCAL_TIME = pa.timestamp("us")
_DAYS = (date.min, date.max)
_MOMENTS = (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))


def hinted(name: str, hint: str, *, nullable: bool = True) -> pa.Field:
    """Return a string field whose values are `uuid`, `json` or `time`."""
    return pa.field(name, pa.string(), nullable=nullable, metadata={_HINT: hint.encode()})


def hint_of(field: pa.Field) -> str | None:
    """Return what the strings of a field are: `uuid`, `json`, `time`, or `None` for plain text."""
    hint = (field.metadata or {}).get(_HINT)
    return None if hint is None else hint.decode()


def limited(name: str, length: int, *, nullable: bool = True) -> pa.Field:
    """Return a string field of no more than so many characters."""
    return pa.field(name, pa.string(), nullable=nullable, metadata={_LENGTH: str(length).encode()})


def length_of(field: pa.Field) -> int | None:
    """Return the most characters that a string field may have, where that is known."""
    length = (field.metadata or {}).get(_LENGTH)
    return None if length is None else int(length)


def binary_json(field: pa.Field) -> pa.Field:
    """Return a JSON field that PostgreSQL keeps as jsonb."""
    return field.with_metadata({**(field.metadata or {}), _VARIANT: b"jsonb"})


def is_binary_json(field: pa.Field) -> bool:
    """Return whether a field is declared as jsonb."""
    return (field.metadata or {}).get(_VARIANT) == b"jsonb"


def in_calendar(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return which values are of the years 1 to 9999, as all times of Python and of most databases are; `None` where
    the column has no times."""
    is_day = pa.types.is_date(column.type)
    if not is_day and not pa.types.is_timestamp(column.type):
        return None
    first, last = (pa.scalar(each, column.type) for each in (_DAYS if is_day else _MOMENTS))
    return pc.fill_null(pc.and_(pc.greater_equal(column, first), pc.less_equal(column, last)), True)


def python_rows(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as values of Python. Times that it does not have are texts; of texts that are not UTF-8 the bytes are
    shown, as `\\xff`."""
    try:
        return list(rows.to_pylist())
    except (OverflowError, ValueError):
        columns = [python_values(column) for column in rows.columns]
        return [dict(zip(rows.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return values as those of Python. The times of one that holds a time which Python does not have are texts, and so
    are bytes that are no text."""
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        return [_python_value(*both) for both in zip(column, column.cast(_times_as_texts(column.type)), strict=True)]


def _python_value(value: pa.Scalar, text: pa.Scalar) -> Any:
    for each in (value, text):
        with suppress(OverflowError, ValueError):
            return each.as_py()
    return _with_bytes_shown(text)


def _with_bytes_shown(value: pa.Scalar) -> Any:
    if not value.is_valid:
        return None
    if isinstance(value, pa.StringScalar):
        return value.as_buffer().to_pybytes().decode(errors="backslashreplace")
    if isinstance(value, pa.StructScalar):
        return {name: _with_bytes_shown(each) for name, each in value.items()}
    if isinstance(value, pa.MapScalar):
        return [tuple(map(_with_bytes_shown, each.values())) for each in value.values]
    return list(map(_with_bytes_shown, value.values)) if isinstance(value, pa.ListScalar) else value.as_py()


def why_no_text(name: str) -> str:
    """Return the reason for which a row is bad whose column has a text that is not UTF-8."""
    return f"Column {name!r} {_NO_TEXT}."


def shows_bytes(error: str) -> bool:
    """Return whether a row was put aside for this reason, with the bytes shown in the place of a text."""
    return _NO_TEXT in error


def not_utf8(rows: pa.Table | pa.RecordBatch) -> dict[int, str]:
    """Return the numbers of the rows with a text that is not UTF-8, as Spark makes of bytes, each with the column."""
    bad: dict[int, str] = {}
    if is_utf8(rows):
        return bad
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        for number, value in enumerate(() if is_utf8(column) else column):
            try:
                value.as_py()
            except UnicodeDecodeError:
                bad.setdefault(number, name)
            except (OverflowError, ValueError):
                pass  # a time that Python does not have
    return bad


def is_utf8(rows: pa.Table | pa.RecordBatch | pa.ChunkedArray | pa.Array) -> bool:
    """Return whether all texts are UTF-8."""
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def with_bytes_shown(rows: pa.Table) -> pa.Table:
    """Return rows with texts in which bytes that are not UTF-8 are shown, as `python_rows` does."""
    for at, field in enumerate(() if is_utf8(rows) else rows.schema):
        if pa.types.is_string(field.type):
            rows = rows.set_column(at, field, pa.array(python_values(rows.column(at)), field.type))
    return rows


def _times_as_texts(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_timestamp(kind) or types.is_date(kind):
        return pa.string()
    if types.is_list(kind):
        return pa.list_(_times_as_texts(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_times_as_texts(field.type)) for field in kind])
    return pa.map_(_times_as_texts(kind.key_type), _times_as_texts(kind.item_type)) if types.is_map(kind) else kind


def is_nested(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds lists, structs or maps."""
    return bool(pa.types.is_nested(kind))


def has_objects(kind: pa.DataType) -> bool:
    """Return whether values of a type are objects or have objects in them."""
    parts = (kind.field(at).type for at in range(kind.num_fields)) if is_nested(kind) else ()
    return pa.types.is_struct(kind) or any(map(has_objects, parts))


def canonical_field(field: pa.Field) -> pa.Field:
    """Return the field under which this column travels."""
    kind = _canonical(field.type, field.name)
    hint = hint_of(field)
    if hint is None:
        if isinstance(field.type, pa.UuidType):
            hint = "uuid"
        elif isinstance(field.type, pa.JsonType):
            hint = "json"
        elif pa.types.is_time(field.type):
            hint = "time"
    if hint is not None:
        return hinted(field.name, hint, nullable=field.nullable)
    return pa.field(field.name, kind, nullable=field.nullable)


def canonical_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema under which these columns travel."""
    return pa.schema([canonical_field(field) for field in schema])


def canonical_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch in a canonical schema; `SchemaError` where a value would be altered (nanoseconds, say)."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    arrays = []
    for array, field in zip(batch.columns, schema, strict=True):
        try:
            arrays.append(_cast(array, field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(f"Column {field.name!r} does not fit {field.type}: {error}", field=field.name) from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        if isinstance(array.type, pa.UuidType):
            return pa.array([None if value is None else str(value) for value in array.to_pylist()], pa.string())
        array = array.storage
    if array.type.equals(kind):
        return array
    if pa.types.is_dictionary(array.type):
        if pa.types.is_string_view(array.type.value_type):  # of which Arrow decodes none
            array = pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(pa.large_string()))
        array = array.dictionary_decode()
    if pa.types.is_timestamp(array.type) and pa.types.is_timestamp(kind) and array.type.tz != kind.tz:
        # To UTC: the same instant. Arrow stores it in UTC whatever the zone.
        array = array.cast(pa.timestamp(array.type.unit, kind.tz))
    return array.cast(kind)


def _canonical(kind: pa.DataType, name: str) -> pa.DataType:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType) and not kind.extension_name.startswith("pandas."):
        return pa.string() if isinstance(kind, pa.UuidType) else _canonical(kind.storage_type, name)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _canonical(kind.value_type, name)
    if types.is_timestamp(kind):
        return UTC_TIME if kind.tz else LOCAL_TIME
    if types.is_decimal(kind):
        if kind.precision > 38:
            raise SchemaError(f"Column {name!r} is {kind}; a decimal may have 38 digits.", field=name)
        # A negative scale is a whole number to every database.
        return pa.decimal128(kind.precision, kind.scale) if kind.scale >= 0 else pa.decimal128(38, 0)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or _is_list_view(kind):
        return pa.list_(pa.field("element", _canonical(kind.value_type, name)))
    if types.is_struct(kind):
        return pa.struct([pa.field(each.name, _canonical(each.type, name)) for each in kind])
    if types.is_map(kind):
        return pa.map_(_canonical(kind.key_type, name), _canonical(kind.item_type, name))
    if types.is_time(kind):
        return pa.string()
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if kind in _SAME:
        return kind
    if kind in _OTHERS:
        return _OTHERS[kind]
    raise SchemaError(f"Column {name!r} is of type {kind}, which no table can hold.", field=name, hint=to_be_cast(name))


def to_be_cast(name: str) -> str:
    """Return what helps where no table can hold a column's type."""
    return f"Make it a text or a number before; Spark SQL: CAST({name} AS STRING) AS {name}."


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


_SAME = {
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    *(pa.date32(), pa.string(), pa.binary()),
}
_OTHERS = {
    # Unsigned: the next one that holds all of them.
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    # All that is known of such a column is that it is empty.
    pa.null(): pa.string(),
}


# ------------------------------------------------------------------------------------------------------- nested columns


def nested_to_json(array: pa.Array) -> pa.Array:
    """Lists, structs and maps as JSON texts: instants as ISO 8601, bytes in hexadecimal, NaN and infinity as null."""
    # Values go through Python one by one: Arrow has no JSON writer.
    values = python_values(array)
    return pa.array([None if value is None else _encode(_plain(value)) for value in values], pa.string())


def documents_of(values: Sequence[Any], array: pa.Array | None) -> pa.Array:
    """Values of Python as JSON texts, as `nested_to_json` writes their canonical array, but objects with the keys that
    each was given, in their order: those of one Arrow type have the keys of all. `array` is `None` where no type holds
    all of them."""
    if array is None or _has_other_json(array.type):
        values = [_given(value) for value in values]
    lines = _encoder.encode_lines(values).decode().split("\n")[: len(values)]
    is_there = pa.array([value is not None for value in values]) if array is None else array.is_valid()
    return pc.if_else(is_there, pa.array(lines, pa.string()), pa.scalar(None, pa.string()))


def _has_other_json(kind: pa.DataType) -> bool:
    """Whether the encoder would write values of this type otherwise than `nested_to_json` does."""
    if is_nested(kind):
        return any(_has_other_json(kind.field(at).type) for at in range(kind.num_fields))
    types = pa.types
    return bool(types.is_binary(kind) or types.is_timestamp(kind) or types.is_decimal(kind))


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _given(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_given(each) for each in value]
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    is_short = isinstance(value, Decimal) and value == value.to_integral_value()
    return Decimal(f"{value:f}") if is_short else value


_encoder = msgspec.json.Encoder(decimal_format="number", enc_hook=lambda value: pa.scalar(value).as_py())


def _encode(value: object) -> str:
    return _encoder.encode(value).decode()


def _plain(value: Any) -> Any:
    """Return a value as the encoder takes it, which itself writes instants as ISO 8601, NaN and infinity as null."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        # Arrow gives a map as pairs.
        if value and all(isinstance(each, tuple) and len(each) == 2 for each in value):
            return {str(name): _plain(each) for name, each in value}
        return [_plain(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


# The years 1 to 9999, in microseconds since 1970.
_CALENDAR = range(-62_135_596_800_000_000, 253_402_300_800_000_000)
_DAY = 86_400_000_000


def leaves_calendar(array: pa.Array) -> bool:
    """Return whether a date, or a time in UTC, is outside of the years 1 to 9999: texts and Python have no others."""
    kind = array.type
    if not (pa.types.is_date32(kind) or kind in (UTC_TIME, LOCAL_TIME)):
        return False
    numbers, unit = (array.cast(pa.int32()), _DAY) if pa.types.is_date32(kind) else (array.cast(pa.int64()), 1)
    return any(each is not None and each * unit not in _CALENDAR for each in pc.min_max(numbers).as_py().values())


def has_nan(array: pa.Array) -> bool:
    """Return whether a column of floats holds NaN, which some databases would store as null."""
    return bool(pa.types.is_floating(array.type) and pc.any(pc.is_nan(array)).as_py())


def without_voids(rows: pa.Table) -> pa.Table:
    """Return rows without columns of nulls alone: such a column has no type until it has a value."""
    return rows.drop_columns([each.name for each in rows.schema if pa.types.is_null(each.type)])
