"""Sessions on a SQLite file: one writer at a time, any number of readers, and no connection open across a fork."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, ClassVar
from weakref import WeakSet

from weft.errors import (
    MAYBE_STORED,
    NOTHING_STORED,
    BusyError,
    ConnectionFailedError,
    SchemaError,
    StorageError,
    WeftError,
)
from weft.systems.base import Connection
from weft.systems.file_connection import MEMORY, file_number, is_file
from weft.systems.sql.driver import MissingTableError, Role, Session, SqlDriver, closed_on_error
from weft.systems.sqlite import reading
from weft.systems.sqlite.connection import SQLiteConnection

# How long a writer waits for another process's lock before it gives up with an error.
LOCK_SECONDS = 30.0
# SQLite's own busy handler sleeps up to 100 ms between tries, which starves a writer next to a busy one.
_RETRY_SECONDS = 0.0005
# So long a pause between two tries shows that this process stood still (SIGSTOP, a virtual machine that is moved), and
# perhaps the holder of the lock with it: the time says nothing about the lock.
_STILL_SECONDS = 1.0
# Others may lock the folder of the file too, for as long as they like.
_FOLDER_SECONDS = 1.0
_log = logging.getLogger(__name__)


class SqliteSessions(SqlDriver):
    """Pooled connections to a SQLite file in WAL mode. Publishes run under `synchronous=FULL`, bookkeeping under
    NORMAL unless the connection has `durable_acks`."""

    dialect: ClassVar[str] = "sqlite"
    driver_error: ClassVar[type[BaseException]] = sqlite3.Error
    takes_question_marks: ClassVar[bool] = True
    has_schemas: ClassVar[bool] = False
    connection: SQLiteConnection

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.path = self.connection.path or MEMORY
        self.in_memory = self.path == MEMORY
        self._memory: sqlite3.Connection | None = None
        # One writer of this process at a time: the others wait here without asking SQLite again and again.
        self._writing = threading.Lock()
        self._asked_at = 0.0
        """When the one that writes began to wait."""
        self._busy_since: float | None = None
        """Since when another process has held the lock."""
        self._in_use = _InUse()
        self._left: list[reading.TrackedConnection] = []
        """Connections to files that are not there now: as long as one is open, no other file has its number."""
        self._removing = threading.Lock()
        if not self.in_memory:
            _open_sessions.add(self)

    # ------------------------------------------------------------------------------------------------------ connections

    def connect(self, role: Role) -> reading.TrackedConnection:
        """Open a connection with the durability of its role. A reader changes nothing, not even the journal mode."""
        if self._left:
            self._remove_old_logs()
        if role == "read" and not self.in_memory:
            return reading.connect(self.path, LOCK_SECONDS)
        if not self.in_memory:
            self.connection.make_folder()
        while True:
            location = MEMORY if self.in_memory else os.path.realpath(self.path)
            number = None if self.in_memory else file_number(location)
            if number is None and not self.in_memory:
                self._make_file(location)
                number = file_number(location)
            driver = sqlite3.connect(
                location,
                timeout=0,  # `_run_when_free` waits
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
                factory=reading.TrackedConnection,
            )
            with closed_on_error(driver):
                # For the lock that this needs in a file of another mode, SQLite itself never waits.
                self._run_when_free(driver, "PRAGMA journal_mode=WAL")
                waits = role == "publish" or self.connection.durable_acks
                self._run_when_free(driver, f"PRAGMA synchronous={'FULL' if waits else 'NORMAL'}")
            if self.in_memory:
                return driver
            driver.location, driver.files = location, (number,)
            driver.note_log()
            if self._has_file(driver) and number is not None:
                return driver
            driver.close()  # somebody removed or replaced the file: which one it has open is not known

    def _make_file(self, location: str) -> None:
        """Make the file, without a log that another file of this name left behind, maybe to a process that uses it."""
        with suppress(OSError, sqlite3.OperationalError), self._removing, _locked(os.path.dirname(location)):
            if file_number(location) is None:
                for left in [each for each in self._left if each.location == location]:
                    self._remove_log(left)
                    self._forget_left(left)
                for suffix in reading.SUFFIXES[1:]:
                    with suppress(FileNotFoundError):
                        os.remove(f"{location}{suffix}")
                with closing(sqlite3.connect(location)) as driver:
                    driver.execute("PRAGMA journal_mode=WAL")

    def _borrow(self, role: Role) -> Any:
        """A connection to the file that is there now: somebody may have removed or replaced the one that was."""
        while True:
            driver = super()._borrow(role)
            if self._has_file(driver):
                return driver
            self._leave(driver)

    def _has_file(self, driver: reading.TrackedConnection) -> bool:
        return not driver.files or is_file(self.path, driver.files[0])

    def _leave(self, driver: reading.TrackedConnection) -> None:
        """Close the connections to a file that is not there any more, but one that knows the log."""
        _checkpoint(driver)
        super().drop_idle()
        self._left.append(driver)
        self.replaced()

    def _remove_old_logs(self) -> None:
        """Remove the logs of files that others have taken the place of: SQLite would take them for those of the new
        files. A file that is only away may come back, and others may use it: then it needs its log."""
        with self._removing:
            for driver in list(self._left):
                if file_number(driver.location) is None:
                    continue
                if not is_file(driver.location, driver.files[0]):
                    folder = os.path.dirname(driver.location)
                    try:
                        with _locked(folder):
                            self._remove_log(driver)
                    except BlockingIOError:
                        raise BusyError(
                            f"The SQLite database {self.path} was replaced, and the old one's log cannot be removed: "
                            f"another process has locked the folder {folder}.",
                            hint=f"{NOTHING_STORED} Try again once nobody locks the folder.",
                        ) from None
                    except OSError as error:
                        _log.warning("The log of a replaced SQLite file stays beside %s: %s.", driver.location, error)
                self._forget_left(driver)

    def _forget_left(self, driver: reading.TrackedConnection) -> None:
        with suppress(ValueError):  # where another thread closed them all
            self._left.remove(driver)
        self._drop(driver)

    def _remove_log(self, driver: reading.TrackedConnection) -> None:
        is_whole = _checkpoint(driver)
        for suffix, number in zip(reading.SUFFIXES[1:], driver.files[1:], strict=False):
            path = f"{driver.location}{suffix}"
            if number is None or file_number(path) != number:
                continue
            if is_whole or suffix != "-wal":
                os.remove(path)
                continue
            aside = f"{path}.{number[1]}"
            os.rename(path, aside)
            _log.warning(
                "The SQLite database %s was moved or replaced while somebody read it, and %s holds what was stored "
                "last. Move that beside the moved file, as its -wal, before anybody opens it.",
                driver.location,
                aside,
            )

    def drop_idle(self) -> None:
        super().drop_idle()
        with suppress(IndexError):
            while True:
                self._drop(self._left.pop())

    def replaced(self) -> None:
        """Called once the file is another one."""

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
            asked_at = time.monotonic()
            with self._in_use, self._writing:
                self._asked_at = asked_at
                with super().session(role) as session:
                    yield session

    def before_fork(self) -> None:
        """Have no connection open while the process forks: the next use opens others, on both sides.

        SQLite keeps what it knows of its file locks in memory, and the child would have the memory without the locks:
        to it the file is in use, to everybody else it is not. So the parent's last close would remove the log that the
        child goes on writing to, with events that it has acknowledged.
        """
        self._in_use.stop()
        self.drop_idle()

    def after_fork(self) -> None:
        self._in_use.go_on()

    def begin(self, driver: sqlite3.Connection, role: Role) -> None:
        """Take the write lock at once: a lock taken later could fail in the middle of the work."""
        if role != "read" and not driver.in_transaction:
            self._run_when_free(driver, "BEGIN IMMEDIATE")
            self._busy_since = None

    def _run_when_free(self, driver: sqlite3.Connection, sql: str) -> None:
        """Run a statement, as soon as no other process has the lock that it needs."""
        # The writers of this process wait in turn: those after the first have waited for the same lock already.
        begun_at = time.monotonic()
        since = begun_at if self._busy_since is None else max(self._asked_at, self._busy_since)
        deadline, tried = since + LOCK_SECONDS, begun_at
        while True:
            try:
                driver.execute(sql)
                return
            except sqlite3.OperationalError as error:
                now = time.monotonic()
                still = now - tried if now - tried > _STILL_SECONDS else 0.0
                deadline, tried = deadline + still, now
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or now > deadline:
                    raise
            self._busy_since = (self._busy_since or begun_at) + still
            time.sleep(_RETRY_SECONDS)

    def commit(self, driver: reading.TrackedConnection, role: Role) -> None:
        """Commit; in WAL mode no other process can block it."""
        if role != "read":
            driver.execute("COMMIT")
            if not self._has_file(driver):
                raise self.connection.replaced()
        elif isinstance(driver, reading.ReadConnection) and driver.opened_at not in (None, reading.state(self.path)):
            raise BusyError(
                f"Somebody wrote to the SQLite database {self.path} while it was read, and what was read may be wrong.",
                hint="Read it again, or with the right to write to its folder: then readers and writers share it.",
            )

    def _rest(self, role: Role, driver: reading.TrackedConnection) -> None:
        if isinstance(driver, reading.ReadConnection) and not driver.is_lasting:
            self._drop(driver)
            return
        driver.note_log()
        super()._rest(role, driver)

    def rollback(self, driver: sqlite3.Connection) -> None:
        if driver.in_transaction:
            driver.execute("ROLLBACK")

    def execute(self, driver: sqlite3.Connection, sql: str, parameters: Sequence[Any] | None) -> sqlite3.Cursor:
        return driver.execute(sql, parameters or ())

    def explain(self, error: BaseException) -> WeftError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        where = f"SQLite database {self.path}"
        if str(error).startswith("no such table"):
            if not self.in_memory and not os.path.exists(self.path):
                return self.connection.missing()
            return MissingTableError(f"{where}: {error}.")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return BusyError(
                f"{where} has been locked by another process for {LOCK_SECONDS:.0f} seconds.",
                hint=f"{NOTHING_STORED} End the other transaction, then try again.",
            )
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY):
            return StorageError(
                f"{where} cannot be written: {error}.",
                hint=f"{NOTHING_STORED} Free disk space or check its permissions.",
            )
        if code == sqlite3.SQLITE_IOERR:
            # The disk may have failed to confirm a commit that it holds nevertheless.
            return StorageError(
                f"{where} cannot be read or written: {error}.",
                hint=f"{MAYBE_STORED} Check the disk and its free space.",
            )
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return ConnectionFailedError(
                f"{where} cannot be opened: {error}.",
                hint="Is it a SQLite file that you may read and write?"
                + (f" Try: weft connections check {self.connection.name}" if self.connection.name else ""),
                is_transient=False,
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


def _checkpoint(driver: sqlite3.Connection) -> bool:
    """Move what is in the log to the file, wherever that is now; return whether it has all of it then."""
    try:
        busy, pages, moved = driver.execute("PRAGMA wal_checkpoint").fetchone()
    except sqlite3.Error:
        return False
    return not busy and pages == moved


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """One process at a time: what one removes must not be what another has just made. Raise `BlockingIOError` if
    another process keeps the lock."""
    number = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _FOLDER_SECONDS
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)
        yield
    finally:
        os.close(number)


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


_open_sessions: WeakSet[SqliteSessions] = WeakSet()
_forking: list[SqliteSessions] = []
_one_fork = threading.RLock()


def _before_fork() -> None:
    _one_fork.acquire()
    _forking.extend(_open_sessions)
    for sessions in _forking:
        sessions.before_fork()


def _after_fork() -> None:
    while _forking:
        _forking.pop().after_fork()
    _one_fork.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
