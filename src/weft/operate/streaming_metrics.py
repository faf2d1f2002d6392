"""Counts of a streaming pipeline for Prometheus: `/metrics` of the process that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from weft.errors import ConnectionFailedError, MissingExtraError, installing
from weft.operate.listener import RunListener
from weft.pipelines.streaming.execution import CdcReport, Report, StreamingEngine, WindowReport

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
    from prometheus_client.core import GaugeMetricFamily
except ImportError as error:
    raise MissingExtraError(
        f"Metrics need prometheus-client, which is not there: {error}.", hint=installing("server")
    ) from error

_PREFIX = "weft_streaming"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class StreamingMetrics(RunListener):
    """Counts the batches, rows and failures of one pipeline."""

    wants_idle = True

    def __init__(self, engine: StreamingEngine) -> None:
        self.registry = registry = CollectorRegistry()
        pipeline = engine.name

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, ["pipeline"], registry=registry).labels(pipeline)

        self._consumed = counter("rows_consumed", "Rows taken from the sources, before the SQL.")
        self._rows_written = counter("rows_written", "Rows given to the targets, after the SQL.")
        self._batches = counter("batches", "Batches that had rows.")
        self._iterations = counter("iterations", "Looks at the sources, with those that found nothing.")
        self._idle = counter("idle_iterations", "Looks at the sources that found nothing.")
        self._errors = counter("errors", "Failures of the pipeline.")
        self._dead = counter("dlq_writes", "Rows that went to the dead letters.")
        self._restarts = counter("restarts", "Starts after a failure.")
        self._seconds = Histogram(
            f"{_PREFIX}_batch_seconds", "Time that a batch took.", ["pipeline"], buckets=_SECONDS, registry=registry
        ).labels(pipeline)
        self._last = Gauge(
            f"{_PREFIX}_last_batch_timestamp_seconds", "When the last batch ended.", ["pipeline"], registry=registry
        ).labels(pipeline)
        self._window_metrics: _WindowMetrics | None = None
        self._cdc_metrics: _CdcMetrics | None = None
        registry.register(_LagCollector(engine))

    def batch(self, report: Report) -> None:
        self._iterations.inc()
        self._batches.inc()
        self._consumed.inc(report.consumed)
        self._rows_written.inc(sum(report.written.values()))
        self._dead.inc(report.dead)
        self._seconds.observe(report.seconds)
        self._last.set(report.ended_at.timestamp())
        if report.windows is not None:
            if self._window_metrics is None:
                self._window_metrics = _WindowMetrics(report.pipeline, self.registry)
            self._window_metrics.batch(report.windows)
        if report.cdc is not None:
            if self._cdc_metrics is None:
                self._cdc_metrics = _CdcMetrics(report.pipeline, self.registry)
            self._cdc_metrics.batch(report.cdc)

    def idle(self) -> None:
        self._iterations.inc()
        self._idle.inc()

    def failed(self, error: Exception, again_in: float | None) -> None:
        self._errors.inc()
        if again_in is not None:
            self._restarts.inc()


class _WindowMetrics:
    """Counts what the window or the join of a pipeline keeps and emits."""

    def __init__(self, pipeline: str, registry: CollectorRegistry) -> None:
        self._pipeline = pipeline

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{_PREFIX}_{name}", text, ["pipeline", *labels], registry=registry)

        self._emitted = Counter(
            f"{_PREFIX}_windows_emitted",
            "Rows of windows, or of a join.",
            ["pipeline"],
            registry=registry,
        )
        self._late = Counter(
            f"{_PREFIX}_late_rows_dropped", "Rows that came too late.", ["pipeline", "policy"], registry=registry
        )
        self._open = gauge("windows_active", "Windows that are open.")
        # Not a counter, though it is called so elsewhere too.
        self._groups = gauge("state_groups_total", "Groups of the open windows, at most; rows of a join that wait.")
        self._watermark = gauge("global_watermark_micros", "Windows that end up to here are closed.")
        self._sources = gauge("per_source_watermark_micros", "How far the rows of a source have come.", "source")

    def batch(self, report: WindowReport) -> None:
        self._emitted.labels(self._pipeline).inc(report.emitted)
        self._late.labels(self._pipeline, report.policy).inc(report.late)
        self._open.labels(self._pipeline).set(report.open)
        self._groups.labels(self._pipeline).set(report.groups)
        if report.watermark is not None:
            self._watermark.labels(self._pipeline).set(report.watermark)
        for source, reached in report.sources.items():
            self._sources.labels(self._pipeline, source).set(reached)


class _CdcMetrics:
    """Counts the changes that a pipeline applies."""

    COUNTED: ClassVar[dict[str, str]] = {
        "creates": "Rows that were created in the source, or read by a snapshot.",
        "updates": "Rows that were updated in the source.",
        "deletes": "Rows that were deleted in the source.",
        "skipped": "Messages that are no change: tombstones, and malformed ones that are dropped.",
        "idempotent_skipped": "Changes that came again, or later than a newer one of their key.",
    }

    def __init__(self, pipeline: str, registry: CollectorRegistry) -> None:
        self._counters = {
            name: Counter(f"{_PREFIX}_cdc_{name}", text, ["pipeline"], registry=registry).labels(pipeline)
            for name, text in self.COUNTED.items()
        }
        self._lag = Gauge(
            f"{_PREFIX}_cdc_lag_seconds",
            "From the commit of the newest change in the source to that in the targets.",
            ["pipeline"],
            registry=registry,
        ).labels(pipeline)
        self._pipeline, self._registry = pipeline, registry
        self._of_tables: tuple[dict[str, Counter], Gauge] | None = None

    def batch(self, report: CdcReport) -> None:
        for name, counter in self._counters.items():
            counter.inc(getattr(report, name))
        if report.lag_seconds is not None:
            self._lag.set(report.lag_seconds)
        for table, each in (report.tables or {}).items():
            counters, lag = self._by_table()
            for name, counter in counters.items():
                counter.labels(self._pipeline, table).inc(getattr(each, name))
            if each.lag_seconds is not None:
                lag.labels(self._pipeline, table).set(each.lag_seconds)

    def _by_table(self) -> tuple[dict[str, Counter], Gauge]:
        """Return the metrics of changes by table, where `route` leads changes to several tables."""
        if self._of_tables is None:
            labels, registry = ["pipeline", "table"], self._registry
            counters = {
                name: Counter(f"{_PREFIX}_cdc_table_{name}", f"{text} By table.", labels, registry=registry)
                for name, text in self.COUNTED.items()
            }
            lag = Gauge(f"{_PREFIX}_cdc_table_lag_seconds", "The lag of a table.", labels, registry=registry)
            self._of_tables = counters, lag
        return self._of_tables


class _LagCollector:
    """Reads the lag of the sources at each scrape."""

    def __init__(self, engine: StreamingEngine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Any]:
        return [self._family()]

    def collect(self) -> Iterable[Any]:
        family = self._family()
        for source, lag in self._engine.lag.now().items():
            family.add_metric([self._engine.name, source], lag)
        return [family]

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            f"{_PREFIX}_lag", "Events of a source that wait, at most.", labels=["pipeline", "source"]
        )


@contextmanager
def served(engine: StreamingEngine, host: str, port: int) -> Iterator[tuple[StreamingMetrics, int]]:
    """Serve the metrics of a pipeline during the block; give the listener that counts them, and the port."""
    metrics = StreamingMetrics(engine)
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConnectionFailedError(
            f"Metrics cannot be served at {host}:{port}: {reason}.", hint="Choose another port for the metrics."
        ) from None
    try:
        yield metrics, server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
