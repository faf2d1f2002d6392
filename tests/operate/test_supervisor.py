"""Streaming pipelines that are started again, up to a limit and not where it is no use; watched.

Most run on an engine that plays a script (`scripted_engine.py`). The last part runs on Spark, one of it with a
PostgreSQL that is killed.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import servers
import weft
from collector import collector
from operate.scripted_engine import IDLE, ScriptedEngine, StartFails
from servers import wait_until
from weft.engine import session
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.query import Query
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate import metrics
from weft.operate.listener import RunListener
from weft.operate.run_options import OPTIONS, Running
from weft.operate.streaming_metrics import served
from weft.operate.supervisor import Supervisor, signalled, supervise
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.execution import Lag, Report

pytest.importorskip("pyspark")

PATIENCE = 120
QUICK = Running(restart_on_error=True, min_backoff_ms=50, max_backoff_ms=400)
AT_ONCE = Running(restart_on_error=True, min_backoff_ms=2, max_backoff_ms=8)


class Witness(RunListener):
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


def down() -> weft.ConnectionFailedError:
    return weft.ConnectionFailedError("The target does not answer.")


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


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return str(answer.read().decode())


def counted(text: str, name: str) -> float:
    (line,) = [each for each in text.splitlines() if each.startswith(f'weft_streaming_{name}{{pipeline="copies"')]
    return float(line.rpartition(" ")[2])


# ------------------------------------------------------------------------------------------------------------- restarts


def test_started_again_until_it_works() -> None:
    locked: list[bool] = []

    class Looking(Witness):
        def failed(self, error: Exception, again_in: float | None) -> None:
            super().failed(error, again_in)
            locked.append(engine.is_locked)

    engine = ScriptedEngine([10, down()], [StartFails(down())], [down()], [5, down()], [1])
    witness = Looking()
    with running(Supervisor(engine, AT_ONCE, [witness])):
        wait_until(lambda: len(witness.batches) == 3, "the last batch", PATIENCE)
    assert [each.consumed for each in witness.batches] == [10, 5, 1]
    assert all(isinstance(error, weft.ConnectionFailedError) for error, _ in witness.failures)
    # No other process may run it between two starts, and each start that failed lets go of what it holds.
    assert locked == [True] * 4
    assert engine.forgotten == [error for error, _ in witness.failures]
    assert engine.failures == [str(error) for error, _ in witness.failures]
    assert not engine.is_locked
    # One failed before it ran.
    assert (engine.starts, witness.starts) == (5, 4)
    # The pauses double, until a batch succeeds: that counts as a new beginning.
    pauses = [pause or 0 for _, pause in witness.failures]
    for pause, longest in zip(pauses, [0.002, 0.004, 0.008, 0.002], strict=True):
        assert longest / 2 <= pause <= longest


def test_a_batch_of_nothing_is_a_beginning_too() -> None:
    """No watcher hears of it."""
    engine = ScriptedEngine([down()], [0, down()], [StartFails(weft.SettingsError("wrong"))])
    witness = Witness()
    with pytest.raises(weft.SettingsError):
        Supervisor(
            engine, Running(restart_on_error=True, min_backoff_ms=1, max_backoff_ms=2, max_restarts=1), [witness]
        ).run()
    assert witness.batches == []
    assert [pause is None for _, pause in witness.failures] == [False, False, True]


def test_not_for_ever() -> None:
    witness = Witness()
    limited = Running(restart_on_error=True, min_backoff_ms=1, max_backoff_ms=2, max_restarts=2)
    with pytest.raises(weft.ConnectionFailedError) as caught:
        Supervisor(ScriptedEngine([down()]), limited, [witness]).run()
    assert "copies was started again 2 times." in caught.value.__notes__
    assert [pause is None for _, pause in witness.failures] == [False, False, True]


def test_not_unless_it_is_asked_for() -> None:
    witness = Witness()
    for run in (
        Supervisor(ScriptedEngine([down()]), listeners=[witness]).run,
        lambda: supervise(ScriptedEngine([down()]), Running(max_restarts=5), [witness]),
    ):
        with pytest.raises(weft.ConnectionFailedError):
            run()
    assert [pause for _, pause in witness.failures] == [None, None]


@pytest.mark.parametrize("kind", [weft.SettingsError, weft.DeclarationError, weft.MissingExtraError])
def test_what_cannot_heal(kind: type[Exception]) -> None:
    for step in (kind("wrong"), StartFails(kind("wrong"))):
        engine, witness = ScriptedEngine([step]), Witness()
        with pytest.raises(kind, match="wrong"):
            Supervisor(engine, AT_ONCE, [witness]).run()
        assert [pause for _, pause in witness.failures] == [None]
        assert not engine.is_locked


def test_one_process_runs_it() -> None:
    engine, witness = ScriptedEngine([1]), Witness()
    with engine.locked(), pytest.raises(weft.BusyError, match="runs already"):
        Supervisor(engine, None, [witness]).run()
    assert (engine.starts, witness.failures) == (0, [])


def test_a_second_one_stands_by(caplog: pytest.LogCaptureFixture) -> None:
    """It takes over when the first one has ended. Until then it has not failed, however long that takes."""
    caplog.set_level("INFO", "weft.operate")
    engine, witness = ScriptedEngine([1]), Witness()
    limited = Running(restart_on_error=True, min_backoff_ms=1, max_backoff_ms=2, max_restarts=0)
    with contextlib.ExitStack() as first:
        first.enter_context(engine.locked())
        with running(Supervisor(engine, limited, [witness])):
            wait_until(lambda: engine.refused > 3, "it to try again", PATIENCE)
            first.close()
            wait_until(lambda: bool(witness.batches), "the batch", PATIENCE)
    assert (engine.starts, witness.failures, engine.is_locked) == (1, [], False)
    stands_by, _ = caplog.messages
    assert stands_by == "copies stands by: The pipeline 'copies' runs already."


def test_a_signal_while_its_event_is_locked() -> None:
    stopping = threading.Event()
    with signalled(stopping.set):
        with stopping._cond:  # as while the main thread begins to wait for it
            signal.raise_signal(signal.SIGTERM)
        assert stopping.wait(PATIENCE)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_one_that_stands_by_is_stopped() -> None:
    engine = ScriptedEngine([1])
    with engine.locked(), running(Supervisor(engine, QUICK)):
        wait_until(lambda: engine.refused > 0, "it to try", PATIENCE)
    assert engine.starts == 0


def test_batches_come_after_the_start() -> None:
    """Also where the first one is done before the engine's `start` returns."""

    class Eager(ScriptedEngine):
        def start(self, **options: Any) -> None:
            super().start(**options)
            assert self._thread is not None
            self._thread.join(0.2)

    told: list[str] = []

    class Noting(Witness):
        def started(self, lag: Lag) -> None:
            told.append("started")

        def batch(self, report: Report) -> None:
            told.append("batch")

    Supervisor(Eager([1]), Running(once=True), [Noting()]).run()
    assert told == ["started", "batch"]


def test_what_a_restart_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "weft.operate")
    supervise(ScriptedEngine([down()], [1]), Running(once=True, restart_on_error=True, min_backoff_ms=0))
    assert [record.getMessage() for record in caplog.records] == [
        "copies runs, with its checkpoint in memory",
        "copies failed, and is started again in 0.0 s: The target does not answer.",
        "copies runs, with its checkpoint in memory",
    ]


# ------------------------------------------------------------------------------------------------------------- watchers


class Clumsy(RunListener):
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


def test_a_watcher_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged. The batch that it was told of is done, and others are told."""
    witness = Witness()
    engine = ScriptedEngine([down()], [1, IDLE, 2])
    with running(Supervisor(engine, AT_ONCE, [Clumsy(), witness])):
        wait_until(lambda: len(witness.batches) == 2, "another batch", PATIENCE)
    assert [each.consumed for each in witness.batches] == [1, 2]
    assert witness.starts == len(witness.failures) + 1 == 2
    logged = {str(each.exc_info[1]) for each in caplog.records if each.exc_info}
    assert logged == {"started", "batch", "idle", "failed"}


def test_a_reader_that_goes_away() -> None:
    """What a watcher writes is read no more: it ends, though not for a failure of the pipeline."""

    class Unread(Witness):
        def batch(self, report: Report) -> None:
            raise BrokenPipeError

    engine, witness, other = ScriptedEngine([10]), Unread(), Witness()
    with pytest.raises(BrokenPipeError):
        Supervisor(engine, AT_ONCE, [witness, other]).run()
    assert (engine.starts, engine.batches, engine.is_locked) == (1, 1, False)
    assert (witness.failures, len(other.batches)) == ([], 1)


def test_looks_that_find_nothing_are_told_to_who_asks() -> None:
    class Patient(Witness):
        wants_idle = True
        looks = 0

        def idle(self) -> None:
            self.looks += 1

    patient = Patient()
    supervise(ScriptedEngine([IDLE, 1, IDLE]), Running(once=True), [patient])
    supervise(ScriptedEngine([IDLE]), Running(once=True), [Witness()])
    assert patient.looks == 2


def test_metrics() -> None:
    engine, witness = ScriptedEngine([IDLE, 10, down()], [down()], [5, IDLE]), Witness()
    supervisor = Supervisor(engine, AT_ONCE, [witness])
    with served(supervisor.engine, "127.0.0.1", 0) as (metrics, port):
        supervisor.listeners.append(metrics)
        with running(supervisor):
            wait_until(lambda: counted(_metrics(port), "idle_iterations_total") == 2, "the last look", PATIENCE)
            text = _metrics(port)
    counts = {"rows_consumed": 15, "rows_written": 15, "batches": 2, "errors": 2, "restarts": 2, "dlq_writes": 0}
    assert {name: counted(text, f"{name}_total") for name in counts} == counts
    assert counted(text, "iterations_total") == 4
    assert counted(text, "batch_seconds_count") == 2
    assert counted(text, "lag") == 7
    assert counted(text, "last_batch_timestamp_seconds") > 1.7e9


def test_metrics_are_served_while_it_runs() -> None:
    port = servers.free_port()
    texts: list[str] = []
    supervise(ScriptedEngine([2, lambda: texts.append(_metrics(port))]), Running(once=True, metrics_port=port))
    assert counted(texts[0], "rows_consumed_total") == 2
    with pytest.raises(OSError):
        _metrics(port)


@pytest.mark.parametrize("sink", ["stdout", "memory", "prometheus", "otlp"])
def test_sinks_of_metrics(sink: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of runs take the metrics of a pipeline too, the last values at its end."""
    port, texts = servers.free_port(), []
    monkeypatch.setattr(metrics, "MEMORY", metrics.Metrics())
    with collector() as collected:
        url = {"prometheus": f"prometheus://127.0.0.1:{port}", "otlp": collected.url}.get(sink, f"{sink}://")
        steps = [lambda: texts.append(_metrics(port))] if sink == "prometheus" else []
        engine = ScriptedEngine([2, *steps])
        supervise(engine, Running(once=True, metrics=url))
        sent = collected.received
    if sink == "stdout":
        texts.append(capsys.readouterr().out)
    if sink == "memory":
        value = metrics.MEMORY.value
        assert value("weft_streaming_rows_consumed_total", pipeline=engine.name) == 2
        assert value("weft_streaming_rows_consumed_total", pipeline="other") is None
    elif sink == "otlp":
        found = {each.name: each for each in sent[-1][1].resource_metrics[0].scope_metrics[0].metrics}
        (point,) = found["weft_streaming_rows_consumed"].sum.data_points
        assert point.as_double == 2 and found["weft_streaming_rows_consumed"].sum.is_monotonic
        (point,) = found["weft_streaming_batch_seconds"].histogram.data_points
        assert point.count == sum(point.bucket_counts) == 1
        assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
        assert point.sum > 0 and not point.HasField("min")
        assert found["weft_streaming_lag"].gauge.data_points[0].as_int == 7
    else:
        assert counted(texts[0], "rows_consumed_total") == 2


def test_a_port_that_is_taken() -> None:
    engine = ScriptedEngine([1])
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(weft.ConnectionFailedError, match=f"at 127.0.0.1:{port}: Address already in use"):
            supervise(engine, Running(metrics_port=port))
    assert engine.starts == 0


# -------------------------------------------------------------------------------------------------------------- options


@given(st.integers(0, 10_000), st.integers(0, 100_000), st.integers(1, 10_000))
def test_pauses(least: int, more: int, failures: int) -> None:
    """They double, part of them is chance, and they have an end."""
    restarts = Running(restart_on_error=True, min_backoff_ms=least, max_backoff_ms=least + more)
    longest = min(least * 2 ** (failures - 1), least + more) / 1000
    assert longest / 2 <= restarts.backoff_seconds(failures) <= longest


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
        Running(**options)


def test_the_command_and_the_functions_take_the_same() -> None:
    from weft.cli.consume import consume

    taken = {each.name: each.default for each in consume.params}
    of_the_project = {"run_log", "alerters", "log_format", "traces"}
    assert set(OPTIONS) == taken.keys() - {"what", "every", "modules", "output", "no_engine"} - of_the_project
    given = {name: taken[name] for name in ("metrics_host", "min_backoff_ms", "max_backoff_ms")}
    assert Running(**given) == Running()
    for function in (weft.run_streaming_pipeline, weft.run_pipeline):
        assert all(f"`{name}`" in (function.__doc__ or "") for name in OPTIONS)


# ------------------------------------------------------------------------------------------------------------- on Spark


@pytest.fixture
def server(need_server: Callable[[str], None]) -> Iterator[servers.Server]:
    need_server("postgres")
    server = servers.KINDS["postgres"]()
    server.start()
    yield server
    server.kill()


def copies(numbers: Any, target: Any) -> SparkEngine:
    return SparkEngine(make(name="copies", source=numbers, target=target, target_table=("public", "copies")))


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.timing
def test_a_target_that_is_down_for_a_while(numbers: Any, server: servers.Server) -> None:
    url = server.create_database("target")
    witness = Witness()
    supervisor = Supervisor(copies(numbers, weft.PostgresConnection(url)), QUICK, [witness])
    weft.publish_sync(numbers, [{"n": n} for n in range(10)])
    with served(supervisor.engine, "127.0.0.1", 0) as (metrics, port), running(supervisor):
        supervisor.listeners.append(metrics)
        wait_until(lambda: len(witness.batches) == 1, "the first batch", PATIENCE)
        server.kill()
        weft.publish_sync(numbers, [{"n": n} for n in range(10, 15)])
        wait_until(lambda: len(witness.failures) >= 2, "failures", PATIENCE)
        # It is still ours: nobody else may run it between two starts.
        with pytest.raises(weft.BusyError, match="runs already"):
            Checkpoint("copies").lock.take()
        server.start()
        wait_until(lambda: len(witness.batches) == 2, "the batch after it", PATIENCE)
        # Listeners hear of a batch before its position is stored, from which the lag is counted.
        wait_until(lambda: counted(_metrics(port), "lag") == 0, "the lag to be none", PATIENCE)
        text = _metrics(port)
    assert all(isinstance(error, weft.ConnectionFailedError) for error, _ in witness.failures)
    assert witness.starts == len(witness.failures) + 1
    assert [each.consumed for each in witness.batches] == [10, 5]
    assert counted(text, "errors_total") == counted(text, "restarts_total") == len(witness.failures)
    with contextlib.closing(server.connect("target")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT n FROM public.copies ORDER BY n")
        assert [n for (n,) in cursor.fetchall()] == list(range(15))


class Listening(Witness):
    """Is told of Spark's own events too."""

    wants_idle = True


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.timing
def test_nothing_is_left_of_earlier_starts(numbers: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither here nor in the JVM, where each session that had a query would go on to listen."""
    caplog.set_level("CRITICAL", "py4j")  # what pytest keeps of its log has frames of each failure
    weft.publish_sync(numbers, {"n": 1})
    nobody = weft.PostgresConnection(f"postgres://127.0.0.1:{servers.free_port()}/none")

    def start(times: int) -> None:
        restarts = Running(restart_on_error=True, min_backoff_ms=0, max_backoff_ms=0, max_restarts=times - 1)
        witness = Listening()
        with pytest.raises(weft.ConnectionFailedError):
            Supervisor(copies(numbers, nobody), restarts, [witness]).run()
        assert witness.starts == times

    start(1)
    before = _alive()
    start(4)
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


@pytest.mark.spark
def test_what_cannot_heal_on_spark(numbers: Any) -> None:
    weft.publish_sync(numbers, {"n": 1})
    witness = Witness()
    unset = weft.PostgresConnection("${NOBODY_SET_THIS}")
    with pytest.raises(weft.SettingsError, match="NOBODY_SET_THIS"):
        Supervisor(copies(numbers, unset), QUICK, [witness]).run()
    assert [pause for _, pause in witness.failures] == [None]
    # Nothing of it is left in the way of the next start.
    with Checkpoint("copies").locked():
        pass


@pytest.mark.spark
def test_run_streaming_pipeline(numbers: Any) -> None:
    weft.publish_sync(numbers, [{"n": 1}, {"n": 2}])
    weft.run_streaming_pipeline(name="copies", source=numbers, target="default", target_table="copies", once=True)
    assert weft.read("SELECT n FROM copies ORDER BY n", source="default").toArrow().to_pylist() == [{"n": 1}, {"n": 2}]
    with pytest.raises(weft.DeclarationError, match="Did you mean 'target_table'"):
        weft.run_streaming_pipeline(name="copies", source=numbers, target="default", target_tabel="copies", once=True)


@pytest.mark.spark
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
