"""`weft streams`: what the streams hold. The other commands of the group are in the modules `streams_…`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from weft.cli.common import Moment, ago, confirm, escaped, one_line, plural, print_json, print_table, yes_option
from weft.cli.streams_common import (
    find_stored,
    of_stored_stream,
    of_stream,
    print_groups,
    received_logs,
    stored_streams,
    stream_options,
)
from weft.cli.streams_consume import ack, consume, forget, groups, nack, reset
from weft.cli.streams_publish import publish
from weft.cli.streams_tail import tail
from weft.errors import DeclarationError, WeftError
from weft.project import DEFAULT, current
from weft.streams import Stream, close, delete_stream_sync, trim_sync
from weft.streams.events import with_texts
from weft.streams.rejected import owners, purge_sync, replay_sync
from weft.streams.runtime import derived_streams, stored_log
from weft.systems.base import Connection
from weft.systems.log import PUBLISHED_AT, Log

# The list counts the events of a stream up to this number. Of a longer one it takes the number from the offsets, which
# may have gaps.
_COUNTED_EVENTS = 100_000
_NOT_DECLARED = "not declared here"
_AS_NAMED = "as the page and GET /api/v1/streams/NAME/rejected name it"


class _InOrder(click.Group):
    """Lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder)
@click.pass_context
def streams(ctx: click.Context) -> None:
    """Publish to streams, read them, and manage their consumers."""
    ctx.call_on_close(close)


@click.command("list")
@stream_options
@click.option("--tag", "tags", metavar="TAG", multiple=True, help="Only streams with this tag; with all of several.")
def list_(connection: str | None, output: str, tags: tuple[str, ...]) -> None:
    """List the streams, declared or only stored, and how much they hold.

    Ends with exit code 1 when a database could not be reached.
    """
    project = current()
    known = [
        (each, declared)
        for declared in project.streams.values()
        if set(tags) <= set(declared.tags)
        for each in (declared, *derived_streams(declared))
    ]
    problems: dict[str, WeftError] = {}
    clashes: list[tuple[str, DeclarationError]] = []
    rows = [_listed(stream, declared, connection, problems, clashes) for stream, declared in known]
    if not tags:  # those that are not declared have none
        for stream in _undeclared([each for each, _ in known], connection, problems):
            rows.append(_listed(stream, None, None, problems, clashes))
    if output == "json":
        print_json(rows)
    elif rows:
        _print_list(rows)
    if not known and tags and project.streams:
        click.echo(f"No stream has the tag{'s' if len(tags) > 1 else ''} {', '.join(tags)}.", err=True)
    elif not known:
        hint = project.elsewhere() or (
            "Name the module that declares them with --module, list it in weft.toml, or start with: weft init"
        )
        click.echo(f"No stream is declared here. {hint}", err=True)
    for where, problem in [*problems.items(), *clashes]:
        click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {where}: {problem.what}", err=True)
        if problem.hint:
            click.echo(f"  {problem.hint}", err=True)
    if problems:
        raise click.exceptions.Exit(1)


def _undeclared(known: list[Stream], connection: str | None, problems: dict[str, WeftError]) -> Iterator[Stream]:
    """Yield the other streams in the databases of the declared ones, in `default`, and where received messages are."""
    declared: dict[str, list[Stream]] = {}
    for stream in known:
        declared.setdefault(_connection_name(stream.connection, connection), []).append(stream)
    places = {where: connection or here[0].connection for where, here in declared.items()}
    for place in (connection,) if connection is not None else (None, *received_logs()):
        where = _connection_name(place, None)
        if where not in places and not any(_is_same(place, each) for each in places.values()):
            places[where], declared[where] = place, []
    for where, place in places.items():
        names = {(stream.schema, stream.name) for stream in declared[where]}
        if where in problems:
            continue
        try:
            for stream in stored_streams(place):
                if (stream.schema, stream.name) not in names:
                    yield stream
        except WeftError as error:
            problems[where] = error


def _is_same(one: str | Connection | None, other: str | Connection | None) -> bool:
    """Return whether two names lead to one database; not where that is not known."""
    with suppress(WeftError):
        return current().connection(one).is_same_place(current().connection(other))
    return False


def _print_list(rows: list[dict[str, Any]]) -> None:
    columns = ["name", "schema", "connection", "fields", "events", "last_published", "retention", "role"]
    shown = [
        {
            **row,
            "fields": len(row["fields"]) or "inferred",
            "events": "?" if row["events"] is None else f"{'' if row['counted'] else '~'}{row['events']:,}",
            "last_published": ago(row["last_published"]),
            "retention": _retention(row["retention"]),
        }
        for row in rows
    ]
    spare = ["retention", "connection", "schema", "role", "fields", "last_published"]
    print_table(shown, columns, spare, seldom=columns)


def _listed(
    stream: Stream,
    declared: Stream | None,
    connection: str | None,
    problems: dict[str, WeftError],
    clashes: list[tuple[str, DeclarationError]],
) -> dict[str, Any]:
    where = _connection_name(stream.connection, connection)
    row: dict[str, Any] = {
        "name": stream.name,
        "schema": stream.schema,
        "connection": where,
        "tags": list(stream.tags),
        "fields": {name: str(kind) for name, kind in stream.fields.items()},
        "events": None,
        "counted": True,
        "last_published": None,
        "retention": stream.retention,
        "role": None,
        "of": None,
        "problem": None,
    }
    if declared is None:
        row["role"] = _NOT_DECLARED
    elif stream is not declared:
        row["role"] = "quarantine" if stream is declared.quarantine else "dead letters"
        row["of"] = declared.name
    if where not in problems:
        try:
            log = stored_log(stream, connection)
            row["events"] = 0
            if log is not None:
                span = log.extent(log.floor(), log.head(), _COUNTED_EVENTS + 1)
                row["counted"] = span <= _COUNTED_EVENTS
                row["events"] = log.count() if row["counted"] else span
                row["last_published"] = _last_published(log)
                if declared is None:
                    row["fields"] = {name: str(kind) for name, kind in log.fields().items()}
        except DeclarationError as error:  # of this stream alone: its name is that of another one in other case
            clashes.append((where, error))
            row["problem"] = error.what
        except WeftError as error:
            problems[where] = error
    if where in problems:
        row["problem"] = problems[where].what
    return row


def _connection_name(declared: str | Connection | None, connection: str | None) -> str:
    used = connection if connection is not None else declared
    return DEFAULT if used is None else used if isinstance(used, str) else used.name or used.target


def _last_published(log: Log) -> datetime | None:
    last = log.nth_last(1)
    if last is None:
        return None
    page = log.read(last - 1, last, 1)
    published = page.columns[page.names.index(PUBLISHED_AT)]
    return published[0] if published else None


def _retention(policy: Mapping[str, float]) -> str:
    words = {"max_age_days": "{:g} days", "max_rows": "{:,} events"}
    return ", ".join(words[key].format(value) for key, value in policy.items())


@click.command()
@click.argument("name")
@stream_options
def show(name: str, connection: str | None, output: str) -> None:
    """Show options, columns, events and consumers of the stream NAME."""
    stream, is_declared = find_stored(name, connection)
    log = stored_log(stream, connection)
    details = _details(stream, connection)
    if not is_declared:
        details = {key: details[key] for key in ("name", "schema", "connection", "target")}
    held = {
        "events": log.count() if log else 0,
        "size_bytes": log.size() if log else None,
        "head": log.head() if log else 0,
        "floor": log.floor() if log else 0,
        "last_published": _last_published(log) if log else None,
    }
    columns = _columns(stream, log, is_declared)
    groups = log.groups() if log else []
    if output == "json":
        consumers = [with_texts(asdict(each), "position") for each in groups]
        held = with_texts(held, "head", "floor")
        print_json({**details, **held, "columns": columns, "consumers": consumers, "declared": is_declared})
        return
    if stream.retention:
        details["retention"] = _retention(stream.retention)
    if stream.key_fields:
        details["idempotency_key"] = f"{', '.join(stream.key_fields)} (for {stream.key_horizon_days:g} days)"
    if stream.validate_schema and stream.on_schema_drift == "evolve":
        details["on_schema_drift"] = "reject (validate_schema)"
    for key, value in {**details, **held}.items():
        if value is not None and value is not False and value not in ([], {}, ""):
            title = key.replace("_", " ") + ":"
            text = "\n".join(map(one_line, _plain(value).split("\n")))
            click.echo(f"{click.style(title.ljust(17), dim=True)} {text}")
    if columns:
        click.echo()
        for column in columns:
            if "stored" in column:
                column["origin"] = f"declared {column['type']}, stored as {column['stored']}"
        print_table(columns, ["column", "type", "origin"])
    if groups:
        click.echo()
        print_groups(groups)
    if not is_declared:
        fields = escaped(json.dumps({column["column"]: column["type"] for column in columns}, ensure_ascii=False))
        click.echo(
            f"\n{name} is {_NOT_DECLARED}. To use it: --module with the module that declares it, or declare it:\n"
            f"  @stream(name={json.dumps(name)}, schema={json.dumps(stream.schema)}, fields={fields})",
            err=True,
        )


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if value is True:
        return "yes"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}Z"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _details(stream: Stream, connection: str | None) -> dict[str, Any]:
    """Return the declared options; of `auth` only the type, since the rest is secret."""
    target = current().connection(connection if connection is not None else stream.connection)
    return {
        "name": stream.name,
        "description": stream.description,
        "schema": stream.schema,
        "connection": _connection_name(stream.connection, connection),
        "target": target.target,
        "owner": stream.owner,
        "tags": list(stream.tags),
        "cursor": stream.cursor,
        "validate_schema": stream.validate_schema,
        "on_schema_drift": stream.on_schema_drift,
        "retention": stream.retention,
        "idempotency_key": (
            {"fields": list(stream.key_fields), "horizon_days": stream.key_horizon_days} if stream.key_fields else None
        ),
        "max_deliveries": stream.max_deliveries,
        "dead_letter": stream.dead_letters.name if stream.max_deliveries is not None else None,
        "auth": stream.auth["type"] if stream.auth else None,
        "rate_limit": dict(stream.rate_limit) if stream.rate_limit else None,
    }


def _columns(stream: Stream, log: Log | None, is_declared: bool) -> list[dict[str, str]]:
    stored = log.fields() if log else {}
    columns = []
    for name, kind in stream.fields.items():
        column = {"column": name, "type": str(kind), "origin": "declared"}
        if log is not None and name not in stored:
            column["origin"] = "not stored yet"
        elif name in stored and str(stored[name]) != str(kind).removesuffix("?"):
            column["stored"] = str(stored[name])
        columns.append(column)
    return columns + [
        {"column": name, "type": str(kind), "origin": "inferred" if is_declared else "stored"}
        for name, kind in stored.items()
        if name not in stream.fields
    ]


@click.command()
@click.argument("name")
@click.option("--before", type=Moment(), metavar="WHEN", help="Remove what is before an offset, a time, or 30d (ago).")
@click.option("--max-rows", type=click.IntRange(0), metavar="N", help="Remove all but the newest N events.")
@yes_option
@of_stream
def trim(
    stream: Stream, before: int | datetime | None, max_rows: int | None, yes: bool, connection: str | None, output: str
) -> None:
    """Remove old events of the stream NAME.

    Without --before and --max-rows: those that its declared retention says.
    """
    what = f"the events before {before}" if before is not None else ""
    if max_rows is not None:
        what = f"{what} and " * bool(what) + f"all but the newest {plural(max_rows, 'event')}"
    confirm(f"Remove {what or 'the events past the retention'} of {stream.name}, for good?", yes)
    removed = trim_sync(stream, before=before, max_rows=max_rows, connection=connection)
    if output == "json":
        print_json({"removed": removed})
    else:
        click.echo(f"removed {plural(removed, 'event')} from {stream.name}")


@click.command()
@click.argument("name")
@click.option("--before", type=Moment(), metavar="WHEN", help="Replay what is before an offset, a time, or 30d (ago).")
@click.option("--group", metavar="ID", help=f"Replay those of one group, {_AS_NAMED}.")
@yes_option
@of_stream
def replay(
    stream: Stream, before: int | datetime | None, group: str | None, yes: bool, connection: str | None, output: str
) -> None:
    """Publish the rejected events in NAME, a quarantine or dead letters, to their streams again.

    Each is published once and removed from NAME, also if a replay was broken off before. All consumers of its stream
    get it. What still does not fit is put back. What is there already, or has a key that another event has, is dropped.
    """
    of = ", ".join(each.name for each in owners(stream.name))
    if of:
        confirm(f"Publish {_chosen(before, group)} of {stream.name} to {of} again, for all consumers?", yes)
    done = replay_sync(stream, before=before, group=group, connection=connection)
    if output == "json":
        print_json(asdict(done))
        return
    still = "does" if done.refused == 1 else "do"
    dropped = ""
    if done.duplicates:
        were, their = ("was", "its") if done.duplicates == 1 else ("were", "their")
        dropped = f"; {done.duplicates:,} {were} there already, or another event has {their} key"
    refused = f"{done.refused:,} still {still} not fit"
    click.echo(f"replayed {plural(done.replayed, 'event')} of {stream.name}{dropped}; {refused}")


@click.command()
@click.argument("name")
@click.option("--before", type=Moment(), metavar="WHEN", help="Remove what is before an offset, a time, or 30d (ago).")
@click.option("--group", metavar="ID", help=f"Remove those of one group, {_AS_NAMED}.")
@yes_option
@of_stream
def purge(
    stream: Stream, before: int | datetime | None, group: str | None, yes: bool, connection: str | None, output: str
) -> None:
    """Remove the rejected events in NAME, a quarantine or dead letters, for good."""
    if owners(stream.name):
        confirm(f"Remove {_chosen(before, group)} of {stream.name}, for good?", yes)
    removed = purge_sync(stream, before=before, group=group, connection=connection)
    if output == "json":
        print_json({"removed": removed})
    else:
        click.echo(f"removed {plural(removed, 'event')} from {stream.name}")


def _chosen(before: int | datetime | None, group: str | None) -> str:
    what = "all events" if group is None and before is None else "the events"
    return what + (f" of the group {group}" if group else "") + (f" before {before}" if before is not None else "")


@click.command()
@click.argument("name")
@yes_option
@of_stored_stream
def delete(stream: Stream, yes: bool, connection: str | None, output: str) -> None:
    """Delete the stream NAME for good: its events, consumers and idempotency keys.

    Also one that is stored and not declared. The next publish creates a declared one again.
    """
    confirm(f"Delete the stream {stream.name} with all its events and consumers, for good?", yes)
    was_there = delete_stream_sync(stream, connection=connection)
    if output == "json":
        print_json({"deleted": was_there})
    else:
        click.echo(f"deleted {stream.name}" if was_there else f"{stream.name} is not stored: nothing to delete")


for command in (list_, show, publish, tail, consume, ack, nack, groups, reset, forget, replay, purge, trim, delete):
    streams.add_command(command)
