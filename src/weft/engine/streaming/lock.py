"""Who may go on from a checkpoint: one process at a time."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import IO, Any

from weft.errors import BusyError
from weft.systems.objects.manifest import process_of

_log = logging.getLogger("weft.engine")
# A JVM whose Python was killed ends by itself: it runs its hooks, and a busy machine takes its time.
_JVM_SECONDS = 60.0


class Lock:
    """A file of this machine, held by the process that runs the pipeline."""

    def __init__(self, name: str, file: Path) -> None:
        self._name, self._file = name, file
        self._held: IO[str] | None = None

    def take(self) -> None:
        """Keep others of this machine out, until `release` or the end of this process."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        held = self._file.open("a+")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _pid(_read_note(held).get("process"))
            held.close()
            raise BusyError(
                f"The pipeline {self._name!r} runs already" + (f", as process {owner}." if owner else "."),
                hint="Stop that one first: two at one checkpoint would write over each other's log.",
            ) from None
        before, this = _read_note(held), process_of(os.getpid())
        try:
            if before.get("process") != this:
                self._wait_for_jvm(before.get("jvm"))
        except BaseException:
            held.close()
            raise
        self._held = held
        self._note(process=this)

    def note_jvm(self, spark: Any) -> None:
        """Write down which JVM runs the query: it outlives a process that is killed, by some seconds."""
        number = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
        self._note(process=process_of(os.getpid()), jvm=process_of(number))

    def release(self) -> None:
        """Let others have it."""
        held, self._held = self._held, None
        if held is not None:
            held.truncate(0)
            held.close()

    def holder(self) -> int | None:
        """The process that has it now."""
        try:
            with self._file.open() as file:
                noted = _read_note(file).get("process")
        except OSError:
            return None
        return _pid(noted) if _is_there(noted) else None

    def _note(self, **processes: str) -> None:
        if self._held is not None:
            self._held.truncate(0)
            self._held.write(json.dumps(processes))
            self._held.flush()

    def _wait_for_jvm(self, noted: object) -> None:
        if _is_there(noted):
            _log.warning("%s was killed; waiting for its JVM, process %s, to end", self._name, _pid(noted))
        deadline = time.monotonic() + _JVM_SECONDS
        while _is_there(noted):
            if time.monotonic() > deadline:
                raise BusyError(
                    f"The pipeline {self._name!r} was killed, and its JVM (process {_pid(noted)}) still runs.",
                    hint=f"It was waited for {_JVM_SECONDS:.0f} seconds. End it: kill {_pid(noted)}",
                )
            time.sleep(0.05)


def _read_note(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        found = json.loads(file.read())
    except ValueError:  # empty, or half of it was written
        return {}
    return found if isinstance(found, dict) else {}


def _pid(noted: object) -> int | None:
    return int(noted.partition(":")[0]) if isinstance(noted, str) else None


def _is_there(noted: object) -> bool:
    number = _pid(noted)
    try:
        os.readlink(f"/proc/{number}/exe")
    except FileNotFoundError:  # nor has one that ended and that nobody asked for yet
        return False
    except OSError:
        pass  # another user's
    return number is not None and process_of(number) == noted
