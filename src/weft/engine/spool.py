"""Rows kept in a file until all of them are there.

A SQLite or DuckDB file has one writer. A load that held it while it waits for a slow source would keep every publisher
out: so the rows come first, and the transaction lasts as long as writing takes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import IO

import pyarrow as pa

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")


def read_first(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the same batches, all of which have been read when this returns."""
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile(prefix="weft-spool-"))
        with pa.ipc.new_stream(file, schema, options=_COMPRESSED) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.seek(0)
        return _read_back(stack.pop_all(), file)


def _read_back(stack: ExitStack, file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    with stack, pa.ipc.open_stream(file) as reader:
        yield from reader
