"""A run that a scheduler starts with a cluster of its own, on a real one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import servers
from servers import wait_until
from tests.engine.cluster import Cluster
from weft.operate.executors import Dispatch, open_executor
from weft.operate.runlog import open_run_log

MODULE = """
import weft

@weft.pipeline(target="numbers", schedule="* * * * *")
def load():
    spark = weft.spark()
    context = spark.sparkContext
    where = f"{context.appName} on {context.master}, {context.getConf().get('spark.executor.memory')}"
    return spark.range(0, 1000, 1, 4).selectExpr("id", f"'{where}' AS place")
"""


@pytest.mark.full
def test_a_run(
    cluster: Cluster, project: Path, shared_server: Callable[[str], servers.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "work.py").write_text(MODULE)
    # What the cluster needs of every application, without its master.
    settings = "\n".join(line for line in cluster.settings.splitlines() if not line.startswith("master"))
    (project / "weft.toml").write_text(f'modules = ["work"]\n{settings}')
    with shared_server("postgres").database() as url:
        monkeypatch.setenv("WEFT_DSN", url)
        executor = open_executor(f"{cluster.master}?cores=1&executor-memory=500m&python={sys.executable}")
        started = executor.start(Dispatch("load", run_log="sqlite://runs.db"))
        wait_until(lambda: started.ended() is not None, "the run", seconds=240)
        with open_run_log("sqlite://runs.db", project) as log:
            (run,) = log.runs("load")
        assert (started.ended(), run.status, run.rows_read) == (0, "succeeded", 1000), run.error
        with psycopg.connect(url) as driver:
            found = driver.execute(
                "SELECT count(*), count(DISTINCT id), min(place), max(place) FROM numbers"
            ).fetchone()
    place = f"weft load on {cluster.master}, 500m"
    assert found == (1000, 1000, place, place)
    assert "Registered app weft load" in (cluster.folder / "master.log").read_text()
    assert "WEFT_SPARK_CONF" not in os.environ
