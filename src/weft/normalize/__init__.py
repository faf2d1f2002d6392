"""Normalizers: steps that make the values of a column uniform, written in its annotation.

    email: Annotated[String[256] | None, lower(), trim()]

Each is defined once and gives the same result in Spark and in every database; see docs/normalizers.md. `expression`
writes a chain of them in a dialect, for the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft.errors import DeclarationError
from weft.normalize.base import Normalizer, Value
from weft.normalize.dialects import DIALECTS, writer_for
from weft.normalize.numbers import clamp, parse_bool, parse_int, parse_numeric, round
from weft.normalize.text import (
    email_normalize,
    empty_to_null,
    lower,
    phone_normalize,
    regex_replace,
    replace,
    trim,
    truncate,
    upper,
    whitespace_to_null,
)
from weft.normalize.times import date_trunc, parse_date, parse_timestamp, to_timezone
from weft.normalize.values import Derive, default, derive, not_null_or, nullif, sql

if TYPE_CHECKING:
    import pyarrow as pa


def expression(
    normalizers: Sequence[Normalizer],
    column: str,
    dialect: str,
    *,
    kind: pa.DataType,
    quote: Callable[[str], str] | None = None,
    target: pa.DataType | None = None,
) -> tuple[str, pa.DataType]:
    """A column after these steps as SQL of a dialect, and the type that comes out.

    `kind` is the canonical type (`weft.columns`) of the column in the source, `target` the declared one, which a
    `derive()` without a type has. `quote` spells columns; without it they are quoted as the dialect does. A chain that
    the dialect cannot run, or that the type does not go through, is a `DeclarationError`.
    """
    import pyarrow as pa
    from sqlglot import exp
    from sqlglot.errors import ErrorLevel

    writer = writer_for(dialect)
    if quote is None:

        def quote(name: str) -> str:
            return exp.to_identifier(name, quoted=True).sql(dialect=dialect)

    if pa.types.is_null(kind):
        # Nothing is known of a column of nulls, and a derived one has nothing before it.
        kind = target if target is not None and needs_no_input(normalizers) else pa.string()
    if not normalizers:
        return quote(column), kind
    start = exp.Null() if needs_no_input(normalizers) else writer.column(quote(column), kind)
    value = Value(start, kind, column, quote)
    for number, step in enumerate(normalizers):
        if isinstance(step, Derive) and number:
            raise DeclarationError(
                f"derive() of the column {column!r} must come first: it does without what is before it.",
                hint="Use sql(), in which value is the value so far.",
            )
        refusal = step.refusal(dialect)
        if refusal is not None:
            others = ", ".join(each for each in DIALECTS if step.refusal(each) is None)
            raise DeclarationError(
                f"{step.name} of the column {column!r} cannot be run by {dialect}: {refusal}.",
                hint=f"It can by {others}.",
            )
        value = step.apply(value, writer)
    written = writer.result(value.sql, value.kind).sql(dialect=dialect, unsupported_level=ErrorLevel.IGNORE)
    return written, value.kind


def supports(normalizers: Sequence[Normalizer], dialect: str) -> bool:
    """Whether `expression` can write these steps in a dialect; else Spark runs them."""
    return all(step.refusal(dialect) is None for step in normalizers)


def needs_no_input(normalizers: Sequence[Normalizer]) -> bool:
    """Whether the column is made from others alone, so that the source need not have it."""
    return bool(normalizers) and isinstance(normalizers[0], Derive)


__all__ = [
    "Normalizer",
    "clamp",
    "date_trunc",
    "default",
    "derive",
    "email_normalize",
    "empty_to_null",
    "expression",
    "lower",
    "needs_no_input",
    "not_null_or",
    "nullif",
    "parse_bool",
    "parse_date",
    "parse_int",
    "parse_numeric",
    "parse_timestamp",
    "phone_normalize",
    "regex_replace",
    "replace",
    "round",
    "sql",
    "supports",
    "to_timezone",
    "trim",
    "truncate",
    "upper",
    "whitespace_to_null",
]
