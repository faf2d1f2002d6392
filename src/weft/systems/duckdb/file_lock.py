"""Turns at a DuckDB file, by a lock on a file next to it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from weft.systems.file import MEMORY

_TURN_SECONDS, _TURN_PAUSE = 30.0, 0.002


@contextmanager
def waiting(path: str, *, exclusive: bool) -> Iterator[None]:
    """Wait for a turn at the database in `path`, and keep it during the block; readers share theirs."""
    with ExitStack() as stack:
        if path != MEMORY:
            # Where no lock can be made the database will say why.
            with suppress(OSError):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                _lock(stack.enter_context(open(f"{path}.lock", "a")), exclusive=exclusive)
        yield


def _lock(file: IO[str], *, exclusive: bool) -> None:
    """Lock a file; closing it unlocks it. A process that holds the lock for very long is not waited for."""
    deadline = time.monotonic() + _TURN_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_TURN_PAUSE)
