"""Loads from and into what Spark reads and writes itself: files and Delta tables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from weft.engine import connectors, session
from weft.engine.progress import progress
from weft.errors import DeclarationError, NotFoundError, WeftError
from weft.project import current
from weft.spark_support import outcome
from weft.systems.base import Connection
from weft.systems.load import Counts, Load
from weft.systems.objects.local import FolderConnection
from weft.systems.objects.parquet import Rows
from weft.systems.objects.s3 import S3Connection

_BUCKET = re.compile(r"s3[an]?://")


def is_files(connection: Connection) -> bool:
    """Whether a connection leads to files or Delta tables."""
    return isinstance(connection, FolderConnection | S3Connection)


def refuse(connection: Connection, load: Load) -> None:
    """Refuse what this target cannot do, before Spark starts."""
    from weft.systems.objects import sink

    _refuse_unknown(connection, "written")
    refuse_one_host(connection, "target")
    if connection.kind.startswith("object_store"):
        sink.refuse(load)
    aside = [check for check in load.checks if check.reaction == "quarantine"]
    if aside:
        raise DeclarationError(
            f"{aside[0]}: {connection.label} ({connection.kind}) has no place to put rows aside.",
            hint='Use on_quality_failure="fail" or "warn", or a SQL database.',
        )


def read(spark: Any, path: str, source: str | Connection | None) -> Any:
    """A DataFrame of a table or of files: on a connection, or anywhere by their path."""
    if source is None:
        return _read_path(spark, path)
    connection = current().connection(source)
    _refuse_unknown(connection, "read by a path")
    refuse_one_host(connection, "source")
    ready = connectors.ready(spark, connection)
    if connection.kind.startswith("delta"):
        from weft.systems.delta import source as delta

        return delta.read(ready, connection, path)
    from weft.systems.objects import source as objects

    return objects.read(ready, connection, path)  # type: ignore[arg-type]


def _read_path(spark: Any, path: str) -> Any:
    from weft.spark_support.sessions import own_session
    from weft.systems.objects import source as objects

    if _BUCKET.match(path):
        # With the keys of the environment: a path has none.
        connectors.add(spark, "s3")
        path = _BUCKET.sub("s3a://", path)
    elif "://" in path:
        raise DeclarationError(
            f"Files cannot be read from {path.partition('://')[0]}://.", hint="A path of this machine, or s3://bucket/…"
        )
    else:
        if not session.is_local():
            raise DeclarationError(
                "A path is a file on this machine, which Spark's workers on a cluster cannot open.",
                hint='Put it into a bucket, or run Spark here: WEFT_SPARK_MASTER="local[*]".',
            )
        # The JVM keeps the folder that it was started in.
        path = os.path.abspath(os.path.expanduser(path))
        if os.path.isdir(os.path.join(path, "_delta_log")):
            connectors.add(spark, "delta")
            return connectors.with_delta(spark).read.format("delta").load(path)
    own = own_session(spark, {})
    found = objects.read_table(own, path)
    return objects.read_path(own, path) if found is None else found


def write(
    frame: Any, connection: Connection, load: Load, put_aside: Callable[[pa.Table], None] | None = None
) -> Counts:
    """Write a DataFrame to files or to a Delta table, which gives rows without a key to `put_aside`."""
    refuse(connection, load)
    spark = connectors.ready(frame.sparkSession, connection)
    with _loading(connection, load):
        if connection.kind.startswith("delta"):
            from weft.systems.delta import sink as delta

            return delta.write(frame, connection, load, spark=spark, put_aside=put_aside)
        from weft.systems.objects import sink as objects

        return objects.write(frame, connection, load, spark=spark)  # type: ignore[arg-type]


def reached(connection: Connection, load: Load, column: str) -> tuple[Any, int]:
    """The greatest value of a column in the target, which says how far it has come, and how many it has. `None` for a
    table that is not there."""
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
    (found,) = frame.agg(F.max(column).alias("value"), F.count(column).alias("rows")).toArrow().to_pylist()
    return found["value"], found["rows"]


def columns(spark: Any, connection: Connection, load: Load) -> list[str] | None:
    """The columns of the target as it is now; `None` where no load has made it."""
    ready = connectors.ready(spark, connection)
    if connection.kind.startswith("delta"):
        from weft.systems.delta import source as delta

        try:
            found = delta.read(ready, connection, load.table, load.schema)
        except NotFoundError:
            return None
        return list(found.columns)
    from weft.systems.objects import source as objects

    return objects.table_columns(ready, connection, load.schema, load.table)  # type: ignore[arg-type]


def has(connection: Connection, load: Load) -> bool:
    """Whether the target has a load already."""
    spark = connectors.ready(session.spark(), connection)
    with outcome.explained(f"look into {load.name}"):
        if connection.kind.startswith("delta"):
            from weft.systems.delta import sink as delta

            return delta.has(connection, load, spark=spark)
        from weft.systems.objects import sink as objects

        return objects.has(connection, load, spark=spark)  # type: ignore[arg-type]


def copy(rows: Rows, connection: Connection, load: Load) -> Counts | None:
    """Write rows that are Arrow, without Spark's rows between. `None` where only `write` can do it."""
    spark = connectors.ready(session.spark(), connection)
    with _loading(connection, load):
        if connection.kind.startswith("delta"):
            from weft.systems.delta import copy as delta

            return delta.copy(rows, connection, load, spark=spark)
        from weft.systems.objects import sink as objects

        return objects.copy(rows, connection, load, spark=spark)  # type: ignore[arg-type]


@contextmanager
def _loading(connection: Connection, load: Load) -> Iterator[None]:
    with progress(f"loading {load.name}"), outcome.explained(f"load {load.name}"):
        try:
            yield
        except (WeftError, ConnectionError):  # the second is Py4J's, whose JVM ended
            raise
        except OSError as error:  # a folder that cannot be made, a full disk, a bucket that does not answer
            raise connection.failed(error) from None


def _refuse_unknown(connection: Connection, verb: str) -> None:
    if not is_files(connection):
        raise DeclarationError(
            f"{connection.label} ({connection.kind}) cannot be {verb}.",
            hint="Files and Delta tables can: object_store_local, object_store_s3, delta_local, delta_s3.",
        )


def refuse_one_host(connection: Connection, role: str) -> None:
    """Refuse a folder of this machine where Spark's workers are on others."""
    if connection.one_host and not session.is_local():
        raise DeclarationError(
            f"The {role} of this load, {connection.label}, is a folder of this machine, which Spark's workers on a "
            "cluster do not see.",
            hint='Use a bucket (object_store_s3, delta_s3), or run Spark here: WEFT_SPARK_MASTER="local[*]".',
        )
