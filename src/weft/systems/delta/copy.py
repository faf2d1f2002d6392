"""Rows that are Arrow into a plain Delta table: files that are not Spark's work, in one commit that is Delta's.

Plain is a table of flat columns for which Delta does nothing but list files: no partitions, no properties, no rules, no
features beyond those that every new table has. All others go through Delta's own writer.

A file that was written but not committed is in nobody's way, and `VACUUM` removes it, as it does those that Delta's own
writer leaves.
"""

from __future__ import annotations

import json
import math
import time
from datetime import date, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from weft.errors import BusyError
from weft.spark_support import sessions
from weft.spark_support.folder import folder_for
from weft.spark_support.lazy import T
from weft.systems.base import Connection
from weft.systems.delta.log import label_of
from weft.systems.delta.table import DeltaTable, properties, retried, writer
from weft.systems.frame_checks import refuse_empty
from weft.systems.lease import table_lock
from weft.systems.load import Counts, Load
from weft.systems.objects import parquet
from weft.systems.objects.parquet import Range, WrittenFile
from weft.systems.target import ArrowRows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

_PLAIN_FEATURES = {"appendOnly", "invariants", "timestampNtz"}
_DELTA = "org.apache.spark.sql.delta."
_CONVERTERS = "scala.jdk.javaapi.CollectionConverters"
_CODEC = "spark.sql.parquet.compression.codec"
# As Delta cuts texts off, and how many columns it keeps ranges of.
_TEXT_LENGTH = 32
_COLUMNS_WITH_RANGES = 32
_LAST_CHARACTER = "\U0010ffff"
_encoder = msgspec.json.Encoder(decimal_format="number")


def copy(rows: ArrowRows, connection: Connection, load: Load, *, spark: SparkSession) -> Counts | None:
    """Load rows into a table. `None` where only `DeltaTarget.write` can do it; nothing was written then."""
    load.check_source(rows.schema.names, folds=True)
    if load.mode not in ("append", "truncate") or load.keys or load.on_bad_rows != "fail":
        return None
    codec = str(spark.conf.get(_CODEC)).lower().replace("none", "uncompressed")
    if codec not in parquet.SUFFIXES or properties(rows.columns) or not parquet.can_write(rows, connection, spark):
        return None
    return _Copy(rows, connection, load, spark, codec).run()


class _Copy:
    def __init__(self, rows: ArrowRows, connection: Connection, load: Load, spark: Any, codec: str) -> None:
        connection.configure(spark)
        self.rows, self.connection, self.load, self.codec = rows, connection, load, codec
        self.spark: Any = sessions.own_session(spark)
        self.table = DeltaTable(self.spark, connection, load.schema, load.table)

    def run(self) -> Counts | None:
        load = self.load
        with sessions.active(self.spark):
            transaction = self._transaction()
            if self._has(transaction):
                return Counts(replayed=True)
            columns = self._columns(transaction)
        if columns is None:
            return None
        sessions.reached("begun")
        target = parquet.target(self.rows, self.connection, self.spark, self.table.path, columns, self.codec)
        files = parquet.write_all(self.rows, target)
        if not files:
            refuse_empty(load, 0)
            # Delta's own writer knows what a commit without files is. It finds the same: nothing.
            return None
        sessions.reached("staged")
        with table_lock(folder_for(self.spark, self.table.path), self.table.path, load.name):
            has_rows = load.replaces_rows and self.table.schema() is not None
            deleted = self.table.read().count() if has_rows else 0
            is_new = retried(lambda: self._commit(columns, files), load)
        sessions.reached("committed")
        if not is_new:
            return Counts(replayed=True)
        total = sum(each.rows for each in files)
        return Counts(rows_read=total, inserted=total, deleted=deleted, bytes=sum(each.size for each in files))

    # ---------------------------------------------------------------------------------------------------- the table

    def _transaction(self) -> Any:
        """Return a transaction of Delta's, in which a table that is not there yet has the columns of the rows."""
        transaction = self.table.log().startTransaction()
        if transaction.readVersion() < 0:
            transaction.updateMetadata(self._action("metaData", self._new_table()), False)
        return transaction

    def _has(self, transaction: Any) -> bool:
        """Return whether the table has this load. The transaction then depends on it: it fails if another attempt
        commits."""
        return int(transaction.txnVersion(writer(self.load))) >= self.load.batch_id

    def _new_table(self) -> dict[str, Any]:
        fields = [T.StructField(field.name, field.dataType) for field in self.rows.columns]
        return {
            "id": str(uuid4()),
            "format": {"provider": "parquet", "options": {}},
            "schemaString": T.StructType(fields).json(),
            "partitionColumns": [],
            "configuration": {},
            "createdTime": int(time.time() * 1000),
        }

    def _columns(self, transaction: Any) -> StructType | None:
        """Return the columns of the table, if it is plain and they are those of the rows."""
        metadata, protocol = transaction.metadata(), transaction.protocol()
        if not metadata.configuration().isEmpty() or not metadata.partitionColumns().isEmpty():
            return None
        features = set(self._list(protocol.readerAndWriterFeatureNames()))
        if features - _PLAIN_FEATURES or (not features and protocol.minWriterVersion() > 2):
            return None
        columns = T.StructType.fromJson(json.loads(metadata.schemaString()))
        if any(field.metadata or not field.nullable for field in columns):
            return None
        return columns if parquet.has_columns(self.rows, columns) else None

    # --------------------------------------------------------------------------------------------------- the commit

    def _commit(self, columns: StructType, files: list[WrittenFile]) -> bool:
        """Commit all files at once; return whether this load was not there yet."""
        load = self.load
        with sessions.active(self.spark):
            transaction = self._transaction()
            if self._has(transaction):
                return False
            if self._columns(transaction) != columns:
                raise BusyError(f"{load.name} was altered while this load wrote its files.", hint="Try again.")
            now = int(time.time() * 1000)
            mark = {"appId": writer(load), "version": load.batch_id, "lastUpdated": now}
            actions = [self._action("txn", mark), *(self._action("add", _added(each, now)) for each in files)]
            if load.replaces_rows:
                actions += [each.remove() for each in self._list(transaction.filterFiles())]
            self.spark.conf.set("spark.databricks.delta.commitInfo.userMetadata", label_of(load))
            self._count(transaction, files)
            transaction.commit(self._seq(actions), self._operation())
        return True

    def _action(self, kind: str, values: dict[str, Any]) -> Any:
        return self._java(f"{_DELTA}actions.Action").fromJson(json.dumps({kind: values}))

    def _operation(self) -> Any:
        """Return the operation of this commit in the table's history."""
        mode = self._java("org.apache.spark.sql.SaveMode").valueOf("Overwrite" if self.load.replaces_rows else "Append")
        write = self._java(f"{_DELTA}DeltaOperations$Write")
        companion = self._companion(f"{_DELTA}DeltaOperations$Write")
        # How many more parameters there are depends on the version; all have defaults.
        count = max(each.getParameterCount() for each in write._java_lang_class.getConstructors())
        more = [getattr(companion, f"apply$default${number}")() for number in range(3, count + 1)]
        return companion.apply(mode, self._java("scala.Option").apply(self._seq([])), *more)

    def _count(self, transaction: Any, files: list[WrittenFile]) -> None:
        """Let the table's history say how much was written."""
        make = self._java("org.apache.spark.sql.execution.metric.SQLMetrics").createMetric
        context = self.spark.sparkContext._jsc.sc()
        metrics = self._java("java.util.HashMap")()
        for name, number in (
            ("numFiles", len(files)),
            ("numOutputRows", sum(each.rows for each in files)),
            ("numOutputBytes", sum(each.size for each in files)),
        ):
            metric = make(context, name)
            metric.set(number)
            metrics.put(name, metric)
        scala_metrics = self._java(_CONVERTERS).asScala(metrics)
        as_map = getattr(self._companion("scala.collection.immutable.Map"), "from")(scala_metrics)
        transaction.registerSQLMetrics(self.spark._jsparkSession, as_map)

    # -------------------------------------------------------------------------------------------------- Java's, Scala's

    def _java(self, name: str) -> Any:
        return sessions.java_class(self.spark, name)

    def _companion(self, name: str) -> Any:
        return getattr(self._java(f"{name}$"), "MODULE$")

    def _seq(self, values: list[Any]) -> Any:
        java_list = self._java("java.util.ArrayList")()
        for value in values:
            java_list.add(value)
        return self._java(_CONVERTERS).asScala(java_list).toSeq()

    def _list(self, values: Any) -> list[Any]:
        # Convert to an array: the end of an iterator reaches Python as an exception, which takes long.
        return list(self._java(_CONVERTERS).asJava(values).toArray())


def _added(file: WrittenFile, now: int) -> dict[str, Any]:
    return {
        "path": file.name,
        "partitionValues": {},
        "size": file.size,
        "modificationTime": now,
        "dataChange": True,
        "stats": statistics(file),
    }


def statistics(file: WrittenFile) -> str:
    """Return Delta's statistics of a file, by which readers skip it: rows, and range and nulls of the first columns."""
    kept = dict(list(file.ranges.items())[:_COLUMNS_WITH_RANGES])
    low = {name: _low(values) for name, values in kept.items()}
    high = {name: _high(values) for name, values in kept.items()}
    return _encoder.encode(
        {
            "numRecords": file.rows,
            "minValues": {name: value for name, value in low.items() if value is not None},
            "maxValues": {name: value for name, value in high.items() if value is not None},
            "nullCount": {name: values.nulls for name, values in kept.items()},
        }
    ).decode()


def _low(values: Range) -> Any:
    return values.low[:_TEXT_LENGTH] if isinstance(values.low, str) else _plain(values.low)


def _high(values: Range) -> Any:
    text = values.high
    if not isinstance(text, str):
        return _plain(text)
    if len(text) <= _TEXT_LENGTH:
        return text
    # At least as great as every text that begins so.
    return None if text[_TEXT_LENGTH] == _LAST_CHARACTER else text[:_TEXT_LENGTH] + _LAST_CHARACTER


def _plain(value: Any) -> Any:
    if isinstance(value, bool | bytes):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime):
        # Delta cuts off what is smaller than a millisecond, and knows that it did.
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value
