"""Streams on SQLite: one writer at a time, so offsets are in commit order by themselves."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, ClassVar, cast
from uuid import UUID
from weakref import WeakSet

from weft.errors import BusyError, ConnectionFailedError, SchemaError, StorageError, WeftError
from weft.systems.base import Connection
from weft.systems.log import EXTRA, PUBLISH_ID, PUBLISHED_AT, ROWID, Batch
from weft.systems.sql.log import SqlLog
from weft.systems.sql.store import Role, Session, SqlStore, contiguous, publish_ids
from weft.systems.sqlite import reading
from weft.systems.sqlite.connection import SQLiteConnection
from weft.types import FieldType, comparable, from_sql

if TYPE_CHECKING:
    import pyarrow as pa

# How long a writer waits for another process's lock before it gives up with an error.
LOCK_SECONDS = 30.0
# SQLite's own busy handler sleeps up to 100 ms between tries, which starves a writer beside a busy one.
_RETRY_SECONDS = 0.0005
# Reading `data_version` costs some microseconds: at this pace a waiting process uses 1-3 % of a core and wakes within
# milliseconds.
_POLL_SECONDS = 0.003
# Who closes a store waits for a look to end.
_LOOK_SECONDS = 0.2


class SqliteStore(SqlStore):
    """A SQLite file in WAL mode. Publishes run under `synchronous=FULL`, bookkeeping under NORMAL."""

    dialect: ClassVar[str] = "sqlite"
    for_update: ClassVar[str] = ""
    now_sql: ClassVar[str] = "weft_now()"

    def __init__(self, connection: Connection, clock: Callable[[], float] = time.time) -> None:
        super().__init__(connection, clock)
        assert isinstance(self.connection, SQLiteConnection)
        self._file = self.connection
        self.path = self._file.path or ":memory:"
        self.in_memory = self.path == ":memory:"
        self._memory: sqlite3.Connection | None = None
        # One writer of this process at a time: the others wait here without asking SQLite again and again.
        self._writing = threading.Lock()
        self._watcher: sqlite3.Connection | None = None
        self._watchers = 0
        self._watching = threading.Lock()
        self._in_use = _InUse()
        if not self.in_memory:
            _stores.add(self)

    # ------------------------------------------------------------------------------------------------------ connections

    def connect(self, role: Role) -> sqlite3.Connection:
        """A connection with the durability of its role. Who only reads changes nothing, not even the journal mode."""
        if role == "read" and not self.in_memory:
            reader = reading.connect(self.path, LOCK_SECONDS)
            self._add_clock(reader)
            return reader
        if not self.in_memory:
            try:
                os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            except OSError as error:
                raise ConnectionFailedError(
                    f"The folder of the SQLite database {self.path} cannot be made: {error.strerror}."
                ) from None
        driver = sqlite3.connect(
            self.path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            self._add_clock(driver)
            driver.execute("PRAGMA journal_mode=WAL")
            driver.execute(f"PRAGMA synchronous={'FULL' if role == 'publish' else 'NORMAL'}")
            driver.execute("PRAGMA busy_timeout=0")  # `begin` waits by itself
        except BaseException:
            driver.close()
            raise
        return driver

    def _add_clock(self, driver: sqlite3.Connection) -> None:
        driver.create_function("weft_now", 0, lambda: int(self.clock() * 1e6))

    @contextmanager
    def session(self, role: Role) -> Iterator[Session]:
        """As for every database; an in-memory one has a single connection, which its users take in turn."""
        if self.in_memory:
            with self._lock:
                self.check_open()
                if self._memory is None:
                    self._memory = self.connect("publish")
                self._idle[role] = [(time.monotonic(), self._memory)]
                with super().session(role) as session:
                    yield session
        elif role == "read":
            with self._in_use, super().session(role) as session:
                yield session
        else:
            with self._in_use, self._writing, super().session(role) as session:
                yield session

    def before_fork(self) -> None:
        """Have no connection open while the process forks: the next use opens others, on both sides.

        SQLite keeps what it knows of its file locks in memory, and the child would have the memory without the locks:
        to it the file is in use, to everybody else it is not. So the parent's last close would remove the log that the
        child goes on writing to, with events that it has acknowledged.
        """
        self._in_use.stop()
        self.drop_idle()
        self._drop_watcher()

    def after_fork(self) -> None:
        """Go on."""
        self._in_use.go_on()

    def begin(self, driver: sqlite3.Connection, role: Role) -> None:
        """Take the write lock at once: a lock taken later could fail in the middle of the work."""
        if role == "read" or driver.in_transaction:
            return
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                driver.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def commit(self, driver: sqlite3.Connection, role: Role) -> None:
        """Commit; in WAL mode nobody can be in the way."""
        if role != "read":
            driver.execute("COMMIT")
        elif isinstance(driver, reading.ReadConnection) and driver.opened_at not in (None, reading.state(self.path)):
            raise BusyError(
                f"Somebody wrote to the SQLite database {self.path} while it was read, and what was read may be wrong.",
                hint="Read it again, or with the right to write to its folder: then readers and writers share it.",
            )

    def _rest(self, role: Role, driver: sqlite3.Connection) -> None:
        if isinstance(driver, reading.ReadConnection) and not driver.is_lasting:
            self._drop(driver)
        else:
            super()._rest(role, driver)

    def rollback(self, driver: sqlite3.Connection) -> None:
        """Undo what was open."""
        if driver.in_transaction:
            driver.execute("ROLLBACK")

    def execute(self, driver: sqlite3.Connection, sql: str, parameters: Sequence[Any] | None) -> sqlite3.Cursor:
        """Run a statement."""
        return driver.execute(sql, parameters or ())

    def translate_sql(self, sql: str) -> str:
        """SQLite's placeholder is ours."""
        return sql

    def is_driver_error(self, error: BaseException) -> bool:
        """Whether sqlite3 raised this."""
        return isinstance(error, sqlite3.Error)

    def explain(self, error: BaseException) -> WeftError:
        """By SQLite's result code."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        where = f"SQLite database {self.path}"
        if str(error).startswith("no such table") and not self.in_memory and not os.path.exists(self.path):
            return self._file.missing()
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return BusyError(
                f"{where} has been locked by another process for {LOCK_SECONDS:.0f} seconds.",
                hint="Nothing was stored. End the other transaction, then try again.",
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY):
            return StorageError(
                f"{where} cannot be written: {error}.",
                hint="Nothing was stored. Free disk space or check its permissions.",
            )
        if code == sqlite3.SQLITE_IOERR:
            # The disk may have failed to confirm a commit that it holds nevertheless.
            return StorageError(
                f"{where} cannot be read or written: {error}.",
                hint="If this was a publish, its events may or may not be stored. Check the disk and its free space.",
            )
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return ConnectionFailedError(
                f"{where} cannot be opened: {error}.",
                hint="Is it a SQLite file that you may read and write?"
                + (f" Try: weft connections check {self.connection.name}" if self.connection.name else ""),
            )
        if code in (sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH):
            return SchemaError(f"{where} refused a value: {error}.")
        return WeftError(f"{where}: {error}.")

    def close(self) -> None:
        """Close every connection; the one of a database in memory may be in use by another thread."""
        with self._lock:
            super().close()
            if self._memory is not None:
                self._memory.close()
            self._memory = None
            with self._watching:
                self._drop_watcher()

    def _drop_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    # ----------------------------------------------------------------------------------------------------------- tables

    def quote(self, name: str) -> str:
        """A quoted identifier."""
        return '"' + name.replace('"', '""') + '"'

    def table(self, schema: str, name: str) -> str:
        """SQLite has no schemas: the table is called "schema.name"."""
        return self.quote(f"{schema}.{name}")

    def names(self) -> list[tuple[str, str]]:
        """As for every database; asking does not make the file."""
        return super().names() if self.in_memory or os.path.exists(self.path) else []

    def reflect(self, session: Session, schema: str, name: str) -> dict[str, FieldType] | None:
        """Columns by PRAGMA table_info: the declared types say it all."""
        rows = session.rows("SELECT name, type FROM pragma_table_info(?) ORDER BY cid", (f"{schema}.{name}",))
        return {column: from_sql("sqlite", kind) for column, kind in rows} or None

    def create_catalogue(self, session: Session) -> None:
        """The four bookkeeping tables."""
        whole = "INTEGER NOT NULL"
        for statement in (
            # Without case, as SQLite compares the names of the tables: one table is one stream.
            f"CREATE TABLE IF NOT EXISTS {self.streams} (id INTEGER PRIMARY KEY, "
            f"name TEXT NOT NULL UNIQUE COLLATE NOCASE, head {whole} DEFAULT 0, floor {whole} DEFAULT 0)",
            f"CREATE TABLE IF NOT EXISTS {self.groups} (stream {whole}, consumer TEXT NOT NULL, position {whole}, "
            f"lost {whole}, untold {whole}, epoch {whole}, PRIMARY KEY (stream, consumer)) WITHOUT ROWID",
            f"CREATE TABLE IF NOT EXISTS {self.leases} (stream {whole}, consumer TEXT NOT NULL, first {whole}, "
            f"last {whole}, events {whole}, member TEXT NOT NULL, token TEXT NOT NULL, expires {whole}, "
            f"deliveries {whole}, reason TEXT, PRIMARY KEY (stream, consumer, first)) WITHOUT ROWID",
            f"CREATE TABLE IF NOT EXISTS {self.keys} (stream {whole}, id BLOB NOT NULL, seen {whole}, "
            "PRIMARY KEY (stream, id)) WITHOUT ROWID",
            f"CREATE INDEX IF NOT EXISTS {self.table('weft', 'keys_seen')} ON {self.keys} (stream, seen)",
        ):
            session.run(statement)

    def create_stream(self, session: Session, schema: str, name: str, columns: dict[str, FieldType]) -> None:
        """The table; AUTOINCREMENT never gives an offset twice, not even after the last events were trimmed."""
        spelled = ", ".join(
            f"{self.quote(ROWID)} INTEGER PRIMARY KEY AUTOINCREMENT"
            if column == ROWID
            else f"{self.quote(column)} {kind.sql('sqlite')}"
            for column, kind in columns.items()
        )
        session.run(f"CREATE TABLE IF NOT EXISTS {self.table(schema, name)} ({spelled})")
        session.run(f"INSERT OR IGNORE INTO {self.streams} (name) VALUES (?)", (f"{schema}.{name}",))

    def add_column(self, log: SqlLog, name: str, kind: FieldType) -> None:
        """ALTER TABLE under the write lock, where nobody else can add the same."""
        with self.session("publish") as session:
            present = self.reflect(session, log.schema, log.name) or {}
            if comparable(name) not in map(comparable, present):
                session.run(f"ALTER TABLE {log.table} ADD COLUMN {self.quote(name)} {kind.sql('sqlite')}")

    def insert_ignore(self, table: str, columns: Sequence[str]) -> str:
        """INSERT OR IGNORE."""
        return f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"

    # ----------------------------------------------------------------------------------------------------------- values

    def insert(self, session: Session, log: SqlLog, batches: Sequence[Batch]) -> list[tuple[int, int]]:
        """One executemany for all; the write lock makes the offsets contiguous."""
        types, first = log.types(), batches[0]
        binders = [_BINDERS.get(types[name].base) for name in first.columns]
        published = iso_timestamp(datetime.fromtimestamp(self.clock(), UTC))
        driver = cast(sqlite3.Connection, session.driver)
        driver.executemany(
            _insert_sql(log.table, first.columns, first.extra is not None),
            chain.from_iterable(self._rows(batch, binders, published) for batch in batches),
        )
        (last,) = driver.execute("SELECT last_insert_rowid()").fetchone()
        return contiguous(batches, last - sum(batch.count for batch in batches) + 1)

    @staticmethod
    def _rows(batch: Batch, binders: list[Callable[[Any], Any] | None], published: str) -> Iterator[tuple[Any, ...]]:
        columns: list[Any] = [
            values if bind is None else [None if v is None else bind(v) for v in values]
            for values, bind in zip(batch.values, binders, strict=True)
        ]
        if batch.extra is not None:
            columns.append(batch.extra)
        return zip(*columns, repeat(published), publish_ids(batch), strict=False)

    def claim_keys(self, session: Session, log: SqlLog, keys: list[bytes], horizon: float) -> set[bytes]:
        """Under the write lock, where nobody else can claim the same."""
        now = int(self.clock() * 1e6)
        oldest = now - int(horizon * 1e6)
        fresh = set(keys)
        for start in range(0, len(keys), 500):
            some = keys[start : start + 500]
            marks = ", ".join("?" * len(some))
            found = session.rows(
                f"SELECT id FROM {self.keys} WHERE stream = ? AND seen >= ? AND id IN ({marks})",
                (log.number, oldest, *some),
            )
            fresh.difference_update(bytes(key) for (key,) in found)
        session.driver.executemany(
            f"REPLACE INTO {self.keys} (stream, id, seen) VALUES (?, ?, ?)",
            [(log.number, key, now) for key in sorted(fresh)],
        )
        return fresh

    def bind(self, value: Any, kind: FieldType) -> Any:
        """One value as sqlite3 takes it."""
        bind = _BINDERS.get(kind.base)
        return value if bind is None or value is None else bind(value)

    decoders: ClassVar[dict[str, Callable[[Any], Any]]] = {}

    def arrow_batches(
        self, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
    ) -> Iterator[pa.RecordBatch]:
        """Columns are concatenated inside SQLite, in threads."""
        from weft.systems.sqlite import arrow

        return arrow.batches(self, log, after, upto, columns)

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
            if self._watcher is None:
                self.check_open()
                self._watcher = self.connect("read")
                self._watchers += 1
            while True:
                (version,) = self._watcher.execute("PRAGMA data_version").fetchone()
                # The versions that two connections see are not comparable.
                state = (self._watchers, version)
                if state != seen or time.monotonic() >= deadline:
                    return state
                time.sleep(_POLL_SECONDS)

    def unwatch(self) -> None:
        """Close the connection that `changed` asks; the next call opens another."""
        with self._in_use, self._watching:
            self._drop_watcher()


class _InUse:
    """Counts the threads that use connections; a fork waits for them, and keeps others from beginning."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = 0
        self._depth = threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._depth, "now", 0)
        if not depth:
            with self._changed:
                while self._stopped:
                    self._changed.wait()
                self._threads += 1
        self._depth.now = depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth.now -= 1
        if not self._depth.now:
            with self._changed:
                self._threads -= 1
                if self._stopped:
                    self._changed.notify_all()

    def stop(self) -> None:
        """Wait until nobody but this thread uses a connection. The lock is kept: a child must not find it taken."""
        self._changed.acquire()
        self._stopped = True
        own = 1 if getattr(self._depth, "now", 0) else 0
        self._changed.wait_for(lambda: self._threads == own)

    def go_on(self) -> None:
        """Let everybody go on."""
        self._stopped = False
        self._changed.notify_all()
        self._changed.release()


_stores: WeakSet[SqliteStore] = WeakSet()
_forking: list[SqliteStore] = []
_one_fork = threading.RLock()


def _before_fork() -> None:
    _one_fork.acquire()
    _forking.extend(_stores)
    for store in _forking:
        store.before_fork()


def _after_fork() -> None:
    while _forking:
        _forking.pop().after_fork()
    _one_fork.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


@lru_cache(maxsize=1024)
def _insert_sql(table: str, columns: tuple[str, ...], with_extra: bool) -> str:
    names = [*columns, *([EXTRA] if with_extra else []), PUBLISHED_AT, PUBLISH_ID]
    quoted = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
    return f"INSERT INTO {table} ({quoted}) VALUES ({', '.join('?' * len(names))})"


def iso_timestamp(value: datetime) -> str:
    """A timestamp as text that sorts by time and that SQLite's date functions read."""
    return value.isoformat(timespec="microseconds")


_BINDERS: dict[str, Callable[[Any], Any]] = {
    "decimal": str,
    "date": date.isoformat,
    "timestamp": iso_timestamp,
    "uuid": str,
}

SqliteStore.decoders = {
    "bool": bool,
    "decimal": Decimal,
    "date": date.fromisoformat,
    # The events of one commit share their time of publication.
    "timestamp": lru_cache(maxsize=4096)(datetime.fromisoformat),
    "json": json.loads,
    "uuid": UUID,
}
