"""The log of the service's processes on standard error: a line for each message, for machines or for people."""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from typing import Literal

from weft.operate.log_format import JsonFormatter, extra_fields

Format = Literal["json", "text"]


def configure(form: Format) -> None:
    """Set up the log of this process. Earlier handlers are removed: a line would appear twice."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else _TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("weft").setLevel(logging.INFO)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        extra = " ".join(f"{name}={value}" for name, value in extra_fields(record).items())
        line = f"{when} {record.levelname.lower():<7} {_printable(record.getMessage())} {_printable(extra)}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _printable(text: str) -> str:
    """Escape control characters: a text of a client must not add lines to the log, nor drive a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
