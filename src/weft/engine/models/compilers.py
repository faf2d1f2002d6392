"""Ibis expressions as SQL of the databases, in the forms in which Weft stores values.

Ibis writes for tables that it made itself: its SQLite has times in another form and heeds case in LIKE, its MySQL
divides decimals. What is mended here is pushed down; what else would mean something else is left to Spark (`pushdown`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC
from decimal import Decimal
from typing import Any, ClassVar

import ibis.expr.datatypes as dt
import ibis.expr.operations as ops
import sqlglot as sg
import sqlglot.expressions as sge
from ibis.backends.sql.compilers.base import NULL
from ibis.backends.sql.compilers.duckdb import DuckDBCompiler
from ibis.backends.sql.compilers.mysql import MySQLCompiler
from ibis.backends.sql.compilers.postgres import PostgresCompiler
from ibis.backends.sql.compilers.pyspark import PySparkCompiler
from ibis.backends.sql.compilers.sqlite import SQLiteCompiler

_MIDNIGHT = "0001-01-01T00:00:00.000000"
# How many letters of a time stay, by the unit that it is cut to.
_KEPT = {"Y": 4, "M": 7, "D": 10, "h": 13, "m": 16, "s": 19}
_PARTS = {"Year": (1, 4), "Month": (6, 2), "Day": (9, 2), "Hour": (12, 2), "Minute": (15, 2), "Second": (18, 2)}


def to_sql(expression: Any, dialect: str, collation: str | None = None) -> str:
    """Return an expression in the SQL of a database; an error of Ibis where it cannot be written."""
    compiler = _COMPILERS[dialect]()
    compiler.collation = collation
    query = compiler.to_sqlglot(expression.unbind())
    return str(query.sql(dialect=compiler.dialect, pretty=True, unsupported_level=sg.ErrorLevel.RAISE))


def to_spark_sql(expression: Any) -> str:
    compiler = _Spark()
    query = compiler.to_sqlglot(expression.unbind().op().replace(_with_exact_literals).to_expr())
    return str(query.sql(dialect=compiler.dialect, pretty=True))


def says_type(dialect: str, kind: Any) -> bool:
    """Return whether a column of a view that is cast to this type of numbers has it."""
    least = _LEAST_BYTES.get(dialect)
    is_number = kind.is_signed_integer() or kind.is_floating()
    return least is not None and bool(kind.is_decimal() or (is_number and kind.nbytes >= least))


def cuts_instant(op: Any) -> bool:
    """Return whether a time is one with a zone that was cut to an hour or a day; Ibis forgets the zone."""
    return isinstance(op, ops.TimestampTruncate) and op.arg.dtype.timezone is not None


class _Compiler:
    collation: str | None = None
    # Ibis has turned the base class's entries into methods: repeating them would override the methods below.
    SIMPLE_OPS: ClassVar[dict[Any, str]] = {}


class _Widening:
    """A sum or product of integers has room in the type that Ibis says, which is wider than theirs."""


def _widening(name: str) -> Callable[..., Any]:
    def visit(self: Any, op: Any, *, left: Any, right: Any) -> Any:
        if op.dtype.is_integer() and op.left.dtype.nbytes < op.dtype.nbytes:
            left = self.cast(left, op.dtype)
        return getattr(super(_Widening, self), name)(op, left=left, right=right)

    return visit


for _name in ("Add", "Subtract", "Multiply"):
    setattr(_Widening, f"visit_{_name}", _widening(f"visit_{_name}"))


class _Dividing:
    """A whole number is divided as one: by way of floats, which Ibis writes, those beyond 2^53 lose digits."""

    def visit_FloorDivide(self: Any, op: Any, *, left: Any, right: Any) -> Any:
        if not (op.left.dtype.is_integer() and op.right.dtype.is_integer()):
            return super().visit_FloorDivide(op, left=left, right=right)  # type: ignore[misc]
        # A quotient is cut towards 0; the greatest number below a negative one is one less.
        left = self.cast(left, op.dtype)
        has_rest = self.binop(sge.Mod, left, right).neq(0)
        is_below = sg.and_(has_rest, (left < 0).neq(sge.paren(right < 0)))
        return self.cast(self.binop(sge.Sub, self.divided(left, right), self.if_(is_below, 1, 0)), op.dtype)

    def divided(self: Any, left: Any, right: Any) -> Any:
        return self.binop(sge.IntDiv, left, right)


class _Sqlite(_Compiler, SQLiteCompiler):  # type: ignore[misc]
    """Times are texts: `2026-01-31T12:00:00.000000+00:00`, without a zone those without `+00:00`."""

    def visit_NonNullLiteral(self, op: Any, *, value: Any, dtype: Any) -> Any:
        if dtype.is_timestamp():
            text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
            return sge.convert(text + _zone(dtype))
        return super().visit_NonNullLiteral(op, value=value, dtype=dtype)

    def visit_Cast(self, op: Any, *, arg: Any, to: Any) -> Any:
        source = op.arg.dtype
        if cuts_instant(op.arg):
            return arg
        if source.is_timestamp() and to.is_date():
            return self.f.anon.substr(arg, 1, 10)
        if source.is_date() and to.is_timestamp():
            return self.f.concat(arg, _MIDNIGHT[10:] + _zone(to))
        return super().visit_Cast(op, arg=arg, to=to)

    def visit_Date(self, op: Any, *, arg: Any) -> Any:
        return self.f.anon.substr(arg, 1, 10)

    def visit_TimestampTruncate(self, op: Any, *, arg: Any, unit: Any) -> Any:
        kept = _KEPT[unit.short]
        return self.f.concat(self.f.anon.substr(arg, 1, kept), _MIDNIGHT[kept:] + _zone(op.arg.dtype))

    def visit_DateTruncate(self, op: Any, *, arg: Any, unit: Any) -> Any:
        kept = _KEPT[unit.short]
        return self.f.concat(self.f.anon.substr(arg, 1, kept), _MIDNIGHT[kept:10])

    def visit_Modulus(self, op: Any, *, left: Any, right: Any) -> Any:
        # Not every SQLite has the function mod.
        return self.binop(sge.Mod, left, right)

    # LIKE ignores case here, and the text may have signs of patterns.
    def visit_StartsWith(self, op: Any, *, arg: Any, start: Any) -> Any:
        return self.f.anon.substr(arg, 1, self.f.length(start)).eq(start)

    def visit_EndsWith(self, op: Any, *, arg: Any, end: Any) -> Any:
        begin = self.f.length(arg) - self.f.length(end) + 1
        return sge.paren((begin >= 1).and_(self.f.anon.substr(arg, begin).eq(end)))


def _zone(dtype: Any) -> str:
    return "" if dtype.timezone is None else "+00:00"


def _part(first: int, length: int) -> Callable[..., Any]:
    def visit(self: Any, op: Any, *, arg: Any) -> Any:
        return self.cast(self.f.anon.substr(arg, first, length), dt.int64)

    return visit


for _name, _place in _PARTS.items():
    setattr(_Sqlite, f"visit_Extract{_name}", _part(*_place))


class _MySQL(_Dividing, _Compiler, MySQLCompiler):  # type: ignore[misc]
    """Times are DATETIME in UTC. Whole numbers are divided and averaged as decimals of four digits, numbers with points
    are decimals, and texts of the query alone are compared without case."""

    def visit_NonNullLiteral(self, op: Any, *, value: Any, dtype: Any) -> Any:
        if dtype.is_timestamp():
            return self.f.timestamp(value.replace(tzinfo=None).isoformat(sep=" ", timespec="microseconds"))
        if dtype.is_floating():
            text = repr(float(value))
            return sge.Literal.number(text if "e" in text else f"{text}e0")
        if dtype.is_string() and self.collation is not None:
            return sge.paren(sge.Collate(this=sge.convert(value), expression=sge.Var(this=self.collation)))
        return super().visit_NonNullLiteral(op, value=value, dtype=dtype)

    def visit_Cast(self, op: Any, *, arg: Any, to: Any) -> Any:
        if cuts_instant(op.arg):
            return arg
        if op.arg.dtype.is_date() and to.is_timestamp():
            return self.f.timestamp(arg)
        if isinstance(op.arg, ops.Field) and to.is_integer() and op.arg.dtype == to:
            # A sum in a view is a decimal, and a cast alone would clamp one that is too large to the nearest integer.
            arg = self.binop(sge.IntDiv, arg, sge.convert(1))
        return super().visit_Cast(op, arg=arg, to=to)

    def visit_StringContains(self, op: Any, *, haystack: Any, needle: Any) -> Any:
        return self.f.instr(haystack, needle) > 0

    def visit_CountStar(self, op: Any, *, arg: Any, where: Any) -> Any:
        # COUNT over no rows is 0; SUM, which Ibis writes, is null.
        if where is not None:
            return self.f.count(self.if_(where, 1, NULL))
        return super().visit_CountStar(op, arg=arg, where=where)

    def visit_Divide(self, op: Any, *, left: Any, right: Any) -> Any:
        return self.binop(sge.Div, _double(left), right)

    def visit_Mean(self, op: Any, *, arg: Any, where: Any) -> Any:
        return self.agg.avg(_double(arg), where=where)

    def visit_DateTimestampTruncate(self, op: Any, *, arg: Any, unit: Any) -> Any:
        text = super().visit_DateTimestampTruncate(op, arg=arg, unit=unit)
        return self.f.timestamp(text) if op.dtype.is_timestamp() else self.f.date(text)

    visit_DateTruncate = visit_TimestampTruncate = visit_DateTimestampTruncate


def _double(value: Any) -> Any:
    return sge.paren(sge.Mul(this=sge.paren(value), expression=sge.Literal.number("1e0")))


class _InUtc(_Widening, _Dividing, _Compiler):
    """A time with a zone has the day and the hour of UTC, whatever the zone of the session is that reads a view."""

    def visit_NonNullLiteral(self: Any, op: Any, *, value: Any, dtype: Any) -> Any:
        if dtype.is_floating():
            # A number with a point is a decimal.
            return self.cast(repr(float(value)), dt.float64)
        return super().visit_NonNullLiteral(op, value=value, dtype=dtype)  # type: ignore[misc]

    def visit_Cast(self: Any, op: Any, *, arg: Any, to: Any) -> Any:
        if cuts_instant(op.arg):
            return arg
        if op.arg.dtype.is_boolean() and to.is_integer():
            arg = self.cast(arg, dt.int32)
        return super().visit_Cast(op, arg=_utc(op.arg, arg) if to.is_date() else arg, to=to)  # type: ignore[misc]

    def visit_Date(self: Any, op: Any, *, arg: Any) -> Any:
        return self.cast(_utc(op.arg, arg), dt.date)

    def visit_TimestampTruncate(self: Any, op: Any, *, arg: Any, unit: Any) -> Any:
        cut = super().visit_TimestampTruncate(op, arg=_utc(op.arg, arg), unit=unit)  # type: ignore[misc]
        return _utc(op.arg, cut)

    def visit_DateTruncate(self: Any, op: Any, *, arg: Any, unit: Any) -> Any:
        return self.cast(super().visit_DateTruncate(op, arg=arg, unit=unit), dt.date)  # type: ignore[misc]


def _utc(op: Any, value: Any) -> Any:
    """Return an instant as the time in UTC, and back."""
    if not op.dtype.is_timestamp() or op.dtype.timezone is None:
        return value
    return sge.AtTimeZone(this=sge.paren(value), zone=sge.convert("UTC"))


def _extracted(name: str) -> Callable[..., Any]:
    def visit(self: Any, op: Any, *, arg: Any) -> Any:
        part = self.f.extract(self.v[name.lower()], _utc(op.arg, arg))
        # PostgreSQL's have a fraction, which a cast would round.
        return self.cast(self.f.floor(part), op.dtype)

    return visit


for _name in _PARTS:
    setattr(_InUtc, f"visit_Extract{_name}", _extracted(_name))


class _Postgres(_InUtc, PostgresCompiler):  # type: ignore[misc]
    """Texts are equal letter by letter, and ordered by the language of the database."""

    def divided(self, left: Any, right: Any) -> Any:
        # Typed division of two integers gives an integer; IntDiv would divide numerics.
        return sge.paren(sge.Div(this=left, expression=sge.paren(right), typed=True))


def _ordering(name: str) -> Callable[..., Any]:
    def collated(self: Any, op: Any, value: Any) -> Any:
        if isinstance(op, tuple):
            return tuple(collated(self, *each) for each in zip(op, value, strict=True))
        if not op.dtype.is_string():
            return value
        # A UUID, which Ibis has as a text, has no collation.
        text = self.cast(value, dt.string)
        return sge.paren(sge.Collate(this=text, expression=sge.to_identifier("C", quoted=True)))

    def visit(self: Any, op: Any, **values: Any) -> Any:
        first = op.argnames[0]
        values[first] = collated(self, getattr(op, first), values[first])
        return getattr(super(_Postgres, self), name)(op, **values)

    return visit


for _name in ("Less", "LessEqual", "Greater", "GreaterEqual", "Between", "Least", "Greatest", "Min", "Max", "SortKey"):
    setattr(_Postgres, f"visit_{_name}", _ordering(f"visit_{_name}"))


class _DuckDB(_InUtc, DuckDBCompiler):  # type: ignore[misc]
    def visit_Modulus(self, op: Any, *, left: Any, right: Any) -> Any:
        if op.right.dtype.is_integer() and not isinstance(op.right, ops.Literal):
            # The least number by -1 is refused, though the rest is 0.
            right = self.if_(right.eq(-1), 1, right)
        return super().visit_Modulus(op, left=left, right=right)


class _Spark(_Widening, _Dividing, PySparkCompiler):  # type: ignore[misc]
    """Numbers with a point are decimals, times that are cut are instants, seconds have a fraction: Ibis says something
    else, and so do the databases."""

    SIMPLE_OPS: ClassVar[dict[Any, str]] = {}

    def visit_NonNullLiteral(self, op: Any, *, value: Any, dtype: Any) -> Any:
        if dtype.is_floating() and math.isfinite(value):
            return self.cast(repr(float(value)), dtype)
        if dtype.is_timestamp() and dtype.timezone is None:
            return _local(sge.convert(value.isoformat()))
        return super().visit_NonNullLiteral(op, value=value, dtype=dtype)

    def visit__Exact(self, op: Any, *, value: Any, dtype: Any) -> Any:
        number = sge.Literal.number(format(abs(Decimal(repr(float(value)))), "f"))
        # Spark's decimals have no more digits.
        if sum(map(str.isdigit, number.name)) > 38:
            return self.visit_NonNullLiteral(op, value=value, dtype=dtype)
        return sge.paren(sge.Neg(this=number)) if value < 0 else number

    def visit_Cast(self, op: Any, *, arg: Any, to: Any) -> Any:
        if to.is_timestamp() and to.timezone is None:
            return _local(arg)
        return super().visit_Cast(op, arg=arg, to=to)

    def visit_TimestampTruncate(self, op: Any, *, arg: Any, unit: Any) -> Any:
        cut = super().visit_TimestampTruncate(op, arg=arg, unit=unit)
        return cut if op.arg.dtype.timezone is not None else _local(cut)

    def visit_DateTruncate(self, op: Any, *, arg: Any, unit: Any) -> Any:
        return self.cast(super().visit_DateTruncate(op, arg=arg, unit=unit), dt.date)

    def visit_Divide(self, op: Any, *, left: Any, right: Any) -> Any:
        # A quotient of decimals has few digits; Ibis says that it is a float.
        if op.dtype.is_floating() and (op.left.dtype.is_decimal() or op.right.dtype.is_decimal()):
            left = self.cast(left, op.dtype)
        return super().visit_Divide(op, left=left, right=right)

    def visit_Time(self, op: Any, *, arg: Any) -> Any:
        # Spark has no times: a text, as times of databases are read.
        text = self.f.date_format(arg, "HH:mm:ss.SSSSSS")
        return self.f.regexp_replace(text, "[.]000000$", "")

    def visit_ExtractSecond(self, op: Any, *, arg: Any) -> Any:
        return self.cast(self.f.floor(super().visit_ExtractSecond(op, arg=arg)), op.dtype)

    def visit_CountStar(self, op: Any, *, arg: Any, where: Any) -> Any:
        # COUNT over no rows is 0; SUM, which Ibis writes, is null.
        if where is not None:
            return self.f.count(self.if_(where, 1, NULL))
        return super().visit_CountStar(op, arg=arg, where=where)

    def visit_IsNull(self, op: Any, *, arg: Any) -> Any:
        # A NaN is a number, as it is in a database.
        return arg.is_(NULL)

    def visit_NotNull(self, op: Any, *, arg: Any) -> Any:
        return arg.is_(sg.not_(NULL))


def _local(value: Any) -> Any:
    """A time of Spark without a zone."""
    return sge.Cast(this=value, to=sge.DataType(this=sge.DataType.Type.TIMESTAMPNTZ))


_CHOOSING = (ops.Coalesce, ops.Least, ops.Greatest, ops.IfElse, ops.SearchedCase)


class _Exact(ops.Literal):  # type: ignore[misc]
    """A number whose digits count. Its type stays that of a float: Ibis compares decimals of some types alone."""


def _with_exact_literals(op: Any, kwargs: Any) -> Any:
    """A number with a point beside a decimal is a decimal: Spark would make floats of both."""
    new = op if kwargs is None else op.__recreate__(kwargs)
    if not isinstance(new, ops.Value):
        return new
    arguments = {name: getattr(new, name) for name in new.argnames}
    values = [each for one in arguments.values() for each in (one if isinstance(one, tuple) else (one,))]
    if isinstance(new, _CHOOSING) and (new.dtype.is_decimal() or new.dtype == dt.float32):
        new = new.copy(**{name: _of_type(value, new.dtype) for name, value in arguments.items()})
        arguments = {name: getattr(new, name) for name in new.argnames}
    if not any(isinstance(each, ops.Value) and each.dtype.is_decimal() for each in values):
        return new
    exact = {name: _exact(value) for name, value in arguments.items()}
    return new if exact == arguments else new.copy(**exact)


def _of_type(value: Any, kind: Any) -> Any:
    """An integer beside a decimal or a float32 that it fits: Spark would take a wider type for both."""
    if isinstance(value, tuple):
        return tuple(_of_type(each, kind) for each in value)
    if not isinstance(value, ops.Literal) or not value.dtype.is_integer() or value.value is None:
        return value
    if kind.is_floating():
        return ops.Literal(float(value.value), kind)
    has_room = kind.precision is not None and abs(value.value) < 10 ** (kind.precision - kind.scale)
    return ops.Literal(Decimal(value.value), kind) if has_room else value


def _exact(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_exact, value))
    is_number = isinstance(value, ops.Literal) and value.dtype.is_floating() and value.value is not None
    return _Exact(value.value, value.dtype) if is_number and math.isfinite(value.value) else value


_COMPILERS: dict[str, Any] = {"sqlite": _Sqlite, "mysql": _MySQL, "postgres": _Postgres, "duckdb": _DuckDB}

# ----------------------------------------------------------------------------------------- what each means as Ibis does

_NULLS_LEFT_OUT = {ops.Least, ops.Greatest}
UNLIKE: dict[str, set[Any]] = {
    # Its LIKE ignores case. Whole numbers that overflow become floats, which others would cut.
    "sqlite": {ops.StringSQLLike, ops.FloorDivide, *_NULLS_LEFT_OUT},
    "mysql": {ops.Intersection, ops.Difference, *_NULLS_LEFT_OUT},
    "postgres": set(),
    "duckdb": set(),
}
"""Operations that other databases are asked for, and that one of them would answer in another way."""
JOINS: dict[str, set[str]] = {
    "sqlite": {"inner", "left", "cross", "semi", "anti"},
    "mysql": {"inner", "left", "right", "cross", "semi", "anti"},
    "postgres": {"inner", "left", "right", "outer", "cross", "semi", "anti"},
    "duckdb": {"inner", "left", "right", "outer", "cross", "semi", "anti"},
}
# MariaDB and MySQL cast to the widest of the integers alone, SQLite has no types of what it computes.
_LEAST_BYTES = {"postgres": 2, "duckdb": 2, "mysql": 8}
FLOATS_ON_OVERFLOW = {"sqlite"}
"""Databases whose whole numbers become floats where they overflow."""
REFUSES_ZERO = {"postgres"}
"""Databases that raise where a number is divided by 0, as Spark does: others answer null, or an infinite number."""


def refusing_floats(sql: str, columns: dict[str, bool]) -> str:
    """Return a query that fails with "integer overflow" where a whole number became a float: in the columns, by their
    quoted names, that are computed."""
    failing = "CASE typeof({0}) WHEN 'real' THEN abs(-9223372036854775808) ELSE {0} END AS {0}"
    listed = (failing.replace("{0}", name) if is_computed else name for name, is_computed in columns.items())
    return f"SELECT {', '.join(listed)} FROM ({sql}) AS checked"


def in_utc(value: Any) -> Any:
    """Return a time as one of UTC; one without a zone is UTC already."""
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
