"""Types of columns that a query computes, by parsing: SQLite itself knows those of values, and without rows of none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa
import sqlglot
from sqlglot import exp
from sqlglot.optimizer.annotate_types import annotate_types
from sqlglot.optimizer.qualify import qualify

Types = Mapping[str, pa.DataType]
_SPELLED = {pa.bool_(): "boolean", pa.string(): "text", pa.binary(): "binary"}


def computed_types(sql: str, types_of: Callable[[str], Types]) -> dict[str, pa.DataType]:
    """Return the numbers among the columns of a query, by name, as far as parsing finds them. `types_of` returns what
    the columns of a table are."""
    try:
        query = sqlglot.parse_one(sql, dialect="sqlite")
        names = {each.name for each in query.find_all(exp.Table)}
        schema = {name: {column: _spelled(kind) for column, kind in types_of(name).items()} for name in names}
        known: dict[str, object] = {name: columns for name, columns in schema.items() if columns}
        qualified = qualify(
            query,
            dialect="sqlite",
            schema=known,
            allow_partial_qualification=True,
            validate_qualify_columns=False,
            identify=False,
        )
        annotated = annotate_types(qualified, schema=known, dialect="sqlite")
    except sqlglot.errors.SqlglotError:
        return {}
    if not isinstance(annotated, exp.Query):
        return {}
    if any(map(_is_mixed, annotated.find_all(*_COMPUTING))) or any(map(_unites, annotated.find_all(exp.SetOperation))):
        return {}
    return {each.alias_or_name: kind for each in annotated.selects if (kind := _number(each)) is not None}


def _spelled(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind):
        return "bigint"
    return "double" if pa.types.is_floating(kind) else _SPELLED.get(kind, "unknown")


def _number(value: exp.Expr) -> pa.DataType | None:
    kind = value.type
    if kind is None:
        return None
    if kind.is_type(*exp.DataType.INTEGER_TYPES, exp.DataType.Type.BOOLEAN):
        return pa.int64()
    return pa.float64() if kind.is_type(*exp.DataType.FLOAT_TYPES) else None


_COMPUTING = (
    *(exp.Coalesce, exp.Case, exp.If, exp.Max, exp.Min, exp.Greatest, exp.Least),
    *(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Neg, exp.Sum, exp.Abs),
)


def _is_mixed(node: exp.Expr) -> bool:
    """Whether numbers and other values are added up or chosen from: SQLite may make either of them."""
    if _number(node) is None:
        return False
    parts = [node.args.get("true"), node.args.get("false")] if isinstance(node, exp.If) else node.iter_expressions()
    if isinstance(node, exp.Case):
        parts = [*node.args["ifs"], node.args.get("default")]
    return any(each and not isinstance(each, exp.Null) and _number(each) is None for each in parts)


def _unites(node: exp.Expr) -> bool:
    """Whether the queries of a UNION have columns of several kinds, of which parsing takes the first."""
    assert isinstance(node, exp.SetOperation)
    return list(map(_number, node.left.selects)) != list(map(_number, node.right.selects))
