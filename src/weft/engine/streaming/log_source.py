"""A stream of ours as a source of streaming pipelines, on any system that has a log. A position is the offset of the
last event that was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from weft.engine.readers import StreamReader, stream_reader
from weft.engine.streaming import log_offsets
from weft.errors import DeclarationError, WeftError
from weft.spark_support.folder import Location
from weft.streams import runtime
from weft.streams.declare import Stream
from weft.systems.log import META_TYPES, PUBLISHED_AT, ROWID, Log
from weft.systems.stream_source import (
    EVENT_TIME,
    MAX_ROWS,
    BatchRows,
    ReaderRows,
    Rewind,
    SourceSettings,
    StreamSource,
)

SMALL = 20_000
"""So few rows are read and written by the driver itself: to plan a job takes longer than to carry it out."""
MOST_COUNTED = 100_000
"""Lag is counted no further on Redis, where entries are counted one by one."""
_RESET = "To begin with what is left: weft checkpoints reset. Keep events for longer than the pipeline may be away."


@dataclass(frozen=True)
class EventReader(StreamReader):
    """Reads the events of a range, with the column of the event's time."""

    columns: tuple[str, ...] | None = None
    """The columns that are read; `None` for all."""

    @property
    def schema(self) -> pa.Schema:
        """The fields, then what Weft adds."""
        named = [field.with_name(EVENT_TIME) if field.name == PUBLISHED_AT else field for field in super().schema]
        return pa.schema(named if self.columns is None else [field for field in named if field.name in self.columns])

    def selecting(self, columns: Sequence[str]) -> EventReader:
        """Return a reader of the same events with these columns alone."""
        return dataclasses.replace(self, columns=tuple(columns))

    def read(self, part: Any, conditions: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """Yield the events of a part."""
        return self._named(self._plain.read(part, conditions))

    def read_all(self, log: Log) -> pa.Table:
        """Return all events, read from a stream that is open: for a few, opening it again would take longest."""
        return pa.Table.from_batches(self._named(self._plain.read_from(log, self.after, self.upto)), self.schema)

    @property
    def _stored(self) -> list[str]:
        return [PUBLISHED_AT if name == EVENT_TIME else name for name in self.schema.names]

    @property
    def _plain(self) -> StreamReader:
        # The offsets show whether some are missing.
        needed = {*self._stored, ROWID}
        types = tuple(each for each in self.types if each[0] in needed)
        stream = (self.connection, self.stream_schema, self.stream)
        return StreamReader(*stream, types, self.after, self.upto, self.advice)

    def _named(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        stored, schema = self._stored, self.schema
        for batch in batches:
            yield pa.RecordBatch.from_arrays([batch.column(name) for name in stored], schema=schema)


@dataclass(frozen=True)
class EventRows(ReaderRows):
    """The events of a micro-batch."""

    log: Any = None

    def gather(self) -> pa.Table:
        """Return all events, read by this process."""
        rows: pa.Table = self.reader.read_all(self.log)
        return rows


class LogSource(StreamSource):
    """Follows one stream."""

    unit = "events"
    waits = True
    read_by_workers = False

    def __init__(self, connection: Any, settings: SourceSettings, stream: str | Stream) -> None:
        """`connection`: as the pipeline declares it, or `None` for that of the stream."""
        super().__init__(connection, settings)
        self._stream = stream

    def follow(self, spark: Any, start: str) -> Any:
        """Return the ranges of offsets that are there."""
        now = stream_reader(self._stream, self.connection)
        offsets = log_offsets.Offsets(
            now.connection,
            now.stream_schema,
            now.stream,
            start,
            self.settings.max_rows or MAX_ROWS,
            self.settings.wait_seconds,
        )
        return log_offsets.stream(spark, offsets)

    def take(self, frame: Any) -> EventRows:
        """Return the events between two offsets, with the columns that the stream has now."""
        ranges = frame.collect()
        if not ranges:
            return EventRows(self.name, None, 0)
        after, upto = min(each[0] for each in ranges), max(each[1] for each in ranges)
        reader = self._reader(after, upto)
        log = self._log
        size = log.extent(after, upto, SMALL + 1)
        if not size and log.floor() > after:
            size = 1  # all of them were removed: reading them raises the error
        return EventRows(self.name, reader, size, log=log)

    def validate(self) -> str:
        """Raise if no such stream is declared."""
        runtime.find(self._stream)
        return ""

    def declared_schema(self) -> pa.Schema:
        """Return the declared fields, then what Weft adds."""
        stream = runtime.find(self._stream)
        types = tuple({**stream.fields, **META_TYPES}.items())
        return EventReader(self.connection, stream.schema, stream.name, types, 0, 0).schema

    def stored_schema(self) -> pa.Schema:
        """Return the stored fields, then what Weft adds."""
        return self._reader().schema

    def _reader(self, after: int = 0, upto: int = 0) -> EventReader:
        now = stream_reader(self._stream, self.connection)
        return EventReader(now.connection, now.stream_schema, now.stream, now.types, after, upto, _RESET)

    @property
    def _log(self) -> Log:
        return runtime.open_stream(self._stream, self.connection).log

    # -------------------------------------------------------------------------------------------------------- positions

    @classmethod
    def show(cls, position: Any, source_log: Location | None) -> str | None:
        """Return the offset."""
        return f"{position:,}" if type(position) is int else None

    def lag(self, position: int | None, source_log: Location | None) -> int | None:
        """Return how many events come after an offset, at most."""
        start = self.settings.start
        if position is None and start != "earliest" and not start.isdecimal():
            return None
        # Before the first batch there may be no stream yet, and to look makes none.
        log = self._log if position is not None else runtime.stored_log(runtime.find(self._stream), self.connection)
        if log is None:
            return 0
        if position is None:
            position = log.floor() if start == "earliest" else int(start) - 1
        return log.extent(position, log.head(), MOST_COUNTED)

    def end(self) -> str:
        """Return the next event."""
        return str(self._log.head() + 1)

    def reached(self, rows: BatchRows, reported: Any | None) -> int | None:
        """Return the last offset of the batch: Spark reports it later."""
        return getattr(rows.reader, "upto", None) if isinstance(rows, EventRows) else None

    def count(self, rows: BatchRows) -> int:
        """Return how many events the batch had, counted by their offsets."""
        if not isinstance(rows, EventRows) or rows.reader is None:
            return rows.size or 0
        try:
            return self._log.extent(rows.reader.after, rows.reader.upto, self.settings.max_rows or MAX_ROWS)
        except WeftError:
            return 0

    def stay(self, position: int | None, source_log: Location) -> Rewind:
        """Return the position itself."""
        return Rewind(position, None if position is None else position + 1)

    def rewind_to_offset(self, position: int | None, offset: str, source_log: Location) -> Rewind:
        """Return the position before an event."""
        if not offset.isdecimal() or not int(offset):
            raise DeclarationError(f"{offset!r} is not an offset of the stream {self.name}: an offset is one number.")
        return self._from(position, int(offset))

    def rewind_to_time(self, position: int | None, moment: datetime, source_log: Location) -> Rewind:
        """Return the position before the first event that was published since."""
        return self._from(position, self._log.first_since(moment))

    def _from(self, position: int | None, first: int) -> Rewind:
        if position is None:
            raise self.never_read()
        if first > position:
            raise self.after_position(f"{position:,}", f"{first:,}")
        floor, note = self._log.floor(), None
        if first <= floor:
            note = f"retention removed the events of {self.name} up to {floor:,}."
            first = floor + 1
        return Rewind(first - 1, first, f"event {first:,} of {self.name}; it was at {position:,}", note)
