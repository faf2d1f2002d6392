"""The dialects in which normalizers can be written."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from weft.errors import DeclarationError, nearest

if TYPE_CHECKING:
    from weft.normalize.dialects.base import Words

DIALECTS = ("duckdb", "mysql", "postgres", "spark", "sqlite")


@cache
def words_of(dialect: str) -> Words:
    """The words of a dialect."""
    if dialect not in DIALECTS:
        close = nearest(dialect, DIALECTS)
        raise DeclarationError(
            f"Normalizers cannot be written for {dialect!r}.",
            hint=f"Did you mean {close!r}?" if close else f"Dialects: {', '.join(DIALECTS)}.",
        )
    words: Words = import_module(f"weft.normalize.dialects.{dialect}").WORDS
    return words
