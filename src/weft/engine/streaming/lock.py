"""The lock of a checkpoint: one process at a time may go on from it.

On one machine that is a lock of the operating system's. A checkpoint at a URL is also leased, by files next to it, so
that no process of another machine goes on from it. A lease is not a lock: a process that is stopped in the middle of a
batch, for longer than the lease, and then goes on may finish that batch at the same time as its successor. It writes no
commit to Spark's log, and targets with a ledger take the batch once.
"""

from __future__ import annotations

import fcntl
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from weft.engine import session
from weft.errors import BusyError, StorageError
from weft.spark_support.folder import Location
from weft.spark_support.sessions import java_class
from weft.systems import process
from weft.systems.lease import FileLease, HeldError

_log = logging.getLogger("weft.engine")
# A JVM whose Python was killed ends by itself: it runs its hooks, and a busy machine takes its time.
_JVM_SECONDS = 60.0
# Six beats. The successor of a machine that died waits so long.
LEASE_SECONDS = 30.0
_HINT = "Stop that one first: two at one checkpoint would write over each other's log."


class Lock:
    """What the process that runs a pipeline holds: a file of this machine, and a lease where the checkpoint is at a
    URL."""

    def __init__(self, name: str, file: Path, location: str) -> None:
        """`location`: where the checkpoint is, for errors."""
        self._name, self._file, self._location = name, file, location
        self._held: IO[str] | None = None
        self._owner: dict[str, str] = {}
        self._lease: FileLease | None = None

    def take(self) -> None:
        """Keep others of this machine out, until `release` or the end of this process."""
        held = opened(self._file)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _read_note(held).get("process")
            held.close()
            raise BusyError(
                f"The pipeline {self._name!r} runs already" + (f", as {HeldError([owner])}." if owner else "."),
                hint=_HINT,
            ) from None
        before, this = _read_note(held), process.this_process()
        try:
            if before.get("process") != this:
                self._wait_for_jvm(before.get("jvm"))
        except BaseException:
            held.close()
            raise
        self._held, self._owner = held, {"process": this}
        self._note()

    def hold(self, spark: Any) -> None:
        """Go on holding it with this session, whose JVM outlives a process that is killed, by some seconds. One of the
        engine's stays for others: the engine ends the query that was left in it."""
        self._owner = {"process": process.this_process()}
        if not session.is_lent():
            number = java_class(spark, "java.lang.ProcessHandle").current().pid()
            self._owner["jvm"] = process.name_of(number)
        self._note()

    def lease(self, home: Location, lost: Callable[[], None]) -> None:
        """Keep other machines out too, by files in this folder. `lost` is called when another one took it."""
        if self._lease is not None:
            self._lease.folder = home.folder  # the one before may be of a JVM that ended
            self._lease.release()
        owner = tuple(self._owner.values())
        self._lease = FileLease(home.folder, home.path, owner, seconds=LEASE_SECONDS, lost=lost)
        try:
            self._lease.take()
        except HeldError as error:
            self._lease = None
            raise BusyError(f"The pipeline {self._name!r} runs already, as {error}.", hint=_HINT) from None

    def check(self) -> None:
        """Raise where another machine may have taken it."""
        if self._lease is not None and self._lease.is_lost:
            raise BusyError(
                f"The pipeline {self._name!r} no longer holds its checkpoint {self._location}: it was silent for too "
                "long, and another process may have taken it.",
                hint="Nothing more was committed here. It may be started again once no other runs.",
            )

    def release(self) -> None:
        """Let others have it."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(Exception):  # its JVM ended, or the store is away: then the lease ends by itself
                lease.release()
        held, self._held = self._held, None
        if held is not None:
            held.truncate(0)
            held.close()

    def holder(self) -> int | None:
        """Return the process of this machine that has it now."""
        noted = self._noted()
        return _pid(noted) if noted is not None and _is_there(noted) else None

    def last_holder(self) -> tuple[str, datetime] | None:
        """Return the name of the process that has it or ended without letting go of it, and since when."""
        noted = self._noted()
        with suppress(OSError):
            return None if noted is None else (noted, datetime.fromtimestamp(self._file.stat().st_mtime, UTC))
        return None

    def _noted(self) -> str | None:
        try:
            with self._file.open() as file:
                return _read_note(file).get("process")
        except OSError:
            return None

    def _note(self) -> None:
        if self._held is None:
            return
        try:
            self._held.truncate(0)
            self._held.write(json.dumps(self._owner))
            self._held.flush()
        except OSError as error:
            held, self._held = self._held, None
            with suppress(OSError):  # it tries to write again, and lets go of the file all the same
                held.close()
            raise StorageError(f"The lock {self._file} cannot be written: {error.strerror}.") from None

    def _wait_for_jvm(self, jvm: str | None) -> None:
        if jvm is None or not _is_there(jvm):
            return
        _log.warning("%s was killed; waiting for its JVM, process %s, to end", self._name, _pid(jvm))
        deadline = time.monotonic() + _JVM_SECONDS
        while _is_there(jvm):
            if time.monotonic() > deadline:
                raise BusyError(
                    f"The pipeline {self._name!r} was killed, and its JVM (process {_pid(jvm)}) still runs.",
                    hint=f"It was waited for {_JVM_SECONDS:.0f} seconds. End it: kill {_pid(jvm)}",
                )
            time.sleep(0.05)


def opened(lock: Path) -> IO[str]:
    """Return the file of a lock, made where it is missing."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        return lock.open("a+")
    except OSError as error:
        raise StorageError(
            f"The lock {lock} cannot be made: {error.strerror}.",
            hint="It is next to the checkpoint: let this user write there, or name another place.",
        ) from None


def _read_note(file: IO[str]) -> dict[str, str]:
    file.seek(0)
    try:
        note = json.loads(file.read())
    except ValueError:  # empty, or half of it was written
        return {}
    return note if isinstance(note, dict) else {}


def _pid(owner: str) -> int:
    return process.host_of(owner)[1]


def _is_there(owner: str) -> bool:
    """Return whether a process is known to live: those of other machines are not."""
    return process.is_on_this_machine(owner) and not process.has_ended(owner)
