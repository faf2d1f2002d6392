"""`GET /api/v1/overview`: how streams and pipelines stand, for pages that ask every two seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from weft.project import current
from weft.server.cached_probe import CachedProbe
from weft.server.consuming import query
from weft.server.service import json_response, service_of
from weft.settings import read_project_file
from weft.streams.declare import Stream
from weft.streams.runtime import open_stream
from weft.systems.base import Connection

if TYPE_CHECKING:
    from weft.operate.due import Due
    from weft.operate.records import Attempt

logger = logging.getLogger("weft.server")

# Nobody waits longer than this for a database that hangs: what was last known of it is shown.
_ANSWER_SECONDS = 1.0
_STREAMS_FRESH_SECONDS = 1.0
_RUNS_FRESH_SECONDS = 5.0
# To count a long table takes long: it is counted again after so many times as long.
_COUNT_SHARE = 20
# One every two seconds: five minutes of a page.
_HISTORY = 150
# Events with which a page that follows a stream begins.
_TAIL = 25
_RUNS_READ = 500
_RUNS_SHOWN = 12
_FAILED = "Its database failed; the log of the service has the reason."


@dataclass
class Standing:
    """What was last seen of a stream."""

    head: int = 0
    floor: int = 0
    head_at: float = 0.0
    """By this host's clock: two of them, with what was published by then, give the rate."""
    published: int = 0
    tail: str = "0"
    """The offset before the last few events. A text: those of Redis are longer than a browser's numbers."""
    history: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    """Moments, and what had been published by then."""
    rows: int = 0
    consumers: list[dict[str, Any]] = field(default_factory=list)
    count_after: float = 0.0
    problem: str | None = None

    def look(self, stream: Stream) -> None:
        """Look at the stream. The head is cheap, and what must be counted is counted less often the longer it takes."""
        log = open_stream(stream).log
        self.floor, self.head = log.floor(), log.head()
        self.published, self.head_at, self.problem = log.published(), time.time(), None
        self.history.append((self.head_at, self.published))
        first = log.nth_last(_TAIL)
        self.tail = str(self.floor if first is None else first - 1)
        started = time.monotonic()
        if started >= self.count_after:
            self.rows = log.count()
            self.consumers = [
                {"consumer": group.consumer, "lag": group.lag, "pending": group.pending, "lost": group.lost}
                for group in log.groups()
            ]
            done = time.monotonic()
            self.count_after = done + (done - started) * _COUNT_SHARE

    @property
    def lag(self) -> int:
        """Of the consumer that is the furthest behind."""
        return max((each["lag"] for each in self.consumers), default=0)


class Overview:
    """What this process knows of its streams and pipelines."""

    def __init__(self) -> None:
        self.standings: dict[str, Standing] = defaultdict(Standing)
        self._streams: dict[str | Connection | None, CachedProbe[None]] = {}
        self._pipelines = CachedProbe(_look_at_pipelines, fresh_seconds=_RUNS_FRESH_SECONDS)

    async def look(self) -> None:
        """Bring what is known of the streams up to date, each database by itself."""
        used = {stream.connection for stream in current().streams.values()}
        await asyncio.gather(*(self._look_at(connection) for connection in used))

    async def _look_at(self, connection: str | Connection | None) -> None:
        def streams() -> list[Stream]:
            return [each for each in current().streams.values() if each.connection == connection]

        def look() -> None:
            for stream in streams():
                standing = self.standings[stream.name]
                try:
                    standing.look(stream)
                except Exception as error:  # whatever it is: the other streams are shown
                    if standing.problem != _FAILED:  # once, not every second
                        logger.warning("%s cannot be looked at: %s", stream.name, error)
                    standing.problem = _FAILED

        probe = self._streams.setdefault(connection, CachedProbe(look, fresh_seconds=_STREAMS_FRESH_SECONDS))
        try:
            await probe.get(_ANSWER_SECONDS)
        except TimeoutError:
            for stream in streams():
                self.standings[stream.name].problem = "Its database does not answer."

    async def pipelines(self) -> dict[str, Any]:
        """The pipelines with their last runs."""
        if not current().pipelines:
            return {"pipelines": [], "problem": None}
        try:
            return {"pipelines": await self._pipelines.get(_ANSWER_SECONDS), "problem": None}
        except TimeoutError:
            problem = "The run log does not answer."
        except Exception as error:  # whatever it is: the streams are shown
            logger.warning("the run log cannot be read: %s", error)
            problem = "The run log cannot be read; the log of the service has the reason."
        return {"pipelines": [_described(name, None, []) for name in sorted(current().pipelines)], "problem": problem}


def _look_at_pipelines() -> list[dict[str, Any]]:
    from weft.operate.due import Planner
    from weft.operate.runlog import open_run_log

    project = current()
    url = read_project_file(project.root).get("run_log")
    with open_run_log(url, project.root, read_only=True) as log:
        due, runs = Planner(log).due(), log.runs(limit=_RUNS_READ)
    by_name: dict[str, list[Attempt]] = defaultdict(list)
    for run in runs:
        by_name[run.pipeline].append(run)
    return [_described(each.pipeline.name, each, by_name[each.pipeline.name]) for each in due]


def _described(name: str, due: Due | None, runs: list[Attempt]) -> dict[str, Any]:
    pipeline = current().pipelines[name]
    schedule, state = pipeline.schedule, None if due is None else due.state
    return {
        "name": name,
        "description": pipeline.description,
        "targets": [target.name for target in pipeline.targets],
        "schedule": None if schedule is None else f"{schedule.cron} {schedule.timezone}",
        "depends_on": list(pipeline.depends_on),
        "state": None if due is None else due.why,
        "status": None if state is None else state.status,
        "succeeded_at": None if state is None else state.succeeded_at,
        "last": None if state is None or state.last is None else _run(state.last),
        # The newest last, as one reads them.
        "runs": [
            {"status": each.status, "started_at": each.started_at, "seconds": each.seconds}
            for each in reversed(runs[:_RUNS_SHOWN])
        ],
    }


def _run(attempt: Attempt) -> dict[str, Any]:
    counts = ("rows_read", "inserted", "updated", "unchanged", "deleted", "quarantined", "late")
    return {
        "run_id": attempt.run_id,
        "attempt": attempt.attempt,
        "started_at": attempt.started_at,
        "seconds": attempt.seconds,
        "error": attempt.error,
        **{name: getattr(attempt, name) for name in counts},
    }


async def readable(request: Request) -> tuple[list[Stream], bool]:
    """The streams that a request may read, and whether these are all. What is about the whole service is told to those
    alone who may read every stream."""
    streams = await service_of(request).access.readable(request)
    return streams, len(streams) == len(current().streams)


async def overview(request: Request) -> Response:
    """Streams with their consumers, and pipelines with their last runs, as far as the caller may see them.

    `?history=true`: with what this process saw published lately, for a page that opens.
    """
    with_history = query(request, "history").get("history") == "true"
    known: Overview = request.app.state.overview
    streams, all_of_them = await readable(request)
    await known.look()
    found = []
    for stream in streams:
        standing = known.standings[stream.name]
        found.append(
            {
                "name": stream.name,
                "description": stream.description,
                "head": standing.head,
                "floor": standing.floor,
                "head_at": standing.head_at,
                "published": standing.published,
                "tail": standing.tail,
                "rows": standing.rows,
                "lag": standing.lag,
                "consumers": standing.consumers,
                "problem": standing.problem,
                **({"history": list(standing.history)} if with_history else {}),
            }
        )
    answer = {"at": datetime.now(UTC), "streams": found, "complete": all_of_them}
    return json_response(answer | (await known.pipelines() if all_of_them else {"pipelines": [], "problem": None}))
