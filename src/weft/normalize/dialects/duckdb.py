"""DuckDB, in a session in UTC, as Weft's are."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
from sqlglot import exp

from weft.columns import LOCAL_TIME, UTC_TIME
from weft.normalize import patterns
from weft.normalize.base import family
from weft.normalize.dialects.base import SEVERAL_UPPER, WHITESPACE, SqlWriter, at_zone


class DuckDB(SqlWriter):
    """Its cases are of single letters."""

    dialect: ClassVar[str] = "duckdb"

    def column(self, quoted: str, kind: pa.DataType) -> exp.Expr:
        """A UUID, say, as text."""
        named = super().column(quoted, kind)
        return self.cast(named, kind) if family(kind) == "text" else named

    def lower(self, x: exp.Expr) -> exp.Expr:
        """One letter is two in lower case."""
        return self.call("LOWER", self.replace(x, "İ", "İ".lower()))

    def upper(self, x: exp.Expr) -> exp.Expr:
        """Some letters are several in upper case: rare, so they are looked for first."""
        several = f"[{''.join(SEVERAL_UPPER)}]"
        spelled = x
        for letter, letters in SEVERAL_UPPER.items():
            spelled = self.replace(spelled, letter, letters)
        is_rare = self.call("REGEXP_MATCHES", x, several)
        return self.once(x, lambda x: self.call("UPPER", self.case((is_rare, spelled), otherwise=x)))

    def trim(self, x: exp.Expr) -> exp.Expr:
        return self.call("TRIM", x, WHITESPACE)

    def matches(self, x: exp.Expr, pattern: str) -> exp.Expr:
        return self.call("REGEXP_FULL_MATCH", x, pattern)

    def substitute(self, x: exp.Expr, pattern: str, replacement: patterns.Replacement) -> exp.Expr:
        return self.call("REGEXP_REPLACE", x, pattern, self.replacement(replacement), "g")

    def to_zone(self, x: exp.Expr, kind: pa.DataType, zone: str) -> exp.Expr:
        return at_zone(x if kind == UTC_TIME else self.to_utc(x, kind), zone)

    def truncate_time(self, x: exp.Expr, kind: pa.DataType, unit: str) -> exp.Expr:
        """As times of UTC's clock."""
        local = at_zone(x, "UTC") if kind == UTC_TIME else self.cast(x, LOCAL_TIME)
        truncated = self.call("DATE_TRUNC", unit, local)
        return at_zone(truncated, "UTC") if kind == UTC_TIME else self.cast(truncated, kind)

    def failed(self, x: exp.Expr, message: str, kind: pa.DataType) -> exp.Expr:
        return self.cast(self.call("ERROR", self.joined(f"{message} ", x)), kind)


WRITER = DuckDB()
