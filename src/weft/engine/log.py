"""Spark's log: one file of the project, of bounded size, and the only place that Spark's JVM can write to."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

LIMIT = 10_000_000
"""Bytes that the log may grow to. What was there then is kept as `spark.log.1`."""
_INTERVAL = 5.0
CONFIGURATION = Path(__file__).with_name("log4j2.properties")


class EngineLog:
    """An open log. Everybody appends, so that processes of the same project can share it and it can be cut under them.

    Log4j's own rolling cannot: another process would go on writing into a file that has been renamed or removed.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        # For its owner only: a log may quote data, or what a driver says of a connection.
        self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.start = os.fstat(self.descriptor).st_size
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Keep the log below its limit from now on."""
        self.bound()
        self._thread = threading.Thread(target=self._watch, name="weft-spark-log", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            with suppress(OSError):  # a full disk: the next round may find room
                self.bound()

    def bound(self) -> None:
        """Move what is in the log aside if it is too much. A few lines that come meanwhile may be lost."""
        if os.fstat(self.descriptor).st_size <= LIMIT:
            return
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process of this project does it
        try:
            if os.fstat(self.descriptor).st_size > LIMIT:
                shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
                os.ftruncate(self.descriptor, 0)
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def tail(self, lines: int = 8) -> list[str]:
        """Return the last lines since this log was opened."""
        size = os.fstat(self.descriptor).st_size
        start = min(self.start, size) if size - self.start < 20_000 else size - 20_000
        text = os.pread(self.descriptor, size - start, start).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def close(self) -> None:
        """Stop watching. The JVM may still write."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self.descriptor)
