"""Streaming pipelines that stay up: started again after an error, stopped by signals, watched by whoever wants to."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from weft.engine.streaming.batch import Written
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.progress import Lag
from weft.engine.streaming.query import Query
from weft.errors import ConnectionFailedError, DeclarationError, MissingExtraError, SettingsError, WeftError
from weft.operate.runner import described
from weft.operate.running import Restarts, Running
from weft.operate.watcher import Report, Watcher
from weft.pipelines.streaming.spec import StreamingPipeline

_log = logging.getLogger("weft.operate")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# They are the same at every start, until somebody changes something.
_LASTING = (DeclarationError, SettingsError, MissingExtraError)


class Supervisor:
    """Runs one pipeline until it is stopped; with `once` until what is there now is done."""

    def __init__(
        self,
        pipeline: StreamingPipeline,
        *,
        once: bool = False,
        restarts: Restarts | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.pipeline, self.once, self.restarts = pipeline, once, restarts
        self.watchers = list(watchers)
        self.checkpoint = Checkpoint.of(pipeline)
        self.lag = Lag((), self.checkpoint)
        self._stopping = threading.Event()
        self._query: Query | None = None
        self._spark: Any = None
        self._failures = 0
        self._unread: BrokenPipeError | None = None

    def run(self) -> None:
        """Run it. SIGTERM and Ctrl-C finish the batch in hand; then this returns, or raises `KeyboardInterrupt`.
        A watcher's `BrokenPipeError` ends it so too, and is raised."""
        with self.checkpoint.locked(), _signalled(self.stop):
            self.lag = Lag(self.pipeline.sources, self.checkpoint)
            while not self._stopping.is_set():
                query = self._following()
                try:
                    self._run_once(query)
                    break
                except Exception as error:
                    pause = self._failed(error)
                    if pause is None:
                        raise
                    self._spark = query.spark
                    query.forget(error)
                    self._stopping.wait(pause)
        if self._unread is not None:
            raise self._unread

    def now_behind(self) -> dict[str, int]:
        """By source, how far it is behind; nothing before it runs."""
        return self.lag.now()

    def stop(self) -> None:
        """Finish the batch in hand, and end. Does not wait for it."""
        self._stopping.set()
        if self._query is not None:
            threading.Thread(target=self._query.stop, name="weft-stop", daemon=True).start()

    def _following(self) -> Query:
        wants_idle = any(each.wants_idle for each in self.watchers)
        query = Query(
            self.pipeline,
            once=self.once,
            written=lambda written: self._written(query, written),
            idle=(lambda: self._tell(lambda each: each.idle())) if wants_idle else None,
            checkpoint=self.checkpoint,
            spark=self._spark,
        )
        return query

    def _run_once(self, query: Query) -> None:
        query.start()
        self._query = query
        _log.info("%s runs, with its checkpoint in %s", self.pipeline.name, self.checkpoint.location)
        self._tell(lambda each: each.started(self.lag))
        try:
            if self._stopping.is_set():  # by whoever did not see the query yet
                query.stop()
            query.wait()
        except Exception as error:
            if _lost_jvm(error):
                raise ConnectionFailedError(
                    f"Spark's JVM ended while {self.pipeline.name} ran.",
                    hint="What it said last is in .weft/spark.log.",
                ) from error
            raise
        finally:
            self._query = None

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
            error.add_note(f"{self.pipeline.name} was started again {self.restarts.max_restarts} times.")
            return None
        pause = self.restarts.seconds(self._failures)
        told = (self.pipeline.name, pause, described(error))
        _log.warning("%s failed, and is started again in %.1f s: %s", *told)
        return pause

    def _written(self, query: Query, written: Written) -> None:
        self._failures = 0
        self.lag.moved(query.watched, written.batch_id)
        # The first look can be a batch of nothing.
        if not self.watchers or not (written.counts or written.dead_letters):
            return
        counts = written.counts.values()
        consumed = self.lag.consumed(query.watched) if self.pipeline.transform_sql is not None else 0
        if not consumed:  # without SQL each target was given all there is
            consumed = sum(each.rows_read for each in counts) // len(self.pipeline.targets)
        report = Report(
            pipeline=self.pipeline.name,
            batch_id=written.batch_id,
            consumed=consumed,
            written=dict(written.rows),
            dead=written.dead_letters,
            replayed=bool(counts) and all(each.replayed for each in counts),
            seconds=query.seconds,
            ended_at=datetime.now(UTC),
        )
        self._tell(lambda each: each.batch(report))

    def _tell(self, tell: Callable[[Watcher], None]) -> None:
        """Tell all watchers. Nothing fails for what one raises: a batch that it is told of is loaded, and would be
        again."""
        for each in self.watchers:
            try:
                tell(each)
            except BrokenPipeError as error:
                self._unread = error
                self.stop()
            except Exception:
                _log.exception("%s goes on, but a watcher of it failed", self.pipeline.name)


def supervise(pipeline: StreamingPipeline, running: Running | None = None, watchers: Sequence[Watcher] = ()) -> None:
    """Run a pipeline as `weft consume` does."""
    running = running or Running()
    restarts = running if running.restart_on_error else None
    supervisor = Supervisor(pipeline, once=running.once, restarts=restarts, watchers=watchers)
    if running.metrics_port is None:
        supervisor.run()
        return
    from weft.operate.streaming_metrics import served

    with served(pipeline.name, supervisor.now_behind, running.metrics_host, running.metrics_port) as (metrics, _):
        supervisor.watchers.append(metrics)
        supervisor.run()


def _lost_jvm(error: Exception) -> bool:
    """Whether a call into the JVM found nobody there."""
    from py4j.protocol import Py4JNetworkError

    cause = error.__cause__ if type(error) is WeftError else error
    return isinstance(cause, Py4JNetworkError | ConnectionError) and not isinstance(cause, WeftError)


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
