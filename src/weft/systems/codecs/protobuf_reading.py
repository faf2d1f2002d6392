"""Values of Protobuf as Arrow arrays. All messages read their next field at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from weft.systems.codecs.cursor import TRUNCATED, Cursor, Ints, in_order, list_offsets, unzigzag, varints_at
from weft.systems.codecs.proto_schema import (
    JSON_TYPES,
    TIMESTAMP,
    UINT64,
    Enum,
    ProtoField,
    ProtoMessage,
    arrow_type,
    field_type,
)

VARINT, EIGHT, SIZED, FOUR = 0, 1, 2, 5
_FIXED = {
    "double": "<f8",
    "fixed64": "<u8",
    "sfixed64": "<i8",
    "float": "<f4",
    "fixed32": "<u4",
    "sfixed32": "<i4",
}
_MOST_SECONDS = 1 << 42


@dataclass
class _Found:
    """The values of one field, in the order in which they were read, and whose they are."""

    values: list[Any] = field(default_factory=list)
    owners: list[Ints] = field(default_factory=list)


def wire_type(of: str | Enum | ProtoMessage) -> int:
    """Return how the values of a type are written."""
    if isinstance(of, ProtoMessage) or of in ("string", "bytes"):
        return SIZED
    return VARINT if isinstance(of, Enum) or of not in _FIXED else EIGHT if _FIXED[of].endswith("8") else FOUR


def read(message: ProtoMessage, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    """Return messages as structs, and by number what is wrong with the malformed ones."""
    return read_at(message, Cursor(values))


def read_at(message: ProtoMessage, cursor: Cursor) -> tuple[pa.Array, dict[int, str]]:
    """Return as structs what is between the positions of messages and their ends."""
    length = len(cursor.end)
    fields = _fields(message, cursor)
    columns = [_column(each, fields[each.number], cursor, length) for each in message.fields]
    kind = [pa.field(each.name, field_type(each)) for each in message.fields]
    if not kind:
        return pa.array([{}] * length, pa.struct([])), cursor.bad
    return pa.StructArray.from_arrays(columns, fields=kind), cursor.bad


def _fields(message: ProtoMessage, cursor: Cursor) -> dict[int, _Found]:
    wanted = {each.number: each for each in message.fields}
    fields = {number: _Found() for number in wanted}
    active = cursor.rows
    while True:
        active = active[(cursor.position[active] < cursor.end[active]) & ~cursor.are_bad(active)]
        if not len(active):
            return fields
        tags = cursor.varints(active)
        for tag in np.unique(tags).tolist():
            rows = active if (tags == tag).all() else active[tags == tag]
            number, wire = tag >> 3, tag & 7
            if number == 0 or wire not in (VARINT, EIGHT, SIZED, FOUR):
                cursor.fail(rows, "It is not Protobuf: it has a field that no schema can have.")
                continue
            values = _raw(cursor, rows, wire)
            if number in wanted:
                _keep(fields[number], wanted[number], wire, values, rows, cursor)


def _raw(cursor: Cursor, rows: Ints, wire: int) -> Any:
    if wire == VARINT:
        return cursor.varints(rows)
    if wire == SIZED:
        sizes = cursor.varints(rows)
        return cursor.bytes_of(rows, np.minimum(sizes, np.uint64(1 << 62)).astype(np.int64))
    return cursor.fixed(rows, "<u8" if wire == EIGHT else "<u4")


def _keep(field: _Found, of: ProtoField, wire: int, values: Any, rows: Ints, cursor: Cursor) -> None:
    expected = wire_type(of.type)
    if wire == SIZED and expected != SIZED and of.repeated:
        values, rows = _unpacked(of, values, rows, cursor)
    elif wire != expected:
        return  # a field of another type: as one that the schema does not have
    if expected != SIZED:
        values = _scalars(of.type, values)
    elif of.type == "string":
        values = cursor.as_texts(rows, values)
    field.values.append(values)
    field.owners.append(rows)


def _unpacked(of: ProtoField, chunks: pa.Array, rows: Ints, cursor: Cursor) -> tuple[Any, Ints]:
    """Return the numbers of packed lists, and whose they are."""
    inner = Cursor(chunks)
    size = int(inner.end[-1]) if len(rows) else 0
    data = inner.buffer[:size]
    wire = wire_type(of.type)
    sizes = inner.end - inner.position
    if wire == VARINT:
        ends = np.flatnonzero(data < 0x80) + 1
        counts = np.searchsorted(ends, inner.end, side="right") - np.searchsorted(ends, inner.position, side="right")
        whole = (sizes == 0) | (inner.buffer[np.maximum(inner.end - 1, 0)] < 0x80)
        if not whole.all():
            cursor.fail(rows[~whole], TRUNCATED)
            kept = np.flatnonzero(whole)
            return _unpacked(of, chunks.take(pa.array(kept)), rows[kept], cursor)
        starts = np.concatenate([np.zeros(min(len(ends), 1), np.int64), ends[:-1]])
        values, _, long = varints_at(inner.buffer, starts)
        owners = np.repeat(rows, counts)
        cursor.fail(owners[long], "It has an integer of more than 64 bits.")
        return values, owners
    width = 8 if wire == EIGHT else 4
    whole = sizes % width == 0
    if not whole.all():
        cursor.fail(rows[~whole], TRUNCATED)
        kept = np.flatnonzero(whole)
        return _unpacked(of, chunks.take(pa.array(kept)), rows[kept], cursor)
    return data.copy().view(f"<u{width}"), np.repeat(rows, sizes // width)


def _scalars(of: str | Enum | ProtoMessage, raw: npt.NDArray[Any]) -> pa.Array:
    """Return numbers as they were read as values of a type."""
    if isinstance(of, Enum):
        numbers = raw.astype(np.uint64).astype(np.uint32).view(np.int32)
        different, places = np.unique(numbers, return_inverse=True)
        # A number that the schema has no name for is kept, as readers of Protobuf do.
        names = [of.values.get(number, str(number)) for number in different.tolist()]
        return pa.array(names, pa.string()).take(pa.array(places))
    if of in _FIXED:
        values = np.ascontiguousarray(raw).view(_FIXED[str(of)])
        return _unsigned(values) if of == "fixed64" else pa.array(values).cast(arrow_type(of))
    if of == "bool":
        return pa.array(raw != 0)
    if of in ("sint32", "sint64"):
        return pa.array(unzigzag(raw)).cast(arrow_type(of), safe=False)
    if of == "uint64":
        return _unsigned(raw)
    if of == "int64":
        return pa.array(raw.view(np.int64))
    short = raw.astype(np.uint32)
    return pa.array(short.astype(np.int64)) if of == "uint32" else pa.array(short.view(np.int32))


def _unsigned(values: npt.NDArray[Any]) -> pa.Array:
    wide = np.zeros((len(values), 2), np.uint64)
    wide[:, 0] = values
    return pa.Array.from_buffers(UINT64, len(values), [None, pa.py_buffer(wide)])


def _column(of: ProtoField, field: _Found, cursor: Cursor, length: int) -> pa.Array:
    raw = pa.binary() if isinstance(of.type, ProtoMessage) else arrow_type(of.type)
    if of.repeated:
        values, counts = in_order(field.values, field.owners, raw)
        if isinstance(of.type, ProtoMessage):
            values = _messages(of.type, values, np.repeat(np.arange(len(counts)), counts), cursor)
        offsets = pa.array(list_offsets(counts, length))
        if of.is_map:
            keys, items = values.flatten()
            return pa.MapArray.from_arrays(offsets, keys, items).cast(field_type(of))
        return pa.ListArray.from_arrays(offsets, values, field_type(of))
    owners = np.concatenate(field.owners) if field.owners else np.zeros(0, np.int64)
    values = pa.concat_arrays(field.values) if field.values else pa.array([], raw)
    # The last value counts. Messages are joined, which is what their bytes one after the other are.
    places = np.full(length, -1)
    places[owners] = np.arange(len(owners))
    if isinstance(of.type, ProtoMessage):
        if len(owners) > np.count_nonzero(places >= 0):
            values, owners = _joined(values, owners)
            places[owners] = np.arange(len(owners))
        values = _messages(of.type, values, owners, cursor)
    missing = places < 0
    if not missing.any():
        return values if np.array_equal(places, np.arange(length)) else values.take(pa.array(places))
    column = values.take(pa.array(places, mask=missing))
    return column if of.presence else column.fill_null(_zero(of))


def _joined(values: pa.Array, owners: Ints) -> tuple[pa.Array, Ints]:
    import pyarrow.compute as pc

    values, counts = in_order(
        [values.slice(number, 1) for number in range(len(values))], list(owners[:, None]), values.type
    )
    lists = pa.ListArray.from_arrays(pa.array(list_offsets(counts, len(counts))), values)
    kept = np.flatnonzero(counts)
    return pc.binary_join(lists, b"").take(pa.array(kept)), kept


def _zero(of: ProtoField) -> pa.Scalar:
    """Return the value of a field that is not there."""
    if isinstance(of.type, Enum):
        return pa.scalar(of.type.values.get(0, "0"))
    kind = arrow_type(of.type)
    return pa.scalar({pa.string(): "", pa.binary(): b"", pa.bool_(): False}.get(kind, 0), kind)


# ------------------------------------------------------------------------------------------------------------ messages


def _messages(of: ProtoMessage, values: pa.Array, owners: Ints, cursor: Cursor) -> pa.Array:
    """Read messages inside of others."""
    if of.name in JSON_TYPES:
        return _json(of, values, owners, cursor)
    read_ones, bad = read(of, values)
    for number, why in bad.items():
        cursor.fail(owners[number : number + 1], why)
    if of.is_wrapper:
        return read_ones.field(0)
    return _instants(read_ones, owners, cursor) if of.name == TIMESTAMP else read_ones


def _instants(read_ones: pa.StructArray, owners: Ints, cursor: Cursor) -> pa.Array:
    seconds, nanos = (np.asarray(each).astype(np.int64) for each in read_ones.flatten())
    wrong = (seconds > _MOST_SECONDS) | (seconds < -_MOST_SECONDS) | (nanos < 0) | (nanos >= 10**9)
    if wrong.any():
        cursor.fail(owners[wrong], "It has a Timestamp that is none.")
        seconds, nanos = np.where(wrong, 0, seconds), np.where(wrong, 0, nanos)
    return pa.array(seconds * 1_000_000 + nanos // 1000).cast(pa.timestamp("us", "UTC"))


def _json(of: ProtoMessage, values: pa.Array, owners: Ints, cursor: Cursor) -> pa.Array:
    """Read the types that stand for any JSON, one by one: they hold themselves, so no column has their type."""
    texts: list[str] = []
    for number, value in enumerate(values.to_pylist()):
        try:
            plain = _JSON_READERS[of.name.rpartition(".")[2]](value)
            texts.append(json.dumps(plain, ensure_ascii=False, allow_nan=False))
        except (ValueError, IndexError, RecursionError, TypeError, AttributeError, OverflowError):
            cursor.fail(owners[number : number + 1], f"It has a {of.name} that is none.")
            texts.append("null")
    return pa.array(texts, pa.string())


def _parts(data: bytes) -> list[tuple[int, Any]]:
    parts: list[tuple[int, Any]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
            if shift > 63:
                raise ValueError("a number of too many bytes")

    while at < len(data):
        tag = varint()
        if tag & 7 == VARINT:
            parts.append((tag >> 3, varint()))
        else:
            size = varint() if tag & 7 == SIZED else 4 if tag & 7 == 5 else 8
            if at + size > len(data):
                raise ValueError("truncated")
            parts.append((tag >> 3, data[at : at + size]))
            at += size
    return parts


def _json_value(data: bytes) -> Any:
    plain: Any = None
    for number, value in _parts(data):
        if number == 2:
            plain = float(np.frombuffer(value, "<f8")[0])
            plain = int(plain) if plain.is_integer() else plain
        elif number in (3, 4):
            plain = value.decode() if number == 3 else bool(value)
        elif number in (5, 6):
            plain = (_json_object if number == 5 else _json_list)(value)
    return plain


def _json_object(data: bytes) -> dict[str, Any]:
    entries = [dict(_parts(entry)) for _, entry in _parts(data)]
    return {entry.get(1, b"").decode(): _json_value(entry.get(2, b"")) for entry in entries}


def _json_list(data: bytes) -> list[Any]:
    return [_json_value(value) for _, value in _parts(data)]


_JSON_READERS: dict[str, Callable[[bytes], Any]] = {
    "Struct": _json_object,
    "Value": _json_value,
    "ListValue": _json_list,
}
