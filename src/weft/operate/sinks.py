"""Where metrics go, by the URL of a sink: one way for those of runs, of streaming pipelines and of the service.

`null://` drops them, `stdout://` prints them at the end, `prometheus://:9100` serves them while the process runs,
`otlp://collector:4318` sends them to a collector. `memory://` belongs to `weft.operate.metrics`, which keeps them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult

from weft.errors import ConnectionFailedError, MissingExtraError, SettingsError, installing
from weft.operate import otlp
from weft.project import current
from weft.settings import read_project_file

_log = logging.getLogger("weft.metrics")
VARIABLE = "WEFT_METRICS"
SINKS = ("null", "stdout", "memory", "prometheus", "otlp")
_EXAMPLES = "prometheus://:9100, otlp://collector:4318, stdout:// or null://."
_EVERY_SECONDS = 15.0


class MetricSample(NamedTuple):
    """One value of a metric. A sample of prometheus-client begins in the same way."""

    name: str
    labels: Mapping[str, str]
    value: float


class Family(Protocol):
    """A metric with its values, as `collect` of prometheus-client yields it."""

    @property
    def name(self) -> str: ...
    @property
    def documentation(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def samples(self) -> Sequence[Any]: ...


Collect = Callable[[], Iterable[Family]]


def project_url(named: str | None = None) -> str | None:
    """Return where metrics go: by the option of a command, else by the environment, else by weft.toml."""
    return named or os.environ.get(VARIABLE) or read_project_file(current().root).get("metrics")


def url_beside_scrapes(named: str | None = None) -> str | None:
    """Return where the metrics of a process go that can be scraped in a way of its own. A port for Prometheus must be
    given to it: that of the project is for the scheduler or a worker, and has no key."""
    url = project_url(named)
    return None if not named and parsed(url).scheme == "prometheus" else url


def parsed(url: str | None) -> SplitResult:
    """Return the parts of the URL of a sink, which is checked."""
    split = otlp.sink(url, "metrics", SINKS, _EXAMPLES)
    if split.scheme == "prometheus" and split.port is None:
        raise SettingsError("prometheus:// needs a port.", hint="prometheus://:9100")
    return split


def check(url: str | None) -> SplitResult:
    """Return the parts of the URL, where this process has the packages that its sink needs."""
    split = parsed(url)
    if split.scheme == "otlp":
        with otlp.importing():
            import opentelemetry.exporter.otlp.proto.http.metric_exporter  # noqa: F401
    return split


def exported(
    collect: Collect,
    url: SplitResult,
    *,
    must_serve: bool = False,
    since: float | None = None,
    flush_seconds: float = otlp.FLUSH_SECONDS,
) -> AbstractContextManager[None]:
    """Hand what `collect` returns to a sink while the block runs, or at its end. A port that is taken, perhaps by
    another run, is a warning, unless it `must_serve`. `since`: when the counting began, if that was before now."""
    sinks: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "stdout": partial(_printed, collect),
        "prometheus": partial(_served, collect, url, must_serve=must_serve),
        "otlp": partial(_sent, collect, url, since, flush_seconds),
    }
    return sinks.get(url.scheme, nullcontext)()


# --------------------------------------------------------------------------------------------------------------- stdout


@contextmanager
def _printed(collect: Collect) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            for line in lines(collect()):
                print(line, flush=True)
        except Exception as error:  # whatever it is: the work is done
            _log.warning("The metrics were not printed: %s", type(error).__name__)


def lines(families: Iterable[Family]) -> Iterator[str]:
    """Yield a line for each value, as Prometheus writes them."""
    for sample in (sample for family in families for sample in family.samples):
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in sorted(sample.labels.items()))
        yield f"{sample.name}{{{shown}}} {sample.value:.15g}" if shown else f"{sample.name} {sample.value:.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# ----------------------------------------------------------------------------------------------------------- Prometheus


@contextmanager
def _served(collect: Collect, url: SplitResult, *, must_serve: bool) -> Iterator[None]:
    """Serve `/metrics` while the block runs; on all addresses where the URL names no host."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import Metric
    except ImportError as error:
        raise MissingExtraError(
            f"prometheus:// needs prometheus-client, which is not there: {error}.", hint=installing("server")
        ) from error

    class Collector:
        def collect(self) -> Iterator[Any]:
            for family in collect():
                metric = Metric(family.name, family.documentation, family.type)
                for each in family.samples:
                    metric.add_sample(each.name, dict(each.labels), each.value)
                yield metric

    registry = CollectorRegistry()
    registry.register(Collector())
    assert url.port is not None
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


# ----------------------------------------------------------------------------------------------------------------- OTLP


@contextmanager
def _sent(collect: Collect, url: SplitResult, since: float | None, flush_seconds: float) -> Iterator[None]:
    """Send the values to a collector by OTLP over HTTP, every so often and at the end."""
    with otlp.importing():
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    endpoint = otlp.endpoint(url, "metrics")
    exporter = OTLPMetricExporter(endpoint, timeout=flush_seconds)
    resource, scope = Resource.create(otlp.service()), InstrumentationScope("weft")
    every = _every_seconds()
    began, ended = int((time.time() if since is None else since) * 1e9), threading.Event()

    def send() -> None:
        try:
            metrics = _points(collect(), began, time.time_ns())
            if metrics:
                of_scope = ScopeMetrics(scope, metrics, schema_url="")
                exporter.export(MetricsData([ResourceMetrics(resource, [of_scope], schema_url="")]))
        except Exception as error:  # whatever it is: it must not stop the work
            _log.warning("Metrics were not sent to %s: %s", endpoint, type(error).__name__)

    def run() -> None:
        while not ended.wait(every):
            send()
        send()

    thread = threading.Thread(target=run, name="weft metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(flush_seconds)
        if thread.is_alive():
            _log.warning("The last metrics were not sent to %s within %g s.", endpoint, flush_seconds)


def _every_seconds() -> float:
    """Return the seconds between two exports: as the variable of OpenTelemetry says, which has milliseconds."""
    try:
        return max(float(os.environ["OTEL_METRIC_EXPORT_INTERVAL"]) / 1000, 0.1)
    except (KeyError, ValueError):
        return _EVERY_SECONDS


def _points(families: Iterable[Family], began: int, now: int) -> list[Any]:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Metric, NumberDataPoint, Sum

    metrics = []
    for family in families:
        data: Any
        if family.type == "histogram":
            points = _histogram_points(family, began, now)
            data = Histogram(points, AggregationTemporality.CUMULATIVE)
        else:
            values = [each for each in family.samples if not each.name.endswith("_created")]
            points = [NumberDataPoint(dict(each.labels), began, now, each.value) for each in values]
            is_counter = family.type == "counter"
            data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if is_counter else Gauge(points)
        if points:
            metrics.append(Metric(family.name, family.documentation, "", data))
    return metrics


def _histogram_points(family: Family, began: int, now: int) -> list[Any]:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    buckets: dict[tuple[tuple[str, str], ...], dict[float, int]] = defaultdict(dict)
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for each in family.samples:
        labels = tuple(sorted((key, text) for key, text in each.labels.items() if key != "le"))
        if each.name.endswith("_bucket"):
            buckets[labels][float(each.labels["le"])] = int(each.value)
        elif each.name.endswith("_sum"):
            sums[labels] = each.value
    points = []
    for labels, counts in buckets.items():
        bounds = sorted(counts)
        upto = [counts[bound] for bound in bounds]
        # Prometheus counts what is up to a bound, OpenTelemetry what is between two of them.
        between = [count - before for count, before in zip(upto, [0, *upto], strict=False)]
        unknown: Any = None
        points.append(
            HistogramDataPoint(
                dict(labels), began, now, upto[-1], sums.get(labels, 0.0), between, bounds[:-1], unknown, unknown
            )
        )
    return points
