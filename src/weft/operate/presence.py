"""Which services, workers and schedulers there are, and which of them were heard of and are silent now.

Each holds a place in the run log, such as `process:worker:1`, and renews it while it lives. One that is stopped leaves
its place; what was killed keeps it until another one comes instead of it. A run log that does not answer keeps no
process from its work.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

from weft.operate.claims import PRESENCE_SECONDS, SILENT_DAYS
from weft.operate.runlog import RunLog
from weft.systems import process

KINDS = ("service", "worker", "scheduler")
_log = logging.getLogger("weft.operate")
_PREFIX = "process:"
# Places of each kind. Further processes have none, and are not shown.
_MOST = 40
_BEAT_SECONDS = PRESENCE_SECONDS / 3
# A run log that hangs does not keep the process.
_END_SECONDS = 5.0


def is_place(name: str) -> bool:
    """Return whether a name in the run log is that of a process's place, and of no pipeline."""
    return name.startswith(_PREFIX)


def _places(kind: str) -> list[str]:
    return [f"{_PREFIX}{kind}:{number}" for number in range(1, _MOST + 1)]


@contextmanager
def present(kind: str, opened: Callable[[], AbstractContextManager[RunLog]]) -> Iterator[None]:
    """Say in the run log during the block that this process lives, in a thread of its own."""
    stop = threading.Event()
    thread = threading.Thread(target=_attend, args=(kind, opened, stop), name="weft presence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_END_SECONDS)


def _attend(kind: str, opened: Callable[[], AbstractContextManager[RunLog]], stop: threading.Event) -> None:
    place: str | None = None
    while not stop.is_set():
        try:
            with opened() as log:
                if log.is_private:
                    return  # nobody else finds it
                while not stop.is_set():
                    if place is None or not log.attend(place):
                        place = _take_place(log, kind, stop)
                    stop.wait(_BEAT_SECONDS)
                if place is not None:
                    log.leave(place)
        except Exception as error:  # whatever it is: it is tried again, and the work goes on
            _log.debug("the run log does not know of this %s: %s", kind, error)
            stop.wait(_BEAT_SECONDS)


def _take_place(log: RunLog, kind: str, stop: threading.Event) -> str | None:
    states = log.latest(_places(kind))
    if any(each.is_live and _may_be_before_this(each.owner) for each in states.values()):
        # A container that was killed is started again under its name: its place is known to be free after a while.
        stop.wait(PRESENCE_SECONDS)
        states = log.latest(states)
    # First the place of one that was killed: this one comes instead of it.
    free = sorted((each for each in states.values() if not each.is_live), key=lambda each: each.owner is None)
    return next((each.pipeline for each in free if not stop.is_set() and log.attend(each.pipeline)), None)


def _may_be_before_this(owner: str | None) -> bool:
    return (
        owner is not None
        and process.host_of(owner)[0] == socket.gethostname()
        and not process.is_on_this_machine(owner)
    )


def processes(log: RunLog) -> list[dict[str, Any]]:
    """Return those that live, and those that ended without a word of late."""
    found = []
    for kind in KINDS:
        for state in log.latest(_places(kind)).values():
            if state.owner is None or state.expires_at is None or state.now is None:
                continue
            heard = state.expires_at - timedelta(seconds=PRESENCE_SECONDS)
            if not state.is_live and state.now - heard > timedelta(days=SILENT_DAYS):
                continue
            host, pid = process.host_of(state.owner)
            found.append(
                {
                    "kind": kind,
                    "pipeline": None,
                    "host": host,
                    "pid": pid,
                    "since": state.succeeded_at,
                    "heard": heard,
                    "lives": state.is_live,
                }
            )
    return found
