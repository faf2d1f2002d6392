"""`weft consume` as it is operated: in a process of its own, stopped by signals, killed, asked for metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import warm_python
import weft
from servers import free_port, wait_until
from weft.operate.runlog import open_run_log
from weft.project import Project
from weft.systems.process import host_of

# Most start Spark, in a process of their own. Kills are in tests/faults/test_streaming_killed.py.

pytest.importorskip("pyspark")

PIPES = """
import logging
from pathlib import Path
import weft

class Steps(logging.Handler):
    def emit(self, record):
        Path(record.getMessage()).touch()

steps = logging.getLogger("weft.streaming")
steps.setLevel(logging.DEBUG)
steps.propagate = False
steps.addHandler(Steps())

@weft.stream(fields={"n": "int64", "s": "string?"})
def numbers():
    pass

@weft.streaming_pipeline(source=numbers, target="out", target_table="copies")
def copies():
    pass
"""
OUT = """
[connections.out]
kind = "sqlite"
path = "out.db"
"""
SCRIPTED = """
import importlib
from operate.scripted_engine import ScriptedEngine

importlib.import_module("weft.cli.consume").SparkEngine = lambda pipeline: ScriptedEngine([10])
"""
PATIENCE = 120


@pytest.fixture(autouse=True)
def pipes(project: Path) -> None:
    Path("pipes.py").write_text(PIPES)
    Path("weft.toml").write_text(f'modules = ["pipes"]\n{OUT}')


@pytest.fixture
def three_numbers(local: Project) -> None:
    """A stream of this process, for commands in it; their pipelines are in files."""
    Path("weft.toml").write_text(OUT)
    stream = weft.stream(name="numbers", fields={"n": "int64", "s": "string?"})(lambda: None)
    weft.publish_sync(stream, [{"n": n} for n in range(3)])


def publish(count: int) -> None:
    code = f"import weft, pipes; weft.publish_sync(pipes.numbers, [{{'n': n}} for n in range({count})])"
    warm_python.run([sys.executable, "-c", code], check=True)


def copied() -> list[int]:
    with closing(sqlite3.connect("out.db")) as database:
        return sorted(n for (n,) in database.execute("SELECT n FROM copies"))


@contextmanager
def held() -> Iterator[None]:
    """The target's database, which nobody else can write meanwhile."""
    with closing(sqlite3.connect("out.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield


def has_begun() -> bool:
    """Whether a batch is being carried out, or was."""
    return Path("begun").exists()


def has_committed(batch: int = 0) -> bool:
    return Path(f".weft/checkpoints/copies/commits/{batch}").exists()


def metric(text: str, name: str, labels: str = 'pipeline="copies"') -> float:
    (found,) = re.findall(rf"^weft_streaming_{name}{{{labels}}} (\S+)$", text, re.M)
    return float(found)


@pytest.mark.full
@pytest.mark.timing
def test_a_daemon(start: Any, run: Any) -> None:
    """Batches as they come, one instance alone, metrics; Spark's JVM dies, and it goes on with another; SIGTERM
    finishes the batch in hand."""
    publish(10)
    port = free_port()
    restarts = ("--restart-on-error", "--min-backoff-ms", "100")
    process = start("consume", "copies", "--format", "json", "--metrics-port", str(port), *restarts)
    first = json.loads(process.stdout.readline())
    assert (first["pipeline"], first["batch_id"], first["consumed"]) == ("copies", 0, 10)
    assert (first["written"], first["lag"], first["replayed"]) == ({"copies": 10}, {"numbers": 0}, False)

    publish(5)
    second = json.loads(process.stdout.readline())
    assert (second["batch_id"], second["consumed"]) == (1, 5)

    refused = run("consume", "copies")
    assert refused.returncode == 1
    assert f"The pipeline 'copies' runs already, as process {process.pid} on " in refused.stderr

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())

    def are_counted() -> bool:
        """Whether the batch that was printed and a look that found nothing are counted, each by all of its counters."""
        nonlocal text
        text = metrics()
        idle = metric(text, "idle_iterations_total")
        return metric(text, "batch_seconds_count") == 2 and metric(text, "iterations_total") == 2 + idle > 2

    text = ""
    wait_until(are_counted, "both batches and an idle iteration to be counted")
    counted = {
        name: metric(text, f"{name}_total")
        for name in ("rows_consumed", "rows_written", "batches", "errors", "restarts", "dlq_writes")
    }
    assert counted == {
        "rows_consumed": 15,
        "rows_written": 15,
        "batches": 2,
        "errors": 0,
        "restarts": 0,
        "dlq_writes": 0,
    }
    assert metric(text, "lag", 'pipeline="copies",source="numbers"') == 0
    assert metric(text, "last_batch_timestamp_seconds") > 1.7e9

    # Once the JVM has written down that the second batch is done: else the next one would do it again.
    wait_until(lambda: has_committed(1), "the second batch to be committed")
    _, jvm = host_of(json.loads(Path(".weft/checkpoints/copies~lock").read_text())["jvm"])
    Path("begun").unlink()
    with held():
        os.kill(jvm, signal.SIGKILL)
        publish(4)
        wait_until(has_begun, "the batch to begin", PATIENCE)
        assert (metric(metrics(), "errors_total"), metric(metrics(), "restarts_total")) == (1, 1)
        process.send_signal(signal.SIGTERM)
        assert not has_committed(2)
    out, err = process.communicate(timeout=PATIENCE)
    (last,) = map(json.loads, out.splitlines())
    assert (process.returncode, last["batch_id"], last["consumed"], last["replayed"]) == (0, 2, 4, False)
    assert has_committed(2)
    runs = r"\S+ \S+ INFO: copies runs, with its checkpoint in \S+\n"
    failed = r"\S+ \S+ WARNING: copies failed, and is started again in 0.1 s: Spark's JVM ended while copies ran\.\n"
    assert re.fullmatch(rf"{runs}{failed}  What it said last is in .weft/spark.log.\n{runs}", err), err
    assert copied() == sorted([*range(10), *range(5), *range(4)])


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_batch_in_hand_is_finished(start: Any, number: signal.Signals, code: int) -> None:
    publish(10)
    with held():
        process = start("consume", "copies")
        wait_until(has_begun, "the batch to begin", PATIENCE)
        process.send_signal(number)
        assert not has_committed()
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (code, "copies: 10 rows in 1 batch\n"), err
    assert has_committed()
    assert copied() == list(range(10))


@pytest.mark.full
@pytest.mark.timing
def test_a_second_signal_ends_at_once(start: Any, run_apart: Any) -> None:
    publish(10)
    with held():
        process = start("consume", "copies")
        wait_until(has_begun, "the batch to begin", PATIENCE)
        process.send_signal(signal.SIGTERM)
        # The handler that heeds the first one is gone when the second comes.
        wait_until(lambda: not handles(process.pid, signal.SIGTERM), "the first signal to be heeded")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == -signal.SIGTERM
    done = run_apart("consume", "copies", "--once")
    assert (done.returncode, done.stdout) == (0, "copies: 10 rows in 1 batch\n")
    assert copied() == list(range(10))


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    caught = re.search(r"^SigCgt:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert caught is not None
    return bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.full
@pytest.mark.timing
def test_stopped_while_it_starts(start: Any) -> None:
    process = start("consume", "copies")
    wait_until(lambda: handles(process.pid, signal.SIGTERM), "signals to be heeded")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


@pytest.mark.full
@pytest.mark.timing
def test_a_reader_that_goes_away(start: Any) -> None:
    """The batch that could not be told of is not carried out again: it is committed, and then the command ends."""
    publish(10)
    process = start("consume", "copies", "--format", "json")
    assert json.loads(process.stdout.readline())["consumed"] == 10
    process.stdout.close()
    publish(5)
    assert process.wait(PATIENCE) == 1
    assert re.fullmatch(r"\S+ \S+ INFO: copies runs, with its checkpoint in \S+\n", process.stderr.read())
    assert Path(".weft/checkpoints/copies/commits/1").exists()
    assert copied() == sorted([*range(10), *range(5)])


@pytest.mark.timing
@pytest.mark.full
def test_killed(start: Any) -> None:
    """The next start waits until the JVM of the last one is gone."""
    publish(10)
    killed = start("consume", "copies", "--format", "json")
    assert json.loads(killed.stdout.readline())["consumed"] == 10
    _, jvm = host_of(json.loads(Path(".weft/checkpoints/copies~lock").read_text())["jvm"])
    os.kill(jvm, signal.SIGSTOP)
    try:
        killed.kill()
        killed.wait()
        publish(5)
        following = start("consume", "copies", "--once", "--format", "json")
        assert f"waiting for its JVM, process {jvm}, to end" in following.stderr.readline()
    finally:
        os.kill(jvm, signal.SIGCONT)
    out, _ = following.communicate(timeout=PATIENCE)
    assert following.returncode == 0
    assert [each["consumed"] for each in map(json.loads, out.splitlines()) if not each["replayed"]] == [5]
    assert copied() == sorted([*range(10), *range(5)])


@pytest.mark.spark
def test_a_file(call: Any, three_numbers: None) -> None:
    Path("pipeline.toml").write_text(
        'pipeline_name = "by-file"\nsource_query = "numbers"\nexpect_within = "1h"\n[source]\nconnection = "default"\n'
        '[target]\nconnection = "out"\n[target.table]\nname = "copies"\n'
    )
    assert call("consume", "pipeline.toml", "--once").stdout == "by-file: 3 rows in 1 batch\n"
    assert copied() == [0, 1, 2]
    with open_run_log(read_only=True) as log:
        assert log.latest(["streaming:by-file"])["streaming:by-file"].succeeded_at is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["copis"], "There is no streaming pipeline named 'copis'.\n  Did you mean 'copies'?"),
        (["nowhere.toml"], "There is no file 'nowhere.toml'."),
        (["copies", "--every", "soon"], "--every: every is 'soon'."),
        (["copies", "--once", "--every", "1s"], "--once takes what is there now"),
        (["copies", "--restart-on-error", "--min-backoff-ms", "60000"], "min_backoff_ms is 60000, which is more than"),
    ],
)
def test_refused(run: Any, arguments: list[str], said: str) -> None:
    done = run("consume", *arguments)
    assert done.returncode == (2 if "--once" in arguments else 1)
    assert said in done.stderr


@pytest.mark.spark
def test_an_error_says_where_it_was(call: Any, three_numbers: None) -> None:
    Path("pipeline.toml").write_text(
        'pipeline_name = "by-file"\n[source]\nquery = "numbers"\n'
        '[target]\nconnection = "out"\n[target.table]\nname = "t"\n'
        '[transform]\nsql = "SELECT s.* FROM source s JOIN users"\n[lookups.users]\ntable = "people"\n'
    )
    done = call("consume", "pipeline.toml", "--once", "--alerter", "stdout://", code=1)
    assert "There is no table people on the connection 'default'.\n  (lookup users)\n" in done.stderr
    assert "✗ by-file failed, and has ended: There is no table people" in done.stderr


@pytest.mark.full
def test_nothing_is_no_batch(run_apart: Any) -> None:
    done = run_apart("consume", "copies", "--once")
    assert done.stdout == "copies: 0 rows in 0 batches\n"


def test_on_a_terminal(on_a_terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that tells how things stand, and is gone at the end. On an engine without Spark, which shows nothing
    (tests/engine/test_processes.py)."""
    Path("scripted.py").write_text(SCRIPTED)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    code, shown = on_a_terminal("consume", "copies", "--once", "--module", "scripted")
    assert code == 0
    assert re.search(r"copies  starts  0 rows  0 rows/s", shown)
    assert "INFO: copies runs, with its checkpoint in " in shown
    assert shown.endswith("copies: 10 rows in 1 batch\n")


def test_a_start_that_fails_counts_nothing(run_apart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "ScriptedEngine([StartFails(weft.SettingsError('no such topic'))])"
    imports = SCRIPTED.replace("import ScriptedEngine", "import ScriptedEngine, StartFails\nimport weft")
    Path("scripted.py").write_text(imports.replace("ScriptedEngine([10])", fails))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    done = run_apart("consume", "copies", "--once", "--module", "scripted")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no such topic" in done.stderr


@pytest.mark.full
@pytest.mark.timing
def test_the_lag_on_a_terminal(on_a_terminal: Any) -> None:
    """It is told with its unit, from the first moment on: a line that fails would show a traceback."""
    Path("in").mkdir()
    Path("in/a.json").write_text('{"n": 1}\n')
    Path("pipes.py").write_text(
        "import weft\n"
        "files = weft.ObjectStoreLocalConnection('in', name='files', format='json_lines')\n"
        "weft.streaming_pipeline(name='copies', source=files, source_query='/', target='out', target_table='copies',"
        " every='100ms')(lambda: None)\n"
    )
    code, shown = on_a_terminal("consume", "copies", "--once")
    assert code == 0
    assert "Traceback" not in shown
    assert re.search(r"copies .* lag \d files?", shown)
