"""`/metrics` for Prometheus: counts of requests, and the state of the streams.

Labels are our own route templates, methods, statuses and names of declared streams: a label that a client may choose
would let it fill the memory. Several processes write to files in the folder that `PROMETHEUS_MULTIPROC_DIR` names, as
prometheus-client has it, and the process that is asked adds them up. To count a publish takes 6 µs there, 3 % of it.
"""

from __future__ import annotations

import asyncio
import os
from asyncio import AbstractEventLoop as Loop
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from weft.operate import sinks
from weft.server.overview import Overview, StreamStatus, readable
from weft.server.problems import Problem

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_UPDATE_SECONDS = 5.0
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ServerMetrics:
    """The counters of one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        self._requests = counter("weft_http_requests", "Requests answered.", ["route", "method", "status"])
        text = "Time until an answer began."
        self._seconds = Histogram(
            "weft_http_request_seconds", text, ["route", "method"], buckets=_SECONDS, registry=registry
        )
        self._events = counter("weft_events_published", "Events stored by publishes.", ["stream"])
        self._bytes = counter("weft_published_bytes", "Bytes of publishes that were stored, unpacked.", ["stream"])
        self._subscribers = Gauge(
            "weft_subscribers", "Open subscriptions.", ["stream"], registry=registry, multiprocess_mode="livesum"
        )
        # The metrics by their labels: to look them up takes prometheus-client five times as long as to count.
        self._answers: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._publishes: dict[str, tuple[Counter, Counter]] = {}

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request whose answer begins."""
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        labelled = self._answers.get((route, method, status))
        if labelled is None:
            labelled = self._requests.labels(route, method, status), self._seconds.labels(route, method)
            self._answers[route, method, status] = labelled
        labelled[0].inc()
        labelled[1].observe(seconds)

    def published(self, done: dict[str, Any], size: int) -> None:
        """Count the events that a publish stored, by its answer."""
        stream = done["stream"]
        labelled = self._publishes.get(stream)
        if labelled is None:
            labelled = self._publishes[stream] = self._events.labels(stream), self._bytes.labels(stream)
        labelled[0].inc(done["rows_received"] - done["rows_deduplicated"] - done["rows_quarantined"])
        labelled[1].inc(size)

    def following(self, stream: str, answer: ASGIApp) -> ASGIApp:
        """Wrap an answer so that it counts as a subscription as long as it goes on."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            with self._subscribers.labels(stream).track_inprogress():
                await answer(scope, receive, send)

        return counted

    def text(self, standings: dict[str, StreamStatus]) -> bytes:
        """Return the metrics of all processes, and the state of these streams."""
        return generate_latest(self._of_all()) + generate_latest(_StreamCollector(standings))

    def families(self, standings: dict[str, StreamStatus]) -> Iterator[Metric]:
        """Yield the same as metrics with their values."""
        yield from self._of_all().collect()
        yield from _StreamCollector(standings).collect()

    def _of_all(self) -> CollectorRegistry:
        if FOLDER not in os.environ:
            return self.registry
        folder = os.environ[FOLDER]
        _forget_dead(folder)
        counts = CollectorRegistry()
        MultiProcessCollector(counts, folder)  # type: ignore[no-untyped-call]
        return counts


class _StreamCollector(Collector):
    """The state of streams."""

    def __init__(self, standings: dict[str, StreamStatus]) -> None:
        self._standings = standings

    def collect(self) -> Iterable[Any]:
        for name, text, value in (
            ("weft_stream_head", "The last offset.", lambda each: each.head),
            ("weft_stream_rows", "Events stored, as last counted.", lambda each: each.rows),
            ("weft_stream_lag", "Events that the consumer furthest behind was not given yet.", lambda each: each.lag),
            ("weft_stream_dead_letters", "Events in its dead-letter stream.", lambda each: each.dead_letters),
            ("weft_stream_quarantined", "Events that did not fit, put aside.", lambda each: each.quarantined),
            ("weft_stream_up", "Whether its database answers.", lambda each: int(each.problem is None)),
        ):
            family = GaugeMetricFamily(name, text, labels=["stream"])
            for stream, standing in self._standings.items():
                if (number := value(standing)) is not None:
                    family.add_metric([stream], number)
            yield family


def _forget_dead(folder: str) -> None:
    """Remove the subscribers of processes that were killed."""
    for file in Path(folder).glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not Path(f"/proc/{pid}").exists():
            mark_process_dead(pid, folder)  # type: ignore[no-untyped-call]


@contextmanager
def exported(
    application: Starlette, url: str | None, began: float, loop: Callable[[], Loop | None], flush_seconds: float
) -> Iterator[None]:
    """Hand the metrics of the service to the sink at a URL while the block runs, or at its end. `loop` returns the
    event loop of the application."""
    overview: Overview = application.state.overview
    counts: ServerMetrics = application.state.metrics

    def collect() -> Iterator[Metric]:
        running = loop()
        if running is not None and running.is_running():
            # Where a database does not answer, what was last known of its streams is handed on.
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(overview.update(), running).result(_UPDATE_SECONDS)
        return counts.families(dict(overview.standings))

    with sinks.exported(collect, sinks.parsed(url), since=began, flush_seconds=flush_seconds):
        yield


async def metrics(request: Request) -> Response:
    known: Overview = request.app.state.overview
    counts: ServerMetrics = request.app.state.metrics
    streams, all_of_them = await readable(request)
    if not all_of_them:
        detail = "The metrics are about every stream: this needs a key with the scope read for all of them."
        raise Problem(403, "forbidden", "Forbidden", detail, hint="Make one: weft apikey create")
    await known.update()
    text = counts.text({stream.name: known.standings[stream.name] for stream in streams})
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
