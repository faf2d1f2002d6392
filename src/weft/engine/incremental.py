"""What is new in a source since the last run: bounds around a query, taken before it runs and committed with its rows.

The upper bound is fixed first, so that the watermark says exactly which rows were loaded, whatever arrives meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa

from weft.columns import hint_of
from weft.engine.missing_tables import described
from weft.errors import DeclarationError, did_you_mean
from weft.systems.sql import tokens
from weft.systems.sql.literals import literal
from weft.systems.sql.tables import SqlTables, subquery
from weft.systems.watermark import GROWING, UNKNOWN, LoadWatermark, subtract_lookback, text_of

if TYPE_CHECKING:
    from sqlglot.optimizer.scope import Scope

_MARK = r"\$watermark\b"
_MOST_DIGITS = 38
_LEAVES_OUT = r"(?i:\b(?:limit|offset|fetch|sample|tablesample)\b)"


@dataclass(frozen=True)
class Increment:
    """The rows of one run: those above `lower`, up to `upper`."""

    sql: str
    watermark: LoadWatermark | None
    """What the target shall know after the commit; `None` where nothing is new."""
    late: int
    """How many rows came since the last run that are too old to be read: skipped, unless a lookback reaches them."""
    without_value: int = 0
    """How many rows have no value in the column, and so are never read."""
    is_empty: bool = False
    """Whether nothing is new."""


def has_watermark(sql: str, dialect: str) -> bool:
    return tokens.has(sql, _MARK, dialect)


def bind(sql: str, value: str, dialect: str) -> str:
    """Return the query with a literal for each `$watermark`, but not for one in a text or a comment."""
    return tokens.replaced(sql, _MARK, value, dialect)


def watermark_column(sql: str, dialect: str) -> str:
    """Return the column that a query compares with `$watermark`."""
    import sqlglot
    from sqlglot import expressions as exp

    try:
        tree = sqlglot.parse_one(bind(sql, "__weft_watermark", dialect), read=dialect)
    except sqlglot.errors.SqlglotError:
        raise DeclarationError(
            "The query cannot be understood, so the column that $watermark is compared with is unknown.",
            hint='Say it: incremental_column="updated_at".',
        ) from None
    for node in tree.find_all(exp.GT, exp.GTE, exp.LT, exp.LTE):
        # A condition for rows above the watermark; one for rows below it would never find anything.
        above, below = (
            (node.this, node.expression) if isinstance(node, exp.GT | exp.GTE) else (node.expression, node.this)
        )
        if isinstance(above, exp.Column) and isinstance(below, exp.Column) and below.name == "__weft_watermark":
            return str(above.name)
    raise DeclarationError(
        "The column that $watermark is compared with is unknown.", hint='Say it: incremental_column="updated_at".'
    )


def refuse_limit(sql: str, column: str, dialect: str) -> None:
    """Refuse a query that gives some of its rows only: the watermark would pass the others. What limits the rows of
    another table than that of the column, or of a subquery in an expression, leaves none of them out."""
    if not tokens.has(sql, _LEAVES_OUT, dialect):
        return
    import sqlglot
    from sqlglot import expressions as exp
    from sqlglot.optimizer.scope import build_scope

    try:
        tree: Any = sqlglot.parse_one(bind(sql, "__weft_watermark", dialect), read=dialect)
    except sqlglot.errors.SqlglotError:
        return
    is_cut = False
    while isinstance(tree, exp.Subquery):
        is_cut = is_cut or _has_limit(tree)
        tree = tree.this
    scope = build_scope(tree)
    if is_cut or (_has_limit(tree) if scope is None else _is_cut(scope, {column.lower()})):
        raise DeclarationError(
            "The query has a LIMIT (or OFFSET, FETCH, TABLESAMPLE), and the watermark would move past the rows that it "
            "leaves out: they would never be read.",
            hint="Leave it out: a run reads what is new since the last one. To load only a part, say which with WHERE.",
        )


def _has_limit(query: Any) -> bool:
    return any(query.args.get(each) for each in ("limit", "offset", "sample"))


def _is_cut(scope: Scope, names: set[str] | None) -> bool:
    """Return whether a query leaves out rows with one of these columns (`None`: any)."""
    from sqlglot import expressions as exp
    from sqlglot.optimizer.scope import Scope

    query: Any = scope.expression
    chosen = [each for each in query.selects if names is None or each.is_star or each.alias_or_name.lower() in names]
    if not chosen:
        return False
    if _has_limit(query) or next(iter(scope.find_all(exp.TableSample)), None) is not None:
        return True
    if scope.set_operation_scopes:
        return any(_is_cut(each, None) for each in scope.set_operation_scopes)
    columns = [column for each in chosen for column in each.find_all(exp.Column)]
    takes_all = any(isinstance(each, exp.Star) for each in chosen)
    for alias, (_, source) in scope.selected_sources.items():
        of_source = [each for each in columns if each.table.lower() in ("", alias.lower())]
        if isinstance(source, Scope) and (takes_all or of_source):
            passes_on = takes_all or any(each.is_star for each in of_source)
            if _is_cut(source, names if passes_on else {each.name.lower() for each in of_source}):
                return True
    return False


def of_query(
    tables: SqlTables, sql: str, column: str, last: LoadWatermark | None, lookback: Any, *, count_late: bool = True
) -> Increment:
    """Return the rows of a query that are new since `last`.

    `count_late` looks at all rows of the query, those that are not new too; else the query may find the new ones by an
    index.
    """
    schema = described(tables, bind(sql, tables.described_watermark, tables.dialect))
    if column not in schema.names:
        raise DeclarationError(
            f"The source has no column {column!r} (incremental_column).",
            hint=did_you_mean(column, schema.names, f"Its columns: {', '.join(schema.names)}."),
        )
    stored = last
    if last is not None and last.column != column:
        # The values of another column say nothing about this one.
        last = None
    field, dialect = schema.field(column), tables.dialect
    name = tables.ordered(f"q.{tables.quote(column)}", field)
    lowest = _least(field, tables, is_written=has_watermark(sql, dialect))
    everything = subquery(bind(sql, lowest, dialect))
    if last is not None and last.kind == "timestamp" and not tables.native_decimals:
        with tables.driver.session("read") as session:
            last = last.spelled_like(session.value(f"SELECT max({name}) FROM {everything} AS q"))
    lower = None if last is None else subtract_lookback(last.value, lookback)
    since = None if lower is None else literal(lower, dialect)
    new = f"{name} > {since}" if since is not None else f"{name} IS NOT NULL"
    bound = subquery(bind(sql, since if since is not None else lowest, dialect))
    with tables.driver.session("read") as session:
        if count_late:
            greatest = tables.ordered(f"(CASE WHEN {new} THEN {name} END)", field)
            passed = "1 = 0" if since is None else f"{name} <= {since}"
            again = "1 = 0" if last is None else f"{name} <= {literal(last.counted_to, dialect)}"
            counted = ", ".join(f"count(CASE WHEN {each} THEN 1 END)" for each in (passed, again, f"{name} IS NULL"))
            row = session.row(f"SELECT max({greatest}), {counted} FROM {everything} AS q")
            assert row is not None
            counts = _Counts(row[0], *map(int, row[1:]))
        else:
            row = session.row(f"SELECT max({name}) FROM {bound} AS q WHERE {new}")
            assert row is not None
            counts = _Counts(row[0])
        upper = counts.upper
        if isinstance(upper, str) and pa.types.is_decimal(field.type):
            upper = Decimal(upper)  # SQLite gives the text that it stores
        if upper is None:
            # Late rows are reported once.
            known = None if last is None or not count_late else replace(last, seen=counts.passed, after=last.text)
            known = known and replace(known, counted=text_of(lower) if lookback is not None else None)
            nothing = f"SELECT * FROM {bound} AS q WHERE 1 = 0"
            return Increment(nothing, known, counts.late(last, lower), counts.empty, is_empty=True)
        mark = LoadWatermark.of(column, upper, UNKNOWN, stored)
        if count_late and lookback is None:
            # With those that are read: more of them may come until then.
            mark = replace(mark, seen=counts.passed, adds_read=True)
        elif count_late:
            # The next run looks back to here: what is below then, and was not now, came too late for it.
            back = subtract_lookback(upper, lookback)
            row = session.row(f"SELECT count(*) FROM {everything} AS q WHERE {name} <= {literal(back, dialect)}")
            assert row is not None
            mark = replace(mark, seen=int(row[0]), counted=text_of(back))
    condition = f"{new} AND {name} <= {literal(upper, dialect)}"
    sql = f"SELECT * FROM {bound} AS q WHERE {condition}"
    return Increment(sql, mark, counts.late(last, lower), counts.empty)


@dataclass(frozen=True)
class _Counts:
    """What there is in a source before it is read."""

    upper: Any
    passed: int = 0
    """Rows that are too old to be read."""
    again: int = 0
    """Rows that the last run would have counted."""
    empty: int = 0

    def late(self, last: LoadWatermark | None, lower: Any) -> int:
        """How many rows came since the last run, and are not read. A longer lookback than that of the last run reads
        some of what was counted then, and it is unknown how many: nothing is reported, once."""
        if last is None or last.seen == UNKNOWN or last.counted_to > lower:
            return 0
        return max(0, self.again - last.seen)


def _least(field: pa.Field, tables: SqlTables, *, is_written: bool) -> str:
    """Return a literal below all values of a column, for a query with `$watermark` (`is_written`) when there is none
    yet."""
    kind, hint = field.type, hint_of(field)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return tables.before_all(field)
    least: Any = None
    if pa.types.is_integer(kind):
        least = -(2 ** (kind.bit_width - 1)) + 1
    elif pa.types.is_decimal(kind):
        # One digit more is more than a decimal of 38 can have.
        least = -(10 ** (kind.precision - kind.scale)) + (kind.precision == _MOST_DIGITS)
    elif pa.types.is_floating(kind):
        least = -1.0e308 if pa.types.is_float64(kind) else -1.0e38
    elif hint == "uuid":
        least = str(UUID(int=0))
    elif pa.types.is_string(kind) and (hint is None or not is_written):
        least = ""
    if least is None:
        raise DeclarationError(
            f"The column {field.name!r} is of type {hint or kind}, which cannot be a watermark.", hint=GROWING
        )
    return literal(least, tables.dialect)
