"""The progress of a query while it runs: the position of each source, and its lag."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from typing import Any, ClassVar

from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.checkpoint_files import Starts
from weft.engine.streaming.sources import open_source
from weft.errors import WeftError
from weft.pipelines.streaming.spec import Source
from weft.spark_support.folder import Location
from weft.spark_support.sessions import java_class
from weft.systems.stream_source import BatchRows, StreamSource, UntypedRows, counted

_log = logging.getLogger("weft.engine")
# A caller that asks more often gets the same answer: each look is a question to a database.
_LOOK_SECONDS = 1.0
# Nor is more than one part in so many of the time spent on looking: a bucket of many files takes seconds to be listed.
_LOOK_SHARE = 20
# A ledger keeps a thousand of them.
_LONGEST_PLAN = 1000
_STREAMING = "org.apache.spark.sql.streaming"


class OpenedSource:
    """An opened source, and what the current batch took from it."""

    def __init__(self, source: StreamSource) -> None:
        self.source, self.name = source, source.name
        self.rows: BatchRows | None = None
        self.reported: Any = None
        """The position that Spark reported last: its log has it sooner."""
        self.batch: int | None = None
        """The current batch, or the last one."""
        self.before: Any = None
        self.position: Any = None
        """The positions between which it reads, where Spark's log says them."""

    def take(self, frame: Any) -> BatchRows:
        self.rows = self.source.take_between(frame, self.before, self.position)
        return self.rows

    def committed(self, position: Any) -> None:
        """Report to the source how far its rows are stored."""
        self.reported = position
        if position is not None:
            self.source.committed(position)


class SourceLag:
    """The lag of each source, in events, messages, files or versions. It is looked up when a caller asks, and not more
    often than the answer is worth."""

    def __init__(self, sources: Sequence[Source], checkpoint: Checkpoint) -> None:
        self._sources, self._checkpoint = {each.name: each for each in sources}, checkpoint
        self._positions: dict[str, Any] = {}
        self._opened: dict[str, StreamSource] = {}
        self._batch: int | None = None
        self._known: dict[str, int] = {}
        self._looked_at, self._pause = float("-inf"), _LOOK_SECONDS
        self._looking = threading.Lock()
        self._home: Location | None = None
        if checkpoint.is_open:
            self._begin()

    def _begin(self) -> None:
        """Find out where the sources are, in a log that can be read now: after the JVM ended, at a URL another one."""
        positions = self._checkpoint.state().offsets
        self._sources = {each.name: each for each in Starts(self._checkpoint.home).known([*self._sources.values()])}
        self._positions = {**dict(zip(self._sources, positions, strict=False)), **self._positions}
        self._home, self._opened = self._checkpoint.home, {}

    def moved(self, opened: Sequence[OpenedSource], batch_id: int) -> None:
        """Take note of a batch that was carried out."""
        self._batch = batch_id
        for each in opened:
            position = None if each.rows is None else each.source.reached(each.rows, each.reported)
            if position is not None:
                self._positions[each.name] = position

    def now(self, *, fresh: bool = False) -> dict[str, int]:
        """Return the lag of each source; nothing of one that does not answer."""
        # A source that hangs does not block other callers.
        if self._looking.acquire(blocking=False):
            try:
                began = time.monotonic()
                if fresh or began - self._looked_at > self._pause:
                    self._look()
                    self._looked_at = time.monotonic()
                    self._pause = max(_LOOK_SECONDS, _LOOK_SHARE * (self._looked_at - began))
            finally:
                self._looking.release()
        return self._known

    def in_words(self) -> dict[str, str]:
        """Return the lag of each source in words, with units."""
        return {name: counted(count, self._opened[name].unit) for name, count in self.now().items()}

    def by_partition(self) -> dict[str, dict[str, int]]:
        """Return the lag of each partition, of the sources that have some."""
        lags = {}
        for name in self.now():
            with suppress(WeftError):
                partitions = self._opened[name].lag_by_partition(self._positions.get(name))
                if partitions is not None:
                    lags[name] = partitions
        return lags

    def consumed(self, opened: Sequence[OpenedSource]) -> int:
        """Return how many rows the batch had, at most, as far as it is known."""
        return sum(each.source.count(each.rows) for each in opened if each.rows is not None)

    def _look(self) -> None:
        if not self._checkpoint.is_open:  # not before the pipeline runs, whose session opens it
            return
        if self._checkpoint.home is not self._home:
            with suppress(WeftError):
                self._begin()
        if self._batch is not None:
            # Spark recorded it before the batch began.
            batch, self._batch = self._batch, None
            with suppress(WeftError):
                self._positions.update(zip(self._sources, self._checkpoint.positions(batch), strict=False))
        known = {}
        for number, (name, source) in enumerate(self._sources.items()):
            try:
                if name not in self._opened:
                    self._opened[name] = open_source(source)
                behind = self._opened[name].lag(self._positions.get(name), self._checkpoint.source_log(number))
            except WeftError:
                continue
            if behind is not None:
                known[name] = behind
        self._known = known


def planned(opened: Sequence[OpenedSource], checkpoint: Checkpoint, batch_id: int) -> str:
    """Return how far Spark has planned a batch to reach in each source, or a digest of that where it is long. Each
    source knows then between which positions the batch reads."""
    positions = checkpoint.positions(batch_id)
    for each, before, position in zip(opened, _starts(opened, checkpoint, batch_id), positions, strict=False):
        each.batch, each.before, each.position = batch_id, before, position
    ends = [
        each.source.planned(position, checkpoint.source_log(number))
        for number, (each, position) in enumerate(zip(opened, positions, strict=False))
    ]
    text = json.dumps(ends, separators=(",", ":"), sort_keys=True)
    return text if len(text) <= _LONGEST_PLAN else f"sha256 {sha256(text.encode()).hexdigest()}"


def _starts(opened: Sequence[OpenedSource], checkpoint: Checkpoint, batch_id: int) -> list[Any]:
    """Return where a batch begins in each source; `None` where that is not known."""
    if all(each.batch == batch_id - 1 for each in opened):
        before: Sequence[Any] = [each.position for each in opened]
    else:
        before = [None] * len(opened)
        if batch_id > 0:
            with suppress(WeftError):
                before = checkpoint.positions(batch_id - 1)
    return [
        each.source.first(checkpoint.source_log(number)) if position is None else position
        for number, (each, position) in enumerate(zip(opened, before, strict=False))
    ]


def warn_of_removed(opened: Sequence[OpenedSource], checkpoint: Checkpoint, batch_id: int) -> None:
    """Log the files that were gone when their batch read them: Spark skips them, and reports it in its own log only."""
    for number, each in enumerate(opened):
        if not isinstance(each.rows, UntypedRows):
            continue
        with suppress(WeftError, OSError):  # a bucket that does not answer now: the batch is done
            before, position = (
                checkpoint.positions(batch)[number] if batch >= 0 else None for batch in (batch_id - 1, batch_id)
            )
            for path in each.source.removed(each.rows.files, checkpoint.source_log(number), before, position):
                _log.warning("%s was gone when it was to be read: it is skipped", path)


def listen(spark: Any, run: str, idle: Callable[[], None], committed: Callable[[list[Any]], None]) -> None:
    """Call `idle` whenever this run of a query found no rows, and `committed` after each batch with the positions of
    its sources."""
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Listener(StreamingQueryListener):
        """Takes Java's events as they are: PySpark reads all fields of each, by 450 calls to the JVM for a batch."""

        def onQueryStarted(self, event: Any) -> None:
            pass

        def onQueryProgress(self, event: Any) -> None:
            progress = event.progress()
            if progress.runId().toString() == run:
                committed([json.loads(each.endOffset() or "null") for each in progress.sources()])

        def onQueryIdle(self, event: Any) -> None:
            if event.runId().toString() == run:
                idle()

        def onQueryTerminated(self, event: Any) -> None:
            if event.runId().toString() == run:
                spark.streams.removeListener(self)
                del self._jlistener  # Java's object, which keeps this one

        @cached_property
        def _jlistener(self) -> Any:
            return java_class(spark, f"{_STREAMING}.PythonStreamingQueryListenerWrapper")(self)

        class Java:
            implements: ClassVar = [f"{_STREAMING}.PythonStreamingQueryListener"]

    spark.streams.addListener(Listener())
