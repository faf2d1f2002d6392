"""`weft streams tail`: the last events, and the new ones as they come."""

from __future__ import annotations

import select
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import click

from weft.cli.common import Moment
from weft.cli.events_in import value_of
from weft.cli.events_out import as_text, print_events
from weft.cli.streams_common import of_stream
from weft.errors import did_you_mean
from weft.streams import Stream
from weft.streams.events import moved, read_on, to_dicts
from weft.streams.runtime import OpenedStream, open_stream, stored_log
from weft.systems.log import META_TYPES, ROWID, Log
from weft.types import FieldType

_PAGE_EVENTS = 500
# No signal reports that the reader of a pipe is gone: `tail --follow` checks this often.
_CHECK_SECONDS = 0.5


@click.command()
@click.argument("name")
@click.option("-n", "count", type=click.IntRange(0), metavar="N", help="Begin with the last N events.  [default: 10]")
@click.option(
    "--since",
    type=Moment("start"),
    metavar="WHEN",
    help="Begin after an offset, at a time (ISO, UTC unless it says so), 10m ago (s, m, h, d), or at the start.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with new events as they come, until Ctrl-C.")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Only such events. May be repeated; all must hold.",
)
@of_stream
def tail(
    stream: Stream,
    count: int | None,
    since: int | datetime | str | None,
    follow: bool,
    filters: tuple[str, ...],
    connection: str | None,
    output: str,
) -> None:
    """Print the last events of the stream NAME.

    With -f also the new ones as they come. A line each for people, leaving out what is null; with --format json one
    JSON object a line.
    """
    opened = open_stream(stream, connection, to_read=True) if follow else None
    log = opened.log if opened else stored_log(stream, connection)
    if log is None:
        _parse_filters(filters, {})
        return
    wanted = _parse_filters(filters, {**stream.fields, **log.fields()})
    head = log.head()
    if since is None:
        position = _nth_last(log, head, 10 if count is None else count, wanted)
    elif isinstance(since, datetime):
        position = log.first_since(since) - 1
    else:
        position = log.floor() if since == "start" else int(since)
    if since is not None and count is not None:
        position = max(position, _nth_last(log, head, count, wanted))
    for page in _pages(log, position, head):
        print_events(filter(wanted, page), output)
    if opened is not None:
        _follow(opened, max(position, head), wanted, output)


def _follow(opened: OpenedStream, position: int, wanted: Callable[[Mapping[str, Any]], bool], output: str) -> None:
    log, watch = opened.log, opened.hub.watch
    while True:
        version = watch.version
        events, other, lost = read_on(log, position, _PAGE_EVENTS)
        if other is not None:
            what = moved("reader", opened.stream.name, position, other, lost).what
            click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {what}", err=True)
            position = other
        elif events:
            print_events(filter(wanted, events), output)
            position = events[-1][ROWID]
        else:
            watch.wait(version, _CHECK_SECONDS)
            _check_reader()


def _check_reader() -> None:
    """Raise if nobody reads the output any more, as the next write would."""
    try:
        output = sys.stdout.fileno()
    except OSError:
        return
    poll = select.poll()
    poll.register(output, 0)
    if any(state & select.POLLERR for _, state in poll.poll(0)):
        raise BrokenPipeError(32, "the reader of the output is gone")


def _pages(log: Log, after: int, upto: int) -> Iterator[list[dict[str, Any]]]:
    while after < upto:
        page = to_dicts(log.read(after, upto, _PAGE_EVENTS))
        if not page:
            return
        yield page
        after = page[-1][ROWID]


def _nth_last(log: Log, head: int, count: int, wanted: Callable[[Mapping[str, Any]], bool]) -> int:
    """Return the offset before the last `count` events that are wanted. Searches backwards, each time twice as far:
    offsets have gaps, so they do not say how many events there are."""
    if count == 0:
        return head
    last, events = head, _PAGE_EVENTS
    while True:
        first = log.nth_last(events)
        after = min(last, log.floor() if first is None else first - 1)
        newest = deque((event[ROWID] for page in _pages(log, after, last) for event in page if wanted(event)), count)
        if len(newest) == count:
            return int(newest[0]) - 1
        if first is None:
            return after
        count, last, events = count - len(newest), after, 2 * events


def _parse_filters(filters: tuple[str, ...], types: Mapping[str, FieldType]) -> Callable[[Mapping[str, Any]], bool]:
    tests = []
    known = {**types, **META_TYPES}
    for text in filters:
        field, equals, value = text.partition("=")
        if not equals or not field:
            raise click.UsageError(f"--filter takes FIELD=VALUE, not {text!r}.")
        tests.append(_equals(field, value, known.get(field)))
        if types and field not in known:
            note = f"note: the stream has no column {field!r}; events may still hold it."
            click.echo(f"{note} {did_you_mean(field, known, '')}".rstrip(), err=True)
    return lambda event: all(test(event) for test in tests)


def _equals(field: str, text: str, kind: FieldType | None) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test whether an event's value is written so, or equals the text as a value of that type: 3.5 is 3.50."""
    wanted: Any = None
    if kind is not None:
        with suppress(ValueError):
            wanted = value_of(text, kind)

    def test(event: Mapping[str, Any]) -> bool:
        if field not in event:
            return False
        value = event[field]
        return as_text(value) == text or (wanted is not None and type(value) is type(wanted) and value == wanted)

    return test
