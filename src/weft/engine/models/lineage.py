"""What a query says of its columns, by parsing: their types, and the columns of the inputs that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.errors import DeclarationError
from weft.pipelines.models import THIS

if TYPE_CHECKING:
    from sqlglot import exp

Schemas = Mapping[str | None, pa.Schema]
"""The columns of the inputs by the names that the query calls them."""
Fields = dict[str, list[tuple[str, str]]]
"""By column of a result, the inputs and their columns that it comes from."""


def nothing(sql: str, dialect: str, schemas: Schemas) -> str:
    """Return a query of no rows that has the columns of the result, as far as parsing finds them."""
    from sqlglot import exp
    from sqlglot.optimizer.annotate_types import annotate_types

    query = _qualified(sql, dialect, schemas)
    read = list(query.find_all(exp.Column))
    # A null has the type of what is added to it, or chosen in its place: so a column may be computed of its last value.
    last = dict.fromkeys([*query.named_selects, *(each.name for each in read)], "null")
    annotated = annotate_types(query, schema={**_mapping(schemas), THIS: last}, dialect=dialect)
    columns: dict[str, exp.Expr] = {}
    for each in annotated.selects:
        kind = each.type
        is_known = kind is not None and not kind.is_type("unknown", "null")
        columns[each.alias_or_name] = exp.cast(exp.null(), kind) if kind and is_known else exp.null()
    # A column that the query reads of its last result, and does not give by a name that parsing finds.
    for each in read:
        if each.table == THIS:
            columns.setdefault(each.name, exp.null())
    if not columns or "*" in columns:
        raise DeclarationError(
            f"The columns of the first result are not known from the query, and {THIS} needs them.",
            hint="Name the columns in place of *.",
        )
    return _without_rows(columns, dialect)


def empty(schema: pa.Schema, dialect: str) -> str:
    """Return a query of no rows that has these columns."""
    from sqlglot import exp

    kinds = {field.name: _kind(field.type) for field in schema}
    null = exp.null()
    return _without_rows(
        {name: null if kind == "unknown" else exp.cast(null, kind) for name, kind in kinds.items()}, dialect
    )


def _without_rows(columns: Mapping[str, exp.Expr], dialect: str) -> str:
    from sqlglot import exp

    listed = [exp.alias_(value, name, quoted=True).sql(dialect) for name, value in columns.items()]
    return f"SELECT {', '.join(listed)} FROM (SELECT 1 AS one_row) AS no_rows WHERE 1 = 0"


def fields(sql: str, dialect: str, schemas: Schemas) -> Fields:
    """Return the columns of the inputs that each column of the result is computed of."""
    from sqlglot import exp
    from sqlglot.lineage import lineage
    from sqlglot.optimizer.scope import build_scope

    query = _qualified(sql, dialect, schemas)
    nodes: Any = lineage(None, query, _mapping(schemas), dialect=dialect, scope=build_scope(query), copy=False)
    origins: Fields = {}
    for name, top in nodes.items():
        leaves = (each for each in top.walk() if isinstance(each.expression, exp.Table))
        origins[name] = sorted(
            {(each.expression.name, exp.to_column(each.name, dialect=dialect).name) for each in leaves}
        )
    return origins


def _qualified(sql: str, dialect: str, schemas: Schemas) -> exp.Query:
    """Return the query with the table of each column, and without stars."""
    import sqlglot
    from sqlglot.optimizer.qualify import qualify

    try:
        parsed = sqlglot.parse_one(sql, dialect=dialect)
        assert isinstance(parsed, sqlglot.exp.Query)
        known = _mapping(schemas)
        if THIS not in known:
            # The model's own columns; if the query does not name them all, those of its inputs too.
            named = [each for each in parsed.named_selects if each != "*"]
            more = [] if len(named) == len(parsed.selects) else [name for each in known.values() for name in each]
            if unknown := dict.fromkeys([*named, *more], "unknown"):
                known[THIS] = unknown
        qualified: Any = qualify(
            parsed,
            dialect=dialect,
            schema=known,
            allow_partial_qualification=True,
            validate_qualify_columns=False,
            identify=False,
        )
    except sqlglot.errors.SqlglotError as error:
        raise DeclarationError(f"The query cannot be parsed: {error}") from None
    return qualified  # type: ignore[no-any-return]


def _mapping(schemas: Schemas) -> dict[str, Any]:
    """Return the columns as sqlglot takes them. Types are those of Spark, which has one for each of Arrow's."""
    return {
        name: {field.name: _kind(field.type) for field in schema}
        for name, schema in schemas.items()
        if name is not None
    }


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    for check, name in _KINDS:
        if check(kind):
            return name
    return "unknown"


_KINDS = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_integer, "int"),
    (pa.types.is_float32, "float"),
    (pa.types.is_floating, "double"),
    (pa.types.is_date, "date"),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None, "timestamptz"),
    (pa.types.is_timestamp, "timestamp"),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), "text"),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind), "binary"),
)
