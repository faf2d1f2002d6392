"""A Weft stream as a source of streaming pipelines, on any system that has a log. A position is the offset of the
last event that was read.

The query decides which offsets a batch has, the batch reads them. Spark's log keeps the offsets, so that a batch which
is tried again has the same rows. The rows do not pass through the query: a batch reads them as any load does, with the
columns that the stream has by then, and where there is no SQL in the same task that writes them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.engine.readers import StreamReader, stream_reader
from weft.errors import WeftError
from weft.streams import runtime
from weft.streams.declare import Stream
from weft.systems.dead_letter_store import DeadLetter, as_json
from weft.systems.log import EXTRA, META_TYPES, PUBLISH_ID, ROWID, Log
from weft.systems.log_offsets import Offsets, ranges
from weft.systems.log_positions import LogPositions
from weft.systems.stream_source import EVENT_TIME, MAX_ROWS, BatchRows, ReaderRows, SourceSettings
from weft.types import FieldType, check_value

SMALL = 20_000
"""Up to this many rows are read and written by the driver itself: planning a job would take longer."""
_RESET = "To begin with what is left: weft checkpoints reset. Keep events for longer than the pipeline may be away."


@dataclass(frozen=True)
class EventRows(ReaderRows):
    """The events of a micro-batch."""

    log: Any = None
    gathered: pa.Table | None = None

    def gather(self) -> pa.Table:
        reader = self.reader
        if self.gathered is not None:
            return self.gathered
        return pa.Table.from_batches(reader.read_from(self.log, reader.after, reader.upto), reader.schema)

    def split(self, refused: Mapping[str, str] | None = None, *, mends: bool = True) -> EventRows:
        """Return the events, with those apart that have a value which does not fit its field: the column has a null in
        its place. One that fits, and came before the column did, is put into it. Unless it `mends`, these stay as they
        are. `refused`: columns that rows cannot have, and why; an event with a value there is apart too."""
        if self.reader is None:
            return self
        refused = refused or {}
        fields = {name: kind for name, kind in self.reader.types if name not in META_TYPES}
        whys: dict[int, str] = {}
        late: list[tuple[int, str, Any]] = []
        # Few events are read once.
        gathered = self.gather() if self.size is not None and self.size <= SMALL else None
        looked_at = [ROWID, EXTRA, *refused]
        if gathered is not None:
            batches = gathered.select(looked_at).to_batches()
        else:
            batches = self.log.read_arrow(self.reader.after, self.reader.upto, looked_at)
        for batch in batches:
            for name, why in refused.items():
                whys.update(dict.fromkeys(batch.filter(batch.column(name).is_valid())[ROWID].to_pylist(), why))
            for event in batch.filter(batch.column(EXTRA).is_valid()).to_pylist():
                offset, extra = event[ROWID], json.loads(event[EXTRA])
                for name in (name for name, value in extra.items() if value is not None and name in fields):
                    if name in refused:
                        whys[offset] = refused[name]
                        continue
                    if not mends:
                        continue
                    try:
                        late.append((offset, name, _fitted(extra[name], fields[name])))
                    except ValueError:
                        whys[offset] = f"{name!r} is {_shown(extra[name])}, which does not fit {fields[name]}."
        offsets = tuple(sorted(whys))
        types = tuple(each for each in self.reader.types if each[0] not in refused)
        reader = replace(self.reader, types=types, without=offsets, late=tuple(late))
        whole = gathered
        gathered = None if gathered is None else gathered.drop_columns(list(refused))
        if gathered is not None and (late or whys):
            parts = [reader.mended(each, each.column(ROWID)) for each in gathered.to_batches()]
            mended = replace(self, reader=reader, gathered=pa.Table.from_batches(parts, gathered.schema))
        else:
            mended = replace(self, reader=reader, gathered=gathered)
        if not whys:
            return mended
        rows = whole
        if rows is None:
            rows = replace(self, reader=replace(self.reader, after=offsets[0] - 1, upto=offsets[-1])).gather()
        letters = tuple(
            DeadLetter("read", whys[row[ROWID]], self.source, _payload(row, fields), str(row[ROWID]))
            for row in rows.filter(pc.is_in(rows[ROWID], pa.array(offsets))).to_pylist()
        )
        # A size beyond SMALL is a bound that counting stopped at.
        size = self.size if self.size is None or self.size > SMALL else self.size - len(letters)
        return replace(mended, size=size, bad=letters)


class LogSource(LogPositions):
    """Follows one stream."""

    unit = "events"
    messaging_system = "weft"
    waits = True
    read_by_workers = False

    def __init__(self, connection: Any, settings: SourceSettings, stream: str | Stream) -> None:
        """`connection`: as the pipeline declares it, or `None` for that of the stream."""
        super().__init__(connection, settings)
        self._stream = stream

    @property
    def may_grow(self) -> bool:
        return runtime.find(self._stream).on_schema_drift == "evolve"

    def follow(self, spark: Any, start: str) -> Any:
        now, settings = stream_reader(self._stream, self.connection), self.settings
        limit = settings.max_rows or MAX_ROWS
        offsets = Offsets(now.connection, now.stream_schema, now.stream, start, limit, settings.wait_seconds)
        return ranges(spark, offsets)

    def take(self, frame: Any) -> EventRows:
        """Return the events between two offsets, with the columns that the stream has now."""
        ranges = frame.collect()
        if not ranges:
            return EventRows(self.name, None, 0, stored=self.stored_schema, declared=self.declared_columns())
        after, upto = min(each[0] for each in ranges), max(each[1] for each in ranges)
        reader = self._reader(after, upto)
        log = self.log
        size = log.extent(after, upto, SMALL + 1)
        if not size and log.floor() > after:
            size = 1  # all of them were removed: reading them raises the error
        return EventRows(self.name, reader, size, log=log, declared=self.declared_columns())

    def validate(self) -> str:
        runtime.find(self._stream)
        return ""

    def declared_columns(self) -> frozenset[str]:
        return frozenset(runtime.find(self._stream).fields)

    def stored_schema(self) -> pa.Schema:
        return self._reader().schema

    def _reader(self, after: int = 0, upto: int = 0) -> StreamReader:
        now = stream_reader(self._stream, self.connection)
        return replace(now, after=after, upto=upto, advice=_RESET, time_column=EVENT_TIME)

    @property
    def log(self) -> Log:
        return runtime.open_stream(self._stream, self.connection, to_read=True).log

    def reached(self, rows: BatchRows, reported: Any | None) -> int | None:
        """Return the last offset of the batch: Spark reports it later."""
        return getattr(rows.reader, "upto", None) if isinstance(rows, EventRows) else None

    def count(self, rows: BatchRows) -> int:
        if not isinstance(rows, EventRows) or rows.reader is None:
            return rows.size or 0
        try:
            return self.log.extent(rows.reader.after, rows.reader.upto, self.settings.max_rows or MAX_ROWS)
        except WeftError:
            return 0

    def publish_ids(self, rows: BatchRows) -> Collection[str]:
        """Return the publishes of the first events."""
        if not isinstance(rows, EventRows) or rows.reader is None:
            return ()
        upto = rows.log.bound(rows.reader.after, rows.reader.upto, SMALL)
        ids: dict[str, None] = {}
        for batch in rows.log.read_arrow(rows.reader.after, upto, [PUBLISH_ID]):
            ids.update(dict.fromkeys(batch.column(PUBLISH_ID).drop_null().unique().to_pylist()))
        return ids.keys()


def _fitted(value: Any, kind: FieldType) -> Any:
    """Return a value as the column of its field has it in Arrow; `ValueError` if it cannot."""
    is_zero = type(value) is float and not value and kind.base in ("float32", "float64")
    if is_zero or (type(value) is str and kind.base == "string"):
        return value  # -0.0 or a NUL, which not every database keeps in a column
    checked = check_value(value, kind)
    return str(checked) if kind.base == "uuid" else checked


def _shown(value: Any) -> str:
    text = as_json(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _payload(row: dict[str, Any], fields: dict[str, FieldType]) -> str:
    """Return an event as the JSON that it was published as, with its time."""
    event = {name: row[name] for name in (*fields, EVENT_TIME) if row[name] is not None}
    documents = {name: json.loads(event[name]) for name in event if name in fields and fields[name].base == "json"}
    return as_json({**event, **documents, **json.loads(row[EXTRA] or "{}")})
