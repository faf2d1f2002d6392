"""The dialects in which normalizers can be written."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from weft.errors import DeclarationError, did_you_mean

if TYPE_CHECKING:
    from weft.normalize.dialects.base import SqlWriter

DIALECTS = ("duckdb", "mysql", "postgres", "spark", "sqlite")


@cache
def writer_for(dialect: str) -> SqlWriter:
    if dialect not in DIALECTS:
        hint = did_you_mean(dialect, DIALECTS, f"Dialects: {', '.join(DIALECTS)}.")
        raise DeclarationError(f"Normalizers cannot be written for {dialect!r}.", hint=hint)
    writer: SqlWriter = import_module(f"weft.normalize.dialects.{dialect}").WRITER
    return writer
