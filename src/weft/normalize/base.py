"""What a normalizer is, and how its arguments are checked. Nothing heavy is imported: declarations import this."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from weft.errors import DeclarationError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlglot import exp

    from weft.normalize.dialects.base import SqlWriter


class Value(NamedTuple):
    """The value so far."""

    sql: exp.Expr
    kind: pa.DataType
    column: str
    """The name of the column that it came from, for errors."""
    quote: Callable[[str], str]
    """Quotes the name of a column."""


@dataclass(frozen=True)
class Normalizer:
    """One step that makes a column's values uniform. Steps are applied from left to right."""

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """The value after this step, as SQL of a dialect."""
        raise NotImplementedError

    def refusal(self, dialect: str) -> str | None:
        """Why this step cannot be done in a dialect; `None` where it can."""
        return None

    @property
    def name(self) -> str:
        """What the user called, for errors."""
        word = type(self).__name__
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in word).lstrip("_") + "()"

    def needs(self, value: Value, *families: str) -> str:
        """The family of the value's type; refused where it is none of these."""
        actual = family(value.kind)
        if actual not in families:
            raise DeclarationError(
                f"{self.name} takes {_listed(families)}, and the column {value.column!r} is {value.kind} there.",
                hint=_HINTS.get((actual, families[0])),
            )
        return actual


_HINTS = {
    ("text", "timestamps"): "Put parse_timestamp() before it.",
    ("text", "decimals"): "Put parse_int() or parse_numeric() before it.",
    ("floats", "text"): "Leave it out, or make text of it first: sql('CAST(value AS TEXT)', Text).",
}


def _listed(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_P = ParamSpec("_P")
_R = TypeVar("_R", bound=Normalizer)


def strict(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuse unknown and missing arguments with an error that names the nearest one."""
    signature = inspect.signature(function)
    name = function.__name__

    @functools.wraps(function)
    def checked(*arguments: _P.args, **named: _P.kwargs) -> _R:
        for unknown in named.keys() - signature.parameters.keys():
            known = f"It takes {', '.join(signature.parameters) or 'nothing'}."
            hint = did_you_mean(unknown, signature.parameters, known)
            raise DeclarationError(f"{name}() has no argument {unknown!r}.", hint=hint)
        try:
            signature.bind(*arguments, **named)
        except TypeError as error:
            raise DeclarationError(f"{name}(): {error}.", hint=f"Write {name}{signature_text(signature)}.") from None
        return function(*arguments, **named)

    return checked


def signature_text(signature: inspect.Signature) -> str:
    """The parameters without their types."""
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(plain))


def one_of(value: object, allowed: tuple[str, ...], what: str) -> str:
    """Return one of a few texts; else raise a `DeclarationError` that names the nearest."""
    if isinstance(value, str) and value in allowed:
        return value
    raise DeclarationError(
        f"{what} cannot be {value!r}.", hint=did_you_mean(str(value), allowed, f"One of: {', '.join(allowed)}.")
    )


def whole(value: Any, what: str, low: int, high: int) -> int:
    """A whole number between two bounds."""
    if type(value) is not int or not low <= value <= high:
        raise DeclarationError(f"{what} must be a whole number from {low} to {high:,}, not {value!r}.")
    return value


def text(value: Any, what: str, *, empty: bool = False) -> str:
    """A text that every database can hold."""
    if not isinstance(value, str) or (not value and not empty):
        raise DeclarationError(f"{what} must be a text{'' if empty else ' that is not empty'}, not {value!r}.")
    if "\0" in value or any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise DeclarationError(f"{what} holds a character that no database stores: {value!r}.")
    return value


def family(kind: pa.DataType) -> str:
    """Return the family of a type, for errors."""
    import pyarrow as pa

    for matches, name in (
        (pa.types.is_boolean, "booleans"),
        (pa.types.is_integer, "whole numbers"),
        (pa.types.is_floating, "floats"),
        (pa.types.is_decimal, "decimals"),
        (pa.types.is_date, "dates"),
        (pa.types.is_timestamp, "timestamps"),
        (pa.types.is_string, "text"),
        (pa.types.is_binary, "bytes"),
        (pa.types.is_null, "nothing"),
    ):
        if matches(kind):
            return name
    return "nested values"


def fitting(constant: Any, value: Value, who: str) -> Any:
    """A constant in the form that the value's type has; refused where it is of another type or does not fit."""
    import pyarrow as pa

    from weft.columns import LOCAL_TIME

    family_name = family(value.kind)
    exact = {"booleans": bool, "text": str, "bytes": bytes}.get(family_name)
    try:
        if constant is None or (isinstance(constant, float) and family_name in ("decimals", "whole numbers")):
            raise ValueError
        if (exact is not None and type(constant) is not exact) or (exact is not bool and isinstance(constant, bool)):
            raise ValueError
        if family_name == "text":
            return text(constant, f"The value of {who}", empty=True)
        is_naive = getattr(constant, "tzinfo", None) is None
        if family_name == "timestamps" and value.kind == LOCAL_TIME and not is_naive:
            raise ValueError
        scalar = pa.scalar(constant, value.kind).as_py()
        if family_name == "floats" and scalar != scalar:
            raise ValueError
        return scalar
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        raise DeclarationError(
            f"{who} has the value {constant!r}, which does not fit the column {value.column!r}: "
            f"it is {value.kind} there."
        ) from None


@dataclass(frozen=True)
class Parser(Normalizer):
    """A step from text to another type."""

    on_failure: str = "null"
    default: Any = None

    def read(self, x: exp.Expr, writer: SqlWriter) -> exp.Expr:
        """Parse the text; null where it cannot be parsed."""
        raise NotImplementedError

    def parsed(self, value: Value, writer: SqlWriter, kind: pa.DataType) -> Value:
        """Parse the text, or return what the user chose for texts that cannot be parsed."""
        result = self.read(value.sql, writer)
        if self.on_failure != "null":
            if self.on_failure == "error":
                instead = writer.failed(value.sql, f"{value.column}: {self.name} cannot read", kind)
            else:
                instead = writer.literal(fitting(self.default, value._replace(kind=kind), self.name), kind)
            # The text is looked at a second time only where it could not be read.
            result = writer.coalesce(result, writer.case((writer.is_not_null(value.sql), instead)))
        return value._replace(sql=result, kind=kind)


def checked_failure(on_failure: object, default: object, who: str) -> None:
    """Refuse what does not go together."""
    one_of(on_failure, ("null", "error", "default"), f"on_failure of {who}")
    if (on_failure == "default") != (default is not None):
        raise DeclarationError(
            f"{who} takes on_failure='default' and default=… together.",
            hint="Say both, or neither: without them a text that cannot be read becomes null.",
        )
