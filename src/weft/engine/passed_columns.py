"""Columns that SQL passes on as they are: it names them, or takes all by `*`, and does no more with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_CLAUSES = {"expressions", "from", "from_", "where", "limit"}


class _Choices(NamedTuple):
    """What SQL does with the columns of `source`, by their names in small letters."""

    outputs: Mapping[str, Sequence[str]]
    """The names that it gives the columns that it only names."""
    takes_all: bool
    used: Collection[str]
    """The columns with which it does more."""


_NONE = _Choices({}, False, ())


def passed_columns(sql: str | None, names: Iterable[str]) -> dict[str, str]:
    """Return those of these columns of `source` that SQL passes on as they are, each with the name that it gives them.
    Of SQL that does more than choose columns and rows of it, none are: it may compare or unite them."""
    if sql is None:
        return {name: name for name in names}
    choices = _choices(sql)
    passed = {}
    for name in names:
        outputs = [*choices.outputs.get(name.lower(), ()), *([name] if choices.takes_all else [])]
        if len(outputs) == 1 and name.lower() not in choices.used:
            passed[name] = outputs[0]
    return passed


@lru_cache(maxsize=128)  # each batch of a pipeline asks for its SQL
def _choices(sql: str) -> _Choices:
    from sqlglot import exp, parse_one, tokenize
    from sqlglot.errors import SqlglotError
    from sqlglot.tokenizer_core import TokenType

    # In quotes a name may be a text, and a doubled backtick spells a name in another way than it is.
    if '"' in sql or "``" in sql:
        return _NONE
    try:
        tree = parse_one(sql, read="spark")
        reads_parts = any(each.token_type == TokenType.COLON for each in tokenize(sql, read="spark"))
    except (SqlglotError, RecursionError):
        return _NONE
    if reads_parts or not isinstance(tree, exp.Select):
        return _NONE
    if {clause for clause, each in tree.args.items() if each} - _CLAUSES:
        return _NONE
    origin = tree.args.get("from_") or tree.args.get("from")
    read = None if origin is None else origin.this
    if not isinstance(read, exp.Table) or read.name.lower() != "source" or read.args.get("db"):
        return _NONE
    has_more = {clause for clause, each in read.args.items() if each} - {"this", "alias"}
    if has_more or sum(1 for _ in tree.find_all(exp.Table)) > 1:
        return _NONE
    chosen: dict[str, list[str]] = {}
    plain: set[int] = set()
    takes_all = False
    for each in tree.expressions:
        column = each.this if isinstance(each, exp.Alias) else each
        if _is_all(column):
            takes_all = True
            plain.add(id(column if isinstance(column, exp.Star) else column.this))
        elif isinstance(column, exp.Column) and isinstance(column.this, exp.Identifier):
            chosen.setdefault(column.name.lower(), []).append(each.alias_or_name)
            plain.add(id(column.this))
            plain |= {id(each.args["alias"])} if isinstance(each, exp.Alias) else set()
    if any(id(each) not in plain for each in tree.find_all(exp.Star)):
        return _NONE
    others = (each for each in tree.find_all(exp.Identifier) if id(each) not in plain and not _asks_null(each))
    return _Choices(chosen, takes_all, {each.name.lower() for each in others})


def _is_all(column: Any) -> bool:
    from sqlglot import exp

    star = column.this if isinstance(column, exp.Column) else column
    return isinstance(star, exp.Star) and not any(star.args.values())


def _asks_null(identifier: Any) -> bool:
    """Return whether a name stands before `IS NULL` or `IS NOT NULL`."""
    from sqlglot import exp

    column = identifier.parent
    test = column.parent if isinstance(column, exp.Column) and column.this is identifier else None
    return isinstance(test, exp.Is) and isinstance(test.expression, exp.Null)
