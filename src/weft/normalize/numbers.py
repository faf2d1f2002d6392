"""Normalizers of numbers and booleans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from weft.errors import DeclarationError
from weft.normalize.base import Normalizer, Parser, Value, checked_failure, fitting, strict, whole
from weft.normalize.base import text as checked_text
from weft.normalize.times import OnFailure

if TYPE_CHECKING:
    from sqlglot import exp

    from weft.normalize.dialects.base import SqlWriter

_LARGEST = (1 << 63) - 1
_MAX_DIGITS = 38


@dataclass(frozen=True)
class ParseInt(Parser):
    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """Texts are read; whole numbers are ones already."""
        import pyarrow as pa

        if self.needs(value, "text", "whole numbers") == "text":
            return self.parsed(value, writer, pa.int64())
        if value.kind == pa.int64():
            return value
        return value._replace(sql=writer.cast(value.sql, pa.int64()), kind=pa.int64())

    def read(self, x: exp.Expr, writer: SqlWriter) -> exp.Expr:
        """Numbers of up to 18 digits all fit; of those of 19, the ones up to the largest."""
        import pyarrow as pa

        def number(x: exp.Expr) -> exp.Expr:
            cast = writer.cast(x, pa.int64())
            exact = pa.decimal128(_MAX_DIGITS, 0)
            wide = writer.cast(x, exact)
            fits = [
                writer.compare(wide, "<", writer.literal(Decimal(_LARGEST + 1), exact), exact),
                writer.compare(wide, ">", writer.literal(Decimal(-_LARGEST - 2), exact), exact),
            ]
            return writer.case(
                (writer.matches(x, "[+-]{0,1}0*[0-9]{1,18}"), cast),
                (writer.matches(x, "[+-]{0,1}0*[0-9]{19}"), writer.case((writer.all_of(*fits), cast))),
            )

        return writer.once(x, number)


@strict
def parse_int(*, on_failure: OnFailure = "null", default: int | None = None) -> Normalizer:
    """Text as a whole number of 64 bits (`BigInt`): digits 0 to 9, with a sign before them or not, and nothing else
    (put `trim()` before it). Whole numbers stay. Anything else, the empty text and what is too large become null, fail
    the load (`on_failure="error"`) or become `default` (`"default"`). Null stays null."""
    checked_failure(on_failure, default, "parse_int()")
    if default is not None:
        whole(default, "The default of parse_int()", -_LARGEST - 1, _LARGEST)
    return ParseInt(on_failure, default)


@dataclass(frozen=True)
class ParseNumeric(Parser):
    precision: int = _MAX_DIGITS
    scale: int = 18

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """Texts are read; whole numbers become decimals, decimals are ones already."""
        import pyarrow as pa

        kind = pa.decimal128(self.precision, self.scale)
        family = self.needs(value, "text", "decimals", "whole numbers")
        if family == "text":
            return self.parsed(value, writer, kind)
        if family == "whole numbers":
            digits = {8: 3, 16: 5, 32: 10, 64: 19}[value.kind.bit_width]
            kind = pa.decimal128(digits, 0)
            return value._replace(sql=writer.cast(value.sql, kind), kind=kind)
        return value

    def read(self, x: exp.Expr, writer: SqlWriter) -> exp.Expr:
        """No more digits than there is room for, but for zeros at both ends."""
        import pyarrow as pa

        before = self.precision - self.scale
        digits = f"0*[0-9]{{1,{before}}}" if before else "0+"
        behind = f"|[.][0-9]{{1,{self.scale}}}0*" if self.scale else ""
        pattern = f"[+-]{{0,1}}({digits}([.][0-9]{{0,{self.scale}}}0*){{0,1}}|[.]0+{behind})"
        kind = pa.decimal128(self.precision, self.scale)
        return writer.once(x, lambda x: writer.case((writer.matches(x, pattern), writer.cast(x, kind))))


@strict
def parse_numeric(
    precision: int = _MAX_DIGITS,
    scale: int = 18,
    *,
    on_failure: OnFailure = "null",
    default: Decimal | int | None = None,
) -> Normalizer:
    """Text as a decimal of `precision` digits, `scale` of them behind the point (`Numeric[p, s]`): digits 0 to 9 with a
    point or none, a sign or none, and nothing else. Nothing is rounded: a number with more digits than fit cannot be
    read. Decimals stay; whole numbers become decimals. Failures and nulls are as in `parse_int`. For `1.234,56` put
    `replace(".", "")` and `replace(",", ".")` before it."""
    whole(precision, "The precision of parse_numeric()", 1, _MAX_DIGITS)
    whole(scale, "The scale of parse_numeric()", 0, precision)
    checked_failure(on_failure, default, "parse_numeric()")
    if default is not None and (not isinstance(default, Decimal | int) or isinstance(default, bool)):
        raise DeclarationError(f"The default of parse_numeric() is a Decimal or int, not {default!r}.")
    return ParseNumeric(on_failure, default, precision, scale)


@dataclass(frozen=True)
class Round(Normalizer):
    digits: int

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """Whole numbers stay."""
        family = self.needs(value, "decimals", "floats", "whole numbers")
        if family == "whole numbers" or (family == "decimals" and self.digits >= value.kind.scale):
            return value
        if family == "floats":
            return value._replace(sql=writer.round_float(value.sql, self.digits, value.kind))
        import pyarrow as pa

        # One more before the point: 9.99 becomes 10.0.
        kept = value.kind.precision - value.kind.scale + self.digits
        kind = pa.decimal128(min(kept + 1, _MAX_DIGITS), self.digits)
        return value._replace(sql=writer.round_decimal(value.sql, self.digits, kind), kind=kind)


@strict
def round(digits: int = 0) -> Normalizer:
    """Rounded to `digits` behind the point (0 to 15), halves away from zero: 2.5 becomes 3 and -2.5 becomes -3. A float
    is rounded as it is written, so 0.145 becomes 0.15. Whole numbers stay, NaN and infinity too. Null stays null."""
    return Round(whole(digits, "The digits of round()", 0, 15))


@dataclass(frozen=True)
class Clamp(Normalizer):
    low: Any
    high: Any

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """The type stays."""
        kind = value.kind
        self.needs(value, "decimals", "floats", "whole numbers", "dates", "timestamps")
        low, high = (None if each is None else fitting(each, value, "clamp()") for each in (self.low, self.high))
        if low is not None and high is not None and low > high:
            raise DeclarationError(f"clamp(): {self.low!r} is more than {self.high!r}.")

        def clamped(x: exp.Expr) -> exp.Expr:
            bounds = [
                (writer.literal(each, kind), sign) for each, sign in ((low, "<"), (high, ">")) if each is not None
            ]
            return writer.case(*((writer.compare(x, sign, bound, kind), bound) for bound, sign in bounds), otherwise=x)

        return value._replace(sql=writer.once(value.sql, clamped))


@strict
def clamp(low: Any = None, high: Any = None) -> Normalizer:
    """What is less than `low` becomes `low`, what is more than `high` becomes `high`; one of them may be left out. For
    numbers, dates and timestamps; the bounds must be of the column's type. NaN is more than any number. Null stays
    null."""
    if low is None and high is None:
        raise DeclarationError("clamp() needs a low or a high bound.", hint="Write clamp(low=0) or clamp(0, 100).")
    return Clamp(low, high)


@dataclass(frozen=True)
class ParseBool(Parser):
    truthy: tuple[str, ...] = ()
    falsy: tuple[str, ...] = ()

    def apply(self, value: Value, writer: SqlWriter) -> Value:
        """Texts are read, and 0 and 1; booleans are ones already."""
        import pyarrow as pa

        family = self.needs(value, "text", "booleans", "whole numbers")
        if family == "booleans":
            return value
        if family == "whole numbers":
            value = value._replace(sql=writer.cast(value.sql, pa.string()), kind=pa.string())
            return ParseBool(self.on_failure, self.default, ("1",), ("0",)).parsed(value, writer, pa.bool_())
        return self.parsed(value, writer, pa.bool_())

    def read(self, x: exp.Expr, writer: SqlWriter) -> exp.Expr:
        """Look the text up."""
        import pyarrow as pa

        values = dict.fromkeys(self.truthy, writer.literal(True, pa.bool_()))
        values |= dict.fromkeys(self.falsy, writer.literal(False, pa.bool_()))
        return writer.lookup(writer.lower(x), values)


@strict
def parse_bool(
    truthy: Sequence[str] = ("true", "t", "yes", "y", "on", "1"),
    falsy: Sequence[str] = ("false", "f", "no", "n", "off", "0"),
    *,
    on_failure: OnFailure = "null",
    default: bool | None = None,
) -> Normalizer:
    """Text as true or false (`Boolean`), in any case, with nothing around it. Booleans stay; of whole numbers 1 and 0
    are read. Anything else, the empty text too, becomes null, fails the load (`on_failure="error"`) or becomes
    `default` (`"default"`). Null stays null."""
    checked_failure(on_failure, default, "parse_bool()")
    if default is not None and not isinstance(default, bool):
        raise DeclarationError(f"The default of parse_bool() is True or False, not {default!r}.")
    both = {"truthy": truthy, "falsy": falsy}
    for name, texts in both.items():
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise DeclarationError(f"{name} of parse_bool() is a list of texts, not {texts!r}.")
    true, false = (
        tuple("".join(c.lower() for c in checked_text(word, "A word of parse_bool()")) for word in each)
        for each in both.values()
    )
    if shared := set(true) & set(false):
        raise DeclarationError(f"parse_bool() cannot take {min(shared)!r} for both true and false.")
    return ParseBool(on_failure, default, true, false)
