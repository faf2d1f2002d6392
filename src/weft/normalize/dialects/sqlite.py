"""SQLite, by our own functions (`weft.systems.sqlite.functions`): it has few of its own, and no types but storage."""

from __future__ import annotations

from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import exp

from weft.columns import UTC_TIME
from weft.normalize import patterns
from weft.normalize.base import family
from weft.normalize.dialects.base import SqlWriter, plain
from weft.normalize.formats import Format
from weft.systems.sqlite.casts import code


class SQLite(SqlWriter):
    """Values are as Weft stores them: decimals, dates and times are texts, booleans 0 and 1."""

    dialect: ClassVar[str] = "sqlite"

    def column(self, quoted: str, kind: pa.DataType) -> exp.Expr:
        """Cast to the column's type: SQLite stores a value as it was written."""
        return self.cast(super().column(quoted, kind), kind)

    def as_type(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Rounded, where SQLite computed a decimal as a float."""
        return self.call("WEFT_STORED", x, _code(kind))

    def literal(self, value: Any, kind: pa.DataType) -> exp.Expr:
        family_name = family(kind)
        if family_name == "booleans":
            return exp.Literal.number(int(value))
        if family_name == "timestamps":
            return self.text(
                value.isoformat("T", "microseconds") if kind != UTC_TIME else plain(value).replace(" ", "T")
            )
        if family_name in ("decimals", "dates"):
            return self.text(plain(value))
        if family_name == "floats":
            return exp.Paren(this=exp.Var(this=repr(value).replace("inf", "9e999")))
        if family_name == "bytes":
            return exp.Var(this=f"X'{value.hex()}'")
        return super().literal(value, kind)

    def cast(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Call our own function: SQLite's CAST returns a value where it should fail."""
        return self.call("WEFT_CAST", x, "", _code(kind))

    def compare(self, x: exp.Expr, sign: str, y: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Decimals are texts, which have another order."""
        if family(kind) != "decimals":
            return super().compare(x, sign, y, kind)
        return super().compare(self.call("WEFT_COMPARE", x, y), sign, exp.Literal.number(0), kind)

    def lower(self, x: exp.Expr) -> exp.Expr:
        return self.call("WEFT_LOWER", x)

    def upper(self, x: exp.Expr) -> exp.Expr:
        return self.call("WEFT_UPPER", x)

    def trim(self, x: exp.Expr) -> exp.Expr:
        return self.call("WEFT_TRIM", x)

    def truncate(self, x: exp.Expr, length: int) -> exp.Expr:
        return self.call("SUBSTR", x, 1, length)

    def matches(self, x: exp.Expr, pattern: str) -> exp.Expr:
        return self.call("WEFT_MATCHES", x, pattern)

    def substitute(self, x: exp.Expr, pattern: str, replacement: patterns.Replacement) -> exp.Expr:
        return self.call("WEFT_SUBSTITUTE", x, pattern, self.replacement(replacement))

    def instant_by(self, x: exp.Expr, format: Format) -> exp.Expr:
        """In Python: SQLite's parser has no room for so many functions inside each other."""
        return self.call("WEFT_INSTANT", x, format.pattern(), format.fields)

    def day_by(self, x: exp.Expr, format: Format) -> exp.Expr:
        return self.call("WEFT_DAY", x, format.pattern(), format.fields)

    def later(self, x: exp.Expr, hours: int) -> exp.Expr:
        """Call the function that loads use."""
        return self.call("WEFT_ADD_SECONDS", x, hours * 3600)

    def to_day(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """All times are stored in UTC."""
        return self.call("SUBSTR", x, 1, 10)

    def to_zone(self, x: exp.Expr, kind: pa.DataType, zone: str) -> exp.Expr:
        return self.call("WEFT_ZONE", x, zone)

    def truncate_time(self, x: exp.Expr, kind: pa.DataType, unit: str) -> exp.Expr:
        return self.call("WEFT_TRUNCATE", x, unit)

    def round_decimal(self, x: exp.Expr, digits: int, kind: pa.DataType) -> exp.Expr:
        return self.call("WEFT_ROUND", x, digits)

    def round_float(self, x: exp.Expr, digits: int, kind: pa.DataType) -> exp.Expr:
        return self.as_type(self.call("WEFT_ROUND", x, digits), kind)

    def failed(self, x: exp.Expr, message: str, kind: pa.DataType) -> exp.Expr:
        return self.call("WEFT_FAIL", self.joined(f"{message} ", x))


def _code(kind: pa.DataType) -> str:
    return code(pa.field("", kind))


WRITER = SQLite()
