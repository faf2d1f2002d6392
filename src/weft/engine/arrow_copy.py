"""Rows that are Arrow where they are read, for targets that write files of them there: no row crosses the JVM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.engine import inputs, session, tasks
from weft.engine.inputs import Input
from weft.engine.readers import RowReader, opened_parts
from weft.spark_support import outcome
from weft.systems.target import ArrowRows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Work = Callable[[int, Iterable[pa.RecordBatch]], Any]


def rows_of(data: Input, reader: RowReader | None) -> ArrowRows | None:
    """Return the input of a load as such rows; `None` for what only Spark can read."""
    if reader is not None:
        reader.close()
        return _RowsElsewhere(reader)
    return _RowsHere(data) if isinstance(data, inputs.Memory) else None


@dataclass(frozen=True)
class _RowsElsewhere:
    """Rows that tasks read."""

    reader: RowReader

    @property
    def schema(self) -> pa.Schema:
        return self.reader.schema

    @property
    def columns(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(self.schema, prefer_timestamp_ntz=True)

    def each_part(self, work: Work) -> list[Any]:
        context = session.spark().sparkContext
        job = functools.partial(tasks.read, self.reader, work)
        with opened_parts(self.reader, context.defaultParallelism) as parts:
            results = context.parallelize(list(enumerate(parts)), len(parts)).map(job).collect()
        return [outcome.unpack(each) for each in results]


@dataclass(frozen=True)
class _RowsHere:
    """Rows that this process has."""

    rows: inputs.Memory

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    @property
    def columns(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        # As `createDataFrame` does.
        is_local = session.spark().conf.get("spark.sql.timestampType") == "TIMESTAMP_NTZ"
        return from_arrow_schema(self.schema, prefer_timestamp_ntz=is_local)

    def each_part(self, work: Work) -> list[Any]:
        return [work(0, self.rows.batches)]
