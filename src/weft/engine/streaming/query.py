"""A streaming pipeline that runs: one query of Spark's, its checkpoint, and how it ends."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakMethod

from weft.engine import session
from weft.engine.streaming.batch import Batches, BatchResult, joined
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.cdc.copying import copied
from weft.engine.streaming.cdc.routes import resolved
from weft.engine.streaming.checkpoint import Checkpoint, prepared_session
from weft.engine.streaming.checkpoint_files import Columns, Sources, Starts
from weft.engine.streaming.progress import OpenedSource, listen, planned, warn_of_removed
from weft.engine.streaming.sources import open_source, refuse_unreachable
from weft.engine.streaming.start_checks import check_start
from weft.errors import NotFoundError
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.pipelines.streaming.windows import Watermark
from weft.spark_support import outcome
from weft.spark_support.heap import Heap
from weft.spark_support.sessions import QUOTED_NAMES

_log = logging.getLogger("weft.engine")
_CONF = {
    # A file system of Hadoop's that asks other processes for links and modes takes four fifths of a small batch.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing."
    "FileSystemBasedCheckpointFileManager",
    # Once, not for each batch.
    QUOTED_NAMES: "true",
}
# To compile the plan of a batch, or to plan it again while it runs, takes longer than to run it over a few rows.
_PROFILES = {"low_latency": {"spark.sql.codegen.wholeStage": "false", "spark.sql.adaptive.enabled": "false"}}
_LAST_COMMIT_SECONDS = 10.0
_LEAST_TICK_SECONDS, _MOST_TICK_SECONDS = 0.2, 5.0


class StoppedError(Exception):
    """Raised inside a query to end it before its next batch."""


class Query:
    """One pipeline, from `start` until it ends or is stopped."""

    def __init__(
        self,
        pipeline: StreamingPipeline,
        *,
        once: bool = False,
        written: Callable[[BatchResult], None] = lambda _: None,
        idle: Callable[[], None] | None = None,
        checkpoint: Checkpoint | None = None,
        spark: Any = None,
    ) -> None:
        """`written` is called after each batch, `idle` whenever there was none. A `checkpoint` is one that the caller
        has locked, and unlocks. `spark` is the session of the query before, if there was one: Spark forgets no session
        in which a query ran."""
        self.pipeline, self.once, self._written, self._idle = pipeline, once, written, idle
        self.checkpoint, self.spark = checkpoint or Checkpoint.of(pipeline), spark
        self._is_lock_ours = checkpoint is None
        self.sources: list[OpenedSource] = []
        self.seconds = 0.0
        """How long the last batch took."""
        self._started, self._stopping = threading.Event(), threading.Event()
        self._batch = threading.Lock()
        self._failure: BaseException | None = None
        self._last = -1
        self._line: Any = None
        """The connection through which Spark's thread calls for batches."""
        self._query: Any = None
        self._batches: Batches | None = None
        self._heap: Heap | None = None
        self._noted: Sources | None = None
        """Where the sources are to be noted, until they are."""

    def start(self) -> None:
        """Start it: after this, batches are carried out."""
        if self._is_lock_ours:
            self.checkpoint.lock.take()
        try:
            self.pipeline = resolved(self.pipeline)
            sources, pause = self.pipeline.sources, self.pipeline.idle_pause_seconds
            self.sources = [OpenedSource(open_source(each, pause / len(sources))) for each in sources]
            opened = [each.source for each in self.sources]
            first = session.spark()
            if self.spark is None or self.spark.sparkContext is not first.sparkContext:  # that one's JVM ended
                self.spark = first.newSession()
            spark = self.spark = prepared_session(self.spark, self.pipeline)
            for name, value in {**_CONF, **_PROFILES.get(self.pipeline.profile or "", {})}.items():
                spark.conf.set(name, value)
            # Weft streams wait by themselves. For the others Spark does, before it asks them again.
            waits = all(each.waits for each in opened)
            spark.conf.set("spark.sql.streaming.pollingDelay", "0" if waits else str(int(pause * 1000)))
            self.checkpoint.hold(spark, self.stop)
            self.checkpoint.settle()
            is_heard = self._idle is not None or any(each.wants_commits for each in opened)
            if is_heard:  # each time, not once in ten seconds
                spark.conf.set("spark.sql.streaming.noDataProgressEventInterval", "0")
            self._batches = Batches(self.pipeline, self.sources, Columns(self.checkpoint.home, sources))
            self._heap = Heap(spark)
            noted = Sources(self.checkpoint.home)
            self._noted = None if noted.check(self.pipeline) else noted
            for source in opened:
                if source.wants_reader:
                    source.read_as(self.checkpoint.reader())
            starts = Starts(self.checkpoint.home).settle(sources, opened)
            for source in opened:
                refuse_unreachable(source)
            check_start(self.pipeline, opened, spark)
            if self.pipeline.step is not None:
                self._batches.check_state(self.checkpoint.state().query_id)
            if self._noted is not None and self.pipeline.cdc is not None and self.pipeline.cdc.snapshot == "copy":
                # Before the first row: the changes of other sources would not follow what was copied.
                self._noted.note(self.pipeline)
                self._noted = None
            if not copied(self.pipeline, self.checkpoint.home, self._stopping, self.checkpoint.lock.check):
                self._started.set()
                return
            carry_out = WeakMethod(self._carry_out)  # Spark's query keeps what it calls
            writer = (
                joined([each.follow(spark, start) for each, start in zip(opened, starts, strict=True)])
                .writeStream.foreachBatch(lambda frame, batch_id: carry_out()(frame, batch_id))  # type: ignore[misc]
                .queryName(self.pipeline.name)
                .option("checkpointLocation", self.checkpoint.location)
            )
            if self.once:
                writer = writer.trigger(availableNow=True)
            elif self.pipeline.every_seconds is not None:
                writer = writer.trigger(processingTime=f"{int(self.pipeline.every_seconds * 1000)} milliseconds")
            with outcome.explained(f"start {self.pipeline.name}"):
                self._query = writer.start()
            if is_heard:  # no batch is done before `_started`
                listen(spark, self._query.runId, self._idle or (lambda: None), partial(_report_commit, self.sources))
            self._started.set()
            if self.pipeline.step is not None and not self.once:
                threading.Thread(target=self._tick, name=f"ticks of {self.pipeline.name}", daemon=True).start()
        except BaseException as error:
            self._stopping.set()
            self._started.set()  # a batch that Spark has begun ends
            self._unlock()
            if isinstance(error, NotFoundError):
                error.add_note(f"pipeline {self.pipeline.name}")
            raise

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it ended; raises what made it fail."""
        from pyspark.errors import PySparkException

        if self._query is None:  # stopped while tables were copied
            try:
                self.checkpoint.lock.check()  # a lost lease stops it too
            finally:
                self._unlock()
            return True
        try:
            with outcome.explained(f"run {self.pipeline.name}"):
                try:
                    ended = self._query.awaitTermination(seconds)
                except PySparkException as error:
                    if not isinstance(self._failure, StoppedError):
                        if self._failure is None:
                            self.checkpoint.lock.check()  # Spark reports what a successor wrote in its own words
                        for each in self.sources:
                            each.source.check(self.pipeline.name, str(error))
                        raise self._failure or error from None
                    ended = True
        except Exception:  # not an interrupt, at which it goes on
            self._unlock()
            raise
        if ended is not False or seconds is None:
            try:
                self.checkpoint.lock.check()
            finally:
                self._unlock()
            return True
        return False

    def stop(self) -> None:
        """Finish the current batch, and end."""
        self._stopping.set()
        with self._batch:
            pass  # none is being carried out, and none begins
        deadline = time.monotonic() + _LAST_COMMIT_SECONDS
        with suppress(Exception):  # it may have ended by itself, or its JVM died
            while self._query.isActive and self._committed() < self._last and time.monotonic() < deadline:
                time.sleep(0.01)
            self._query.stop()

    def forget(self, raised: BaseException) -> None:
        """Let go of where it failed. Spark's query keeps the error of a batch, the frames of the error keep this query,
        and this one Spark's: a circle through Java and Python, which neither of them sees."""
        for each in filter(None, (raised, self._failure)):
            each.__traceback__ = each.__context__ = each.__cause__ = None

    def _unlock(self) -> None:
        if self._line is not None:
            # Nobody else does when Spark's thread has ended: a thread of this process would wait for its calls.
            with suppress(OSError, AttributeError):  # it is closed
                self._line.socket.shutdown(socket.SHUT_RDWR)
        if self._batches is not None:
            self._batches.close()
        for each in self.sources:
            each.source.close()
        if self._is_lock_ours:
            self.checkpoint.lock.release()

    def _committed(self) -> int:
        progress = self._query.lastProgress
        if progress is None:
            return -1
        # The report of a look that found nothing has the number of the batch that comes next.
        return int(progress["batchId"]) - (0 if "addBatch" in progress["durationMs"] else 1)

    def _tick(self) -> None:
        """Between batches, look whether a source has become idle that holds up others."""
        idleness = (self.pipeline.watermark or Watermark()).source_idleness_ms / 1000
        while not self._stopping.wait(min(max(idleness / 4, _LEAST_TICK_SECONDS), _MOST_TICK_SECONDS)):
            with self._batch:
                try:
                    if self._stopping.is_set() or not self._query.isActive:
                        return
                except Exception:  # its JVM ended
                    return
                try:
                    assert self._batches is not None
                    self.checkpoint.lock.check()
                    result = self._batches.tick(self.spark, str(self._query.id))
                    if result is not None:
                        self._written(result)
                except Exception:  # the next batch, or the next tick, goes on with it
                    _log.exception("%s goes on, but could not emit what an idle source held up", self.pipeline.name)

    def _carry_out(self, frame: Any, batch_id: int) -> None:
        self._started.wait()
        self._line = self.spark.sparkContext._gateway._gateway_client.get_thread_connection()
        with self._batch:
            begun = time.perf_counter()
            try:
                if self._stopping.is_set():
                    raise StoppedError
                assert self._batches is not None
                self.checkpoint.lock.check()
                if self._noted is not None:
                    self._noted.note(self.pipeline)
                    self._noted = None
                positions = planned(self.sources, self.checkpoint, batch_id)
                result = self._batches.run(frame, BatchId(str(self._query.id), batch_id, positions))
                warn_of_removed(self.sources, self.checkpoint, batch_id)
                self.checkpoint.lock.check()  # after it Spark writes to its log
            except BaseException as error:
                # Spark reports it in its own words; the caller of `wait` gets the error itself.
                self._failure = error
                raise
            self._last, self.seconds = batch_id, time.perf_counter() - begun
        try:
            self._written(result)
        except Exception:  # the batch is loaded: were it to fail now, streams and topics would get it again
            _log.exception("%s goes on, but could not report batch %d", self.pipeline.name, batch_id)
        with suppress(Exception):  # if the JVM has ended, Spark says so
            assert self._heap is not None
            self._heap.collect()


def _report_commit(opened: list[OpenedSource], positions: list[Any]) -> None:
    for each, position in zip(opened, positions, strict=True):
        each.committed(position)
