"""A range of a SQLite table as Arrow, without a Python object per value.

SQLite itself concatenates each column of a chunk: texts as one text plus a list of their lengths, which are an Arrow
array's data and offsets; numbers as lines that Arrow parses. sqlite3 lets go of the interpreter's lock meanwhile, so
chunks are read in threads. The ADBC driver for SQLite is not used: it brings a SQLite of its own, and two of those in
one process drop each other's file locks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import csv

from weft.errors import SchemaError
from weft.systems.log import EXTRA, PUBLISH_ID, PUBLISHED_AT
from weft.systems.sql import chunks
from weft.types import FieldType

if TYPE_CHECKING:
    from weft.systems.sql.log import SqlLog
    from weft.systems.sqlite.store import SqliteStore

# Some of these are in memory at once: what the threads work on and what waits for the reader.
_CHUNK_BYTES = 16 * 1024 * 1024


def batches(
    store: SqliteStore, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
) -> Iterator[pa.RecordBatch]:
    """The record batches of `after < offset <= upto`, in order."""
    return chunks.in_order(
        lambda first, last: _read(store, log, first, last, columns),
        after,
        upto,
        workers=1 if store.in_memory else min(4, os.cpu_count() or 1),
        chunk_bytes=_CHUNK_BYTES,
    )


def _read(
    store: SqliteStore, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
) -> tuple[list[pa.RecordBatch], int]:
    """The batches of a range, and how many bytes SQLite gave for them."""
    where = f"FROM {log.table} WHERE {log.rowid} > {int(after)} AND {log.rowid} <= {int(upto)}"
    parts = ["count(*)", *(_part(name, store.quote(name), kind) for name, kind in columns.items())]
    try:
        with store.session("read") as session:
            found = session.row(f"SELECT {', '.join(parts)} {where}")
            assert found is not None
            count = found[0]
            if not count:
                return [], 0
            values = iter(found[1:])
            arrays = []
            for name, kind in columns.items():
                if kind.base in _NUMBERS:
                    arrays.append(_numbers(next(values), kind))
                    continue
                array = None
                if name in _WIDTHS:
                    array = _fixed(next(values), count, _WIDTHS[name], kind)
                elif name == EXTRA:
                    array = pa.nulls(count, kind.arrow) if next(values) == 0 else None
                else:
                    array = _texts(next(values), next(values), kind)
                if array is None:
                    text = session.row(f"SELECT {_text(store.quote(name))} {where}")
                    assert text is not None
                    array = _texts(text[0], text[1], kind)
                arrays.append(array)
    except SchemaError:
        # SQLite's limit for one value, a billion bytes: read half as much at a time.
        if upto - after <= 1:
            raise
        middle = (after + upto) // 2
        left, left_bytes = _read(store, log, after, middle, columns)
        right, right_bytes = _read(store, log, middle, upto, columns)
        return left + right, left_bytes + right_bytes
    batch = pa.record_batch(arrays, names=list(columns))
    return [batch], batch.nbytes


# What only Weft writes, always in this many bytes: no need to ask for each length.
_WIDTHS = {PUBLISHED_AT: 32, PUBLISH_ID: 36}
_NUMBERS = ("bool", "int32", "int64", "float32", "float64")


def _part(name: str, column: str, kind: FieldType) -> str:
    """The SQL that gives a column of a chunk: numbers as lines of text, texts as one text and their lengths."""
    if kind.base in _NUMBERS:
        # 17 digits would tell every double from its neighbours, if SQLite rounded them right: so 20.
        number = f"printf('%!.20g', {column})" if kind.base.startswith("float") else column
        return f"CAST(group_concat(CASE WHEN {column} IS NULL THEN '' ELSE {number} END, '\n') AS BLOB)"
    if name in _WIDTHS:
        return f"CAST(group_concat({column}, '') AS BLOB)"
    # Most events have nothing extra: whether there is any is cheap to ask.
    return f"count({column})" if name == EXTRA else _text(column)


def _text(column: str) -> str:
    return f"CAST(group_concat({column}, '') AS BLOB), group_concat(coalesce(length(CAST({column} AS BLOB)), -1))"


def _numbers(lines: bytes, kind: FieldType) -> pa.Array:
    table = csv.read_csv(
        pa.BufferReader(lines + b"\n"),
        read_options=csv.ReadOptions(column_names=["n"], use_threads=False, block_size=len(lines) + 2),
        parse_options=csv.ParseOptions(ignore_empty_lines=False, quote_char=False),
        convert_options=csv.ConvertOptions(column_types={"n": kind.arrow}),
    )
    return table.column(0).combine_chunks()


def _fixed(data: bytes | None, count: int, width: int, kind: FieldType) -> pa.Array | None:
    """Texts of one length; `None` where somebody else wrote others."""
    if data is None or len(data) != count * width:
        return None
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return _typed(pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]), kind)


def _texts(data: bytes | None, lengths: str, kind: FieldType) -> pa.Array:
    sizes = np.fromstring(lengths, dtype=np.int32, sep=",")
    count, missing, validity, nulls = len(sizes), sizes < 0, None, 0
    if missing.any():
        nulls = int(missing.sum())
        if nulls == count:
            return pa.nulls(count, kind.arrow)
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
        sizes = np.where(missing, 0, sizes)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data or b"")]
    array = pa.Array.from_buffers(pa.binary() if kind.base == "bytes" else pa.string(), count, buffers, nulls)
    return _typed(array, kind)


def _typed(array: pa.Array, kind: FieldType) -> pa.Array:
    if array.type == kind.arrow:
        return array
    # Times of publication repeat: each is parsed once.
    distinct = array.dictionary_encode()
    return distinct.dictionary.cast(kind.arrow).take(distinct.indices)
