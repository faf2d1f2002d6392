"""Expressions of users: parsed as PostgreSQL's SQL, written for each database by sqlglot."""

from __future__ import annotations

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError, UnsupportedError

from weft.errors import DeclarationError
from weft.normalize.base import Value

_READ = "postgres"
_REFUSED: tuple[tuple[type[exp.Expr], str], ...] = (
    (exp.Query, "a query"),
    (exp.AggFunc, "an aggregate"),
    (exp.Window, "a window"),
    (exp.Star, "a *"),
    (exp.Placeholder, "a placeholder"),
    (exp.Parameter, "a parameter"),
)


def parsed(text: str) -> exp.Expr:
    """One expression over the columns of one row."""
    try:
        statements = sqlglot.parse(text, read=_READ)
    except SqlglotError as error:
        said = str(error).splitlines()[0].split(". Line")[0]
        raise DeclarationError(
            f"The expression {text!r} cannot be read: {said}.", hint="It is one expression in PostgreSQL's SQL."
        ) from None
    expression = statements[0] if len(statements) == 1 else None
    if expression is None or not isinstance(expression, exp.Condition | exp.Interval | exp.Subquery):
        raise DeclarationError(f"{text!r} is not one expression.", hint="Such as: UPPER(value) || '-' || region")
    for kind, what in _REFUSED:
        if expression.find(kind) is not None:
            raise DeclarationError(
                f"The expression {text!r} has {what}; it is over one row.", hint="Put that into the source's query."
            )
    for column in expression.find_all(exp.Column):
        if column.table:
            raise DeclarationError(
                f"The expression {text!r} names {column.sql(_READ)}.",
                hint=f"Columns of the source have no table here: {column.name}.",
            )
    return expression


def written(text: str, value: Value, *, allow_value: bool) -> exp.Expr:
    """The expression over quoted columns and the value so far."""
    expression = parsed(text)

    def spelled(node: exp.Expr) -> exp.Expr:
        if not isinstance(node, exp.Column):
            return node
        if node.name.lower() != "value" or node.this.args.get("quoted"):
            return exp.Var(this=value.quote(node.name))
        if not allow_value:
            raise DeclarationError(
                f"derive({text!r}) names value, but nothing comes before it.",
                hint='Write "value" in quotes for a column of that name, or use sql().',
            )
        return exp.Paren(this=value.sql.copy())

    return exp.Paren(this=expression.transform(spelled))


def untranslatable(text: str, dialect: str) -> str | None:
    """Return what of an expression a dialect does not have."""
    try:
        parsed(text).sql(dialect=dialect, unsupported_level=ErrorLevel.RAISE)
    except UnsupportedError as error:
        return " ".join(str(error).split())
    return None
