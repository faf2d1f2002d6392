"""Spark's JVM killed (-9), as by a machine that is out of memory, at any moment between the start of a streaming
pipeline and its first batch: the supervisor starts another one, and says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

import warm_python

pytestmark = pytest.mark.timing

pytest.importorskip("pyspark")

PATIENCE = 3600
# Each start is killed at its own moment: by the number of calls to the JVM so far, or at the call that has this text.
PIPES = """
import json, logging, os, threading, time
from pathlib import Path

import weft
from py4j.clientserver import ClientServerConnection
from weft.engine import jvm

moments = json.loads(os.environ["MOMENTS"])
moment, pause, calls, process = None, 0, 0, None
read_gateway, send_command = jvm._gateway, ClientServerConnection.send_command

def kill():
    global moment
    moment = None
    threading.Thread(target=lambda: (time.sleep(pause), process.kill())).start()
    time.sleep(0 if pause else 0.05)

def begin(started, *rest):
    global moment, pause, calls, process
    process, calls = started, 0
    moment, pause = moments.pop(0) if moments else (None, 0)
    if moment == 0:
        kill()
    return read_gateway(started, *rest)

def count(connection, command):
    global calls
    calls += 1
    if moment in command if isinstance(moment, str) else calls == moment:
        kill()
    return send_command(connection, command)

jvm._gateway, ClientServerConnection.send_command = begin, count

class Begun(logging.Handler):
    def emit(self, record):
        if record.getMessage() == "begun":
            Path("calls").write_text(str(calls))

steps = logging.getLogger("weft.streaming")
steps.setLevel(logging.DEBUG)
steps.propagate = False
steps.addHandler(Begun())

numbers = weft.stream(name="numbers", fields={"n": "int64"})(lambda: None)
weft.streaming_pipeline(name="copies", source=numbers, target="out", target_table="copies")(lambda: None)
"""


@pytest.fixture
def killed(project: Path) -> Callable[[Sequence[tuple[int | str, float]]], list[str]]:
    """Run a pipeline of ten events whose JVM is killed at each of these moments, and return why it was restarted."""
    Path("pipes.py").write_text(PIPES)
    Path("weft.toml").write_text('modules = ["pipes"]\n[connections.out]\nkind = "sqlite"\npath = "out.db"\n')
    code = "import pipes, weft; weft.publish_sync(pipes.numbers, [{'n': n} for n in range(10)])"
    warm_python.run([sys.executable, "-c", code], env={**os.environ, "MOMENTS": "[]"}, check=True)

    def run(moments: Sequence[tuple[int | str, float]]) -> list[str]:
        restarts = ("--restart-on-error", "--min-backoff-ms", "1", "--max-backoff-ms", "1")
        ended = warm_python.run(
            [sys.executable, "-m", "weft", "consume", "copies", "--once", *restarts],
            env={**os.environ, "MOMENTS": json.dumps(moments)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (ended.returncode, ended.stdout) == (0, "copies: 10 rows in 1 batch\n"), ended.stderr
        with closing(sqlite3.connect("out.db")) as database:
            assert sorted(n for (n,) in database.execute("SELECT n FROM copies")) == list(range(10))
        return re.findall(r"WARNING: copies failed, and is started again in 0\.0 s: (.*)", ended.stderr)

    return run


@pytest.mark.full
def test_killed_while_it_starts(killed: Callable[..., list[str]], count: Callable[..., int]) -> None:
    """Before it answers, while the session is made, and while the query is started."""
    before = "Spark's JVM was ended by signal SIGKILL before it was ready. It said:"
    moments = [
        ((0, 0), before),
        (("JavaSparkContext", 0), before),
        (("writeStream", 0), "Spark's JVM ended while copies started."),
    ]
    chosen = moments[:: count(1, 2)]  # each but the first is a start of Spark
    reasons = killed([moment for moment, _ in chosen])
    assert [each.removesuffix(" nothing.") for each in reasons] == [reason for _, reason in chosen]


@pytest.mark.full
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("pause", [0, 0.005, 0.02, 0.05, 0.2])
def test_killed_at_forty_moments(killed: Callable[..., list[str]], pause: float) -> None:
    """At a call, or a while after it: then the JVM is at work, or waits for the next one."""
    killed([])
    calls = int(Path("calls").read_text())
    shutil.rmtree(".weft/checkpoints")
    Path("out.db").unlink()
    reasons = killed([(calls * share // 40, pause) for share in range(40)])
    assert len(reasons) == 40
    assert [each for each in reasons if "Spark's JVM " not in each] == []
