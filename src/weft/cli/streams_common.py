"""What the commands of `weft streams` share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from weft.cli.common import Command, connection_option, format_option, module_option, print_table
from weft.errors import NotFoundError
from weft.project import current

if TYPE_CHECKING:
    from weft.streams import Stream
    from weft.systems.base import Connection
    from weft.systems.log import Group, Log


def stream_options(command: Command) -> Command:
    """Add `--connection`, `--module` and `--format`."""
    return connection_option(module_option(format_option(command)))


def find_stream(name: str, modules: Iterable[str]) -> Stream:
    """The declared stream of that name, once the project's modules are imported."""
    from weft.streams.runtime import find

    project = current()
    project.load_modules(modules)
    try:
        return find(name)
    except NotFoundError as error:
        raise NotFoundError(error.what, hint=project.elsewhere() or error.hint) from None


def stored_log(stream: Stream, connection: str | None) -> Log | None:
    """The stream's log, or `None` where nothing was ever published."""
    from weft.streams import runtime

    return runtime.stored_log(stream, connection)


def stored_streams(connection: str | Connection | None) -> list[Stream]:
    """Every stream that a database holds, declared or not; of each only its name is known."""
    from weft.streams import Stream
    from weft.streams.runtime import open_hub

    names = open_hub(current().connection(connection)).store.names()
    return [Stream(name=name, schema=schema, connection=connection) for schema, name in names]


class Moment(click.ParamType[Any]):
    """An offset, a time, how long ago, or one of a few words."""

    name = "moment"

    def __init__(self, *words: str) -> None:
        self.words = words

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | datetime | str:
        """The moment that the text stands for."""
        text = str(value)
        if text in self.words:
            return text
        if text.isascii() and text.isdigit():
            return int(text)
        ago = re.fullmatch(r"(\d{1,6}) ?([smhd])", text)
        if ago:
            return datetime.now(UTC) - int(ago[1]) * _UNITS[ago[2]]
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            words = "".join(f"{word!r}, " for word in self.words)
            self.fail(f"{text!r} is not {words}an offset, a time such as 2026-01-31T12:00 or 10m (ago).", param, ctx)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


_UNITS = {
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}


def yes_option(command: Command) -> Command:
    return click.option("-y", "--yes", is_flag=True, help="Do not ask.")(command)


def confirm(question: str, yes: bool) -> None:
    """Ask, unless it was answered with --yes; where nobody can answer, that is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nobody can answer here: standard input is no terminal. Add --yes.")
    click.confirm(question, abort=True, err=True)


def events(count: int) -> str:
    """`1 event`, `2 events`."""
    return f"{count:,} event{'' if count == 1 else 's'}"


def print_groups(found: Iterable[Group]) -> None:
    now = datetime.now(UTC)
    rows = [
        {
            "consumer": group.consumer,
            "position": group.position,
            "lag": group.lag,
            "pending": group.pending,
            "lost": group.lost,
            "members": ", ".join(
                f"{each.member} ({each.pending:,}, {_remaining(each.expires_at - now)})" for each in group.members
            ),
        }
        for group in found
    ]
    print_table(rows, ["consumer", "position", "lag", "pending", "lost", "members"])


def _remaining(time: timedelta) -> str:
    seconds = round(time.total_seconds())
    return f"{seconds:,} s left" if seconds > 0 else "lease ran out"
