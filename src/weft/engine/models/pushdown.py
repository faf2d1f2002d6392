"""Which Ibis expressions a database may compute: those of operations that mean there what Ibis means by them.

Everything else Spark computes: slower, and right. So an operation is pushed down when it is named here, with the types
that were compared with Spark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any
from uuid import UUID

import ibis.expr.datatypes as dt
import ibis.expr.operations as ops
import pyarrow as pa
from ibis.common.exceptions import IbisError
from sqlglot.errors import UnsupportedError

from weft.columns import hint_of
from weft.engine.models import compilers
from weft.systems.sql.tables import SqlTables

_COMPARISONS = (ops.Equals, ops.NotEquals, ops.Less, ops.LessEqual, ops.Greater, ops.GreaterEqual, ops.IdenticalTo)
_CHOOSING = (*_COMPARISONS, ops.Between, ops.InValues, ops.Coalesce, ops.NullIf, ops.IfElse, ops.SearchedCase)
_MIXING = (*_CHOOSING, ops.Least, ops.Greatest, ops.SimpleCase)
_ARITHMETIC = (ops.Add, ops.Subtract, ops.Multiply, ops.Negate)
_DIVISIONS = (ops.Divide, ops.FloorDivide, ops.Modulus)
_UNITS = ("Y", "M", "D", "h", "m", "s")


def cleared(expression: Any) -> Any:
    """Return an expression whose literals have the types of what they are compared with: a time without a zone, a date
    or a text of one beside an instant is an instant of UTC, a UUID beside a text is a text."""

    def clear(op: Any, kwargs: Mapping[str, Any] | None) -> Any:
        new = op if kwargs is None else op.__recreate__(kwargs)
        if isinstance(new, ops.Literal) and new.value is not None and new.dtype.is_timestamp() and new.dtype.timezone:
            return _literal(compilers.in_utc(new.value), dt.Timestamp("UTC"))
        if isinstance(new, ops.TimestampTruncate) and new.arg.dtype.timezone is not None:
            # Ibis says that it has no zone; Spark's has the one of its argument.
            return ops.Cast(new, dt.Timestamp("UTC"))
        if isinstance(new, ops.ExtractEpochSeconds):
            # Ibis says 32 bits, which end in 2038.
            return ops.Cast(new, dt.int64)
        return _as_floats(_with_like_literals(new)) if isinstance(new, _MIXING) else new

    return expression.op().replace(clear).to_expr()


def why_not(expression: Any, tables: SqlTables, schemas: Mapping[str, pa.Schema]) -> str | None:
    """Return why the database may not compute an expression over columns of these types; `None` where it may."""
    return _Check(expression.op(), tables, schemas).why_not()


def typed(expression: Any, tables: SqlTables) -> Any:
    """Return an expression for a view, whose types the database alone says: computed numbers are cast to theirs."""
    op = expression.op()

    def value(name: str, kind: Any) -> Any:
        field = ops.Field(op, name)
        return ops.Cast(field, kind) if compilers.says_type(tables.dialect, kind) and not _stored(op, name) else field

    return ops.Project(op, {name: value(name, kind) for name, kind in op.schema.items()}).to_expr()


def to_sql(expression: Any, tables: SqlTables) -> str:
    """Return an expression that the database may compute in its SQL."""
    op = expression.op()
    sql = compilers.to_sql(expression, tables.dialect, tables.text_collation)
    if tables.dialect not in compilers.FLOATS_ON_OVERFLOW or not _has_whole_arithmetic(op):
        return sql
    computed = {name: kind.is_integer() and _stored(op, name) is None for name, kind in op.schema.items()}
    quoted = {tables.quote(name): is_computed for name, is_computed in computed.items()}
    return compilers.refusing_floats(sql, quoted) if any(computed.values()) else sql


def to_spark_sql(expression: Any) -> str:
    return compilers.to_spark_sql(expression)


# ------------------------------------------------------------------------------------------------------------- literals


def _with_like_literals(op: Any) -> Any:
    """Return an operation whose literals have the type of its other values."""
    names = [name for name in op.argnames if name not in ("cases", "bool_expr")]
    values = [each for name in names for each in _flat(getattr(op, name))]
    kinds = [each.dtype for each in values if not _is_literal(each)]
    wanted: Any = None
    for is_kind in ("is_timestamp", "is_date", "is_string"):
        temporal = [kind for kind in kinds if getattr(kind, is_kind)()]
        if temporal:
            wanted = next((kind for kind in temporal if getattr(kind, "timezone", None)), temporal[0])
            break
    if wanted is None:
        return op

    def like(value: Any) -> Any:
        return tuple(map(like, value)) if isinstance(value, tuple) else _like(value, wanted)

    return op.copy(**{name: like(getattr(op, name)) for name in names})


def _as_floats(op: Any) -> Any:
    """Return an operation whose whole numbers are floats, where others of its values are: so Spark compares them, and
    chooses from them. SQLite would compare each digit, and return the whole number."""
    arguments = {name: getattr(op, name) for name in op.argnames}
    # The compared values of a CASE share one type, and its results another.
    groups = [("base", "cases"), ("results", "default")] if isinstance(op, ops.SimpleCase) else [tuple(arguments)]
    changed: dict[str, Any] = {}
    for names in groups:
        values = [each for name in names for each in _flat(arguments[name]) if each.dtype.is_numeric()]
        if any(each.dtype == dt.float64 for each in values):
            changed |= {name: _as_float(arguments[name]) for name in names}
    return op.copy(**changed) if changed else op


def _as_float(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_float, value))
    if not isinstance(value, ops.Value) or not value.dtype.is_integer():
        return value
    if _is_literal(value):
        return value if value.value is None else _literal(float(value.value), dt.float64)
    return ops.Cast(value, dt.float64)


def _flat(value: Any) -> Iterable[Any]:
    return [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, ops.Value)]


def _is_literal(value: Any) -> bool:
    return isinstance(value, ops.Literal)


def _like(value: Any, kind: Any) -> Any:
    if not _is_literal(value) or value.value is None:
        return value
    literal = value.value
    if kind.is_string():
        return _literal(str(literal), dt.string) if isinstance(literal, UUID) else value
    if isinstance(literal, str):
        try:
            literal = datetime.fromisoformat(literal)
        except ValueError:
            return value
        if kind.is_date() and literal.time() != time():
            return value
    elif not isinstance(literal, date):
        return value
    if kind.is_date():
        # A date beside a time is a time: only a text has to be one of both.
        return _literal(literal.date(), dt.date) if isinstance(value.value, str) else value
    if not isinstance(literal, datetime):
        literal = datetime.combine(literal, time())
    if kind.timezone is None:
        return _literal(literal, dt.timestamp) if literal.tzinfo is None else value
    return _literal(compilers.in_utc(literal), dt.Timestamp("UTC"))


def _literal(value: Any, kind: Any) -> Any:
    return ops.Literal(value, kind)


# --------------------------------------------------------------------------------------------------------------- checks


def _stored(relation: Any, name: str) -> tuple[str, str] | None:
    """Return the input and the column whose values a column has unchanged; `None` where it is computed."""
    while True:
        if isinstance(relation, ops.UnboundTable):
            return relation.name, name
        if isinstance(relation, ops.Set):
            relation = relation.left
            continue
        value = relation.values.get(name)
        while isinstance(value, ops.Alias):
            value = value.arg
        if not isinstance(value, ops.Field):
            return None
        relation, name = value.rel, value.name


def hints(expression: Any, schemas: Mapping[str, pa.Schema]) -> dict[str, str]:
    """Return which columns of an expression are UUIDs and JSON of its inputs, unchanged."""
    op = expression.op()
    by_name = {name: _hint(op, name, schemas) for name in op.schema}
    return {name: hint for name, hint in by_name.items() if hint is not None}


def _hint(relation: Any, name: str, schemas: Mapping[str, pa.Schema]) -> str | None:
    if isinstance(relation, ops.Set):
        left, right = _hint(relation.left, name, schemas), _hint(relation.right, name, schemas)
        return left if left == right else None
    stored = _stored(relation, name)
    return None if stored is None else hint_of(schemas[stored[0]].field(stored[1]))


def _has_whole_arithmetic(op: Any) -> bool:
    return any(each.dtype.is_integer() for each in op.find(_ARITHMETIC))


class _Check:
    def __init__(self, op: Any, tables: SqlTables, schemas: Mapping[str, pa.Schema]) -> None:
        self.op, self.tables, self.schemas = op, tables, schemas
        self.dialect = tables.dialect
        self.summed = {each.arg for each in op.find(ops.Sum)}
        self.is_exact = self.dialect not in compilers.FLOATS_ON_OVERFLOW or not _has_whole_arithmetic(op)

    def why_not(self) -> str | None:
        for op in self.op.find(ops.Node):
            why = self._why_not(op)
            if why is not None:
                return why
        try:
            sql = to_sql(self.op.to_expr(), self.tables)
        # Of Ibis where a database lacks an operation, or Ibis has not written it; of sqlglot where the SQL lacks it.
        except (IbisError, NotImplementedError, UnsupportedError) as error:
            return f"Ibis cannot write it for {self._database}: {type(error).__name__}: {str(error)[:200]}"
        # Functions that Ibis adds to its own connections.
        return f"Ibis adds functions to {self._database} for it" if "_IBIS_" in sql.upper() else None

    @property
    def _database(self) -> str:
        return self.tables.connection.label

    def _why_not(self, op: Any) -> str | None:
        name = type(op).__name__
        rule = _RULES.get(type(op))
        if rule is None or type(op) in compilers.UNLIKE[self.dialect]:
            return f"{self._database} may mean something else by {name} than Ibis does"
        if isinstance(op, ops.Value) and self._class(op.dtype) is None:
            return f"{self._database} has no {op.dtype} as Ibis means it"
        if not isinstance(op, _PASSING):
            for each in _values_of(op):
                kind = self._opaque(each)
                if kind is not None and not _compares_uuids(op, kind, self._is_uuid):
                    return f"{self._database} keeps {kind}s as it cannot compute with them, and {name} does"
        if not rule(self, op):
            kinds = ", ".join(str(each.dtype) for each in _values_of(op))
            of = f" of {kinds}" if kinds else ""
            return f"{self._database} may mean something else by {name}{of} than Ibis does"
        if isinstance(op, _DIVISIONS) and self.dialect not in compilers.REFUSES_ZERO and not _is_never_zero(op.right):
            return f"{self._database} does not refuse to divide by 0, as Spark does: divide by a number, or nullif(0)"
        return None

    def _class(self, kind: Any) -> str | None:
        """Values of one class may be compared."""
        if kind.is_boolean():
            return "boolean"
        if kind.is_signed_integer() or kind.is_floating() or kind.is_decimal():
            return "number"
        if kind.is_timestamp():
            return {None: "time", "UTC": "instant"}.get(kind.timezone)
        for is_kind, name in ((kind.is_string, "text"), (kind.is_date, "date"), (kind.is_binary, "bytes")):
            if is_kind():
                return name
        return "null" if kind.is_null() else None

    def _opaque(self, value: Any) -> str | None:
        """What a stored value is that the database has in a form which it cannot compute with."""
        while isinstance(value, ops.Alias):
            value = value.arg
        stored = _stored(value.rel, value.name) if isinstance(value, ops.Field) else None
        if stored is None:
            return None
        field = self.schemas[stored[0]].field(stored[1])
        if pa.types.is_decimal(field.type) and not self.tables.native_decimals:
            return "decimal"
        return hint_of(field)

    def _is_uuid(self, value: Any) -> bool:
        return _is_uuid(value.value) if _is_literal(value) else self._opaque(value) == "uuid"

    # ------------------------------------------------------------------------------------------------ of an operation

    def always(self, op: Any) -> bool:
        return True

    def field(self, op: Any) -> bool:
        """A column in the form in which Weft stores its type."""
        if not isinstance(op.rel, ops.UnboundTable):
            return True
        return self.tables.stores_as_weft(self.schemas[op.rel.name].field(op.name))

    def literal(self, op: Any) -> bool:
        value, kind = op.value, op.dtype
        if value is None:
            return True
        if kind.is_floating():
            return math.isfinite(value)
        if kind.is_decimal():
            return self.tables.native_decimals and value.is_finite()
        return not kind.is_binary() and "\0" not in str(value)

    def alike(self, op: Any) -> bool:
        """All values are of one class."""
        return self._alike(_values_of(op))

    def _alike(self, values: Iterable[Any]) -> bool:
        return len({self._class(each.dtype) for each in values} - {"null"}) <= 1

    def chosen(self, op: Any) -> bool:
        """One of some values, whose kind is that of the result."""
        return self._chosen(_values_of(op), op)

    def _chosen(self, values: Sequence[Any], op: Any) -> bool:
        """Numbers of several kinds have no common one as Spark has it: a decimal needs more digits than Ibis says, and
        a float32 fewer. Whole numbers and floats of 64 bits have, and so has a whole number in the query itself."""
        types = [each.dtype for each in (*values, op) if not (_is_literal(each) and each.dtype.is_integer())]
        kinds = {kind.copy(nullable=True) for kind in types if kind.is_numeric()}
        is_plain = all(kind.is_integer() or kind == dt.float64 for kind in kinds)
        return self._alike((*values, op)) and (is_plain or len(kinds) <= 1)

    def null_if(self, op: Any) -> bool:
        """The result is of the kind of the first value, which Ibis widens by the second."""
        return self.chosen(op) and op.dtype.is_floating() == op.arg.dtype.is_floating()

    def results_alike(self, op: Any) -> bool:
        """The values that a case chooses from are of the class of the result, and so is what it compares."""
        if isinstance(op, ops.IfElse):
            return self._chosen((op.true_expr, op.false_null_expr), op)
        is_one = self._chosen((*op.results, op.default), op)
        return is_one and (isinstance(op, ops.SearchedCase) or self._alike((op.base, *op.cases)))

    def numbers(self, op: Any) -> bool:
        kinds = [each.dtype for each in _values_of(op)]
        decimals = [kind for kind in kinds if kind.is_decimal()]
        if not decimals:
            return not any(map(_is_float32, kinds)) and all(
                kind.is_signed_integer() or kind.is_floating() for kind in kinds
            )
        # The result has more digits than Ibis says: in a sum there is room for them.
        others = [kind for kind in kinds if not kind.is_decimal()]
        is_whole = all(kind.is_signed_integer() for kind in others)
        has_digits = op.dtype.is_decimal() and op.dtype.scale is not None
        keeps = has_digits and (
            len(decimals) == 1
            if isinstance(op, ops.Multiply)
            else all(op.dtype.scale >= kind.scale for kind in decimals)
        )
        return op in self.summed and is_whole and keeps

    def whole(self, op: Any) -> bool:
        """Whole numbers, none of which may have become a float."""
        return self.is_exact and all(each.dtype.is_signed_integer() for each in _values_of(op))

    def floats(self, op: Any) -> bool:
        kinds = [each.dtype for each in _values_of(op) if each is not op]
        is_plain = all(kind.is_signed_integer() or kind.is_floating() for kind in kinds)
        return op.dtype.is_floating() and is_plain and not any(map(_is_float32, kinds))

    def summable(self, op: Any) -> bool:
        kind = op.arg.dtype
        return bool(kind.is_boolean() or kind.is_signed_integer() or kind.is_floating() or kind.is_decimal())

    def mean(self, op: Any) -> bool:
        return bool(op.arg.dtype.is_signed_integer() or op.arg.dtype.is_floating())

    def ordered(self, op: Any) -> bool:
        return self._class(op.arg.dtype) not in ("bytes", "boolean")

    def texts(self, op: Any) -> bool:
        return all(each.dtype.is_string() for each in _values_of(op))

    def pattern(self, op: Any) -> bool:
        """A pattern without an escape, of which databases have different ones."""
        return _is_literal(op.pattern) and op.escape is None and "\\" not in str(op.pattern.value)

    def slice(self, op: Any) -> bool:
        """A part of a text that begins and ends at a known place, counted from its beginning."""
        ends = [getattr(op, name) for name in ("start", "end", "length") if hasattr(op, name)]
        bounds = [each for each in ends if each is not None]
        return len(bounds) == 2 and all(
            _is_literal(each) and each.value is not None and each.value >= 0 for each in bounds
        )

    def replacing(self, op: Any) -> bool:
        # With a null replacement, MariaDB returns the text itself where the pattern is not found.
        is_known = _is_literal(op.replacement) and op.replacement.value is not None
        return self.texts(op) and is_known and _is_literal(op.pattern) and bool(op.pattern.value)

    def truncated(self, op: Any) -> bool:
        return bool(op.unit.short in (_UNITS if op.arg.dtype.is_timestamp() else _UNITS[:3]))

    def cast(self, op: Any) -> bool:
        source, to = op.arg.dtype, op.to
        if source.copy(nullable=True) == to.copy(nullable=True):
            return True
        if to.is_signed_integer():
            return bool(source.is_boolean() or (source.is_signed_integer() and source.nbytes <= to.nbytes))
        if to.is_floating():
            is_number = source.is_signed_integer() or source.is_floating() or source.is_decimal()
            return bool(is_number and to.nbytes == dt.float64.nbytes)
        if to.is_string():
            return bool(self.is_exact and source.is_signed_integer())
        if to.is_date():
            return bool(source.is_timestamp())
        if compilers.cuts_instant(op.arg):
            return bool(to.is_timestamp() and to.timezone is not None)
        return bool(to.is_timestamp() and to.timezone is None and source.is_date())

    def joined(self, op: Any) -> bool:
        return bool(op.how in compilers.JOINS[self.dialect])

    def limited(self, op: Any) -> bool:
        return isinstance(op.n, int | None) and isinstance(op.offset, int)

    def distinct(self, op: Any) -> bool:
        return all(self._opaque(ops.Field(op, name)) in (None, "uuid") for name in op.schema)

    def set_of(self, op: Any) -> bool:
        sides = [(side, name) for side in (op.left, op.right) for name in op.schema]
        if op.distinct or not isinstance(op, ops.Union):
            return all(self._opaque(ops.Field(side, name)) is None for side, name in sides)
        left, right = ([self._opaque(ops.Field(side, name)) for name in op.schema] for side in (op.left, op.right))
        return left == right and op.left.schema == op.right.schema

    def grouped(self, op: Any) -> bool:
        return all(self._opaque(each) in (None, "uuid") for each in op.groups.values())

    def window(self, op: Any) -> bool:
        bounds = [each for each in (op.start, op.end) if each is not None]
        whole = all(_is_literal(each.value) and each.value.dtype.is_integer() for each in bounds)
        return whole and (op.how == "rows" or not bounds)

    def shift(self, op: Any) -> bool:
        return op.offset is None or _is_literal(op.offset)

    def within(self, op: Any) -> bool:
        return self._alike((op.needle, *(ops.Field(op.rel, name) for name in op.rel.schema)))


def _values_of(op: Any) -> list[Any]:
    return [each for name in op.argnames for each in _flat(getattr(op, name))]


def _is_never_zero(divisor: Any) -> bool:
    """Whether a divisor is a number other than 0, or null in its place."""
    if isinstance(divisor, ops.NullIf):
        return _is_literal(divisor.null_if_expr) and divisor.null_if_expr.value == 0
    return _is_literal(divisor) and divisor.value != 0


def _is_float32(kind: Any) -> bool:
    """Whether Spark computes with it as a float of 64 bits, and databases do not."""
    return bool(kind.is_floating() and kind.nbytes < dt.float64.nbytes)


def _compares_uuids(op: Any, kind: str, is_uuid: Callable[[Any], bool]) -> bool:
    """Whether UUIDs are compared with each other, or with one that is written as all are stored."""
    if kind != "uuid":
        return False
    if isinstance(op, (ops.SortKey, ops.CountDistinct, ops.WindowFunction)):
        return True
    return isinstance(op, (ops.Equals, ops.NotEquals, ops.InValues)) and all(map(is_uuid, _values_of(op)))


def _is_uuid(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return str(UUID(value)) == value
    except ValueError:
        return False


# Values pass through them as they are.
_PASSING = (ops.Relation, ops.Alias, ops.Field, ops.IsNull, ops.NotNull, ops.Count, ops.CountStar)

_Rule = Callable[[_Check, Any], bool]


def _rules() -> dict[type, _Rule]:
    named: dict[_Rule, tuple[Any, ...]] = {
        _Check.always: (
            *(ops.UnboundTable, ops.Project, ops.Filter, ops.Sort, ops.DropColumns, ops.DropNull, ops.SelfReference),
            *(ops.JoinChain, ops.JoinReference, ops.DummyTable, ops.Alias, ops.SortKey, ops.WindowBoundary),
            *(ops.IsNull, ops.NotNull, ops.And, ops.Or, ops.Not, ops.Xor, ops.Any, ops.All),
            *(ops.Count, ops.CountStar, ops.CountDistinct, ops.RowNumber, ops.MinRank, ops.DenseRank),
            *(ops.ScalarSubquery, ops.ExistsSubquery, ops.Date),
            *(getattr(ops, f"Extract{name}") for name in ("Year", "Month", "Day", "Hour", "Minute", "Second")),
        ),
        _Check.field: (ops.Field,),
        _Check.literal: (ops.Literal,),
        _Check.alike: (*_COMPARISONS, ops.Between, ops.InValues),
        _Check.chosen: (ops.Coalesce, ops.Least, ops.Greatest),
        _Check.null_if: (ops.NullIf,),
        _Check.results_alike: (ops.IfElse, ops.SearchedCase, ops.SimpleCase),
        _Check.numbers: (ops.Add, ops.Subtract, ops.Multiply, ops.Negate, ops.Abs),
        _Check.whole: (ops.Modulus, ops.FloorDivide),
        _Check.floats: (ops.Divide,),
        _Check.summable: (ops.Sum,),
        _Check.mean: (ops.Mean,),
        _Check.ordered: (ops.Min, ops.Max),
        _Check.texts: (ops.StringContains, ops.StartsWith, ops.EndsWith, ops.StringConcat, ops.StringLength),
        _Check.pattern: (ops.StringSQLLike,),
        _Check.slice: (ops.StringSlice, ops.Substring),
        _Check.replacing: (ops.StringReplace,),
        _Check.truncated: (ops.TimestampTruncate, ops.DateTruncate),
        _Check.cast: (ops.Cast,),
        _Check.joined: (ops.JoinLink,),
        _Check.limited: (ops.Limit,),
        _Check.distinct: (ops.Distinct,),
        _Check.set_of: (ops.Union, ops.Intersection, ops.Difference),
        _Check.grouped: (ops.Aggregate,),
        _Check.window: (ops.WindowFunction,),
        _Check.shift: (ops.Lag, ops.Lead),
        _Check.within: (ops.InSubquery,),
    }
    return {each: rule for rule, kinds in named.items() for each in kinds}


_RULES = _rules()
