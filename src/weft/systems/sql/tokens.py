"""Tokens in a user's SQL: the content of a text, a quoted name or a comment is no code, whatever it looks like."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache


def quote_name(name: str, mark: str = '"') -> str:
    """Return an identifier in quotation marks, which are doubled inside."""
    return mark + name.replace(mark, mark * 2) + mark


_NAME = r'"(?:[^"]|"")*"'
_TEXT = r"'(?:[^']|'')*'"
_ESCAPED = r"[eE]'(?:[^'\\]|\\.|'')*'"
_DOLLARS = r"\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"
_LINE = r"--[^\n]*"
_BLOCK = r"/\*.*?\*/"
# A comment may hold another one.
_NESTED = r"/\*(?:[^*/]|\*(?!/)|/(?!\*)|/\*.*?\*/)*\*/"
_OPAQUE = {
    "postgres": (_ESCAPED, _TEXT, _NAME, _LINE, _NESTED, _DOLLARS),
    "duckdb": (_ESCAPED, _TEXT, _NAME, _LINE, _BLOCK, _DOLLARS),
    "sqlite": (_TEXT, _NAME, r"`[^`]*`", r"\[[^\]]*\]", _LINE, _BLOCK),
    # Two dashes are two signs there, unless a blank follows; and both kinds of quotes are texts.
    "mysql": (
        r"'(?:[^'\\]|\\.|'')*'",
        r'"(?:[^"\\]|\\.|"")*"',
        r"`(?:[^`]|``)*`",
        r"--(?=\s|$)[^\n]*",
        r"\#[^\n]*",
        _BLOCK,
    ),
}


@lru_cache
def _pattern(token: str, dialect: str) -> re.Pattern[str]:
    # A letter before a quote may be the end of a name, as in `type'x'`: only what stands alone is an E.
    parts = [rf"(?<!\w){each}" if each is _ESCAPED else each for each in _OPAQUE[dialect]]
    return re.compile(f"{'|'.join(parts)}|(?P<token>{token})", re.DOTALL)


def replaced(sql: str, token: str, by: str | Callable[[str], str], dialect: str) -> str:
    """Replace each token (a regular expression) that is code, by a text or by what a function returns for it."""

    def one(match: re.Match[str]) -> str:
        if match["token"] is None:
            return match[0]
        return by if isinstance(by, str) else by(match[0])

    return _pattern(token, dialect).sub(one, sql)


def without_end(sql: str) -> str:
    """Return a query without the semicolon at its end and the comments behind it, which no parenthesis may follow."""
    sql = sql.strip()
    if ";" not in sql:
        return sql
    ends = {_end_of_code(sql, dialect) for dialect in _OPAQUE}
    return sql[: ends.pop()] if len(ends) == 1 else sql.rstrip(";")


def _end_of_code(sql: str, dialect: str) -> int:
    ends = (
        match.end()
        for match in _pattern(r"\w+|[^\s;]", dialect).finditer(sql)
        if match["token"] is not None or not match[0].startswith(("--", "/*", "#"))
    )
    return max(ends, default=0)


def has_several(sql: str) -> bool:
    """Whether a query without its end has a semicolon as code, whatever the dialect is."""
    return ";" in sql and all(has(sql, ";", dialect) for dialect in _OPAQUE)


def has(sql: str, token: str, dialect: str) -> bool:
    """Whether a statement has a token as code."""
    return any(match["token"] is not None for match in _pattern(token, dialect).finditer(sql))
