"""Spark as the engine of a streaming pipeline: one query after the other, under one lock and in one session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from weft.engine import session
from weft.engine.streaming.activity import Activity
from weft.engine.streaming.batch import BatchResult
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.progress import SourceLag
from weft.engine.streaming.query import Query
from weft.errors import ConnectionFailedError
from weft.pipelines.streaming.execution import Report
from weft.pipelines.streaming.spec import StreamingPipeline

# A signal that arrives just before a call that waits is handled after it: in one call without end, never.
_WAIT_SECONDS = 1.0


class SparkEngine:
    """Runs a streaming pipeline as a query of Spark's (`weft.pipelines.streaming.execution.StreamingEngine`)."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self.pipeline, self.name = pipeline, pipeline.name
        self.checkpoint = Checkpoint.of(pipeline)
        self.lag = SourceLag((), self.checkpoint)
        self._activity = Activity(self.checkpoint)
        self._query: Query | None = None
        self._spark: Any = None

    @property
    def location(self) -> str:
        return self.checkpoint.location

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self.checkpoint.locked():
            self.lag = SourceLag(self.pipeline.sources, self.checkpoint)
            with self._activity.kept(self.lag):
                yield

    def start(
        self,
        *,
        once: bool,
        committed: Callable[[], None],
        report: Callable[[Report], None] | None,
        idle: Callable[[], None] | None,
    ) -> None:
        """Start a query, in the session of the one before it."""

        def written(batch: BatchResult) -> None:
            committed()
            self.lag.moved(query.sources, batch.batch_id)
            # The first look can be a batch of nothing.
            if batch.counts or batch.dead_letters or batch.windows is not None or batch.cdc is not None:
                done = self._report(query, batch)
                if report is not None:
                    report(done)
                self._activity.note(done)

        query = self._query = Query(
            self.pipeline, once=once, written=written, idle=idle, checkpoint=self.checkpoint, spark=self._spark
        )
        with self._watching_jvm("started"), self.checkpoint.naming_full_disk():
            query.start()

    def wait(self) -> None:
        assert self._query is not None
        with self._watching_jvm("ran"), self.checkpoint.naming_full_disk():
            while not self._query.wait(_WAIT_SECONDS):
                pass
        self._activity.note_success()

    @contextmanager
    def _watching_jvm(self, what: str) -> Iterator[None]:
        """Name the end of Spark's JVM as the reason of whatever error it caused: some look like a wrong setting."""
        try:
            yield
        except Exception as error:
            if session.has_lost_jvm():
                raise ConnectionFailedError(
                    f"Spark's JVM ended while {self.name} {what}.", hint="What it said last is in .weft/spark.log."
                ) from error
            raise

    def stop(self) -> None:
        if (query := self._query) is not None:
            query.stop()

    def forget(self, error: Exception) -> None:
        """Release the query that failed; the next one has its session."""
        if (query := self._query) is not None:
            self._spark, self._query = query.spark, None
            query.forget(error)

    def note_failure(self, text: str) -> None:
        self._activity.note_failure(text)

    def _report(self, query: Query, batch: BatchResult) -> Report:
        counts = batch.counts.values()
        consumed = batch.rows_read
        if consumed is None and self.pipeline.transform_sql is not None:
            consumed = self.lag.consumed(query.sources)
        if not consumed and batch.windows is None:  # without SQL each target was given all there is
            consumed = sum(each.rows_read for each in counts) // len(self.pipeline.targets)
        return Report(
            pipeline=self.name,
            batch_id=batch.batch_id,
            consumed=consumed or 0,
            written={name: each.rows_read for name, each in batch.counts.items()},
            dead=batch.dead_letters,
            replayed=bool(counts) and all(each.replayed for each in counts),
            seconds=query.seconds,
            ended_at=datetime.now(UTC),
            windows=batch.windows,
            cdc=batch.cdc,
        )
