"""A range of a table as Arrow, without a Python object per value.

The server joins the rows of a chunk: texts end to end, which with their lengths is what an Arrow array is, and the rest
with those lengths to CSV, which Arrow's own reader parses. Both work while the interpreter's lock is free, so chunks
are read in threads. A chunk is a short statement of its own: one that streams for long would hold up ALTER TABLE, and
behind that every publisher. (Texts in the CSV would need REPLACE, which takes MariaDB quadratic time.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from weft.errors import SchemaError
from weft.systems.log import ROWID
from weft.systems.sql import chunks
from weft.types import FieldType

if TYPE_CHECKING:
    from weft.systems.mysql.store import MySQLStore
    from weft.systems.sql.log import SqlLog

_WORKERS = 2
# Some of these are in memory at once, as text and as Arrow.
_CHUNK_BYTES = 4 * 1024 * 1024

_TEXTS = ("string", "json", "bytes")


def batches(
    store: MySQLStore, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
) -> Iterator[pa.RecordBatch]:
    """The record batches of `after < offset <= upto`, in order."""
    return chunks.in_order(
        lambda first, last: _read(store, log, first, last, columns),
        after,
        upto,
        workers=_WORKERS,
        chunk_bytes=_CHUNK_BYTES,
    )


def _read(
    store: MySQLStore, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
) -> tuple[list[pa.RecordBatch], int]:
    # The offset comes first, wanted or not: by it the order is checked, and no line is empty.
    fields = {ROWID: FieldType("int64"), **columns}
    texts = {name: f"CAST({store.quote(name)} AS BINARY)" for name, kind in fields.items() if kind.base in _TEXTS}
    cells = [f"LENGTH({texts[name]})" if name in texts else store.quote(name) for name in fields]
    line = ", ',', ".join(f"IFNULL({cell}, '')" for cell in cells)
    joined = [f"group_concat({text} SEPARATOR '')" for text in texts.values()]
    selected = ", ".join(["count(*)", f"CAST(group_concat(CONCAT({line}) SEPARATOR '\\n') AS BINARY)", *joined])
    with store.session("read") as session:
        cursor = session.run(
            f"SELECT {selected} FROM {log.table} FORCE INDEX (PRIMARY) WHERE {log.rowid} > ? AND {log.rowid} <= ?",
            (after, upto),
        )
        count, lines, *data = cursor.fetchone()
    if not count:
        return [], 0
    if cursor.warning_count:
        # Something was longer than `group_concat_max_len`, and cut off.
        if upto - after == 1:
            raise SchemaError(f"Event {upto} of {log.schema}.{log.name} is too large for the server to send.")
        middle = (after + upto) // 2
        left, left_bytes = _read(store, log, after, middle, columns)
        right, right_bytes = _read(store, log, middle, upto, columns)
        return left + right, left_bytes + right_bytes
    table = _parse(lines, {name: pa.int32() if name in texts else _parsed(kind) for name, kind in fields.items()})
    arrays = {name: table[name].combine_chunks() for name in fields}
    for name, text in zip(texts, data, strict=True):
        arrays[name] = _texts(arrays[name], text or b"", fields[name].arrow)
    batch = pa.record_batch([arrays[name].cast(kind.arrow) for name, kind in fields.items()], names=list(fields))
    if count > 1 and pc.min(pc.pairwise_diff(arrays[ROWID])).as_py() < 0:
        batch = batch.sort_by(ROWID)
    return [batch.select(list(columns))], len(lines) + sum(map(len, filter(None, data)))


def _parsed(kind: FieldType) -> pa.DataType:
    # Arrow's reader wants a zone with each time of a zoned column; ours are in UTC and do not say so.
    return pa.timestamp("us") if kind.base == "timestamp" else kind.arrow


def _parse(lines: bytes, types: dict[str, pa.DataType]) -> pa.Table:
    return csv.read_csv(
        pa.BufferReader(lines),
        # In one block, so that each column is one array.
        read_options=csv.ReadOptions(column_names=list(types), use_threads=False, block_size=len(lines) + 1),
        convert_options=csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True, true_values=["1"], false_values=["0"]
        ),
    )


def _texts(lengths: pa.Array, data: bytes, kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths.fill_null(0), out=offsets[1:])
    valid = lengths.is_valid().buffers()[1] if lengths.null_count else None
    array = pa.Array.from_buffers(kind, len(lengths), [valid, pa.py_buffer(offsets), pa.py_buffer(data)])
    array.validate()
    return array
