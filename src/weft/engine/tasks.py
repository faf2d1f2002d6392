"""What runs inside Spark's tasks. Imported there by name: nothing here may hold state of the driver's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from weft.columns import canonical_batch
from weft.engine import outcome
from weft.engine.readers import Reader
from weft.systems.load import Load
from weft.systems.sql.commit import Batches, commit
from weft.systems.sql.tables import SqlTables

# How many batches a reader may be ahead of the writer.
_AHEAD = 4

RESULT = "outcome binary"


def copy(reader: Reader, tables: SqlTables, load: Load, part: Any) -> bytes:
    """Read and write in one task, without a row that crosses the JVM: the whole transaction of the load."""
    return outcome.of(
        lambda: commit(tables, load, Batches(reader.schema, ahead(reader.read(part)))), finally_=tables.close
    )


def write(tables: SqlTables, load: Load, schema: pa.Schema) -> Callable[[Iterable[pa.RecordBatch]], Iterator[Any]]:
    """A function for `mapInArrow` over the one partition of a DataFrame: its rows in one transaction."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        canonical = (canonical_batch(batch, schema) for batch in batches)
        found = outcome.of(lambda: commit(tables, load, Batches(schema, ahead(canonical))), finally_=tables.close)
        yield pa.RecordBatch.from_pydict({"outcome": [found]})

    return run


def ahead(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches, read by a thread of their own while the caller still works on those before."""
    waiting: queue.Queue[Any] = queue.Queue(_AHEAD)
    stopped = threading.Event()

    def put(item: object) -> bool:
        while not stopped.is_set():
            try:
                waiting.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=run, name="weft-read-ahead", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
