"""The history of the streams in a table, `weft.history` of the database that has the keys.

It has a point a minute of each stream that changed. Many services share it, and it survives their restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import pyarrow as pa

from weft.errors import WeftError
from weft.operate.runlog_tables import insert_row
from weft.server.service_tables import is_not_there, service_tables
from weft.systems.sql.system_tables import create_system_table, instant, system_table

_TABLE = "history"
_FIELDS = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("published", pa.int64(), nullable=False),
        pa.field("lag", pa.int64(), nullable=False),
        pa.field("dead_letters", pa.int64()),
        pa.field("quarantined", pa.int64()),
    ]
)
# The most points of one answer: a day has 1,440 minutes.
_MOST = 20_000


class Values(NamedTuple):
    """What is kept of a stream at one moment."""

    published: int
    lag: int
    dead_letters: int | None
    quarantined: int | None


class HistoryTable:
    """Writes the points of one service, and reads those of all. Its methods block: they are for threads."""

    def __init__(self, days: float) -> None:
        self._days = days
        self._seen: dict[str, tuple[datetime, Values]] = {}
        self._written: dict[str, tuple[datetime, Values]] = {}
        self._looked_at: datetime | None = None
        self._removed_at: datetime | None = None

    def write(self, minute: datetime, values: Mapping[str, Values]) -> None:
        """Store what changed, unless another service of these streams has stored this minute."""
        if self._looked_at is not None and minute - self._looked_at > timedelta(minutes=1):
            # What another service stored meanwhile is not known.
            self._written.clear()
        rows = list(self._changed(minute, values))
        self._seen |= {name: (minute, each) for name, each in values.items()}
        with service_tables() as tables:
            if tables is None:
                return
            create_system_table(tables, _TABLE, _FIELDS, ("stream", "at"))
            table, stream, at = system_table(tables, _TABLE), *map(tables.quote, ("stream", "at"))
            # The services of one project take turns by a row that stands for its streams. No stream has such a name.
            marker = f"#{blake2b(chr(0).join(sorted(values)).encode(), digest_size=8).hexdigest()}"
            with tables.driver.session("publish") as session:
                known: dict[datetime, dict[str, Values]] = {}
                names = ", ".join(map(tables.quote, Values._fields))
                for moment in {minute, *(each for each, _, _ in rows)}:
                    found = session.rows(f"SELECT {stream}, {names} FROM {table} WHERE {at} = {tables.moment(moment)}")
                    known[moment] = {str(name): _values(rest) for name, *rest in found}
                self._looked_at = minute
                if marker in known[minute]:
                    # What the other one stored is newer than what this one did.
                    self._written |= {name: (minute, known[minute][name]) for name in known[minute].keys() & values}
                    return
                for moment, name, each in [(minute, marker, Values(0, 0, None, None)), *rows]:
                    if name not in known[moment]:
                        insert_row(tables, session, table, {"stream": name, "at": moment, **each._asdict()})
                # Markers are of no use after the minute in which services take turns.
                before = tables.moment(minute - timedelta(minutes=10))
                session.run(f"DELETE FROM {table} WHERE {stream} = ? AND {at} < {before}", (marker,))
                if self._removed_at is None or minute - self._removed_at >= timedelta(hours=1):
                    oldest = tables.moment(minute - timedelta(days=self._days))
                    session.run(f"DELETE FROM {table} WHERE {at} < {oldest}", ())
                    self._removed_at = minute
        self._written |= {name: (moment, each) for moment, name, each in rows}

    def _changed(self, minute: datetime, values: Mapping[str, Values]) -> Iterable[tuple[datetime, str, Values]]:
        """Yield the points to store: of what changed, and the last one before the change, so that a rate over time does
        not begin with the pause before it."""
        for name, each in values.items():
            written, seen = self._written.get(name), self._seen.get(name)
            if written is not None and written[1] == each:
                continue
            if seen is not None and (seen[1] != each if written is None else seen[0] > written[0]):
                yield seen[0], name, seen[1]
            yield minute, name, each

    def read(self, name: str, since: datetime) -> list[tuple[float, Values]]:
        """Return the points of a stream since then, the oldest first; none where there is no table yet."""
        with service_tables() as tables:
            if tables is None:
                return []
            names = ", ".join(map(tables.quote, _FIELDS.names[1:]))
            stream, at = map(tables.quote, ("stream", "at"))
            where = f"{stream} = ? AND {at} >= {tables.moment(since)} ORDER BY {at} LIMIT {_MOST}"
            try:
                with tables.driver.session("read") as session:
                    rows = session.rows(f"SELECT {names} FROM {system_table(tables, _TABLE)} WHERE {where}", (name,))
            except WeftError as error:
                if is_not_there(error, tables):
                    return []
                raise
        found = []
        for moment, *rest in rows:
            known = instant(moment)
            assert known is not None
            found.append((known.timestamp(), _values(rest)))
        return found


def _values(row: Sequence[Any]) -> Values:
    published, lag, *aside = row
    letters, misfits = (None if each is None else int(each) for each in aside)
    return Values(int(published), int(lag), letters, misfits)


def minute_of(seconds: float) -> datetime:
    """Return the minute of a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds // 60 * 60, UTC)
