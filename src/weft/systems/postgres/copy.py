"""Arrow batches as PostgreSQL's binary COPY, a column at a time.

Neighbouring columns of a fixed width are one numpy record array whose fields are big-endian, and each text's length is
the last field of such a run. Arrow then takes runs and texts row by row: the data buffer of the result is what COPY
reads. A column with nulls is a run of its own, in which a null is another, shorter piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import hint_of, is_nested, nested_to_json
from weft.errors import SchemaError

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"

# PostgreSQL counts from 2000-01-01.
_EPOCH_DAYS = 10_957
_EPOCH_MICROSECONDS = _EPOCH_DAYS * 86_400_000_000
# How much is encoded at once: small enough for the processor's cache, large enough that calls do not count.
_CHUNK_ROWS, _CHUNK_BYTES = 32_768, 4 * 1024 * 1024
# An Arrow binary array ends at two gigabytes.
_JOIN_BYTES = 1024 * 1024 * 1024

Array = np.ndarray[Any, Any]

BOOL, BYTEA, INT8, INT2, INT4, TEXT, JSON = 16, 17, 20, 21, 23, 25, 114
FLOAT4, FLOAT8, BPCHAR, VARCHAR, DATE, TIME = 700, 701, 1042, 1043, 1082, 1083
TIMESTAMP, TIMESTAMPTZ, NUMERIC, UUID_, JSONB = 1114, 1184, 1700, 2950, 3802


@dataclass(frozen=True)
class CopyTarget:
    """A column that is copied into: its type's number and modifier (pg_attribute.atttypid, atttypmod)."""

    oid: int
    modifier: int = -1


def writes(field: pa.Field, oid: int) -> bool:
    """Whether values of this field can be written into a column of that type as they are."""
    return oid in _targets(field)


def encode(batch: pa.RecordBatch, targets: Sequence[CopyTarget]) -> Iterator[memoryview]:
    """The rows of a batch as parts of a COPY stream, between `HEADER` and `TRAILER`."""
    rows = batch.num_rows
    if not batch.num_columns:
        yield from (memoryview(bytes(2 * min(_CHUNK_ROWS, rows - first))) for first in range(0, rows, _CHUNK_ROWS))
        return
    step = max(1, min(_CHUNK_ROWS, rows * _CHUNK_BYTES // max(batch.nbytes, 1)))
    for first in range(0, rows, step):
        yield from _encode(batch.slice(first, step), targets)


def _encode(batch: pa.RecordBatch, targets: Sequence[CopyTarget]) -> Iterator[memoryview]:
    if batch.num_rows > 1 and batch.nbytes > _JOIN_BYTES:
        half = batch.num_rows // 2
        yield from _encode(batch.slice(0, half), targets)
        yield from _encode(batch.slice(half), targets)
        return
    rows = _Rows(batch.num_rows)
    rows.add(np.full(1, batch.num_columns, ">i2"))
    for array, field, target in zip(batch.columns, batch.schema, targets, strict=True):
        values = _column(array, field, target)
        missing = np.asarray(array.is_null()) if array.null_count else None
        if isinstance(values, np.ndarray):
            rows.add(np.full(1, values.dtype.itemsize, ">i4"), values, missing=missing)
        else:
            # The format of jsonb has a version.
            prefix = b"\1" if target.oid == JSONB else b""
            sizes = _sizes(values) + np.int32(len(prefix))
            rows.add(sizes.astype(">i4"), np.full(1, prefix, f"V{len(prefix)}"), missing=missing)
            rows.add_texts(values)
    yield rows.joined()


class _Rows:
    """Pieces of rows, side by side."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.fields: list[Array] = []
        self.parts: list[pa.Array] = []
        self.instead: dict[int, tuple[Array, bytes]] = {}
        """By the number of a part, the rows that have other bytes in its place."""

    def add(self, *fields: Array, missing: Array | None = None) -> None:
        """Fields of fixed width with a value for each row, or one for all; or a null, which is a length of -1."""
        if missing is None:
            self.fields += fields
            return
        before = b""
        if any(len(each) > 1 for each in self.fields):
            self._end_run()
        else:
            before = b"".join(each.tobytes() for each in self.fields)
        self.fields += fields
        self.instead[len(self.parts)] = (missing, before + _NULL)
        self._end_run()

    def add_texts(self, texts: pa.Array) -> None:
        """Bytes of any length; none for a null."""
        self._end_run()
        self.parts.append(texts)

    def _end_run(self) -> None:
        fields = [each for each in self.fields if each.dtype.itemsize]
        self.fields = []
        if not fields:
            return
        kind = np.dtype([(f"f{number}", each.dtype) for number, each in enumerate(fields)])
        records = np.empty(self.count, kind)
        for number, each in enumerate(fields):
            records[f"f{number}"] = each
        offsets = np.arange(0, kind.itemsize * (self.count + 1), kind.itemsize, dtype=np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(records)]
        self.parts.append(pa.Array.from_buffers(pa.binary(), self.count, buffers))

    def joined(self) -> memoryview:
        """The rows' bytes, one behind the other."""
        self._end_run()
        joined, count = self.parts[0], self.count
        if len(self.parts) > 1 or self.instead:
            # One array of all pieces, from which they are taken row by row: twice as fast as Arrow's join.
            order = np.arange(len(self.parts) * count, dtype=np.int32).reshape(-1, count).T.copy()
            for number, (part, (missing, _)) in enumerate(self.instead.items(), len(self.parts) * count):
                order[missing, part] = number
            nulls = pa.array([null for _, null in self.instead.values()], pa.binary())
            pieces = pa.concat_arrays([*self.parts, nulls])
            joined = pc.take(pieces, pa.array(order.reshape(-1)), boundscheck=False)
            count = len(joined)
        return memoryview(joined.buffers()[2])[: np.frombuffer(joined.buffers()[1], np.int32)[count]]


def _sizes(text: pa.Array) -> Array:
    return np.diff(np.frombuffer(text.buffers()[1], np.int32)[text.offset : text.offset + len(text) + 1])


# -------------------------------------------------------------------------------------------------------------- columns


def _targets(field: pa.Field) -> dict[int, Callable[[pa.Array, pa.Field, CopyTarget], Any]]:
    """The types of columns that take this field, and what encodes it for them."""
    if is_nested(field.type):
        return _JSON
    if pa.types.is_decimal(field.type):
        return {NUMERIC: _numeric}
    hint = hint_of(field)
    return _HINTED[hint] if hint in _HINTED else _WRITERS.get(field.type, {})


def _column(array: pa.Array, field: pa.Field, target: CopyTarget) -> Any:
    """The values in a numpy array of what goes over the wire, or as Arrow bytes."""
    write = _targets(field).get(target.oid)
    if write is None:
        raise SchemaError(f"Column {field.name!r} is {field.type}, which its column in PostgreSQL does not take.")
    return write(array, field, target)


def _values(array: pa.Array, kind: str) -> Array:
    """The values of a column of fixed width; anything where it is null."""
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array), kind)
    return np.frombuffer(buffer, kind)[array.offset : array.offset + len(array)]


def _plain(source: str, wire: str) -> Callable[[pa.Array, pa.Field, CopyTarget], Array]:
    return lambda array, field, target: _values(array, source).astype(wire)


def _narrow(source: str, wire: str) -> Callable[[pa.Array, pa.Field, CopyTarget], Array]:
    """Whole numbers into a column of fewer bytes: PostgreSQL converts and checks them too, but only on the way from a
    staging table, which takes more than twice as long."""
    bounds = np.iinfo(wire)

    def write(array: pa.Array, field: pa.Field, target: CopyTarget) -> Array:
        ends = pc.min_max(array).as_py()
        for value in ends.values():
            if value is not None and not bounds.min <= value <= bounds.max:
                raise SchemaError(
                    f"Column {field.name!r} takes whole numbers from {bounds.min} to {bounds.max}, and a value is "
                    f"{value}.",
                    field=field.name,
                )
        return _values(array, source).astype(wire)

    return write


def _bool(array: pa.Array, field: pa.Field, target: CopyTarget) -> Array:
    return _values(array.cast(pa.uint8()), "u1")


def _date(array: pa.Array, field: pa.Field, target: CopyTarget) -> Array:
    return (_values(array, "i4") - np.int32(_EPOCH_DAYS)).astype(">i4")


def _timestamp(array: pa.Array, field: pa.Field, target: CopyTarget) -> Array:
    return (_values(array, "i8") - np.int64(_EPOCH_MICROSECONDS)).astype(">i8")


def _text(array: pa.Array, field: pa.Field, target: CopyTarget) -> pa.Array:
    if target.oid in (VARCHAR, BPCHAR) and target.modifier >= 0:
        # PostgreSQL refuses it too, unless what is too much are spaces: those it would drop without a word.
        longest = pc.max(pc.utf8_length(array)).as_py() or 0
        if longest > target.modifier - 4:
            raise SchemaError(
                f"Column {field.name!r} takes {target.modifier - 4} characters, and a value has {longest}.",
                field=field.name,
            )
    return array.view(pa.binary())


def _json(array: pa.Array, field: pa.Field, target: CopyTarget) -> pa.Array:
    return (nested_to_json(array) if is_nested(array.type) else array).view(pa.binary())


def _binary(array: pa.Array, field: pa.Field, target: CopyTarget) -> pa.Array:
    return array


# ------------------------------------------------------------------------------------------------------------- decimals


def _numeric(array: pa.Array, field: pa.Field, target: CopyTarget) -> Array:
    """Digits in base 10,000, as many for each value as the largest one needs: the server drops leading zeros."""
    scale = array.type.scale
    halves = _values(array, "V16").view("<u8").reshape(-1, 2)
    low, high = halves[:, 0], halves[:, 1]
    negative = high.view("<i8") < 0
    if array.null_count:
        present = np.asarray(array.is_valid())
        low, high, negative = low * present, high * present, negative & present
    if negative.any():
        high = np.where(negative, ~high + (low == 0), high)
        low = np.where(negative, ~low + np.uint64(1), low)
    # Groups begin at the point, so the last one may have fewer digits: it is filled with zeros.
    last = scale % 4 or 4
    groups = _groups(high, low, last)
    if groups and last < 4:
        groups[0] = groups[0] * np.uint64(10 ** (4 - last))
    kind = [("count", ">i2"), ("weight", ">i2"), ("sign", ">u2"), ("scale", ">i2"), ("digits", ">i2", (len(groups),))]
    numerics = np.empty(len(array), kind)
    numerics["count"] = len(groups)
    numerics["weight"] = len(groups) - 1 - -(-scale // 4)
    numerics["sign"] = np.where(negative, 0x4000, 0)
    numerics["scale"] = scale
    for place, group in enumerate(reversed(groups)):
        numerics["digits"][:, place] = group
    return numerics


def _groups(high: Array, low: Array, last: int) -> list[Array]:
    """The last digits of 128-bit numbers, then each four before them, until nothing is left of the largest."""
    groups: list[Array] = []
    ahead = last
    if high.any():
        # Long division in limbs of 32 bits, eight digits at a time: a remainder and a limb fit 64 bits.
        mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
        limbs = [high >> shift, high & mask, low >> shift, low & mask]
        while len(limbs) > 2:
            divisor = np.uint64(10**ahead if ahead < 4 else 10**8)
            rest: Any = np.uint64(0)
            for place, limb in enumerate(limbs):
                whole = (rest << shift) | limb
                limbs[place] = whole // divisor
                rest = whole - limbs[place] * divisor
            if ahead == 4:
                upper = rest // np.uint64(10**4)
                groups += [rest - upper * np.uint64(10**4), upper]
            else:
                groups.append(rest)
            ahead = 4
            while len(limbs) > 2 and not limbs[0].any():
                del limbs[0]
        low = (limbs[0] << shift) | limbs[1]
    while low.any():
        divisor = np.uint64(10**ahead)
        upper = low // divisor
        groups.append(low - upper * divisor)
        low, ahead = upper, 4
    return groups


# ---------------------------------------------------------------------------------------------------- texts of meaning


def _uuid(array: pa.Array, field: pa.Field, target: CopyTarget) -> Array:
    present = array.drop_null()
    uuids = np.zeros((len(array), 16), np.uint8)
    parsed = _uuid_bytes(present)
    if parsed is None:
        try:
            # Braces, capitals, no dashes: what PostgreSQL reads as well.
            parsed = np.frombuffer(b"".join(UUID(each).bytes for each in present.to_pylist()), np.uint8).reshape(-1, 16)
        except ValueError:
            wrong = next(each for each in present.to_pylist() if not _is_uuid(each))
            raise SchemaError(f"Column {field.name!r}: {wrong!r} is not a UUID.", field=field.name) from None
    if len(present) == len(array):
        uuids = parsed
    else:
        uuids[np.asarray(array.is_valid())] = parsed
    return np.ascontiguousarray(uuids).view("V16").reshape(-1)


_NIBBLES = np.full(256, 255, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789", np.uint8)] = range(10)
_NIBBLES[np.frombuffer(b"abcdef", np.uint8)] = range(10, 16)
_NIBBLES[np.frombuffer(b"ABCDEF", np.uint8)] = range(10, 16)
_DASHES = (8, 13, 18, 23)
_DIGITS = [place for place in range(36) if place not in _DASHES]


def _uuid_bytes(texts: pa.Array) -> Array | None:
    if not len(texts) or (_sizes(texts) != 36).any():
        return None
    first = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset]
    letters = np.frombuffer(texts.buffers()[2], np.uint8)[first : first + 36 * len(texts)].reshape(-1, 36)
    nibbles = _NIBBLES[letters[:, _DIGITS]]
    if (nibbles == 255).any() or (letters[:, _DASHES] != ord("-")).any():
        return None
    return (nibbles[:, 0::2] << 4) | nibbles[:, 1::2]


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _time(array: pa.Array, field: pa.Field, target: CopyTarget) -> Array:
    def parse(times: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise("1970-01-01", times, " ").cast(pa.timestamp("us"))

    try:
        times_of_day = parse(array)
    except pa.ArrowInvalid:
        # The end of a day is a time to PostgreSQL, but not to Arrow.
        midnight = pc.match_substring_regex(array, "^24:00(:00(\\.0+)?)?$")
        try:
            times_of_day = parse(pc.if_else(midnight, "00:00:00", array))
        except pa.ArrowInvalid as error:
            raise SchemaError(f"Column {field.name!r} has no time of day: {error}.", field=field.name) from None
        times_of_day = pc.if_else(midnight, pa.scalar(86_400_000_000, pa.timestamp("us")), times_of_day)
    return _values(times_of_day, "i8").astype(">i8")


_TEXTS: dict[int, Callable[[pa.Array, pa.Field, CopyTarget], Any]] = {TEXT: _text, VARCHAR: _text, BPCHAR: _text}
_JSON: dict[int, Callable[[pa.Array, pa.Field, CopyTarget], Any]] = {JSON: _json, JSONB: _json, TEXT: _json}
_HINTED: dict[str | None, dict[int, Callable[[pa.Array, pa.Field, CopyTarget], Any]]] = {
    "uuid": {UUID_: _uuid, **_TEXTS},
    "json": {**_JSON, VARCHAR: _text},
    "time": {TIME: _time, **_TEXTS},
}
_SMALL = {INT2: ">i2", INT4: ">i4", INT8: ">i8"}
_WRITERS: dict[pa.DataType, dict[int, Callable[[pa.Array, pa.Field, CopyTarget], Any]]] = {
    pa.bool_(): {BOOL: _bool},
    pa.int8(): {oid: _plain("i1", wire) for oid, wire in _SMALL.items()},
    pa.int16(): {oid: _plain("i2", wire) for oid, wire in _SMALL.items()},
    pa.int32(): {INT2: _narrow("i4", ">i2"), INT4: _plain("i4", ">i4"), INT8: _plain("i4", ">i8")},
    pa.int64(): {INT2: _narrow("i8", ">i2"), INT4: _narrow("i8", ">i4"), INT8: _plain("i8", ">i8")},
    pa.float32(): {FLOAT4: _plain("f4", ">f4"), FLOAT8: _plain("f4", ">f8")},
    pa.float64(): {FLOAT8: _plain("f8", ">f8")},
    pa.date32(): {DATE: _date},
    pa.timestamp("us", "UTC"): {TIMESTAMPTZ: _timestamp},
    pa.timestamp("us"): {TIMESTAMP: _timestamp},
    pa.string(): _TEXTS,
    pa.binary(): {BYTEA: _binary},
}
