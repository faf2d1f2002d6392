"""Options of declarations: each is declared once, in the annotation that gives its name and type.

    class StreamingOptions(TypedDict, total=False):
        every: Annotated[str | timedelta | None, Option("The time between two batches.", check=interval)]

`Unpack[StreamingOptions]` is the signature for editors and type checkers. `options_of(StreamingOptions)` is the same at
run time: checks, the TOML file, its JSON Schema and the tables in the docs are made of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weft.errors import DeclarationError, did_you_mean, listed

Check = Callable[[Any, str, str], Any]
"""Takes a value, the name of its option and where it was said; returns the checked value or raises."""


@dataclass(frozen=True)
class Option:
    """What the annotation of an option says besides its name and type."""

    description: str = ""
    """One sentence, for the docs and the JSON Schema; empty where neither lists the option."""
    default: str | None = None
    """The default in words, where the value itself does not say it."""
    check: Check | None = None
    """By default the type decides: see `checked`."""
    key: str | None = ""
    """The key in a TOML file, such as `transform.sql`: the name of the option if empty; `None` if it has none there."""
    kinds: tuple[str, ...] = ()
    """What the TOML file takes, where the type does not say it."""
    inside: str | None = None
    """The table of the TOML file that it is, where the type does not say it."""
    field: str = ""
    """Where the checked value is kept, if not under the name of the option."""
    show: Callable[[Any], Any] = lambda value: value
    """Turns what is kept into what was written."""
    name: str = ""
    type: Any = None
    value: Any = None
    """The default itself, where a signature has it."""

    def checked(self, value: Any, where: str, word: str | None = None) -> Any:
        """Return the value as it is kept, or raise `DeclarationError`; errors call the option `word`."""
        if value is None and types.NoneType in typing.get_args(self.type):
            return None
        check = self.check or _check_of_type(self.type)
        return check(value, word or self.name, where)


def options_of(declared: Any) -> dict[str, Option]:
    """Return the options of a TypedDict, a function or a dataclass by name; a dataclass may have them in `__init__`."""
    hints = typing.get_type_hints(declared, include_extras=True)
    defaults = _defaults(declared)
    options = {}
    for name, hint in hints.items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, Option):
                options[name] = dataclasses.replace(
                    option,
                    name=name,
                    type=hint.__origin__,
                    key=name if option.key == "" else option.key,
                    field=option.field or name,
                    value=defaults.get(name),
                )
    if not options and dataclasses.is_dataclass(declared):
        return options_of(vars(declared)["__init__"])
    return options


def _defaults(declared: Any) -> dict[str, Any]:
    if isinstance(declared, type) and not dataclasses.is_dataclass(declared):
        return {}
    parameters = inspect.signature(declared).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def variants(hint: Any) -> list[Any]:
    """Return the types of a union without `None`, or the one type that it is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for each in typing.get_args(hint) if each is not types.NoneType]
    return [hint]


def choices(hint: Any) -> tuple[str, ...]:
    """Return the words of a `Literal`; none where the type is another."""
    # A class stands for no word of a file.
    (first, *more) = [each for each in variants(hint) if typing.get_origin(each) is not type]
    return typing.get_args(first) if not more and typing.get_origin(first) is typing.Literal else ()


def _check_of_type(hint: Any) -> Check:
    if words := choices(hint):
        return lambda value, option, where: one_of(value, words, option, where)
    return {str: text_option, int: count, bool: flag}[variants(hint)[0]]


def fits(value: object, hint: Any) -> bool:
    """Return whether a value is of an annotated type."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if hint is Any:
        return True
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint if origin is None else origin)


def type_name(hint: Any) -> str:
    """Return an annotated type as errors name it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace(" | None", "")


def look_like(declared: object, function: Callable[..., Any]) -> None:
    """Give a declaration the name and the docstring of its function."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        object.__setattr__(declared, attribute, getattr(function, attribute, None))


# --------------------------------------------------------------------------------------------------------------- checks


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Begin the declaration errors of a block with where they are."""
    try:
        yield
    except DeclarationError as error:
        raise DeclarationError(f"{where}: {error.what}", hint=error.hint) from None


def refuse_unknown(
    options: Iterable[str], known: Collection[str], where: str, title: str = "Options", noun: str = "option"
) -> None:
    """Raise for an unknown option, with the nearest known one."""
    for name in options:
        if name not in known:
            hint = did_you_mean(str(name), known, f"{title}: {', '.join(known)}.")
            raise DeclarationError(f"{where} has no {noun} {name!r}.", hint=hint)


def text_option(value: object, option: str, where: str) -> str | None:
    """Return a text that is not empty, or nothing."""
    if value is not None and (not isinstance(value, str) or not value):
        raise DeclarationError(f"{where}: {option} must be a text, not {value!r}.")
    return value


def one_of(value: Any, allowed: Sequence[str], option: str, where: str) -> Any:
    """Return one of a few words."""
    if value not in allowed:
        hint = listed(str(value), allowed, f"It can be {', '.join(map(repr, allowed))}.")
        raise DeclarationError(f"{where}: {option} is {value!r}.", hint=hint)
    return value


def count(value: Any, option: str, where: str) -> int:
    """Return a number of at least 1 that Spark takes."""
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise DeclarationError(f"{where}: {option} must be a whole number from 1 to 2,147,483,647, not {value!r}.")
    return value


def flag(value: object, option: str, where: str) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise DeclarationError(f"{where}: {option} must be True or False, not {value!r}.")
    return value


def column_names(value: Any, option: str, where: str = "") -> tuple[str, ...]:
    """Return names of columns, each once."""
    names = (value,) if isinstance(value, str) else value
    named = f"{where}: {option}" if where else option
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) and each for each in names):
        raise DeclarationError(f"{named} must be a list of column names.", hint=f'For example {option}=["id"].')
    if len(set(names)) != len(names):
        raise DeclarationError(f"{named} names a column twice.")
    return tuple(names)
