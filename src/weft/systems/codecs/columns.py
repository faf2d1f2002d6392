"""Types of columns that hold values of messages: the one that holds two of them, and arrays of the one as the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import msgspec
import pyarrow as pa

from weft.types import FieldType

WHOLE = pa.decimal128(38, 0)
"""Integers beyond 64 bits."""
_encode = msgspec.json.Encoder(decimal_format="number").encode


def json_of(value: Any) -> str:
    return _encode(value).decode()


def type_name(kind: pa.DataType) -> str:
    """Return what errors call a type: as the fields of streams do."""
    types = pa.types
    if types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    named = ((types.is_timestamp, "timestamp"), (types.is_date, "date"), (types.is_binary, "bytes"))
    nested = ((types.is_list, "an array of this column"), (types.is_struct, "an object of this column"))
    names = {"double": "float64", "float": "float32", "null": "what is known of this column"}
    return next((name for matches, name in (*named, *nested) if matches(kind)), names.get(str(kind), str(kind)))


def message_type(declared: FieldType) -> pa.DataType:
    """Return the type under which messages are parsed for a declared column."""
    return {"json": pa.json_(), "uuid": pa.uuid()}.get(declared.base, declared.arrow)


def unified(kinds: Iterable[pa.DataType]) -> pa.DataType:
    """Return the type that holds all values of these: text, where they have nothing else in common."""
    return reduce(_either, kinds, pa.null())


def _either(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    types = pa.types
    if one.equals(other) or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    numbers = {one, other}
    if numbers == {pa.int64(), WHOLE}:
        return WHOLE
    if numbers <= {pa.int64(), WHOLE, pa.float64()}:
        return pa.float64()
    if types.is_integer(one) and types.is_integer(other):
        return pa.int64()
    if all(types.is_integer(each) or types.is_floating(each) for each in numbers):
        return pa.float64()
    if types.is_map(one) and types.is_map(other):
        return pa.map_(pa.string(), _either(one.item_type, other.item_type))
    if types.is_list(one) and types.is_list(other):
        return pa.list_(_either(one.value_type, other.value_type))
    if types.is_struct(one) and types.is_struct(other):
        names = dict.fromkeys(each.name for kind in (one, other) for each in kind)
        return pa.struct(
            [(name, unified(kind.field(name).type for kind in (one, other) if _has(kind, name))) for name in names]
        )
    return pa.string()


def _has(kind: pa.StructType, name: str) -> bool:
    return bool(kind.get_field_index(name) >= 0)


def unified_schema(schemas: Iterable[pa.Schema], known: Iterable[str]) -> pa.Schema:
    """Return the columns of all these, each once: Spark and most databases take `Id` and `id` for the same. The
    spelling is that of a known column, else the first in the alphabet, so that it is the same whatever comes first."""
    spellings = {name.lower(): name for name in known}
    kinds: dict[str, list[pa.DataType]] = {}
    names: dict[str, str] = {}
    for schema in schemas:
        for each in schema:
            key = each.name.lower()
            kinds.setdefault(key, []).append(each.type)
            names[key] = spellings.get(key) or min(each.name, names.get(key, each.name))
    return pa.schema([(names[key], unified(types)) for key, types in kinds.items()])


def storable(schema: pa.Schema) -> pa.Schema:
    """Return columns without what no table can hold: objects without keys, and inside of others values of no type."""
    return pa.schema([(each.name, _storable(each.type)) for each in schema])


def _storable(kind: pa.DataType, *, inside: bool = False) -> pa.DataType:
    if pa.types.is_null(kind):
        return pa.string() if inside else kind
    if pa.types.is_list(kind):
        return pa.list_(_storable(kind.value_type, inside=True))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _storable(kind.item_type, inside=True))
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            return pa.string()
        return pa.struct([(each.name, _storable(each.type, inside=True)) for each in kind])
    return kind


def converted(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the values as another type, which holds them all."""
    types = pa.types
    if array.type.equals(kind):
        return array
    if types.is_null(array.type):
        return pa.nulls(len(array), kind)
    if types.is_string(kind):
        return pa.array([None if value is None else json_of(value) for value in array.to_pylist()], kind)
    if types.is_list(kind):
        # Convert the whole child array: offsets count from its beginning, also in a slice.
        return pa.ListArray.from_arrays(
            array.offsets, converted(array.values, kind.value_type), kind, mask=_nulls(array)
        )
    if types.is_map(kind):
        if array.offset:  # Arrow makes no maps of a slice with nulls
            array = array.take(pa.array(range(len(array)), pa.int64()))
        items = converted(array.items, kind.item_type)
        return pa.MapArray.from_arrays(array.offsets, array.keys, items, kind, mask=_nulls(array))
    if types.is_struct(kind):
        fields = [
            converted(array.field(each.name), each.type)
            if _has(array.type, each.name)
            else pa.nulls(len(array), each.type)
            for each in kind
        ]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=_nulls(array))
    # A number as a float is the nearest one.
    return array.cast(kind, safe=not types.is_floating(kind))


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def leaves(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the arrays of plain values in one that may be nested."""
    if pa.types.is_struct(array.type):
        for number in range(array.type.num_fields):
            yield from leaves(array.field(number))
    elif pa.types.is_list(array.type):
        yield from leaves(array.values)
    else:
        yield array


def is_deeper(kind: pa.DataType, levels: int) -> bool:
    """Return whether a type has more levels of lists and objects than this. It looks no deeper."""
    if pa.types.is_list(kind):
        return not levels or is_deeper(kind.value_type, levels - 1)
    if pa.types.is_map(kind):
        return not levels or is_deeper(kind.item_type, levels - 1)
    if pa.types.is_struct(kind):
        return not levels or any(is_deeper(each.type, levels - 1) for each in kind)
    return False


def without_times(kind: pa.DataType) -> pa.DataType:
    """Return the type with texts in the place of instants: Arrow takes for one what looks like it."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(without_times(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(each.name, without_times(each.type)) for each in kind])
    return kind
