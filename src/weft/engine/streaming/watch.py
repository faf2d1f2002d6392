"""What can be told of a query while it runs: how far each source was read, and how far it is behind."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.scale import Scale, counted, entries, removed, scale_of
from weft.engine.streaming.sources import FileOrigin, KafkaOrigin, LogOrigin, Origin, Taken
from weft.engine.streaming.ticks import MAX_ROWS
from weft.errors import WeftError
from weft.pipelines.streaming.spec import Source
from weft.spark_support.location import Location
from weft.streams import runtime

_log = logging.getLogger("weft.engine")
# Whoever looks more often is told the same: each look is a question to a database.
_LOOK_SECONDS = 1.0
# Nor is more than one part in so many of the time spent on looking: a bucket of many files takes seconds to be listed.
_WORTH = 20


class Watched:
    """An opened source, which remembers what it gave to the batch in hand."""

    def __init__(self, origin: Origin) -> None:
        self._origin, self.name = origin, origin.name
        self.taken: Taken | None = None
        self.end: Any = None
        """The place that it was read to, as Spark told last: later than its own log."""

    def stream(self, spark: Any, start: str) -> Any:
        """The streaming DataFrame by which Spark follows it."""
        return self._origin.stream(spark, start)

    def take(self, frame: Any) -> Taken:
        """What the DataFrame of one micro-batch stands for."""
        self.taken = self._origin.take(frame)
        return self.taken

    @property
    def waits(self) -> bool:
        """Whether it waits for news by itself."""
        return isinstance(self._origin, LogOrigin)

    @property
    def connection(self) -> Any:
        """Where its files are, of a source of files."""
        return cast(FileOrigin, self._origin).connection

    @property
    def wants_to_know(self) -> bool:
        """Whether the source is to be told how far its rows are stored."""
        return isinstance(self._origin, KafkaOrigin)

    def check(self, pipeline: str, said: str) -> None:
        """Raise where the source is gone, or what it had: that is the reason of an error in which Spark said so."""
        if isinstance(self._origin, KafkaOrigin):
            self._origin.check(pipeline, said)

    def reached(self, end: Any) -> None:
        """Tell the source how far its rows are stored."""
        self.end = end
        if isinstance(self._origin, KafkaOrigin) and end is not None:
            self._origin.reached(end)

    @property
    def position(self) -> int | None:
        """Of a stream of ours, the last offset that was taken."""
        is_log = isinstance(self._origin, LogOrigin) and self.taken is not None
        return getattr(self.taken.reader, "upto", None) if is_log and self.taken is not None else None


class Lag:
    """How much of each source waits: events, messages, files or versions. Asked when somebody wants to know, and then
    no more often than the answer is worth."""

    def __init__(self, sources: Sequence[Source], checkpoint: Checkpoint) -> None:
        self._sources, self._checkpoint = {each.name: each for each in sources}, checkpoint
        self._places: dict[str, Any] = {}
        self._scales: dict[str, Scale] = {}
        self._batch: int | None = None
        self._known: dict[str, int] = {}
        self._looked_at, self._pause = float("-inf"), _LOOK_SECONDS
        self._looking = threading.Lock()
        self._home: Location | None = None
        if checkpoint.is_open:
            self._begin()

    def _begin(self) -> None:
        """Find out where the sources are, in a log that can be read now: after the JVM ended, at a URL another one."""
        places = self._checkpoint.state().offsets
        self._sources = {each.name: each for each in self._checkpoint.starts().known([*self._sources.values()])}
        self._places = {**dict(zip(self._sources, places, strict=False)), **self._places}
        self._home, self._scales = self._checkpoint.home, {}

    def moved(self, watched: Sequence[Watched], batch_id: int) -> None:
        """A batch was carried out."""
        self._batch = batch_id
        for each in watched:
            if (place := each.position if each.waits else each.end) is not None:
                self._places[each.name] = place

    def now(self, *, fresh: bool = False) -> dict[str, int]:
        """By source, what is known of it: of one that does not answer, nothing."""
        # One that hangs keeps nobody else waiting.
        if self._looking.acquire(blocking=False):
            try:
                began = time.monotonic()
                if fresh or began - self._looked_at > self._pause:
                    self._look()
                    self._looked_at = time.monotonic()
                    self._pause = max(_LOOK_SECONDS, _WORTH * (self._looked_at - began))
            finally:
                self._looking.release()
        return self._known

    def told(self) -> dict[str, str]:
        """The same in words."""
        return {name: counted(count, self._scales[name].unit) for name, count in self.now().items()}

    def consumed(self, watched: Sequence[Watched]) -> int:
        """How many rows the batch had, at most, as far as somebody knows."""
        return sum(map(self._taken, watched))

    def _taken(self, watched: Watched) -> int:
        if watched.taken is None:
            return 0
        if watched.position is None:
            return watched.taken.size or 0
        source, reader = self._sources[watched.name], cast(Any, watched.taken.reader)
        try:
            log = runtime.open_stream(source.query, source.connection).log
            return log.extent(reader.after, reader.upto, source.max_rows or MAX_ROWS)
        except WeftError:
            return 0

    def _look(self) -> None:
        if not self._checkpoint.is_open:  # not before the pipeline runs, whose session opens it
            return
        if self._checkpoint.home is not self._home:
            with suppress(WeftError):
                self._begin()
        if self._batch is not None:
            # Spark wrote it down before the batch began. Streams of ours tell it themselves, also at a URL.
            batch, self._batch = self._batch, None
            with suppress(WeftError):
                self._places.update(zip(self._sources, self._checkpoint.places(batch), strict=False))
        known = {}
        for number, (name, source) in enumerate(self._sources.items()):
            try:
                if name not in self._scales:
                    self._scales[name] = scale_of(source, self._checkpoint.log_of(number))
                behind = self._scales[name].behind(self._places.get(name))
            except WeftError:
                continue
            if behind is not None:
                known[name] = behind
        self._known = known


def warn_of_removed(watched: Sequence[Watched], checkpoint: Checkpoint, batch_id: int) -> None:
    """Name the files that were gone when their batch read them: Spark passes them by, and says so in its own log."""
    for number, each in enumerate(watched):
        log, read = checkpoint.log_of(number), None if each.taken is None else each.taken.files
        if read is None:
            continue
        with suppress(WeftError, OSError):  # a bucket that does not answer now: the batch is done
            places = [checkpoint.places(batch)[number] if batch >= 0 else None for batch in (batch_id - 1, batch_id)]
            after, upto = (-1 if place is None else place["logOffset"] for place in places)
            for path in removed(each.connection, entries(log, upto, after), read):
                _log.warning("%s was gone when it was to be read: it is passed by", path)


def listen(spark: Any, run: str, idle: Callable[[], None], reached: Callable[[list[Any]], None]) -> None:
    """Have `idle` called whenever this run of a query looked for rows and found none, and `reached` after each batch
    with the place that each of its sources was read to."""
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:
            pass

        def onQueryProgress(self, event: Any) -> None:
            if str(event.progress.runId) == run:
                reached([json.loads(each.endOffset or "null") for each in event.progress.sources])

        def onQueryIdle(self, event: Any) -> None:
            if str(event.runId) == run:
                idle()

        def onQueryTerminated(self, event: Any) -> None:
            if str(event.runId) == run:
                spark.streams.removeListener(self)
                del self._jlistenerobj  # Java's object, which keeps this one

    spark.streams.addListener(Listener())
