"""Streaming pipelines that stay up: started again after an error, stopped by signals, reported to listeners."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from weft.errors import BusyError, DeclarationError, MissingExtraError, SettingsError
from weft.operate import sinks
from weft.operate.listener import RunListener
from weft.operate.run_options import Running
from weft.operate.runner import described
from weft.pipelines.streaming.execution import StreamingEngine

_log = logging.getLogger("weft.operate")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# These fail at every start, until code, settings or packages change.
_LASTING = (DeclarationError, SettingsError, MissingExtraError)


class Supervisor:
    """Runs one pipeline on an engine until it is stopped; with `once` until what is there now is done."""

    def __init__(
        self, engine: StreamingEngine, running: Running | None = None, listeners: Sequence[RunListener] = ()
    ) -> None:
        self.engine, self.running = engine, running or Running()
        self.listeners = list(listeners)
        self._stopping = threading.Event()
        self._is_running = False
        self._failures = 0
        self._unread: BrokenPipeError | None = None
        self._about = {"pipeline": engine.name}

    def run(self) -> None:
        """Run it. SIGTERM and Ctrl-C finish the current batch; then this returns, or raises `KeyboardInterrupt`.
        A listener's `BrokenPipeError` ends it so too, and is raised."""
        with ExitStack() as held, signalled(self.stop):
            self._lock(held)
            while not self._stopping.is_set():
                try:
                    self._run_once()
                    break
                except Exception as error:
                    pause = self._pause_after(error)
                    self.engine.note_failure(described(error))
                    self._notify("failed", error, pause)
                    if pause is None:
                        raise
                    self.engine.forget(error)
                    self._stopping.wait(pause)
        if self._unread is not None:
            raise self._unread

    def _lock(self, held: ExitStack) -> None:
        """Keep other processes out. While another one runs the pipeline, this one stands by if it is to restart."""
        for attempt in itertools.count(1):
            try:
                held.enter_context(self.engine.locked())
                return
            except BusyError as error:
                if not self.running.restart_on_error:
                    raise
                if attempt == 1:
                    _log.info("%s stands by: %s", self.engine.name, error.what, extra=self._about)
            if self._stopping.wait(self.running.backoff_seconds(attempt)):
                return

    def stop(self) -> None:
        """Finish the current batch, and end. Does not wait for it."""
        self._stopping.set()
        if self._is_running:
            threading.Thread(target=self.engine.stop, name="weft-stop", daemon=True).start()

    def _run_once(self) -> None:
        has_started = threading.Event()

        def notify(method: str, *details: object) -> None:
            has_started.wait()  # the first batch may be done before the engine's `start` returns
            self._notify(method, *details)

        self._is_running = True  # a start may take long, if tables are copied first
        try:
            try:
                self.engine.start(
                    once=self.running.once,
                    committed=self._committed,
                    report=partial(notify, "batch") if self.listeners else None,
                    idle=partial(notify, "idle") if any(each.wants_idle for each in self.listeners) else None,
                )
                text = "%s runs, with its checkpoint in %s"
                _log.info(text, self.engine.name, self.engine.location, extra=self._about)
                self._notify("started", self.engine.lag)
            finally:
                has_started.set()
            if self._stopping.is_set():  # by a caller who did not see that it runs
                self.engine.stop()
            self.engine.wait()
        finally:
            self._is_running = False

    def _committed(self) -> None:
        self._failures = 0

    def _pause_after(self, error: Exception) -> float | None:
        """Return how many seconds to wait before the next start; `None` where there is none."""
        self._failures += 1
        running = self.running
        if not running.restart_on_error or isinstance(error, _LASTING) or self._stopping.is_set():
            return None
        if running.max_restarts is not None and self._failures > running.max_restarts:
            error.add_note(f"{self.engine.name} was started again {running.max_restarts} times.")
            return None
        pause = running.backoff_seconds(self._failures)
        text = "%s failed, and is started again in %.1f s: %s"
        _log.warning(text, self.engine.name, pause, described(error), extra=self._about)
        return pause

    def _notify(self, method: str, *details: object) -> None:
        """Call a method of all listeners. An error of one fails nothing: the batch that it gets is loaded, and would be
        loaded again."""
        for each in self.listeners:
            try:
                getattr(each, method)(*details)
            except BrokenPipeError as error:
                self._unread = error
                self.stop()
            except Exception:
                _log.exception("%s goes on, but a listener failed", self.engine.name, extra=self._about)


def supervise(engine: StreamingEngine, running: Running | None = None, listeners: Sequence[RunListener] = ()) -> None:
    """Run a pipeline as `weft consume` does."""
    supervisor = Supervisor(engine, running, listeners)
    running = supervisor.running
    with ExitStack() as held:
        if running.metrics_port is not None:
            from weft.operate.streaming_metrics import served

            metrics, _ = held.enter_context(served(engine, running.metrics_host, running.metrics_port))
            supervisor.listeners.append(metrics)
        if running.metrics is not None and sinks.parsed(running.metrics).scheme != "null":
            from weft.operate.metrics import exported
            from weft.operate.streaming_metrics import StreamingMetrics

            counted = StreamingMetrics(engine)
            held.enter_context(exported(counted.registry.collect, running.metrics))
            supervisor.listeners.append(counted)
        supervisor.run()


@contextmanager
def signalled(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and Ctrl-C, in a thread. A second signal has its default effect, and ends the process.

    Python handles a signal between any two steps of the main thread, which may hold the lock of the very event that
    `stop` sets: called there, it would wait for itself. A `SimpleQueue` may be put into at any moment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False
    signals: SimpleQueue[bool] = SimpleQueue()

    def wait() -> None:
        if signals.get():
            stop()

    stopper = threading.Thread(target=wait, name="weft signals", daemon=True)

    def handle(number: int, _: Any) -> None:
        nonlocal interrupted
        interrupted = interrupted or number == signal.SIGINT
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        signals.put(True)

    # A process that was started to ignore a signal, in the background of a shell, still ignores it.
    before = {each: old for each in _SIGNALS if (old := signal.getsignal(each)) not in (None, signal.SIG_IGN)}
    stopper.start()
    for each in before:
        signal.signal(each, handle)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        signals.put(False)
        stopper.join()
    if interrupted:
        raise KeyboardInterrupt
