"""Files of a folder or bucket as a target of loads: staged where no reader looks, then committed to the table in one
step, once also if retried."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError, LoadRefusedError
from weft.spark_support import sessions
from weft.spark_support.folder import folder_for
from weft.spark_support.lazy import F, T
from weft.systems.frame_checks import (
    cast_to_table,
    checked_keys,
    column,
    extended_schema,
    refuse_empty,
    with_all_columns,
    without_void,
)
from weft.systems.load import Counts, Load
from weft.systems.objects import parquet, source
from weft.systems.objects.encoding import encoded, refuse_unwritable
from weft.systems.objects.formats import EXTENSIONS, SPARK_FORMAT
from weft.systems.objects.manifest import Manifest, ReadManifest, StagedFiles, TableState
from weft.systems.objects.paths import LogFiles, find_tables, folders_in, list_files, path_of, table_path
from weft.systems.target import ArrowRows, Documents, Reject, SparkTarget, TableLog

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


class FileTarget(SparkTarget):
    """Writes the files of tables. They are never changed once written."""

    modes = ("append", "truncate")
    keeps_states = True

    def check(self, load: Load) -> None:
        if load.mode not in self.modes:
            raise DeclarationError(
                f"Files cannot be loaded in the mode {load.mode!r}: they are never changed once written ({load.name}).",
                hint=f"Modes of files: {', '.join(self.modes)}. A Delta table (delta_local, delta_s3) takes merge and "
                "scd2.",
            )
        if load.on_bad_rows == "quarantine":
            raise DeclarationError(
                f"on_bad_rows='quarantine' is not supported for files ({load.name}).",
                hint="Files take every row whose types fit; filter in the source.",
            )
        super().check(load)

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, reject: Reject | None = None) -> Counts:
        load.check_source(frame.columns)
        return _Write(frame, self.connection, load, spark).run()

    def refused_columns(self, columns: Iterable[pa.Field], load: Load, spark: SparkSession) -> dict[str, str]:
        odd = [each.name for each in columns if "`" in each.name] if self.connection.options.format == "orc" else []
        return dict.fromkeys(odd, "ORC files lose columns with a ` in their name")

    def copy(self, rows: ArrowRows, load: Load, spark: SparkSession) -> Counts | None:
        load.check_source(rows.schema.names)
        is_plain = self.connection.options.format == "parquet" and not load.keys
        if not is_plain or not parquet.can_write(rows, self.connection, spark):
            return None
        return _Copy(rows, self.connection, load, spark).run()

    def has(self, load: Load, spark: SparkSession) -> bool:
        return _Load(self.connection, load, spark).begin() is None

    def tables(self) -> list[tuple[str | None, str]]:
        return find_tables(self.connection, lambda folder: folders_in(self.connection, f"{folder}/_weft"))

    def kept(self, load: Load, *, with_columns: bool = True) -> TableLog | None:
        return ReadManifest(LogFiles(self.connection), self.place(load)).kept(load)

    def version(self, load: Load) -> int | None:
        return ReadManifest(LogFiles(self.connection), self.place(load)).version()

    def place(self, load: Load) -> str:
        return table_path(self.connection.root, load.schema, load.table)

    def drop(self, load: Load) -> None:
        files, path = LogFiles(self.connection), self.place(load)
        manifest = ReadManifest(files, path)
        # The log last: as long as it is there, the table is found.
        files.remove(f"{path}/{name}" for name in manifest.all_files())
        # Remove the newest entry first: the rest of a drop that is cut off can still be read, and so be dropped.
        files.remove(f"{manifest.log}/{name}" for name in sorted(files.files_in(manifest.log), reverse=True))
        files.remove_folder(manifest.home)

    def has_others_files(self, load: Load) -> bool:
        path = self.place(load)
        if self.version(load) is not None:
            return False
        if any(name[0] not in "_." for name in LogFiles(self.connection).files_in(path)):
            return True
        # Other folders may be tables of a schema that has this name.
        parts = (each for each in folders_in(self.connection, path) if "=" in each)
        return any(list_files(self.connection, path_of(f"{path}/{each}"), recursive=True) for each in parts)

    def columns(self, load: Load, spark: SparkSession) -> list[str] | None:
        state = _Load(self.connection, load, spark).manifest.state()
        return None if state is None else [each["name"] for each in json.loads(state.schema or "{}").get("fields", ())]

    def read(self, path: str, spark: SparkSession) -> DataFrame:
        return source.read(spark, self.connection, path)

    def read_documents(self, path: str, spark: SparkSession, documents: Documents) -> DataFrame:
        return source.read(spark, self.connection, path, documents)

    def stored(self, load: Load, spark: SparkSession) -> DataFrame | None:
        return source.read_table(spark, self.place(load))


class _Load:
    """The common part of all loads into files."""

    def __init__(self, connection: Any, load: Load, spark: Any) -> None:
        connection.configure(spark)
        self.load, self.options = load, connection.options
        self.connection, self.spark = connection, spark
        path = table_path(connection.root, load.schema, load.table)
        self.manifest = Manifest(folder_for(spark, path), path)
        self._before: str | None = None

    def begin(self) -> TableState | None:
        """Return the table as it is, tidied; `None` where it has this load."""
        state = self.manifest.finish()
        self.manifest.sweep()
        self._before = state.schema
        return None if state.has(self.load) else state

    def columns_to_keep(self, state: TableState) -> StructType | None:
        """Return the columns of the files that stay; `None` where none do."""
        if state.schema is None or self.load.replaces_rows or not state.files:
            return None
        return T.StructType.fromJson(json.loads(state.schema))

    def commit(self, columns: StructType, stage: Callable[[str], StagedFiles], total: int | None = None) -> Counts:
        """Commit the files that `stage` writes into a folder. `total`: the rows of the source, where some are left
        out."""
        load, manifest = self.load, self.manifest
        folder = manifest.begin(load)
        try:
            staged = stage(folder)
            sessions.reached("staged")
            rows = staged.rows if total is None else total
            refuse_empty(load, rows)
            if not staged.rows and not load.replaces_rows and load.state is None:
                manifest.abandon(folder)
                return Counts()
            before = manifest.commit(load, staged, self.options, columns.json(), self._before)
        except BaseException:
            manifest.abandon(folder)
            raise
        if before is None:
            return Counts(replayed=True)
        return Counts(
            rows_read=rows,
            inserted=staged.rows,
            deleted=before.rows if load.replaces_rows else 0,
            bytes=sum(staged.files.values()),
        )


class _Copy(_Load):
    """A load whose files are written by the tasks that have the Arrow rows."""

    def __init__(self, rows: ArrowRows, connection: Any, load: Load, spark: SparkSession) -> None:
        super().__init__(connection, load, spark)
        self.rows = rows

    def run(self) -> Counts | None:
        state = self.begin()
        if state is None:
            return Counts(replayed=True)
        table = self.columns_to_keep(state)
        if table is not None and (state.format != "parquet" or not parquet.has_columns(self.rows, table)):
            return None
        columns = table or self.rows.columns
        sessions.reached("begun")
        return self.commit(columns, functools.partial(self._stage, columns))

    def _stage(self, columns: StructType, folder: str) -> StagedFiles:
        compression = self.options.parquet_compression or "snappy"
        target = parquet.target(self.rows, self.connection, self.spark, f"{folder}/data", columns, compression)
        written = parquet.write_all(self.rows, target)
        return StagedFiles(folder, {each.name: each.size for each in written}, sum(each.rows for each in written))


class _Write(_Load):
    """A load whose files Spark writes."""

    def __init__(self, frame: DataFrame, connection: Any, load: Load, spark: SparkSession) -> None:
        super().__init__(connection, load, sessions.own_session(spark))
        self.frame = without_void(sessions.moved_to(frame, self.spark))

    def run(self) -> Counts:
        load = self.load
        refuse_unwritable(self.frame.schema, self.options.format, load.name)
        state = self.begin()
        if state is None:
            return Counts(replayed=True)
        frame = self._aligned(state)
        sessions.reached("begun")
        if not load.keys:
            return self.commit(frame.schema, functools.partial(self._stage, frame))
        source = frame.persist()
        try:
            kept, total, _ = checked_keys(source, load)
            return self.commit(kept.schema, functools.partial(self._stage, kept), total)
        finally:
            source.unpersist()

    def _aligned(self, state: TableState) -> DataFrame:
        """Return the rows with all columns of the table in its order, on which CSV files depend, and then with its new
        columns."""
        table = self.columns_to_keep(state)
        if table is None:
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
        frame = cast_to_table(self.frame, table, self.load)
        return with_all_columns(frame, extended_schema(table, frame))

    def _stage(self, frame: DataFrame, folder: str) -> StagedFiles:
        from pyspark.sql import Observation

        options = self.options
        observed = Observation()
        only = column(frame.columns[0]).isNull() if len(frame.columns) == 1 else F.lit(False)
        written, null = encoded(frame, options.format), options.csv_null_value
        # Count by number, not by name: a column may be called `rows`.
        nulls = [F.count_if(column(name).cast("string") == null) for name in written.columns] if null else []
        counted = written.observe(
            observed,
            F.count(F.lit(1)).alias("rows"),
            F.count_if(only).alias("lost"),
            *(each.alias(str(number)) for number, each in enumerate(nulls)),
        )
        writer = counted.write.format(SPARK_FORMAT[options.format])
        # In a bucket a rename is a copy: version 2 makes one less of them.
        committer = {} if self.manifest.is_local else {"mapreduce.fileoutputcommitter.algorithm.version": "2"}
        writer.mode("append").options(**options.spark_writer(), **committer).save(f"{folder}/data")
        counts = observed.get
        if options.format == "csv" and counts["lost"] and not options.csv_null_value:
            raise LoadRefusedError(
                f"{counts['lost']:,} rows of {self.load.name} are nothing but a null: in CSV an empty line, which "
                "readers pass by.",
                hint='Set csv_null_value, for example to "\\\\N".',
            )
        for number, name in enumerate(frame.columns[: len(nulls)]):
            if lost := counts[str(number)]:
                other = '"NULL"' if null == "\\N" else '"\\\\N"'
                raise LoadRefusedError(
                    f"{lost:,} rows of {self.load.name} have the value {null!r} in {name!r}: in these CSV files it "
                    "means null, and readers would find none.",
                    hint=f"Set csv_null_value to a text that no value is, for example {other}.",
                )
        files = {
            name: size
            for name, size in sorted(self.manifest.folder.files_in(f"{folder}/data").items())
            if name[0] not in "_." and name.endswith(EXTENSIONS[options.format])
        }
        return StagedFiles(folder, files if counts["rows"] else {}, counts["rows"])
