"""Token buckets that all processes of a host share.

A bucket is one number in a file: the moment at which it is full again (GCRA). Its lock is the kernel's, on the bytes
that hold it, so a process that is killed leaves none behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

# A name leads to a row of places, in one of which its bucket is.
_ROWS = 2048
_PLACE = struct.Struct("=16sd")
_PLACES = 8
_ROW_BYTES = _PLACES * _PLACE.size
_SMALLEST_WAIT = 1e-9
# To take one takes 4 µs, and milliseconds where a process is out of its turn while it holds the lock. Who waits here
# holds up its event loop: a lock whose holder was stopped is soon done without, and for a while not waited for again.
_LOCK_SECONDS = 0.5
_TRY_SECONDS = 0.0001
_WITHOUT_SECONDS = 10.0


class Rate(NamedTuple):
    """So many a second, and so many at once after a pause."""

    per_second: float
    burst: float

    @classmethod
    def of(cls, options: Mapping[str, float]) -> Rate:
        """As a stream declares it. Without a burst, what comes in a second may come at once."""
        per_second = options["requests_per_second"]
        return cls(per_second, options.get("burst", max(1.0, per_second)))


class Buckets:
    """The buckets in one file, by name."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # With blocks of its own: to write to a mapped file that the disk has no block for kills the process.
        os.posix_fallocate(self._file, 0, _ROWS * _ROW_BYTES)
        self._places = mmap.mmap(self._file, _ROWS * _ROW_BYTES)
        self._without_until = 0.0

    def take(self, name: str, rate: Rate) -> float:
        """Take one; 0, or in how many seconds there is one to take."""
        mark, row = _place_of(name)
        locked = self._lock(row)
        try:
            at, full = self._find(mark, row)
            wait, after = _wait(full, _now(), rate)
            if not wait:
                _PLACE.pack_into(self._places, at, mark, after)
            return wait
        finally:
            if locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN, _ROW_BYTES, row)

    def _lock(self, row: int) -> bool:
        """Whether it was given. Without it two may take the same one: a limit is then less exact, and nobody hangs."""
        deadline = None
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _ROW_BYTES, row)
                return True
            except (BlockingIOError, PermissionError):  # whichever POSIX lets the system choose
                now = _now()
            if deadline is None:
                deadline = now + _LOCK_SECONDS
            if now >= deadline or now < self._without_until:
                if now >= self._without_until:
                    self._without_until = now + _WITHOUT_SECONDS
                return False
            time.sleep(_TRY_SECONDS)

    def wait(self, name: str, rate: Rate) -> float:
        """In how many seconds there is one to take. Without the lock: whoever only looks may be a moment early."""
        return _wait(self._find(*_place_of(name))[1], _now(), rate)[0]

    def _find(self, mark: bytes, row: int) -> tuple[int, float]:
        """Where a bucket is, or may be put, and when it is full."""
        oldest, first_full = row, float("inf")
        for at in range(row, row + _ROW_BYTES, _PLACE.size):
            found, full = _PLACE.unpack_from(self._places, at)
            if found == mark:
                return at, full
            if full < first_full:
                oldest, first_full = at, full
        # Nothing is forgotten with a bucket that is full: one that is not there is full, too.
        return oldest, 0.0

    def close(self) -> None:
        """Close the file."""
        self._places.close()
        os.close(self._file)


def _place_of(name: str) -> tuple[bytes, int]:
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=20).digest()
    return digest[:16], int.from_bytes(digest[16:]) % _ROWS * _ROW_BYTES


def _now() -> float:
    """Of a clock that all processes of the host share, and that nobody sets."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _wait(full: float, now: float, rate: Rate) -> tuple[float, float]:
    """How long to wait for one, and when the bucket is full after it was taken."""
    each = 1 / rate.per_second
    room = each * rate.burst
    # No further ahead than an empty bucket can be: whatever else is there is not of this clock, or of an older rate.
    after = min(max(full, now), now + room) + each
    wait = after - now - room
    return (wait, full) if wait > _SMALLEST_WAIT else (0.0, after)
