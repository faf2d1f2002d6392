"""What one process at a time may have, of all machines that see a folder or a bucket: a Delta table, a checkpoint.

A claim is a file that is made only if nobody made it: `lock/00000000000000000007.claim` says whose it is. Its holder
changes the length of `….beat` every few seconds. `….released` says that the claim ended: by its holder, or by somebody
who saw no beat for the time of a lease. Then the next number may be claimed.

Delta needs it because the clients that Spark has for folders and S3 cannot make a file only if it is not there: of two
commits at once both could believe that they won, and one load would be lost. So loads take turns.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from uuid import uuid4

from weft.errors import BusyError
from weft.spark_support.folder import Folder, LocalFolder
from weft.systems import process

_log = logging.getLogger("weft.engine")
BEAT_SECONDS = 5.0
"""How often a holder renews its claim."""
LEASE_SECONDS = 60.0
"""A holder that renewed nothing for so long, by the clock of the process that waits, is dead."""
WAIT_SECONDS = 3600.0
_LOOK_SECONDS = 0.2


class HeldError(Exception):
    """A living process holds it."""

    def __init__(self, owner: Sequence[str]) -> None:
        """`owner`: its processes, as `weft.systems.process` names them."""
        super().__init__(owner)
        self.owner = tuple(owner)

    def __str__(self) -> str:
        if not self.owner:
            return "another process"
        host, number = process.host_of(self.owner[0])
        return f"process {number} on {host}"


class FileLease:
    """The claim of this process to what `home` stands for."""

    def __init__(
        self,
        folder: Folder,
        home: str,
        owner: Sequence[str] = (),
        *,
        seconds: float | None = None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`owner`: the processes that must end before the claim does, this one first. Another thread calls `lost` when
        this process no longer holds the claim."""
        self.folder, self._home = folder, home
        self._owner = tuple(owner) or (process.this_process(),)
        self._seconds = LEASE_SECONDS if seconds is None else seconds
        self._claim = json.dumps({"owner": self._owner, "id": uuid4().hex}).encode()
        self._number = 0
        self._lost, self._renewed = lost, 0.0
        self._is_lost = False
        self._stop = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="weft-lease", daemon=True)

    def take(self, *, patience: float = 0.0) -> None:
        """Claim it, also from a dead holder. Raise `HeldError` if a living one has it after `patience` seconds."""
        began = changed = _now()
        seen: tuple[int, int | None] | None = None
        while True:
            names = self._names()
            last = max((int(each[:20]) for each in names), default=0)
            if not last or f"{_file(last)}.released" in names:
                before = _now()
                if self._create(last + 1):
                    self._renewed = before
                    self._beating.start()
                    return
                continue
            owner = self._owner_of(last)
            if owner and all(map(process.has_ended, owner)):
                self._end(last)
                continue
            # Not what is in it: S3's client may have kept that, or fail because it changes.
            state = (last, names.get(f"{_file(last)}.beat"))
            is_living = bool(owner) and process.is_on_this_machine(owner[0]) and not process.has_ended(owner[0])
            if state != seen:
                # Use our own clock: those of other machines may be wrong.
                is_living, changed = is_living or seen is not None, _now()
                if seen is None and not is_living:
                    _log.info("%s was claimed by %s; seeing whether that lives", self._home, HeldError(owner))
                seen = state
            elif _now() - changed > self._seconds:
                self._end(last)
                continue
            if is_living and _now() - began >= patience:
                raise HeldError(owner)
            time.sleep(_LOOK_SECONDS)

    def release(self) -> None:
        """Let others have it."""
        self._stop.set()
        if self._beating.ident is not None and self._beating is not threading.current_thread():
            self._beating.join()
        if self._number:
            self._end(self._number)
            # Older claims. A process that still believes to hold one finds it gone.
            self.folder.remove(f"{self._home}/{each}" for each in self._names() if int(each[:20]) < self._number)
            self._number = 0

    @property
    def is_lost(self) -> bool:
        """Whether another process may hold it by now. It is true before another one can claim it: a beat that failed
        does not count."""
        return self._is_lost or _now() - self._renewed > self._seconds - min(BEAT_SECONDS, self._seconds / 4)

    def _names(self) -> dict[str, int]:
        """Return the files of the claims with their sizes."""
        sizes = self.folder.files_in(self._home)
        return {name: size for name, size in sizes.items() if name[:20].isdecimal()}  # no drafts

    def _create(self, number: int) -> bool:
        path = f"{self._home}/{_file(number)}.claim"
        # Read again: a store that does not refuse the second of two has the last one's.
        if not self.folder.create(path, self._claim) or self.folder.read(path) != self._claim:
            return False
        self._number = number
        return True

    def _end(self, number: int) -> None:
        self.folder.create(f"{self._home}/{_file(number)}.released", b"")

    def _owner_of(self, number: int) -> tuple[str, ...]:
        try:
            return tuple(json.loads(self.folder.read(f"{self._home}/{_file(number)}.claim") or b"")["owner"])
        except (ValueError, LookupError):  # it is just being written
            return ()

    def _beat(self) -> None:
        count = 0
        own = _file(self._number)
        while not self._stop.wait(BEAT_SECONDS):
            count += 1
            before = _now()
            with suppress(Exception):  # it is tried again, until the lease ends
                names, claim = self._names(), self.folder.read(f"{self._home}/{own}.claim")
                if f"{own}.claim" not in names or f"{own}.released" in names or claim != self._claim:
                    self._is_lost = True
                else:
                    self.folder.write(f"{self._home}/{own}.beat", b"." * (count % 100))
                    self._renewed = before
            if self.is_lost:
                self._is_lost = True
                self._lost()
                return


@contextmanager
def table_lock(folder: Folder, path: str, name: str) -> Iterator[None]:
    """Hold the lock of the table at a path; others wait."""
    parent, _, last = path.rpartition("/")
    home = f"{parent}/_weft/{last}/lock"
    if isinstance(folder, LocalFolder):
        with _locked_file(home):
            yield
        return
    lease = FileLease(folder, home)
    try:
        lease.take(patience=WAIT_SECONDS)
    except HeldError:
        raise BusyError(
            f"Another load held {name} for {WAIT_SECONDS / 60:.0f} minutes.", hint=f"If none runs, remove {home}."
        ) from None
    try:
        yield
    finally:
        lease.release()


@contextmanager
def _locked_file(path: str) -> Iterator[None]:
    """A lock of the operating system's, which ends with its process."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _now() -> float:
    """Seconds since the machine started, those included in which it slept: others did not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _file(number: int) -> str:
    return f"{number:020}"
