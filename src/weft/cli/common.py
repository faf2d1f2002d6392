"""What the commands share: their common options, and how they print."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

# Also a number that is not exact, and one that is not known.
_NUMBER = re.compile(r"[-~]?[0-9][0-9,.]*|\??")
_NEVER_FOLDED = 10
# Delete, C1 and the separators of lines and paragraphs.
_CONTROL = re.compile("[\x7f-\x9f\u2028\u2029]")
Command = TypeVar("Command", bound=Callable[..., Any])


def module_option(command: Command) -> Command:
    """Add `--module M`, given to the command as `modules`."""
    return click.option(
        "--module",
        "modules",
        multiple=True,
        metavar="M",
        help="Import the module M, besides those that weft.toml lists. May be repeated.",
    )(command)


def unused_module_option(command: Command) -> Command:
    """Take `--module M` as every command does, where an import has no use and its failure would be in the way."""
    return click.option(
        "--module",
        multiple=True,
        metavar="M",
        expose_value=False,
        help="Taken as by every command; this one imports nothing.",
    )(command)


def dry_run_option(command: Command) -> Command:
    """Add `--dry-run`."""
    return click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")(command)


def format_option(command: Command) -> Command:
    """Add `--format table|json`, given to the command as `output`."""
    return click.option(
        "--format",
        "output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="A table for people, or JSON for scripts.",
    )(command)


def connection_option(command: Command) -> Command:
    """Add `--connection NAME`, given to the command as `connection`."""
    return click.option(
        "--connection", metavar="NAME", help="Use the connection NAME, not the one that the stream declares."
    )(command)


def print_json(value: object) -> None:
    """Print `value` as indented JSON."""
    click.echo(escaped(json.dumps(value, indent=2, ensure_ascii=False, default=_for_json)))


def escaped(text: str) -> str:
    """JSON without the control characters that `json` leaves as they are: a terminal would obey some of them."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _for_json(value: object) -> object:
    import dataclasses

    from weft.types import to_json

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return to_json(value)


def print_table(
    rows: Sequence[Mapping[str, object]],
    columns: Sequence[str],
    spare: Sequence[str] = (),
    *,
    below: str | None = None,
    whole: Sequence[str] = (),
    is_data: bool = False,
) -> None:
    """Print the `columns` of `rows`: fitted to a terminal, or where there is none as lines that are never wrapped.

    In a terminal that is too narrow the column `below` goes to lines of its own under each row; then the `spare`
    columns are left out, the first of them first. What is in `whole` columns is never broken, so that it can be copied.
    `is_data`: the columns are the user's own, and are called as they are.
    """
    titles = {column: column if is_data else column.replace("_", " ") for column in columns}
    cells = {column: [one_line(row.get(column)) for row in rows] for column in columns}
    widths = {column: max(map(len, (titles[column], *cells[column]))) for column in columns}
    right = {column for column in columns if any(cells[column]) and all(map(_NUMBER.fullmatch, cells[column]))}
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
        fitted = [
            text.rjust(widths[column]) if column in right else text.ljust(widths[column])
            for text, column in zip(line, columns, strict=True)
        ]
        click.echo("  ".join(fitted).rstrip())


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
