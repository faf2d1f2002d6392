"""NOTIFY and LISTEN: how an append in one process wakes the readers of others.

Both only save time. Readers look for new events once a second without them, so every failure here is met with a pause
and another try.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

from weft.errors import ConnectionFailedError

CHANNEL = "weft_events"

# A NOTIFY inside each commit costs four fifths of the speed of single publishes; one after the commits of some
# milliseconds costs nothing.
_NOTIFY_SECONDS = 0.005
# How long a reader waits after a lost NOTIFY.
_POLL_SECONDS = 1.0
# Closing a store waits for a poll to end.
_LOOK_SECONDS = 0.2

Connect = Callable[[], "psycopg.Connection[Any]"]
_OUTSIDE = (psycopg.Error, ConnectionFailedError)


class Notifier:
    """A thread that sends NOTIFY after commits: at most once in some milliseconds, always after the last."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._wake = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self) -> None:
        """Something was committed."""
        self._wake.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._closed:
                    thread = threading.Thread(target=self._run, name="weft-notify", daemon=True)
                    thread.start()
                    self._thread = thread

    def close(self) -> None:
        """Send what is due, then end the thread."""
        with self._starting:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_POLL_SECONDS)

    def _run(self) -> None:
        driver: psycopg.Connection[Any] | None = None
        closed = False
        while not closed:
            self._wake.wait()
            closed = self._closed
            self._wake.clear()
            try:
                if driver is None:
                    driver = self._connect()
                driver.execute(f"NOTIFY {CHANNEL}")
            except _OUTSIDE:
                if driver is not None:
                    driver.close()
                    driver = None
            if not closed:
                time.sleep(_NOTIFY_SECONDS)
        if driver is not None:
            driver.close()


class Listener:
    """Waits for the NOTIFY of any process, on a connection of its own."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._driver: psycopg.Connection[Any] | None = None
        self._waiting = threading.Lock()
        self._state = 0
        self._polled = 0.0

    def wait(self, timeout: float) -> int:
        """Wait for a moment; the answer is another than before if something may have been appended."""
        timeout = min(timeout, _LOOK_SECONDS)
        with self._waiting:
            heard = False
            try:
                if self._driver is None:
                    # Events before LISTEN are not announced: let the caller look at once.
                    self._driver = self._connect()
                    self._driver.execute(f"LISTEN {CHANNEL}")
                    heard = True
                else:
                    heard = bool(list(self._driver.notifies(timeout=timeout, stop_after=1)))
            except _OUTSIDE:
                self._drop()
                time.sleep(timeout)
            if heard or time.monotonic() - self._polled >= _POLL_SECONDS:
                self._state += 1
                self._polled = time.monotonic()
            return self._state

    def close(self) -> None:
        """Close the connection; the next `wait` opens another. One that nobody reads would fill the server's queue."""
        with self._waiting:
            self._drop()

    def _drop(self) -> None:
        if self._driver is not None:
            with suppress(psycopg.Error):
                self._driver.close()
            self._driver = None
