"""Values of Avro as Arrow arrays: what one schema wrote, as another one says.

`reading` compiles both schemas into functions, each of which reads one value of many messages.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.systems.codecs.avro_schema import (
    DURATION,
    AvroField,
    AvroType,
    arrow_type,
    is_choice,
    longest_fixed,
)
from weft.systems.codecs.cursor import Cursor, Ints, in_order, list_offsets
from weft.systems.codecs.registered import SchemaProblem

Read = Callable[[Cursor, Ints], pa.Array]
"""Reads one value of each of these messages."""

_PROMOTED = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
_PER_SECOND = {"millis": 10**3, "micros": 10**6, "nanos": 10**9}
_HEX = np.frombuffer(b"".join(b"%02x" % each for each in range(256)), np.uint8).reshape(256, 2)
# Where the 32 digits of a UUID are in its text.
_UUID_DIGITS = [place for place in range(36) if place not in (8, 13, 18, 23)]
_MOST_MILLIS = (1 << 63) // 1000 - 1
_MOST_OF_NOTHING = 1 << 16


def reading(writer: AvroType, reader: AvroType) -> Read:
    """Return what reads the values of `writer` into an array of the type of `reader`. Raise `SchemaProblem`, where no
    value of the one is one of the other."""
    if writer.kind == "union":
        return _of_branches(writer, reader)
    if reader.kind == "union":
        return _into_union(writer, reader)
    problem = SchemaProblem(f"{_said(writer)} cannot be read as {_said(reader)}")
    if writer.logical and reader.logical and _meaning(writer) != _meaning(reader):
        raise problem
    if writer.kind == reader.kind == "record":
        return _record(writer, reader)
    if writer.kind == reader.kind and writer.kind in ("array", "map"):
        of_items = reading(writer.inner[0], reader.inner[0])
        return _items(writer.kind, of_items, arrow_type(reader), is_nothing=_is_nothing(writer.inner[0]))
    if writer.kind == reader.kind == "enum":
        return _enum(writer, reader)
    if writer.kind == reader.kind == "fixed":
        if writer.size != reader.size:
            raise problem
        return _fixed(reader)
    if writer.kind != reader.kind and reader.kind not in _PROMOTED.get(writer.kind, ()):
        raise problem
    return _primitive(writer, reader)


def _said(schema: AvroType) -> str:
    if schema.logical == "decimal":
        return f"decimal({schema.digits[0]},{schema.digits[1]})"
    return f"{schema.logical or schema.kind} {schema.name}".strip()


def _meaning(schema: AvroType) -> object:
    """Return what both logical types must have in common. Units of time may differ: values are converted."""
    return schema.digits[1] if schema.logical == "decimal" else re.sub("-[a-z]+$", "", schema.logical)


# ----------------------------------------------------------------------------------------------------------- primitives


def _primitive(writer: AvroType, reader: AvroType) -> Read:
    kind, target = writer.kind, arrow_type(reader)
    if kind == "null":
        return lambda cursor, rows: pa.nulls(len(rows))
    if kind == "boolean":
        return _boolean
    if kind in ("float", "double"):
        dtype = "<f4" if kind == "float" else "<f8"
        return lambda cursor, rows: pa.array(cursor.fixed(rows, dtype)).cast(target)
    if kind in ("bytes", "string"):
        return _sized(reader)
    return _integer(writer, reader, target)


def _boolean(cursor: Cursor, rows: Ints) -> pa.Array:
    read = cursor.fixed(rows, "u1")
    cursor.fail(rows[read > 1], "It has a boolean that is neither 0 nor 1.")
    return pa.array(read == 1)


def _integer(writer: AvroType, reader: AvroType, target: pa.DataType) -> Read:
    # In the unit of who wrote it.
    logical = reader.logical and (writer.logical or reader.logical)

    def read(cursor: Cursor, rows: Ints) -> pa.Array:
        values = cursor.integers(rows)
        if writer.kind == "int":
            wrong = (values < -(1 << 31)) | (values >= 1 << 31)
            if wrong.any():
                cursor.fail(rows[wrong], "It has an int of more than 32 bits.")
                values[wrong] = 0
        if not logical:
            return pa.array(values).cast(target, safe=not pa.types.is_floating(target))
        if logical == "date":
            return pa.array(values.astype(np.int32)).cast(target)
        per_second = _PER_SECOND[logical.rpartition("-")[2]]
        if logical.startswith("time-"):
            wrong = (values < 0) | (values >= 86400 * per_second)
            if wrong.any():
                cursor.fail(rows[wrong], "It has a time of day that is none.")
                values[wrong] = 0
            return pa.array(values * (10**6 // per_second)).cast(pa.time64("us")).cast(pa.string())
        if per_second > 10**6:
            values = values // 1000
        elif per_second < 10**6:
            wrong = (values > _MOST_MILLIS) | (values < -_MOST_MILLIS)
            if wrong.any():
                cursor.fail(rows[wrong], "It has a time beyond what a column holds.")
                values[wrong] = 0
            values = values * 1000
        return pa.array(values).cast(target)

    return read


def _sized(reader: AvroType) -> Read:
    if reader.logical == "decimal":
        return lambda cursor, rows: _decimals(cursor, rows, cursor.integers(rows), reader.digits)
    if reader.kind == "string":
        return lambda cursor, rows: cursor.texts(rows, cursor.integers(rows))
    return lambda cursor, rows: cursor.bytes_of(rows, cursor.integers(rows))


def _decimals(cursor: Cursor, rows: Ints, sizes: Ints, digits: tuple[int, int]) -> pa.Array:
    """Read integers of any number of bytes, the largest first, as decimals."""
    begin = cursor.position[rows].copy()
    cursor.bytes_of(rows, sizes)
    sizes = np.where(cursor.position[rows] == begin + sizes, sizes, 0)
    end = begin + sizes
    negative = (sizes > 0) & (cursor.buffer[begin] >= 0x80)
    # Beyond sixteen bytes there is room for the sign alone.
    long = np.zeros(len(rows), bool)
    for place in range(16, int(sizes.max(initial=0))):
        there = sizes > place
        long[there] |= cursor.buffer[end[there] - 1 - place] != np.where(negative[there], 255, 0)
    sizes = np.minimum(sizes, 16)
    read = np.repeat(np.where(negative, 255, 0).astype(np.uint8)[:, None], 16, axis=1)
    for place in range(int(sizes.max(initial=0))):
        there = sizes > place
        read[there, place] = cursor.buffer[end[there] - 1 - place]
    kind = pa.decimal128(*digits)
    array = pa.Array.from_buffers(pa.decimal128(38, digits[1]), len(rows), [None, pa.py_buffer(read.copy())])
    most = 10 ** digits[0] - 1
    whole = pa.Array.from_buffers(pa.decimal128(38, 0), len(rows), [None, pa.py_buffer(read)])
    above, below = (pa.scalar(limit, pa.decimal128(38, 0)) for limit in (most, -most))
    # Without abs: that of the least number is negative.
    large = np.asarray(pc.or_(pc.greater(whole, above), pc.less(whole, below))) | long
    if large.any():
        cursor.fail(rows[large], f"It has a decimal of more than {digits[0]} digits.")
        array = pc.if_else(pa.array(large), pa.scalar(0, array.type), array)
    return array.cast(kind)


def _fixed(reader: AvroType) -> Read:
    def read(cursor: Cursor, rows: Ints) -> pa.Array:
        sizes = np.full(len(rows), reader.size)
        if reader.logical == "decimal":
            return _decimals(cursor, rows, sizes, reader.digits)
        if reader.logical == "uuid":
            return _uuids(cursor, rows)
        if reader.logical == "duration":
            parts = [pa.array(cursor.fixed(rows, "<u4").astype(np.int64)) for _ in DURATION]
            return pa.StructArray.from_arrays(parts, fields=list(DURATION))
        return cursor.bytes_of(rows, sizes)

    return read


def _uuids(cursor: Cursor, rows: Ints) -> pa.Array:
    read = cursor.fixed(rows, "V16").view(np.uint8).reshape(-1, 16)
    texts = np.full((len(rows), 36), ord("-"), np.uint8)
    texts[:, _UUID_DIGITS] = _HEX[read].reshape(-1, 32)
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * 36
    return pa.Array.from_buffers(pa.string(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(texts)])


def _enum(writer: AvroType, reader: AvroType) -> Read:
    known = [each if each in reader.symbols else reader.default for each in writer.symbols]
    symbols = pa.array(["" if each is None else each for each in known], pa.string())
    unknown = [number for number, each in enumerate(known) if each is None]

    def read(cursor: Cursor, rows: Ints) -> pa.Array:
        numbers = cursor.integers(rows)
        wrong = (numbers < 0) | (numbers >= len(known))
        if wrong.any():
            cursor.fail(rows[wrong], f"It has a value that {writer.name} does not have.")
            numbers[wrong] = 0
        if unknown and (missing := np.isin(numbers, unknown)).any():
            cursor.fail(rows[missing], f"It has a value that {reader.name} does not have any more.")
        return symbols.take(pa.array(numbers))

    return read


# --------------------------------------------------------------------------------------------------------------- nested


def _record(writer: AvroType, reader: AvroType) -> Read:
    wanted = {each.name: number for number, each in enumerate(reader.fields)}
    steps: list[tuple[int | None, Read]] = []
    filled: set[int] = set()
    for each in writer.fields:
        place = _place(each, wanted, reader)
        if place is None or place in filled:
            steps.append((None, reading(each.type, each.type)))
        else:
            filled.add(place)
            try:
                steps.append((place, reading(each.type, reader.fields[place].type)))
            except SchemaProblem as problem:
                raise SchemaProblem(f"{each.name}: {problem}") from None
    defaults = {number: _default(each, reader) for number, each in enumerate(reader.fields) if number not in filled}
    kind = arrow_type(reader)

    def read(cursor: Cursor, rows: Ints) -> pa.Array:
        columns: list[Any] = [None] * len(reader.fields)
        for place, step in steps:
            array = step(cursor, rows)
            if place is not None:
                columns[place] = array
        for place, default in defaults.items():
            columns[place] = default.take(pa.array(np.zeros(len(rows), np.int64)))
        if not columns:  # an array of no columns knows no length
            return pa.array([{}] * len(rows), kind)
        return pa.StructArray.from_arrays(columns, fields=list(kind))

    return read


def _place(each: AvroField, wanted: dict[str, int], reader: AvroType) -> int | None:
    if each.name in wanted:
        return wanted[each.name]
    return next((number for number, other in enumerate(reader.fields) if each.name in other.aliases), None)


def _default(each: AvroField, reader: AvroType) -> pa.Array:
    """Return the default of a field that its writer did not know, as an array of one."""
    if not each.has_default:
        raise SchemaProblem(f"{each.name} of {reader.short_name} is not in it, and has no default")
    kind = each.type
    branches = kind.inner if kind.kind == "union" else [kind]
    for number, branch in enumerate(branches):
        try:
            encoded = _encoded(each.default, branch)
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
        if kind.kind == "union":
            encoded = _varint(number) + encoded
        cursor = Cursor(pa.array([encoded], pa.binary()), longest_fixed=longest_fixed(kind))
        return reading(kind, kind)(cursor, cursor.rows)
    raise SchemaProblem(f"the default of {each.name} of {reader.short_name} is not of its type")


def _encoded(value: Any, kind: AvroType) -> bytes:
    """Return a default, which is JSON, as Avro."""
    what = kind.kind
    if what == "null" and value is None:
        return b""
    if what == "boolean" and isinstance(value, bool):
        return bytes([value])
    if what in ("int", "long") and isinstance(value, int) and not isinstance(value, bool):
        return _varint(value)
    if what in ("float", "double") and not isinstance(value, bool):
        return struct.pack("<f" if what == "float" else "<d", float(value))
    if what in ("string", "bytes"):
        data: bytes = value.encode("utf-8" if what == "string" else "latin-1")
        return _varint(len(data)) + data
    if what == "fixed":
        return bytes(value.encode("latin-1"))
    if what == "enum":
        return _varint(kind.symbols.index(value))
    if what == "record":
        parts = (_encoded_field(each, value) for each in kind.fields)
        return b"".join(parts)
    if what in ("array", "map"):
        pairs = value.items() if what == "map" else ((None, each) for each in value)
        text = AvroType("string")
        parts = ((b"" if key is None else _encoded(key, text)) + _encoded(each, kind.inner[0]) for key, each in pairs)
        return (_varint(len(value)) + b"".join(parts) if value else b"") + b"\0"
    if what == "union":
        return _varint(0) + _encoded(value, kind.inner[0])
    raise TypeError(json.dumps(value))


def _encoded_field(each: AvroField, value: dict[str, Any]) -> bytes:
    return _encoded(value.get(each.name, each.default), each.type)


def _varint(value: int) -> bytes:
    left = (value << 1) ^ (value >> 63)
    parts = bytearray()
    while left > 0x7F:
        parts.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*parts, left])


def _items(kind: str, of_items: Read, target: pa.DataType, *, is_nothing: bool) -> Read:
    """Read arrays, and maps, which are arrays of a text and a value. All messages read their next item at once."""

    def read(cursor: Cursor, rows: Ints) -> pa.Array:
        owners: list[Ints] = []
        keys: list[pa.Array] = []
        items: list[pa.Array] = []
        left = np.zeros(len(rows), np.int64)
        total = np.zeros(len(rows), np.int64)
        waiting = np.arange(len(rows))
        while len(waiting):
            empty = waiting[left[waiting] == 0]
            if len(empty):
                left[empty] = _block(cursor, rows[empty])
                total[empty] += left[empty]
                if is_nothing and (many := total > _MOST_OF_NOTHING).any():
                    cursor.fail(rows[many], "It has a list of too many values without a byte.")
                    left[many] = 0
                waiting = waiting[left[waiting] > 0]
                continue
            here = rows[waiting]
            if kind == "map":
                keys.append(cursor.texts(here, cursor.integers(here)))
            items.append(of_items(cursor, here))
            owners.append(waiting)
            left[waiting] -= 1
            if cursor.bad:
                left[waiting[cursor.are_bad(here)]] = 0
        inner = target.item_type if kind == "map" else target.value_type
        values, counts = in_order(items, owners, inner)
        offsets = pa.array(list_offsets(counts, len(rows)))
        if kind == "map":
            return pa.MapArray.from_arrays(offsets, in_order(keys, owners, pa.string())[0], values).cast(target)
        return pa.ListArray.from_arrays(offsets, values, target)

    return read


def _block(cursor: Cursor, rows: Ints) -> Ints:
    """Read how many items come next. A negative count comes with the number of their bytes."""
    counts = cursor.integers(rows)
    negative = counts < 0
    if negative.any():
        cursor.integers(rows[negative])
        counts = np.abs(counts)
    # No more than there are bytes, or a few without a byte.
    most = np.maximum(cursor.end[rows] - cursor.position[rows], _MOST_OF_NOTHING)
    wrong = (counts > most) | (counts < 0)
    if wrong.any():
        cursor.fail(rows[wrong], "It is truncated: it has fewer items than it says.")
        counts[wrong] = 0
    return counts


def _is_nothing(schema: AvroType) -> bool:
    """Return whether a value has no bytes."""
    return schema.kind == "null" or (schema.kind == "record" and all(_is_nothing(each.type) for each in schema.fields))


# --------------------------------------------------------------------------------------------------------------- unions


def _into_union(writer: AvroType, reader: AvroType) -> Read:
    """Read what is no union as one: as its branch of that name, else as the first one that takes it."""
    kind = arrow_type(reader)
    if writer.kind == "null":
        if all(each.kind != "null" for each in reader.inner):
            raise SchemaProblem("null cannot be read as a union without it")
        return lambda cursor, rows: pa.nulls(len(rows), kind)
    present = reader.present()
    same = [each for each in present if each.kind == writer.kind and each.short_name == writer.short_name]
    for branch in (*same, *present):
        try:
            inner = reading(writer, branch)
        except SchemaProblem:
            continue
        if is_choice(reader):
            return _as_choice(inner, present.index(branch), kind)
        return lambda cursor, rows: inner(cursor, rows).cast(kind)
    raise SchemaProblem(f"{_said(writer)} is no branch of {' or '.join(map(_said, reader.inner))}")


def _as_choice(inner: Read, branch: int, kind: pa.StructType) -> Read:
    def read(cursor: Cursor, rows: Ints) -> pa.Array:
        array = inner(cursor, rows)
        columns = [array if number == branch else pa.nulls(len(rows), each.type) for number, each in enumerate(kind)]
        return pa.StructArray.from_arrays(columns, fields=list(kind))

    return read


def _of_branches(writer: AvroType, reader: AvroType) -> Read:
    kind = arrow_type(reader)
    branches: list[Read] = []
    problems: list[str] = []
    for each in writer.inner:
        try:
            branches.append(reading(each, reader))
        except SchemaProblem as problem:
            problems.append(str(problem))
            branches.append(_refused(str(problem), kind))
    if problems and len(problems) == len(branches):
        raise SchemaProblem(problems[0])

    def read(cursor: Cursor, rows: Ints) -> pa.Array:
        chosen = cursor.integers(rows)
        wrong = (chosen < 0) | (chosen >= len(branches))
        if wrong.any():
            cursor.fail(rows[wrong], "It has a branch that its union does not have.")
            chosen[wrong] = 0
        first = int(chosen[0]) if len(chosen) else 0
        if not len(chosen) or (chosen == first).all():
            return branches[first](cursor, rows)
        pieces, places = [], []
        for number in np.unique(chosen).tolist():
            here = np.flatnonzero(chosen == number)
            pieces.append(branches[number](cursor, rows[here]))
            places.append(here)
        return in_order(pieces, places, kind)[0]

    return read


def _refused(why: str, kind: pa.DataType) -> Read:
    def read(cursor: Cursor, rows: Ints) -> pa.Array:
        cursor.fail(rows, f"It cannot be read: {why}.")
        return pa.nulls(len(rows), kind)

    return read
