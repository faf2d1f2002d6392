"""A range of a SQLite table as Arrow, without a Python object per value.

SQLite itself concatenates each column of a chunk: texts as one text plus a list of their lengths, which are an Arrow
array's data and offsets;
numbers as a comma-separated list. sqlite3 lets go of the interpreter's lock meanwhile, so chunks are read in
threads. The ADBC driver for SQLite is not
used: it brings a SQLite of its own, and two of those in one process drop each other's file locks.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from weft.errors import SchemaError
from weft.types import FieldType

if TYPE_CHECKING:
    from weft.systems.sql.log import SqlLog
    from weft.systems.sqlite.store import SqliteStore

_FIRST_CHUNK = 4_096
_MAX_CHUNK = 65_536
# Some of these are in memory at once: what the threads work on and what waits for the reader.
_CHUNK_BYTES = 16 * 1024 * 1024


def batches(
    store: SqliteStore, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
) -> Iterator[pa.RecordBatch]:
    """The record batches of `after < offset <= upto`, in order."""
    workers = 1 if store.in_memory else min(4, os.cpu_count() or 1)
    size = _FIRST_CHUNK
    waiting: deque[Future[tuple[list[pa.RecordBatch], int]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="weft-arrow") as pool:
        while waiting or after < upto:
            while after < upto and len(waiting) <= workers:
                end = min(after + size, upto)
                waiting.append(pool.submit(_read, store, log, after, end, columns))
                after = end
            done, read = waiting.popleft().result()
            rows = sum(batch.num_rows for batch in done)
            if rows:
                size = max(1, min(_MAX_CHUNK, size * 4, _CHUNK_BYTES * rows // max(read, 1)))
            yield from done


def _read(
    store: SqliteStore, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
) -> tuple[list[pa.RecordBatch], int]:
    parts = [_part(store.quote(name), kind) for name, kind in columns.items()]
    sql = f"SELECT count(*), {', '.join(parts) or 'NULL'} FROM {log.table} WHERE {log.rowid} > ? AND {log.rowid} <= ?"
    try:
        with store.session("read") as session:
            found = session.run(sql, (after, upto)).fetchone()
            count = found[0]
            if not count:
                return [], 0
            at, arrays = 1, []
            for name, kind in columns.items():
                text, lengths_or_present = found[at], found[at + 1]
                at += 2
                if kind.base in _NUMBERS:
                    nulls = None
                    if lengths_or_present < count:
                        nulls = _nulls(session, store.quote(name), log, after, upto)
                    arrays.append(_numbers(text, kind, nulls))
                else:
                    arrays.append(_texts(text, lengths_or_present, kind))
    except SchemaError:
        # SQLite's limit for one value, a billion bytes: read half as much at a time.
        if upto - after <= 1:
            raise
        middle = (after + upto) // 2
        left, left_bytes = _read(store, log, after, middle, columns)
        right, right_bytes = _read(store, log, middle, upto, columns)
        return left + right, left_bytes + right_bytes
    read = sum(len(value) for value in found[1:] if isinstance(value, (str, bytes)))
    if not columns:
        return [pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))], 0
    return [pa.record_batch(arrays, names=list(columns))], read


_NUMBERS = ("bool", "int32", "int64", "float32", "float64")


def _part(column: str, kind: FieldType) -> str:
    if kind.base in ("float32", "float64"):
        # '%!.17g' is what every double needs to be read back as itself.
        return f"group_concat(printf('%!.17g', coalesce({column}, 0))), count({column})"
    if kind.base in _NUMBERS:
        return f"group_concat(coalesce({column}, 0)), count({column})"
    return f"CAST(group_concat({column}, '') AS BLOB), group_concat(coalesce(length(CAST({column} AS BLOB)), -1))"


def _nulls(session: Any, column: str, log: SqlLog, after: int, upto: int) -> np.ndarray[Any, Any]:
    text = session.row(
        f"SELECT CAST(group_concat({column} IS NULL, '') AS BLOB) FROM {log.table} "
        f"WHERE {log.rowid} > ? AND {log.rowid} <= ?",
        (after, upto),
    )[0]
    mask: np.ndarray[Any, Any] = np.frombuffer(text, np.uint8) == ord("1")
    return mask


def _numbers(text: str, kind: FieldType, nulls: np.ndarray[Any, Any] | None) -> pa.Array:
    dtype = np.float64 if kind.base.startswith("float") else np.int64
    values = np.fromstring(text, dtype=dtype, sep=",")
    narrow: dict[str, Callable[[Any], Any]] = {
        "bool": lambda v: v.astype(bool),
        "int32": lambda v: v.astype(np.int32),
        "float32": lambda v: v.astype(np.float32),
    }
    if kind.base in narrow:
        values = narrow[kind.base](values)
    return pa.array(values, kind.arrow, mask=nulls)


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
    binary = kind.base == "bytes"
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(data or b"")]
    array = pa.Array.from_buffers(pa.binary() if binary else pa.string(), count, buffers, nulls)
    return array if array.type == kind.arrow else array.cast(kind.arrow)
