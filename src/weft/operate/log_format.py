"""Log records as lines of JSON, of every command and of the service: one structure."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime

import msgspec

VARIABLE = "WEFT_LOG_FORMAT"
"""`json` or `text`. An option of a command sets it, so that the processes that the command starts log alike."""
# Attributes of a record that `extra=` may set, in the order in which they are printed.
_FIELDS = (
    *("pipeline", "run_id", "attempt", "slot", "hint"),
    *("request_id", "client", "method", "path", "status", "milliseconds", "worker", "url"),
    *("id", "key_id", "key_name", "action", "object", "outcome"),
)


def is_json() -> bool:
    """Whether logs were asked for as JSON."""
    return os.environ.get(VARIABLE) == "json"


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
            "process": os.getpid(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:
            # A value is not UTF-8, such as the name of a file: a record with an escape is better than none.
            return msgspec.json.encode({name: _valid(value) for name, value in line.items()}).decode()


def _valid(value: object) -> object:
    if value is None or isinstance(value, int | float | datetime):
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()


def command_line(message: str, levelname: str = "ERROR", **fields: object) -> str:
    """Return the line for what a command reports itself, which is no record of a logger."""
    said = {"name": "weft.cli", "levelname": levelname, "msg": message, **fields}
    return JsonFormatter().format(logging.makeLogRecord(said))
