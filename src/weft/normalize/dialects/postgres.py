"""PostgreSQL, in a UTF-8 database and a session in UTC, as Weft's are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pyarrow as pa
from sqlglot import exp

from weft.columns import LOCAL_TIME, UTC_TIME
from weft.normalize.base import family
from weft.normalize.dialects.base import ISO_INSTANT, SqlWriter, at_zone
from weft.normalize.formats import Format, checked

_ISO_DAY = checked("%Y-%m-%d", "parse_date()")
# But the 29th of February, which goes the long way.
_MONTH_DAYS = [
    (f"{month:02}", f"{day:02}")
    for month, days in zip(range(1, 13), (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True)
    for day in range(1, days + 1)
]


class Postgres(SqlWriter):
    """A value that is used several times is made once, in a subquery: it costs next to nothing there."""

    dialect: ClassVar[str] = "postgres"
    why_only_plain_patterns: ClassVar[str | None] = (
        "PostgreSQL would take another match than the others do: the longest one, where a pattern has |, a quantifier "
        "behind a group, or a lazy one"
    )
    types: ClassVar[dict[pa.DataType, str]] = SqlWriter.types | {
        pa.int8(): "SMALLINT",
        pa.float64(): "DOUBLE PRECISION",
        pa.binary(): "BYTEA",
    }

    def column(self, quoted: str, kind: pa.DataType) -> exp.Expr:
        """Text of the database's own collation: another one may take different letters for the same."""
        named = super().column(quoted, kind)
        return _collated(self.cast(named, kind), "default") if family(kind) == "text" else named

    def result(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Text of a collation that goes with columns: two that were written out do not go with each other."""
        return _collated(x, "default") if family(kind) == "text" else x

    def once(self, x: exp.Expr, make: Callable[[exp.Expr], exp.Expr]) -> exp.Expr:
        """Without OFFSET 0 the planner would put the expression in again wherever it is used."""
        if _is_column(x):
            return make(x)
        query = exp.select(make(exp.column("v"))).from_(exp.select(exp.alias_(x.copy(), "v")).offset(0).subquery("s"))
        return query.subquery()

    def literal(self, value: Any, kind: pa.DataType) -> exp.Expr:
        """Bytes have a function of their own."""
        return self.call("DECODE", value.hex(), "hex") if family(kind) == "bytes" else super().literal(value, kind)

    # ------------------------------------------------------------------------------------------------------------ texts

    def lower(self, x: exp.Expr) -> exp.Expr:
        """ICU knows all letters whatever the database's locale is; ASCII goes without, ten times as fast."""
        return self._cased("LOWER", x)

    def upper(self, x: exp.Expr) -> exp.Expr:
        return self._cased("UPPER", x)

    def _cased(self, function: str, x: exp.Expr) -> exp.Expr:
        def cased(x: exp.Expr) -> exp.Expr:
            # At the end of a word ICU would write another small sigma.
            spelled = self.replace(x, "Σ", "σ") if function == "LOWER" else x
            is_ascii = exp.EQ(this=self.call("OCTET_LENGTH", x), expression=self.call("LENGTH", x))
            return self.case(
                (is_ascii, self.call(function, _collated(x, "C"))),
                otherwise=_collated(self.call(function, _collated(spelled, "und-x-icu")), "C"),
            )

        return _collated(self.once(x, cased), "default")

    def matches(self, x: exp.Expr, pattern: str) -> exp.Expr:
        """`$` is the end, and nothing but the end."""
        return exp.RegexpLike(this=exp.Paren(this=x.copy()), expression=self.text(f"^({pattern})$"))

    # ------------------------------------------------------------------------------------------------------------ times

    # PostgreSQL's regular expressions take microseconds a character. So times with two digits a field are recognized by
    # looking each field up in a list, which it hashes; only what is left goes the long way.

    def instant(self, x: exp.Expr, *, with_zone: bool = True) -> exp.Expr:
        """More than six digits of a second are cut off: PostgreSQL would round."""

        def parsed(x: exp.Expr) -> exp.Expr:
            cut = self.substitute(x, "([.][0-9]{6})[0-9]+", (1,))
            return self.case(
                (self._is_usual(x), self.cast(x, UTC_TIME)), (self.is_time(x, ISO_INSTANT), self.cast(cut, UTC_TIME))
            )

        return self.once(x, parsed)

    def _is_usual(self, x: exp.Expr) -> exp.Expr:
        """Whether a text is a time such as 2026-01-31T23:59:59.123456Z of these days."""
        places = {"Y": 1, "m": 6, "d": 9, "H": 12, "M": 15, "S": 18}
        second, numbers = "_" * 19, [f"{number:02}" for number in range(100)]
        # The digits of a fraction two by two; of three, the one in the middle twice.
        fractions = (
            exp.and_(
                self._is_like(x, f"{second}.{'_' * digits}Z", f"{second}.{'_' * digits}"),
                *(self._among(x, 21 + start, 23 + start, numbers) for start in starts),
            )
            for digits, starts in ((6, (0, 2, 4)), (3, (0, 1)))
        )
        return exp.and_(
            self._is_like(x, "____-__-__T__:__:__%", "____-__-__ __:__:__%"),
            *self._fields(x, places, "____-__-__"),
            exp.or_(self._is_like(x, second, f"{second}Z"), *fractions),
        )

    def day(self, x: exp.Expr) -> exp.Expr:
        """Look up the fields of days with two digits a field, as those of times."""
        return self._by_width(x, _ISO_DAY, super().day, clock=False)

    def instant_by(self, x: exp.Expr, format: Format) -> exp.Expr:
        """Look up the fields of usual ISO 8601 times, and of formats in which every field has its place."""

        def otherwise(x: exp.Expr) -> exp.Expr:
            return super(Postgres, self).instant_by(x, format)

        iso = re.fullmatch(r"%Y-%m-%d([T ])%H:%M:%S([.]%f)?(%z)?", format.text)
        if iso is None or not (iso[2] or iso[3]):
            return self._by_width(x, format, otherwise, clock=True)
        tails = [f".{'_' * digits}" for digits in (6, 3)] if iso[2] else [""]
        shapes = [f"____-__-__{iso[1]}__:__:__{tail}{'Z' if iso[3] else ''}" for tail in tails]

        def read(x: exp.Expr) -> exp.Expr:
            usual = exp.and_(self._is_like(x, *shapes), self._is_usual(x))
            return self.case((usual, self.cast(x, UTC_TIME)), otherwise=otherwise(x))

        return self.once(x, read)

    def day_by(self, x: exp.Expr, format: Format) -> exp.Expr:
        """Look up the fields of formats in which every field has its place."""
        return self._by_width(x, format, lambda x: super(Postgres, self).day_by(x, format), clock=False)

    def _by_width(
        self, x: exp.Expr, format: Format, otherwise: Callable[[exp.Expr], exp.Expr], *, clock: bool
    ) -> exp.Expr:
        places, shape = {}, ""
        for part in format.parts:
            if len(part) > 1:
                places[part[1]] = len(shape) + 1
            shape += {"%Y": "____"}.get(part, "__") if len(part) > 1 else part
        if not set(places) <= set("YmdHMS") or {"%", "_", "\\"} & set(format.parts):
            return otherwise(x)
        # Month and day are looked up together.
        first, second = sorted((places["m"], places["d"]))
        if any(first < place < second for place in places.values()):
            return otherwise(x)

        def read(x: exp.Expr) -> exp.Expr:
            fits = exp.and_(self._is_like(x, shape), *self._fields(x, places, shape))
            texts: list[exp.Expr | str] = [self.call("SUBSTR", x, places["Y"], 4)]
            for letter, before in zip("mdHMS" if clock else "md", "-- ::", strict=False):
                texts += [before, self.call("SUBSTR", x, places[letter], 2) if letter in places else "00"]
            is_iso = shape == "____-__-__" or (clock and shape in ("____-__-__ __:__:__", "____-__-__T__:__:__"))
            parsed = self.cast(x if is_iso else self.joined(*texts), UTC_TIME if clock else pa.date32())
            return self.case((fits, parsed), otherwise=otherwise(x))

        return self.once(x, read)

    def _fields(self, x: exp.Expr, places: dict[str, int], shape: str) -> list[exp.Expr]:
        """Whether the fields at these places are a day in these days and a time of day."""
        first, second = sorted((places["m"], places["d"]))
        # What stands between the two, mostly a mark: they are looked up together.
        between = shape[first + 1 : second - 1]
        ordered = _MONTH_DAYS if first == places["m"] else [(day, month) for month, day in _MONTH_DAYS]
        conditions = [
            self._among(x, places["Y"], places["Y"] + 4, map(str, range(1970, 2070))),
            self._among(x, first, second + 2, (f"{one}{between}{other}" for one, other in ordered)),
        ]
        limits = {"H": 24, "M": 60, "S": 60}
        return conditions + [
            self._among(x, places[c], places[c] + 2, (f"{n:02}" for n in range(limits[c])))
            for c in limits
            if c in places
        ]

    def _among(self, x: exp.Expr, start: int, end: int, texts: Iterable[str]) -> exp.Expr:
        part = self.call("SUBSTR", x, start, end - start)
        return exp.In(this=part, expressions=[self.text(each) for each in texts])

    def _is_like(self, x: exp.Expr, *shapes: str) -> exp.Expr:
        return exp.or_(*(exp.Like(this=x.copy(), expression=self.text(shape)) for shape in shapes))

    def to_utc(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Whatever zone the session is in."""
        return at_zone(self.cast(x, LOCAL_TIME), "UTC")

    def to_day(self, x: exp.Expr, kind: pa.DataType) -> exp.Expr:
        """Whatever zone the session is in."""
        return self.cast(at_zone(x, "UTC") if kind == UTC_TIME else x, pa.date32())

    def truncate_time(self, x: exp.Expr, kind: pa.DataType, unit: str) -> exp.Expr:
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


WRITER = Postgres()
