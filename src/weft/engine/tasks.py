"""What runs inside Spark's tasks. Imported there by name: nothing here may hold state of the driver's."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from weft.columns import canonical_batch
from weft.engine.progress import Counter
from weft.engine.readers import RowReader
from weft.engine.spool import read_first
from weft.spark_support import outcome
from weft.systems.load import Counts, Load
from weft.systems.sql import staging
from weft.systems.sql.commit import Batches, CarryOut, commit
from weft.systems.sql.prefetch import prefetch
from weft.systems.sql.tables import SqlTables

RESULT = "outcome binary"
Unpack = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
Work = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@functools.cache
def freeze_imports() -> None:
    """Called by whatever runs in a worker. After each task Spark looks through all objects for garbage: without what
    is imported by now, that takes 50 ms less."""
    gc.collect()
    gc.freeze()


def copy(reader: RowReader, tables: SqlTables, load: Load, counter: Counter | None, part: Any) -> bytes:
    """Read and write in one task, without a row that crosses the JVM: the whole transaction of the load."""

    def batches() -> Iterable[pa.RecordBatch]:
        rows = reader.read(part)
        return rows if counter is None else counter.counted(rows)

    freeze_imports()
    return outcome.of(lambda: _commit(tables, load, reader.schema, batches()), finally_=tables.close)


def _commit(
    tables: SqlTables,
    load: Load,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    carry_out: CarryOut = commit,
) -> Counts:
    if tables.one_writer:
        batches = read_first(schema, (canonical_batch(batch, schema) for batch in batches))
    return carry_out(tables, load, Batches(schema, batches))


def read(reader: RowReader, work: Callable[[int, Iterable[pa.RecordBatch]], Any], numbered: tuple[int, Any]) -> bytes:
    """Return what `work` makes of a part's number and batches."""
    freeze_imports()
    number, part = numbered
    return outcome.of(lambda: work(number, reader.read(part)))


def write_frame(
    frame: Any,
    tables: SqlTables,
    load: Load,
    schema: pa.Schema,
    counter: Counter | None = None,
    unpack: Unpack | None = None,
    carry_out: CarryOut = commit,
) -> Counts:
    """Write the rows of a DataFrame in one transaction of one task."""

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def canonical() -> Iterator[pa.RecordBatch]:
            rows = (canonical_batch(batch, schema) for batch in batches)
            return rows if counter is None else counter.counted(rows)

        freeze_imports()
        result = outcome.of(
            lambda: _commit(tables, load, schema, prefetch(canonical), carry_out), finally_=tables.close
        )
        yield pa.RecordBatch.from_pydict({"outcome": [result]})

    tables.close()
    results = frame.coalesce(1).mapInArrow(unpacking(unpack, write), RESULT).collect()
    if not results:
        # Spark calls no task for a query without partitions.
        return carry_out(tables, load, Batches(schema, []))
    return outcome.unpack(bytes(results[0][0]))  # type: ignore[no-any-return]


def unpacking(unpack: Unpack | None, work: Work) -> Work:
    """Return work that unpacks its rows first, where `unpack` is given."""
    return work if unpack is None else lambda batches: work(unpack(batches))


def stage(tables: SqlTables, table: str, schema: pa.Schema) -> Work:
    """Return a function for `mapInArrow` over many partitions: each attempt puts its rows into the staging table.

    Spark hands the driver one result a partition, of the attempt that counts; what the others wrote is never moved.
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def canonical() -> Iterator[pa.RecordBatch]:
            return (canonical_batch(batch, schema) for batch in batches)

        freeze_imports()
        result = outcome.of(lambda: staging.fill(tables, table, schema, prefetch(canonical)), finally_=tables.close)
        yield pa.RecordBatch.from_pydict({"outcome": [result]})

    return run
