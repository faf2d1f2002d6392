"""The log of a run: the messages of Python's logging, in a file of its own under `.weft/logs`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.operate.redaction import clean, project_secrets

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_KEPT_FILES = 1000
BUILDS = "weft-build"
"""The names of threads that each carry out a run of its own begin so: what one logs is not of the others' runs."""
# One run that writes without end must not fill the disk.
_MOST_BYTES = 10 * 1024 * 1024


def log_file(root: Path, run_id: str, attempt: int) -> Path:
    return root / ".weft" / "logs" / f"{run_id}-{attempt}.log"


class _BoundedFileHandler(logging.FileHandler):
    def __init__(self, file: Path) -> None:
        super().__init__(file, encoding="utf-8")
        # Read once: to resolve all connections takes longer than to write a line.
        self._secrets = project_secrets()

    def emit(self, record: logging.LogRecord) -> None:
        # A file that cannot be written to (a full disk) must not stop the work.
        with suppress(OSError):
            if self.stream is None or self.stream.tell() < _MOST_BYTES:
                super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record), known=self._secrets)


class _Verbose:
    """The level of the root logger, for runs in several threads: the first sets it, the last sets it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = logging.NOTSET

    def begin(self, logger: logging.Logger) -> None:
        with self._lock:
            if self._users == 0:
                self._before = logger.level
                logger.setLevel(min(self._before, logging.INFO))
            self._users += 1

    def end(self, logger: logging.Logger) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                logger.setLevel(self._before)


_verbose = _Verbose()


@contextmanager
def captured(root: Path, run_id: str, attempt: int) -> Iterator[None]:
    """Write the messages of all loggers to the attempt's file while the block runs."""
    file = log_file(root, run_id, attempt)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(file.parent)
        handler = _BoundedFileHandler(file)
    except OSError:
        # The folder cannot be written. The run log still records how the attempt ended.
        yield
        return
    handler.setFormatter(logging.Formatter(_FORMAT))
    own = threading.current_thread().name
    handler.addFilter(lambda record: record.threadName == own or not str(record.threadName).startswith(BUILDS))
    handler.setLevel(logging.INFO)
    root_logger = logging.getLogger()
    _verbose.begin(root_logger)
    root_logger.addHandler(handler)
    try:
        yield
    finally:
        root_logger.removeHandler(handler)
        _verbose.end(root_logger)
        handler.close()


def _remove_old(folder: Path) -> None:
    files = sorted(folder.glob("*.log"), key=lambda each: each.stat().st_mtime)
    for file in files[:-_KEPT_FILES]:
        file.unlink(missing_ok=True)
