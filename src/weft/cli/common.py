"""What the commands share: their common options, and how they print."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

# Also a number that is not exact, and one that is not known.
_NUMBER = re.compile(r"[-~]?[0-9][0-9,.]*|\??")
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


def print_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str], spare: Sequence[str] = ()) -> None:
    """Print the `columns` of `rows`: fitted to a terminal, or where there is none as lines that are never wrapped.

    In a terminal that is too narrow the `spare` columns are left out, the first of them first.
    """
    titles = [column.replace("_", " ") for column in columns]
    cells = [[one_line(row.get(column)) for column in columns] for row in rows]
    numeric = [any(column) and all(map(_NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)]
    numeric = numeric or [False] * len(titles)
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        if spare and sum(widths) + 2 * len(widths) - 2 > console.width:
            print_table(rows, [each for each in columns if each != spare[0]], spare[1:])
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for title, width, right in zip(titles, widths, numeric, strict=True):
            # In a narrow terminal only the long columns fold: a name that is broken in two is hard to read.
            table.add_column(
                title,
                justify="right" if right else "left",
                no_wrap=width <= 12,
                overflow="fold",
                header_style="bold",
            )
        for line in cells:
            table.add_row(*map(Text, line))
        console.print(table)
        return
    for line in [titles, *cells]:
        fitted = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        click.echo("  ".join(fitted).rstrip())


def one_line(value: object) -> str:
    """One line of text; control characters are shown as escapes, so that no event can drive the terminal."""
    text = "" if value is None else str(value)
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
