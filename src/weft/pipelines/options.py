"""What declarations of pipelines have in common: connections as options, and functions that lend their name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from weft.errors import DeclarationError
from weft.project import short_path
from weft.settings import redact_url
from weft.systems.base import Connection

_LONGEST_SECONDS = timedelta(days=365).total_seconds()
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def interval(value: Any, option: str, where: str) -> float:
    """Return the seconds of a time such as "10s"."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    else:
        parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", value) if isinstance(value, str) else None
        seconds = float(parts[1]) * _MILLISECONDS[parts[2]] / 1000 if parts else 0.0
    if not 0.001 <= seconds <= _LONGEST_SECONDS:
        raise DeclarationError(
            f"{where}: {option} is {value!r}.",
            hint='It is a time such as "500ms", "10s", "1m" or "1h", or a timedelta.',
        )
    return seconds


def show_interval(seconds: float) -> str:
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def within(value: Any, option: str, where: str) -> float:
    """Return the seconds of a time in which something is expected."""
    seconds = interval(value, option, where)
    if seconds < 1:
        raise DeclarationError(f"{where}: {option} is {value!r}, less than a second.", hint='For example "2h".')
    return seconds


def connection_option(value: object, option: str, where: str) -> str | Connection | None:
    """Return a connection or its name, or nothing."""
    if value is None or isinstance(value, Connection):
        return value
    if not isinstance(value, str) or not value:
        raise DeclarationError(f"{where}: {option} must be a connection or its name, not {type(value).__name__}.")
    if "://" in value:
        raise DeclarationError(
            f"{where}: {option} is the URL {redact_url(value)!r}, where a name is needed.",
            hint="Pass weft.connect(url=…) instead.",
        )
    return value


def declared_at(function: Callable[..., Any]) -> str:
    """Return the file and line of a function, for errors."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return function.__module__ if code is None else f"{short_path(code.co_filename)}, line {code.co_firstlineno}"


def refuse_twice(what: str, declared: Any, known: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise where another declaration has this name. A reloaded module, or a cell that is run again, may repeat it."""
    present = known.get(declared.name)
    if present is None:
        return
    module = sys.modules.get(getattr(function, "__module__", ""))
    is_importing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if present.origin != declared.origin or (is_importing and present.declared_at != declared.declared_at):
        raise DeclarationError(
            f"{what} {declared.name!r} is declared twice: {present.declared_at} and {declared.declared_at}.",
            hint="Give one of them another name.",
        )
