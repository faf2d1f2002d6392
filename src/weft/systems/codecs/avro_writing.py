"""Rows as Avro. Every value may be null, so that a column can come and go and schemas stay compatible."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.errors import DeclarationError
from weft.systems.codecs import building

_PLAIN: list[tuple[Any, Any]] = [
    (pa.types.is_boolean, "boolean"),
    (lambda kind: pa.types.is_integer(kind) and kind.bit_width < 64, "int"),
    (pa.types.is_integer, "long"),
    (pa.types.is_float32, "float"),
    (pa.types.is_floating, "double"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_date, {"type": "int", "logicalType": "date"}),
    (pa.types.is_time, {"type": "long", "logicalType": "time-micros"}),
]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def schema_of(columns: pa.Schema, name: str) -> dict[str, Any]:
    """Return the schema of rows with these columns."""
    space, _, short = name.rpartition(".")
    record = _record(list(columns), short)
    return {**record, "namespace": space} if space else record


def _record(fields: list[pa.Field], name: str) -> dict[str, Any]:
    """A schema has each name once: records inside have the names of what they are in before their own."""
    return {
        "type": "record",
        "name": name,
        "fields": [
            {"name": _checked(each.name), "type": ["null", _schema(each.type, f"{name}_{each.name}")], "default": None}
            for each in fields
        ],
    }


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise DeclarationError(
            f"The column {name!r} cannot be a field of Avro.", hint="Letters of English, digits and underscores."
        )
    return name


def _schema(kind: pa.DataType, name: str) -> Any:
    types = pa.types
    if types.is_struct(kind):
        return _record(list(kind), name)
    if types.is_list(kind):
        return {"type": "array", "items": ["null", _schema(kind.value_type, f"{name}_item")]}
    if types.is_map(kind):
        return {"type": "map", "values": ["null", _schema(kind.item_type, f"{name}_value")]}
    if types.is_decimal(kind):
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if types.is_timestamp(kind):
        return {"type": "long", "logicalType": "timestamp-micros" if kind.tz else "local-timestamp-micros"}
    return next((schema for matches, schema in _PLAIN if matches(kind)), "string")


def encoded(array: pa.Array) -> pa.Array:
    """Return values, none of which is null, as their schema says."""
    types, kind = pa.types, array.type
    if types.is_struct(kind):
        return building.joined([_nullable(each) for each in array.flatten()], len(array))
    if types.is_list(kind):
        return _items(array, _nullable(array.flatten()))
    if types.is_map(kind):
        pairs = building.pairs(array)
        keys, values = pairs.flatten().flatten()
        return _items(pairs, building.joined([_sized(keys.cast(pa.string())), _nullable(values)], len(keys)))
    if types.is_boolean(kind):
        return building.fixed(np.asarray(array).astype(np.uint8))
    if types.is_floating(kind):
        return building.fixed(np.asarray(array))
    if types.is_decimal(kind):
        return _sized(_decimals(array))
    if types.is_date(kind):
        return _integers(array.cast(pa.int32()))
    if types.is_timestamp(kind):
        return _integers(array.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()))
    if types.is_time(kind):
        return _integers(array.cast(pa.time64("us")).cast(pa.int64()))
    if types.is_integer(kind):
        return _integers(array)
    return _sized(array if types.is_binary(kind) else array.cast(pa.string()))


def _nullable(array: pa.Array) -> pa.Array:
    """Return values of a union of null and their type."""
    if pa.types.is_null(array.type):
        return building.joined([pa.scalar(b"\0", pa.binary())], len(array))
    present = building.joined([pa.scalar(b"\2", pa.binary()), encoded(array.drop_null())], len(array))
    return building.in_place(present, array.is_valid(), b"\0")


def _integers(array: pa.Array) -> pa.Array:
    return building.varints(building.zigzag(np.asarray(array).astype(np.int64)))


def _sized(array: pa.Array) -> pa.Array:
    data = array.cast(pa.binary())
    lengths = building.varints(building.zigzag(building.sizes(data)))
    return building.joined([lengths, data], len(array))


def _items(array: pa.Array, items: pa.Array) -> pa.Array:
    """Return lists in one block each, and a zero behind; an empty one is the zero alone."""
    counts = building.counts_of(array)
    block = building.varints(building.zigzag(counts))
    zero = pa.scalar(b"\0", pa.binary())
    filled = building.joined([block, building.lists(counts, items), zero], len(array))
    return pc.if_else(pa.array(counts > 0), filled, zero)


def _decimals(array: pa.Array) -> pa.Array:
    data = building.whole_bytes(array.cast(pa.decimal128(array.type.precision, array.type.scale)))
    return building.fixed(data.view("V16").reshape(-1))
