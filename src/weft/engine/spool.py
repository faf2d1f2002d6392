"""Rows kept in a file until all of them are there.

A SQLite or DuckDB file has one writer. A load that held it while it waits for a slow source would keep every publisher
out: so the rows come first, and the transaction lasts as long as writing takes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator

import pyarrow as pa

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")


def spooled(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches, all of which were read before the first one comes."""
    with tempfile.TemporaryFile(prefix="weft-spool-") as file:
        with pa.ipc.new_stream(file, schema, options=_COMPRESSED) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.seek(0)
        with pa.ipc.open_stream(file) as reader:
            yield from reader


def read_first(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """`spooled`, begun: when this returns, everything has been read."""
    found = spooled(schema, batches)
    first = next(found, None)

    def rest() -> Iterator[pa.RecordBatch]:
        try:
            if first is not None:
                yield first
                yield from found
        finally:
            found.close()  # type: ignore[attr-defined]

    return rest()
