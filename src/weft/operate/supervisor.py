"""Streaming pipelines that stay up: started again after an error, stopped by signals, watched by whoever wants to."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weft.errors import DeclarationError, MissingExtraError, SettingsError
from weft.operate.listener import RunListener
from weft.operate.run_options import Restarts, Running
from weft.operate.runner import described
from weft.pipelines.streaming.execution import Report, StreamingEngine

_log = logging.getLogger("weft.operate")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# They are the same at every start, until somebody changes something.
_LASTING = (DeclarationError, SettingsError, MissingExtraError)


class Supervisor:
    """Runs one pipeline on an engine until it is stopped; with `once` until what is there now is done."""

    def __init__(
        self,
        engine: StreamingEngine,
        *,
        once: bool = False,
        restarts: Restarts | None = None,
        watchers: Sequence[RunListener] = (),
    ) -> None:
        self.engine, self.once, self.restarts = engine, once, restarts
        self.watchers = list(watchers)
        self._stopping = threading.Event()
        self._is_running = False
        self._failures = 0
        self._unread: BrokenPipeError | None = None

    def run(self) -> None:
        """Run it. SIGTERM and Ctrl-C finish the batch in hand; then this returns, or raises `KeyboardInterrupt`.
        A watcher's `BrokenPipeError` ends it so too, and is raised."""
        with self.engine.locked(), _signalled(self.stop):
            while not self._stopping.is_set():
                try:
                    self._run_once()
                    break
                except Exception as error:
                    pause = self._failed(error)
                    if pause is None:
                        raise
                    self.engine.forget(error)
                    self._stopping.wait(pause)
        if self._unread is not None:
            raise self._unread

    def now_behind(self) -> dict[str, int]:
        """By source, how far it is behind; nothing before it runs."""
        return self.engine.lag.now()

    def stop(self) -> None:
        """Finish the batch in hand, and end. Does not wait for it."""
        self._stopping.set()
        if self._is_running:
            threading.Thread(target=self.engine.stop, name="weft-stop", daemon=True).start()

    def _run_once(self) -> None:
        wants_idle = any(each.wants_idle for each in self.watchers)
        self.engine.start(
            once=self.once,
            committed=self._committed,
            report=self._reported if self.watchers else None,
            idle=(lambda: self._tell(lambda each: each.idle())) if wants_idle else None,
        )
        self._is_running = True
        _log.info("%s runs, with its checkpoint in %s", self.engine.name, self.engine.location)
        self._tell(lambda each: each.started(self.engine.lag))
        try:
            if self._stopping.is_set():  # by a caller who did not see that it runs
                self.engine.stop()
            self.engine.wait()
        finally:
            self._is_running = False

    def _failed(self, error: Exception) -> float | None:
        pause = self._pause_after(error)
        self._tell(lambda each: each.failed(error, pause))
        return pause

    def _pause_after(self, error: Exception) -> float | None:
        """How long to wait before the next start; `None` where there is none."""
        self._failures += 1
        if self.restarts is None or isinstance(error, _LASTING) or self._stopping.is_set():
            return None
        if self.restarts.max_restarts is not None and self._failures > self.restarts.max_restarts:
            error.add_note(f"{self.engine.name} was started again {self.restarts.max_restarts} times.")
            return None
        pause = self.restarts.seconds(self._failures)
        text = "%s failed, and is started again in %.1f s: %s"
        _log.warning(text, self.engine.name, pause, described(error))
        return pause

    def _committed(self) -> None:
        self._failures = 0

    def _reported(self, report: Report) -> None:
        self._tell(lambda each: each.batch(report))

    def _tell(self, tell: Callable[[RunListener], None]) -> None:
        """Tell all watchers. Nothing fails for what one raises: a batch that it is told of is loaded, and would be
        again."""
        for each in self.watchers:
            try:
                tell(each)
            except BrokenPipeError as error:
                self._unread = error
                self.stop()
            except Exception:
                _log.exception("%s goes on, but a watcher of it failed", self.engine.name)


def supervise(engine: StreamingEngine, running: Running | None = None, watchers: Sequence[RunListener] = ()) -> None:
    """Run a pipeline as `weft consume` does."""
    running = running or Running()
    restarts = running if running.restart_on_error else None
    supervisor = Supervisor(engine, once=running.once, restarts=restarts, watchers=watchers)
    if running.metrics_port is None:
        supervisor.run()
        return
    from weft.operate.streaming_metrics import served

    with served(engine.name, supervisor.now_behind, running.metrics_host, running.metrics_port) as (metrics, _):
        supervisor.watchers.append(metrics)
        supervisor.run()


@contextmanager
def _signalled(stop: Any) -> Iterator[None]:
    """Have SIGTERM and Ctrl-C end the block in order. A second one ends the process, as if nobody had asked for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False

    def heed(number: int, _: Any) -> None:
        nonlocal interrupted
        interrupted = interrupted or number == signal.SIGINT
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        stop()

    # What was started to ignore them, in the background of a shell, goes on to.
    before = {each: found for each in _SIGNALS if (found := signal.getsignal(each)) not in (None, signal.SIG_IGN)}
    for each in before:
        signal.signal(each, heed)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if interrupted:
        raise KeyboardInterrupt
