"""Keeps a claim while its run works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weft.operate.records import ClaimedRun
from weft.operate.runlog import RunLog

# An unreachable database must not hold up the end of a run.
_JOIN_SECONDS = 5.0


@contextmanager
def heartbeat(log: RunLog, run: ClaimedRun) -> Iterator[None]:
    """Renew the claim of a run three times per lease, in a thread, during the block or until the claim is lost."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(run.lease_seconds / 3) and log.heartbeat(run):
            pass

    thread = threading.Thread(target=beat, name=f"weft heartbeat of {run.pipeline}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_JOIN_SECONDS)
