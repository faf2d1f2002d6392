"""Spark DataFrames of what a load is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.engine import files, inputs, session
from weft.engine.inputs import Input
from weft.engine.readers import Reader, SqlReader, reader_for
from weft.errors import DeclarationError
from weft.spark_support import outcome
from weft.systems.base import Connection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# In turns: a session forgets no source that it was told of, and a frame needs the name of its own only to be made.
_NAMES = 1000
_numbers = itertools.cycle(range(_NAMES))


def read(
    data: object,
    *,
    source: str | Connection | None = None,
    columns: Sequence[str] | None = None,
    partitions: int = 1,
    partition_by: str | None = None,
) -> DataFrame:
    """A Spark DataFrame of what a load would read: SQL (run by `source`), a stream, a path, a frame, rows.

    `columns` are the ones to read. With `partitions` the tasks read that many parts at once, where the source can show
    them all one moment: streams by their offsets, PostgreSQL by ranges of the column `partition_by`.
    """
    given = inputs.understand(data, has_source=source is not None)
    reader = reader_for(given, source, None, partition_by)
    if columns is not None and isinstance(reader, SqlReader):
        reader = reader.selecting(columns)
    frame: DataFrame = of(given, reader, source, None, partitions)
    return frame if columns is None else frame.select(*columns)


def of(
    given: Input,
    reader: Reader | None,
    source: str | Connection | None,
    transform_sql: str | None = None,
    partitions: int = 1,
) -> Any:
    """The DataFrame of what was given, and of Spark SQL over it."""
    if isinstance(given, inputs.Frame):
        frame = given.frame
    else:
        spark = session.spark()
        if transform_sql is not None:
            # A session of its own for the name `source`: two loads at once must not see each other's.
            spark = spark.newSession()
        if reader is not None:
            refuse_one_host(reader.one_host, "source")
            frame = from_reader(spark, reader, partitions)
        elif isinstance(given, inputs.Memory):
            frame = from_memory(spark, given)
        else:
            assert isinstance(given, inputs.Files)
            with outcome.explained(f"read {given.path}"):
                frame = files.read(spark, given.path, source)
    return frame if transform_sql is None else transformed(frame, transform_sql)


def from_reader(spark: Any, reader: Reader, parts: int = 1) -> Any:
    """A DataFrame whose tasks read rows elsewhere as Arrow, with the filters that the database can apply itself."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
    from pyspark.sql.pandas.types import from_arrow_schema

    from weft.engine.filters import condition
    from weft.engine.tasks import settle

    schema = from_arrow_schema(reader.schema, prefer_timestamp_ntz=True)
    # Here, not in `partitions`: that runs in a process which ends before the parts are read, and with it a snapshot.
    found, held = reader.parts(parts)

    class Part(InputPartition):
        def __init__(self, value: Any) -> None:
            self.value = value

    class Rows(DataSourceReader):
        def __init__(self) -> None:
            self.conditions: list[str] = []

        def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
            for each in filters:
                understood = condition(each, reader) if isinstance(reader, SqlReader) else None
                if understood is None:
                    yield each
                else:
                    self.conditions.append(understood)

        def partitions(self) -> list[InputPartition]:
            return [Part(value) for value in found]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            settle()
            return reader.read(partition.value, self.conditions)

    class Source(DataSource):
        """Defined here, so that it travels by value, the reader inside: as an option, a plan would show its secrets."""

        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> Any:
            return schema

        def reader(self, schema: Any) -> DataSourceReader:
            settle()
            return Rows()

    name = f"weft_{next(_numbers)}"
    spark.dataSource.register(Source)
    frame = spark.read.format(name).load()
    if isinstance(reader, SqlReader):
        # What described the query. The tasks open their own.
        reader.tables.close()
    if held is not None:
        # Until Spark stops: frames made of this one do not refer to it, so nobody can tell when the last is done.
        session.at_stop(held.close)
    return frame


def from_memory(spark: Any, given: inputs.Memory) -> Any:
    """A DataFrame of rows that this process has."""
    return spark.createDataFrame(pa.Table.from_batches(list(given.batches), given.schema))


def transformed(frame: Any, sql: str) -> Any:
    """The result of Spark SQL over the table `source`."""
    from pyspark.errors import AnalysisException

    with outcome.explained("understand transform_sql"):
        frame.createOrReplaceTempView("source")
        try:
            return frame.sparkSession.sql(sql)
        except AnalysisException as error:
            if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
                raise
            missing = (error.getMessageParameters() or {}).get("relationName", "")
            views = frame.sparkSession.sql("SHOW VIEWS").collect()
            known = ", ".join(sorted(each.viewName for each in views if each.isTemporary))
            raise DeclarationError(
                f"transform_sql reads a table that is not there: {missing}.",
                hint=f"It can read: {known}. The rows that it is given are the table source.",
            ) from None


def refuse_one_host(one_host: bool, role: str) -> None:
    """Refuse what only this machine can open, where Spark's tasks run on others."""
    if one_host and not session.is_local():
        raise DeclarationError(
            f"The {role} of this load is a file on this machine, which Spark's workers on a cluster cannot open.",
            hint='Use a database with a server, or run Spark here: WEFT_SPARK_MASTER="local[*]".',
        )
