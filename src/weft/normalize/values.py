"""Normalizers of values of any type, and those that the user writes in SQL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError
from weft.normalize.base import Normalizer, Value, fitting, strict

if TYPE_CHECKING:
    from weft.normalize.dialects.base import SqlWriter


@dataclass(frozen=True)
class Default(Normalizer):
    value: Any

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """The type stays."""
        constant = writer.literal(fitting(self.value, value, self.name), value.kind)
        return value._replace(sql=writer.coalesce(value.sql, constant))


@strict
def default(value: Any) -> Normalizer:
    """Null becomes `value`, which must be of the column's type; everything else stays, the empty text too."""
    return Default(_constant(value, "default()"))


@strict
def not_null_or(value: Any) -> Normalizer:
    """The same as `default(value)`, for a column that must never be null."""
    return Default(_constant(value, "not_null_or()"))


@dataclass(frozen=True)
class Nullif(Normalizer):
    values: tuple[Any, ...]

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """One after the other."""
        result = value.sql
        for each in self.values:
            result = writer.nullif(result, writer.literal(fitting(each, value, "nullif()"), value.kind))
        return value._replace(sql=result)


@strict
def nullif(*values: Any) -> Normalizer:
    """Each of these values becomes null; they must be of the column's type. Texts are compared letter by letter: case
    and spaces count. Null stays null."""
    if not values:
        raise DeclarationError("nullif() needs a value.", hint="Write nullif('N/A', '-').")
    return Nullif(tuple(_constant(each, "nullif()") for each in values))


def _constant(value: Any, who: str) -> Any:
    if value is None or value.__hash__ is None:
        raise DeclarationError(f"{who} takes a value of the column's type, not {value!r}.")
    return value


@dataclass(frozen=True)
class Sql(Normalizer):
    expression: str
    kind: Any = None

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """The result has the declared type; else the type before."""
        from weft.column_types import column_field
        from weft.normalize.expressions import written

        kind = value.kind if self.kind is None else column_field("", self.kind).type
        result = written(self.expression, value, allow_value=not isinstance(self, Derive))
        return value._replace(sql=writer.as_type(result, kind), kind=kind)

    def refusal(self, dialect: str) -> str | None:
        """Return what sqlglot cannot write in that dialect."""
        from weft.normalize.expressions import untranslatable

        return untranslatable(self.expression, dialect)


@strict
def sql(expression: str, kind: Any = None) -> Normalizer:
    """An expression in PostgreSQL's SQL, in which `value` is the value so far and other names are columns of the
    source; a column that is itself called value is `"value"`. sqlglot translates it for the database that runs it.
    `kind` is the type that comes out, such as `BigInt`; without it, the type stays. Null is whatever the expression
    makes of it."""
    return Sql(_checked(expression, "sql()"), _kind(kind))


@dataclass(frozen=True)
class Derive(Sql):
    """See `derive`."""


@strict
def derive(expression: str, kind: Any = None) -> Normalizer:
    """A column that the source does not have, made from those that it has by an expression as in `sql`, such as
    `derive("first_name || ' ' || last_name")`. It stands first; other steps may follow. `kind` is the type that comes
    out; without it, the declared one."""
    return Derive(_checked(expression, "derive()"), _kind(kind))


def _checked(expression: object, who: str) -> str:
    if not isinstance(expression, str) or not expression.strip():
        raise DeclarationError(f"{who} takes an expression as a text, not {expression!r}.")
    from weft.normalize.expressions import parsed

    parsed(expression)
    return expression


def _kind(kind: Any) -> Any:
    from weft.column_types import check_type

    return None if kind is None else check_type(kind)
