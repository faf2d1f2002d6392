"""How long a new process takes: the first answer of Spark against a bare session of pyspark's, and loads of ten rows
and a million against the whole process of dlt."""

from __future__ import annotations

import atexit
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal

import servers
from bench.harness import Case, SkippedError
from bench.references import python_with

Job = Callable[[], int]

_ANSWER = "assert spark.range(1000).groupBy().count().collect()[0][0] == 1000"
_OURS = f"import weft\nspark = weft.spark()\n{_ANSWER}"
_BARE = f"""
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").getOrCreate()
{_ANSWER}
"""


def first_answer(_: float) -> tuple[Job, Job]:
    """A process that starts, asks one question and ends, with the archive of classes there; the same by pyspark alone,
    through its launcher, on a Java that has what the launcher asks for."""
    from weft.engine import archive
    from weft.engine.java import find_java

    full_java = shutil.which("java", path=os.environ.get("PATH"))
    if "JAVA_HOME" not in os.environ and full_java is None:
        raise SkippedError("bare pyspark needs a whole Java: sudo apt-get install openjdk-17-jre-headless")
    archive.build(find_java())
    folder = tempfile.mkdtemp(prefix="weft-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ours = {**os.environ, "WEFT_SPARK_MASTER": "local[2]"}
    return _run(_OURS, folder, ours), _run(_BARE, folder, dict(os.environ))


def _run(program: str, folder: str, environment: dict[str, str]) -> Job:
    return _command([sys.executable, "-c", program], folder, environment)


def _command(command: list[str], folder: str | Path, environment: dict[str, str]) -> Job:
    def job() -> int:
        subprocess.run(
            command,
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return 1

    return job


_COPY = """
import weft


@weft.pipeline(target="copies", source_connection="source", target_connection="target")
def copy():
    return "SELECT id, name FROM raw"
"""
_DLT = """
import sys

import dlt
from dlt.sources.sql_database import sql_table

folder, url = sys.argv[1:]
target = dlt.destinations.postgres(url.replace("@", ":any@"))  # it asks for a password, and the server does not
pipeline = dlt.pipeline("bench", pipelines_dir=folder, destination=target, dataset_name="copies")
pipeline.run(sql_table(credentials=f"sqlite:///{folder}/source.db", table="raw"), write_disposition="append")
"""


def ten_rows(engine: Literal["warm", "starts", "none"]) -> Callable[[float], tuple[Job, Job]]:
    """`weft run` of ten rows from SQLite to PostgreSQL on a warm engine, as the first command, which starts the engine
    when it ends, or without one; a process that does so by dlt."""

    def prepare(_: float) -> tuple[Job, Job]:
        from weft.engine import archive
        from weft.engine.java import find_java

        dlt = python_with("dlt[postgres]", "sqlalchemy")
        archive.build(find_java())
        folder = Path(tempfile.mkdtemp(prefix="weft-bench-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        url = servers.shared("postgres").create_database(f"bench_ten_rows_{engine}")
        with closing(sqlite3.connect(folder / "source.db")) as database, database:
            database.execute("CREATE TABLE raw (id BIGINT, name TEXT)")
            database.executemany("INSERT INTO raw VALUES (?, ?)", [(number, f"name {number}") for number in range(10)])
        (folder / "work.py").write_text(_COPY)
        settings = 'modules = ["work"]\n[connections.source]\nurl = "sqlite:///source.db"\n'
        (folder / "weft.toml").write_text(f'{settings}[connections.target]\nurl = "{url}"\n')
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_") and name != "CI"}
        environment = {**kept, "WEFT_SPARK_MASTER": "local[2]", "WEFT_ENGINE": "0" if engine == "none" else "1"}
        weft = [sys.executable, "-m", "weft"]
        ours = _command([*weft, "run", "copy"], folder, environment)
        theirs = _command([dlt, "-c", _DLT, str(folder), url], folder, {**kept, "RUNTIME__DLTHUB_TELEMETRY": "false"})
        if engine != "none":
            stop = _command([*weft, "engine", "stop"], folder, environment)
            atexit.register(stop)
        if engine == "warm":
            _command([*weft, "engine", "start"], folder, environment)()
        elif engine == "starts":
            for job in (ours, theirs):
                job.reset = stop  # type: ignore[attr-defined]
        return ours, theirs

    return prepare


_DLT_MANY = """
import sys

import dlt
from dlt.sources.sql_database import sql_table

folder, source, url = sys.argv[1:]
target = dlt.destinations.postgres(url.replace("@", ":any@"))
pipeline = dlt.pipeline("bench", pipelines_dir=folder, destination=target, dataset_name="copies")
rows = sql_table(
    credentials=source.replace("postgresql:", "postgresql+psycopg2:"), table="orders", backend="connectorx"
)
pipeline.run(rows, write_disposition="append", loader_file_format="csv")
"""


def many_rows(scale: float) -> tuple[Job, Job]:
    """`weft run` of a million rows between two databases of PostgreSQL; a process that does so by dlt, which reads them
    by connectorx and writes them as CSV, its fastest way."""
    from bench.engine_loads import fill

    dlt = python_with("dlt[postgres]", "sqlalchemy", "connectorx", "pyarrow", "psycopg2-binary")
    folder = Path(tempfile.mkdtemp(prefix="weft-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, target, other = (
        servers.shared("postgres").create_database(f"bench_many_rows_{name}") for name in ("source", "target", "other")
    )
    fill(source, "orders", max(10_000, int(1_000_000 * scale)))
    (folder / "work.py").write_text(_COPY.replace("id, name FROM raw", "* FROM orders"))
    places = f'[connections.source]\nurl = "{source}"\n[connections.target]\nurl = "{target}"\n'
    (folder / "weft.toml").write_text(f'modules = ["work"]\n{places}')
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_") and name != "CI"}
    theirs = {**kept, "RUNTIME__DLTHUB_TELEMETRY": "false"}
    return (
        _command([sys.executable, "-m", "weft", "run", "copy"], folder, {**kept, "WEFT_ENGINE": "0"}),
        _command([dlt, "-c", _DLT_MANY, str(folder), source, other], folder, theirs),
    )


CASES = [
    Case("first answer of Spark (time)", "a bare pyspark session (time)", 0.5, first_answer, at_most=True),
    Case(
        "run of 10 rows, SQLite to PostgreSQL, warm engine (time)",
        "a process of dlt (time)",
        0.5,
        ten_rows("warm"),
        at_most=True,
        rounds=15,
        needs="postgres",
    ),
    Case(
        "run of 10 rows, SQLite to PostgreSQL, no engine (time)",
        "a process of dlt (time)",
        1.6,
        ten_rows("none"),
        at_most=True,
        needs="postgres",
    ),
    Case(
        "run of 10 rows, SQLite to PostgreSQL, first command (time)",
        "a process of dlt (time)",
        1.6,
        ten_rows("starts"),
        at_most=True,
        needs="postgres",
    ),
    Case(
        "run of 1M rows between two PostgreSQL databases, no engine (time)",
        "a process of dlt with connectorx (time)",
        0.6,
        many_rows,
        at_most=True,
        rounds=3,
        needs="postgres",
    ),
]
