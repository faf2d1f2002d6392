"""What the commands share: their common options, and how they print."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from weft import engine
from weft.errors import NotFoundError
from weft.operate import log_format, traces
from weft.project import current

if TYPE_CHECKING:
    from rich.console import Console

# Also a number that is not exact, and one that is not known.
_NUMBER = re.compile(r"[-~]?[0-9][0-9,.]*|\??")
_NEVER_FOLDED = 10
# Delete, C1 and the separators of lines and paragraphs.
_CONTROL = re.compile("[\x7f-\x9f\u2028\u2029]")
Command = Callable[..., Any]
T = TypeVar("T")
UNITS = {"s": timedelta(seconds=1), "m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}

_module = partial(click.option, "--module", multiple=True, metavar="M")
module_names_option = _module(
    "modules", help="Import the module M, besides those that weft.toml lists. May be repeated."
)
# Every command accepts --module. Where an import has no use, its failure would only be in the way.
unused_module_option = _module(expose_value=False, help="Taken as by every command; this one imports nothing.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
format_option = click.option(
    "--format",
    "output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A table for people, or JSON for scripts.",
)
run_log_option = click.option(
    "--run-log",
    "--run-log-url",
    "run_log",
    metavar="URL",
    envvar="WEFT_RUN_LOG",
    help="Where runs are recorded: sqlite://PATH, postgres://…, mysql://…, duckdb://PATH, s3://…, gcs://…, "
    "azureblob://…, memory://, or a connection's name. By default run_log in weft.toml, or .weft/runs.db.",
)

metrics_option = click.option(
    "--metrics",
    metavar="URL",
    # The variable WEFT_METRICS is read later: some commands heed a port for Prometheus only if they are given it.
    help="Where counts and durations go: prometheus://:9100, otlp://collector:4318, stdout://, null://. By default "
    "metrics in weft.toml.",
)

alerter_option = click.option(
    "--alerter",
    "alerters",
    metavar="URL",
    multiple=True,
    envvar="WEFT_ALERTERS",
    help="Where to report failures and recoveries: stdout://, slack://…, https://…, mailto://… and others of Apprise. "
    "May be repeated. By default alerters in weft.toml.",
)


def _use_log_format(_: click.Context, __: click.Parameter, chosen: str | None) -> None:
    if chosen is not None:
        os.environ[log_format.VARIABLE] = chosen


def use_traces(context: click.Context, url: str | None, *, is_run: bool = False) -> None:
    """Trace until the command ends."""
    if url := url or traces.project_url():
        # A process that stays is no part of what started it.
        context.with_resource(traces.open_traces(url, os.environ if is_run else None))


def _use_traces(context: click.Context, _: click.Parameter, url: str | None, *, is_run: bool = False) -> None:
    use_traces(context, url, is_run=is_run)


def _hand_traces(_: click.Context, __: click.Parameter, url: str | None) -> None:
    """Leave it to the processes that this one starts."""
    if url := url or traces.project_url():
        traces.check(url)
        os.environ[traces.VARIABLE] = url


_traces = partial(
    click.option,
    "--traces",
    metavar="URL",
    envvar=traces.VARIABLE,
    expose_value=False,
    help="Where spans go: otlp://collector:4318, null://. By default traces in weft.toml, else nowhere.",
)
traces_option = _traces(callback=_use_traces)
traces_to_pass_option = _traces(expose_value=True)  # of a group: its commands trace nothing
traces_of_runs_option = _traces(callback=partial(_use_traces, is_run=True))
traces_of_children_option = _traces(callback=_hand_traces)

log_format_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    envvar=log_format.VARIABLE,
    expose_value=False,
    callback=_use_log_format,
    help="How log messages are written to standard error.  [default: text]",
)


def _use_engine(_: click.Context, __: click.Parameter, no_engine: bool) -> None:
    engine.starts_engine = not no_engine


engine_option = click.option(
    "--no-engine",
    is_flag=True,
    expose_value=False,
    callback=_use_engine,
    help="Run Spark in a process of this command's own, not in the warm engine of the project.",
)


def module_option(command: Command) -> Command:
    """Add `--module`. The project's modules and those it names are imported before the command runs."""

    @module_names_option
    @wraps(command)
    def importing(*, modules: tuple[str, ...], **options: Any) -> Any:
        current().load_modules(modules)
        return command(**options)

    return importing


def common_options(command: Command) -> Command:
    """Add `--module` and `--format`."""
    return module_option(format_option(command))


def confirm(question: str, yes: bool) -> None:
    """Ask on the terminal. Without a terminal `--yes` is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nobody can answer here: standard input is no terminal. Add --yes.")
    click.confirm(question, abort=True, err=True)


class Moment(click.ParamType[Any]):
    """An offset, a time, how long ago, or one of a few words."""

    name = "moment"

    def __init__(self, *words: str) -> None:
        self.words = words

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | datetime | str:
        text = str(value)
        if text in self.words:
            return text
        if text.isascii() and text.isdigit():
            return int(text)
        if span := re.fullmatch(r"(\d{1,6}) ?([smhd])", text):
            return datetime.now(UTC) - int(span[1]) * UNITS[span[2]]
        try:
            return parse_time(text)
        except ValueError:
            words = "".join(f"{word!r}, " for word in self.words)
            self.fail(f"{text!r} is not {words}an offset, a time such as 2026-01-31T12:00 or 10m (ago).", param, ctx)


def parse_time(text: str) -> datetime:
    """Parse an ISO 8601 time; it is in UTC unless it says otherwise."""
    time = datetime.fromisoformat(text)
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def find_declared(find: Callable[[str], T], name: str) -> T:
    """Find what is declared as `name`. An error names the folder with weft.toml, if that is another."""
    try:
        return find(name)
    except NotFoundError as error:
        raise NotFoundError(error.what, hint=current().elsewhere() or error.hint) from None


def none_declared(kind: str) -> NotFoundError:
    hint = "Name the module that declares them: --module my_pipelines, or modules = […] in weft.toml."
    return NotFoundError(f"No {kind} is declared.", hint=current().elsewhere() or hint)


class _ToStderr(logging.StreamHandler[Any]):
    """The handler of this command."""


def log_to_stderr(line: str, level: int = logging.NOTSET) -> None:
    """Print log records of at least `level` to stderr, formatted by `line`, or as JSON where that is asked for."""
    root = logging.getLogger()
    for each in [each for each in root.handlers if isinstance(each, _ToStderr)]:
        root.removeHandler(each)
    handler = _ToStderr()
    handler.setFormatter(log_format.JsonFormatter() if log_format.is_json() else logging.Formatter(line))
    handler.setLevel(level)
    # Py4J raises the error of a call that was interrupted or lost its JVM, and also logs it with a traceback.
    handler.addFilter(lambda record: not record.name.startswith("py4j"))
    logging.basicConfig(handlers=[handler])


# ------------------------------------------------------------------------------------------------------------- printing


def print_json(value: object) -> None:
    click.echo(escaped(json.dumps(value, indent=2, ensure_ascii=False, default=_for_json)))


def escaped(text: str) -> str:
    """JSON without the control characters that `json` leaves as they are: a terminal would obey some of them."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _for_json(value: object) -> object:
    from weft.types import to_json

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return to_json(value)


def print_table(
    rows: Sequence[Mapping[str, object]],
    columns: Sequence[str],
    spare: Sequence[str] = (),
    *,
    seldom: Sequence[str] = (),
    below: str | None = None,
    whole: Sequence[str] = (),
    is_data: bool = False,
) -> None:
    """Print the `columns` of `rows`: fitted to a terminal; elsewhere as lines that are never wrapped.

    The `seldom` columns are left out where no row has a value. In a terminal that is too narrow, the column `below` is
    printed on its own lines under each row; then the `spare` columns are left out, the first of them first. Ids, in
    `whole` columns, are never broken, so that they can be copied. `is_data`: the columns are the user's own, and keep
    their names as titles.
    """
    columns = [each for each in columns if each not in seldom or any(row.get(each) for row in rows)]
    titles = {column: column if is_data else column.replace("_", " ") for column in columns}
    cells = {column: [(one_line if is_data else _cell)(row.get(column)) for row in rows] for column in columns}
    widths = {column: max(map(len, (titles[column], *cells[column]))) for column in columns}
    # An id of digits alone is no number.
    numbers = [each for each in columns if each not in whole and all(map(_NUMBER.fullmatch, cells[each]))]
    right = {column for column in numbers if any(cells[column])}
    if sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        for column in ([below] if below else []) + list(spare):
            if _total(widths) > console.width:
                widths.pop(column, None)
        while _total(widths) > console.width:
            # Only the long columns fold: a name that is broken in two is hard to read.
            longest = max((each for each in widths if each not in whole), key=widths.__getitem__, default=None)
            if longest is None or widths[longest] <= _NEVER_FOLDED:
                break
            widths[longest] -= 1
        notes = cells.get(below, []) if below is not None and below not in widths else []
        _print_fitted(console, titles, cells, widths, right, notes)
        return
    for line in zip(*([titles[column], *cells[column]] for column in columns), strict=True):
        padded = [
            text.rjust(widths[column]) if column in right else text.ljust(widths[column])
            for text, column in zip(line, columns, strict=True)
        ]
        click.echo("  ".join(padded).rstrip())


def _cell(value: object) -> str:
    return one_line(", ".join(map(str, value)) if isinstance(value, list | tuple) else value)


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _print_fitted(
    console: Console,
    titles: Mapping[str, str],
    cells: Mapping[str, list[str]],
    widths: Mapping[str, int],
    right: Collection[str],
    notes: Sequence[str],
) -> None:
    """Print to a terminal: a table up to each row that has a note, then the note."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def begin(*, is_first: bool = False) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=is_first)
        for column, width in widths.items():
            justify: Literal["right", "left"] = "right" if column in right else "left"
            table.add_column(titles[column], justify=justify, width=width, overflow="fold", header_style="bold")
        return table

    table = begin(is_first=True)
    for number, line in enumerate(zip(*(cells[column] for column in widths), strict=True)):
        table.add_row(*map(Text, line))
        if notes and notes[number]:
            console.print(table, Padding(Text(notes[number]), (0, 0, 0, 2)))
            table = begin()
    if table.row_count or table.show_header:
        console.print(table)


def one_line(value: object) -> str:
    """One line of text; control characters are shown as escapes, so that no event can drive the terminal."""
    text = "" if value is None else str(value)
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Return `1 event`, `2 events`, `3,000 events`."""
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def time_text(value: datetime | None) -> str | None:
    """Return a time as people read it."""
    if value is None:
        return None
    return f"{value:%Y-%m-%d %H:%M:%S} UTC" if value.second else f"{value:%Y-%m-%d %H:%M} UTC"


def ago(value: datetime | None, now: datetime | None = None) -> str | None:
    if value is None:
        return None
    seconds = max(0, int(((now or datetime.now(UTC)) - value).total_seconds()))
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:,} {unit} ago"
    return f"{seconds} s ago"


def first_line(text: str | None) -> str | None:
    """Return the beginning of a text as one line of at most 200 characters."""
    if text is None:
        return None
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:199]}…"
