"""The SQL of the normalizers, and how each dialect writes it.

A normalizer is defined once, by methods of `SqlWriter`, which return sqlglot expressions. What databases compute in
different ways is made the same here: this is the only place where dialects differ.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import exp

from weft.columns import LOCAL_TIME, UTC_TIME
from weft.normalize import patterns
from weft.normalize.base import family
from weft.normalize.formats import Format

# Unicode's White_Space, the most frequent first.
WHITESPACE = " \t\n\v\f\r\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"

# Letters whose upper case is several letters, for databases that take them one by one: ß is SS.
SEVERAL_UPPER = {c: c.upper() for c in map(chr, range(0x80, 0x10000)) if len(c.upper()) > 1}

# ISO 8601 as text: the days that there are, a time of day, a zone.
_DAY = (
    "([0-9]{4}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|[0-9]{4}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|[0-9]{4}-02-(0[1-9]|1[0-9]|2[0-8])|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9}){0,1}){0,1}"
_ZONE = "(Z|[+-](0[0-9]|1[0-4])(:{0,1}[0-5][0-9]){0,1}){0,1}"
ISO_DAY = _DAY
ISO_INSTANT = f"{_DAY}([T ]{_CLOCK}{_ZONE}){{0,1}}"
# The year 0, and with an offset maybe the years 0 and 10000: few databases hold them.
ISO_BEYOND = "0000.*|(0001-01-01|9999-12-31)[T ][0-9:.]*[+-][0-9:]*"


class SqlWriter:
    """Writes standard SQL. A dialect overrides what it writes or computes in another way."""

    dialect: ClassVar[str]
    why_no_zones: ClassVar[str | None] = None
    """Why it cannot tell what clocks in a time zone show; `None` where it can."""
    why_only_plain_patterns: ClassVar[str | None] = None
    """Why it cannot match patterns that are not plain (`patterns.is_plain`); `None` where it can."""

    # ------------------------------------------------------------------------------------------------------- structure

    def column(self, quoted: str, kind: pa.DataType) -> exp.Expr:
        """A column, by its quoted name, as what its type says: `text` is text whatever the database calls it."""
        return exp.Var(this=quoted)

    def result(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Return the result of the last step."""
        return x

    def once(self, x: exp.Expr, make: Callable[[exp.Expr], exp.Expr]) -> exp.Expr:
        """Return `make(x)`, which uses `x` several times."""
        return make(x)

    def call(self, name: str, *arguments: exp.Expr | str | int) -> exp.Expr:
        """A function of the database."""
        return exp.Anonymous(this=name, expressions=[self._argument(each) for each in arguments])

    def _argument(self, argument: exp.Expr | str | int) -> exp.Expr:
        if isinstance(argument, str):
            return self.text(argument)
        return exp.Literal.number(argument) if isinstance(argument, int) else argument.copy()

    def case(self, *cases: tuple[exp.Expr, exp.Expr], otherwise: exp.Expr | None = None) -> exp.Expr:
        """The value behind the first condition that is true."""
        return exp.Case(
            ifs=[exp.If(this=condition.copy(), true=value.copy()) for condition, value in cases],
            default=None if otherwise is None else otherwise.copy(),
        )

    def all_of(self, *conditions: exp.Expr) -> exp.Expr:
        """Whether all are true."""
        return exp.and_(*conditions, copy=True)

    def coalesce(self, *values: exp.Expr) -> exp.Expr:
        """The first that is not null."""
        return self.call("COALESCE", *values) if len(values) > 1 else values[0]

    def is_not_null(self, x: exp.Expr) -> exp.Expr:
        """Whether there is a value."""
        return exp.Not(this=exp.Is(this=exp.Paren(this=x.copy()), expression=exp.Null()))

    def lookup(self, x: exp.Expr, values: dict[str, exp.Expr]) -> exp.Expr:
        """The value that belongs to a text; null where none does."""
        return exp.Case(
            this=x.copy(), ifs=[exp.If(this=self.text(word), true=value.copy()) for word, value in values.items()]
        )

    def compare(self, x: exp.Expr, sign: str, y: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Whether a number or time is less (`<`) or more (`>`) than another."""
        return {"<": exp.LT, ">": exp.GT}[sign](this=exp.Paren(this=x.copy()), expression=y.copy())

    def joined(self, *texts: exp.Expr | str) -> exp.Expr:
        """Texts, one behind the other; null if one is null."""
        parts = [self._argument(each) for each in texts]
        whole = parts[0]
        for each in parts[1:]:
            whole = exp.DPipe(this=whole, expression=each)
        return exp.Paren(this=whole)

    # -------------------------------------------------------------------------------------------------------- constants

    def text(self, value: str) -> exp.Expr:
        """A text."""
        return exp.Literal.string(value)

    def literal(self, value: Any, kind: pa.DataType) -> exp.Expr:
        """A constant of a type."""
        family_name = family(kind)
        if family_name == "text":
            return self.text(value)
        if family_name == "booleans":
            return exp.true() if value else exp.false()
        if family_name == "whole numbers":
            size = exp.Literal.number(abs(value))
            number = exp.Paren(this=exp.Neg(this=size)) if value < 0 else size
            # Else it would make a larger type of a small one.
            return number if kind == pa.int64() else self.cast(number, kind)
        if family_name == "bytes":
            return self.call("UNHEX", value.hex())
        return self.cast(self.text(plain(value)), kind)

    def as_type(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """The result of a user's expression as a type, by the database's own rules."""
        return self.cast(x, kind)

    def cast(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """A value as a type that it fits."""
        # By name: to sqlglot a TIMESTAMP is one thing in all dialects.
        return exp.Cast(this=x.copy(), to=exp.Var(this=self.type_name(kind)))

    def type_name(self, kind: pa.DataType) -> str:
        """A type, as CAST takes it."""
        if pa.types.is_decimal(kind):
            return f"DECIMAL({kind.precision}, {kind.scale})"
        return self.types[kind]

    types: ClassVar[dict[pa.DataType, str]] = {
        pa.bool_(): "BOOLEAN",
        pa.int8(): "TINYINT",
        pa.int16(): "SMALLINT",
        pa.int32(): "INTEGER",
        pa.int64(): "BIGINT",
        pa.float32(): "REAL",
        pa.float64(): "DOUBLE",
        pa.date32(): "DATE",
        UTC_TIME: "TIMESTAMPTZ",
        LOCAL_TIME: "TIMESTAMP",
        pa.string(): "TEXT",
        pa.binary(): "BLOB",
    }

    # ------------------------------------------------------------------------------------------------------------ texts

    def lower(self, x: exp.Expr) -> exp.Expr:
        """Each letter's lower case, whatever stands next to it."""
        raise NotImplementedError

    def upper(self, x: exp.Expr) -> exp.Expr:
        """Each letter's upper case, which may be several letters."""
        raise NotImplementedError

    def spelled_upper(self, x: exp.Expr, finds: Callable[[exp.Expr, str], exp.Expr]) -> exp.Expr:
        """With the upper case of letters that are several there: rare, so they are looked for first."""
        spelled = x
        for letter, letters in SEVERAL_UPPER.items():
            spelled = self.replace(spelled, letter, letters)
        return self.case((finds(x, f"[{''.join(SEVERAL_UPPER)}]"), spelled), otherwise=x)

    def trim(self, x: exp.Expr) -> exp.Expr:
        """Without white space at both ends."""
        return self.call("BTRIM", x, WHITESPACE)

    def empty_to_null(self, x: exp.Expr) -> exp.Expr:
        """Null where it is the empty text."""
        return self.nullif(x, self.text(""))

    def whitespace_to_null(self, x: exp.Expr) -> exp.Expr:
        """Null where trimming leaves nothing."""
        return self.once(x, lambda x: self.case((self.is_not_null(self.empty_to_null(self.trim(x))), x)))

    def email_normalize(self, x: exp.Expr) -> exp.Expr:
        """Trimmed, in lower case; null where that leaves nothing."""
        return self.empty_to_null(self.lower(self.trim(x)))

    def phone_normalize(self, x: exp.Expr) -> exp.Expr:
        """The digits, and a plus sign if there was one before them."""

        def digits(x: exp.Expr) -> exp.Expr:
            left = self.empty_to_null(self.substitute(x, "[^0-9]+", ()))
            with_plus = self.matches(self.substitute(x, "[^0-9+]+", ()), "[+][0-9+]*")
            return self.case((with_plus, self.joined("+", left)), otherwise=left)

        return self.once(x, digits)

    def replace(self, x: exp.Expr, old: str, new: str) -> exp.Expr:
        """With every occurrence of a text replaced."""
        return self.call("REPLACE", x, old, new)

    def truncate(self, x: exp.Expr, length: int) -> exp.Expr:
        """The first characters."""
        return self.call("LEFT", x, length)

    def nullif(self, x: exp.Expr, y: exp.Expr) -> exp.Expr:
        """Null where both are equal, letter by letter."""
        return self.call("NULLIF", x, y)

    def matches(self, x: exp.Expr, pattern: str) -> exp.Expr:
        """Whether the whole text is of a pattern, which has no anchors and means the same everywhere."""
        raise NotImplementedError

    def whole(self, pattern: str) -> str:
        """A pattern without alternatives, as one of the whole text."""
        return f"^{pattern}{patterns.end(self.dialect)}"

    def substitute(self, x: exp.Expr, pattern: str, replacement: patterns.Replacement) -> exp.Expr:
        """Every match of a pattern replaced. The pattern is as `patterns.written` gives it for this dialect."""
        return self.call("REGEXP_REPLACE", x, pattern, self.replacement(replacement), "g")

    def regex_replace(self, x: exp.Expr, pattern: str, replacement: patterns.Replacement) -> exp.Expr:
        """Every match of a pattern in Python's syntax replaced."""
        return self.substitute(x, patterns.written(pattern, self.dialect), replacement)

    def reference(self, group: int) -> str:
        """What a group matched, in a replacement."""
        return f"\\{group}"

    def replacement(self, parts: patterns.Replacement) -> str:
        """A replacement as the dialect takes it."""
        return "".join(self.reference(part) if isinstance(part, int) else part.replace("\\", "\\\\") for part in parts)

    # ------------------------------------------------------------------------------------------------------------ times

    def instant(self, x: exp.Expr, *, with_zone: bool = True) -> exp.Expr:
        """The instant of a text in ISO 8601, in UTC where it names no zone; null where the text cannot be parsed.

        Without `with_zone` none of the texts names one.
        """
        return self.once(x, lambda x: self.case((self.is_time(x, ISO_INSTANT), self.cast(x, UTC_TIME))))

    def is_time(self, x: exp.Expr, pattern: str) -> exp.Expr:
        """Whether a text is of a pattern of times, and of the years 1 to 9999."""
        return self.all_of(self.matches(x, pattern), exp.Not(this=self.matches(x, ISO_BEYOND)))

    def day(self, x: exp.Expr) -> exp.Expr:
        """The day of a text in ISO 8601; null where the text cannot be parsed."""
        return self.once(x, lambda x: self.case((self.is_time(x, ISO_DAY), self.cast(x, pa.date32()))))

    def instant_by(self, x: exp.Expr, format: Format) -> exp.Expr:
        """The instant that a text says in a format; null where it says none."""
        instant = self.instant(format.iso(x, self, clock=True), with_zone="%z" in format.parts)
        afternoon = format.is_afternoon(x, self)
        return instant if afternoon is None else self.case((afternoon, self.later(instant, 12)), otherwise=instant)

    def day_by(self, x: exp.Expr, format: Format) -> exp.Expr:
        """The day that a text says in a format; null where it says none."""
        return self.day(format.iso(x, self, clock=False))

    def later(self, x: exp.Expr, hours: int) -> exp.Expr:
        """An instant some hours later."""
        interval = exp.Var(this=f"INTERVAL '{hours}' HOUR")
        return exp.Paren(this=exp.Add(this=exp.Paren(this=x.copy()), expression=interval))

    def to_utc(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """A day or a time without a zone as an instant: it is in UTC."""
        return self.cast(x, UTC_TIME)

    def to_day(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """The day of a time, in UTC."""
        return self.cast(x, pa.date32())

    def to_zone(self, x: exp.Expr, kind: pa.DataType, zone: str) -> exp.Expr:
        """The time that clocks in a zone show at an instant; a time without a zone is in UTC."""
        return at_zone(x if kind == UTC_TIME else self.to_utc(x, kind), zone)

    def truncate_time(self, x: exp.Expr, kind: pa.DataType, unit: str) -> exp.Expr:
        """The beginning of the year, quarter, month, week (Monday), day, hour, minute or second."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------------- numbers

    def round_decimal(self, x: exp.Expr, digits: int, kind: pa.DataType) -> exp.Expr:
        """Rounded, halves away from zero, as a decimal of that type."""
        return self.cast(self.call("ROUND", x, digits), kind)

    def round_float(self, x: exp.Expr, digits: int, kind: pa.DataType) -> exp.Expr:
        """A double rounded as it is written, halves away from zero. From 2**53 on there is nothing to round."""

        def rounded(x: exp.Expr) -> exp.Expr:
            shown = self.cast(self.cast(x, pa.float64()), pa.string())
            exact = self.cast(shown, ROUNDED_AS)
            limit = exp.Literal.number("9007199254740992")
            small = exp.LT(this=self.call("ABS", x), expression=limit)
            return self.case((small, self.cast(self.call("ROUND", exact, digits), kind)), otherwise=x)

        return self.once(x, rounded)

    # ----------------------------------------------------------------------------------------------------------- errors

    def failed(self, x: exp.Expr, message: str, kind: pa.DataType) -> exp.Expr:
        """An error of the statement that says the message and the value."""
        raise NotImplementedError


def at_zone(x: exp.Expr, zone: str) -> exp.Expr:
    """An instant as the time that clocks in a zone show, or the other way round."""
    return exp.Paren(this=exp.AtTimeZone(this=exp.Paren(this=x.copy()), zone=exp.Literal.string(zone)))


# As many digits before the point as floats have that are not whole, and as many behind it as are left.
ROUNDED_AS = pa.decimal128(38, 22)


def plain(value: Any) -> str:
    """A constant as every database reads it."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime):
        moment = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        zone = "" if value.tzinfo is None else "+00:00"
        return f"{moment.isoformat(' ', 'microseconds')}{zone}"
    if isinstance(value, date):
        return value.isoformat()
    return repr(value) if isinstance(value, float) else str(value)
