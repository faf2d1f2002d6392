"""Metrics of runs and of the scheduler. `weft.operate.sinks` has the places that they go to, by URL."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from weft.errors import NotFoundError, listed
from weft.operate import sinks
from weft.operate.records import COUNTS
from weft.operate.sinks import Collect, MetricSample

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """One metric: its name without the ending of counters, its kind and what it says."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str


@dataclass(frozen=True)
class _Counted:
    """A metric with its values: a `Family` of sinks."""

    metric: Metric
    values: Mapping[Labels, float]

    @property
    def name(self) -> str:
        return self.metric.name

    @property
    def documentation(self) -> str:
        return self.metric.text

    @property
    def type(self) -> str:
        return self.metric.kind

    @property
    def samples(self) -> list[MetricSample]:
        name = f"{self.name}_total" if self.type == "counter" else self.name
        return [MetricSample(name, dict(labels), value) for labels, value in sorted(self.values.items())]


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
        self.others: list[Collect] = []
        """What else `value` looks into: `memory://` keeps metrics of streaming pipelines too."""

    def add(self, metric: Metric, value: float = 1, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[metric][key] = self._values[metric].get(key, 0) + value

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        with self._lock:
            self._values[metric][tuple(sorted(labels.items()))] = value

    def forget(self, *metrics: Metric) -> None:
        """Have no values of these."""
        with self._lock:
            for each in metrics:
                self._values.pop(each, None)

    def series(self, metric: Metric) -> dict[Labels, float]:
        """Return the values of a metric by their labels."""
        with self._lock:
            return dict(self._values.get(metric, {}))

    def value(self, name: str, **labels: str) -> float | None:
        """Return one value by the name that Prometheus has for it; `None` where nothing was counted."""
        for metric in METRICS:
            if name in (metric.name, f"{metric.name}_total"):
                return self.series(metric).get(tuple(sorted(labels.items())))
        others = [family for collect in reversed(self.others) for family in collect()]
        if samples := [each for family in others for each in family.samples if each.name == name]:
            return next((each.value for each in samples if dict(each.labels) == labels), None)
        known = [*(each.name for each in METRICS), *(each.name for each in others)]
        raise NotFoundError(f"There is no metric {name!r}.", hint=listed(name, known, ""))

    def collect(self) -> Iterator[sinks.Family]:
        """Yield every metric with its values."""
        for metric in METRICS:
            yield _Counted(metric, self.series(metric))

    def ended(
        self, pipeline: str, status: str, attempt: int, failures: int, seconds: float | None, counts: Mapping[str, int]
    ) -> None:
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
    split = sinks.parsed(url)
    metrics = MEMORY if split.scheme == "memory" else Metrics()
    with sinks.exported(metrics.collect, split, must_serve=must_serve):
        yield metrics


@contextmanager
def exported(collect: Collect, url: str, *, must_serve: bool = False) -> Iterator[None]:
    """Hand other metrics to the sink at a URL, in the same way. In memory `MEMORY.value` has them too."""
    split = sinks.parsed(url)
    if split.scheme == "memory":
        MEMORY.others.append(collect)
    with sinks.exported(collect, split, must_serve=must_serve):
        yield
