"""What the tests of pipelines from brokers share: messages, commands in this process, drivers and receivers that are
killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from click.testing import CliRunner

import warm_python
import weft
from servers import wait_until
from tests.engine.streaming.conftest import KILLED, rows, run_killed
from weft.cli import cli
from weft.engine.streaming.sources import open_source

_DRIVER = """
import json
import weft
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make

connection = weft.connect(**json.loads(sys.argv[1]))
source = weft.Source(connection=connection, query=sys.argv[2], max_rows=20)
target = weft.connect(url=sys.argv[3])
supervise(SparkEngine(make(name="copies", source=source, target=target, target_table=(None, "copies"))),
          Running(once=True))
"""
# After Spark's log of offsets; in the target's transaction; after it; before Spark's commit; after that, in the next
# batch; and after the transaction of that one.
_POINTS = (
    ("weft.streaming: begun", 1),
    ("weft.commit: recorded", 1),
    ("weft.commit: committed", 1),
    ("weft.streaming: done", 1),
    ("weft.streaming: begun", 2),
    ("weft.streaming: loaded", 2),
)
_ROWS = 60
# Receives what there is into the log, without Spark.
_RECEIVER = """
import json
from dataclasses import replace
import weft
from weft.engine.streaming.sources import open_source

source = open_source(weft.Source(connection=weft.connect(**json.loads(sys.argv[1])), query=sys.argv[2]), 0.05)
offsets = replace(source._offsets, consumer="copies", open=source.opener())
position = offsets.first()
offsets.stop_at_head()
while (upto := offsets.following(position)) > position:
    position = upto
offsets.stop()
"""
_STEPS = [(step, times) for times in (1, 3) for step in ("received", "stored", "acknowledged")]


def numbered(*values: int) -> list[bytes]:
    return [json.dumps({"n": n, "text": "é"}).encode() for n in values]


def call(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments, prog_name="weft")
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def shown(*arguments: str) -> Any:
    return json.loads(call(*arguments, "--format", "json"))


def check_killed(
    kills: int, connection: dict[str, Any], query: str, target: str, publish: Callable[[int, list[bytes]], None]
) -> None:
    """Kill (-9) drivers that read a broker into a table at a URL, at six points. Before the kill of each number some
    messages are published. Every message is a row once."""
    arguments = (json.dumps(connection), query, target)
    for number in range(kills):
        publish(number, numbered(*range(_ROWS * number, _ROWS * (number + 1))))
        ended = run_killed(_DRIVER, *_POINTS[number % len(_POINTS)], *arguments)
        assert ended.returncode == -signal.SIGKILL, (number, ended.stdout, ended.stderr)

    def found() -> list[int]:
        return sorted(n for (n,) in rows("copies", "n", weft.connect(url=target)))

    def is_all_there() -> bool:
        ended = run_killed(_DRIVER, "none", 0, *arguments)
        assert ended.returncode == 0, ended.stderr
        return len(found()) >= _ROWS * kills

    # What a dead receiver held is delivered again when its time is over.
    wait_until(is_all_there, "all rows", 120)
    assert found() == list(range(_ROWS * kills))


def check_receiver_killed(
    kills: int,
    connection: dict[str, Any],
    query: str,
    publish: Callable[[list[bytes]], None],
    is_empty: Callable[[], bool] = lambda: True,
) -> None:
    """Kill (-9) receivers at each step. Each message is in the log once, and the broker `is_empty` then."""
    connection = {**connection, "prefetch": 20, "keep_days": 1}
    log = open_source(weft.Source(connection=weft.connect(**connection), query=query))._offsets.made()  # type: ignore[attr-defined]

    def run(step: str, times: int) -> int:
        command = [sys.executable, "-c", KILLED + _RECEIVER, step, str(times), json.dumps(connection), query]
        ended = warm_python.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=240, check=False)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        return int(ended.returncode)

    for number in range(kills):
        publish(numbered(*range(_ROWS * number, _ROWS * (number + 1))))
        assert run(*_STEPS[number % len(_STEPS)]) == -signal.SIGKILL

    def stored() -> list[int]:
        values = [each for batch in log.read_arrow(0, log.head(), ["value"]) for each in batch["value"].to_pylist()]
        return sorted(json.loads(each)["n"] for each in values)

    # What a dead receiver held is delivered again when its time is over.
    wait_until(lambda: run("none", 0) == 0 and len(stored()) >= _ROWS * kills and is_empty(), "the rest", 120)
    assert stored() == list(range(_ROWS * kills))
