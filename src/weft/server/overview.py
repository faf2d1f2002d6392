"""`GET /api/v1/overview`: the state of streams and pipelines, for pages that ask every two seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from weft.operate.records import COUNTS, Attempt, PipelineState
from weft.project import current
from weft.server.bodies import encode
from weft.server.cached_probe import CachedProbe
from weft.server.consuming import flag, query
from weft.server.run_log import open_log
from weft.server.service import encoded_response, service_of
from weft.streams.declare import Stream
from weft.streams.events import with_texts
from weft.streams.rejected import places
from weft.streams.runtime import open_stream, stored_log
from weft.systems.base import Connection
from weft.systems.log import Log

if TYPE_CHECKING:
    from weft.operate.due import Due
    from weft.operate.runlog import RunLog

logger = logging.getLogger("weft.server")

Timelines = dict[str, "tuple[Attempt | None, list[Attempt]]"]
"""The last attempts of pipelines that run less often than others, the newest first, each with the last one when they
were read."""

# A request waits no longer than this for a database that hangs, and then shows what was last known of it.
_ANSWER_SECONDS = 1.0
# How long an answer is shown; longer if reading takes long, so that reading takes no more than a share of the
# time, for any number of watchers.
_STREAMS_FRESH_SECONDS, _MOST_FRESH_SECONDS = 1.0, 4.0
_READ_SHARE = 20
_RUNS_FRESH_SECONDS = 5.0
# A request waits this long for a new answer, then gets one of up to this age: many streams take longer to read.
_QUICK_SECONDS = 0.01
_STALE_SECONDS = 5.0
# To count a long table takes long: the next count waits this many times as long.
_COUNT_SHARE = 20
# Events with which a page that follows a stream begins.
_TAIL = 25
_RUNS_READ = 500
_RUNS_SHOWN = 12
# Of so many pipelines at once the last runs are read one by one, where others ran more often.
_READ_ALONE = 20
_FAILED = "Its database failed; the log of the service has the reason."


@dataclass
class StreamStatus:
    """The last known state of a stream."""

    head: int = 0
    floor: int = 0
    head_at: float = 0.0
    """By this host's clock: the rate follows from two of them and the counts of published events."""
    published: int = 0
    tail: str = "0"
    """The offset before the last few events. A text: those of Redis are longer than a browser's numbers."""
    rows: int = 0
    consumers: list[dict[str, Any]] = field(default_factory=list)
    dead_letters: int | None = None
    quarantined: int | None = None
    """`None` where the stream has no place for them."""
    count_after: float = 0.0
    problem: str | None = None

    def update(self, stream: Stream) -> None:
        """Read the stream. Its head is cheap to read; its rows are counted the less often the longer that takes."""
        log = open_stream(stream, to_read=True).log
        self.floor, self.head = log.floor(), log.head()
        self.published, self.head_at, self.problem = log.published(), time.time(), None
        self.tail = tail_of(log)
        started = time.monotonic()
        if started >= self.count_after:
            self.rows = log.count()
            self.consumers = [
                {"consumer": group.consumer, "lag": group.lag, "pending": group.pending, "lost": group.lost}
                for group in log.groups()
            ]
            self.dead_letters, self.quarantined = rejected_counts(stream).values()
            done = time.monotonic()
            self.count_after = done + (done - started) * _COUNT_SHARE

    @property
    def lag(self) -> int:
        """The lag of the consumer that is the furthest behind."""
        return max((each["lag"] for each in self.consumers), default=0)


def tail_of(log: Log) -> str:
    """Return the offset before the last few events, as a text."""
    first = log.nth_last(_TAIL)
    return str(log.floor() if first is None else first - 1)


def rejected_counts(stream: Stream) -> dict[str, int | None]:
    """Count the dead letters of a stream, and the events that did not fit; `None` where it has no place for them."""

    def count(kept: Stream) -> int:
        log = stored_log(kept)
        return 0 if log is None else log.count()

    letters, misfits = places(stream)
    return {
        "dead_letters": None if letters is None else count(letters),
        "quarantined": None if misfits is None else count(misfits),
    }


class Overview:
    """The last known state of this process's streams and pipelines."""

    def __init__(self) -> None:
        self.standings: dict[str, StreamStatus] = defaultdict(StreamStatus)
        self._streams: dict[str | Connection | None, CachedProbe[None]] = {}
        self._answered: dict[str | Connection | None, float] = defaultdict(float)
        """When a database last answered, by `time.monotonic`: it may hold more streams than it shows in a second."""
        self._read: dict[str | Connection | None, float] = defaultdict(lambda: float("-inf"))
        """When all streams of a database were last read."""
        self._pipelines = CachedProbe(self._read_pipelines, fresh_seconds=_RUNS_FRESH_SECONDS)
        self._timelines: Timelines = {}
        self._known: tuple[float, list[dict[str, Any]]] = float("-inf"), []
        """The pipelines that were read last, and when."""
        self._answer: tuple[float, bytes] | None = None

    async def update(self) -> None:
        """Update the state of the streams, of each database separately."""
        used = {stream.connection for stream in current().streams.values()}
        await asyncio.gather(*(self._update(connection) for connection in used))

    async def _update(self, connection: str | Connection | None) -> None:
        def streams() -> list[Stream]:
            return [each for each in current().streams.values() if each.connection == connection]

        def update() -> None:
            began = time.monotonic()
            for stream in streams():
                standing = self.standings[stream.name]
                try:
                    standing.update(stream)
                    self._answered[connection] = time.monotonic()
                except Exception as error:  # any error: the other streams are shown
                    if standing.problem != _FAILED:  # once, not every second
                        logger.warning("the state of %s cannot be read: %s", stream.name, error)
                    standing.problem = _FAILED
            ended = self._read[connection] = time.monotonic()
            took = (ended - began) * _READ_SHARE
            probe.fresh_seconds = min(max(_STREAMS_FRESH_SECONDS, took), _MOST_FRESH_SECONDS)

        probe = self._streams.setdefault(connection, CachedProbe(update, fresh_seconds=_STREAMS_FRESH_SECONDS))
        is_known = time.monotonic() - self._read[connection] < _STALE_SECONDS
        try:
            await probe.get(_QUICK_SECONDS if is_known else _ANSWER_SECONDS)
        except TimeoutError:
            if is_known or time.monotonic() - self._answered[connection] < _ANSWER_SECONDS:
                return
            for stream in streams():
                self.standings[stream.name].problem = "Its database does not answer."

    def answer(self) -> bytes | None:
        """Return the answer to those who may see everything, where one was made since the last reading could have
        changed it: to encode hundreds of streams takes longer than all else, and each watcher asks for the same."""
        fresh = max((each.fresh_seconds for each in self._streams.values()), default=_STREAMS_FRESH_SECONDS)
        if self._answer is None or time.monotonic() - self._answer[0] >= fresh:
            return None
        return self._answer[1]

    def keep(self, answer: bytes) -> bytes:
        """Remember an answer."""
        self._answer = time.monotonic(), answer
        return answer

    async def pipelines(self) -> dict[str, Any]:
        if not current().pipelines:
            return {"pipelines": [], "problem": None}
        is_known = time.monotonic() - self._known[0] < _RUNS_FRESH_SECONDS + _STALE_SECONDS
        try:
            pipelines = await self._pipelines.get(_QUICK_SECONDS if is_known else _ANSWER_SECONDS)
            if pipelines is not self._known[1]:
                self._known = time.monotonic(), pipelines
            return {"pipelines": pipelines, "problem": None}
        except TimeoutError:
            if is_known:
                return {"pipelines": self._known[1], "problem": None}
            problem = "The run log does not answer."
        except Exception as error:  # any error: the streams are shown
            logger.warning("the run log cannot be read: %s", error)
            problem = "The run log cannot be read; the log of the service has the reason."
        return {"pipelines": [_described(name, None, []) for name in sorted(current().pipelines)], "problem": problem}

    def _read_pipelines(self) -> list[dict[str, Any]]:
        with open_log() as log:
            return read_pipelines(log, (), self._timelines)


def read_pipelines(log: RunLog, names: Sequence[str] = (), timelines: Timelines | None = None) -> list[dict[str, Any]]:
    """Return how these pipelines stand, or all, with their last runs. `timelines`: those that earlier calls read of
    each pipeline alone."""
    from weft.operate.due import Planner

    planner = Planner(log)
    due, now = planner.due(names), planner.now
    by_name: dict[str, list[Attempt]] = defaultdict(list)
    for run in log.runs(names[0] if len(names) == 1 else None, limit=_RUNS_READ):
        by_name[run.pipeline].append(run)
    if timelines is not None:
        _complete(log, [each.state for each in due], by_name, timelines)
    return [_described(each.pipeline.name, (each, now), by_name[each.pipeline.name]) for each in due]


def _complete(
    log: RunLog, states: Sequence[PipelineState], runs: dict[str, list[Attempt]], timelines: Timelines
) -> None:
    """Add the runs of pipelines of which the newest of all have too few: models may run every second, others each
    night. They are read again when the pipeline has run since."""
    few = [each for each in states if each.last is not None and len(runs[each.pipeline]) < _RUNS_SHOWN]
    outdated = [each for each in few if timelines.get(each.pipeline, (None,))[0] != each.last]
    for state in outdated[:_READ_ALONE]:
        timelines[state.pipeline] = state.last, log.runs(state.pipeline, limit=_RUNS_SHOWN)
    for state in few:
        last, known = timelines.get(state.pipeline, (None, []))
        if last == state.last and known:
            runs[state.pipeline] = known


def _described(name: str, known: tuple[Due, datetime] | None, runs: list[Attempt]) -> dict[str, Any]:
    """Return a pipeline. `known`: whether it is due, and the moment of that; `None` where the run log is away."""
    from weft.operate.status import next_due, now_text

    pipeline = current().pipelines[name]
    schedule, state = pipeline.schedule, None if known is None else known[0].state
    return {
        "name": name,
        "kind": "model" if hasattr(pipeline, "materialise") else "pipeline",
        "description": pipeline.description,
        "tags": list(pipeline.tags),
        "targets": [target.name for target in pipeline.targets],
        "schedule": None if schedule is None else f"{schedule.cron} {schedule.timezone}",
        "depends_on": list(pipeline.depends_on),
        "state": None if known is None else now_text(*known),
        "next_due": None if known is None else next_due(*known),
        "due_since": None if known is None or not known[0].is_due else known[0].slot,
        "paused_at": None if state is None else state.paused_at,
        "status": None if state is None else state.status,
        "failures": None if state is None else state.failures,
        "succeeded_at": None if state is None else state.succeeded_at,
        "last": None if state is None or state.last is None else _run(state.last),
        # The newest last, as they are read.
        "runs": [
            {"run_id": each.run_id, "status": each.status, "started_at": each.started_at, "seconds": each.seconds}
            for each in reversed(runs[:_RUNS_SHOWN])
        ],
    }


def _run(attempt: Attempt) -> dict[str, Any]:
    return {
        "run_id": attempt.run_id,
        "attempt": attempt.attempt,
        "started_at": attempt.started_at,
        "seconds": attempt.seconds,
        "error": attempt.error,
        **{name: getattr(attempt, name) for name in COUNTS},
    }


async def readable(request: Request) -> tuple[list[Stream], bool]:
    """Return the streams that a request may read, and whether these are all. Facts about the whole service are only for
    callers who may read every stream."""
    streams = await service_of(request).access.readable(request)
    return streams, len(streams) == len(current().streams)


async def overview(request: Request) -> Response:
    """Show streams with their consumers, and pipelines with their last runs, as far as the caller may see them.

    `?history=true`: with what the service has sampled of late, for a page that opens.
    """
    with_history = flag(query(request, "history"), "history")
    known: Overview = request.app.state.overview
    history = service_of(request).history
    streams, all_of_them = await readable(request)
    if all_of_them and not with_history and (known_answer := known.answer()) is not None:
        return encoded_response(known_answer)
    await known.update()
    rows = []
    for stream in streams:
        standing = known.standings[stream.name]
        row = {"name": stream.name, "description": stream.description, "tags": stream.tags, **vars(standing)}
        row["lag"] = standing.lag
        del row["count_after"]
        with_texts(row, "head", "floor")
        rows.append(row | ({"history": history.of(stream)} if with_history else {}))
    answer = {"at": datetime.now(UTC), "streams": rows, "complete": all_of_them}
    encoded = encode(answer | (await known.pipelines() if all_of_them else {"pipelines": [], "problem": None}))
    return encoded_response(known.keep(encoded) if all_of_them and not with_history else encoded)
