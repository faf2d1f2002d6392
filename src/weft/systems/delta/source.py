"""Delta tables as DataFrames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.errors import NotFoundError
from weft.systems.base import Connection
from weft.systems.delta.table import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FUTURE_VERSIONS = "spark.databricks.delta.changeDataFeed.timestampOutOfRange.enabled"


def read(spark: SparkSession, connection: Connection, table: str, schema: str | None = None) -> DataFrame:
    """Return the rows of a table as they are at its newest commit."""
    connection.configure(spark)
    delta_table = DeltaTable(spark, connection, schema, table)
    if delta_table.schema() is None:
        name = f"{schema}.{table}" if schema else table
        raise NotFoundError(
            f"There is no Delta table {name!r} in {connection.label} ({connection.target}).",
            hint="A table is the folder of its name there, with a folder _delta_log in it.",
        )
    return delta_table.read()


def follow(
    spark: SparkSession, connection: Connection, table: str, max_files: int, start: str = "earliest"
) -> DataFrame:
    """Return a streaming DataFrame of what is in a table, and then of what is added to it; or of what was added by a
    version and since, or of what is added from now on ("latest")."""
    delta_table = DeltaTable(spark, connection, None, table)
    read(spark, connection, table)  # refuses one that is not there
    if start == str(delta_table.version() + 1):
        # Delta knows "latest", which is another version whenever it is asked, and else refuses one that is to come.
        spark.conf.set(_FUTURE_VERSIONS, "true")
    reader = spark.readStream.format("delta").option("maxFilesPerTrigger", max_files)
    return (reader if start == "earliest" else reader.option("startingVersion", start)).load(delta_table.path)
