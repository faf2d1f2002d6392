"""Loads into files: staged where nobody looks, then made a table's in one step, once however often it is tried."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError, LoadRefusedError
from weft.systems.load import Counts, Load
from weft.systems.objects import spark as sessions
from weft.systems.objects.encoding import encoded, refuse_unwritable
from weft.systems.objects.folder import folder_for
from weft.systems.objects.formats import EXTENSIONS
from weft.systems.objects.manifest import Manifest, Staged, State
from weft.systems.objects.paths import table_path
from weft.systems.objects.rows import checked_keys, column, fitted, refuse_empty, without_void
from weft.systems.objects.source import SPARK_FORMAT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from weft.systems.objects.connection import ObjectStoreLocalConnection, ObjectStoreS3Connection

MODES = ("append", "truncate")


def refuse(load: Load) -> None:
    """Refuse what files cannot do, before anything runs."""
    if load.mode not in MODES:
        raise DeclarationError(
            f"Files cannot be loaded in the mode {load.mode!r}: they are never changed once written ({load.name}).",
            hint=f"Modes of files: {', '.join(MODES)}. A Delta table (delta_local, delta_s3) takes merge and scd2.",
        )
    if load.on_bad_rows == "quarantine":
        raise DeclarationError(
            f"on_bad_rows='quarantine' is not there for files ({load.name}).",
            hint="Files take every row whose types fit; filter in the source.",
        )


def write(
    frame: DataFrame,
    connection: ObjectStoreLocalConnection | ObjectStoreS3Connection,
    load: Load,
    *,
    spark: SparkSession | None = None,
) -> Counts:
    """Load a DataFrame into the files of a table. Called again with the same load, it changes nothing."""
    refuse(load)
    load.check_source(frame.columns)
    return _Write(frame, connection, load, spark or frame.sparkSession).run()


class _Write:
    def __init__(self, frame: DataFrame, connection: Any, load: Load, spark: SparkSession) -> None:
        sessions.configure(spark, connection)
        self.load, self.options = load, connection.options
        self.spark: Any = sessions.own_session(spark, {})
        self.frame = without_void(sessions.moved_to(frame, self.spark))
        path = table_path(connection.root, load.schema, load.table)
        self.manifest = Manifest(folder_for(self.spark, path), path)

    def run(self) -> Counts:
        load, manifest = self.load, self.manifest
        refuse_unwritable(self.frame.schema, self.options.format, load.name)
        state = manifest.finish()
        manifest.sweep()
        if state.has(load):
            return Counts(replayed=True)
        frame = self._aligned(state)
        sessions.reached("begun")
        if not load.keys:
            return self._written(frame, None)
        source = frame.persist()
        try:
            kept, total, _ = checked_keys(source, load)
            return self._written(kept, total)
        finally:
            source.unpersist()

    def _aligned(self, state: State) -> DataFrame:
        """All columns of the table in its order, because a CSV file knows them by nothing else."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        if state.schema is None or self.load.mode == "truncate" or not state.files:
            return self.frame
        if state.format != self.options.format:
            raise LoadRefusedError(
                f"The files of {self.load.name} are {state.format}, and {self.options.format} is to be added.",
                hint="Add to another table, or replace this one with mode='truncate'.",
            )
        for name, value in self.options.dialect().items():
            if state.dialect[name] != value:
                raise LoadRefusedError(
                    f"The CSV files of {self.load.name} have {name} {state.dialect[name]!r}, and {value!r} is to be "
                    "added.",
                    hint="Add to another table, or replace this one with mode='truncate'.",
                )
        table = StructType.fromJson(json.loads(state.schema))
        frame = fitted(self.frame, table, self.load)
        present = set(frame.columns)
        return frame.select(
            *(
                column(field.name) if field.name in present else F.lit(None).cast(field.dataType).alias(field.name)
                for field in table
            )
        )

    def _written(self, frame: DataFrame, total: int | None) -> Counts:
        load, manifest, options = self.load, self.manifest, self.options
        folder = manifest.begin(load)
        try:
            staged = self._stage(frame, folder)
            sessions.reached("staged")
            rows = staged.rows if total is None else total
            refuse_empty(load, rows)
            if not staged.rows and load.mode == "append":
                manifest.abandon(folder)
                return Counts()
            before = manifest.commit(load, staged, options, frame.schema.json())
        except BaseException:
            manifest.abandon(folder)
            raise
        if before is None:
            return Counts(replayed=True)
        return Counts(
            rows_read=rows,
            inserted=staged.rows,
            deleted=before.rows if load.mode == "truncate" else 0,
            bytes=sum(staged.files.values()),
        )

    def _stage(self, frame: DataFrame, folder: str) -> Staged:
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        options = self.options
        observed = Observation()
        only = column(frame.columns[0]).isNull() if len(frame.columns) == 1 else F.lit(False)
        counted = frame.observe(observed, F.count(F.lit(1)).alias("rows"), F.count_if(only).alias("lost"))
        writer = encoded(counted, options.format).write.format(SPARK_FORMAT[options.format])
        # In a bucket a rename is a copy: version 2 makes one less of them.
        committer = {} if self.manifest.is_local else {"mapreduce.fileoutputcommitter.algorithm.version": "2"}
        writer.mode("append").options(**options.spark_writer(), **committer).save(f"{folder}/data")
        found = observed.get
        if options.format == "csv" and found["lost"] and not options.csv_null_value:
            raise LoadRefusedError(
                f"{found['lost']:,} rows of {self.load.name} are nothing but a null: in CSV an empty line, which "
                "readers pass by.",
                hint='Set csv_null_value, for example to "\\\\N".',
            )
        files = {
            name: size
            for name, size in sorted(self.manifest.folder.files_in(f"{folder}/data").items())
            if name[0] not in "_." and name.endswith(EXTENSIONS[options.format])
        }
        return Staged(folder, files if found["rows"] else {}, found["rows"])
