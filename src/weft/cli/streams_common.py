"""What the commands of `weft streams` share."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any

import click

from weft.cli.common import Command, common_options, find_declared, print_table
from weft.streams import Stream
from weft.streams.runtime import find
from weft.systems.log import Group


def stream_options(command: Command) -> Command:
    """Add `--connection`, `--module` and `--format`."""
    connection = click.option(
        "--connection", metavar="NAME", help="Use the connection NAME, not the one that the stream declares."
    )
    return connection(common_options(command))


def find_stream(name: str) -> Stream:
    """Return the declared stream of that name."""
    return find_declared(find, name)


def of_stream(command: Command) -> Command:
    """Add those options, and call the command with the declared stream in the place of its NAME."""

    @stream_options
    @wraps(command)
    def found(*, name: str, **options: Any) -> Any:
        return command(stream=find_stream(name), **options)

    return found


def print_groups(groups: Iterable[Group]) -> None:
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
        for group in groups
    ]
    print_table(rows, ["consumer", "position", "lag", "pending", "lost", "members"])


def _remaining(time: timedelta) -> str:
    seconds = round(time.total_seconds())
    return f"{seconds:,} s left" if seconds > 0 else "lease ran out"
