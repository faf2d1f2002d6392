"""What runs inside Spark's tasks. Imported there by name: nothing here may hold state of the driver's."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from weft.columns import canonical_batch
from weft.engine.progress import Counter
from weft.engine.readers import RowReader, read_first
from weft.spark_support import outcome
from weft.spark_support.sessions import numbered
from weft.systems.load import Counts, Load
from weft.systems.sql import staging
from weft.systems.sql.commit import BatchedRows, CarryOut, commit
from weft.systems.sql.prefetch import prefetch
from weft.systems.sql.tables import SqlTables

Unpack = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@functools.cache
def freeze_imports() -> None:
    """Called by whatever runs in a worker. After each task Spark looks through all objects for garbage: without what
    is imported by now, that takes 50 ms less."""
    gc.collect()
    gc.freeze()


def copy(reader: RowReader, tables: SqlTables, load: Load, counter: Counter | None, part: Any) -> bytes:
    """Read and write in one task, without a row that crosses the JVM: the whole transaction of the load."""
    freeze_imports()
    return outcome.of(lambda: copied(reader, tables, load, counter, part), finally_=tables.close)


def copied(reader: RowReader, tables: SqlTables, load: Load, counter: Counter | None, part: Any) -> Counts:
    """Do the same in any process."""
    rows = reader.read(part)
    return _commit(tables, load, reader.schema, rows if counter is None else counter.counted(rows))


def _commit(
    tables: SqlTables,
    load: Load,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    carry_out: CarryOut = commit,
) -> Counts:
    if tables.one_writer:
        batches = read_first(schema, (canonical_batch(batch, schema) for batch in batches))
    return carry_out(tables, load, BatchedRows(schema, batches))


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

    def write(batches: Iterable[pa.RecordBatch]) -> Counts:
        counted = batches if counter is None else counter.counted(batches)
        return _commit(tables, load, schema, counted, carry_out)

    tables.close()
    results = _written(frame.coalesce(1), tables, schema, write, unpack)
    # Spark calls no task for a query without partitions.
    return results[0] if results else carry_out(tables, load, BatchedRows(schema, []))


def stage_frame(frame: Any, tables: SqlTables, table: str, schema: pa.Schema, unpack: Unpack | None) -> list[Any]:
    """Put the rows of each partition into the staging table, and return what each attempt that counts put there.

    Spark hands the driver one result a partition, of the attempt that counts; what the others wrote is never moved."""
    return _written(frame, tables, schema, functools.partial(staging.fill, tables, table, schema), unpack)


def _written(
    frame: Any,
    tables: SqlTables,
    schema: pa.Schema,
    write: Callable[[Iterable[pa.RecordBatch]], Any],
    unpack: Unpack | None,
) -> list[Any]:
    """Return what `write` returns for the rows of each partition, which are unpacked first where `unpack` is given."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = batches if unpack is None else unpack(batches)

        def canonical() -> Iterator[pa.RecordBatch]:
            return (canonical_batch(batch, schema) for batch in rows)

        freeze_imports()
        result = outcome.of(lambda: write(prefetch(canonical)), finally_=tables.close)
        yield pa.RecordBatch.from_pydict({"outcome": [result]})

    plain = numbered(frame) if unpack is None else frame
    return [outcome.unpack(bytes(each)) for (each,) in plain.mapInArrow(run, "outcome binary").collect()]
