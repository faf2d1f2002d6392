"""Files of a folder or bucket as a target of loads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from weft.spark_support.folder import folder_for
from weft.systems.load import Counts, Load
from weft.systems.objects import sink, source
from weft.systems.objects.manifest import Manifest
from weft.systems.objects.paths import table_path
from weft.systems.target import ArrowRows, PutAside, SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class FileTarget(SparkTarget):
    """Writes the files of tables. They are never changed once written."""

    modes = sink.MODES

    def check(self, load: Load) -> None:
        sink.refuse(load)
        super().check(load)

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, put_aside: PutAside | None = None) -> Counts:
        return sink.write(frame, self.connection, load, spark=spark)

    def copy(self, rows: ArrowRows, load: Load, spark: SparkSession) -> Counts | None:
        return sink.copy(rows, self.connection, load, spark=spark)

    def has(self, load: Load, spark: SparkSession) -> bool:
        return sink.has(self.connection, load, spark=spark)

    def columns(self, load: Load, spark: SparkSession) -> list[str] | None:
        self.connection.configure(spark)
        path = table_path(self.connection.root, load.schema, load.table)
        state = Manifest(folder_for(spark, path), path).state()
        return None if state is None else [each["name"] for each in json.loads(state.schema or "{}").get("fields", ())]

    def read(self, path: str, spark: SparkSession) -> DataFrame:
        return source.read(spark, self.connection, path)

    def stored(self, load: Load, spark: SparkSession) -> DataFrame | None:
        return source.read_table(spark, table_path(self.connection.root, load.schema, load.table))
