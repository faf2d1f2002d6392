"""A user's query inside one of ours."""

from __future__ import annotations


def subquery(sql: str) -> str:
    """The query in parentheses, whatever it ends with: a comment must not swallow the parenthesis."""
    return f"({sql.strip().rstrip(';').rstrip()}\n)"
