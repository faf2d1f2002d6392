"""`weft consume`: run a streaming pipeline until it is stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from weft import engine
from weft.cli.common import (
    alerter_option,
    common_options,
    engine_option,
    escaped,
    find_declared,
    log_format_option,
    log_to_stderr,
    metrics_option,
    plural,
    run_log_option,
    traces_option,
)
from weft.engine.progress import live
from weft.engine.streaming.spark_engine import SparkEngine
from weft.operate import sinks
from weft.operate.listener import RunListener
from weft.operate.run_options import Running
from weft.operate.streaming_alerts import reported
from weft.operate.supervisor import supervise
from weft.pipelines.options import interval
from weft.pipelines.streaming import declare, toml
from weft.pipelines.streaming.execution import Lag, Report

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import StreamingPipeline

# The line on the terminal shows the rate of this many seconds.
_RECENT_SECONDS = 10.0

_number = partial(click.option, type=click.IntRange(0), metavar="N", show_default=True)


def find_pipeline(what: str) -> StreamingPipeline:
    """Return the pipeline of a TOML file, or the declared one of that name."""
    return toml.read(what) if what.endswith(".toml") else find_declared(declare.find, what)


@click.command()
@click.argument("what", metavar="FILE.toml|NAME")
@click.option("--once", is_flag=True, help="Take what is there now, then stop.")
@click.option("--every", metavar="TIME", help="Begin a batch each 10s, 500ms, 1m …; by default when the last is done.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), metavar="PORT", help="Serve /metrics for Prometheus.")
@click.option(
    "--metrics-host",
    default=Running.metrics_host,
    show_default=True,
    metavar="ADDRESS",
    help="Where to serve them.",
)
@click.option("--restart-on-error", is_flag=True, help="Start it again when it fails.")
@_number(
    "--min-backoff-ms",
    default=Running.min_backoff_ms,
    help="Wait so long before the first start after a failure. Each failure in a row doubles it.",
)
@_number("--max-backoff-ms", default=Running.max_backoff_ms, help="Wait no longer than this.")
@_number("--max-restarts", help="Give up after so many starts without a batch that succeeds.  [default: never]")
@engine_option
@metrics_option
@traces_option
@log_format_option
@run_log_option
@alerter_option
@common_options
def consume(
    what: str,
    every: str | None,
    output: str,
    run_log: str | None,
    alerters: tuple[str, ...],
    metrics: str | None,
    **running: Any,
) -> None:
    """Run a streaming pipeline until it is stopped: that of a TOML file, or the one declared as NAME.

    SIGTERM and Ctrl-C finish the current batch and stop, with exit code 0 and 130; a second one ends at once. With
    --format json each batch is a line of JSON.
    """
    if running["once"] and every is not None:
        raise click.UsageError("--once takes what is there now, so there is no --every.")
    if not running["once"]:
        engine.starts_engine = False  # it may run for long, and then nobody else could use the engine
    pipeline = find_pipeline(what)
    if every is not None:
        pipeline = dataclasses.replace(pipeline, every_seconds=interval(every, "every", "--every"))
    listener: _JsonLines | _StatusLine = _JsonLines() if output == "json" else _StatusLine(pipeline.name)
    with listener.shown():
        log_to_stderr("%(asctime)s %(levelname)s: %(message)s")
        logging.getLogger("weft.operate").setLevel(logging.INFO)
        with reported(pipeline, alerters, run_log) as reporting:
            running["metrics"] = sinks.url_beside_scrapes(metrics)
            supervise(SparkEngine(pipeline), Running(**running), [listener, *reporting])


class _JsonLines(RunListener):
    """Prints a line for each batch, for scripts."""

    def __init__(self) -> None:
        self._out = sys.stdout
        self._lag: Lag | None = None

    def started(self, lag: Lag) -> None:
        self._lag = lag

    def batch(self, report: Report) -> None:
        lag = self._lag.now(fresh=True) if self._lag is not None else {}
        record = {**dataclasses.asdict(report), "ended_at": report.ended_at.isoformat(), "lag": lag}
        for part in ("windows", "cdc"):
            if record[part] is None:
                del record[part]
        if report.cdc is not None and report.cdc.tables is None:
            del record["cdc"]["tables"]
        print(escaped(json.dumps(record, ensure_ascii=False)), file=self._out, flush=True)

    def shown(self) -> AbstractContextManager[object]:
        """Send to stderr what modules print while the block runs."""
        return redirect_stdout(sys.stderr)


class _StatusLine(RunListener):
    """Shows the state of the pipeline in one line of a terminal, and prints a summary at the end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, int]] = deque()
        self._rows = self._batches = self._bad = 0
        self._last: Report | None = None
        self._state = "starts"
        self._lag: Lag | None = None
        self._began = time.monotonic()

    def batch(self, report: Report) -> None:
        with self._lock:
            self._rows += report.consumed
            self._batches += 1
            self._bad += report.dead
            self._recent.append((time.monotonic(), report.consumed))
            self._last = report

    def started(self, lag: Lag) -> None:
        if self._lag is None:
            self._began = time.monotonic()  # the time that Spark needs to start does not count
        self._state, self._lag = "", lag

    def failed(self, error: Exception, again_in: float | None) -> None:
        self._state = "failed" if again_in is None else "waits for its next start"

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line while the block runs, where there is a terminal; then print the summary of what was done."""
        try:
            with live(self.text):
                yield
        finally:
            if self._lag is not None:  # it ran
                bad = f", {plural(self._bad, 'bad row')}" if self._bad else ""
                done = f"{plural(self._rows, 'row')} in {plural(self._batches, 'batch', 'es')}{bad}"
                click.echo(f"{self._name}: {done}")

    def text(self) -> str:
        lag = ", ".join(self._lag.in_words().values()) if self._lag is not None else ""
        with self._lock:
            now = time.monotonic()
            while self._recent and now - self._recent[0][0] > _RECENT_SECONDS:
                self._recent.popleft()
            rate = sum(rows for _, rows in self._recent) / min(_RECENT_SECONDS, max(now - self._began, 1.0))
            parts = [self._name, self._state, f"{self._rows:,} rows", f"{rate:,.0f} rows/s"]
            if self._bad:
                parts.append(f"{self._bad:,} bad")
            if lag:
                parts.append(f"lag {lag}")
            if self._last is not None:
                parts.append(f"batch {self._last.batch_id:,} in {self._last.seconds:.2f} s")
            return "  ".join(filter(None, parts))
