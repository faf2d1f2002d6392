"""What tests of streaming pipelines share.

def test_something(plain_spark, streams):
    events = declare(n="int64")
    run_once(name="copy", source=events, target_table=(None, "copies"))
    assert rows("copies") == […]
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import warm_python
import weft
from conftest import S3
from lent_session import lent_session
from weft.engine.load import open_tables
from weft.engine.streaming import transform
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make
from weft.project import Project, current, use
from weft.spark_support.sessions import java_class
from weft.systems.sql.tables import Slice


def declare(stream: str = "events", /, **fields: str) -> Any:
    """A stream with these fields."""
    return weft.stream(name=stream, fields=fields)(lambda: None)


def run_once(**declared: Any) -> None:
    """Run a pipeline over what is there now."""
    if "target" not in declared and "targets" not in declared:
        declared["target"] = "default"
    supervise(SparkEngine(make(**declared)), Running(once=True))


def rows(table: str, columns: str = "*", connection: Any = None) -> list[tuple[Any, ...]]:
    """The rows of a table, in order."""
    tables = open_tables(current().connection(connection))
    try:
        sql = f"SELECT {columns} FROM {tables.table(None, table)}"
        found = [row for each in tables.read(Slice(sql), tables.describe(sql)) for row in each.to_pylist()]
        return sorted((tuple(row.values()) for row in found), key=repr)
    finally:
        tables.close()


def rows_in_lake(table: str, *columns: str) -> list[tuple[Any, ...]]:
    """The rows of a table of Delta in the folder `lake`, in order."""
    found = weft.read(table, source=weft.DeltaLocalConnection("lake")).toArrow()
    return sorted((tuple(row.values()) for row in found.select(columns or found.column_names).to_pylist()), key=repr)


def forget_last_commit(pipeline: str) -> None:
    """Have Spark forget that the last batch was done, as after a crash between the targets' commits and its own."""
    log = Checkpoint(pipeline).path / "commits"
    last = max(log.glob("[0-9]*"), key=lambda each: int(each.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


_LAKES = {
    ("files", "local"): weft.ObjectStoreLocalConnection,
    ("files", "s3"): weft.ObjectStoreS3Connection,
    ("delta", "local"): weft.DeltaLocalConnection,
    ("delta", "s3"): weft.DeltaS3Connection,
}


def open_lake(request: pytest.FixtureRequest, where: str) -> Callable[..., Any]:
    """Connections to one folder ("local") or bucket ("s3"): `lake(format="csv")` for files, `lake("delta")` for tables
    of Delta."""
    if where == "s3":
        s3: S3 = request.getfixturevalue("s3")
        fields = s3.fields()
    else:
        fields = {"path": str(request.getfixturevalue("project") / "lake")}

    def lake(system: str = "files", **options: Any) -> Any:
        made: Any = _LAKES[system, where]
        return made(name="lake", **fields, **options)

    return lake


KILLED = """
import logging, os, signal, sys

step, left = sys.argv.pop(1), [int(sys.argv.pop(1))]


class Killer(logging.Handler):
    def emit(self, record):
        if step in (record.getMessage(), f"{record.name}: {record.getMessage()}"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)


for name in ("weft.streaming", "weft.commit"):
    logging.getLogger(name).setLevel(logging.DEBUG)
    logging.getLogger(name).addHandler(Killer())
"""


STATE_PLACE = """
stores = {
    "two": {"connection": weft.SQLiteConnection(f"{folder}/state.db")},
    "files": {"kind": "files"},
    "delta": {"connection": "default"},
}
state = {"state_store": weft.StateStore(**stores[place])} if place in stores else {}
target = weft.DeltaLocalConnection(f"{folder}/lake", name="lake") if place == "delta" else "default"
"""
"""A part of a program for `run_killed`: where its state and its tables are, by `place` and `folder`."""


def run_killed(program: str, step: str, times: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with these arguments in a process that is killed (-9) when it has come to a step so often. Its JVM
    is that of the test's session."""
    command = [sys.executable, "-c", KILLED + program, step, str(times), *arguments]
    with lent_session() as variables:
        environment = {**os.environ, **variables}
        # The last process loads what all those before it were killed over: a hundred batches, beside other work.
        patience = 240 if times else 3600
        return warm_python.run(command, env=environment, capture_output=True, text=True, timeout=patience, check=False)


@pytest.fixture
def small_spark(plain_spark: Any) -> Any:
    """A session for thousands of queries over few rows: each is planned once, has one partition, and is not compiled,
    which takes longer than all else. In `make faults` a session compiles unless it is told not to."""
    session = plain_spark.newSession()
    session.conf.set("spark.sql.adaptive.enabled", "false")
    session.conf.set("spark.sql.shuffle.partitions", "1")
    session.conf.set("spark.sql.codegen.wholeStage", "false")
    session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    return session


@pytest.fixture
def here(project: Path) -> Iterator[Project]:
    """A project on the embedded default."""
    import weft.streams

    fresh = Project()
    with use(fresh):
        yield fresh
        weft.streams.close(fresh)


@pytest.fixture(params=["driver", "tasks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows are read and written by the driver, which takes few of them, or by Spark's tasks."""
    if request.param == "tasks":
        monkeypatch.setattr(transform, "SMALL", 0)
    return str(request.param)


def compiling(spark: Any) -> Any:
    """Return a session that compiles what it runs, as pipelines do; tests are faster without."""
    own = spark.newSession()
    own.conf.set("spark.sql.codegen.factoryMode", "FALLBACK")
    own.conf.set("spark.sql.codegen.wholeStage", "true")
    return own


def compiled(spark: Any) -> int:
    """Return how often Spark has compiled code in this process."""
    metrics = java_class(spark, "org.apache.spark.metrics.source.CodegenMetrics")
    return int(metrics.METRIC_COMPILATION_TIME().getCount())
