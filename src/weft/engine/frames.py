"""Spark DataFrames of the input of a load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.engine import files, inputs, session
from weft.engine.inputs import Input
from weft.engine.readers import RowReader, SqlReader, reader_for
from weft.errors import DeclarationError, did_you_mean, listed
from weft.spark_support import outcome, sessions
from weft.systems.base import Connection
from weft.systems.sql.tables import SqlTables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# In turns: a session keeps every source that was registered, and a frame needs the name of its own only to be made.
_numbers = itertools.cycle(range(1000))


def read(
    data: object,
    *,
    source: str | Connection | None = None,
    columns: Sequence[str] | None = None,
    partitions: int = 1,
    partition_by: str | None = None,
) -> DataFrame:
    """Return a Spark DataFrame of what a load would read: SQL (run by `source`), a stream, a path, a frame, rows.

    `columns` are the ones to read. With `partitions` the tasks read that many parts at once, where the source can show
    them all one moment: streams by their offsets, PostgreSQL by ranges of the column `partition_by`.
    """
    understood = inputs.understand(data, has_source=source is not None)
    reader = reader_for(understood, source, None, partition_by)
    if columns is not None and isinstance(reader, SqlReader):
        reader = reader.selecting(columns)
    frame: DataFrame = of(understood, reader, source, None, partitions)
    return frame if columns is None else frame.select(*columns)


def of(
    data: Input,
    reader: RowReader | None,
    source: str | Connection | None,
    transform_sql: str | None = None,
    partitions: int = 1,
) -> Any:
    """Return the DataFrame of a load's input, or the result of Spark SQL over it."""
    if isinstance(data, inputs.Frame):
        frame = data.frame
    else:
        spark = session.spark()
        if transform_sql is not None:
            # A session of its own for the name `source`: two loads at once must not see each other's.
            spark = spark.newSession()
        if reader is not None:
            session.refuse_one_host(reader.one_host, "The source of this load")
            frame = from_reader(spark, reader, partitions)
        elif isinstance(data, inputs.Memory):
            frame = from_memory(spark, data)
        else:
            assert isinstance(data, inputs.Files)
            with outcome.explained(f"read {data.path}"):
                frame = files.read(spark, data.path, source)
    return frame if transform_sql is None else transformed(frame, transform_sql)


def from_reader(spark: Any, reader: RowReader, parts: int = 1) -> Any:
    """Return a DataFrame whose tasks read rows elsewhere as Arrow; the database applies the filters that it can."""
    from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
    from pyspark.sql.pandas.types import from_arrow_schema

    from weft.engine.tasks import freeze_imports

    schema = from_arrow_schema(reader.schema, prefer_timestamp_ntz=True)
    # Here, not in `partitions`: that runs in a process which ends before the parts are read, and with it a snapshot.
    planned, held = reader.parts(parts)

    class Part(InputPartition):
        def __init__(self, value: Any) -> None:
            self.value = value

    class PartReader(DataSourceReader):
        def __init__(self) -> None:
            freeze_imports()
            self.conditions: list[str] = []

        def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
            for each in filters:
                sql = _condition(each, reader) if isinstance(reader, SqlReader) else None
                if sql is None:
                    yield each
                else:
                    self.conditions.append(sql)

        def partitions(self) -> list[InputPartition]:
            return [Part(value) for value in planned]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            freeze_imports()
            return reader.read(partition.value, self.conditions)

    frame = sessions.read_source(spark, f"weft_{next(_numbers)}", schema, PartReader)
    reader.close()
    if held is not None:
        # Until Spark stops: frames made of this one do not refer to it, so nobody knows when the last is done.
        session.at_stop(held.close)
    return frame


def from_memory(spark: Any, rows: inputs.Memory) -> Any:
    """Return a DataFrame of rows that this process has."""
    return spark.createDataFrame(pa.Table.from_batches(list(rows.batches), rows.schema))


def transformed(frame: Any, sql: str, table: str = "source", option: str = "transform_sql") -> Any:
    """Return the result of Spark SQL over the table `source`, or another one; errors call it by its option."""
    from pyspark.errors import AnalysisException

    with outcome.explained(f"understand {option}"), sessions.quoted_names(frame.sparkSession):
        frame.createOrReplaceTempView(table)
        try:
            return frame.sparkSession.sql(sql)
        except AnalysisException as error:
            parameters = error.getMessageParameters() or {}
            name = parameters.get("objectName", "").strip("`")
            if str(error.getCondition()).startswith("UNRESOLVED_COLUMN") and f'"{name}"' in sql:
                raise DeclarationError(
                    f'{option} has "{name}", which is not a column of its tables.',
                    hint=f"In double quotes is a name; a text is in single quotes: '{name}'.",
                ) from None
            if error.getCondition() == "UNRESOLVED_ROUTINE":
                called = parameters.get("routineName", "").strip("`")
                known = [row[0] for row in frame.sparkSession.sql("SHOW FUNCTIONS").collect()]
                raise DeclarationError(
                    f"{option} calls a function that is not there: {called}.",
                    hint=did_you_mean(called.lower(), known, "A function of your own is named in udfs."),
                ) from None
            if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
                raise
            missing = parameters.get("relationName", "")
            views = frame.sparkSession.sql("SHOW VIEWS").collect()
            known = sorted(each.viewName for each in views if each.isTemporary)
            raise DeclarationError(
                f"{option} reads a table that is not there: {missing}.",
                hint=listed(
                    missing.strip("`"), known, f"It can read: {', '.join(known)}. The table {table} has the rows."
                ),
            ) from None


def _condition(pushed: Any, reader: SqlReader) -> str | None:
    """The condition in SQL, or `None` where the database might mean something else by it: then Spark applies it."""
    kind = type(pushed).__name__
    if kind == "Not":
        inner = _condition(pushed.child, reader)
        return None if inner is None else f"NOT ({inner})"
    path: tuple[str, ...] = getattr(pushed, "attribute", ())
    if len(path) != 1 or path[0] not in reader.schema.names:
        return None
    name, field = reader.tables.quote(path[0]), reader.schema.field(path[0])
    if kind in ("IsNull", "IsNotNull"):
        return f"{name} IS {'NOT ' if kind == 'IsNotNull' else ''}NULL"
    if kind in sessions.OPERATORS:
        value = _literal(pushed.value, field, reader.tables)
        return None if value is None else f"{name} {sessions.OPERATORS[kind]} {value}"
    if kind == "In":
        values = [_literal(value, field, reader.tables) for value in pushed.value]
        return None if not values or None in values else f"{name} IN ({', '.join(map(str, values))})"
    return None


def _literal(value: object, field: pa.Field, tables: SqlTables) -> str | None:
    """Return a literal, for the types whose values the database compares as Spark does.

    Not texts: they are compared by collations, which may ignore case or trailing spaces.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and pa.types.is_integer(field.type):
        return str(value)
    if not tables.native_decimals:
        return None
    if isinstance(value, Decimal) and pa.types.is_decimal(field.type) and value.is_finite():
        return f"{value:f}"
    if isinstance(value, date) and not isinstance(value, datetime) and pa.types.is_date32(field.type):
        return f"DATE '{value.isoformat()}'"
    return None
