"""Streams on SQLite: one writer at a time, so offsets are in commit order by themselves."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, ClassVar, cast
from uuid import UUID

from weft.systems.base import Connection
from weft.systems.log import EXTRA, PUBLISH_ID, PUBLISHED_AT, ROWID, Appended, Batch
from weft.systems.sql.driver import Role, Session
from weft.systems.sql.log import SqlLog
from weft.systems.sql.store import SqlStore, bound, contiguous, publish_ids
from weft.systems.sql.tokens import quote_name
from weft.systems.sqlite import reading
from weft.systems.sqlite.sessions import SqliteSessions
from weft.types import FieldType, comparable, from_sql

# Reading `data_version` costs some microseconds: at this pace a waiting process uses 1-3 % of a core and wakes within
# milliseconds.
_POLL_SECONDS = 0.003
# When less than the first is free on the disk, a reserve is kept back: to remove events takes space too.
_SCARCE_BYTES, _RESERVE_BYTES, _LEAST_RESERVE_BYTES = 64 << 20, 8 << 20, 64 << 10
_MAX_STREAM = 2**53
# The catalogue notes so many offsets at once as given: a publish would take longer if each wrote there.
_NOTED = 1000
# For the size of a stream: events that are weighed in each place, and events that are counted one by one.
_WEIGHED, _COUNTED = 16, 100_000
# What SQLite adds to each row: its offset, its length and its place in the page.
_ROW_BYTES = 8
# Closing a store waits for a poll to end.
_LOOK_SECONDS = 0.2


class SqliteStore(SqliteSessions, SqlStore):
    """Streams in a SQLite file."""

    for_update: ClassVar[str] = ""
    now_sql: ClassVar[str] = "weft_now()"
    # On the class: another thread may fork before `__init__` has ended.
    _watcher: reading.TrackedConnection | None = None

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.time) -> None:
        super().__init__(connection)
        self.clock = clock
        self._reserve = f"{os.path.abspath(self.path)}-reserve"
        self._may_have_reserve = True
        self._watchers = 0
        self._watching = threading.Lock()

    # ------------------------------------------------------------------------------------------------------ connections

    def connect(self, role: Role) -> reading.TrackedConnection:
        """A connection that knows the clock by which leases are judged."""
        driver = super().connect(role)
        driver.create_function("weft_now", 0, lambda: int(self.clock() * 1e6))
        return driver

    def replaced(self) -> None:
        self.forget()

    def before_fork(self) -> None:
        """Have no connection open while the process forks, also not that of `changed`."""
        super().before_fork()
        self._drop_watcher()

    def close(self) -> None:
        with self._lock:
            super().close()
            with self._watching:
                self._drop_watcher()

    def _drop_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    # ----------------------------------------------------------------------------------------------------------- tables

    def names(self) -> list[tuple[str, str]]:
        """As for every database; asking does not make the file."""
        return super().names() if self.in_memory or os.path.exists(self.path) else []

    def reflect(self, session: Session, schema: str, name: str) -> dict[str, FieldType] | None:
        """Columns by PRAGMA table_info: the declared types say it all."""
        rows = session.rows("SELECT name, type FROM pragma_table_info(?) ORDER BY cid", (f"{schema}.{name}",))
        return {column: from_sql("sqlite", kind) for column, kind in rows} or None

    def create_catalogue(self, session: Session) -> None:
        # Without case, as SQLite compares the names of the tables: `_number` refuses another spelling of a name.
        texts = {"stream": "TEXT COLLATE NOCASE", "name": "TEXT", "text": "TEXT"}
        numbers = dict.fromkeys(("id", "number", "offset"), "INTEGER")
        self.create_tables(session, **numbers, **texts, key="BLOB", clustered=" WITHOUT ROWID")
        session.run(f"CREATE INDEX IF NOT EXISTS {self.table('weft', 'keys_seen')} ON {self.keys} (stream, seen)")

    def create_stream(self, session: Session, schema: str, name: str, columns: dict[str, FieldType]) -> None:
        """The table; AUTOINCREMENT never gives an offset twice, not even after the last events were trimmed."""
        spelled = ", ".join(
            f"{self.quote(ROWID)} INTEGER PRIMARY KEY AUTOINCREMENT"
            if column == ROWID
            else f"{self.quote(column)} {kind.sql('sqlite')}"
            for column, kind in columns.items()
        )
        full = f"{schema}.{name}"
        session.run(f"CREATE TABLE IF NOT EXISTS {self.table(schema, name)} ({spelled})")
        # At random: no stream gets the number of a deleted one, or of one in another file.
        session.run(self.insert_ignore(self.streams, ("id", "name")), (secrets.randbelow(_MAX_STREAM) + 1, full))
        # After a DROP TABLE, which forgets the sequence, the offsets go on after all that were given: who reads without
        # a consumer (models, pipelines, subscribers) knows one of them.
        session.run(
            "INSERT INTO sqlite_sequence (name, seq) "
            f"SELECT ?, max(floor, head, coalesce((SELECT max(position) FROM {self.groups} WHERE stream = id), 0)) "
            f"FROM {self.streams} WHERE name = ? "
            "AND NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = ? COLLATE NOCASE)",
            (full, full, full),
        )

    def add_columns(self, log: SqlLog, columns: dict[str, FieldType]) -> None:
        """ALTER TABLE under the write lock, where nobody else can add the same."""
        with self.session("publish") as session:
            present = set(map(comparable, self.reflect(session, log.schema, log.name) or {}))
            for name, kind in columns.items():
                if comparable(name) not in present:
                    session.run(f"ALTER TABLE {log.table} ADD COLUMN {self.quote(name)} {kind.sql('sqlite')}")
                    present.add(comparable(name))

    # ------------------------------------------------------------------------------------------------------------- disk

    def append(self, batches: Sequence[Batch]) -> list[list[Appended]]:
        """As for every database; some of a disk that is nearly full is kept back first."""
        if not self.in_memory:
            with suppress(OSError):
                self._keep_reserve()
        return super().append(batches)

    def _keep_reserve(self) -> None:
        disk = os.statvfs(os.path.dirname(self._reserve))
        free = disk.f_bavail * disk.f_frsize
        if free < _SCARCE_BYTES:
            size = min(_RESERVE_BYTES, free // 4)
            if size >= _LEAST_RESERVE_BYTES and not os.path.exists(self._reserve):
                with open(self._reserve, "xb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
            self._may_have_reserve = True
        elif self._may_have_reserve:
            self._may_have_reserve = False
            os.remove(self._reserve)

    def make_room(self) -> bool:
        """Give the reserve up, and move what is in the log to its place in the file: the log's space is free then."""
        try:
            os.remove(self._reserve)
        except OSError:
            return False
        with suppress(sqlite3.Error), self._in_use, closing(self.connect("keep")) as driver:
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return True

    # ----------------------------------------------------------------------------------------------------------- values

    def insert(
        self, session: Session, log: SqlLog, types: Mapping[str, FieldType], batches: Sequence[Batch]
    ) -> list[tuple[int, int]]:
        """One executemany for all; the write lock makes the offsets contiguous."""
        first = batches[0]
        binders = [_BINDERS.get(types[name].base) for name in first.columns]
        published = _iso_timestamp(datetime.fromtimestamp(self.clock(), UTC))
        driver = cast(sqlite3.Connection, session.driver)
        driver.executemany(
            _insert_sql(log.table, first.columns, first.extra is not None),
            chain.from_iterable(
                zip(*bound(batch, binders), repeat(published), publish_ids(batch), strict=False) for batch in batches
            ),
        )
        # With the check of `_check_number`, as one statement: each takes a part of the time of a publish.
        sql = f"SELECT last_insert_rowid(), (SELECT 1 FROM {self.streams} WHERE id = ? AND name = ?)"
        last, is_known = driver.execute(sql, (log.number, log.full)).fetchone()
        if not is_known:
            raise self.gone(log)
        first_rowid = last - sum(batch.count for batch in batches) + 1
        noted = -(-last // _NOTED) * _NOTED
        if first_rowid <= noted - _NOTED + 1:
            session.run(f"UPDATE {self.streams} SET head = ? WHERE id = ? AND head < ?", (noted, log.number, noted))
        return contiguous(batches, first_rowid)

    def _check_number(self, session: Session, log: SqlLog) -> None:
        """Raise where the stream was deleted: one that was created again may have other columns."""
        if session.row(f"SELECT 1 FROM {self.streams} WHERE id = ? AND name = ?", (log.number, log.full)) is None:
            raise self.gone(log)

    def fence(self, session: Session, log: SqlLog) -> int:
        self._check_number(session, log)
        return super().fence(session, log)

    def claim_keys(self, session: Session, log: SqlLog, keys: list[bytes], horizon: float) -> set[bytes]:
        """Under the write lock, where nobody else can claim the same."""
        now = int(self.clock() * 1e6)
        self._check_number(session, log)
        fresh = self.unseen(session, log, keys, now - int(horizon * 1e6))
        session.driver.executemany(
            f"REPLACE INTO {self.keys} (stream, id, seen) VALUES (?, ?, ?)",
            [(log.number, key, now) for key in sorted(fresh)],
        )
        return fresh

    def size(self, session: Session, log: SqlLog) -> int | None:
        """By a few events from four places, and how many there are: more takes a scan. Of many events that
        is the number of their offsets, and it never is more than the file."""
        floor = int(session.value(f"SELECT floor FROM {self.streams} WHERE id = ?", (log.number,)) or 0)
        end = self.end(session, log)
        lengths = ", ".join(map(_length_sql, map(self.quote, self.reflect(session, log.schema, log.name) or ())))
        sql = f"SELECT {lengths} FROM {log.table} WHERE {log.rowid} > ? ORDER BY {log.rowid} LIMIT {_WEIGHED}"
        places = sorted({floor + (end - floor) * quarter // 4 for quarter in range(4)})
        weighed: list[int] = [
            sum(row) + len(row) + _ROW_BYTES for place in places for row in session.rows(sql, (place,))
        ]
        if not weighed:
            return 0
        count = int(session.value(f"SELECT count(*) FROM (SELECT 1 FROM {log.table} LIMIT {_COUNTED})"))
        size = sum(weighed) * (count if count < _COUNTED else end - floor) // len(weighed)
        file = session.value("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        return min(size, int(file))

    decoders: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "bool": bool,
        "decimal": Decimal,
        "date": date.fromisoformat,
        # The events of one commit share their time of publication.
        "timestamp": lru_cache(maxsize=4096)(datetime.fromisoformat),
        "json": json.loads,
        "uuid": UUID,
    }

    # ---------------------------------------------------------------------------------------------------------- waiting

    def now(self) -> float:
        """This host's clock: a SQLite file lives on one host."""
        return self.clock()

    def changed(self, seen: object, timeout: float) -> object:
        """Poll `data_version`, which grows with every commit of another connection. One thread calls this."""
        timeout = min(timeout, _LOOK_SECONDS)
        deadline = time.monotonic() + timeout
        if self.in_memory:
            time.sleep(timeout)
            return None
        with self._in_use, self._watching:
            watcher = self._watcher
            if watcher is not None and not self._has_file(watcher):
                self._watcher = None
                self._leave(watcher)
            if self._watcher is None:
                self.check_open()
                self._watcher = self.connect("read")
                self._watchers += 1
            is_lasting = getattr(self._watcher, "is_lasting", True)
            try:
                while True:
                    if is_lasting:
                        # The versions that two connections see are not comparable.
                        version = (self._watchers, *self._watcher.execute("PRAGMA data_version").fetchone())
                        self._watcher.note_log()
                    else:  # there is no file yet, or it is read without locks
                        version = reading.state(self.path)
                    if version != seen or time.monotonic() >= deadline:
                        return version
                    time.sleep(_POLL_SECONDS)
            finally:
                if not is_lasting:
                    self._drop_watcher()

    def unwatch(self) -> None:
        """Close the connection that `changed` asks; the next call opens another."""
        with self._in_use, self._watching:
            self._drop_watcher()


def _length_sql(column: str) -> str:
    """How many bytes a value takes up, about; `column` is quoted."""
    kinds = "WHEN 'null' THEN 0 WHEN 'integer' THEN 4 WHEN 'real' THEN 8"
    return f"CASE typeof({column}) {kinds} ELSE length(CAST({column} AS BLOB)) END"


@lru_cache(maxsize=1024)
def _insert_sql(table: str, columns: tuple[str, ...], with_extra: bool) -> str:
    names = [*columns, *([EXTRA] if with_extra else []), PUBLISHED_AT, PUBLISH_ID]
    return f"INSERT INTO {table} ({', '.join(map(quote_name, names))}) VALUES ({', '.join('?' * len(names))})"


def _iso_timestamp(value: datetime) -> str:
    """A timestamp as text that sorts by time and that SQLite's date functions read."""
    return value.isoformat(timespec="microseconds")


_BINDERS: dict[str, Callable[[Any], Any]] = {
    "decimal": str,
    "date": date.isoformat,
    "timestamp": _iso_timestamp,
    "uuid": str,
}
