"""Delta tables as a target of loads: each load is one commit of its table, and counts once also if retried."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.errors import LoadRefusedError, NotFoundError
from weft.spark_support import sessions
from weft.spark_support.folder import LocalFolder, folder_for
from weft.spark_support.lazy import F
from weft.systems.base import Connection
from weft.systems.changes import KEY, OP, ORDER, POSITION
from weft.systems.delta import changes, copy, history, log, mirror
from weft.systems.delta.table import DeltaTable, needs_mapping, properties, read, retried, writer
from weft.systems.frame_checks import cast_to_table, checked_keys, column, extended_schema, refuse_empty, without_void
from weft.systems.lease import table_lock
from weft.systems.load import IS_CURRENT, MODES, VALID_FROM, VALID_TO, Counts, Load
from weft.systems.objects.paths import LogFiles, find_tables, folders_in, table_path
from weft.systems.target import ArrowRows, Reject, SparkTarget, TableLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_VIEW = "_weft_changes"
_COMMIT = re.compile(r"\d{20}\.json")


class DeltaTarget(SparkTarget):
    """Writes Delta tables: each load is one commit."""

    modes = MODES
    keeps_columns = True
    folds_columns = True
    removes_rows = True
    keeps_states = True

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, reject: Reject | None = None) -> Counts:
        load.check_source(frame.columns, folds=self.folds_columns)
        if load.on_bad_rows == "quarantine":
            raise LoadRefusedError(
                f"on_bad_rows='quarantine' is not supported for Delta tables ({load.name}).",
                hint="Delta takes every row whose types fit; filter in the source.",
            )
        return _Write(frame, self.connection, load, spark, reject).run()

    def copy(self, rows: ArrowRows, load: Load, spark: SparkSession) -> Counts | None:
        return None if load.changes is not None else copy.copy(rows, self.connection, load, spark=spark)

    def has(self, load: Load, spark: SparkSession) -> bool:
        self.connection.configure(spark)
        table = DeltaTable(spark, self.connection, load.schema, load.table)
        return table.version() >= 0 and table.has(load)

    def tables(self) -> list[tuple[str | None, str]]:
        def tables_in(folder: str) -> list[str]:
            inside = folders_in(self.connection, folder)
            return [each for each in inside if "_delta_log" in folders_in(self.connection, f"{folder}/{each}")]

        return find_tables(self.connection, tables_in)

    def kept(self, load: Load, *, with_columns: bool = True) -> TableLog | None:
        return log.kept(LogFiles(self.connection), self.place(load), load, with_columns=with_columns)

    def version(self, load: Load) -> int | None:
        return log.version(LogFiles(self.connection), self.place(load))

    def rows(self, load: Load) -> int | None:
        return log.rows(LogFiles(self.connection), self.place(load))

    def place(self, load: Load) -> str:
        return table_path(self.connection.root, load.schema, load.table)

    def drop(self, load: Load) -> None:
        files, path = LogFiles(self.connection), self.place(load)
        # The log last: as long as it is there, the table is found. Other folders may be tables of a schema.
        files.remove(f"{path}/{name}" for name in files.files_in(path))
        files.remove_folder(f"{path}/_change_data")
        files.remove_folder(f"{path}/_delta_log")
        files.remove_folder(path, recursive=False)

    def state(self, load: Load) -> str | None:
        """The newest commit, of a table on this machine: its name and contents."""
        path = self.place(load)
        commits, folder = f"{path}/_delta_log", LocalFolder()
        newest = max(filter(_COMMIT.fullmatch, folder.files_in(commits)), default=None) if "://" not in path else None
        return None if newest is None else f"{newest} {sha256(folder.read(f'{commits}/{newest}') or b'').hexdigest()}"

    def columns(self, load: Load, spark: SparkSession) -> list[str] | None:
        try:
            return list(read(spark, self.connection, load.table, load.schema).columns)
        except NotFoundError:
            return None

    def refused_columns(self, columns: Iterable[pa.Field], load: Load, spark: SparkSession) -> dict[str, str]:
        table = DeltaTable(spark, self.connection, load.schema, load.table)
        mapped = [each.name for each in columns if needs_mapping(each.name) or _has_mapped_keys(each.type)]
        if not mapped or table.version() < 0 or table.maps_names():
            return {}
        return dict.fromkeys(mapped, "this Delta table has no column mapping, which a name with such characters needs")

    def read(self, path: str, spark: SparkSession) -> DataFrame:
        return read(spark, self.connection, path)

    def stored(self, load: Load, spark: SparkSession) -> DataFrame | None:
        table = DeltaTable(spark, self.connection, load.schema, load.table)
        columns = table.schema()
        if columns is None:
            return None
        if not load.replaces_all:
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


def _has_mapped_keys(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_mapped_keys(kind.value_type)
    return pa.types.is_struct(kind) and any(needs_mapping(each.name) or _has_mapped_keys(each.type) for each in kind)


class _Write:
    def __init__(
        self,
        frame: DataFrame,
        connection: Connection,
        load: Load,
        spark: SparkSession,
        reject: Reject | None,
    ) -> None:
        connection.configure(spark)
        self.load, self.reject = load, reject
        self.label = log.label_of(load)
        self.spark: Any = sessions.own_session(spark)
        self.frame = without_void(sessions.moved_to(frame, self.spark))
        self.table = DeltaTable(self.spark, connection, load.schema, load.table)

    def run(self) -> Counts:
        load = self.load
        columns = self.table.schema()
        if columns is not None:
            if not load.replaces_all:  # also its columns
                self.table.check(load, columns)
                self.frame = cast_to_table(self.frame, columns, load)
            if self.table.has(load):
                return Counts(replayed=True)
            wanted = extended_schema(columns, self.rows)
            if len(wanted) > len(columns) and not load.replaces_all:
                with self._alone():
                    self.table.add(wanted, load)
                sessions.reached("altered")
        sessions.reached("begun")
        if load.changes is not None:
            with self._alone():
                if columns is None:
                    self.table.create(self.rows.schema, load)
                sessions.reached("created")
                return self._kept() if load.changes.is_history else self._mirrored()
        if load.mode == "append" and not load.keys and not load.replaces_all:
            return self._written(columns, self.frame, None)
        # Looked at more than once, and it must be the same each time.
        source = self.frame.persist()
        try:
            return self._checked(source, columns)
        finally:
            source.unpersist()

    @property
    def rows(self) -> DataFrame:
        """The rows as the table has them: of changes without what is said about them, but a history has positions."""
        changes = self.load.changes
        if changes is None:
            return self.frame
        return self.frame.drop(*(name for name in changes.own if not changes.is_history or name != POSITION))

    def _mark(self) -> None:
        """Let the next commits of the session count once for the load, and be found by its label."""
        for name, value in {
            "write.txnAppId": writer(self.load),
            "write.txnVersion": str(self.load.batch_id),
            "commitInfo.userMetadata": self.label,
            # The rows to merge are computed once, and counted when they are.
            "merge.materializeSource": "all",
        }.items():
            self.spark.conf.set(f"spark.databricks.delta.{name}", value)

    def _checked(self, source: DataFrame, columns: StructType | None) -> Counts:
        load, reject, aside = self.load, self.reject, 0

        def put(rows: DataFrame, why: str) -> None:  # before the commit, and so again where the load is tried again
            nonlocal aside
            assert reject is not None
            table = rows.toArrow()
            reject(table, why)
            aside += len(table)

        if load.keys:
            source, total, kept = checked_keys(source, load, put if reject is not None else None)
        else:
            total = kept = source.count()
        refuse_empty(load, total)
        sessions.reached("checked")
        if load.replaces_all and load.mode == "scd2":
            return self._written(columns, changes.first_versions(source, load), total)
        if load.replaces_rows or not load.tracks_rows:
            return self._written(columns, source, total)
        with self._alone():
            if columns is None:
                self.table.create(source.schema, load)
            sessions.reached("created")
            counts = self._merged(source, total, kept)
        return counts if counts.replayed else replace(counts, quarantined=aside)

    def _alone(self) -> AbstractContextManager[None]:
        return table_lock(folder_for(self.spark, self.table.path), self.table.path, self.load.name)

    # ------------------------------------------------------------------------------------------------- append, truncate

    def _written(self, columns: StructType | None, source: DataFrame, total: int | None) -> Counts:
        load, table = self.load, self.table
        deleted = 0
        mode = "overwrite" if load.replaces_rows else "append"
        options = properties(source.schema) if columns is None else {}
        if load.replaces_all:
            options["overwriteSchema"] = "true"

        def commit() -> None:
            source.write.format("delta").mode(mode).options(**options).save(table.path)

        with self._alone():
            if load.replaces_rows and columns is not None:
                deleted = table.read().count()
            self._mark()
            retried(commit, load)
        sessions.reached("committed")
        counted = table.metrics(self.label)
        if counted is None:
            return Counts(replayed=True)
        rows = counted.get("numOutputRows", 0)
        return Counts(
            rows_read=rows if total is None else total,
            inserted=rows,
            deleted=deleted,
            # An empty file is written for no rows.
            bytes=counted.get("numOutputBytes", 0) if rows else 0,
        )

    # ------------------------------------------------------------------------------------------------------ merge, scd2

    def _merged(self, source: DataFrame, total: int, kept: int) -> Counts:
        from pyspark.sql import Observation

        load, table, names = self.load, self.table, source.columns
        statement = changes.scd2_statement if load.mode == "scd2" else changes.merge_statement

        def commit() -> tuple[list[Any], Observation]:
            observed = Observation()
            changed = changes.changed_rows(source, table.read(), load)
            changed.observe(observed, *changes.change_counts(load)).createOrReplaceTempView(_VIEW)
            return self.spark.sql(statement(table.name, _VIEW, names, load)).collect(), observed

        self._mark()
        try:
            done, observed = retried(commit, load)
        except Exception as error:
            if "MULTIPLE_SOURCE_ROW_MATCHING" in str(error):
                raise LoadRefusedError(
                    f"The table {load.name} has more than one row with a key ({', '.join(load.keys)}) of the source.",
                    hint="Something else than a merge wrote them: remove all but one.",
                ) from None
            raise
        sessions.reached("committed")
        if not done:
            # Another attempt of the same load was faster.
            return Counts(replayed=True)
        counted_rows = observed.get
        inserted, updated = counted_rows[changes.INSERT], counted_rows[changes.VERSION] + counted_rows[changes.UPDATE]
        counted = table.metrics(self.label) or {}
        return Counts(
            rows_read=total,
            inserted=inserted,
            updated=updated,
            unchanged=kept - inserted - updated,
            deleted=counted_rows[changes.DELETE] + counted_rows[changes.EXPIRED],
            bytes=counted.get("numTargetBytesAdded", 0),
        )

    # ---------------------------------------------------------------------------------------------------------- changes

    @property
    def _notes(self) -> mirror.Notes:
        return mirror.Notes(folder_for(self.spark, self.table.path), self.table.path, self.load)

    def _kept(self) -> Counts:
        """Put changes into a history."""
        from pyspark.sql import Observation

        load, table, frame = self.load, self.table, self.frame.persist()
        try:
            rows = frame.count()
            ends = history.Ends.noted(self._notes, frame, load)
            sessions.reached("checked")
            statement = history.statement(table.name, _VIEW, history.table_names(frame, load), load)

            def commit() -> tuple[list[Any], Observation, tuple[int, ...]]:
                observed, stored = Observation(), table.read()
                new = history.new_changes(frame, stored, ends, load)
                late = history.late(new.select(column(ORDER)).toArrow(), load)
                moved = history.moved(new, frame, stored, ends, load)
                moved.observe(observed, *history.counts()).createOrReplaceTempView(_VIEW)
                return self.spark.sql(statement).collect(), observed, late

            self._mark()
            done, observed, late = retried(commit, load)
        finally:
            frame.unpersist()
        sessions.reached("committed")
        if not done:
            return Counts(replayed=True)
        counted = observed.get
        return Counts(
            rows_read=rows,
            inserted=counted[history.INSERTED],
            updated=counted[history.UPDATED],
            deleted=counted[history.ENDED],
            late=late,
            bytes=(table.metrics(self.label) or {}).get("numTargetBytesAdded", 0),
        )

    def _mirrored(self) -> Counts:
        load, table, frame = self.load, self.table, self.frame
        known = frame.select(*map(column, mirror.gate_columns(load, frame.columns))).toArrow()
        gated = mirror.DeltaGate(self._notes, load).pass_through(known, frame.columns)
        sessions.reached("checked")
        if gated.decided is not None:
            decided = self.spark.createDataFrame(gated.decided)
            frame = frame.drop(*decided.drop(KEY).columns).join(decided, KEY)
        elif len(gated.late):
            late = self.spark.createDataFrame(pa.table({KEY: gated.late}))
            frame = frame.join(F.broadcast(late), KEY, "left_anti")
        if len(gated.stays):
            stays = self.spark.createDataFrame(gated.stays).withColumn(OP, F.lit(mirror.STAYS).cast("bigint"))
            frame = frame.unionByName(stays, allowMissingColumns=True)
        if load.changes is not None and load.changes.origins:
            frame = mirror.with_origins(frame, table.read(), load)
        statement = mirror.merge_statement(table.name, _VIEW, frame, load, truncates=gated.truncates, fills=gated.fills)

        def commit() -> list[Any]:
            frame.createOrReplaceTempView(_VIEW)
            return list(self.spark.sql(statement).collect())

        self._mark()
        done = retried(commit, load)
        sessions.reached("committed")
        if not done:
            return Counts(replayed=True)
        counted = table.metrics(self.label) or {}
        removed = counted.get("numTargetRowsDeleted", 0)
        rows, written = known.num_rows, counted.get("numTargetRowsInserted", 0) + counted.get("numTargetRowsUpdated", 0)
        return Counts(
            rows_read=rows,
            inserted=counted.get("numTargetRowsInserted", 0),
            updated=counted.get("numTargetRowsUpdated", 0),
            unchanged=max(rows - written - removed - len(gated.late), 0),
            deleted=removed,
            bytes=counted.get("numTargetBytesAdded", 0),
            late=gated.late_ops,
        )
