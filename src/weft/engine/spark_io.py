"""Loads from and into what Spark reads and writes itself: files, Delta tables, and what other systems have."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.columns import is_utf8, not_utf8, why_no_text
from weft.engine import connectors, frame_projection, inputs, session, tasks
from weft.engine.inputs import Input
from weft.engine.progress import progress
from weft.engine.readers import RowReader, opened_parts
from weft.errors import DeclarationError, LoadRefusedError, NotFoundError, WeftError
from weft.project import current
from weft.spark_support import outcome, sessions
from weft.spark_support.folder import LocalFolder
from weft.systems import files_by_path, frame_checks
from weft.systems.base import Connection, system_for, systems
from weft.systems.load import Counts, Load
from weft.systems.sql.checks import refuse_unknown_columns
from weft.systems.target import ArrowRows, Documents, Reject, SparkTarget, TableLog
from weft.systems.watermark import LoadWatermark

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Work = Callable[[int, Iterable[pa.RecordBatch]], Any]


def target_of(connection: Connection, verb: str = "written") -> SparkTarget:
    """Return the target of loads that a connection leads to; an error where it leads to none."""
    target_class = system_for(connection.kind).load("target")
    if target_class is None or not target_class.exactly_once:
        able = [each.kind for each in systems().values() if each.takes_loads]
        raise DeclarationError(
            f"{connection.label} ({connection.kind}) cannot be {verb}.",
            hint=f"Files and Delta tables can: {', '.join(able)}.",
        )
    opened: SparkTarget = target_class(connection)
    return opened


def refuse(connection: Connection, load: Load) -> None:
    """Refuse what this target cannot do, before Spark starts."""
    target = target_of(connection)
    refuse_one_host(connection, "target")
    target.check(load)


def read(spark: Any, path: str, source: str | Connection | None, documents: Documents | None = None) -> Any:
    """Return a DataFrame of a table or of files: on a connection, or anywhere by their path. `documents`: see
    `SparkTarget.read_documents`."""
    if source is None:
        return _read_path(spark, path, documents)
    connection = current().connection(source)
    target = target_of(connection, "read by a path")
    refuse_one_host(connection, "source")
    spark = connectors.ready(spark, connection)
    return target.read(path, spark) if documents is None else target.read_documents(path, spark, documents)


def _read_path(spark: Any, path: str, documents: Documents | None) -> Any:
    path = files_by_path.spark_path(path)
    session.refuse_one_host("://" not in path, f"The file {path}")
    return files_by_path.read(connectors.with_jars(spark, files_by_path.jars_for(path)), path, documents)


def write(frame: Any, connection: Connection, load: Load, reject: Reject | None = None) -> Counts:
    """Write a DataFrame to a target, which gives rows that it refuses to `reject`."""
    refuse(connection, load)
    spark = connectors.ready(frame.sparkSession, connection)
    with _loading(connection, load):
        target = target_of(connection)
        return frame_checks.written_texts(frame, load, reject, lambda texts: target.write(texts, load, spark, reject))


def last_watermark(connection: Connection, load: Load, column: str) -> LoadWatermark | None:
    """Return the greatest value of a column in the target, which says how far it has come, and how many it has. `None`
    for a table that has none. It is kept until the target changes: to read it takes Spark."""
    state = target_of(connection).state(load)
    place = f"{connection.kind} {connection.target} {load.name} {column}"
    kept = current().root.absolute() / ".weft" / "watermarks" / sha256(place.encode()).hexdigest()
    with suppress(OSError, ValueError, TypeError):
        kept_watermark = json.loads(kept.read_bytes())
        if state is not None and kept_watermark.pop("state", None) == state:
            return LoadWatermark(**kept_watermark)
    value, rows = _last_value(connection, load, column)
    if value is None:
        return None
    last = LoadWatermark.of(column, value, rows)
    if state is not None:
        with suppress(OSError):
            LocalFolder().write(str(kept), json.dumps({"state": state, **asdict(last)}).encode())
    return last


def _last_value(connection: Connection, load: Load, column: str) -> tuple[Any, int]:
    from pyspark.sql import functions as F

    path = f"{load.schema}/{load.table}" if load.schema else load.table
    try:
        frame = read(session.spark(), path, connection)
    except NotFoundError:
        return None, 0
    if column not in frame.columns:
        raise DeclarationError(
            f"{load.name} has no column {column!r}, which says how far it has come.",
            hint="A target of files needs the incremental column among its own.",
        )
    (row,) = (
        frame.agg(F.max(sessions.quoted(column)).alias("value"), F.count(sessions.quoted(column)).alias("rows"))
        .toArrow()
        .to_pylist()
    )
    return row["value"], row["rows"]


def columns(spark: Any, connection: Connection, load: Load) -> list[str] | None:
    """Return the columns of the target as it is now; `None` where no load has made it."""
    return target_of(connection).columns(load, connectors.ready(spark, connection))


def stored(spark: Any, connection: Connection, load: Load) -> Any:
    """Return the rows of the load's table as a DataFrame; `None` if there is none."""
    return target_of(connection).stored(load, connectors.ready(spark, connection))


def refused_columns(connection: Connection, load: Load, columns: Iterable[pa.Field]) -> dict[str, str]:
    """Return the new columns that the target cannot have because of a name, each with the reason."""
    return target_of(connection).refused_columns(columns, load, connectors.ready(session.spark(), connection))


def has(connection: Connection, load: Load) -> bool:
    """Return whether the target has a load already."""
    spark = connectors.ready(session.spark(), connection)
    with outcome.explained(f"look into {load.name}"):
        return target_of(connection).has(load, spark)


def last_load(connection: Connection, load: Load) -> TableLog | None:
    """Return what the target keeps of the last load under the key of this one, if it has this one or a later one."""
    return target_of(connection).kept(load, with_columns=False) if has(connection, load) else None


def copy(rows: ArrowRows, connection: Connection, load: Load) -> Counts | None:
    """Write rows that are Arrow, without Spark's rows between; `None` where only `write` can do it."""
    spark = connectors.ready(session.spark(), connection)
    with _loading(connection, load):
        return target_of(connection).copy(rows, load, spark)


@contextmanager
def _loading(connection: Connection, load: Load) -> Iterator[None]:
    with progress(f"loading {load.name}"), outcome.explained(f"load {load.name}"):
        try:
            yield
        except (WeftError, ConnectionError):  # the second is Py4J's, whose JVM ended
            raise
        except OSError as error:  # a folder that cannot be made, a full disk, a bucket that does not answer
            raise connection.failed(error) from None


def refuse_one_host(connection: Connection, role: str) -> None:
    """Refuse a folder of this machine where Spark's workers are on others."""
    session.refuse_one_host(connection.one_host, f"The {role} of this load, {connection.label},")


# ------------------------------------------------------------------------------ rows that are Arrow where they are read
# Targets write files of them there: no row crosses the JVM.


def rows_of(data: Input, reader: RowReader | None) -> ArrowRows | None:
    """Return the input of a load as such rows; `None` for what only Spark can read."""
    if reader is not None:
        reader.close()
        return _RowsElsewhere(reader)
    if not isinstance(data, inputs.Memory):
        return None
    # Spark puts the others aside. Rows that are read once are refused while they are written.
    return None if isinstance(data.batches, Collection) and not all(map(is_utf8, data.batches)) else _RowsHere(data)


@dataclass(frozen=True)
class _RowsElsewhere:
    """Rows that tasks read."""

    reader: RowReader

    @property
    def schema(self) -> pa.Schema:
        return self.reader.schema

    @property
    def columns(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(self.schema, prefer_timestamp_ntz=True)

    def each_part(self, work: Work) -> list[Any]:
        context = session.spark().sparkContext
        job = functools.partial(tasks.read, self.reader, work)
        with opened_parts(self.reader, context.defaultParallelism) as parts:
            results = context.parallelize(list(enumerate(parts)), len(parts)).map(job).collect()
        return [outcome.unpack(each) for each in results]


@dataclass(frozen=True)
class _RowsHere:
    """Rows that this process has."""

    rows: inputs.Memory

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    @property
    def columns(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        # As `createDataFrame` does.
        is_local = session.spark().conf.get("spark.sql.timestampType") == "TIMESTAMP_NTZ"
        return from_arrow_schema(self.schema, prefer_timestamp_ntz=is_local)

    def each_part(self, work: Work) -> list[Any]:
        return [work(0, map(_with_texts, self.rows.batches))]


def _with_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    for name in not_utf8(batch).values():
        raise LoadRefusedError(why_no_text(name))
    return batch


# ------------------------------------------------------------------------------------------------- what a load would do


class DryRun:
    """A load whose columns fit its target. Spark works out what it would do, and nothing is written; what it is refused
    for without looking at rows is refused here."""

    def __init__(self, frame: Any, connection: Connection, load: Load) -> None:
        refuse(connection, load)
        refuse_unknown_columns(load.checks, frame.columns, load.name)
        self.load, self.target = load, target_of(connection)
        load.check_source(frame.columns, folds=self.target.folds_columns)
        self.spark = sessions.own_session(connectors.ready(frame.sparkSession, connection))
        self.frame = frame_checks.without_void(sessions.moved_to(frame, self.spark))
        connection.configure(self.spark)
        self.stored = self.target.stored(load, self.spark)
        keeps_columns = not load.replaces_all and (load.mode != "truncate" or self.target.keeps_columns)
        if self.stored is not None and keeps_columns:
            self.frame = frame_checks.cast_to_table(self.frame, self.stored.schema, load)
            self.stored = frame_checks.with_all_columns(
                self.stored, frame_checks.extended_schema(self.stored.schema, self.frame)
            )

    @property
    def creates(self) -> str | None:
        """The table that would be made, where there is none."""
        if self.stored is not None:
            return None
        columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.frame.schema)
        return f"{self.load.name} ({columns})"

    def run(self) -> Counts:
        """Try the rows; raises where they are refused."""
        what = f"try the load of {self.load.name}"
        with outcome.explained(what), frame_projection.expected(self.frame, self.load) as (frame, warnings):
            return replace(self._counts(frame), warnings=warnings)

    def _counts(self, frame: Any) -> Counts:
        load, stored = self.load, self.stored
        if load.keys:
            frame, total, kept = frame_checks.checked_keys(frame, load)
        else:
            total = kept = frame.count()
        frame_checks.refuse_empty(load, total)
        if load.tracks_rows and not load.replaces_all:
            changed = self.target.changes(frame, stored, load)
            unchanged = kept - changed.inserted - changed.updated
            return replace(changed, rows_read=total, unchanged=unchanged)
        deleted = stored.count() if load.replaces_rows and stored is not None else 0
        return Counts(rows_read=total, inserted=kept, deleted=deleted)
