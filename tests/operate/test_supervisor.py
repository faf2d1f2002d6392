"""Streaming pipelines that are started again: after a database was down, and up to a limit; not where it is no use."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import servers
import weft
from servers import wait_until
from weft.engine import session
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.query import Query
from weft.engine.streaming.watch import Lag
from weft.operate.running import OPTIONS, Restarts, Running
from weft.operate.supervisor import Supervisor
from weft.operate.watcher import Report, Watcher
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.project import Project, use

pytestmark = pytest.mark.spark

pytest.importorskip("pyspark")

PATIENCE = 120
QUICK = Restarts(min_backoff_ms=50, max_backoff_ms=400)


class Witness(Watcher):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.starts = 0
        self.batches: list[Report] = []
        self.failures: list[tuple[Exception, float | None]] = []

    def started(self, lag: Lag) -> None:
        self.starts += 1

    def batch(self, report: Report) -> None:
        self.batches.append(report)

    def failed(self, error: Exception, again_in: float | None) -> None:
        self.failures.append((error, again_in))


@pytest.fixture
def numbers() -> Iterator[Any]:
    """A stream of a fresh project."""
    with use(Project()) as project:

        @weft.stream(fields={"n": "int64"})
        def numbers() -> None:
            pass

        yield numbers
        weft.streams.close(project)


@pytest.fixture
def server(need_server: Callable[[str], None]) -> Iterator[servers.Server]:
    need_server("postgres")
    server = servers.KINDS["postgres"]()
    server.start()
    yield server
    server.kill()


def copies(numbers: Any, target: Any) -> StreamingPipeline:
    return make(name="copies", source=numbers, target=target, target_table=("public", "copies"))


@contextlib.contextmanager
def running(supervisor: Supervisor) -> Iterator[None]:
    """Run it in another thread, and stop it at the end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            supervisor.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        supervisor.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert raised == []


@pytest.mark.timing
def test_a_target_that_is_down_for_a_while(numbers: Any, server: servers.Server) -> None:
    from weft.operate.streaming_metrics import served

    url = server.create_database("target")
    witness = Witness()
    supervisor = Supervisor(copies(numbers, weft.PostgresConnection(url)), restarts=QUICK, watchers=[witness])
    weft.publish_sync(numbers, [{"n": n} for n in range(10)])
    with served("copies", supervisor.now_behind, "127.0.0.1", 0) as (metrics, port), running(supervisor):
        supervisor.watchers.append(metrics)
        wait_until(lambda: len(witness.batches) == 1, "the first batch", PATIENCE)
        server.kill()
        weft.publish_sync(numbers, [{"n": n} for n in range(10, 15)])
        wait_until(lambda: len(witness.failures) >= 3, "failures", PATIENCE)
        # It is still ours: nobody else may run it between two starts.
        with pytest.raises(weft.BusyError, match="runs already"):
            Checkpoint("copies").lock()
        server.start()
        wait_until(lambda: len(witness.batches) == 2, "the batch after it", PATIENCE)
        first_failures = len(witness.failures)
        assert all(isinstance(error, weft.ConnectionFailedError) for error, _ in witness.failures)

        # A batch that succeeds counts as a new beginning: the pauses are short again.
        server.kill()
        weft.publish_sync(numbers, [{"n": 15}])
        wait_until(lambda: len(witness.failures) > first_failures, "another failure", PATIENCE)
        pause = witness.failures[first_failures][1]
        assert pause is not None
        assert pause <= 0.05
        server.start()
        wait_until(lambda: len(witness.batches) == 3, "the last batch", PATIENCE)
        text = _metrics(port)
    assert witness.starts == len(witness.failures) + 1
    assert [each.consumed for each in witness.batches] == [10, 5, 1]
    assert f'weft_streaming_errors_total{{pipeline="copies"}} {len(witness.failures)}.0\n' in text
    assert f'weft_streaming_restarts_total{{pipeline="copies"}} {len(witness.failures)}.0\n' in text
    with contextlib.closing(server.connect("target")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT n FROM public.copies ORDER BY n")
        assert [n for (n,) in cursor.fetchall()] == list(range(16))


def _metrics(port: int) -> str:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def test_not_for_ever(numbers: Any) -> None:
    weft.publish_sync(numbers, {"n": 1})
    nobody = weft.PostgresConnection(f"postgres://127.0.0.1:{servers.free_port()}/none")
    witness = Witness()
    limited = Restarts(min_backoff_ms=1, max_backoff_ms=2, max_restarts=2)
    with pytest.raises(weft.ConnectionFailedError) as caught:
        Supervisor(copies(numbers, nobody), restarts=limited, watchers=[witness]).run()
    assert "copies was started again 2 times." in caught.value.__notes__
    assert [pause is None for _, pause in witness.failures] == [False, False, True]
    witness = Witness()
    with pytest.raises(weft.ConnectionFailedError):
        Supervisor(copies(numbers, nobody), watchers=[witness]).run()
    assert [pause for _, pause in witness.failures] == [None]


class Listening(Witness):
    """Is told of Spark's own events too."""

    wants_idle = True


@pytest.mark.timing
def test_nothing_is_left_of_earlier_starts(numbers: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither here nor in the JVM, where each session that had a query would go on to listen."""
    caplog.set_level("CRITICAL", "py4j")  # what pytest keeps of its log has frames of each failure
    weft.publish_sync(numbers, {"n": 1})
    nobody = weft.PostgresConnection(f"postgres://127.0.0.1:{servers.free_port()}/none")

    def start(times: int) -> None:
        restarts = Restarts(min_backoff_ms=0, max_backoff_ms=0, max_restarts=times - 1)
        witness = Listening()
        with pytest.raises(weft.ConnectionFailedError):
            Supervisor(copies(numbers, nobody), restarts=restarts, watchers=[witness]).run()
        assert witness.starts == times

    start(2)
    before = _alive()
    start(10)
    wait_until(lambda: all(count <= before[name] + 1 for name, count in _alive().items()), f"{before}, and one more")


def _alive() -> Counter[str]:
    """What there is of queries, by kind."""
    from pyspark.sql.streaming.listener import JStreamingQueryListener
    from pyspark.sql.utils import ForeachBatchFunction

    context: Any = session.spark().sparkContext
    context._jvm.System.gc()
    gc.collect()
    kinds = (Query, ForeachBatchFunction, JStreamingQueryListener)
    found = Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)
    found["threads"] = threading.active_count()
    found["listeners"] = context._jsc.sc().listenerBus().listeners().size()
    return found


def test_what_cannot_heal(numbers: Any) -> None:
    weft.publish_sync(numbers, {"n": 1})
    witness = Witness()
    unset = weft.PostgresConnection("${NOBODY_SET_THIS}")
    with pytest.raises(weft.SettingsError, match="NOBODY_SET_THIS"):
        Supervisor(copies(numbers, unset), restarts=QUICK, watchers=[witness]).run()
    assert [pause for _, pause in witness.failures] == [None]
    # Nothing of it is left in the way of the next start.
    with Checkpoint("copies").locked():
        pass


@pytest.mark.timing
def test_stopped_between_two_starts(numbers: Any) -> None:
    """Whoever stops it does not wait for the pause to be over."""
    weft.publish_sync(numbers, {"n": 1})
    nobody = weft.PostgresConnection(f"postgres://127.0.0.1:{servers.free_port()}/none")
    witness = Witness()
    an_hour = Restarts(min_backoff_ms=3_600_000, max_backoff_ms=3_600_000)
    with running(Supervisor(copies(numbers, nobody), restarts=an_hour, watchers=[witness])):
        wait_until(lambda: bool(witness.failures), "the failure", PATIENCE)


class Clumsy(Watcher):
    """Fails whenever it is told something."""

    wants_idle = True

    def started(self, lag: Lag) -> None:
        raise ValueError("started")

    def batch(self, report: Report) -> None:
        raise ValueError("batch")

    def idle(self) -> None:
        raise ValueError("idle")

    def failed(self, error: Exception, again_in: float | None) -> None:
        raise ValueError("failed")


@pytest.mark.timing
def test_a_watcher_that_fails(numbers: Any, server: servers.Server, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged. The batch that it was told of is done, and others are told."""
    url = server.create_database("target")
    server.kill()
    witness = Witness()
    pipeline = copies(numbers, weft.PostgresConnection(url))
    weft.publish_sync(numbers, {"n": 1})
    with running(Supervisor(pipeline, restarts=QUICK, watchers=[Clumsy(), witness])):
        wait_until(lambda: bool(witness.failures), "the failure", PATIENCE)
        server.start()
        wait_until(lambda: len(witness.batches) == 1, "the batch", PATIENCE)
        weft.publish_sync(numbers, {"n": 2})
        wait_until(lambda: len(witness.batches) == 2, "another batch", PATIENCE)
    assert [each.replayed for each in witness.batches] == [False, False]
    assert witness.starts == len(witness.failures) + 1
    logged = {str(each.exc_info[1]) for each in caplog.records if each.exc_info}
    assert logged >= {"started", "batch", "failed"}


def test_a_port_that_is_taken(numbers: Any, tmp_path: Path) -> None:
    import socket

    from weft.operate.supervisor import supervise

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        target = weft.SQLiteConnection(str(tmp_path / "out.db"))
        pipeline = make(name="copies", source=numbers, target=target, target_table="copies")
        with pytest.raises(weft.ConnectionFailedError, match=f"at 127.0.0.1:{port}: Address already in use"):
            supervise(pipeline, Running(metrics_port=port))


@given(st.integers(0, 10_000), st.integers(0, 100_000), st.integers(1, 10_000))
def test_pauses(least: int, more: int, failures: int) -> None:
    """They double, part of them is chance, and they have an end."""
    restarts = Restarts(min_backoff_ms=least, max_backoff_ms=least + more)
    longest = min(least * 2 ** (failures - 1), least + more) / 1000
    assert longest / 2 <= restarts.seconds(failures) <= longest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_backoff_ms": -1}, "min_backoff_ms must be a whole number of at least 0, not -1."),
        ({"max_backoff_ms": None}, "max_backoff_ms must be a whole number"),
        ({"max_restarts": True}, "max_restarts must be a whole number"),
        ({"min_backoff_ms": 2, "max_backoff_ms": 1}, "min_backoff_ms is 2, which is more than max_backoff_ms, 1."),
    ],
)
def test_refused_settings(options: dict[str, Any], said: str) -> None:
    with pytest.raises(weft.SettingsError, match=said):
        Restarts(**options)


def test_the_command_and_the_functions_take_the_same() -> None:
    from weft.cli.consume import consume

    taken = {each.name: each.default for each in consume.params}
    assert set(OPTIONS) == taken.keys() - {"what", "every", "modules", "output"}
    given = {name: taken[name] for name in ("metrics_host", "min_backoff_ms", "max_backoff_ms")}
    assert Running(**given) == Running()
    for function in (weft.run_streaming_pipeline, weft.run_pipeline):
        assert all(f"`{name}`" in (function.__doc__ or "") for name in OPTIONS)


# ---------------------------------------------------------------------------------------------------------- from Python


def test_run_streaming_pipeline(numbers: Any) -> None:
    weft.publish_sync(numbers, [{"n": 1}, {"n": 2}])
    weft.run_streaming_pipeline(name="copies", source=numbers, target="default", target_table="copies", once=True)
    assert weft.read("SELECT n FROM copies ORDER BY n", source="default").toArrow().to_pylist() == [{"n": 1}, {"n": 2}]
    with pytest.raises(weft.DeclarationError, match="Did you mean 'target_table'"):
        weft.run_streaming_pipeline(name="copies", source=numbers, target="default", target_tabel="copies", once=True)


def test_run_pipeline(numbers: Any) -> None:
    weft.publish_sync(numbers, [{"n": 1}, {"n": 2}])
    Path("pipeline.toml").write_text(
        'pipeline_name = "copies"\nsource_query = "numbers"\n[source]\nconnection = "default"\n'
        '[target]\nconnection = "default"\n[target.table]\nname = "copies"\n'
    )
    weft.run_pipeline(config="pipeline.toml", once=True, metrics_port=servers.free_port())
    assert weft.read("SELECT n FROM copies ORDER BY n", source="default").toArrow().to_pylist() == [{"n": 1}, {"n": 2}]


def test_the_module_has_the_parts() -> None:
    from weft.streaming import Lookup, Source, Target

    assert (Lookup, Source, Target) == (weft.Lookup, weft.Source, weft.Target)


@pytest.mark.timing
def test_a_script_is_stopped_as_the_command_is(tmp_path: Path) -> None:
    """SIGTERM ends the call, and what comes after it in the script is done."""
    Path("script.py").write_text(
        "import weft\n\n@weft.stream(fields={'n': 'int64'})\ndef numbers():\n    pass\n\n"
        "weft.publish_sync(numbers, {'n': 1})\n"
        "weft.run_streaming_pipeline(name='copies', source=numbers, target='default', target_table='copies')\n"
        "print('after it')\n"
    )
    process = subprocess.Popen([sys.executable, "script.py"], stdout=subprocess.PIPE, text=True)
    try:
        wait_until(Path(".weft/checkpoints/copies/commits/0").exists, "the batch", PATIENCE)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out) == (0, "after it\n")
