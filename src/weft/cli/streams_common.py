"""What the commands of `weft streams` share."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any

import click

from weft.cli.common import Command, common_options, find_declared, print_table
from weft.errors import NotFoundError, WeftError
from weft.project import current
from weft.streams import Stream
from weft.streams.runtime import find, open_hub
from weft.systems.base import Connection
from weft.systems.log import Group


def stream_options(command: Command) -> Command:
    """Add `--connection`, `--module` and `--format`."""
    connection = click.option(
        "--connection", metavar="NAME", help="Use the connection NAME, not the one that the stream declares."
    )
    return connection(common_options(command))


def find_stream(name: str) -> Stream:
    return find_declared(find, name)


def find_stored(name: str, connection: str | None) -> tuple[Stream, bool]:
    """Return the stream of that name, also one that is not declared, but stored in a database that the project uses;
    and whether it is declared."""
    try:
        return find_stream(name), True
    except NotFoundError:
        places = [None, *received_logs(), *(each.connection for each in current().streams.values())]
        for place in [connection] if connection is not None else dict.fromkeys(places):
            with suppress(WeftError):  # that it is not declared is what matters
                for stream in stored_streams(place):
                    if stream.name == name:
                        return stream, False
        raise


def received_logs() -> list[str | Connection]:
    """Return the connections that keep what declared pipelines receive, other than `default`."""
    project, logs = current(), []
    for source in (each for pipeline in project.streaming_pipelines.values() for each in pipeline.sources):
        with suppress(WeftError):  # of a connection that is not there nothing is received
            if (log := getattr(project.connection(source.connection), "received_log", None)) is not None:
                logs.append(log)
    return logs


def stored_streams(connection: str | Connection | None) -> list[Stream]:
    """Return every stream that a database holds, declared or not; of each only its name is known."""
    names = open_hub(current().connection(connection)).store.names()
    return [Stream(name=name, schema=schema, connection=connection) for schema, name in names]


def of_stream(command: Command) -> Command:
    """Add those options, and call the command with the declared stream in the place of its NAME."""

    @stream_options
    @wraps(command)
    def found(*, name: str, **options: Any) -> Any:
        return command(stream=find_stream(name), **options)

    return found


def of_stored_stream(command: Command) -> Command:
    """`of_stream`, also for a stream that is stored and not declared."""

    @stream_options
    @wraps(command)
    def found(*, name: str, connection: str | None, **options: Any) -> Any:
        return command(stream=find_stored(name, connection)[0], connection=connection, **options)

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
