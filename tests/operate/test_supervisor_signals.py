"""Streaming pipelines that are stopped, by a caller or by signals: the batch in hand is finished."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import weft
from operate.scripted_engine import InHand, ScriptedEngine
from operate.test_supervisor import AT_ONCE, PATIENCE, QUICK, Witness, down, running
from servers import wait_until
from weft.engine.streaming import spark_engine
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate.run_options import Running
from weft.operate.supervisor import Supervisor, supervise
from weft.pipelines.streaming.declare import make

pytest.importorskip("pyspark")


def test_what_is_there_now() -> None:
    engine, witness = ScriptedEngine([3, 4]), Witness()
    supervise(engine, Running(once=True), [witness])
    assert (engine.once, engine.is_locked) == (True, False)
    assert [each.consumed for each in witness.batches] == [3, 4]


def test_stopped_between_two_starts() -> None:
    """Whoever stops it does not wait for the pause to be over."""
    witness = Witness()
    an_hour = Running(restart_on_error=True, min_backoff_ms=3_600_000, max_backoff_ms=3_600_000)
    with running(Supervisor(ScriptedEngine([down()]), an_hour, [witness])):
        wait_until(lambda: bool(witness.failures), "the failure", PATIENCE)


def test_stopped_before_it_starts() -> None:
    engine = ScriptedEngine([1])
    supervisor = Supervisor(engine)
    supervisor.stop()
    supervisor.run()
    assert engine.starts == 0


def send(number: signal.Signals) -> Callable[[], None]:
    """A step that sends a signal to the main thread: another one would not wake it from its wait."""
    return lambda: signal.pthread_kill(threading.main_thread().ident or 0, number)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Both signals are heeded, also where the tests run in the background; the same handlers are there at the end."""
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        yield
        assert {number: signal.getsignal(number) for number in ours} == ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.timing
@pytest.mark.usefixtures("handlers")
def test_a_signal_ends_it_after_the_batch_in_hand(number: signal.Signals) -> None:
    batch, witness = InHand(10), Witness()

    def interrupt() -> None:
        assert batch.begun.wait(PATIENCE)
        send(number)()
        wait_until(lambda: engine.is_stopping, "the signal to be heeded", PATIENCE)
        # A second one ends the process at once, as if nobody heeded the first.
        assert signal.getsignal(number) is signal.SIG_DFL
        assert (engine.is_locked, witness.batches) == (True, [])
        batch.released.set()

    engine = ScriptedEngine([batch, 5])
    threading.Thread(target=interrupt, daemon=True).start()
    # Ctrl-C also ends what called it; after SIGTERM it goes on.
    with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else contextlib.nullcontext():
        Supervisor(engine, AT_ONCE, [witness]).run()
    assert [each.consumed for each in witness.batches] == [10]
    assert not engine.is_locked


@pytest.mark.timing
@pytest.mark.usefixtures("handlers")
def test_a_signal_while_it_starts() -> None:
    class Slow(ScriptedEngine):
        def start(self, **options: Any) -> None:
            send(signal.SIGTERM)()
            super().start(**options)

    witness = Witness()
    Supervisor(Slow([]), AT_ONCE, [witness]).run()
    assert (witness.starts, witness.failures) == (1, [])


@pytest.mark.timing
@pytest.mark.usefixtures("handlers")
def test_a_signal_between_two_starts() -> None:
    class Impatient(Witness):
        def failed(self, error: Exception, again_in: float | None) -> None:
            super().failed(error, again_in)
            send(signal.SIGTERM)()

    engine, witness = ScriptedEngine([down()]), Impatient()
    Supervisor(engine, Running(restart_on_error=True, min_backoff_ms=60_000, max_backoff_ms=60_000), [witness]).run()
    assert engine.starts == 1


@pytest.mark.timing
@pytest.mark.usefixtures("handlers")
def test_an_error_after_a_signal_is_not_tried_again() -> None:
    heeded = threading.Event()

    def stop_and_wait() -> None:
        send(signal.SIGTERM)()
        assert heeded.wait(PATIENCE)

    class Failing(ScriptedEngine):
        def stop(self) -> None:
            heeded.set()  # and the batch in hand fails

    engine = Failing([stop_and_wait, down()])
    with pytest.raises(weft.ConnectionFailedError):
        Supervisor(engine, AT_ONCE).run()
    assert engine.starts == 1


def test_signals_that_are_ignored_stay_so() -> None:
    """As for a command that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        witness = Witness()
        supervise(ScriptedEngine([send(signal.SIGINT), 5]), Running(once=True), [witness])
        assert [each.consumed for each in witness.batches] == [5]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.spark
@pytest.mark.timing
@pytest.mark.usefixtures("handlers")
def test_a_signal_ends_a_query_without_new_rows(numbers: Any) -> None:
    class Stopping(Witness):
        wants_idle = True
        was_idle = False

        def idle(self) -> None:
            if self.batches and not self.was_idle:  # a second signal would end the process
                self.was_idle = True
                send(signal.SIGTERM)()

    weft.publish_sync(numbers, {"n": 1})
    witness = Stopping()
    engine = SparkEngine(make(name="copies", source=numbers, target="default", target_table="copies"))
    Supervisor(engine, QUICK, [witness]).run()
    assert (witness.starts, witness.failures, witness.was_idle) == (1, [], True)


@pytest.mark.timing
@pytest.mark.usefixtures("handlers")
def test_a_script_is_stopped_as_the_command_is(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM ends the call, and what comes after it in the script is done."""
    engine = ScriptedEngine([1, send(signal.SIGTERM)])
    monkeypatch.setattr(spark_engine, "SparkEngine", lambda pipeline: engine)
    weft.run_streaming_pipeline(name="copies", source=numbers, target="default", target_table="copies")
    assert (engine.once, engine.batches, engine.is_locked) == (False, 1, False)
