"""The jars and settings that Spark needs for a connection: added to the running session when it is first used.

Not when the session starts: a load should not wait for the jars of a bucket that it does not use.
"""

from __future__ import annotations

from collections.abc import Collection
from threading import Lock
from typing import Any

from weft.engine.jars import jars_for
from weft.engine.session import require_jars
from weft.errors import SettingsError
from weft.spark_support.sessions import java_class
from weft.systems.base import Connection, system_for

_lock = Lock()
# capability: a class that is there when its jars are
_PROOF = {
    "delta": "io.delta.sql.DeltaSparkSessionExtension",
    "kafka": "org.apache.spark.sql.kafka010.KafkaSourceProvider",
    "s3": "org.apache.hadoop.fs.s3a.S3AFileSystem",
}
_CATALOG = "spark.sql.catalog.spark_catalog"
_DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_DELTA_SETTINGS = {
    _CATALOG: _DELTA_CATALOG,
    # The list of a table's files is computed in this many tasks. By default 50: far too many for most tables.
    "spark.databricks.delta.snapshotPartitions": "2",
}
_NOTE = "weft.delta.extensions"


def ready(spark: Any, *connections: Connection) -> Any:
    """Return a session like this one that can use these connections: the same one, unless Delta must be put into it."""
    return with_jars(spark, {name for connection in connections for name in system_for(connection.kind).jars})


def with_jars(spark: Any, names: Collection[str]) -> Any:
    """Return a session like this one that has these sets of jars."""
    for name in sorted(names):
        add(spark, name)
    return with_delta(spark) if "delta" in names else spark


def add(spark: Any, capability: str) -> None:
    """Put the jars of a capability onto the class path of driver and executors, unless they are there: a user may
    bring others by `jars` in `[spark]` of weft.toml."""
    with _lock:
        if _is_loadable(spark, _PROOF[capability]):
            return
        require_jars(spark, jars_for(capability))
        if not _is_loadable(spark, _PROOF[capability]):
            raise SettingsError(
                f"The jars for {capability} cannot be added to this Spark session.",
                hint='Start it with them: the files that "weft jars list" shows, in spark.jars.',
            )


def with_delta(spark: Any) -> Any:
    """Return the session, or a copy of it, with Delta's statements and its catalog."""
    from pyspark.sql import SparkSession

    if spark.conf.get(_CATALOG, None) == _DELTA_CATALOG:
        return spark
    with _lock:
        extensions = spark._jsparkSession.extensions()
        # Noted in the JVM, because Spark does not report it. Put in twice, it would parse every statement twice.
        noted = spark.sparkContext._jsc.hadoopConfiguration()
        done = noted.get(_NOTE) or ""
        if f"<{extensions.hashCode()}>" not in done:
            java_class(spark, "io.delta.sql.DeltaSparkSessionExtension")().apply(extensions)
            noted.set(_NOTE, f"{done}<{extensions.hashCode()}>")
        # Only sessions that are made from now on have it.
        own = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
        for name, value in _DELTA_SETTINGS.items():
            if own.conf.get(name, None) is None:
                own.conf.set(name, value)
    return own


def _is_loadable(spark: Any, name: str) -> bool:
    return bool(java_class(spark, "org.apache.spark.util.Utils").classIsLoadable(name))
