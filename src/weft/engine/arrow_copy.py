"""Rows that are Arrow where they are read, for targets that write files of them there: no row crosses the JVM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.engine import inputs, session, tasks
from weft.engine.inputs import Input
from weft.engine.readers import Reader, SqlReader
from weft.spark_support import outcome
from weft.systems.target import ArrowRows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Work = Callable[[int, Iterable[pa.RecordBatch]], Any]


def rows_of(given: Input, reader: Reader | None) -> ArrowRows | None:
    """What a load was given as such rows; `None` for what only Spark can read."""
    if reader is not None:
        if isinstance(reader, SqlReader):
            # What described the query. The tasks open their own.
            reader.tables.close()
        return _Elsewhere(reader)
    return _Here(given) if isinstance(given, inputs.Memory) else None


@dataclass(frozen=True)
class _Elsewhere:
    """Rows that tasks read."""

    reader: Reader

    @property
    def schema(self) -> pa.Schema:
        return self.reader.schema

    @property
    def columns(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(self.schema, prefer_timestamp_ntz=True)

    def each_part(self, work: Work) -> list[Any]:
        context = session.spark().sparkContext
        parts, held = self.reader.parts(context.defaultParallelism)
        job = functools.partial(tasks.read, self.reader, work)
        try:
            found = context.parallelize(list(enumerate(parts)), len(parts)).map(job).collect()
        finally:
            if held is not None:
                held.close()
        return [outcome.unpack(each) for each in found]


@dataclass(frozen=True)
class _Here:
    """Rows that this process has."""

    given: inputs.Memory

    @property
    def schema(self) -> pa.Schema:
        return self.given.schema

    @property
    def columns(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        # As `createDataFrame` does.
        is_local = session.spark().conf.get("spark.sql.timestampType") == "TIMESTAMP_NTZ"
        return from_arrow_schema(self.schema, prefer_timestamp_ntz=is_local)

    def each_part(self, work: Work) -> list[Any]:
        return [work(0, self.given.batches)]
