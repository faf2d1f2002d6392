"""The log of a run: the messages of Python's logging, in a file of its own under `.weft/logs`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.operate.redaction import clean, project_secrets

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_KEPT_FILES = 1000
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
    handler.setLevel(logging.INFO)
    root_logger = logging.getLogger()
    before = root_logger.level
    root_logger.addHandler(handler)
    root_logger.setLevel(min(before, logging.INFO))
    try:
        yield
    finally:
        root_logger.removeHandler(handler)
        root_logger.setLevel(before)
        handler.close()


def _remove_old(folder: Path) -> None:
    files = sorted(folder.glob("*.log"), key=lambda each: each.stat().st_mtime)
    for file in files[:-_KEPT_FILES]:
        file.unlink(missing_ok=True)
