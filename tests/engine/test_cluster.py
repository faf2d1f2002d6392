"""The session on a real cluster: our package goes along, and a worker that dies takes nothing with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.cluster import Cluster
from tests.engine.conftest import Python, finish


@pytest.mark.full
def test_tasks_import_the_package_that_the_driver_runs(cluster: Cluster, python: Python, project: Path) -> None:
    (project / "weft.toml").write_text(cluster.settings)
    lines = finish(
        python(
            """
            from weft.engine import session
            print(session.is_local())
            spark = weft.spark()
            print(session.is_local(), spark.conf.get("spark.sql.session.timeZone"))

            def versions(batches):
                import pyarrow
                import weft.types
                for batch in batches:
                    yield pyarrow.RecordBatch.from_pydict({"file": [weft.types.__file__] * batch.num_rows})

            files = {row.file for row in spark.range(4).repartition(4).mapInArrow(versions, "file string").collect()}
            print(all("weft.zip/weft/types.py" in file for file in files), len(files))
            """,
            WEFT_SPARK_MASTER="",
        )
    )
    assert lines[:2] == ["False", "False UTC"]
    assert lines[2].startswith("True")


@pytest.mark.full
def test_files_of_one_machine_are_refused(cluster: Cluster, python: Python, project: Path) -> None:
    (project / "weft.toml").write_text(cluster.settings)
    process = python(
        """
        weft.load([{"id": 1}], target="t", connection=weft.SQLiteConnection("a.db"))
        try:
            weft.load("SELECT * FROM t", source=weft.SQLiteConnection("a.db"), target="t",
                      connection=weft.SQLiteConnection("b.db"))
        except weft.DeclarationError as error:
            print(error.what)
        """,
        WEFT_SPARK_MASTER="",
    )
    assert finish(process) == [
        "The source of this load is on this machine, and Spark's workers on a cluster cannot open it."
    ]


@pytest.mark.timing
@pytest.mark.full
def test_a_worker_is_killed(cluster: Cluster, python: Python, project: Path) -> None:
    """What it had done and what it was doing is done again elsewhere."""
    (project / "weft.toml").write_text(cluster.settings)
    process = python(
        """
        import threading
        context = weft.spark().sparkContext
        context.parallelize(range(2), 2).map(str).collect()  # both executors are there

        def slow(number):
            import os
            import time
            import weft.types
            time.sleep(0.5)
            return number, os.getppid()

        def tell():
            while not any(context.statusTracker().getStageInfo(stage).numCompletedTasks >= 2
                          for stage in context.statusTracker().getActiveStageIds()):
                time.sleep(0.05)
            print("running", flush=True)

        threading.Thread(target=tell).start()
        # A shuffle, so that results of the dead worker are lost too.
        pairs = context.parallelize(range(16), 16).map(slow)
        print(sorted(pairs.keys().map(lambda n: (n % 2, n)).reduceByKey(lambda a, b: a + b, 2).collect()))
        """,
        WEFT_SPARK_MASTER="",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    cluster.kill(0)
    assert finish(process) == ["[(0, 56), (1, 64)]"]


@pytest.mark.timing
def test_a_master_that_is_not_there(python: Python, project: Path) -> None:
    """Told at once: Spark itself tries for a minute."""
    process = python("weft.spark()", WEFT_SPARK_MASTER="spark://127.0.0.1:1,127.0.0.1:2")
    _, err = process.communicate(timeout=30)
    assert "No Spark master answers at spark://127.0.0.1:1,127.0.0.1:2: Connection refused." in err
