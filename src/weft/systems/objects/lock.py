"""One load at a time writes to a Delta table.

Delta decides which of two commits wins by who makes a file first, and the clients that Spark has for folders and S3
cannot make a file only if it is not there: two processes could both believe that they won, and one load would be lost.
So loads take turns.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from weft.errors import BusyError
from weft.systems.objects.folder import Folder, LocalFolder
from weft.systems.objects.manifest import process_of

BEAT_SECONDS = 5.0
"""So often a holder says that it lives."""
LEASE_SECONDS = 60.0
"""A holder that was silent for so long, by the clock of whoever waits, is dead."""
WAIT_SECONDS = 3600.0


@contextmanager
def table_lock(folder: Folder, path: str, name: str) -> Iterator[None]:
    """Hold the lock of the table at a path; others wait."""
    parent, _, last = path.rpartition("/")
    home = f"{parent}/_weft/{last}/lock"
    if isinstance(folder, LocalFolder):
        with _locked_file(home):
            yield
        return
    number = _claimed(folder, home, name)
    stop = threading.Event()
    beating = threading.Thread(target=_beat, args=(folder, home, number, stop), daemon=True)
    beating.start()
    try:
        yield
    finally:
        stop.set()
        beating.join()
        folder.create(f"{home}/{_file(number)}.released", b"")
        folder.remove(f"{home}/{each}" for each in folder.files_in(home) if int(each[:20]) < number)


@contextmanager
def _locked_file(path: str) -> Iterator[None]:
    """A lock of the operating system's, which ends with its process."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _claimed(folder: Folder, home: str, name: str) -> int:
    """The number of our claim: made only if nobody has it, and only when the one before is released or dead."""
    owner = json.dumps({"host": socket.gethostname(), "process": process_of(os.getpid()), "id": uuid4().hex}).encode()
    deadline = time.monotonic() + WAIT_SECONDS
    seen: tuple[object, float] = (None, 0.0)
    while time.monotonic() < deadline:
        names = folder.files_in(home)
        last = max((int(each[:20]) for each in names), default=0)
        if not last or f"{_file(last)}.released" in names or _is_dead(folder, home, last):
            if folder.create(f"{home}/{_file(last + 1)}.claim", owner):
                return last + 1
            continue
        # By our own clock: those of other machines may be wrong.
        state = (last, *sorted(each for each in names if int(each[:20]) == last))
        if seen[0] != state:
            seen = (state, time.monotonic())
        elif time.monotonic() - seen[1] > LEASE_SECONDS:
            folder.create(f"{home}/{_file(last)}.released", b"")
        time.sleep(0.2)
    raise BusyError(
        f"Another load held {name} for {WAIT_SECONDS / 60:.0f} minutes.",
        hint=f"If none runs, remove {home}.",
    )


def _is_dead(folder: Folder, home: str, number: int) -> bool:
    """Whether a claim is of a process of this machine that is gone."""
    found = folder.read(f"{home}/{_file(number)}.claim")
    if found is None:
        return False
    owner = json.loads(found)
    if owner["host"] != socket.gethostname():
        return False
    return bool(process_of(int(owner["process"].partition(":")[0])) != owner["process"])


def _beat(folder: Folder, home: str, number: int, stop: threading.Event) -> None:
    count = 0
    while not stop.wait(BEAT_SECONDS):
        count += 1
        # A new name each time, so that a listing shows it.
        folder.create(f"{home}/{_file(number)}.beat.{count}", b"")
        folder.remove([f"{home}/{_file(number)}.beat.{count - 1}"])


def _file(number: int) -> str:
    return f"{number:020}"
