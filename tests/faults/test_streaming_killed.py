"""The driver of a streaming pipeline killed (-9) at six points of a batch, with every target: the next run does what is
left. Tables and files have every row once, topics and streams at least once.

A run is killed that goes on after the one before it was killed, so each start of Spark is a kill and a recovery.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import warm_python
import weft
from conftest import FEW_ROWS, write_spark_conf
from engine.streaming.conftest import declare, here  # noqa: F401 - fixture
from faults.streaming_process import AFTER_COMMIT, BEFORE_OFFSETS, MID_SINK, POINTS
from faults.streaming_targets import KINDS, Place, place_of  # noqa: F401 - fixture
from lent_session import lent_session

pytestmark = pytest.mark.timing

pytest.importorskip("pyspark")

SCRIPT = Path(__file__).with_name("streaming_process.py")
EVENTS = 20
PATIENCE = 900
# Each start of Spark takes seconds. These meet the same kills, as targets of one pipeline.
TOGETHER = ("postgres", "delta", "files", "stream")
AT_START = """
import json, os

if "WEFT_TEST_JOB" in os.environ:
    import streaming_process

    streaming_process.watch(json.loads(os.environ["WEFT_TEST_JOB"]))
"""


@dataclass
class Runs:
    """Runs of one pipeline, one after the other."""

    project: Path
    places: list[Place]
    number: int = 0

    def run(self, point: str | None, times: int = 0) -> subprocess.CompletedProcess[str]:
        """One run. Which way its rows take, and whether the JVM dies at the same moment, changes from run to run."""
        way = "tasks" if self.number // 2 % 2 else "driver"
        job = {
            "targets": [each for place in self.places for each in place.described()],
            "point": point,
            "times": times,
            # Else Spark could write down what it was just told, while its Python is gone.
            "with_jvm": point == BEFORE_OFFSETS or self.number % 2 == 1,
            "way": way,
            "has_sql": self.number // 4 % 2 == 1,
            "spark_writes": way == "tasks" and any(place.is_lake for place in self.places),
        }
        self.number += 1
        (self.project / "seen").unlink(missing_ok=True)
        command = [sys.executable, str(SCRIPT), json.dumps(job)]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": False}
        if point is None:  # nobody kills its JVM
            with lent_session() as variables:
                return warm_python.run(command, env={**os.environ, **variables}, **options)
        path = os.pathsep.join(filter(None, (str(self.project), str(SCRIPT.parent), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "WEFT_TEST_JOB": json.dumps(job), "PYTHONPATH": path}
        return subprocess.run(command, env=environment, **options)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kinds" in metafunc.fixturenames:
        alone = [(kind,) for kind in KINDS] if metafunc.config.getoption("--full") else []
        metafunc.parametrize("kinds", [TOGETHER, *alone], ids="-".join)


@pytest.mark.full
@pytest.mark.usefixtures("spark", "here")
@pytest.mark.timeout(4 * 3600)
def test_killed_at_six_points(
    kinds: tuple[str, ...],
    place_of: Callable[[str], Place],  # noqa: F811
    count: Callable[..., int],
    project: Path,
) -> None:
    (project / "sitecustomize.py").write_text(AT_START)
    write_spark_conf(project, FEW_ROWS)
    events = declare(n="int64", name="string")
    places = [place_of(each) for each in kinds]
    if len(places) > 1:
        for place in places:
            del place.targets[1:]
    runs = Runs(project, places)
    published = 0
    before = AFTER_COMMIT
    points = POINTS[count(0, 2) :: count(1, 2)]  # each is a start of Spark
    for number in range(count(10)):
        # In another order each time, so that each point comes after each other one.
        for point in points[number % len(points) :] + points[: number % len(points)]:
            weft.publish_sync(events, [{"n": published + n, "name": f"é{n}"} for n in range(EVENTS)])
            published += EVENTS
            if point == MID_SINK:
                times = 1 + number % places[0].steps
            else:
                # In a batch that was begun before the last kill, or in the one after it, whose offsets are new.
                is_first = BEFORE_OFFSETS in (before, point) or before == AFTER_COMMIT
                times = 1 if is_first else 1 + number % 2
            ended = runs.run(point, times)
            assert ended.returncode == -signal.SIGKILL, (point, ended.stdout, ended.stderr)
            before = point
    ended = runs.run(None)
    assert ended.returncode == 0, ended.stderr
    in_lakes = json.loads(ended.stdout.splitlines()[-1])
    for place in places:
        place.check(published, in_lakes)
