"""What declarations of pipelines have in common: options that are checked, and functions that lend their name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from weft.errors import DeclarationError, nearest
from weft.project import short_path
from weft.settings import redact_url
from weft.systems.base import Connection

# -------------------------------------------------------------------------------------------------------------- options


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Begin the declaration errors of a block with where they are."""
    try:
        yield
    except DeclarationError as error:
        raise DeclarationError(f"{where}: {error.what}", hint=error.hint) from None


def refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise for an option that there is not, with the nearest one."""
    for name in given:
        if name not in known:
            close = nearest(name, known)
            hint = f"Did you mean {close!r}?" if close else f"Options: {', '.join(known)}."
            raise DeclarationError(f"{where} has no option {name!r}.", hint=hint)


def connection_option(given: object, option: str, where: str) -> str | Connection | None:
    """A connection or its name, or nothing."""
    if given is None or isinstance(given, Connection):
        return given
    if not isinstance(given, str) or not given:
        raise DeclarationError(f"{where}: {option} must be a connection or its name, not {type(given).__name__}.")
    if "://" in given:
        raise DeclarationError(
            f"{where}: {option} is the URL {redact_url(given)!r}, where a name is needed.",
            hint="Pass weft.connect(url=…) instead.",
        )
    return given


def text_option(given: object, option: str, where: str) -> str | None:
    """A text that is not empty, or nothing."""
    if given is not None and (not isinstance(given, str) or not given):
        raise DeclarationError(f"{where}: {option} must be a text, not {given!r}.")
    return given


def one_of(given: Any, allowed: Sequence[str], option: str, where: str) -> Any:
    """One of a few words."""
    if given not in allowed:
        close = nearest(str(given), allowed)
        hint = f"Did you mean {close!r}? " if close else ""
        raise DeclarationError(
            f"{where}: {option} is {given!r}.", hint=f"{hint}It can be {', '.join(map(repr, allowed))}."
        )
    return given


# ------------------------------------------------------------------------------------------------------------ functions


def place_of(function: Callable[..., Any]) -> str:
    """The file and line of a function, for errors."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return function.__module__ if code is None else f"{short_path(code.co_filename)}, line {code.co_firstlineno}"


def look_like(made: object, function: Callable[..., Any]) -> None:
    """Give what was made of a function its name and its docstring."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        object.__setattr__(made, attribute, getattr(function, attribute, None))


def is_second(function: Callable[..., Any], place: str, present: str) -> bool:
    """Whether a module that has a declaration of this name at `present` has another one at `place`: it is no reload of
    the module then, and no cell that is run again."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    is_importing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return bool(is_importing) and present != place
