"""What declarations of pipelines have in common: connections as options, and functions that lend their name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from weft.errors import DeclarationError
from weft.project import short_path
from weft.settings import redact_url
from weft.systems.base import Connection

AnyConnection = str | Connection | type[Any]
"""A connection or its name. A type checker takes what `@weft.connection` decorates for a class."""


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


def place_of(function: Callable[..., Any]) -> str:
    """Return the file and line of a function, for errors."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return function.__module__ if code is None else f"{short_path(code.co_filename)}, line {code.co_firstlineno}"


def look_like(declared: object, function: Callable[..., Any]) -> None:
    """Give a declaration the name and the docstring of its function."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        object.__setattr__(declared, attribute, getattr(function, attribute, None))


def is_second(function: Callable[..., Any], place: str, present: str) -> bool:
    """Return whether a module that has a declaration of this name at `present` has another one at `place`.

    It is no reload of the module then, and no cell that is run again.
    """
    module = sys.modules.get(getattr(function, "__module__", ""))
    is_importing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return bool(is_importing) and present != place
