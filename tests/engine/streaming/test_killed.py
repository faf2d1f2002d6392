"""The driver killed (-9) at each step of a batch: the next run does what is left, and every row is there once.

A batch has been written to Spark's log of offsets when it is "begun", and is written to its log of commits after it is
"done". The other steps are those of the transaction, in the driver itself.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import weft
from engine.streaming.conftest import declare, rows

# Of each round: three batches.
EVENTS = 60
PROCESS = """
import logging, os, signal, sys

import weft
from weft.engine.streaming.query import run
from weft.pipelines.streaming.declare import make

step, left = sys.argv[1], [int(sys.argv[2])]


class Killer(logging.Handler):
    def emit(self, record):
        if record.getMessage() == step:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)


for name in ("weft.streaming", "weft.commit"):
    logging.getLogger(name).setLevel(logging.DEBUG)
    logging.getLogger(name).addHandler(Killer())
events = weft.stream(name="events", fields={"n": "int64"})(lambda: None)
pipeline = make(
    name="copy",
    source=weft.Source(query=events, max_rows=20),
    targets=[
        weft.Target(table=(None, "copies")),
        weft.Target(table=(None, "merged"), mode="merge", primary_key=["n"]),
        weft.Target(table=(None, "counts")),
    ],
    transform_sql=None if sys.argv[3] == "plain" else "SELECT n FROM source",
)
run(pipeline, once=True)
"""
# Which one, and of how many of its kind: three batches, three targets each.
POINTS = [
    ("begun", 1),
    ("claimed", 1),
    ("moved", 2),
    ("committed", 4),
    ("loaded", 5),
    ("done", 2),
    ("begun", 9),
    ("recorded", 9),
    ("done", 3),
]


@pytest.mark.usefixtures("here")
def test_every_row_is_there_once(count: Callable[[int], int], project: Path) -> None:
    events = declare(n="int64")
    points = (POINTS * 10)[: count(len(POINTS) * 10)]
    for number, (step, times) in enumerate(points):
        weft.publish_sync(events, [{"n": n} for n in range(EVENTS * number, EVENTS * (number + 1))])
        ended = _run(step, times, "plain" if number % 2 else "sql")
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    ended = _run("none", 0, "sql")
    assert ended.returncode == 0, ended.stderr
    expected = [(n,) for n in range(EVENTS * len(points))]
    for table in ("copies", "merged", "counts"):
        assert sorted(rows(table, "n")) == expected


def _run(step: str, times: int, way: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROCESS, step, str(times), way], capture_output=True, text=True, timeout=240, check=False
    )
