"""Token buckets that all processes of a host share.

A bucket is one number in a file: the moment at which it is full again (GCRA). Its lock is the kernel's, on the bytes
that hold it, so a process that is killed leaves none behind. The clock is `time.monotonic`, which all processes of a
host share, and which is never set.
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

# The hash of a name selects a row of places, in one of which its bucket is.
_ROWS = 2048
_PLACE = struct.Struct("=16sd")
_PLACES = 8
_ROW_BYTES = _PLACES * _PLACE.size
_SMALLEST_WAIT = 1e-9
# To take a token takes 4 µs, and milliseconds where the process that holds the lock is not scheduled. Waiting here
# blocks the event loop: if the holder of a lock was stopped, this process soon goes on without it, and for a while does
# not wait for it again.
_LOCK_SECONDS = 0.5
_TRY_SECONDS = 0.0001
_WITHOUT_SECONDS = 10.0


class Rate(NamedTuple):
    """So many a second, and so many at once after a pause."""

    per_second: float
    burst: float

    @classmethod
    def of(cls, options: Mapping[str, float]) -> Rate:
        """Return the rate that a stream declares. Without a burst, the requests of a second may come at once."""
        per_second = options["requests_per_second"]
        return cls(per_second, options.get("burst", max(1.0, per_second)))


class Buckets:
    """The buckets in one file, by name."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # With its disk blocks allocated: to write to a mapped file without them on a full disk kills the process.
        os.posix_fallocate(self._file, 0, _ROWS * _ROW_BYTES)
        self._places = mmap.mmap(self._file, _ROWS * _ROW_BYTES)
        self._without_until = 0.0

    def take(self, name: str, rate: Rate) -> float:
        """Take a token. Returns 0, or the seconds until there is one."""
        mark, row = _place_of(name)
        locked = self._lock(row)
        try:
            at, full = self._find(mark, row)
            wait, after = _wait(full, time.monotonic(), rate)
            if not wait:
                _PLACE.pack_into(self._places, at, mark, after)
            return wait
        finally:
            if locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN, _ROW_BYTES, row)

    def _lock(self, row: int) -> bool:
        """Lock a row, and return whether that succeeded. Without it two processes may take the same token: the limit is
        less exact, but nothing hangs."""
        deadline = None
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _ROW_BYTES, row)
                return True
            except (BlockingIOError, PermissionError):  # POSIX allows either
                now = time.monotonic()
            if deadline is None:
                deadline = now + _LOCK_SECONDS
            if now >= deadline or now < self._without_until:
                if now >= self._without_until:
                    self._without_until = now + _WITHOUT_SECONDS
                return False
            time.sleep(_TRY_SECONDS)

    def wait(self, name: str, rate: Rate) -> float:
        """Return the seconds until there is a token. Read without the lock, so it may be slightly out of date."""
        return _wait(self._find(*_place_of(name))[1], time.monotonic(), rate)[0]

    def _find(self, mark: bytes, row: int) -> tuple[int, float]:
        """Return where a bucket is, or may be put, and when it is full."""
        oldest, first_full = row, float("inf")
        for at in range(row, row + _ROW_BYTES, _PLACE.size):
            stored, full = _PLACE.unpack_from(self._places, at)
            if stored == mark:
                return at, full
            if full < first_full:
                oldest, first_full = at, full
        # A full bucket can be overwritten: a missing one counts as full.
        return oldest, 0.0

    def close(self) -> None:
        self._places.close()
        os.close(self._file)


def _place_of(name: str) -> tuple[bytes, int]:
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=20).digest()
    return digest[:16], int.from_bytes(digest[16:]) % _ROWS * _ROW_BYTES


def _wait(full: float, now: float, rate: Rate) -> tuple[float, float]:
    """Return how long to wait for a token, and when the bucket is full after it was taken."""
    each = 1 / rate.per_second
    room = each * rate.burst
    # No further ahead than an empty bucket can be: a later time is of another clock, or of an older rate.
    after = min(max(full, now), now + room) + each
    wait = after - now - room
    return (wait, full) if wait > _SMALLEST_WAIT else (0.0, after)
