"""`weft streams publish`: from a file, standard input or the command line into a stream, batch by batch."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import IO

import click

from weft.cli.common import one_line, plural, print_json
from weft.cli.events_in import EventInput, Record
from weft.cli.streams_common import of_stream
from weft.errors import SchemaError, SettingsError, WeftError
from weft.project import current
from weft.streams import Stream, publish_sync
from weft.streams.encode import encode, encode_quickly
from weft.streams.events import with_texts
from weft.streams.runtime import open_stream

# A batch is published early when it holds so much: events may be megabytes long.
_BATCH_CHARACTERS = 16 * 1024 * 1024


class _RejectedEventError(SchemaError):
    """The event that ends a run with `--on-error stop`. The hint says what was stored and how to go on."""


@dataclass
class _Publish:
    """One run of the command: the batch that waits to be published, and the counts of the others."""

    stream: Stream
    connection: str | None
    source: EventInput
    batch_size: int
    on_error: str
    rejects: IO[str] | None
    say: Callable[[str], object]
    done: int
    """All records of the input up to this number are stored or rejected: after an interrupt, they can be skipped."""
    batch: list[Record] = field(default_factory=list)
    waiting: int = 0
    received: int = 0
    deduplicated: int = 0
    quarantined: int = 0
    rejected: int = 0
    first_rowid: int | None = None
    last_rowid: int | None = None
    triggered: list[str] = field(default_factory=list)
    """The models that follow the stream."""

    def add(self, record: Record) -> None:
        self.batch.append(record)
        self.waiting += len(record.raw)
        is_full = len(self.batch) >= self.batch_size or self.waiting >= _BATCH_CHARACTERS
        if is_full or (record.problem and self.on_error == "stop"):
            self.flush()

    def flush(self) -> None:
        batch, self.batch, self.waiting = self.batch, [], 0
        if not batch:
            return
        with _interrupts_wait():
            self._store([record for record in batch if not record.problem])
            for record in batch:
                if record.problem:
                    self._reject(record)
            self.done = batch[-1].number

    @property
    def published(self) -> int:
        """How many events are stored in the stream itself."""
        return self.received - self.deduplicated - self.quarantined

    def _store(self, batch: list[Record]) -> None:
        """Publish records; in those that do not fit, note the problem."""
        if not batch:
            return
        try:
            result = publish_sync(self.stream, [record.event for record in batch], connection=self.connection)
        except SchemaError as error:
            if error.index is None:
                raise
            if self.on_error == "stop":
                # The events before the bad one are published, so that --skip can say where to go on.
                self._store(batch[: error.index])
                culprit = batch[error.index]
                self._note(culprit, error)
                self._reject(culprit)
            good = [record for record in batch if self._fits(record)]
            if len(good) == len(batch):
                raise
            self._store(good)
            return
        self.received += result["rows_received"]
        self.deduplicated += result["rows_deduplicated"]
        self.quarantined += result["rows_quarantined"]
        self.first_rowid = self.first_rowid or result["first_rowid"]
        self.last_rowid = result["last_rowid"] or self.last_rowid
        self.triggered = list(result["triggered_models"])

    def _fits(self, record: Record) -> bool:
        ready, event = open_stream(self.stream, self.connection), [record.event or {}]
        try:
            _ = encode_quickly(ready.stream, ready.log, event) or encode(ready.stream, ready.log, event)
        except SchemaError as error:
            self._note(record, error)
        return not record.problem

    def _note(self, record: Record, error: SchemaError) -> None:
        where = f"Event {error.index} of the publish to {self.stream.name!r}"
        record.problem, record.hint = error.what.removeprefix(where).removesuffix("."), error.hint

    def _reject(self, record: Record) -> None:
        what = f"{self.source.name}, line {record.line:,}{record.problem}."
        if self.on_error == "stop":
            go_on = self._how_to_go_on(record.number - 1)
            raise _RejectedEventError(what, hint=" ".join(filter(None, [record.hint, go_on])))
        self.say(" ".join(filter(None, [f"rejected: {what}", record.hint])))
        if self.rejects is None:
            self.say(f"  {one_line(record.raw.strip())}")
        else:
            if not self.rejected:
                self.rejects.write(self.source.header)
            self.rejects.write(record.raw.rstrip("\r\n") + "\n")
        self.rejected += 1

    def _how_to_go_on(self, before: int) -> str:
        stored = f"Stored before it: {plural(self.received, 'event')}." if self.received else "Nothing was stored."
        again = f"Correct it and go on with --skip {before}" if before else "Correct it"
        return f"{stored} {again}, or leave out all that do not fit with --on-error skip."

    @property
    def interrupted(self) -> str:
        """What was stored before the run ended early, and how to go on."""
        if not self.received:
            return "Nothing was published before that."
        return f"Published before that: {plural(self.received, 'event')}. Go on with --skip {self.done}."


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay an interrupt until the batch is stored and counted; a second interrupt ends the run at once."""
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt


@click.command()
@click.argument("name")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--data", metavar="JSON", help="Publish this: an object, or a list of objects.")
@click.option(
    "--input",
    "layout",
    type=click.Choice(["json", "ndjson", "csv"]),
    help="The form of the input; else the file's ending or its first line decides. CSV names a field there.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    metavar="N",
    help="Store so many events at a time. Each batch is durable before the next is read.",
)
@click.option(
    "--skip", type=click.IntRange(0), default=0, metavar="N", help="Leave out the first N events of the input."
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="At an event that does not fit: stop there, or go on without it.",
)
@click.option(
    "--rejects",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the lines that --on-error skip leaves out.",
)
@of_stream
def publish(
    stream: Stream,
    file: str | None,
    data: str | None,
    layout: str | None,
    batch_size: int,
    skip: int,
    on_error: str,
    rejects: str | None,
    connection: str | None,
    output: str,
) -> None:
    """Publish events to the stream NAME.

    They come from FILE, standard input (-) or --data, as JSON (an object or a list, up to 256 MiB), NDJSON or CSV (of
    any length), also compressed as .gz. The first line of a CSV file names the fields; its texts are read by the
    declared types: empty is null, bytes are base64.

    \b
      weft streams publish user_events events.csv.gz
      tail -f app.ndjson | weft streams publish logs
    """
    if data is not None and file is not None:
        raise click.UsageError("Give FILE or --data, not both.")
    if data is not None and not data.strip():
        raise click.UsageError("--data is empty.")
    if rejects is not None and on_error != "skip":
        raise click.UsageError("--rejects needs --on-error skip.")
    if data is None and file is None:
        if sys.stdin.isatty():
            raise click.UsageError("Give FILE, - for standard input, or --data '{…}'.")
        file = "-"
    place = current().connection(stream.connection if connection is None else connection)
    if place.resolved().is_private_memory:
        raise SettingsError(
            f"{place.label} is in the memory of this process, and the events would be gone when it ends.",
            hint="Name a file: WEFT_DSN=sqlite:///events.db",
        )
    began = time.monotonic()
    with ExitStack() as closing:
        source = closing.enter_context(EventInput(file, data, layout=layout))
        written = closing.enter_context(open(rejects, "w", encoding="utf-8", errors="replace")) if rejects else None
        advance, say = closing.enter_context(_progress(source))
        run = _Publish(stream, connection, source, batch_size, on_error, written, say, done=skip)
        source.pausing, source.note = run.flush, say
        try:
            columns = cache(lambda: open_stream(stream, connection).log.fields())
            for record in source.records(stream, skip, columns):
                run.add(record)
                if not run.batch:
                    advance(run.received)
            run.flush()
            if not run.received:
                open_stream(stream, connection)  # which creates it, also for no event
        except KeyboardInterrupt:
            say(run.interrupted)
            raise
        except _RejectedEventError:
            raise
        except WeftError as error:
            error.hint = " ".join(filter(None, [error.hint, run.interrupted]))
            raise
    _report(run, time.monotonic() - began, output)


def _report(run: _Publish, seconds: float, output: str) -> None:
    rate = run.received / seconds if seconds else 0.0
    if output == "json":
        report = {
            "stream": run.stream.name,
            "published": run.published,
            "deduplicated": run.deduplicated,
            "quarantined": run.quarantined,
            "rejected": run.rejected,
            "first_rowid": run.first_rowid,
            "last_rowid": run.last_rowid,
            "triggered_models": run.triggered,
            "seconds": round(seconds, 3),
            "events_per_second": round(rate),
        }
        print_json(with_texts(report, "first_rowid", "last_rowid"))
        return
    if not run.received and not run.rejected:
        after = f" after the first {run.done:,}" if run.done else ""
        click.echo(f"{run.source.name} holds no event{after}: nothing was published")
        return
    parts = [f"{click.style('published', fg='green', bold=True)} {plural(run.published, 'event')} to {run.stream.name}"]
    for count, what in (
        (run.deduplicated, "deduplicated"),
        (run.quarantined, f"quarantined to {run.stream.quarantine.name}"),
        (run.rejected, "rejected"),
    ):
        if count:
            parts.append(f"{count:,} {what}")
    # The rate of a handful of events is that of starting up.
    speed = f" in {seconds:.1f} s ({rate:,.0f} a second)" if run.received >= 1000 else ""
    click.echo(", ".join(parts) + speed)


@contextmanager
def _progress(source: EventInput) -> Iterator[tuple[Callable[[int], None], Callable[[str], object]]]:
    """Give a function that shows the progress and one that prints a line meanwhile. Only a terminal has a bar."""
    if not sys.stderr.isatty() or source.name == "--data":
        yield (lambda received: None), (lambda text: click.echo(text, err=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    # Narrower than the terminal: the ^C of an interrupt must not begin a line, or the bar is not wiped out.
    console = Console(stderr=True, width=max(Console(stderr=True).width - 3, 10))
    columns: list[ProgressColumn] = [
        TextColumn("{task.fields[received]:,} events"),
        TextColumn("[dim]{task.fields[rate]:,.0f}/s"),
    ]
    if source.size is not None:
        columns[:0] = [BarColumn(bar_width=30), TaskProgressColumn()]
        columns.append(TimeRemainingColumn(compact=True))
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=source.size, received=0, rate=0.0)

        def advance(received: int) -> None:
            rate = received / max(time.monotonic() - began, 0.001)
            bar.update(task, completed=source.position(), received=received, rate=rate)

        yield advance, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
