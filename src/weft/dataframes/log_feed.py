"""Declared streams, on any system, read page by page. An entry's id is its `_weft_rowid`."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from time import monotonic
from types import NoneType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.consumers.logs import as_text, backlog_of, new_member
from weft.dataframes.layout import Layout
from weft.errors import EventsLostError, SettingsError
from weft.streams import ack_sync, consume_sync, groups_sync
from weft.streams.consuming import LONGEST_SECONDS, return_undelivered
from weft.streams.declare import Stream
from weft.streams.events import events_lost
from weft.streams.runtime import Opened, open_stream
from weft.systems.base import Connection
from weft.systems.entries import Membership
from weft.systems.log import EXTRA, META_TYPES, PUBLISHED_AT, ROWID
from weft.systems.pages import FeedPage, PageFeed, name_columns
from weft.types import PYTHON_TYPES, FieldType, check_column, dump_json

_log = logging.getLogger("weft.dataframes")
# A reader also looks without being woken: the database may be away, which no watch reports.
_LOOK_SECONDS = 2.0
_EVENTS_A_PAGE = 50_000
_EVENTS_A_LEASE = 100_000
_LEASE_SECONDS = 60.0


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

    def __init__(self, connection: Connection, stream: str | Stream, layout: Layout) -> None:
        if layout.on_error == "quarantine":
            raise SettingsError(
                'on_error="quarantine" is for keys of Redis. A declared stream checks its events when they come.',
                hint='Declare it with on_schema_drift="quarantine".',
            )
        self.opened: Opened = open_stream(stream, connection, to_read=self.only_reads)
        self.layout = layout

    @property
    def name(self) -> str:
        return self.opened.stream.name

    def _page(self, batch: pa.RecordBatch) -> FeedPage:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        rowids, published, extra = (columns.pop(name, None) for name in (ROWID, PUBLISHED_AT, EXTRA))
        fields = {name: array for name, array in columns.items() if name not in META_TYPES}
        reserved, wanted = self.layout.field_names
        kinds, declared = self.opened.log.fields(), self.opened.stream.fields
        unfit: dict[str, pa.Array] = {}
        for name, values in _of_extra(extra, reserved, wanted).items():
            kind = kinds.get(name) if name in fields else None
            if kind is not None:
                # Stored before there was such a column; or it does not fit the column.
                fitting = [value if _fit([value], kind) else None for value in values]
                fields[name] = pc.coalesce(fields[name], _array(fitting, kind).cast(fields[name].type))
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
    return value if isinstance(value, str) or value is None else json.dumps(value)


class LogRangeFeed(_LogFeed):
    """The events between two offsets; those that come later too, where the end is open."""

    page_size = _EVENTS_A_PAGE

    def __init__(self, connection: Connection, stream: str | Stream, layout: Layout, start: str, end: str) -> None:
        after, upto = offsets(start, end)
        super().__init__(connection, stream, layout)
        self._after, self._upto = after, upto
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._has_read = False

    def begin(self) -> None:
        """Fix where `$` is: after what is there now."""
        if self._after is None:
            self._after = self.opened.log.head()

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> FeedPage | None:
        self.begin()
        watch, ends = self.opened.hub.watch, math.inf if wait_seconds is None else monotonic() + wait_seconds
        while True:
            # Asked first: what comes after this question is read with the next.
            is_over = self._upto is not None and self.opened.log.head() >= self._upto
            # A watch wakes its readers for every stream of the database.
            version, batch = watch.version, self._next()
            left = ends - monotonic()
            if batch is not None or is_over or left <= 0:
                break
            watch.wait(version, min(left, _LOOK_SECONDS))
        if batch is None:
            self.finished = is_over
            return None
        rows, rest = batch[:limit], batch[limit:]
        self._rest = rest if len(rest) > 0 else None
        self._after, self._has_read = rows[ROWID][-1].as_py(), True
        return self._page(rows)

    def _next(self) -> pa.RecordBatch | None:
        if self._rest is not None:
            return self._rest
        batch = next(self._batches, None)
        if batch is None:
            log, after = self.opened.log, self._after or 0
            upto = log.head() if self._upto is None else min(self._upto, log.head())
            if upto > after:
                if self._has_read and (lost := log.lost_after(after, None)[1]):
                    warn_of_loss(events_lost("reader", self.name, lost))
                self._batches = log.read_arrow(after, upto, self._columns())
                batch = next(self._batches, None)
        return batch

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
        super().__init__(connection, stream, layout)
        self._group, self._consumer = as_text(membership.group), as_text(membership.consumer)
        self._iterates, self._confirms = iterates, confirms
        self._backlog: list[tuple[str, int]] | None = None
        self._taken: list[dict[str, Any]] = []
        self._member: str | None = None
        """The member that asks next; it has got nothing yet."""
        idle = membership.claim_idle
        self._lease = _LEASE_SECONDS if idle is None else max(idle / 1000, 0.001)
        self._unconfirmed: list[dict[str, Any]] = []

    def fetch(self, limit: int, wait_seconds: float | None, more: bool = True) -> FeedPage | None:
        taken = self._taken or self._take(min(limit, _EVENTS_A_LEASE), wait_seconds)
        events, self._taken = taken[:limit], taken[limit:]
        if not events:
            return None
        self._unconfirmed = events
        return self._page(_batch(events, self.opened.log.fields(fresh=True)))

    def _take(self, limit: int, wait_seconds: float | None) -> list[dict[str, Any]]:
        if not self._iterates:
            return self._consume(self._consumer, limit, wait_seconds)
        if self._backlog is None:
            stored = groups_sync(self.opened.stream, connection=self.opened.hub.connection)
            self._backlog = backlog_of(self._consumer, next((g for g in stored if g["consumer"] == self._group), None))
        while self._backlog:
            member, pending = self._backlog.pop()
            # All of it, as to ask again would bring the same events; but not where they are acknowledged in between:
            # the lease of the last ones could end before it is their turn.
            portion = min(pending, limit if self._confirms else _EVENTS_A_LEASE)
            if events := self._consume(member, portion, 0):
                if self._confirms and pending > len(events):  # events near max_deliveries come one by one
                    self._backlog.append((member, pending - len(events)))
                return events
        # Under one name the member would be given again what it has not acknowledged. Redis keeps each name.
        self._member = self._member or new_member(self._consumer)
        events = self._consume(self._member, limit, wait_seconds)
        if events:
            self._member = None
        return events

    def _consume(self, member: str, limit: int, wait_seconds: float | None) -> list[dict[str, Any]]:
        wait = LONGEST_SECONDS if wait_seconds is None else wait_seconds
        place = self.opened.stream, self._group, limit, self.opened.hub.connection, member
        try:
            return consume_sync(*place, lease=self._lease, wait=wait)
        except EventsLostError as error:  # which is raised once
            warn_of_loss(error)
            return consume_sync(*place, lease=self._lease, wait=wait)

    def give_back(self) -> None:
        """Return what no frame has."""
        events, self._unconfirmed = self._unconfirmed, []
        if events:
            return_undelivered(self.opened, self._group, events)

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
            ack_sync(self.opened.stream, self._group, events, connection=self.opened.hub.connection)


def _batch(events: Sequence[dict[str, Any]], fields: dict[str, FieldType]) -> pa.RecordBatch:
    """Return events as a range read gives them: in their columns, and what fits no column as the JSON of another."""
    extras: dict[int, dict[str, Any]] = {}
    arrays: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for event in events for name in event):
        values = [event.get(name) for event in events]
        kind = fields.get(name) or META_TYPES.get(name)
        if kind is None or not _fit(values, kind):
            for row, value in enumerate(values):
                if value is not None and (kind is None or not _fit([value], kind)):
                    extras.setdefault(row, {})[name] = value
                    values[row] = None
        if kind is not None:
            arrays[name] = _array(values, kind)
    if extras:
        texts = [json.dumps(extras[row]) if row in extras else None for row in range(len(events))]
        arrays[EXTRA] = pa.array(texts, pa.string())
    return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))


_TO_TEXT: dict[str, Callable[[Any], str]] = {"json": dump_json, "uuid": str}


def _array(values: list[Any], kind: FieldType) -> pa.Array:
    convert = _TO_TEXT.get(kind.base)
    texts = values if convert is None else [None if value is None else convert(value) for value in values]
    return pa.array(texts, kind.arrow)


def _fit(values: list[Any], kind: FieldType) -> bool:
    """Return whether these are values of a column. Others did not fit it when they were published."""
    if kind.base == "json":
        return True
    python = PYTHON_TYPES[kind.base]
    if not {*map(type, values)} <= {python, NoneType}:
        return False
    return python not in (int, float) or check_column(values, kind)[0] is not None  # of these, some are out of range


def warn_of_loss(error: EventsLostError) -> None:
    """Log it: a frame has no place for it, and what is left is read."""
    _log.warning("%s It goes on with what is left.", error.what)


def acknowledge(connection: Connection, stream: str | Stream, group: str, ids: Sequence[str]) -> int:
    """Acknowledge events by their ids; how many were not acknowledged yet."""
    try:
        events = [{ROWID: int(each)} for each in ids]
    except ValueError as error:
        raise SettingsError(f"An id of an event is a number: {error}.") from None
    return ack_sync(stream, group, events, connection=connection) if events else 0
