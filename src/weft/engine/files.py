"""Loads from and into what Spark reads and writes itself: files, Delta tables, and what other systems have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from weft.engine import connectors, session
from weft.engine.progress import progress
from weft.errors import DeclarationError, NotFoundError, WeftError
from weft.project import current
from weft.spark_support import outcome
from weft.systems import files_by_path
from weft.systems.base import Connection, system_for, systems
from weft.systems.load import Counts, Load
from weft.systems.target import ArrowRows, SparkTarget


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


def read(spark: Any, path: str, source: str | Connection | None) -> Any:
    """Return a DataFrame of a table or of files: on a connection, or anywhere by their path."""
    if source is None:
        return _read_path(spark, path)
    connection = current().connection(source)
    target = target_of(connection, "read by a path")
    refuse_one_host(connection, "source")
    return target.read(path, connectors.ready(spark, connection))


def _read_path(spark: Any, path: str) -> Any:
    path = files_by_path.spark_path(path)
    session.refuse_one_host("://" not in path, f"The file {path}")
    return files_by_path.read(connectors.with_jars(spark, files_by_path.jars_for(path)), path)


def write(
    frame: Any, connection: Connection, load: Load, put_aside: Callable[[pa.Table], None] | None = None
) -> Counts:
    """Write a DataFrame to a target, which gives rows without a key to `put_aside`."""
    refuse(connection, load)
    spark = connectors.ready(frame.sparkSession, connection)
    with _loading(connection, load):
        return target_of(connection).write(frame, load, spark, put_aside)


def last_value(connection: Connection, load: Load, column: str) -> tuple[Any, int]:
    """Return the greatest value of a column in the target, which says how far it has come, and how many it has. `None`
    for a table that is not there."""
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
    (row,) = frame.agg(F.max(column).alias("value"), F.count(column).alias("rows")).toArrow().to_pylist()
    return row["value"], row["rows"]


def columns(spark: Any, connection: Connection, load: Load) -> list[str] | None:
    """Return the columns of the target as it is now; `None` where no load has made it."""
    return target_of(connection).columns(load, connectors.ready(spark, connection))


def has(connection: Connection, load: Load) -> bool:
    """Return whether the target has a load already."""
    spark = connectors.ready(session.spark(), connection)
    with outcome.explained(f"look into {load.name}"):
        return target_of(connection).has(load, spark)


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
