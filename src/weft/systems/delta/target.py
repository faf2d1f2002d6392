"""Delta tables as a target of loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.errors import NotFoundError
from weft.spark_support.lazy import F
from weft.systems.delta import changes, copy, sink, source
from weft.systems.delta.table import DeltaTable
from weft.systems.load import IS_CURRENT, MODES, VALID_FROM, VALID_TO, Counts, Load
from weft.systems.target import ArrowRows, PutAside, SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class DeltaTarget(SparkTarget):
    """Writes Delta tables: each load is one commit."""

    modes = MODES
    keeps_columns = True

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, put_aside: PutAside | None = None) -> Counts:
        return sink.write(frame, self.connection, load, spark=spark, put_aside=put_aside)

    def copy(self, rows: ArrowRows, load: Load, spark: SparkSession) -> Counts | None:
        return copy.copy(rows, self.connection, load, spark=spark)

    def has(self, load: Load, spark: SparkSession) -> bool:
        self.connection.configure(spark)
        table = DeltaTable(spark, self.connection, load.schema, load.table)
        return table.version() >= 0 and table.has(load)

    def columns(self, load: Load, spark: SparkSession) -> list[str] | None:
        try:
            return list(source.read(spark, self.connection, load.table, load.schema).columns)
        except NotFoundError:
            return None

    def read(self, path: str, spark: SparkSession) -> DataFrame:
        return source.read(spark, self.connection, path)

    def stored(self, load: Load, spark: SparkSession) -> DataFrame | None:
        table = DeltaTable(spark, self.connection, load.schema, load.table)
        columns = table.schema()
        if columns is None:
            return None
        table.check(load, columns)
        return table.read()

    def changes(self, frame: DataFrame, stored: DataFrame | None, load: Load) -> Counts:
        is_scd2 = load.mode == "scd2"
        if stored is None:
            own = {VALID_FROM: "timestamp", VALID_TO: "timestamp", IS_CURRENT: "boolean"} if is_scd2 else {}
            stored = frame.limit(0).withColumns({name: F.lit(None).cast(kind) for name, kind in own.items()})
        (row,) = changes.changed_rows(frame, stored, load).agg(*changes.change_counts(load)).collect()
        inserted, versions, updated, deleted, old = row
        return Counts(inserted=inserted, updated=versions + updated, deleted=deleted + old)
