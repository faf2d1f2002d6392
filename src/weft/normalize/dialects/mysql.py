"""MariaDB 10.10 and newer, and MySQL 8, in a session in UTC and strict mode, as Weft's are.

`/*M! … */` is read by MariaDB alone, `/*!80000 … */` by MySQL alone.
"""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
from sqlglot import exp

from weft.columns import LOCAL_TIME, UTC_TIME
from weft.normalize import patterns
from weft.normalize.base import family
from weft.normalize.dialects.base import ISO_INSTANT, WHITESPACE, SqlWriter

# Byte by byte, and without padding: else "a" and "a " are the same.
_BINARY = "/*M! utf8mb4_nopad_bin */ /*!80000 utf8mb4_0900_bin */"
# It knows the cases of all letters; older ones do not.
_LETTERS = "/*M! utf8mb4_uca1400_ai_ci */ /*!80000 utf8mb4_0900_as_cs */"
# A number beyond the largest: an error wherever it is computed, not only where it is stored.
_TOO_LARGE = "9223372036854775807"
_FORMATS = {
    "year": "%Y-01-01",
    "month": "%Y-%m-01",
    "day": "%Y-%m-%d",
    "hour": "%Y-%m-%d %H:00:00",
    "minute": "%Y-%m-%d %H:%i:00",
    "second": "%Y-%m-%d %H:%i:%s",
}


class MySQL(SqlWriter):
    """Instants are DATETIME(6) in UTC."""

    dialect: ClassVar[str] = "mysql"
    why_no_zones: ClassVar[str | None] = (
        "CONVERT_TZ of MySQL and MariaDB gives null where the tables of time zones are not loaded, and leaves times "
        "before 1970 and after 2038 as they are"
    )
    types: ClassVar[dict[pa.DataType, str]] = SqlWriter.types | {
        **dict.fromkeys((pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64()), "SIGNED"),
        **dict.fromkeys((UTC_TIME, LOCAL_TIME), "DATETIME(6)"),
        pa.float32(): "FLOAT",
        pa.string(): "CHAR",
        pa.binary(): "BINARY",
    }

    def column(self, quoted: str, kind: pa.DataType) -> exp.Expr:
        """Text of one character set, compared byte by byte."""
        named = super().column(quoted, kind)
        return _collated(_utf8(named), _BINARY) if family(kind) == "text" else named

    def cast(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Text as above; other types by their names in CAST."""
        if family(kind) == "text":
            return _collated(_utf8(exp.Cast(this=x.copy(), to=exp.Var(this="CHAR"))), _BINARY)
        return super().cast(x, kind)

    def joined(self, *texts: exp.Expr | str) -> exp.Expr:
        """With CONCAT: `||` of MySQL means OR."""
        return self.call("CONCAT", *texts)

    # ------------------------------------------------------------------------------------------------------------ texts

    def lower(self, x: exp.Expr) -> exp.Expr:
        """One letter is two in lower case."""
        spelled = self.replace(x, "İ", "İ".lower())
        return _collated(self.call("LOWER", _collated(spelled, _LETTERS)), _BINARY)

    def upper(self, x: exp.Expr) -> exp.Expr:
        spelled = self.spelled_upper(x, self._finds)
        return _collated(self.call("UPPER", _collated(spelled, _LETTERS)), _BINARY)

    def trim(self, x: exp.Expr) -> exp.Expr:
        """TRIM takes one text, not a set. Without the look behind, white space inside would take quadratic time."""
        space = f"[{WHITESPACE}]"
        return _collated(self.call("REGEXP_REPLACE", x, f"^{space}+|(?<!{space}){space}+\\z", ""), _BINARY)

    def matches(self, x: exp.Expr, pattern: str) -> exp.Expr:
        r"""`\z`, since `$` is also before a newline at the end."""
        return self._finds(x, f"^({pattern})\\z")

    def _finds(self, x: exp.Expr, pattern: str) -> exp.Expr:
        return exp.GT(this=self.call("REGEXP_INSTR", x, pattern), expression=exp.Literal.number(0))

    def substitute(self, x: exp.Expr, pattern: str, replacement: patterns.Replacement) -> exp.Expr:
        return _collated(self.call("REGEXP_REPLACE", x, pattern, self.replacement(replacement)), _BINARY)

    # ------------------------------------------------------------------------------------------------------------ times

    def instant(self, x: exp.Expr, *, with_zone: bool = True) -> exp.Expr:
        """The zone is taken off: CAST knows none, and CONVERT_TZ none of the years after 2038."""
        if not with_zone:
            return super().instant(x)
        offset = self.call("REGEXP_SUBSTR", x, "[+-][0-9:]{2,5}$")
        minutes = exp.Add(
            this=exp.Mul(this=_number(self.call("SUBSTR", offset, 2, 2)), expression=exp.Literal.number(60)),
            # Nothing of "+02", 30 of "+0230" and of "+02:30".
            expression=_number(self.call("RIGHT", self.joined("0", self.call("SUBSTR", offset, 4)), 2)),
        )
        signed = self.case(
            (
                exp.EQ(this=self.call("LEFT", offset, 1), expression=self.text("-")),
                exp.Neg(this=exp.Paren(this=minutes)),
            ),
            otherwise=minutes,
        )
        clock = self.cast(self.substitute(x, "[+-][0-9:]{2,5}$", ()), LOCAL_TIME)
        shifted = exp.Sub(this=clock, expression=exp.Interval(this=exp.Paren(this=signed), unit=exp.Var(this="MINUTE")))
        is_time = self.is_time(x, ISO_INSTANT)
        has_offset = self.matches(x, ".{10}[T ][0-9:.]*[+-].*")
        plain = self.cast(self.replace(x, "Z", ""), LOCAL_TIME)
        return self.case((self.all_of(is_time, has_offset), shifted), (is_time, plain))

    def to_zone(self, x: exp.Expr, kind: pa.DataType, zone: str) -> exp.Expr:
        """UTC alone (`ToTimezone.refusal`)."""
        return self.cast(x, LOCAL_TIME)

    def truncate_time(self, x: exp.Expr, kind: pa.DataType, unit: str) -> exp.Expr:
        if unit == "week":
            monday = exp.Interval(this=self.call("WEEKDAY", x), unit=exp.Var(this="DAY"))
            return self.cast(exp.Sub(this=self.call("DATE", x), expression=monday), kind)
        if unit == "quarter":
            month = exp.Sub(
                this=exp.Mul(this=self.call("QUARTER", x), expression=exp.Literal.number(3)),
                expression=exp.Literal.number(2),
            )
            year = self.call("DATE_FORMAT", x, "%Y")
            return self.cast(self.joined(year, "-", self.call("LPAD", month, 2, "0"), "-01"), kind)
        return self.cast(self.call("DATE_FORMAT", x, _FORMATS[unit]), kind)

    # ----------------------------------------------------------------------------------------------------------- errors

    def failed(self, x: exp.Expr, message: str, kind: pa.DataType) -> exp.Expr:
        """The server's error shows what it could not compute, and the message in it."""
        said = self.call("LENGTH", self.joined(f"{message} ", x))
        wrong = exp.Paren(this=exp.Add(this=exp.Literal.number(_TOO_LARGE), expression=said))
        return self.cast(wrong, kind)


def _utf8(x: exp.Expr) -> exp.Expr:
    return exp.Var(this=f"CONVERT({x.sql(dialect='mysql')} USING utf8mb4)")


def _number(x: exp.Expr) -> exp.Expr:
    return exp.Cast(this=x, to=exp.Var(this="SIGNED"))


def _collated(x: exp.Expr, name: str) -> exp.Expr:
    return exp.Paren(this=exp.Collate(this=exp.Paren(this=x.copy()), expression=exp.Var(this=name)))


WRITER = MySQL()
