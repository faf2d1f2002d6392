"""What can be told of a query while it runs: how far each source was read, and how far it is behind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.sources import KafkaOrigin, LogOrigin, Origin, Taken
from weft.errors import WeftError
from weft.pipelines.streaming.spec import Source
from weft.streams import runtime

# Whoever looks more often is told the same: each look is a question to a database.
_LOOK_SECONDS = 1.0
# On Redis, where entries are counted one by one.
_MOST_COUNTED = 100_000


class Watched:
    """An opened source, which remembers what it gave to the batch in hand."""

    def __init__(self, origin: Origin) -> None:
        self._origin, self.name = origin, origin.name
        self.taken: Taken | None = None

    def stream(self, spark: Any) -> Any:
        """The streaming DataFrame by which Spark follows it."""
        return self._origin.stream(spark)

    def take(self, frame: Any) -> Taken:
        """What the DataFrame of one micro-batch stands for."""
        self.taken = self._origin.take(frame)
        return self.taken

    @property
    def waits(self) -> bool:
        """Whether it waits for news by itself."""
        return isinstance(self._origin, LogOrigin)

    @property
    def wants_to_know(self) -> bool:
        """Whether the source is to be told how far its rows are stored."""
        return isinstance(self._origin, KafkaOrigin)

    def reached(self, end: Any) -> None:
        """Tell the source how far its rows are stored."""
        if isinstance(self._origin, KafkaOrigin) and end is not None:
            self._origin.reached(end)

    @property
    def position(self) -> int | None:
        """Of a stream of ours, the last offset that was taken."""
        is_log = isinstance(self._origin, LogOrigin) and self.taken is not None
        return getattr(self.taken.reader, "upto", None) if is_log and self.taken is not None else None


class Lag:
    """How many events of each source wait. Only streams of ours tell it."""

    def __init__(self, sources: Sequence[Source], checkpoint: Checkpoint) -> None:
        self._sources = sources
        self._positions: dict[str, int] = {}
        if not checkpoint.is_url:
            for source, offset in zip(sources, checkpoint.state().offsets, strict=False):
                if type(offset) is int:
                    self._positions[source.name] = offset
        self._known: dict[str, int] = {}
        self._looked_at = float("-inf")
        self._looking = threading.Lock()

    def moved(self, watched: Sequence[Watched]) -> None:
        """A batch was carried out."""
        for each in watched:
            if each.position is not None:
                self._positions[each.name] = each.position

    def now(self, *, fresh: bool = False) -> dict[str, int]:
        """By source, what is known of it: of one whose database does not answer, nothing."""
        # One that hangs keeps nobody else waiting.
        if self._looking.acquire(blocking=False):
            try:
                if fresh or time.monotonic() - self._looked_at > _LOOK_SECONDS:
                    self._known = {
                        source.name: lag for source in self._sources if (lag := self._of(source)) is not None
                    }
                    self._looked_at = time.monotonic()
            finally:
                self._looking.release()
        return self._known

    def consumed(self, watched: Sequence[Watched]) -> int:
        """How many rows the batch had, at most, as far as somebody knows."""
        sources = {each.name: each for each in self._sources}
        return sum(self._taken(sources[each.name], each) for each in watched)

    def _taken(self, source: Source, watched: Watched) -> int:
        if watched.taken is None:
            return 0
        if watched.position is None:
            return watched.taken.size or 0
        reader: Any = watched.taken.reader
        return self._extent(source, reader.after, reader.upto) or 0

    def _of(self, source: Source) -> int | None:
        position = self._positions.get(source.name)
        return None if position is None else self._extent(source, position)

    def _extent(self, source: Source, after: int, upto: int | None = None) -> int | None:
        try:
            log = runtime.open_stream(source.query, source.connection).log
            return log.extent(after, log.head() if upto is None else upto, _MOST_COUNTED)
        except WeftError:
            return None


def listen(spark: Any, idle: Callable[[], None], reached: Callable[[list[Any]], None]) -> None:
    """Have `idle` called whenever a query of this session looked for rows and found none, and `reached` after each
    batch with the place that each of its sources was read to."""
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:
            pass

        def onQueryProgress(self, event: Any) -> None:
            reached([json.loads(each.endOffset or "null") for each in event.progress.sources])

        def onQueryIdle(self, event: Any) -> None:
            idle()

        def onQueryTerminated(self, event: Any) -> None:
            pass

    # Each time, not once in ten seconds.
    spark.conf.set("spark.sql.streaming.noDataProgressEventInterval", "0")
    spark.streams.addListener(Listener())
