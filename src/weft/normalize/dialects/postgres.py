"""PostgreSQL, in a UTF-8 database and a session in UTC, as Weft's are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import exp

from weft.columns import LOCAL_TIME, UTC_TIME
from weft.normalize import patterns
from weft.normalize.base import family
from weft.normalize.dialects.base import ISO_INSTANT, WHITESPACE, Words

_MONTH_DAYS = [
    f"{month:02}-{day:02}"
    for month, days in zip(range(1, 13), (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True)
    for day in range(1, days + 1)
]


class Postgres(Words):
    """A value that is used several times is made once, in a subquery: it costs next to nothing there."""

    dialect: ClassVar[str] = "postgres"
    types: ClassVar[dict[pa.DataType, str]] = {
        pa.bool_(): "BOOLEAN",
        pa.int8(): "SMALLINT",
        pa.int16(): "SMALLINT",
        pa.int32(): "INTEGER",
        pa.int64(): "BIGINT",
        pa.float32(): "REAL",
        pa.float64(): "DOUBLE PRECISION",
        pa.date32(): "DATE",
        UTC_TIME: "TIMESTAMPTZ",
        LOCAL_TIME: "TIMESTAMP",
        pa.string(): "TEXT",
        pa.binary(): "BYTEA",
    }

    def column(self, quoted: str, kind: pa.DataType) -> exp.Expr:
        """Text of the database's own collation: another one may take different letters for the same."""
        found = super().column(quoted, kind)
        return _collated(self.cast(found, kind), "default") if family(kind) == "text" else found

    def result(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Text of a collation that goes with columns: two that were written out do not go with each other."""
        return _collated(x, "default") if family(kind) == "text" else x

    def once(self, x: exp.Expr, make: Callable[[exp.Expr], exp.Expr]) -> exp.Expr:
        """Without OFFSET 0 the planner would put the expression in again wherever it is used."""
        if _is_column(x):
            return make(x)
        made = exp.select(make(exp.column("v"))).from_(exp.select(exp.alias_(x.copy(), "v")).offset(0).subquery("s"))
        return made.subquery()

    def literal(self, value: Any, kind: pa.DataType) -> exp.Expr:
        """Bytes have a function of their own."""
        return self.call("DECODE", value.hex(), "hex") if family(kind) == "bytes" else super().literal(value, kind)

    # ------------------------------------------------------------------------------------------------------------ texts

    def lower(self, x: exp.Expr) -> exp.Expr:
        """ICU knows all letters whatever the database's locale is; ASCII goes without, ten times as fast."""
        return self._cased("LOWER", x)

    def upper(self, x: exp.Expr) -> exp.Expr:
        """The same."""
        return self._cased("UPPER", x)

    def _cased(self, function: str, x: exp.Expr) -> exp.Expr:
        def cased(x: exp.Expr) -> exp.Expr:
            is_ascii = exp.EQ(this=self.call("OCTET_LENGTH", x), expression=self.call("LENGTH", x))
            # At the end of a word ICU would write another small sigma.
            given = self.replace(x, "Σ", "σ") if function == "LOWER" else x
            return self.case(
                (is_ascii, self.call(function, _collated(x, "C"))),
                otherwise=_collated(self.call(function, _collated(given, "und-x-icu")), "C"),
            )

        return _collated(self.once(x, cased), "default")

    def trim(self, x: exp.Expr) -> exp.Expr:
        """Of a set of characters."""
        return self.call("BTRIM", x, WHITESPACE)

    def matches(self, x: exp.Expr, pattern: str) -> exp.Expr:
        """`$` is the end, and nothing but the end."""
        return exp.RegexpLike(this=exp.Paren(this=x.copy()), expression=self.text(f"^({pattern})$"))

    def substitute(self, x: exp.Expr, pattern: str, replacement: patterns.Replacement) -> exp.Expr:
        """Every match."""
        return self.call("REGEXP_REPLACE", x, pattern, self.replacement(replacement), "g")

    # ------------------------------------------------------------------------------------------------------------ times

    def instant(self, x: exp.Expr, *, with_zone: bool = True) -> exp.Expr:
        """The usual form is told by looking its parts up in lists, which takes a third of the time of a regular
        expression; the others, by one. More than six digits of a second are cut off: PostgreSQL would round."""

        def parsed(x: exp.Expr) -> exp.Expr:
            cut = self.substitute(x, "([.][0-9]{6})[0-9]+", (1,))
            return self.case(
                (self._is_usual(x), self.cast(x, UTC_TIME)), (self.is_time(x, ISO_INSTANT), self.cast(cut, UTC_TIME))
            )

        return self.once(x, parsed)

    def _is_usual(self, x: exp.Expr) -> exp.Expr:
        """Whether a text is a time such as 2026-01-31T23:59:59.123456Z of these days."""

        def is_like(*shapes: str) -> exp.Expr:
            return exp.or_(*(exp.Like(this=x.copy(), expression=self.text(shape)) for shape in shapes))

        def among(start: int, length: int, texts: Iterable[str]) -> exp.Expr:
            return exp.In(this=self.call("SUBSTR", x, start, length), expressions=[self.text(each) for each in texts])

        def length(operator: type[exp.Binary], limit: int) -> exp.Expr:
            return operator(this=self.call("LENGTH", x), expression=exp.Literal.number(limit))

        behind = exp.Not(
            this=exp.RegexpLike(this=self.call("SUBSTR", x, 21), expression=self.text("[^0-9Z]|Z[^Z]|ZZ|^Z"))
        )
        upto_26 = exp.or_(
            length(exp.LT, 27), exp.and_(length(exp.EQ, 27), exp.Like(this=x.copy(), expression=self.text("%Z")))
        )
        with_fraction = exp.and_(length(exp.GT, 20), is_like(f"{'_' * 19}.%"), upto_26, behind)
        return exp.and_(
            is_like("____-__-__T__:__:__%", "____-__-__ __:__:__%"),
            among(1, 4, map(str, range(1970, 2070))),
            among(6, 5, _MONTH_DAYS),
            among(12, 2, (f"{hour:02}" for hour in range(24))),
            among(15, 2, (f"{minute:02}" for minute in range(60))),
            among(18, 2, (f"{second:02}" for second in range(60))),
            exp.or_(length(exp.EQ, 19), is_like(f"{'_' * 19}Z"), with_fraction),
        )

    def later(self, x: exp.Expr, hours: int) -> exp.Expr:
        """By an interval."""
        return exp.Paren(this=exp.Add(this=x.copy(), expression=exp.Var(this=f"INTERVAL '{hours} hours'")))

    def to_utc(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Whatever zone the session is in."""
        return _at_zone(self.cast(x, LOCAL_TIME), "UTC")

    def to_day(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Whatever zone the session is in."""
        return self.cast(_at_zone(x, "UTC") if kind == UTC_TIME else x, pa.date32())

    def to_zone(self, x: exp.Expr, kind: pa.DataType, zone: str) -> exp.Expr:
        """By PostgreSQL's own data of time zones."""
        return _at_zone(x if kind == UTC_TIME else self.to_utc(x, kind), zone)

    def truncate_time(self, x: exp.Expr, kind: pa.DataType, unit: str) -> exp.Expr:
        """Instants in UTC."""
        if kind == UTC_TIME:
            return self.call("DATE_TRUNC", unit, x, "UTC")
        if kind == LOCAL_TIME:
            return self.call("DATE_TRUNC", unit, x)
        return self.cast(self.call("DATE_TRUNC", unit, self.cast(x, LOCAL_TIME)), kind)

    # ----------------------------------------------------------------------------------------------------------- errors

    def failed(self, x: exp.Expr, message: str, kind: pa.DataType) -> exp.Expr:
        """What cannot be cast is quoted in the error: the message is part of it."""
        said = self.joined(f"{message} ", x)
        wrong = {"text": pa.int64(), "bytes": pa.int64()}.get(family(kind), kind)
        return self.cast(self.cast(said, wrong), kind)


def _is_column(x: exp.Expr) -> bool:
    while isinstance(x, exp.Collate | exp.Cast | exp.Paren):
        x = x.this
    return isinstance(x, exp.Var | exp.Column | exp.Literal)


def _collated(x: exp.Expr, name: str) -> exp.Expr:
    return exp.Paren(this=exp.Collate(this=exp.Paren(this=x.copy()), expression=exp.to_identifier(name, quoted=True)))


def _at_zone(x: exp.Expr, zone: str) -> exp.Expr:
    return exp.Paren(this=exp.AtTimeZone(this=exp.Paren(this=x.copy()), zone=exp.Literal.string(zone)))


WORDS = Postgres()
