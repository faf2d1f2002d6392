"""Binary messages from columns: each function makes the bytes of one value of every row, as an array of binary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_EMPTY = pa.scalar(b"", pa.binary())


def joined(parts: Sequence[pa.Array | pa.Scalar], length: int) -> pa.Array:
    """Return the bytes of several values one after the other."""
    if not any(isinstance(each, pa.Array) for each in parts):
        return pa.repeat(pa.scalar(b"".join(each.as_py() for each in parts), pa.binary()), length)
    return pc.binary_join_element_wise(*parts, _EMPTY) if len(parts) > 1 else parts[0]


def varints(values: npt.NDArray[np.uint64]) -> pa.Array:
    """Return unsigned integers in as few bytes as they need."""
    if not len(values):
        return pa.array([], pa.binary())
    sizes = np.ones(len(values), np.int64)
    for count in range(1, 10):
        larger = values >= np.uint64(1 << 7 * count)
        if not larger.any():
            break
        sizes += larger
    places = np.arange(int(sizes.max()))
    digits = ((values[:, None] >> (places * 7).astype(np.uint64)) & np.uint64(0x7F)).astype(np.uint8)
    digits += (places < sizes[:, None] - 1).astype(np.uint8) * np.uint8(0x80)
    return _binary(digits[places < sizes[:, None]], sizes)


def zigzag(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return signed integers as unsigned ones, of which small ones are small."""
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def fixed(values: npt.NDArray[Any]) -> pa.Array:
    """Return numbers as the bytes that they are."""
    data = np.ascontiguousarray(values)
    return _binary(data.view(np.uint8), np.full(len(data), data.dtype.itemsize))


def sizes(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return how many bytes each has."""
    return np.asarray(pc.binary_length(values)).astype(np.int64)


def lists(counts: npt.NDArray[np.int64], items: pa.Array) -> pa.Array:
    """Return for each row the bytes of its items."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), items), _EMPTY)


def counts_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return how many items each list has; none is null."""
    return np.asarray(pc.list_value_length(array)).astype(np.int64)


def pairs(array: pa.MapArray) -> pa.ListArray:
    """Return maps as lists of objects with a key and a value."""
    kind = array.type
    fields = [pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]
    return array.cast(pa.list_(pa.struct(fields)))


def in_place(present: pa.Array, is_valid: pa.Array, otherwise: bytes) -> pa.Array:
    """Return the bytes of the values that are there at their rows, and others where there is none."""
    if len(present) == len(is_valid):
        return present
    valid = np.asarray(is_valid)
    places = pa.array(np.cumsum(valid) - 1, mask=~valid)
    return present.take(places).fill_null(otherwise)


def whole_bytes(array: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the 16 bytes of each decimal, the largest first."""
    data = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * 16 : (array.offset + len(array)) * 16]
    return np.ascontiguousarray(data.reshape(-1, 16)[:, ::-1])


def _binary(data: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> pa.Array:
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(sizes), buffers)
