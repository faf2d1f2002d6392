"""What one command leaves in the JVM of the engine, removed before the next one, which finds a session as if new."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from weft.errors import WeftError

_PATIENCE = 10.0
_BUCKETS = "fs.s3a.bucket."


def release_objects(gateway: Any, first: int) -> int:
    """Have a JVM forget the objects that it kept for processes that have ended, from a number on. Return the number of
    the next one."""
    probe = _java(gateway, "java.lang.Object")()
    number = int(probe._target_id.removeprefix("o"))
    for each in range(first, number):
        gateway._gateway_client.garbage_collect_object(f"o{each}", enqueue=False)
    return number


def usable_context(gateway: Any, jvm: int | None = None) -> Any:
    """Return the JavaSparkContext that runs in a JVM, if one does. Given the JVM's process: cleaned, and without one
    that cannot be."""
    active = getattr(_java(gateway, "org.apache.spark.SparkContext$"), "MODULE$").getActive()
    if not active.isDefined() or active.get().isStopped():
        return None
    context = active.get()
    java = _java(gateway, "org.apache.spark.api.java.JavaSparkContext").fromSparkContext(context)
    if jvm is not None and not (_is_stopped(context, jvm) and _is_as_new(gateway, context, java)):
        java.stop()
        return None
    return java


def new_session(gateway: Any) -> Any:
    """Return a session of the JVM without settings, views and functions of others."""
    return _java(gateway, "org.apache.spark.sql.classic.SparkSession").getDefaultSession().get().newSession()


def _java(gateway: Any, name: str) -> Any:
    from py4j.java_gateway import JavaClass

    return JavaClass(name, gateway._gateway_client)


def _is_stopped(context: Any, jvm: int) -> bool:
    """End all that runs, also in Python workers: these have the code of the command that used them."""
    context.cancelAllJobs()
    end_workers(jvm)
    deadline = time.monotonic() + _PATIENCE
    while any(each.numRunningTasks() for each in context.statusTracker().getExecutorInfos()):
        if time.monotonic() > deadline:
            raise WeftError("A task of Spark does not end.")
        time.sleep(0.02)
    return True


def end_workers(jvm: int) -> None:
    """Kill the Python workers of a JVM, and wait until they are gone: Spark takes one that is about to end for an idle
    one, and the next task would fail in it."""
    workers = list(python_workers(jvm))
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _PATIENCE
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        if time.monotonic() > deadline:
            raise WeftError("A Python worker of Spark does not end.")
        time.sleep(0.002)


def _is_as_new(gateway: Any, context: Any, java: Any) -> bool:
    """Remove what is kept for all sessions. What cannot be removed by itself, like a table, needs another context."""
    default = _java(gateway, "org.apache.spark.sql.classic.SparkSession").getDefaultSession()
    if not default.isDefined():
        return False
    state = default.get().sharedState()
    queries = list(state.activeStreamingQueries().values())
    for query in queries:
        query.stop()
    catalog = state.externalCatalog()
    if (
        queries
        or catalog.listDatabases().size() > 1
        or catalog.listTables("default").size()
        or catalog.listFunctions("default", "*").size()
        or context.listFiles().size()
    ):
        return False
    state.cacheManager().clearCache()
    state.globalTempViewManager().clear()
    for rdd in java.getPersistentRDDs().values():
        rdd.unpersist(False)
    configuration = java.hadoopConfiguration()
    if names := list(configuration.getPropsWithPrefix(_BUCKETS)):
        # Hadoop keeps a client for each bucket, with the keys of the command that was first.
        for name in names:
            configuration.unset(_BUCKETS + name)
        _java(gateway, "org.apache.hadoop.fs.FileSystem").closeAll()
    return True


def python_workers(jvm: int) -> Iterator[int]:
    """Yield the Python workers of a JVM: the children of the processes that it started to fork them."""
    for daemon in children(jvm):
        yield from children(daemon)


def children(pid: int) -> list[int]:
    """Return the processes that a process started, by any of its threads."""
    pids: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                pids += map(int, file.read().split())
    return pids
