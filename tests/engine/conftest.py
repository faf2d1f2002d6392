"""What tests of Spark's own processes share.

The run has one Spark session (`plain_spark`), because a start takes seconds. What a test leaves in it (views, settings)
stays: give views names of their own. A test that stops Spark, or needs it otherwise, runs in a process of its own:

    run = python("print(weft.spark().range(3).count())")
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

import warm_python
import weft
from tests.engine.cluster import Cluster
from weft.project import Project, use

PATIENCE = 240


Python = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def shop_and_lake() -> Iterator[Project]:
    """A project of its own with a database and a folder of files."""
    made = Project()
    with use(made):
        weft.register_connection(weft.SQLiteConnection("shop.db", name="shop"))
        weft.register_connection(weft.ObjectStoreLocalConnection("lake", name="lake"))
        yield made
        weft.streams.close(made)


@pytest.fixture
def python(spark_cache: str) -> Iterator[Python]:
    """`python(code, *arguments, **environment)` starts a process in the test's project that has run `import weft`."""
    processes: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        # What runs in the background of a script is born deaf to SIGINT.
        ears = "signal.signal(signal.SIGINT, signal.default_int_handler)"
        program = f"import os, signal, sys, time\nimport weft\n{ears}\n" + textwrap.dedent(code)
        process = warm_python.Popen(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, "WEFT_CACHE": spark_cache, "WEFT_SPARK_MASTER": "local[2]", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> list[str]:
    """Wait for the process, which must end well and say nothing on stderr, and give the lines that it printed."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert err == ""
    return out.splitlines()


@pytest.fixture(scope="session")
def _cluster(
    spark_cache: str, tmp_path_factory: pytest.TempPathFactory, count: Callable[..., int]
) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WEFT_CACHE", spark_cache)
        started = Cluster(tmp_path_factory.mktemp("cluster"), workers=count(2, 1))
    yield started
    started.stop()


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """The run's cluster, whole again if a test killed a worker. Two applications at once find no cores: stop yours."""
    _cluster.restore()
    return _cluster
