"""Declared streams, on any system, read page by page. An entry's id is its `_weft_rowid`."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from operator import itemgetter
from time import monotonic
from types import NoneType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.consumers.logs import as_text, backlog_of, lease_milliseconds, new_member
from weft.dataframes.layout import Layout, float_texts
from weft.errors import ConnectionFailedError, EventsLostError, SettingsError
from weft.streams import ack_sync, consume_sync
from weft.streams.consuming import LONGEST_SECONDS, return_undelivered
from weft.streams.declare import Stream
from weft.streams.events import events_lost, moved
from weft.streams.runtime import OpenedStream, open_stream
from weft.systems.base import Connection
from weft.systems.entries import Membership
from weft.systems.log import EXTRA, META_TYPES, PUBLISHED_AT, ROWID
from weft.systems.pages import FeedPage, PageFeed, name_columns
from weft.systems.reader_retries import patiently
from weft.types import PYTHON_TYPES, FieldType, check_column, dump_json

_log = logging.getLogger("weft.dataframes")
# A reader also looks without being woken: the database may be away, which no watch reports.
_LOOK_SECONDS = 2.0
_EVENTS_A_PAGE = 50_000
_EVENTS_A_LEASE = 100_000


class EventPage(FeedPage):
    """A page of events of a log."""

    is_typed = True

    def __init__(
        self, rowids: pa.Array, published: pa.Array, fields: dict[str, pa.Array], unfit: dict[str, pa.Array]
    ) -> None:
        super().__init__(rowids.cast(pa.string()), fields, unfit=unfit)
        self._published = published

    def times(self) -> tuple[pa.Array, pa.Array]:
        """Return when the events were published. Their ids have the order within a millisecond."""
        milliseconds = pc.divide(self._published.cast(pa.int64()), 1000)
        return milliseconds, pa.repeat(pa.scalar(0), len(self))


class _LogFeed(PageFeed):
    only_reads = True

    def __init__(
        self, connection: Connection, stream: str | Stream, layout: Layout, stopped: Callable[[], bool]
    ) -> None:
        """`stopped` is asked while a database that is gone is waited for."""
        if layout.on_error == "quarantine":
            raise SettingsError(
                'on_error="quarantine" is for keys of Redis. A declared stream checks its events when they come.',
                hint='Declare it with on_schema_drift="quarantine".',
            )
        self.opened: OpenedStream = open_stream(stream, connection, to_read=self.only_reads)
        self.layout = layout
        self._stopped = stopped

    @property
    def name(self) -> str:
        return self.opened.stream.name

    def known_fields(self) -> dict[str, pa.DataType]:
        kinds = patiently(self._kinds, self._stopped)
        columns = name_columns([name.encode() for name in kinds], self.layout.reserved)
        return {column: kind.arrow for column, kind in zip(columns, kinds.values(), strict=True)}

    def _kinds(self) -> dict[str, FieldType]:
        """Return the type of each field: of its column, or as it is declared where there is no column yet."""
        return {**self.opened.log.fields(fresh=True), **self._without_column()}

    def _without_column(self) -> dict[str, FieldType]:
        stored, declared = self.opened.log.fields(), self.opened.stream.fields
        return {name: kind for name, kind in declared.items() if name not in stored}

    def _page(self, batch: pa.RecordBatch) -> FeedPage:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        rowids, published, extra = (columns.pop(name, None) for name in (ROWID, PUBLISHED_AT, EXTRA))
        fields = {name: array for name, array in columns.items() if name not in META_TYPES}
        reserved, wanted = self.layout.field_names
        missing, declared = self._without_column(), self.opened.stream.fields
        kinds = self.opened.log.fields() | missing
        for name in missing:
            if wanted is None or name in wanted or name in reserved:
                fields[name] = pa.nulls(len(batch), missing[name].arrow)
        unfit: dict[str, pa.Array] = {}
        for name, values in _of_extra(extra, reserved, wanted).items():
            kind = kinds.get(name) if name in fields else None
            if kind is not None:
                # Stored before there was such a column; or it does not fit the column.
                fitting = [value if _fitting([value], kind) is not None else None for value in values]
                column = _fitting(fitting, kind)
                assert column is not None
                fields[name] = pc.coalesce(fields[name], column.cast(fields[name].type))
                values = [value if fits is None else None for value, fits in zip(values, fitting, strict=True)]
                if all(value is None for value in values):
                    continue
            texts = pa.array([_text(value) for value in values], pa.string())
            if name not in fields:
                fields[name] = texts
            elif self.layout.types is None and name not in declared:
                fields[name] = _either(fields[name], texts)
            else:
                unfit[name] = texts
        named = dict(zip(fields, name_columns([name.encode() for name in fields], reserved), strict=True))
        return EventPage(
            rowids,
            published,
            {named[name]: values for name, values in fields.items()},
            {named[name]: texts for name, texts in unfit.items()},
        )


def _either(values: pa.Array, texts: pa.Array) -> pa.Array:
    kind = values.type if pa.types.is_binary(values.type) else pa.string()
    if pa.types.is_floating(values.type):
        values = float_texts(values)
    return pc.coalesce(values.cast(kind), texts.cast(kind))


def _of_extra(extra: pa.Array | None, reserved: Container[str], wanted: Container[str] | None) -> dict[str, list[Any]]:
    """Return the values that no column holds, by field."""
    columns: dict[str, list[Any]] = {}
    if extra is not None and extra.null_count < len(extra):
        for row, text in enumerate(extra.to_pylist()):
            for name, value in (json.loads(text) if text else {}).items():
                if wanted is None or name in wanted or name in reserved:
                    columns.setdefault(name, [None] * len(extra))[row] = value
    return columns


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None if value is None else json.dumps(value)
    return value.encode(errors="backslashreplace").decode()  # JSON can hold half of a character


class LogRangeFeed(_LogFeed):
    """The events between two offsets; those that come later too, where the end is open."""

    page_size = _EVENTS_A_PAGE

    def __init__(
        self,
        connection: Connection,
        stream: str | Stream,
        layout: Layout,
        start: str,
        end: str,
        stopped: Callable[[], bool],
    ) -> None:
        after, upto = offsets(start, end)
        super().__init__(connection, stream, layout, stopped)
        self._after, self._upto = after, upto
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._identity: str | None = None
        self._has_read = False

    def begin(self) -> None:
        """Fix where `$` is: after what is there now."""
        if self._after is None:
            self._after, self._has_read = patiently(self.opened.log.head, self._stopped), True

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> FeedPage | None:
        self.begin()
        watch, ends = self.opened.hub.watch, math.inf if wait_seconds is None else monotonic() + wait_seconds
        while True:
            # Asked first: what comes after this question is read with the next.
            is_over = self._upto is not None and patiently(self.opened.log.head, self._stopped) >= self._upto
            # A watch wakes its readers for every stream of the database.
            version, batch = watch.version, patiently(self._next, self._stopped)
            left = ends - monotonic()
            if batch is not None or is_over or left <= 0:
                break
            watch.wait(version, min(left, _LOOK_SECONDS))
        if batch is None:
            self.finished = is_over
            return None
        rows, rest = batch[:limit], batch[limit:]
        self._rest = batch  # which the next fetch has if this one fails
        page = patiently(lambda: self._page(rows), self._stopped)
        self._rest = rest if len(rest) > 0 else None
        self._after, self._has_read = rows[ROWID][-1].as_py(), True
        return page

    def _next(self) -> pa.RecordBatch | None:
        if self._rest is not None:
            return self._rest
        try:
            return self._read()
        except ConnectionFailedError:
            self._batches = iter(())  # read again, after the rows that were handed on
            raise

    def _read(self) -> pa.RecordBatch | None:
        batch = next(self._batches, None)
        if batch is None:
            log, after = self.opened.log, self._after or 0
            head = log.head(after)
            if self._has_read and head < after:
                what = moved("reader", self.name, after, head, 0).what
                if self._identity is not None and self._identity != log.identity():
                    after, goes_on = log.floor(), "It is another stream, which is read from its start."
                else:
                    after, goes_on = head, f"Events up to offset {head} are not read."
                _log.warning("%s %s", what, goes_on)
                self._after, self._identity = after, None
            if self._identity is None and self._upto is None and head > 0:
                self._identity = log.identity()
            upto = head if self._upto is None else min(self._upto, head)
            if upto > after:
                self._batches = log.read_arrow(after, upto, self._columns())
                batch = next(self._batches, None)
                if batch is None:
                    self._report_loss(None)
        if batch is not None:
            self._report_loss(batch[ROWID][0].as_py())
        return batch

    def _report_loss(self, following: int | None) -> None:
        """Warn of events that retention removed before the next one was read, also while their range was."""
        after = self._after or 0
        if self._has_read and following != after + 1:
            upto, lost = self.opened.log.lost_after(after, following)
            if lost:
                end = upto if following is None else following - 1
                warn_of_loss(events_lost("reader", self.name, min(lost, end - after)))
                self._after = end  # reported once

    def _columns(self) -> list[str]:
        stored, (reserved, wanted) = self.opened.log.fields(fresh=True), self.layout.field_names
        fields = [name for name in stored if wanted is None or name in wanted or name in reserved]
        return [*fields, ROWID, PUBLISHED_AT, EXTRA]


def offsets(start: str, end: str) -> tuple[int | None, int | None]:
    """Return the offset after which to read (`None` is the head) and the last offset (`None` is an open end)."""
    return _offset("start_id", start, before=True), _offset("end_id", end, before=False)


def _offset(name: str, value: str, *, before: bool) -> int | None:
    words = {"-": 0, "$": None} if before else {"+": None}
    if value in words:
        return words[value]
    match = re.fullmatch(r"(\(?)(\d{1,19})", value) if isinstance(value, str) else None
    if match is None:
        listed = ", ".join(repr(word) for word in words)
        raise SettingsError(
            f"{name} is {value!r}, which is not the id of an event: that is a number, as in `_id`.",
            hint=f"Such as '17', or {listed}.",
        )
    number, excluded = int(match[2]), bool(match[1])
    return number - (not excluded) if before else number - excluded


class LogGroupFeed(_LogFeed):
    """The events that a member of a group is given: its own unacknowledged ones, those that others released, then new
    ones."""

    only_reads = False
    page_size = _EVENTS_A_LEASE
    # To ask again before an ack would bring the same events again.
    drained = True

    def __init__(
        self,
        connection: Connection,
        stream: str | Stream,
        layout: Layout,
        membership: Membership,
        *,
        iterates: bool = False,
        confirms: bool = False,
        stopped: Callable[[], bool],
    ) -> None:
        """`iterates`: it is fetched from repeatedly, and no event comes twice. `confirms`: what was fetched is
        acknowledged before the next fetch."""
        if membership.group_start != "-" or not membership.auto_create:
            raise SettingsError(
                "start_id and create_group are for groups of Redis: one of a declared stream is created at first use.",
                hint="weft.reset_sync(stream, group, …) moves it.",
            )
        if layout.delivery_column is not None:
            raise SettingsError("include_delivery is for keys of Redis: declared streams count deliveries by range.")
        super().__init__(connection, stream, layout, stopped)
        self._group, self._consumer = as_text(membership.group), as_text(membership.consumer)
        self._iterates, self._confirms = iterates, confirms
        self._backlog: list[tuple[str, int]] | None = None
        self._taken: list[dict[str, Any]] = []
        self._member: str | None = None
        """The member that asks next; it has got nothing yet."""
        self._lease = lease_milliseconds(membership.claim_idle) / 1000
        self._unconfirmed: list[dict[str, Any]] = []

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> FeedPage | None:
        entries = self._taken or self._take(min(limit, _EVENTS_A_LEASE), wait_seconds)
        events, self._taken = entries[:limit], entries[limit:]
        if not events:
            return None
        self._unconfirmed = events
        return patiently(lambda: self._page(_batch(events, self.opened.log.fields(fresh=True))), self._stopped)

    def _take(self, limit: int, wait_seconds: float | None) -> list[dict[str, Any]]:
        if not self._iterates:
            return self._take_all(limit, wait_seconds)
        if self._backlog is None:
            self._backlog = self._held()
        while self._backlog:
            member, pending = self._backlog[-1]
            # All of it, as to ask again would bring the same events; but not where they are acknowledged in between:
            # the lease of the last ones could end before it is their turn.
            portion = min(pending, limit if self._confirms else _EVENTS_A_LEASE)
            events = self._consume(member, portion, 0)
            self._backlog.pop()  # only now: a request that failed is made again by the next fetch
            if events:
                if self._confirms and pending > len(events):  # events near max_deliveries come one by one
                    self._backlog.append((member, pending - len(events)))
                return events
        # Under one name the member would be given again what it has not acknowledged. Redis keeps each name.
        self._member = self._member or new_member(self._consumer)
        events = self._consume(self._member, limit, wait_seconds)
        if events:
            self._member = None
        return events

    def _held(self) -> list[tuple[str, int]]:
        members = patiently(lambda: self.opened.log.members(self._group), self._stopped)
        return backlog_of(self._consumer, members)

    def _take_all(self, limit: int, wait_seconds: float | None) -> list[dict[str, Any]]:
        """Return what the consumer holds, also of its iterations, each of whose requests had a name of its own; then
        what others released, and new events."""
        # All under one lease: of several, the first could end before the frame is acknowledged, or even before the
        # last is taken, and its events would be lost or come twice. So what iterations hold is given back first.
        left = limit
        for member, pending in reversed(self._held()):
            if member != self._consumer and left > 0:
                events = self._consume(member, min(pending, left), 0)
                left -= len(events)
                if events:
                    patiently(partial(return_undelivered, self.opened, self._group, events), self._stopped)
        return sorted(self._consume(self._consumer, limit, wait_seconds), key=itemgetter(ROWID))

    def _consume(self, member: str, limit: int, wait_seconds: float | None) -> list[dict[str, Any]]:
        wait = LONGEST_SECONDS if wait_seconds is None else wait_seconds
        place = self.opened.stream, self._group, limit, self.opened.hub.connection, member

        ends = monotonic() + wait

        def consume() -> list[dict[str, Any]]:
            # In slices, each with a patience of its own: it is for a database that is gone, not for events to come.
            return consume_sync(*place, lease=self._lease, wait=min(max(ends - monotonic(), 0), _LOOK_SECONDS))

        while True:
            try:
                events = patiently(consume, self._stopped)
            except EventsLostError as error:  # which is raised once
                warn_of_loss(error)
                continue
            if events or monotonic() >= ends:
                return events

    def give_back(self) -> None:
        """Return what no frame has."""
        events, self._unconfirmed = self._unconfirmed, []
        if events:
            patiently(lambda: return_undelivered(self.opened, self._group, events), self._stopped)

    def close(self) -> None:
        self._unconfirmed, self._taken = self._taken, []
        left, self._backlog = self._backlog if self._confirms else None, None
        self.give_back()
        for member, pending in left or ():  # others need not wait for the end of its lease
            while pending > 0 and (events := self._consume(member, min(pending, _EVENTS_A_LEASE), 0)):
                pending -= len(events)
                self._unconfirmed = events
                self.give_back()

    def confirm(self) -> None:
        events, self._unconfirmed = self._unconfirmed, []
        if events:
            place = self.opened.stream, self._group
            patiently(lambda: ack_sync(*place, events, connection=self.opened.hub.connection), self._stopped)


def _batch(events: Sequence[dict[str, Any]], fields: dict[str, FieldType]) -> pa.RecordBatch:
    """Return events as a range read gives them: in their columns, and what fits no column as the JSON of another."""
    extras: dict[int, dict[str, Any]] = {}
    arrays: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for event in events for name in event):
        values = [event.get(name) for event in events]
        kind = fields.get(name) or META_TYPES.get(name)
        column = None if kind is None else _fitting(values, kind)
        if column is None:
            for row, value in enumerate(values):
                if value is not None and (kind is None or _fitting([value], kind) is None):
                    extras.setdefault(row, {})[name] = value
                    values[row] = None
            column = None if kind is None else _fitting(values, kind)
        if column is not None:
            arrays[name] = column
    if extras:
        texts = [json.dumps(extras[row]) if row in extras else None for row in range(len(events))]
        arrays[EXTRA] = pa.array(texts, pa.string())
    return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))


_TO_TEXT: dict[str, Callable[[Any], str]] = {"json": dump_json, "uuid": str}


def _fitting(values: list[Any], kind: FieldType) -> pa.Array | None:
    """Return values as the column of a field; `None` if one of them is no value of it. That one did not fit when it was
    published, or somebody else wrote it."""
    if kind.base != "json":
        python = PYTHON_TYPES[kind.base]
        if not {*map(type, values)} <= {python, NoneType}:
            return None
        if python in (int, float) and check_column(values, kind)[0] is None:  # some are out of range
            return None
    convert = _TO_TEXT.get(kind.base)
    try:
        texts = values if convert is None else [None if value is None else convert(value) for value in values]
        return pa.array(texts, kind.arrow)
    except (ValueError, OverflowError):
        return None


def warn_of_loss(error: EventsLostError) -> None:
    """Log it: a frame has no place for it, and what is left is read."""
    _log.warning("%s It goes on with what is left.", error.what)


def acknowledge(connection: Connection, stream: str | Stream, group: str, ids: Sequence[str]) -> int:
    """Acknowledge events by their ids; how many were not acknowledged yet."""
    try:
        events = [{ROWID: int(each)} for each in ids]
    except ValueError as error:
        raise SettingsError(f"An id of an event is a number: {error}.") from None
    if not events:
        return 0
    open_stream(stream, connection)  # one that never answered is not waited for
    return patiently(lambda: ack_sync(stream, group, events, connection=connection))
