"""How streams and streaming pipelines did lately: each process of the service samples them from its start, whether
somebody looks or not.

The last minutes are in memory, as much as the first page shows. A point a minute goes to a table for all services.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from weft.errors import WeftError
from weft.project import current
from weft.server.cached_probe import CachedProbe
from weft.server.history_table import STREAMING, STREAMS, Flow, HistoryTable, Values, minute_of
from weft.streams.declare import Stream
from weft.streams.rejected import places
from weft.streams.runtime import open_hub
from weft.systems.base import Connection
from weft.systems.log import StreamSample

logger = logging.getLogger("weft.server")

SECONDS = 10.0
_ANSWER_SECONDS = 10.0
# Five minutes, with both ends.
_KEPT = 31

Place = str | Connection | None
"""The connection of a stream, as it is declared."""


class Point(NamedTuple):
    """A stream at one moment."""

    at: float
    published: int
    lag: int
    dead_letters: int | None
    quarantined: int | None
    """`None` where the stream has no place for them."""


class History:
    """The last samples of every stream and streaming pipeline."""

    def __init__(self, days: float) -> None:
        self._table = HistoryTable(STREAMS, days)
        self._flow_table = HistoryTable(STREAMING, days)
        self._flows: dict[str, deque[tuple[float, Flow]]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._flow_probe = CachedProbe(read_flows, fresh_seconds=0)
        self._flowing: asyncio.Task[None] | None = None
        self._stored: datetime | None = None
        self._storing: threading.Thread | None = None
        # Processes do not write at the same moment: those that come later find that the minute is stored.
        self._delay = random.uniform(0, 40)
        self._points: dict[str, deque[Point]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._latest: dict[str, StreamSample] = {}
        self._probes: dict[Place, CachedProbe[dict[str, StreamSample | None]]] = {}
        self._sampling: dict[Place, asyncio.Task[None]] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._stopped = False

    def of(self, stream: Stream) -> list[Point]:
        """Return the points of a stream, the newest last."""
        return list(self._points[stream.name])

    def begin(self) -> None:
        """Sample from now on, unless that is done already. Called at the start, and with each request: nobody starts an
        application that is mounted in another one."""
        if not self._stopped and (self._keeping is None or self._keeping.done()):
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            at = time.time()
            for place in {each.connection for each in _sampled()}:
                last = self._sampling.get(place)
                if last is None or last.done():  # one that hangs holds up no other
                    self._sampling[place] = asyncio.create_task(self._sample(place, at))
            if current().streaming_pipelines and (self._flowing is None or self._flowing.done()):
                self._flowing = asyncio.create_task(self._sample_flows(at))
            self._store(at - self._delay)
            await asyncio.sleep(SECONDS)

    def _store(self, at: float) -> None:
        """Store the last points once a minute, in a thread: a database that hangs holds up nothing."""
        minute = minute_of(at)
        if minute == self._stored or (self._storing is not None and self._storing.is_alive()):
            return
        if self._stored is not None:  # a process that ends within its first minute stores nothing
            values = {name: Values(*points[-1][1:]) for name, points in list(self._points.items()) if points}
            flows = {name: points[-1][1] for name, points in list(self._flows.items()) if points}
            self._storing = threading.Thread(
                target=self._write, args=(minute, values, flows), name="weft-history", daemon=True
            )
            self._storing.start()
        self._stored = minute

    def _write(self, minute: datetime, values: dict[str, Values], flows: dict[str, Flow]) -> None:
        try:
            if values:
                self._table.write(minute, values)
            if flows:
                self._flow_table.write(minute, flows)
        except Exception as error:  # any error: what is missing is a minute of a chart
            logger.debug("the history of %s was not stored: %s", minute, error)

    def read(self, stream: Stream, since: datetime) -> list[Point]:
        """Return the points of a stream that any service stored since then, and those in memory. Blocks."""
        stored = [Point(at, *values) for at, values in self._table.read(stream.name, since)]
        last = stored[-1].at if stored else since.timestamp()
        return stored + [point for point in self.of(stream) if point.at > last]

    def read_flow(self, name: str, since: datetime) -> list[tuple[float, Flow]]:
        """Return the points of a streaming pipeline, in the same way. Blocks."""
        stored = self._flow_table.read(name, since)
        last = stored[-1][0] if stored else since.timestamp()
        return stored + [(at, flow) for at, flow in list(self._flows[name]) if at > last]

    async def _sample_flows(self, at: float) -> None:
        try:
            flows = await self._flow_probe.get(_ANSWER_SECONDS)
        except Exception as error:  # any error: the view of a pipeline reports it
            logger.debug("no sample of the streaming pipelines: %s", error)
            return
        for name, flow in flows.items():
            self._flows[name].append((at, flow))

    async def _sample(self, place: Place, at: float) -> None:
        probe = self._probes.setdefault(place, CachedProbe(partial(_sizes, place), fresh_seconds=0))
        try:
            sizes = await probe.get(_ANSWER_SECONDS)
        except Exception as error:  # any error: readiness and the overview report it
            logger.debug("no sample of the streams of %s: %s", place or "default", error)
            return
        self._latest |= {name: size for name, size in sizes.items() if size is not None}
        for stream in list(current().streams.values()):  # another thread may declare one
            size = sizes.get(stream.name)
            if stream.connection == place and size is not None:
                letters, misfits = (None if each is None else self._latest.get(each.name) for each in places(stream))
                self._points[stream.name].append(
                    Point(at, size.published, size.lag, letters and letters.events, misfits and misfits.events)
                )

    def stop(self) -> None:
        """Sample no more, also not with the requests that still come."""
        self._stopped = True
        for task in (self._keeping, self._flowing, *self._sampling.values()):
            if task is not None:
                task.cancel()


def _sampled() -> Iterator[Stream]:
    """Yield every declared stream, and what it puts aside."""
    for stream in list(current().streams.values()):  # another thread may declare one
        yield from (each for each in (stream, *places(stream)) if each is not None)


def _sizes(place: Place) -> dict[str, StreamSample | None]:
    """Read the sizes of all streams of one database; `None` for one that cannot be read."""
    streams = {each.name: each for each in _sampled() if each.connection == place}
    store = open_hub(current().connection(place)).store
    samples = store.sample([(each.schema, each.name) for each in streams.values()])
    return dict(zip(streams, samples, strict=True))


def read_flows() -> dict[str, Flow]:
    """Return how the streaming pipelines of which this machine has the checkpoints stand."""
    from weft.engine.streaming.activity import read_activity
    from weft.engine.streaming.checkpoint import Checkpoint

    flows = {}
    for pipeline in list(current().streaming_pipelines.values()):  # another thread may declare one
        try:
            activity = read_activity(Checkpoint.of(pipeline))
            if activity is not None:
                flows[pipeline.name] = _flow(activity)
        except (WeftError, LookupError, TypeError, ValueError):  # its place is not known, or somebody changed the file
            continue
    return flows


def _flow(activity: dict[str, Any]) -> Flow:
    windows, lag = activity.get("windows") or {}, activity.get("lag") or {}
    watermark = windows.get("watermark")
    return Flow(
        **{name: int(activity[name]) for name in ("rows_in", "rows_out", "batches", "busy_ms", "dead_letters")},
        lag=sum(lag.values()) if lag else None,
        state_rows=windows.get("groups"),
        watermark_ms=None if watermark is None else watermark // 1000,
    )
