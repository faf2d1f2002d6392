"""Opening a SQLite file to read it, which changes nothing: no file is made, and no journal mode is set."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from weft.errors import ConnectionFailedError
from weft.systems.file_connection import MEMORY, file_number

# The suffixes of a database, its log and the log's index.
SUFFIXES = ("", "-wal", "-shm")
# Where the header of a file says that it has a write-ahead log, and how.
_MODE_AT, _WITH_LOG = 18, b"\x02"


class TrackedConnection(sqlite3.Connection):
    """A connection that knows which files it has open, by their numbers."""

    location: str = ""
    """The path of the file when it was opened, without symbolic links: SQLite puts the log beside the real file."""
    files: tuple[tuple[int, int] | None, ...] = ()
    """The numbers of the database, its log and the log's index, at first of the database alone; nothing in memory."""

    def note_log(self) -> None:
        """Note the numbers of the log, once SQLite has opened it. Those beside another file are not ours."""
        if not self.files or (len(self.files) == len(SUFFIXES) and None not in self.files):
            return
        number = self.files[0]
        if file_number(self.location) == number:
            logs = [file_number(f"{self.location}{suffix}") for suffix in SUFFIXES[1:]]
            if file_number(self.location) == number:
                self.files = (number, *logs)


class ReadConnection(TrackedConnection):
    """A connection of a reader."""

    is_lasting = True
    """Whether the next reader may have it too: the file that it reads is the one that is there."""
    opened_at: tuple[int, int] | None = None
    """The state of a file that is read without locks, so that writers neither wait nor are noticed."""


def connect(path: str, timeout: float) -> ReadConnection:
    """A connection to a file; where there is none, to an empty database in memory, which is what a missing file is
    before the first write makes it."""
    if not os.path.exists(path):
        empty = _connect(MEMORY, timeout)
        empty.is_lasting = False
        return empty
    path = os.path.realpath(path)
    options = _options(path)
    opened_at, number = state(path), file_number(path)
    reader = _connect(f"{Path(path).as_uri()}?{options}", timeout, uri=True)
    if "immutable" in options:
        reader.is_lasting, reader.opened_at = False, opened_at
    # The log is opened by the first read. One that was replaced meanwhile is found to be at the next use.
    reader.location, reader.files = path, (number,)
    return reader


def _connect(location: str, timeout: float, **options: Any) -> ReadConnection:
    return sqlite3.connect(
        location,
        timeout=timeout,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        factory=ReadConnection,
        **options,
    )


def _options(path: str) -> str:
    """How SQLite shall open the file.

    A log needs an index next to it. A process that may write creates it, and removes it at the end. Others cannot
    create it, and must not where the folder alone would let them: the file's owner could not write an index of theirs.
    """
    if _may_write(path) and _may_write(os.path.dirname(path)):
        return "mode=rw"
    if not _has_log(path):
        return "mode=ro"
    log, index = f"{path}-wal", f"{path}-shm"
    if os.path.exists(log) and os.path.exists(index):
        return "mode=ro&readonly_shm=1"
    if os.path.exists(log) and os.path.getsize(log):
        raise ConnectionFailedError(
            f"The SQLite database {path} has rows in {log}, which can only be read together with {index}.",
            hint="You may not make that file. Copy the first two to a folder of yours, and read them there.",
        )
    # Nobody uses the file, and it is all there is.
    return "immutable=1"


def _may_write(path: str) -> bool:
    return os.access(path, os.W_OK, effective_ids=True)


def _has_log(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(_MODE_AT)
            return file.read(1) == _WITH_LOG
    except OSError as error:
        raise ConnectionFailedError(f"The SQLite database {path} cannot be read: {error.strerror}.") from None


def state(path: str) -> tuple[int, int]:
    """Return a value that changes once somebody has written to a file, or has removed it."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0
    return status.st_mtime_ns, status.st_size
