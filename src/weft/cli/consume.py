"""`weft consume`: run a streaming pipeline until it is stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import escaped, format_option, module_option
from weft.cli.pipelines import kept_apart
from weft.engine.streaming.spark_engine import SparkEngine
from weft.errors import NotFoundError
from weft.operate.listener import RunListener
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.execution import Lag, Report
from weft.project import current

if TYPE_CHECKING:
    from weft.pipelines.streaming.spec import StreamingPipeline

# The line on the terminal tells the speed of so many seconds.
_RECENT_SECONDS = 10.0


def find_pipeline(what: str, modules: tuple[str, ...]) -> StreamingPipeline:
    """The pipeline of a TOML file, or the declared one of that name."""
    from weft.pipelines.streaming import declare, toml

    project = current()
    project.load_modules(modules)
    if what.endswith(".toml"):
        return toml.read(what)
    try:
        return declare.find(what)
    except NotFoundError as error:
        raise NotFoundError(error.what, hint=project.elsewhere() or error.hint) from None


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
@click.option(
    "--min-backoff-ms",
    type=click.IntRange(0),
    default=Running.min_backoff_ms,
    show_default=True,
    metavar="N",
    help="Wait so long before the first start after a failure. Each failure in a row doubles it.",
)
@click.option(
    "--max-backoff-ms",
    type=click.IntRange(0),
    default=Running.max_backoff_ms,
    show_default=True,
    metavar="N",
    help="Wait no longer than this.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    metavar="N",
    help="Give up after so many starts without a batch that succeeds.  [default: never]",
)
@module_option
@format_option
def consume(what: str, every: str | None, modules: tuple[str, ...], output: str, **running: Any) -> None:
    """Run a streaming pipeline until it is stopped: that of a TOML file, or the one declared as NAME.

    SIGTERM and Ctrl-C finish the batch in hand and stop, with exit code 0 and 130; a second one ends at once. With
    --format json each batch is a line of JSON.
    """
    if running["once"] and every is not None:
        raise click.UsageError("--once takes what is there now, so there is no --every.")
    pipeline = find_pipeline(what, modules)
    if every is not None:
        from weft.pipelines.streaming.options import interval

        pipeline = dataclasses.replace(pipeline, every_seconds=interval(every, "every", "--every"))
    told: _Json | _Line = _Json() if output == "json" else _Line(pipeline.name)
    try:
        with told.shown(), kept_apart(output):
            _set_up_logging()
            supervise(SparkEngine(pipeline), Running(**running), [told])
    finally:
        told.end()


class _Json(RunListener):
    """A line for each batch, for scripts."""

    def __init__(self) -> None:
        self._out = sys.stdout  # what modules print while it runs goes elsewhere
        self._lag: Lag | None = None

    def started(self, lag: Lag) -> None:
        self._lag = lag

    def batch(self, report: Report) -> None:
        lag = self._lag.now(fresh=True) if self._lag is not None else {}
        told = {**dataclasses.asdict(report), "ended_at": report.ended_at.isoformat(), "lag": lag}
        print(escaped(json.dumps(told, ensure_ascii=False)), file=self._out, flush=True)

    def shown(self) -> AbstractContextManager[None]:
        """Nothing, while the block runs."""
        return nullcontext()

    def end(self) -> None:
        """Nothing: every batch was told."""


class _Line(RunListener):
    """How things stand, for who sits at a terminal; and a summary at the end."""

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
            self._began = time.monotonic()  # what Spark takes to start is no work
        self._state, self._lag = "", lag

    def failed(self, error: Exception, again_in: float | None) -> None:
        self._state = "failed" if again_in is None else "waits for its next start"

    def shown(self) -> AbstractContextManager[None]:
        """Show it while the block runs, where there is a terminal."""
        from weft.engine.progress import live

        return live(self.text)

    def end(self) -> None:
        """Say what was done, if it ever began."""
        if self._state != "starts":
            batches = f"{self._batches:,} batch{'' if self._batches == 1 else 'es'}"
            bad = f", {self._bad:,} bad row{'' if self._bad == 1 else 's'}" if self._bad else ""
            click.echo(f"{self._name}: {self._rows:,} row{'' if self._rows == 1 else 's'} in {batches}{bad}")

    def text(self) -> str:
        """The line."""
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


def _set_up_logging() -> None:
    """What happens, on stderr: of our own also what is no warning."""
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    # Py4J logs the calls that a JVM which died did not answer, beside raising them.
    shown.addFilter(lambda record: not record.name.startswith("py4j"))
    logging.basicConfig(handlers=[shown])
    logging.getLogger("weft.operate").setLevel(logging.INFO)
