"""Spark DataFrames of the input of a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.columns import hint_of
from weft.engine import inputs, queries, session, spark_io
from weft.engine.inputs import Input
from weft.engine.reader_frames import from_reader
from weft.engine.readers import RowReader, SqlReader, reader_for
from weft.errors import DeclarationError, did_you_mean, listed
from weft.project import current
from weft.spark_support import outcome, sessions
from weft.spark_support.columns import struct_of
from weft.spark_support.lazy import F
from weft.spark_support.voids import with_element_types
from weft.systems.base import Connection
from weft.systems.target import Documents

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
    if source is not None:
        understood = inputs.for_connection(understood, current().connection(source))
    reader = reader_for(understood, source, None, partition_by)
    if columns is not None and isinstance(reader, SqlReader):
        reader = reader.selecting(columns)
    frame: DataFrame = of(understood, reader, source, None, partitions)
    if columns is None:
        return frame
    # `a.b` is the field `b` of a struct only where no column is called so.
    return frame.select(*(sessions.quoted(name) if name in frame.columns else name for name in columns))


def of(
    data: Input,
    reader: RowReader | None,
    source: str | Connection | None,
    transform_sql: str | None = None,
    partitions: int = 1,
    documents: Documents | None = None,
) -> Any:
    """Return the DataFrame of a load's input, or the result of Spark SQL over it. `documents`: see
    `SparkTarget.read_documents`."""
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
        elif isinstance(data, inputs.SparkSql):
            frame = queries.frame(queries.understand(data.text, only=data.connection))
        else:
            assert isinstance(data, inputs.Files)
            with outcome.explained(f"read {data.path}"):
                frame = spark_io.read(spark, data.path, source, documents)
    return with_element_types(frame) if transform_sql is None else transformed(frame, transform_sql)


def from_memory(spark: Any, rows: inputs.Memory) -> Any:
    """Return a DataFrame of rows that this process has."""
    # PySpark makes no lists of a column without a chunk.
    batches = list(rows.batches) or [pa.RecordBatch.from_pylist([], rows.schema)]
    frame = spark.createDataFrame(pa.Table.from_batches(batches, rows.schema))
    if not any(map(hint_of, rows.schema)):
        return frame
    hints = {each.name: each.metadata for each in struct_of(rows.schema)}
    return frame.select(*(F.col(sessions.quoted(name)).alias(name, metadata=each) for name, each in hints.items()))


def transformed(frame: Any, sql: str, table: str = "source", option: str = "transform_sql") -> Any:
    """Return the result of Spark SQL over the table `source`, or another one; errors call it by its option."""
    from pyspark.errors import AnalysisException

    with outcome.explained(f"understand {option}"), sessions.quoted_names(frame.sparkSession):
        frame.createOrReplaceTempView(table)
        try:
            return with_element_types(_without_variants(frame.sparkSession.sql(sql)))
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


def _without_variants(frame: Any) -> Any:
    """Return a DataFrame with JSON in the place of variants, of which Arrow has no more than their bytes."""
    from pyspark.sql.types import VariantType

    variants = {each.name for each in frame.schema if isinstance(each.dataType, VariantType)}
    if not variants:
        return frame
    names = [(sessions.quoted(name), name) for name in frame.columns]
    return frame.select(*(F.to_json(quoted).alias(name) if name in variants else quoted for quoted, name in names))
