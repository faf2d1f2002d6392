"""Reads binary messages side by side: each step reads one value of all messages at once, into an array of NumPy.

A message has a position. A step reads at the positions of some messages (`rows`: their numbers, growing) and moves
them. A message that ends too early becomes bad with its reason, and from then on reads zeros, which are an empty value
of every type: no step looks out for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
TRUNCATED = "It is truncated: it ends in the middle of a value."
_NOT_UTF8 = "A text of it is not UTF-8."
# A varint has ten bytes at most, a group of zeros must hold any value of a fixed size.
_ZEROS = 32


class Cursor:
    """The positions in a batch of messages."""

    def __init__(self, values: pa.Array, skip: Ints | int = 0, *, longest_fixed: int = 0) -> None:
        """Begin each message behind `skip` bytes."""
        if not pa.types.is_binary(values.type):
            values = values.cast(pa.binary())
        offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
        data = values.buffers()[2]
        begin, finish = (int(offsets[0]), int(offsets[-1])) if len(values) else (0, 0)
        self.buffer = np.zeros(finish - begin + max(_ZEROS, longest_fixed), np.uint8)
        if finish > begin:
            self.buffer[: finish - begin] = np.frombuffer(data, np.uint8)[begin:finish]
        self._zeros = finish - begin
        self.position: Ints = (offsets[:-1] - begin).astype(np.int64) + skip
        self.end: Ints = (offsets[1:] - begin).astype(np.int64)
        self.bad: dict[int, str] = {}
        self._is_bad = np.zeros(len(values), np.bool_)
        self.fail(np.flatnonzero(self.position > self.end), TRUNCATED)

    def part(self, rows: Ints) -> Cursor:
        """Return a cursor over some of the messages, from their positions on."""
        if len(rows) == len(self.end) and not self.bad:
            return self
        return Cursor(self.slices(self.position[rows], self.end[rows]))

    @property
    def rows(self) -> Ints:
        """All messages."""
        return np.arange(len(self.end))

    def fail(self, rows: Ints | Iterable[int], why: str) -> None:
        """Make messages bad."""
        rows = np.asarray(rows, np.int64)
        if len(rows):
            for row in rows.tolist():
                self.bad.setdefault(row, why)
            self._is_bad[rows] = True
            self.position[rows] = self._zeros
            self.end[rows] = len(self.buffer)

    def are_bad(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which of these messages are bad."""
        return self._is_bad[rows]

    def move(self, rows: Ints, to: Ints) -> None:
        """Set the positions; a message that would be behind its end is bad."""
        self.position[rows] = to
        over = to > self.end[rows]
        if over.any():
            self.fail(rows[over], TRUNCATED)
        if self.bad:
            self.position[rows[self._is_bad[rows]]] = self._zeros

    def finish(self) -> None:
        """Make messages bad that have bytes left."""
        left = (self.position < self.end) & ~self._is_bad
        self.fail(np.flatnonzero(left), "It has bytes behind its end.")

    def varints(self, rows: Ints) -> npt.NDArray[np.uint64]:
        """Read unsigned integers of variable length."""
        values, at, long = varints_at(self.buffer, self.position[rows])
        if long.any():
            self.fail(rows[long], "It has an integer of more than 64 bits.")
        self.move(rows, at)
        return self._without_bad(values, rows)

    def integers(self, rows: Ints) -> Ints:
        """Read signed integers in zigzag."""
        return unzigzag(self.varints(rows))

    def fixed(self, rows: Ints, dtype: str) -> npt.NDArray[Any]:
        """Read numbers of a fixed size, such as `<f8`."""
        size = np.dtype(dtype).itemsize
        at = self.position[rows]
        within = np.minimum(at, len(self.buffer) - size)
        read = self.buffer[within[:, None] + np.arange(size)]
        self.move(rows, at + size)
        return self._without_bad(np.ascontiguousarray(read).view(dtype).reshape(-1), rows)

    def bytes_of(self, rows: Ints, sizes: Ints) -> pa.Array:
        """Read values of these sizes, as binary."""
        begin = self.position[rows]
        # A size beyond the end may be as large as an integer can be, and its sum with a position no integer any more.
        wrong = (sizes < 0) | (sizes > self.end[rows] - begin)
        if wrong.any():
            self.fail(rows[wrong], TRUNCATED)
            begin, sizes = self.position[rows], np.where(wrong, 0, sizes)
        self.move(rows, begin + sizes)
        return self.slices(begin, begin + sizes)

    def slices(self, begin: Ints, end: Ints) -> pa.Array:
        """Return parts of the buffer, as binary."""
        if not len(begin):
            return pa.array([], pa.binary())
        # Every second value of an array whose others are what is between them. Those before a bad message, which reads
        # zeros at the end, are nonsense: nobody takes them, and Arrow only compares the first offset with the last.
        offsets = np.full(2 * len(begin) + 1, len(self.buffer), np.int32)
        offsets[0:-1:2], offsets[1::2] = begin, end
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.buffer)]
        return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers).take(pa.array(np.arange(len(begin)) * 2))

    def texts(self, rows: Ints, sizes: Ints) -> pa.Array:
        """Read texts of these sizes."""
        return self.as_texts(rows, self.bytes_of(rows, sizes))

    def as_texts(self, rows: Ints, read: pa.Array) -> pa.Array:
        """Return bytes as texts; messages with bytes that are not UTF-8 are bad."""
        try:
            return read.cast(pa.string())
        except pa.ArrowInvalid:
            texts = [_text(each) for each in read.to_pylist()]
            self.fail(rows[[number for number, each in enumerate(texts) if each is None]], _NOT_UTF8)
            return pa.array(["" if each is None else each for each in texts], pa.string())

    def _without_bad(self, values: npt.NDArray[Any], rows: Ints) -> npt.NDArray[Any]:
        if self.bad:
            values[self._is_bad[rows]] = np.zeros((), values.dtype)
        return values


def varints_at(
    buffer: npt.NDArray[np.uint8], starts: Ints
) -> tuple[npt.NDArray[np.uint64], Ints, npt.NDArray[np.bool_]]:
    """Return the integers of variable length at these places, where each ends, and which are of more than 64 bits."""
    first, at = buffer[starts], starts + 1
    values = (first & 0x7F).astype(np.uint64)
    more = np.flatnonzero(first & 0x80)
    for shift in range(7, 70, 7):
        if not len(more):
            break
        # Zeros are behind the last message, and end what is truncated.
        byte = buffer[np.minimum(at[more], len(buffer) - 1)]
        values[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        at[more] += 1
        more = more[(byte & 0x80) != 0]
    long = np.zeros(len(starts), np.bool_)
    long[more] = True
    return values, at, long


def unzigzag(values: npt.NDArray[np.uint64]) -> Ints:
    """Return signed integers of unsigned ones: 0, -1, 1, -2, 2 …"""
    signed: Ints = (values >> np.uint64(1)).astype(np.int64) ^ -(values & np.uint64(1)).astype(np.int64)
    return signed


def in_order(pieces: list[pa.Array], owners: list[Ints], kind: pa.DataType) -> tuple[pa.Array, Ints]:
    """Return the values of pieces sorted by whose they are, values of one owner in the order of the pieces, and how
    many values each owner up to the last has."""
    if not pieces:
        return pa.array([], kind), np.zeros(0, np.int64)
    whose = np.concatenate(owners)
    values = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
    if len(pieces) > 1:
        values = values.take(pa.array(np.argsort(whose, kind="stable")))
    return values, np.bincount(whose)


def list_offsets(counts: Ints, length: int) -> npt.NDArray[np.int32]:
    """Return the offsets of lists with these many values; those behind the last are empty."""
    offsets = np.zeros(length + 1, np.int32)
    np.cumsum(counts, out=offsets[1 : len(counts) + 1])
    offsets[len(counts) + 1 :] = offsets[len(counts)]
    return offsets


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
