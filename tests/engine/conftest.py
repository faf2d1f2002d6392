"""A Spark session for the whole run, and what tests of Spark's own processes share.

def test_something(plain_spark):     weft.spark() on two cores, without any jars beyond Spark's own

It is one for all tests, because a start takes seconds, and what a test leaves in it (views, settings) stays: give views
names of their own. A test that stops Spark, or needs it otherwise, runs in a process of its own:

    run = python("print(weft.spark().range(3).count())")
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine.cluster import Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE = 240


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config) -> str:
    """The repository's own cache, which keeps the archive of Spark's classes from run to run. It is made here if it is
    not there, so that no test makes one in the background."""
    pytest.importorskip("pyspark")
    from weft.engine import archive
    from weft.engine.java import find_java

    folder = str(pytestconfig.rootpath / ".cache" / "weft")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WEFT_CACHE", folder)
        environment.delenv("JAVA_HOME", raising=False)
        archive.build(find_java())
    return folder


@pytest.fixture(scope="session")
def _session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark")


@pytest.fixture
def plain_spark(cache: str, _session_folder: Path) -> SparkSession:
    """The run's session, started again where a test stopped it."""
    from weft.engine import session
    from weft.project import Project, use

    with pytest.MonkeyPatch.context() as environment, use(Project(_session_folder)):
        environment.setenv("WEFT_CACHE", cache)
        environment.setenv("WEFT_SPARK_MASTER", "local[2]")
        return session.spark()


@pytest.fixture(scope="session", autouse=True)
def _stopped() -> Iterator[None]:
    yield
    if "weft.engine.session" in sys.modules:
        from weft.engine import session

        session.stop()


Python = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def python(cache: str) -> Iterator[Python]:
    """`python(code, *arguments, **environment)` starts a process in the test's project that has run `import weft`."""
    processes: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        # What runs in the background of a script is born deaf to SIGINT.
        ears = "signal.signal(signal.SIGINT, signal.default_int_handler)"
        program = f"import os, signal, sys, time\nimport weft\n{ears}\n" + textwrap.dedent(code)
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, "WEFT_CACHE": cache, "WEFT_SPARK_MASTER": "local[2]", **environment},
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
def _cluster(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WEFT_CACHE", cache)
        started = Cluster(tmp_path_factory.mktemp("cluster"))
    yield started
    started.stop()


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """The run's cluster, whole again if a test killed a worker. Two applications at once find no cores: stop yours."""
    _cluster.restore()
    return _cluster
