"""Metrics of runs and of the scheduler, and where they go: a sink, named by a URL.

`null://` drops them, `stdout://` prints them at the end, `memory://` keeps them for a test to read,
`prometheus://:9100` serves them while the process runs, `otlp://collector:4318` sends them to a collector.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal
from urllib.parse import SplitResult

from weft.errors import ConnectionFailedError, MissingExtraError, NotFoundError, SettingsError, installing, listed
from weft.operate import otlp
from weft.operate.records import COUNTS

_log = logging.getLogger("weft.metrics")
_SINKS = ("null", "stdout", "memory", "prometheus", "otlp")
_EXAMPLES = "prometheus://:9100, otlp://collector:4318, stdout:// or null://."
_EVERY_SECONDS = 15

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """One metric: its name without the ending of counters, its kind and what it says."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str


RUNS = Metric("weft_pipeline_runs", "counter", "Attempts at runs, by how they ended.")
ROWS = Metric("weft_pipeline_rows", "counter", "Rows of runs, by what became of them.")
SECONDS = Metric("weft_pipeline_run_seconds", "counter", "Time that attempts took.")
ATTEMPT = Metric("weft_pipeline_attempt", "gauge", "The number of the last attempt at its run.")
FAILURES = Metric("weft_pipeline_failures", "gauge", "Attempts that did not succeed, since one did.")
SUCCEEDED_AT = Metric("weft_pipeline_last_success_timestamp_seconds", "gauge", "When it succeeded last.")
DISPATCHES = Metric("weft_scheduler_dispatches", "counter", "Runs that the scheduler started.")
DISPATCH_FAILURES = Metric("weft_scheduler_dispatch_failures", "counter", "Runs that could not be started.")
RUNNING = Metric("weft_scheduler_running", "gauge", "Runs that the scheduler started and that have not ended.")
LEADS = Metric("weft_scheduler_leads", "gauge", "1 where this scheduler leads.")
METRICS = (RUNS, ROWS, SECONDS, ATTEMPT, FAILURES, SUCCEEDED_AT, DISPATCHES, DISPATCH_FAILURES, RUNNING, LEADS)


class Metrics:
    """What this process has counted. Its methods never raise: no run fails by them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Metric, dict[Labels, float]] = defaultdict(dict)

    def add(self, metric: Metric, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[metric][key] = self._values[metric].get(key, 0) + value

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[metric][tuple(sorted(labels.items()))] = value

    def series(self, metric: Metric) -> dict[Labels, float]:
        """Return the values of a metric by their labels."""
        with self._lock:
            return dict(self._values.get(metric, {}))

    def value(self, name: str, **labels: str) -> float | None:
        """Return one value by the name that Prometheus has for it; `None` where nothing was counted."""
        for metric in METRICS:
            if name in (metric.name, f"{metric.name}_total"):
                return self.series(metric).get(tuple(sorted(labels.items())))
        raise NotFoundError(f"There is no metric {name!r}.", hint=listed(name, [each.name for each in METRICS], ""))

    def ended(
        self, pipeline: str, status: str, attempt: int, failures: int, seconds: float | None, counts: Mapping[str, int]
    ) -> None:
        """Count an attempt that has ended."""
        self.add(RUNS, pipeline=pipeline, status=status)
        for name in COUNTS:
            if counts.get(name):
                self.add(ROWS, counts[name], pipeline=pipeline, kind=name.removeprefix("rows_"))
        if seconds is not None:
            self.add(SECONDS, seconds, pipeline=pipeline)
        self.set(ATTEMPT, attempt, pipeline=pipeline)
        if status != "cancelled":
            self.set(FAILURES, 0 if status == "succeeded" else failures + 1, pipeline=pipeline)
        if status == "succeeded":
            self.set(SUCCEEDED_AT, datetime.now(UTC).timestamp(), pipeline=pipeline)


MEMORY = Metrics()
"""What `memory://` has counted in this process."""


@contextmanager
def open_metrics(url: str | None, *, must_serve: bool = False) -> Iterator[Metrics]:
    """Yield what counts for the sink at a URL, which gets the values while the block runs or at its end. A port that is
    taken, perhaps by another run, is a warning, unless it `must_serve`."""
    split = otlp.sink(url, "metrics", _SINKS, _EXAMPLES)
    scheme = split.scheme
    if scheme == "memory":
        yield MEMORY
        return
    metrics = Metrics()
    sinks: dict[str, Callable[[Metrics, SplitResult], AbstractContextManager[None]]] = {
        "null": lambda *_: nullcontext(),
        "stdout": _printed,
        "prometheus": partial(_served, must_serve=must_serve),
        "otlp": _sent,
    }
    with sinks[scheme](metrics, split):
        yield metrics


@contextmanager
def _printed(metrics: Metrics, _url: SplitResult) -> Iterator[None]:
    try:
        yield
    finally:
        for line in lines(metrics):
            print(line, flush=True)


def lines(metrics: Metrics) -> Iterator[str]:
    """Yield a line for each value, as Prometheus writes them."""
    for metric in METRICS:
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        for labels, value in sorted(metrics.series(metric).items()):
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            yield f"{name}{{{shown}}} {value:.15g}" if labels else f"{name} {value:.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@contextmanager
def _served(metrics: Metrics, url: SplitResult, *, must_serve: bool) -> Iterator[None]:
    """Serve `/metrics` while the block runs; on all addresses where the URL names no host."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise MissingExtraError(
            f"prometheus:// needs prometheus-client, which is not there: {error}.", hint=installing("server")
        ) from error
    if url.port is None:
        raise SettingsError("prometheus:// needs a port.", hint="prometheus://:9100")

    class Collector:
        def collect(self) -> Iterator[Any]:
            for metric in METRICS:
                family_class = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                series = metrics.series(metric)
                names = sorted({key for labels in series for key, _ in labels})
                family = family_class(metric.name, metric.text, labels=names)
                for labels, value in series.items():
                    family.add_metric([text for _, text in labels], value)
                yield family

    registry = CollectorRegistry()
    registry.register(Collector())
    try:
        server, thread = start_http_server(url.port, url.hostname or "0.0.0.0", registry)
    except OSError as error:
        if must_serve:
            raise ConnectionFailedError(
                f"Metrics cannot be served on port {url.port}: {error}.", hint="Choose a port that is free."
            ) from None
        _log.warning("Metrics are not served on port %s: %s", url.port, error)
        yield
        return
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _sent(metrics: Metrics, url: SplitResult) -> Iterator[None]:
    """Send the values to a collector by OTLP over HTTP, every 15 seconds and at the end."""
    with otlp.importing():
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.metrics import CallbackOptions, Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

    def observe(metric: Metric, _options: CallbackOptions) -> list[Observation]:
        return [Observation(value, dict(labels)) for labels, value in metrics.series(metric).items()]

    endpoint = otlp.endpoint(url, "metrics")
    exporter = OTLPMetricExporter(endpoint, timeout=otlp.FLUSH_SECONDS)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=_EVERY_SECONDS * 1000)
    provider = MeterProvider([reader], resource=Resource.create(otlp.service()))
    meter = provider.get_meter("weft")
    for metric in METRICS:
        made = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        made(metric.name, [partial(observe, metric)], description=metric.text)
    try:
        yield
    finally:
        try:
            provider.shutdown(timeout_millis=otlp.FLUSH_SECONDS * 1000)
        except Exception as error:  # whatever it is: the run is done
            _log.warning("The last metrics were not sent to %s: %s", endpoint, type(error).__name__)
