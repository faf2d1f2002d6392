"""`weft streams consume, ack, nack, groups, reset, forget`: a consumer's side of a stream."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from functools import wraps
from typing import Any

import click

from weft.cli.common import Command, Moment, confirm, plural, print_json, yes_option
from weft.cli.events_out import print_events
from weft.cli.streams_common import of_stored_stream, of_stream, print_groups
from weft.errors import SchemaError, unknown
from weft.streams import Stream, ack_sync, consume_sync, nack_sync, reset_sync
from weft.streams.events import offset_of, with_texts
from weft.streams.runtime import stored_log
from weft.systems.log import ROWID, Log

# A person needs longer than a program to look at events and acknowledge them.
_LEASE_SECONDS = 300.0
# The most offsets that are held in memory and settled in one transaction.
_MAX_OFFSETS = 1_000_000
_LARGEST = 2**63 - 1


_member_option = click.option(
    "--member", metavar="M", help="Act as this member of the consumer.  [default: cli:user@host]"
)


def _cli_member() -> str:
    """Return one name for all commands of a user on a host, so that a second consume returns the same events."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"cli:{user}@{socket.gethostname()}"[:200]


@click.command()
@click.argument("name")
@click.argument("consumer")
@click.option("--batch-size", type=click.IntRange(1, 100_000), default=100, show_default=True, metavar="N")
@_member_option
@click.option(
    "--lease",
    type=float,
    default=_LEASE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Hold the events for so long; what is not acknowledged then goes to any member.",
)
@click.option("--wait", type=float, default=0.0, metavar="SECONDS", help="Wait so long for the first event.")
@click.option("--ack", "acknowledge", is_flag=True, help="Acknowledge the events once they are written out.")
@of_stream
def consume(
    stream: Stream,
    consumer: str,
    member: str | None,
    acknowledge: bool,
    connection: str | None,
    output: str,
    **reading: Any,
) -> None:
    """Print the next events of the stream NAME for CONSUMER.

    Until they are acknowledged, the same command gives them again.
    """
    batch = consume_sync(stream, consumer, connection=connection, member=member or _cli_member(), **reading)
    print_events(batch, output)
    if acknowledge:
        ack_sync(stream, consumer, batch, connection=connection)
        if output != "json":
            click.echo(f"{plural(len(batch), 'event')} acknowledged", err=True)
    elif output != "json":
        if not batch:
            click.echo(f"Nothing new for {consumer}.", err=True)
            return
        options = [f"--member {member}"] if member else []
        options += [f"--connection {connection}"] if connection else []
        ranges = _ranges([event[ROWID] for event in batch])
        if len(ranges) <= 20:
            command = " ".join(["weft streams ack", stream.name, consumer, *ranges, *options])
            click.echo(f"To acknowledge: {command}", err=True)
        else:
            click.echo("To acknowledge: consume with --format json, and pipe it to weft streams ack … -", err=True)


def _ranges(rowids: list[int]) -> list[str]:
    ranges: list[list[int]] = []
    for rowid in rowids:
        if ranges and rowid == ranges[-1][1] + 1:
            ranges[-1][1] = rowid
        else:
            ranges.append([rowid, rowid])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


def _settling(command: Command) -> Command:
    """Add the arguments and options that `ack` and `nack` share; they are called with the events and the member."""

    @click.argument("name")
    @click.argument("consumer")
    @click.argument("rowids", nargs=-1, required=True, metavar="OFFSETS…")
    @_member_option
    @click.option("--any-member", is_flag=True, help="Also events that other members hold.")
    @of_stream
    @wraps(command)
    def named(rowids: tuple[str, ...], member: str | None, any_member: bool, **options: Any) -> Any:
        events = _named_events(options["stream"], options["connection"], rowids)
        return command(events=events, member=None if any_member else member or _cli_member(), **options)

    return named


@click.command()
@_settling
def ack(stream: Stream, consumer: str, events: list[dict[str, int]], output: str, **options: Any) -> None:
    """Acknowledge events of the stream NAME for CONSUMER.

    They are not delivered to it again. OFFSETS are numbers, ranges such as 1-100, or - to read consumed events from
    standard input, as NDJSON.
    """
    count = ack_sync(stream, consumer, events, **options)
    before = len(events) - count
    if output == "json":
        print_json({"acknowledged": count, "already_acknowledged": before})
    else:
        parts = [f"{plural(count, 'event')} acknowledged"] if count or not before else []
        click.echo(", ".join([*parts, f"{plural(before, 'event')} already acknowledged"] if before else parts))


@click.command()
@_settling
@click.option("--delay", type=float, default=0.0, metavar="SECONDS", help="Deliver them again after so long.")
@click.option("--reason", metavar="TEXT", help="Why; goes with them to the dead letters.")
def nack(stream: Stream, consumer: str, events: list[dict[str, int]], output: str, **options: Any) -> None:
    """Give events back, to be delivered to CONSUMER again.

    OFFSETS are numbers, ranges such as 1-100, or - to read consumed events from standard input, as NDJSON.
    """
    count = nack_sync(stream, consumer, events, **options)
    if output == "json":
        print_json({"given_back": count})
    else:
        click.echo(f"{plural(count, 'event')} given back")


def _named_events(stream: Stream, connection: str | None, offsets: tuple[str, ...]) -> list[dict[str, int]]:
    """Return the events that OFFSETS names; of ranges only those that exist, since offsets have gaps."""
    rowids: dict[int, None] = {}
    log: Log | None = None
    for text in offsets:
        if text == "-":
            rowids.update(dict.fromkeys(_rowids_of_stdin()))
            continue
        bounds = re.fullmatch(r"(\d{1,19})(?:-(\d{1,19}))?", text)
        if not bounds:
            raise click.UsageError(f"{text!r} is not an offset, a range such as 1-100, or -.")
        first, last = (min(int(each), _LARGEST) for each in (bounds[1], bounds[2] or bounds[1]))
        if last < first:
            raise click.UsageError(f"{text!r} is no range: a range goes up: {last}-{first}.")
        log = log or stored_log(stream, connection)
        stored: list[int] = []
        if log is not None:
            last = min(last, log.head(last))
            for batch in log.read_arrow(first - 1, last, [ROWID]):
                stored += batch.column(0).to_pylist()
                if len(rowids) + len(stored) > _MAX_OFFSETS:
                    raise click.UsageError(
                        f"{text} names too many events: at most {_MAX_OFFSETS:,} are settled at once. Give shorter "
                        "ranges, one after the other."
                    )
        if not stored:
            raise SchemaError(f"Stream {stream.name!r} holds no event at {text}.", field=ROWID, value=text)
        rowids.update(dict.fromkeys(stored))
    return [{ROWID: rowid} for rowid in rowids]


def _rowids_of_stdin() -> Iterator[int]:
    for number, line in enumerate(sys.stdin, 1):
        if not line.strip():
            continue
        try:
            rowid = offset_of(json.loads(line))
            if rowid is None:
                raise TypeError
        except (ValueError, TypeError, AttributeError):
            raise SchemaError(
                f"Standard input, line {number:,}: it is not a consumed event, a JSON object with {ROWID}.",
                hint="For example: weft streams consume NAME CONSUMER --format json | weft streams ack NAME CONSUMER -",
            ) from None
        yield rowid


@click.command()
@click.argument("name")
@of_stored_stream
def groups(stream: Stream, connection: str | None, output: str) -> None:
    """List the consumers of the stream NAME, also of one that is stored and not declared.

    position: the last offset delivered; lag: events not delivered yet; pending: delivered, not acknowledged; lost:
    removed by retention before they were consumed.
    """
    log = stored_log(stream, connection)
    consumers = log.groups() if log else []
    if output == "json":
        print_json([with_texts(asdict(each), "position") for each in consumers])
    elif consumers:
        print_groups(consumers)
    else:
        click.echo(f"No consumer has read {stream.name} yet.", err=True)


@click.command()
@click.argument("name")
@click.argument("consumer")
@click.option(
    "--to",
    required=True,
    type=Moment("start", "end"),
    metavar="WHERE",
    help="start, end, the offset or the time (ISO, or 10m ago) of the event to be delivered next.",
)
@yes_option
@of_stream
def reset(
    stream: Stream, consumer: str, to: int | datetime | str, yes: bool, connection: str | None, output: str
) -> None:
    """Move CONSUMER to another place in the stream NAME.

    Its members lose the events that they hold: their acks are refused.
    """
    log = stored_log(stream, connection)
    known = next((group for group in log.groups() if group.consumer == consumer), None) if log else None
    state = f"is at {known.position:,}, {plural(known.pending, 'event')} pending" if known else "has not read it yet"
    confirm(f"{consumer} of {stream.name} {state}. Move it to {to}?", yes)
    position = reset_sync(stream, consumer, to, connection=connection)
    if output == "json":
        print_json(with_texts({"consumer": consumer, "position": position}, "position"))
    else:
        click.echo(f"{consumer} goes on after offset {position}")
        if known is None:
            click.echo(f"note: {consumer} had never read {stream.name}. Is the name right?", err=True)
        if isinstance(to, int) and to - 1 > position:
            click.echo(
                f"note: {to:,} is past the end of {stream.name}, so it goes on with the next new event.", err=True
            )


@click.command()
@click.argument("name")
@click.argument("consumer")
@yes_option
@of_stored_stream
def forget(stream: Stream, consumer: str, yes: bool, connection: str | None, output: str) -> None:
    """Remove CONSUMER of the stream NAME, with its position.

    Its members lose the events that they hold: their acks are refused. If it consumes again it is a new one.
    """
    log = stored_log(stream, connection)
    known = {group.consumer: group for group in log.groups()} if log else {}
    if log is None or consumer not in known:
        raise unknown(f"consumer of {stream.name}", consumer, known)
    behind = plural(known[consumer].lag, "event")
    confirm(f"{consumer} of {stream.name} has {behind} to read. Remove it?", yes)
    removed = log.forget_consumer(consumer)
    if output == "json":
        print_json({"consumer": consumer, "removed": removed})
    else:
        click.echo(f"removed {consumer} of {stream.name}")
