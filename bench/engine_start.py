"""How long the first answer of Spark takes in a new process, against a bare session of pyspark's."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

from bench.harness import Case, SkippedError

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
    def job() -> int:
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return 1

    return job


CASES = [
    Case("first answer of Spark (time)", "a bare pyspark session (time)", 0.5, first_answer, at_most=True),
]
