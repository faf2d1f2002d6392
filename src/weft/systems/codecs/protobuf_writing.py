"""Rows as Protobuf. Every field is optional, so that null is another value than zero."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.errors import DeclarationError, StorageError
from weft.systems.codecs import building
from weft.systems.codecs.proto_schema import MOST_NUMBER, TIMESTAMP, ProtoMessage
from weft.systems.codecs.protobuf_reading import SIZED, wire_type

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCALARS: list[tuple[Any, str]] = [
    (pa.types.is_boolean, "bool"),
    (lambda kind: pa.types.is_integer(kind) and kind.bit_width < 64, "int32"),
    (pa.types.is_integer, "int64"),
    (pa.types.is_float32, "float"),
    (pa.types.is_floating, "double"),
    (pa.types.is_binary, "bytes"),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None, TIMESTAMP),
]
# Numbers of fields that Protobuf keeps for itself.
_RESERVED = (19000, 19999)


def schema_of(columns: pa.Schema, name: str, before: ProtoMessage | None) -> str:
    """Return the schema of rows with these columns. Fields that were there before keep their numbers; the others get
    higher ones. The numbers of fields that are gone are reserved: old messages have them."""
    space, _, short = (before.name if before is not None else name).rpartition(".")
    lines = _message(list(columns), short, before)
    header = ['syntax = "proto3";', *([f"package {space};"] if space else [])]
    if any(f" {TIMESTAMP} " in line for line in lines):
        header.append('import "google/protobuf/timestamp.proto";')
    return "\n".join([*header, *lines, ""])


def _message(fields: list[pa.Field], name: str, before: ProtoMessage | None) -> list[str]:
    numbers = {} if before is None else {each.name: each.number for each in before.fields}
    inner = {} if before is None else {each.name.rpartition(".")[2]: each for each in before.inner}
    names = {each.name for each in fields}
    reserved = [] if before is None else [*before.reserved]
    reserved += sorted((number, number) for each, number in numbers.items() if each not in names)
    reserved_names = [] if before is None else [each for each in before.reserved_names if each not in names]
    nested: list[str] = []
    lines = []
    for words in (map(_range, reserved), (f'"{each}"' for each in reserved_names)):
        if text := ", ".join(words):
            lines.append(f"reserved {text};")
    free = _free_numbers(numbers.values(), reserved)
    for each in fields:
        if not _NAME.fullmatch(each.name):
            raise DeclarationError(
                f"The column {each.name!r} cannot be a field of Protobuf.",
                hint="Letters of English, digits and underscores.",
            )
        if each.name not in numbers:
            numbers[each.name] = next(free)
        of_struct = f"{each.name[0].upper()}{each.name[1:]}_"
        label, kind, struct = _kind(each.name, each.type, of_struct)
        if struct is not None:
            nested += _message(list(struct), of_struct, inner.get(of_struct))
        lines.append(f"{label}{kind} {each.name} = {numbers[each.name]};")
    return [f"message {name} {{", *(f"  {line}" for line in (*nested, *lines)), "}"]


def _range(numbers: tuple[int, int]) -> str:
    first, last = numbers
    return str(first) if first == last else f"{first} to {'max' if last == MOST_NUMBER else last}"


def _free_numbers(assigned: Iterable[int], reserved: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield numbers behind those of all fields, then the others that are free."""
    used = {*assigned}
    ranges = sorted([_RESERVED, *reserved])
    after = max(used, default=0) + 1
    for number, last in ((after, MOST_NUMBER), (1, after - 1)):
        while number <= last:
            within = next((end for first, end in ranges if first <= number <= end), None)
            if within is not None:
                number = within + 1
                continue
            if number not in used:
                yield number
            number += 1
    raise DeclarationError("A message of Protobuf has no number left for another field.")


def _kind(name: str, kind: pa.DataType, of_struct: str) -> tuple[str, str, pa.StructType | None]:
    """Return the label, the type, and the columns of a message that the type is of."""
    types = pa.types
    inside = kind.value_type if types.is_list(kind) else kind.item_type if types.is_map(kind) else None
    if inside is not None:
        if types.is_list(inside) or types.is_map(inside):
            raise DeclarationError(
                f"The column {name!r} is a list or map of lists or maps, which Protobuf does not have."
            )
        _, word, struct = _kind(name, inside, of_struct)
        return ("repeated ", word, struct) if types.is_list(kind) else ("", f"map<string, {word}>", struct)
    if types.is_struct(kind):
        return "optional ", of_struct, kind
    return "optional ", next((scalar for matches, scalar in _SCALARS if matches(kind)), "string"), None


def encoded(rows: pa.Array, message: ProtoMessage) -> pa.Array:
    """Return rows, none of which is null, as messages without a size."""
    fields = {each.name: each for each in message.fields}
    parts = [
        _field(each, fields[name.name].number, fields[name.name].type, name.name)
        for name, each in zip(rows.type, rows.flatten(), strict=True)
    ]
    return building.joined(parts, len(rows))


def _field(array: pa.Array, number: int, of: Any, name: str) -> pa.Array:
    """Return a field with its tag; nothing where there is no value."""
    types = pa.types
    if types.is_null(array.type):
        return building.joined([pa.scalar(b"", pa.binary())], len(array))
    present = array.drop_null()
    if types.is_map(array.type):
        present = building.pairs(present)
        items = _entries(present.flatten(), of, name)
    elif types.is_list(array.type):
        items = _values(_without_nulls(present.flatten(), name), of)
    else:
        encoded = building.joined([_tag(number, wire_type(of)), _values(present, of)], len(present))
        return building.in_place(encoded, array.is_valid(), b"")
    # Lists of numbers are one field, packed; of others each item is a field.
    counts = building.counts_of(present)
    if wire_type(of) != SIZED:
        packed = building.lists(counts, items)
        encoded = building.joined([_tag(number, SIZED), _sized(packed)], len(packed))
        encoded = pc.if_else(pa.array(counts > 0), encoded, pa.scalar(b"", pa.binary()))
    else:
        encoded = building.lists(counts, building.joined([_tag(number, SIZED), items], len(items)))
    return building.in_place(encoded, array.is_valid(), b"")


def _entries(pairs: pa.Array, entry: ProtoMessage, name: str) -> pa.Array:
    keys, values = pairs.flatten()
    _, of_values = entry.fields
    values = _without_nulls(values, name)
    key = building.joined([_tag(1, SIZED), _sized(keys.cast(pa.string()).cast(pa.binary()))], len(keys))
    return _sized(building.joined([key, _field(values, 2, of_values.type, "value")], len(keys)))


def _without_nulls(array: pa.Array, name: str) -> pa.Array:
    if array.null_count:
        raise StorageError(
            f"A list or map in the column {name!r} has a null, which Protobuf does not have.",
            hint="Remove it in transform_sql: filter(list, x -> x IS NOT NULL).",
        )
    return array


def _values(array: pa.Array, of: Any) -> pa.Array:
    """Return values, none of which is null, without their tags."""
    types, kind = pa.types, array.type
    if isinstance(of, ProtoMessage) and of.name == TIMESTAMP:
        return _sized(_timestamps(array))
    if isinstance(of, ProtoMessage):
        return _sized(encoded(array, of))
    if types.is_boolean(kind):
        return building.fixed(np.asarray(array).astype(np.uint8))
    if types.is_floating(kind):
        return building.fixed(np.asarray(array))
    if types.is_integer(kind):
        return building.varints(np.asarray(array).astype(np.int64).view(np.uint64))
    return _sized((array if types.is_binary(kind) else array.cast(pa.string())).cast(pa.binary()))


def _timestamps(array: pa.Array) -> pa.Array:
    micros = np.asarray(array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64()))
    seconds, rest = np.floor_divide(micros, 10**6), np.mod(micros, 10**6) * 1000
    parts = []
    for number, values in ((1, seconds), (2, rest)):
        parts += [_tag(number, 0), building.varints(values.view(np.uint64))]
    return building.joined(parts, len(array))


def _tag(number: int, wire: int) -> pa.Scalar:
    return building.varints(np.array([number << 3 | wire], np.uint64))[0]


def _sized(data: pa.Array) -> pa.Array:
    return building.joined([building.varints(building.sizes(data).view(np.uint64)), data], len(data))
