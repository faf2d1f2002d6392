"""DuckDB, in a session in UTC, as Weft's are."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
from sqlglot import exp

from weft.columns import LOCAL_TIME, UTC_TIME
from weft.normalize.base import family
from weft.normalize.dialects.base import WHITESPACE, SqlWriter, at_zone


class DuckDB(SqlWriter):
    """DuckDB changes the case of single letters."""

    dialect: ClassVar[str] = "duckdb"

    def column(self, quoted: str, kind: pa.DataType) -> exp.Expr:
        """A UUID, say, as text."""
        named = super().column(quoted, kind)
        return self.cast(named, kind) if family(kind) == "text" else named

    def lower(self, x: exp.Expr) -> exp.Expr:
        """One letter is two in lower case."""
        return self.call("LOWER", self.replace(x, "İ", "İ".lower()))

    def upper(self, x: exp.Expr) -> exp.Expr:
        return self.call("UPPER", self.spelled_upper(x, lambda x, letters: self.call("REGEXP_MATCHES", x, letters)))

    def trim(self, x: exp.Expr) -> exp.Expr:
        return self.call("TRIM", x, WHITESPACE)

    def matches(self, x: exp.Expr, pattern: str) -> exp.Expr:
        return self.call("REGEXP_FULL_MATCH", x, pattern)

    def truncate_time(self, x: exp.Expr, kind: pa.DataType, unit: str) -> exp.Expr:
        """As times of UTC's clock."""
        local = at_zone(x, "UTC") if kind == UTC_TIME else self.cast(x, LOCAL_TIME)
        truncated = self.call("DATE_TRUNC", unit, local)
        return at_zone(truncated, "UTC") if kind == UTC_TIME else self.cast(truncated, kind)

    def failed(self, x: exp.Expr, message: str, kind: pa.DataType) -> exp.Expr:
        return self.cast(self.call("ERROR", self.joined(f"{message} ", x)), kind)


WRITER = DuckDB()
