"""A query's result as Arrow, without a Python object per value: the packets of the text protocol, parsed in bulk.

Each row is a packet, each value a length and its text. Where the rows begin is found by one short loop; from there on
whole columns are located by numpy, cut out of the received bytes by Arrow, and cast by Arrow from the server's texts,
which are exact (FLOAT is not: six digits; so such columns are asked for as DOUBLE).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pymysql
from pymysql.constants import CR

from weft.errors import SchemaError
from weft.systems.sql import decimals

# Received before it is parsed; a batch's texts have about this size.
_CHUNK_BYTES = 2 * 1024 * 1024
_MORE = 0xFFFFFF
_PREPARE, _QUERY, _CLOSE = 0x16, 0x03, 0x19


@dataclass(frozen=True)
class ResultField:
    """The server's description of a result's column."""

    name: str
    type: int
    flags: int
    charset: int
    length: int
    decimals: int
    schema: str
    table: str
    """The table that the column is of, empty for an expression."""
    column: str


# PyMySQL declares no types of what is used of it here.


def fields(driver: Any, sql: str) -> list[ResultField]:
    """The columns of a query, by preparing it: nothing is run."""
    driver._execute_command(_PREPARE, sql)
    packet = driver._read_packet()
    packet.advance(1)
    statement = packet.read_uint32()
    columns, parameters = packet.read_uint16(), packet.read_uint16()
    for each in (parameters, columns):
        described = [_field(driver) for _ in range(each)]
        if each:
            driver._read_packet()
    # No answer follows.
    driver._execute_command(_CLOSE, statement.to_bytes(4, "little"))
    return described if columns else []


def _field(driver: Any) -> ResultField:
    packet = driver._read_packet()
    _, schema, _, table, name, column = (_text(packet) for _ in range(6))
    packet.advance(1)
    charset, length, kind, flags, decimals = packet.read_struct("<HIBHB")
    return ResultField(name, kind, flags, charset, length, decimals, schema, table, column)


def _text(packet: Any) -> str:
    return str((packet.read_length_coded_string() or b"").decode())


def rows(driver: Any, sql: str, schema: pa.Schema) -> Generator[pa.RecordBatch, None, None]:
    """Run a query and read its rows as they come. Where that ends early, the connection does too: what is still under
    way would be taken for the answer to the next statement."""
    try:
        driver._execute_command(_QUERY, sql)
        count = driver._read_packet().read_length_encoded_integer()
        if count != len(schema):
            raise SchemaError(f"The query has {count} columns, and had {len(schema)} when it was described.")
        for _ in range(count + 1):  # and the end of them
            driver._read_packet()
        for data, starts in _chunks(driver):
            if starts:
                yield _batch(data, starts, schema)
    except BaseException:
        driver.cut()
        raise


def _chunks(driver: Any) -> Iterator[tuple[bytearray, list[int]]]:
    """Received bytes, and where in them each row's values begin."""
    file = driver._rfile
    data, starts, position, more = bytearray(), list[int](), 0, True
    while more:
        try:
            received = file.read1(_CHUNK_BYTES)
        except OSError as error:  # as PyMySQL does
            raise _lost(f" ({error})") from None
        if not received:
            raise _lost()
        data += received
        # Parsed as it comes: after the last packet nothing follows, and a read would wait indefinitely.
        position, more = _rows(data, position, starts)
        if position >= _CHUNK_BYTES or not more:
            rest = data[position:]
            yield data, starts
            data, starts, position = rest, [], 0


def _lost(why: str = "") -> pymysql.OperationalError:
    return pymysql.OperationalError(CR.CR_SERVER_LOST, f"Lost connection to MySQL server during query{why}")


def _rows(data: bytearray, position: int, starts: list[int]) -> tuple[int, bool]:
    """Add where the complete rows from `position` on begin; where the last of them ends, and whether there are more."""
    add, size = starts.append, len(data)
    while position + 4 < size:
        length = data[position] | data[position + 1] << 8 | data[position + 2] << 16
        following = position + 4 + length
        if following > size:
            break
        mark = data[position + 4]
        if length < 9 and mark == 0xFE:
            return following, False
        if mark == 0xFF:
            pymysql.err.raise_mysql_exception(bytes(data[position + 4 : following]))
        if length == _MORE:
            joined = _join(data, position)
            if not joined:
                break
            following, size = position + 4 + joined, len(data)
        add(position + 4)
        position = following
    return position, True


def _join(data: bytearray, position: int) -> int:
    """Join the packets of one row in place, where all of them are there; the length of the row, else 0."""
    ends = [position]
    while True:
        at = ends[-1]
        if at + 4 > len(data):
            return 0
        length = int.from_bytes(data[at : at + 3], "little")
        if at + 4 + length > len(data):
            return 0
        ends.append(at + 4 + length)
        if length < _MORE:
            break
    for header in reversed(ends[1:-1]):
        del data[header : header + 4]
    return ends[-1] - position - 4 * (len(ends) - 1)


def _batch(data: bytearray, starts: list[int], schema: pa.Schema) -> pa.RecordBatch:
    received = np.frombuffer(data, np.uint8)
    buffer = pa.py_buffer(data)
    cursor = np.array(starts, np.int64)
    arrays = []
    for field in schema:
        begin, end, null = _located(received, cursor)
        arrays.append(_cast(_cut(buffer, begin, end, null, field.type), field))
        cursor = end
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _located(data: np.ndarray, cursor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return where the values at these cursors begin and end, and which are null."""
    first = data[cursor]
    length = first.astype(np.int64)
    begin = cursor + 1
    null = None
    if first.max() > 250:
        null = first == 0xFB
        length[null] = 0
        null = null if null.any() else None
        for mark, width in ((0xFC, 2), (0xFD, 3), (0xFE, 8)):
            at = np.flatnonzero(first == mark)
            if len(at):
                places = begin[at, None] + np.arange(width)
                length[at] = data[places].astype(np.int64) @ (1 << (8 * np.arange(width)))
                begin[at] += width
    return begin, begin + length, null


def _cut(buffer: pa.Buffer, begin: np.ndarray, end: np.ndarray, null: np.ndarray | None, kind: pa.DataType) -> pa.Array:
    """The texts between these places: every second element of an array whose others are what lies between them."""
    offsets = np.empty(2 * len(begin), np.int32)
    offsets[::2], offsets[1::2] = begin, end
    both = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), buffer])
    return both.take(pa.array(np.arange(0, len(offsets), 2), mask=null))


def _cast(array: pa.Array, field: pa.Field) -> pa.Array:
    kind = field.type
    if pa.types.is_binary(kind):
        return array
    texts = array
    try:
        texts = array.cast(pa.string())
        if pa.types.is_string(kind):
            return texts
        if pa.types.is_timestamp(kind):
            # Arrow wants a zone with each text of a zoned column; the session's zone is UTC, and no text says so.
            return texts.cast(pa.timestamp("us")).cast(kind)
        return decimals.from_texts(texts, kind) if pa.types.is_decimal(kind) else texts.cast(kind)
    except pa.ArrowInvalid as error:
        raise _refused(texts, field, error) from None


def _refused(texts: pa.Array, field: pa.Field, error: Exception) -> SchemaError:
    if pa.types.is_temporal(field.type):
        zeros = pc.match_substring_regex(texts, "^0000|-00")
        if pc.any(zeros).as_py():
            value = texts.filter(zeros)[0].as_py()
            return SchemaError(
                f"Column {field.name!r} holds {value!r}, which is not a date.",
                field=field.name,
                hint=f"Say in the query what it should be: NULLIF({field.name}, 0).",
            )
    return SchemaError(f"Column {field.name!r} does not fit {field.type}: {error}", field=field.name)
