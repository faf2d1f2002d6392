"""The run log of a command that stays: opened once it answers."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from weft.errors import BusyError, ConnectionFailedError

if TYPE_CHECKING:
    from weft.operate.runlog import RunLog


@contextmanager
def run_log_that_answers(
    url: str | None,
    pause: float,
    log: logging.Logger,
    *,
    stopping: threading.Event | None = None,
    away: Callable[[], None] = lambda: None,
) -> Iterator[RunLog]:
    """Open the run log, and try again until it answers; `away` is called where it does not. Where a signal comes first,
    or `stopping` is set, the process ends."""
    from weft.operate.runlog import open_run_log
    from weft.operate.supervisor import signalled

    opened, warned, stopping = None, False, stopping or threading.Event()
    with ExitStack() as held:
        with signalled(stopping.set):
            while opened is None and not stopping.is_set():
                try:
                    opened = held.enter_context(open_run_log(url))
                except ConnectionFailedError as error:
                    # A log that refuses this user, or knows no such database, will refuse each time.
                    if not (error.is_transient or isinstance(error, BusyError)):
                        raise
                    if not warned:
                        text = "the run log cannot be opened, and is tried again every %g seconds: %s"
                        log.warning(text, pause, error.what)
                    warned = True
                    away()
                    stopping.wait(pause)
        if opened is None or stopping.is_set():
            sys.exit()
        yield opened
