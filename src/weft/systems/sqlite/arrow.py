"""A range of a SQLite table as Arrow, without a Python object per value.

SQLite itself concatenates each column of a chunk and Arrow takes it apart: integers as lines, floats as two of them,
texts with a separator. Values that this does not show exactly are rare; they are read again in a form that does.
Both let go of the interpreter's lock meanwhile, so chunks are read in threads. The ADBC driver for SQLite is not used:
it brings a SQLite of its own, and two of those in one process drop each other's file locks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from weft.errors import SchemaError
from weft.systems.log import EXTRA, PUBLISH_ID, PUBLISHED_AT, ROWID
from weft.systems.sql import chunks
from weft.types import FieldType

if TYPE_CHECKING:
    from weft.systems.sql.log import SqlLog
    from weft.systems.sqlite.store import SqliteStore

# Some of these are in memory at once: what the threads work on and what waits for the reader.
_CHUNK_BYTES = 16 * 1024 * 1024
# Columns that only Weft writes, with their widths in bytes; -1 for extra fields, which are mostly empty.
_WIDTHS = {PUBLISHED_AT: 32, PUBLISH_ID: 36, EXTRA: -1}
# Between texts, and in place of a null. A text may hold them: then lengths show where each ends.
_SEPARATOR, _NULL = "\x1f", "\x1e"


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
    rows = f"FROM {log.table} WHERE {log.rowid} > {int(after)} AND {log.rowid} <= {int(upto)}"
    forms = [_form(name, store.quote(name), kind) for name, kind in columns.items()]
    try:
        with store.session("read") as session:

            def ask(what: str, only: str = "") -> tuple[Any, ...]:
                row = session.row(f"SELECT {what} {rows} {only}")
                assert row is not None
                return row

            session.run("BEGIN")  # what is asked for again is of the same rows, whatever a trim removes meanwhile
            count, *columns_read = ask(", ".join(["count(*)", *(part for form in forms for part in form.parts)]))
            chunk, values = _Chunk(after, upto, count, ask), iter(columns_read)
            arrays = [form.array(chunk, *islice(values, len(form.parts))) for form in forms if count]
            session.run("COMMIT")
    except SchemaError:  # SQLite's limit for one value, a billion bytes: read half as much at a time
        if upto - after <= 1:
            raise
        middle = (after + upto) // 2
        left, left_bytes = _read(store, log, after, middle, columns)
        right, right_bytes = _read(store, log, middle, upto, columns)
        return left + right, left_bytes + right_bytes
    if not count:
        return [], 0
    batch = pa.record_batch(arrays, names=list(columns))
    return [batch], batch.nbytes


@dataclass(frozen=True, slots=True)
class _Chunk:
    after: int
    upto: int
    count: int
    ask: Callable[..., tuple[Any, ...]]
    """Gives what some aggregates say of the chunk, or of only some of its rows."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a column is read: the expressions to select, and the function that builds an array of the results."""

    parts: tuple[str, ...]
    array: Callable[..., pa.Array]

    def read(self, chunk: _Chunk) -> pa.Array:
        return self.array(chunk, *chunk.ask(", ".join(self.parts)))


def _form(name: str, column: str, kind: FieldType) -> _Form:
    if name == ROWID:
        return _offsets(column, kind)
    if name in _WIDTHS:
        return _alike(column, kind, _WIDTHS[name])
    if kind.base in ("bool", "int32", "int64"):
        return _integers(column, kind)
    if kind.base in ("float32", "float64"):
        return _floats(column, kind)
    return _by_length(column, kind) if kind.base == "bytes" else _texts(column, kind)


def _integers(column: str, kind: FieldType) -> _Form:
    return _Form((_lines(column),), lambda _, lines: _parse(lines, kind.arrow))


def _offsets(column: str, kind: FieldType) -> _Form:
    """Counted rather than read, where there are no gaps."""

    def array(chunk: _Chunk) -> pa.Array:
        gapless = chunk.count == chunk.upto - chunk.after
        return pa.array(np.arange(chunk.after + 1, chunk.upto + 1)) if gapless else _integers(column, kind).read(chunk)

    return _Form((), array)


def _floats(column: str, kind: FieldType) -> _Form:
    """As integers: what is before the point, and 2**62 times what is behind it. To print floats takes far longer.

    Exact for multiples of 2**-62, which all floats from 2**-10 on are: 53 bits reach no further. Those that are smaller
    or too large for an integer are printed, in 20 digits: of 17, SQLite may round the last one wrong.
    """
    whole = f"CAST({column} AS INTEGER)"
    exact = f"abs({column}) >= 1.0 / {1 << 10} AND abs({column}) < {1 << 62}"

    def array(chunk: _Chunk, before: bytes, behind: bytes) -> pa.Array:
        integers = _parse(before, pa.int64())
        # A null is 1 meanwhile, which needs no second look.
        values = np.asarray(integers.fill_null(1)).astype(np.float64)
        values += np.asarray(_parse(behind, pa.int64()).fill_null(0)) * 2.0**-62
        inexact = (np.abs(values) < 2.0**-10) | (np.abs(values) >= 2.0**62)
        if inexact.any():
            (printed,) = chunk.ask(_lines(f"printf('%!.20g', {column})"), f"AND NOT ({exact})")
            values[inexact] = np.asarray(_parse(printed, pa.float64()))
        return pa.array(values, mask=np.asarray(integers.is_null())).cast(kind.arrow)

    return _Form((_lines(whole), _lines(f"CAST(({column} - {whole}) * {1 << 62} AS INTEGER)")), array)


def _lines(number: str) -> str:
    return f"CAST(group_concat(ifnull({number}, ''), '\n') AS BLOB)"


def _parse(lines: bytes, kind: pa.DataType) -> pa.Array:
    table = csv.read_csv(
        pa.BufferReader(lines + b"\n"),
        read_options=csv.ReadOptions(column_names=["n"], use_threads=False, block_size=len(lines) + 2),
        parse_options=csv.ParseOptions(ignore_empty_lines=False, quote_char=False),
        convert_options=csv.ConvertOptions(column_types={"n": kind}),
    )
    return table.column(0).combine_chunks()


def _texts(column: str, kind: FieldType) -> _Form:
    def array(chunk: _Chunk, data: bytes, present: int) -> pa.Array:
        texts = pc.split_pattern(_cut(data, np.array([0, len(data)], np.int32), kind), _SEPARATOR).values
        missing = np.asarray(pc.equal(texts, _NULL)) if present < chunk.count else None
        if len(texts) != chunk.count or (missing is not None and missing.sum() != chunk.count - present):
            return _by_length(column, kind).read(chunk)
        return _typed(texts, kind, missing)

    joined = f"CAST(group_concat(ifnull({column}, '{_NULL}'), '{_SEPARATOR}') AS BLOB)"
    return _Form((joined, f"count({column})"), array)


def _by_length(column: str, kind: FieldType) -> _Form:
    """Whatever they hold: all as one, and the length of each. That is an Arrow array's data and its offsets."""

    def array(chunk: _Chunk, data: bytes | None, lengths: str) -> pa.Array:
        sizes = np.fromstring(lengths, dtype=np.int32, sep=",")
        offsets = np.zeros(chunk.count + 1, np.int32)
        np.cumsum(np.maximum(sizes, 0), out=offsets[1:])
        return _typed(_cut(data or b"", offsets, kind), kind, sizes < 0)

    lengths = f"ifnull(length(CAST({column} AS BLOB)), -1)"
    return _Form((f"CAST(group_concat({column}, '') AS BLOB)", f"group_concat({lengths})"), array)


def _alike(column: str, kind: FieldType, width: int) -> _Form:
    """Texts that are null or of one length, unless somebody else wrote others."""
    by_length = _by_length(column, kind)

    def array(chunk: _Chunk, data: bytes | None) -> pa.Array:
        if data is None:
            return pa.nulls(chunk.count, kind.arrow)
        if len(data) != chunk.count * width:
            return by_length.read(chunk)
        return _typed(_cut(data, np.arange(0, len(data) + 1, width, dtype=np.int32), kind), kind)

    return _Form(by_length.parts[:1], array)


def _cut(data: bytes, offsets: np.ndarray[Any, Any], kind: FieldType) -> pa.Array:
    """Return what is between each two offsets."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary() if kind.base == "bytes" else pa.string(), len(offsets) - 1, buffers)


def _typed(texts: pa.Array, kind: FieldType, missing: np.ndarray[Any, Any] | None = None) -> pa.Array:
    if missing is not None and missing.any():
        texts = pc.if_else(missing, None, texts)
    if texts.type == kind.arrow:
        return texts
    # Times of publication repeat: each is parsed once.
    distinct = texts.dictionary_encode()
    return distinct.dictionary.cast(kind.arrow).take(distinct.indices)
