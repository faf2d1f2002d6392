"""The history of streams and streaming pipelines in tables of the database that has the keys.

They have a point a minute of each one that changed. Many services share them, and they survive restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa

from weft.errors import WeftError
from weft.operate.runlog_tables import insert_row
from weft.server.service_tables import is_not_there, service_tables
from weft.systems.sql.system_tables import create_system_table, instant, system_table

# The most points of one answer: a day has 1,440 minutes.
_MOST = 20_000


class Values(NamedTuple):
    """What is kept of a stream at one moment."""

    published: int = 0
    lag: int = 0
    dead_letters: int | None = None
    quarantined: int | None = None


class Flow(NamedTuple):
    """What is kept of a streaming pipeline at one moment: counts since its checkpoint began, and how it stands."""

    rows_in: int = 0
    rows_out: int = 0
    batches: int = 0
    busy_ms: int = 0
    """The time that all batches took."""
    dead_letters: int = 0
    lag: int | None = None
    """The lag of all sources together; `None` where none is known."""
    state_rows: int | None = None
    watermark_ms: int | None = None
    """`None` without a window or join."""


V = TypeVar("V", bound=NamedTuple)


@dataclass(frozen=True)
class Kind(Generic[V]):
    """What a table has points of."""

    table: str
    column: str
    values: type[V]

    @property
    def fields(self) -> pa.Schema:
        """The columns of the table."""
        kept = [pa.field(name, pa.int64(), self._optional(name)) for name in self.values._fields]
        at = pa.field("at", pa.timestamp("us", "UTC"), nullable=False)
        return pa.schema([pa.field(self.column, pa.string(), nullable=False), at, *kept])

    def _optional(self, name: str) -> bool:
        return self.values._field_defaults[name] is None

    def point(self, row: Sequence[Any]) -> V:
        """Return the values of a row; of an empty one those of a point at which nothing was."""
        make: Any = self.values
        values: V = make(*(None if each is None else int(each) for each in row))
        return values


STREAMS = Kind("history", "stream", Values)
STREAMING = Kind("streaming_history", "pipeline", Flow)


class HistoryTable(Generic[V]):
    """Writes the points of one service, and reads those of all. Its methods block: they are for threads."""

    def __init__(self, kind: Kind[V], days: float) -> None:
        self._kind, self._days = kind, days
        self._seen: dict[str, tuple[datetime, V]] = {}
        self._written: dict[str, tuple[datetime, V]] = {}
        self._looked_at: datetime | None = None
        self._removed_at: datetime | None = None

    def write(self, minute: datetime, values: Mapping[str, V]) -> None:
        """Store what changed, unless another service of the same project has stored this minute."""
        if self._looked_at is not None and minute - self._looked_at > timedelta(minutes=1):
            # Another service may have stored points meanwhile.
            self._written.clear()
        rows = list(self._changed(minute, values))
        self._seen |= {name: (minute, each) for name, each in values.items()}
        with service_tables() as tables:
            if tables is None:
                return
            kind = self._kind
            create_system_table(tables, kind.table, kind.fields, (kind.column, "at"))
            table = system_table(tables, kind.table)
            named, at = map(tables.quote, (kind.column, "at"))
            # The services of one project take turns by a row that stands for all its names. None of them is such a one.
            marker = f"#{blake2b(chr(0).join(sorted(values)).encode(), digest_size=8).hexdigest()}"
            with tables.driver.session("publish") as session:
                known: dict[datetime, dict[str, V]] = {}
                names = ", ".join(map(tables.quote, kind.values._fields))
                for moment in {minute, *(each for each, _, _ in rows)}:
                    stored = session.rows(f"SELECT {named}, {names} FROM {table} WHERE {at} = {tables.moment(moment)}")
                    known[moment] = {str(name): kind.point(rest) for name, *rest in stored}
                self._looked_at = minute
                if marker in known[minute]:
                    # The values of the other service are newer than ours.
                    self._written |= {name: (minute, known[minute][name]) for name in known[minute].keys() & values}
                    return
                for moment, name, each in [(minute, marker, kind.point(())), *rows]:
                    if name not in known[moment]:
                        insert_row(tables, session, table, {kind.column: name, "at": moment, **each._asdict()})
                # Markers are of no use after the minute in which services take turns.
                before = tables.moment(minute - timedelta(minutes=10))
                session.run(f"DELETE FROM {table} WHERE {named} = ? AND {at} < {before}", (marker,))
                if self._removed_at is None or minute - self._removed_at >= timedelta(hours=1):
                    oldest = tables.moment(minute - timedelta(days=self._days))
                    session.run(f"DELETE FROM {table} WHERE {at} < {oldest}", ())
                    self._removed_at = minute
        self._written |= {name: (moment, each) for moment, name, each in rows}

    def _changed(self, minute: datetime, values: Mapping[str, V]) -> Iterable[tuple[datetime, str, V]]:
        """Yield the points to store: of what changed, and the last one before the change, so that a rate over time does
        not begin with the pause before it."""
        for name, each in values.items():
            written, seen = self._written.get(name), self._seen.get(name)
            if written is not None and written[1] == each:
                continue
            if seen is not None and (seen[1] != each if written is None else seen[0] > written[0]):
                yield seen[0], name, seen[1]
            yield minute, name, each

    def read(self, name: str, since: datetime) -> list[tuple[float, V]]:
        """Return the points of one since then, the oldest first; none where there is no table yet."""
        with service_tables() as tables:
            if tables is None:
                return []
            named, at = map(tables.quote, (self._kind.column, "at"))
            names = ", ".join([at, *map(tables.quote, self._kind.values._fields)])
            where = f"{named} = ? AND {at} >= {tables.moment(since)} ORDER BY {at} LIMIT {_MOST}"
            table = system_table(tables, self._kind.table)
            try:
                with tables.driver.session("read") as session:
                    rows = session.rows(f"SELECT {names} FROM {table} WHERE {where}", (name,))
            except WeftError as error:
                if is_not_there(error, tables):
                    return []
                raise
        points = []
        for moment, *rest in rows:
            known = instant(moment)
            assert known is not None
            points.append((known.timestamp(), self._kind.point(rest)))
        return points


def minute_of(seconds: float) -> datetime:
    """Return the minute of a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds // 60 * 60, UTC)
