"""Spark SQL, in a session in UTC, as Weft's are."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
from sqlglot import exp

from weft.columns import LOCAL_TIME, UTC_TIME
from weft.normalize import patterns
from weft.normalize.dialects.base import ISO_INSTANT, SqlWriter


class Spark(SqlWriter):
    """Java's regular expressions, and ICU's cases."""

    dialect: ClassVar[str] = "spark"
    types: ClassVar[dict[pa.DataType, str]] = SqlWriter.types | {
        pa.float32(): "FLOAT",
        UTC_TIME: "TIMESTAMP",
        LOCAL_TIME: "TIMESTAMP_NTZ",
        pa.string(): "STRING",
        pa.binary(): "BINARY",
    }

    def lower(self, x: exp.Expr) -> exp.Expr:
        """At the end of a word it would write another small sigma."""
        return self.call("LOWER", self.replace(x, "Σ", "σ"))

    def upper(self, x: exp.Expr) -> exp.Expr:
        return self.call("UPPER", x)

    def truncate(self, x: exp.Expr, length: int) -> exp.Expr:
        return self.call("SUBSTRING", x, 1, length)

    def matches(self, x: exp.Expr, pattern: str) -> exp.Expr:
        r"""`\z`, since `$` is also before a newline at the end."""
        return self.call("REGEXP_LIKE", x, f"^({pattern})\\z")

    def substitute(self, x: exp.Expr, pattern: str, replacement: patterns.Replacement) -> exp.Expr:
        return self.call("REGEXP_REPLACE", x, pattern, self.replacement(replacement))

    def reference(self, group: int) -> str:
        return f"${group}"

    def replacement(self, parts: patterns.Replacement) -> str:
        return "".join(
            self.reference(part) if isinstance(part, int) else part.replace("\\", "\\\\").replace("$", "\\$")
            for part in parts
        )

    def instant(self, x: exp.Expr, *, with_zone: bool = True) -> exp.Expr:
        """Seconds may be missing only where there is no zone either: they are put in."""
        whole = self.substitute(x, self.whole("(.{16})([Z+-].*)"), (1, ":00", 2)) if with_zone else x
        return self.case((self.is_time(x, ISO_INSTANT), self.cast(whole, UTC_TIME)))

    def to_zone(self, x: exp.Expr, kind: pa.DataType, zone: str) -> exp.Expr:
        """From the session's zone, in which an instant becomes a clock's time."""
        return self.call("CONVERT_TIMEZONE", zone, x if kind == UTC_TIME else self.to_utc(x, kind))

    def truncate_time(self, x: exp.Expr, kind: pa.DataType, unit: str) -> exp.Expr:
        """By the session's clock, which shows UTC."""
        return self.cast(self.call("DATE_TRUNC", unit, x), kind)

    def round_float(self, x: exp.Expr, digits: int, kind: pa.DataType) -> exp.Expr:
        """Spark itself rounds floats as they are written."""
        return self.cast(self.call("ROUND", self.cast(x, pa.float64()), digits), kind)

    def failed(self, x: exp.Expr, message: str, kind: pa.DataType) -> exp.Expr:
        return self.cast(self.call("RAISE_ERROR", self.joined(f"{message} ", x)), kind)


WRITER = Spark()
