"""Sessions on a DuckDB file. Nothing rests: while one process has the file open for writing, no other can open it."""

from __future__ import annotations

import fcntl
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, ClassVar

import duckdb

from weft.errors import NOTHING_STORED, BusyError, ConnectionFailedError, SchemaError, StorageError, WeftError
from weft.systems.base import Connection
from weft.systems.file_connection import MEMORY, FileConnection, file_number, is_file
from weft.systems.sql.driver import MissingTableError, Role, SqlDriver

# Nothing is ever downloaded: what a query needs beyond the package itself is its user's to install.
CONFIG = {"autoinstall_known_extensions": "false"}

# How long to wait for another process to close the file, or for another load of this process to end.
WAIT_SECONDS = 30.0
_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.25

# Databases in memory live as long as the process, by the name of their connection.
_memory: dict[str, duckdb.DuckDBPyConnection] = {}
_memory_lock = threading.Lock()

# The locks of the writers of this process, by file. A load may take long, and nothing is wrong with waiting for it.
TURN_SECONDS = 3600.0
_turns: dict[str, threading.Lock] = {}
_turns_lock = threading.Lock()


class DuckDBSessions(SqlDriver):
    """One connection a session, closed with it. Readers open the file read-only, so that other readers may too."""

    dialect: ClassVar[str] = "duckdb"
    driver_error: ClassVar[type[BaseException]] = duckdb.Error
    takes_question_marks: ClassVar[bool] = True
    connection: FileConnection

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._catalog: str | None = None
        self._turns: dict[int, threading.Lock] = {}
        self._files: dict[int, tuple[int, int] | None] = {}
        """The files that writers have open, by their numbers."""

    # ------------------------------------------------------------------------------------------------------ connections

    @property
    def path(self) -> str:
        """The file, or `:memory:`."""
        return self.connection.path or ""

    @property
    def catalog(self) -> str:
        """DuckDB's own name of the file: without it, `a.t` in the file a.duckdb could mean two things."""
        if self._catalog is None:
            with self.session("read" if self.path == MEMORY or os.path.exists(self.path) else "publish"):
                pass
        assert self._catalog is not None
        return self._catalog

    def connect(self, role: Role) -> duckdb.DuckDBPyConnection:
        """Open the file; wait some seconds for a process that has it open in another way."""
        with ExitStack() as undo:
            turn = self._take_turn() if role != "read" else None
            if turn is not None:
                undo.callback(turn.release)
            before = file_number(self.path)
            driver = self._in_memory() if self.path == MEMORY else self._wait_for_file(role == "read")
            undo.callback(driver.close)
            # The time zone decides what a date is as an instant.
            driver.execute("SET TimeZone = 'UTC'")
            if self._catalog is None:
                ((self._catalog,),) = driver.execute("SELECT current_database()").fetchall()
            undo.pop_all()
        if turn is not None:
            self._turns[id(driver)] = turn
            self._files[id(driver)] = before or file_number(self.path)
        return driver

    def _take_turn(self) -> threading.Lock:
        """One writer of this process at a time: DuckDB would let both begin, and the later one fail."""
        with _turns_lock:
            turn = _turns.setdefault(self.path if self.path != MEMORY else f":{self.connection.name}", threading.Lock())
        if not turn.acquire(timeout=TURN_SECONDS):
            raise BusyError(
                f"Another load of this process has been writing to {self.connection.label} for {TURN_SECONDS:.0f} s.",
                hint=f"{NOTHING_STORED} Try again when it is done.",
            )
        return turn

    def _in_memory(self) -> duckdb.DuckDBPyConnection:
        name = self.connection.name or ""
        with _memory_lock:
            if name not in _memory:
                _memory[name] = duckdb.connect(MEMORY, config=dict(CONFIG))
            return _memory[name].cursor()

    def _wait_for_file(self, read_only: bool) -> duckdb.DuckDBPyConnection:
        deadline = time.monotonic() + WAIT_SECONDS
        pause = _PAUSE_SECONDS
        while True:
            try:
                return self._open(read_only)
            except duckdb.Error as error:
                if not _is_held(error):
                    if read_only:
                        self.connection.refuse_missing()
                    raise self.connection.failed(_one_line(error)) from None
                if time.monotonic() > deadline:
                    raise self._held(error) from None
            # Not all waiting processes at the same moment.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _open(self, read_only: bool) -> duckdb.DuckDBPyConnection:
        if not read_only:
            self.connection.make_folder()
            return duckdb.connect(self.path, config=dict(CONFIG))
        try:
            return duckdb.connect(self.path, read_only=True, config=dict(CONFIG))
        except duckdb.ConnectionException as error:
            if not _is_held(error):
                raise
            # This process itself writes to it: readers share that.
            return duckdb.connect(self.path, config=dict(CONFIG))

    def _held(self, error: BaseException) -> BusyError:
        holder = re.search(r"held in (.*?) \(PID (\d+)\)", str(error))
        who = f"the process {holder[2]} ({holder[1]}) has" if holder else "another part of this process has"
        return BusyError(
            f"Cannot open {self.connection.label} ({self.connection.target}): {who} it open, and did not close it "
            f"within {WAIT_SECONDS:.0f} s.",
            hint="DuckDB lets one process write a file, or several read it. Close it there and run this again.",
        )

    def _rest(self, role: Role, driver: duckdb.DuckDBPyConnection) -> None:
        self._drop(driver)

    def _drop(self, driver: duckdb.DuckDBPyConnection) -> None:
        super()._drop(driver)
        self._files.pop(id(driver), None)
        if (turn := self._turns.pop(id(driver), None)) is not None:
            turn.release()

    # ----------------------------------------------------------------------------------------------------- transactions

    def begin(self, driver: duckdb.DuckDBPyConnection, role: Role) -> None:
        """Readers are in autocommit mode."""
        if role != "read":
            driver.execute("BEGIN TRANSACTION")

    def commit(self, driver: duckdb.DuckDBPyConnection, role: Role) -> None:
        super().commit(driver, role)
        if id(driver) in self._files and not is_file(self.path, self._files[id(driver)]):
            raise self.connection.replaced()

    def rollback(self, driver: duckdb.DuckDBPyConnection) -> None:
        """Undo what was open; a failed COMMIT did so itself."""
        with suppress(duckdb.TransactionException):
            driver.execute("ROLLBACK")

    def execute(self, driver: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] | None) -> Any:
        """Run a statement; the connection is its own cursor."""
        return driver.execute(sql, list(parameters)) if parameters else driver.execute(sql)

    # ----------------------------------------------------------------------------------------------------------- errors

    def explain(self, error: BaseException) -> WeftError:
        what = f"DuckDB ({self.connection.target}): {_one_line(error)}"
        if isinstance(error, duckdb.TransactionException) and "onflict" in what:
            return BusyError(what, hint=f"{NOTHING_STORED} Somebody else changed the same rows; try again.")
        if isinstance(error, duckdb.CatalogException) and re.search("Table with name .* does not exist", what):
            return MissingTableError(what)
        if is_rejection(error):
            return SchemaError(what)
        full = "Could not write file" in what or "No space left" in what
        if full or isinstance(error, duckdb.IOException | duckdb.OutOfMemoryException | duckdb.PermissionException):
            return StorageError(what, hint=f"{NOTHING_STORED} Check the disk's free space and the file's rights.")
        if isinstance(error, duckdb.InvalidInputException) and "read-only" in what:
            return StorageError(what, hint="A query of a source may only read.")
        if isinstance(error, duckdb.FatalException | duckdb.InternalException | duckdb.ConnectionException):
            return ConnectionFailedError(what)
        return WeftError(what)

    # ------------------------------------------------------------------------------------------------------------ names

    def table(self, schema: str, name: str) -> str:
        """With the catalogue's name, so that it cannot be taken for the schema's."""
        return f"{self.quote(self.catalog)}.{super().table(schema, name)}"


def is_rejection(error: BaseException) -> bool:
    """Whether DuckDB refused a value or a row."""
    if isinstance(error, duckdb.InvalidInputException):
        return "read-only" not in str(error)
    if isinstance(error, duckdb.TransactionException):
        return "constraint" in str(error)  # found at the COMMIT
    return isinstance(
        error,
        duckdb.ConstraintException
        | duckdb.ConversionException
        | duckdb.OutOfRangeException
        | duckdb.TypeMismatchException,
    )


def _is_held(error: BaseException) -> bool:
    # The last one: another thread of this process is about to close it.
    reasons = ("Could not set lock on file", "different configuration", "Resource In Use", "file handle conflict")
    return any(reason in str(error) for reason in reasons)


def _one_line(error: BaseException) -> Exception:
    # The lines that follow show the statement, which may hold values.
    return Exception(str(error).strip().partition("\n")[0].partition(" See also")[0])


# ---------------------------------------------------------------------------------------------- turns of many processes

_FILE_TURN_SECONDS, _FILE_TURN_PAUSE = 30.0, 0.002


@contextmanager
def waiting_turn(path: str, *, exclusive: bool) -> Iterator[None]:
    """Wait for a turn at the database in `path`, by a lock on a file next to it; readers share theirs."""
    with ExitStack() as stack:
        if path != MEMORY:
            # Where no lock can be made the database will say why.
            with suppress(OSError):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _lock(stack.enter_context(open(f"{path}.lock", "a")), exclusive=exclusive)
        yield


def _lock(file: IO[str], *, exclusive: bool) -> None:
    """Lock a file; closing it unlocks it. A process that holds the lock for very long is not waited for."""
    deadline = time.monotonic() + _FILE_TURN_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_FILE_TURN_PAUSE)
