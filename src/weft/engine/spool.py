"""Rows kept in a file until all of them are there.

A SQLite or DuckDB file has one writer. A load that held it while it waits for a slow source would keep every publisher
out: so the rows come first, and the transaction lasts as long as writing takes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")


def read_first(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the same batches, all of which have been read when this returns."""
    spooled = _spooled(schema, batches)
    next(spooled)  # a generator that has begun closes its file, also when nobody reads it
    return spooled


def _spooled(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
    with tempfile.TemporaryFile(prefix="weft-spool-") as file:
        with pa.ipc.new_stream(file, schema, options=_COMPRESSED) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.seek(0)
        with pa.ipc.open_stream(file) as reader:
            yield None
            yield from reader
