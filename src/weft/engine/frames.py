"""Spark DataFrames of what a load is given, and into what is not a SQL database."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from weft.engine import given as kinds
from weft.engine import session
from weft.engine.readers import Reader, SqlReader
from weft.errors import DeclarationError
from weft.project import current
from weft.systems.base import Connection

_numbers = itertools.count()


def from_reader(spark: Any, reader: Reader, parts: int = 1) -> Any:
    """A DataFrame whose tasks read rows elsewhere as Arrow, with the filters that the database can apply itself."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
    from pyspark.sql.pandas.types import from_arrow_schema

    from weft.engine.filters import condition

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
            return reader.read(partition.value, self.conditions)

    class Source(DataSource):
        """Defined here, so that it travels by value, the reader inside: as an option, a plan would show its secrets."""

        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> Any:
            return schema

        def reader(self, schema: Any) -> DataSourceReader:
            return Rows()

    name = f"weft_{next(_numbers)}"
    spark.dataSource.register(Source)
    frame = spark.read.format(name).load()
    if held is not None:
        # Until Spark stops: frames made of this one do not refer to it, so nobody can tell when the last is done.
        session.at_stop(held.close)
    return frame


def from_memory(spark: Any, given: kinds.Memory) -> Any:
    """A DataFrame of rows that this process has."""
    return spark.createDataFrame(pa.Table.from_batches(list(given.batches), given.schema))


def from_files(spark: Any, path: str, source: str | Connection | None) -> Any:
    """A DataFrame of files, or of a Delta table, on this machine or in an object store."""
    raise DeclarationError(f"Files are not read yet: {path}.")


def transformed(frame: Any, sql: str) -> Any:
    """The result of Spark SQL over the table `source`."""
    frame.createOrReplaceTempView("source")
    return frame.sparkSession.sql(sql)


def write(frame: Any, connection: Connection, load: Any) -> Any:
    """Write a DataFrame to files or to a Delta table."""
    raise DeclarationError(f"{current().connection(connection).label} cannot be written yet.")
