"""The driver killed (-9) at each step of a batch: the next run does what is left, and every row is there once.

A batch has been written to Spark's log of offsets when it is "begun", and is written to its log of commits after it is
"done". The other steps are those of the transaction, in the driver itself.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_killed

pytestmark = pytest.mark.timing

# Which tests/faults/test_streaming_killed.py has in brief.

# Of each round: three batches.
EVENTS = 60
PROGRAM = """
import weft
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make

events = weft.stream(name="events", fields={"n": "int64"})(lambda: None)
pipeline = make(
    name="copy",
    source=weft.Source(query=events, max_rows=20),
    targets=[
        weft.Target(table=(None, "copies")),
        weft.Target(table=(None, "merged"), mode="merge", primary_key=["n"]),
        weft.Target(table=(None, "counts")),
    ],
    transform_sql=None if sys.argv[1] == "plain" else "SELECT n FROM source",
)
supervise(SparkEngine(pipeline), Running(once=True))
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
# Each is a start of Spark. Of the others, test_streaming_killed has one of their kind.
FEW = [("moved", 2), ("recorded", 9)]


@pytest.mark.full
@pytest.mark.usefixtures("here")
def test_every_row_is_there_once(count: Callable[[int], int], project: Path) -> None:
    events = declare(n="int64")
    rounds = count(10)
    points = POINTS * rounds if rounds > 1 else FEW
    for number, (step, times) in enumerate(points):
        weft.publish_sync(events, [{"n": n} for n in range(EVENTS * number, EVENTS * (number + 1))])
        ended = run_killed(PROGRAM, step, times, "plain" if number % 2 else "sql")
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    ended = run_killed(PROGRAM, "none", 0, "sql")
    assert ended.returncode == 0, ended.stderr
    expected = [(n,) for n in range(EVENTS * len(points))]
    for table in ("copies", "merged", "counts"):
        assert sorted(rows(table, "n")) == expected
