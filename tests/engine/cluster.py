"""A real standalone cluster of Spark's on this machine: a master and two workers, from the installed pyspark.

def test_something(cluster):
    cluster.master           "spark://127.0.0.1:40123", as for WEFT_SPARK_MASTER
    cluster.settings         [spark] of a weft.toml that uses it
    cluster.kill(0)          -9 to a worker and its executors, as when a machine goes
    cluster.restore()        starts what was killed again

Its processes end with the one that started them.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from weft.engine import archive_files, jvm
from weft.engine.java import find_java

STARTUP_SECONDS = 120
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

# Spark asks executors for a module that speeds up spark.ml and that smaller runtimes do not have.
_JAVA = """#!/bin/bash
arguments=()
for each in "$@"; do [ "$each" = --add-modules=jdk.incubator.vector ] || arguments+=("$each"); done
exec {java} "${{arguments[@]}}"
"""


class Cluster:
    """A master and its workers, each with one core."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.folder = folder
        self.java = find_java()
        home = folder / "java" / "bin"
        home.mkdir(parents=True)
        (home / "java").write_text(_JAVA.format(java=self.java.executable))
        (home / "java").chmod(0o755)
        self.workers: list[subprocess.Popen[bytes]] = []
        try:
            self._master = self._start("master", "org.apache.spark.deploy.master.Master", "--port", "0")
            port = self._said("master", r"Starting Spark master at spark://[^:]+:([0-9]+)")
            self.master = f"spark://127.0.0.1:{port}"
            for number in range(workers):
                self.workers.append(self._worker(number))
            self._registered()
        except BaseException:
            self.stop()
            raise

    @property
    def settings(self) -> str:
        """`[spark]` for a project that runs here."""
        return f"""
[spark]
master = "{self.master}"

[spark.conf]
spark.pyspark.python = "{sys.executable}"
spark.executor.cores = 1
spark.executor.memory = "512m"
spark.executor.extraJavaOptions = "{" ".join([*jvm.PROFILES["quick"], *archive_files.archive_flags(self.java)])}"
"""

    def kill(self, number: int) -> None:
        """Kill a worker and what it started, at once."""
        worker = self.workers[number]
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()

    def restore(self) -> None:
        """Start the workers that were killed again."""
        for number, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.workers[number] = self._worker(number)
        self._registered()

    def stop(self) -> None:
        """End everything."""
        for process in [*self.workers, *([self._master] if hasattr(self, "_master") else [])]:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _worker(self, number: int) -> subprocess.Popen[bytes]:
        name = f"worker-{number}"
        (self.folder / f"{name}.log").unlink(missing_ok=True)
        where = ("--work-dir", str(self.folder / name), "--cores", "1", "--memory", "600m", "--port", "0")
        return self._start(name, "org.apache.spark.deploy.worker.Worker", *where, self.master)

    def _start(self, name: str, main: str, *arguments: str) -> subprocess.Popen[bytes]:
        home = jvm.spark_home()
        environment = jvm.environment(os.environ, JAVA_HOME=str(self.folder / "java"), SPARK_LOCAL_IP="127.0.0.1")
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    str(self.java.executable),
                    *jvm.MODULE_FLAGS,
                    *jvm.PROFILES["quick"],
                    *archive_files.archive_flags(self.java),
                    "-Xmx256m",
                    *("-cp", f"{home}/jars/*"),
                    main,
                    *("--host", "127.0.0.1", "--webui-port", "0"),
                    *arguments,
                ],
                cwd=self.folder,
                # What the scripts of an installed Spark find out.
                env={**environment, "SPARK_HOME": str(home), "SPARK_SCALA_VERSION": "2.13"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def _registered(self) -> None:
        for number in range(len(self.workers)):
            self._said(f"worker-{number}", r"(Successfully registered with master)")

    def _said(self, name: str, pattern: str) -> str:
        """Wait for something in the log of a process."""
        path = self.folder / f"{name}.log"
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            if found := re.search(pattern, path.read_text(errors="replace")):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"{name} did not start:\n{path.read_text(errors='replace')[-3000:]}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
