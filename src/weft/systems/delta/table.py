"""One Delta table as Spark sees it: where it is, what it holds, and which loads it has."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from weft.errors import BusyError, LoadRefusedError, NotFoundError
from weft.spark_support.folder import folder_for
from weft.spark_support.lazy import T
from weft.spark_support.sessions import active, java_class, quoted
from weft.systems.base import Connection
from weft.systems.load import IS_CURRENT, ROW_HASH, SCD2_COLUMNS, VALID_FROM, VALID_TO, Load
from weft.systems.objects.paths import table_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_log = logging.getLogger("weft.engine")
ATTEMPTS = 20
_LOOKED_AT = 100
"""How many commits of others may come between our commit and the reading of its counts."""
# What Delta takes in a column's name only with a mapping of names, which not every other reader knows.
_MAPPED = set(" ,;{}()\n\t=")
_MAPPING = "delta.columnMapping.mode"
_CONFLICTS = ("Concurrent", "DELTA_CONCURRENT", "ProtocolChanged", "MetadataChanged", "DELTA_METADATA_CHANGED")
Result = TypeVar("Result")


class DeltaTable:
    """A table at a path, which need not be there yet."""

    def __init__(self, spark: SparkSession, connection: Connection, schema: str | None, table: str) -> None:
        self.spark: Any = spark
        self.path = table_path(connection.root, schema, table)  # type: ignore[attr-defined]
        self.name = f"delta.{quoted(self.path)}"

    def read(self) -> DataFrame:
        """Return the rows of the table now; inside a MERGE, those that the MERGE itself sees."""
        frame: DataFrame = self.spark.read.format("delta").load(self.path)
        return frame

    def log(self) -> Any:
        """Return the log of the table, as Delta's own classes have it."""
        log_class = java_class(self.spark, "org.apache.spark.sql.delta.DeltaLog")
        return log_class.forTable(self.spark._jsparkSession, self.path)

    def _snapshot(self) -> Any:
        with active(self.spark):
            log = self.log()
            # Spelled so because defaults of Scala's parameters do not reach Python.
            return log.update(*(getattr(log, f"update$default${number}")() for number in (1, 2, 3)))

    def schema(self) -> StructType | None:
        """Return its columns, or `None` if there is no table."""
        return self.read().schema if self.version() >= 0 else None

    def version(self) -> int:
        """Return its newest version; -1 if there is no table."""
        return int(self._snapshot().version())

    def maps_names(self) -> bool:
        """Return whether its columns may have any name."""
        with active(self.spark):
            return bool(self._snapshot().metadata().configuration().contains(_MAPPING))

    def has(self, load: Load) -> bool:
        """Return whether this load was committed: the table keeps the last batch of each writer in its own log."""
        snapshot = self._snapshot()
        with active(self.spark):
            last_batch = snapshot.transactions().get(writer(load))
        return bool(last_batch.isDefined()) and int(last_batch.get()) >= load.batch_id

    def create(self, columns: StructType, load: Load) -> None:
        """Make the table with these columns where it is missing, and for scd2 with its own."""
        wanted = T.StructType(list(columns.fields))
        if load.mode == "scd2":
            for name in (VALID_FROM, VALID_TO):
                wanted = wanted.add(name, T.TimestampType())
            wanted = wanted.add(IS_CURRENT, T.BooleanType()).add(ROW_HASH, T.StringType())
        empty = self.spark.createDataFrame([], wanted)

        def write() -> None:
            if self.version() < 0:
                empty.write.format("delta").mode("append").options(**properties(wanted)).save(self.path)

        retried(write, load)

    def add(self, columns: StructType, load: Load) -> None:
        """Give the table those of these columns that it lacks, in a commit of its own: nulls for the rows it has."""

        def alter() -> None:
            stored = self.schema()
            assert stored is not None
            missing = T.StructType([field for field in columns if field.name not in stored.names])
            if missing.fields:
                ddl = self.spark._jsparkSession.parseDataType(missing.json()).toDDL()
                self.spark.sql(f"ALTER TABLE {self.name} ADD COLUMNS ({ddl})")
                _log.warning("The table %s has changed: ADD COLUMNS (%s)", load.name, ddl)

        retried(alter, load)

    def check(self, load: Load, columns: StructType) -> None:
        """Refuse an scd2 load into a table that was made for something else."""
        if load.mode == "scd2":
            for name in SCD2_COLUMNS:
                if name not in columns.names:
                    raise LoadRefusedError(
                        f"The table {load.name} has no column {name!r}, which scd2 needs.",
                        hint="Let the first load create the table, or add valid_from, valid_to, is_current, row_hash.",
                    )

    def metrics(self, label: str) -> dict[str, int] | None:
        """Return Delta's metrics of the commit with this label, or `None` if there is no such commit."""
        folder = folder_for(self.spark, self.path)
        newest = self.version()
        for version in range(newest, max(newest - _LOOKED_AT, -1), -1):
            # The file itself: DESCRIBE HISTORY takes a Spark job to say the same.
            for line in (folder.read(f"{self.path}/_delta_log/{version:020}.json") or b"").splitlines():
                info = json.loads(line).get("commitInfo")
                if info is not None and info.get("userMetadata") == label:
                    metrics = info.get("operationMetrics", {})
                    return {name: int(value) for name, value in metrics.items() if str(value).isdigit()}
        return None


def read(spark: SparkSession, connection: Connection, table: str, schema: str | None = None) -> DataFrame:
    """Return the rows of a table as they are at its newest commit."""
    connection.configure(spark)
    delta_table = DeltaTable(spark, connection, schema, table)
    if delta_table.version() < 0:
        name = f"{schema}.{table}" if schema else table
        raise NotFoundError(
            f"There is no Delta table {name!r} in {connection.label} ({connection.target}).",
            hint="A table is the folder of its name there, with a folder _delta_log in it.",
        )
    return delta_table.read()


def properties(columns: StructType) -> dict[str, str]:
    """Return the properties that a new table needs for the names of its columns."""
    if not any(map(needs_mapping, _names(columns))):
        return {}
    return {_MAPPING: "name", "delta.minReaderVersion": "2", "delta.minWriterVersion": "5"}


def needs_mapping(name: str) -> bool:
    """Return whether a column or a key of this name needs a mapping."""
    return not _MAPPED.isdisjoint(name)


def _names(kind: DataType) -> Iterator[str]:
    """Yield the names of columns, and of all keys in them."""
    if isinstance(kind, T.StructType):
        for each in kind:
            yield each.name
            yield from _names(each.dataType)
    elif isinstance(kind, T.ArrayType):
        yield from _names(kind.elementType)


def writer(load: Load) -> str:
    """Return the application id of a load in a table's log, which keeps the last batch of each."""
    names = f"{len(load.pipeline)}:{load.pipeline}{load.checkpoint_id}"
    return f"weft:{hashlib.sha256(names.encode()).hexdigest()[:40]}"


def retried(action: Callable[[], Result], load: Load) -> Result:
    """Run an action again if its commit conflicts with that of another load."""
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except Exception as error:
            if not is_conflict(error):
                raise
        if attempt < ATTEMPTS - 1:
            time.sleep(random.uniform(0, min(0.1 * 2**attempt, 3)))
    raise BusyError(
        f"Other loads kept changing {load.name} while this one tried {ATTEMPTS} times.",
        hint="Try again, or let fewer loads write to it at a time.",
    )


def is_conflict(error: BaseException) -> bool:
    """Return whether Delta refused a commit because of another one."""
    names = [type(error).__name__, str(error)[:400], str(getattr(error, "_errorClass", ""))]
    java = getattr(error, "java_exception", None)
    if java is not None:
        names.append(str(java.getClass().getName()))
    return any(sign in name for sign in _CONFLICTS for name in names)
