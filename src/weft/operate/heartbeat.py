"""Keeps a claim while its run works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.operate.records import ClaimedRun
from weft.operate.runlog import RunLog

# An unreachable database must not hold up the end of a run.
_JOIN_SECONDS = 5.0


@contextmanager
def heartbeat(log: RunLog, run: ClaimedRun, cancelled: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Renew the claim of a run three times per lease, in a thread, during the block or until the claim is lost. Call
    `cancelled`, once, where somebody cancelled the run."""
    stop, telling = threading.Event(), threading.Lock()

    def beat() -> None:
        is_told = False
        while not stop.wait(run.lease_seconds / 3) and log.heartbeat(run):
            # After the block the main thread may carry out another run, which the signal would end.
            with telling:
                if not is_told and not stop.is_set() and log.is_cancelled(run):
                    is_told = True
                    cancelled()

    thread = threading.Thread(target=beat, name=f"weft heartbeat of {run.pipeline}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with telling:
            stop.set()
        thread.join(_JOIN_SECONDS)
