"""Which staged rows a constraint of their target rejects, by the catalogue: DuckDB does not say at which row a
statement failed."""

from __future__ import annotations

from weft.systems.load import Load
from weft.systems.sql.constraints import Constraint, same
from weft.systems.sql.driver import Session
from weft.systems.sql.tables import ROW, SqlTables, Suspect


def find(tables: SqlTables, session: Session, load: Load, source: str, values: dict[str, str]) -> list[Suspect]:
    """Return the rows of `source` as `s` that have a value which does not fit, or break a constraint, in order.
    `values`: what is inserted, null where it does not fit."""
    row, unfit, other, broken, shown, first = map(
        tables.quote, (ROW, "_weft_unfit", "_weft_other", "_weft_broken", "_weft_shown", "_weft_first")
    )
    # By broken rule, the value that the reason shows: none for checks and NOT NULL.
    rules: dict[str, str] = {}
    is_other, contradicts = ["FALSE"], ["NULL"]
    # A merge updates the row that has the same key.
    merged = load.keys if load.mode == "merge" else ()
    for kind, check, columns, referenced, keys in session.rows(
        "SELECT constraint_type, expression, constraint_column_names, referenced_table, referenced_column_names "
        "FROM duckdb_constraints() WHERE database_name = ? AND lower(schema_name) = lower(?) "
        "AND lower(table_name) = lower(?)",
        (session.store.catalog, load.schema or "main", load.table),
    ):
        if not set(columns) <= set(values):
            continue
        if kind in ("NOT NULL", "CHECK"):
            rules[Constraint(columns, check).broken(tables)] = "NULL"
        elif kind == "FOREIGN KEY" and referenced != load.table:
            is_broken = Constraint(columns, other=tables.table(load.schema, referenced), keys=keys).broken(tables)
            if len(columns) == 1:
                rules[is_broken] = f"CAST({tables.quote(columns[0])} AS VARCHAR)"
            else:
                is_other.append(is_broken)
        elif kind in ("PRIMARY KEY", "UNIQUE") and not (merged and set(merged) <= set(columns)):
            if load.mode != "truncate":
                another = f" AND NOT ({same(tables, merged, merged)})" if merged else ""
                there = f"SELECT 1 FROM {tables.table(load.schema, load.table)} AS t"
                is_other.append(f"EXISTS ({there} WHERE {same(tables, columns, columns)}{another})")
            present = " AND ".join(f"{tables.quote(name)} IS NOT NULL" for name in columns)
            is_good = f"NOT {other} AND {broken} = ''"
            holder = f"min({row}) FILTER ({is_good}) OVER (PARTITION BY {tables.listed(columns)})"
            contradicts.append(f"CASE WHEN {present} AND {holder} < {row} THEN {holder} END")
    converted, raw = [], []
    for number, (name, value) in enumerate(values.items()):
        converted.append(f"{value} AS {tables.quote(name)}")
        if value != f"s.{tables.quote(name)}":
            misfit = tables.quote(f"{ROW}_{number}")
            raw.append(f"CASE WHEN {value} IS NULL THEN CAST(s.{tables.quote(name)} AS VARCHAR) END AS {misfit}")
            rules[f"{misfit} IS NOT NULL"] = misfit
    is_unfit = " OR ".join(rule for rule, value in rules.items() if rule == f"{value} IS NOT NULL") or "FALSE"
    numbers = ", ".join(["NULL", *(f"CASE WHEN {rule} THEN {number} END" for number, rule in enumerate(rules))])
    texts = ", ".join(["NULL", *(f"CASE WHEN {rule} THEN {text} END" for rule, text in rules.items())])
    suspects = session.rows(
        f"WITH v AS (SELECT s.{row}, {', '.join([*converted, *raw])} FROM {source} AS s), "
        f"c AS (SELECT *, {is_unfit} AS {unfit}, coalesce({' OR '.join(is_other)}, FALSE) AS {other}, "
        f"concat_ws(' ', {numbers}) AS {broken}, coalesce({texts}) AS {shown} FROM v), "
        f"f AS (SELECT *, coalesce({', '.join(contradicts)}) AS {first} FROM c) "
        f"SELECT {row}, {first}, {unfit}, CASE WHEN NOT {other} AND {first} IS NULL THEN {broken} END, {shown} FROM f "
        f"WHERE {other} OR {broken} <> '' OR {first} IS NOT NULL ORDER BY {row}"
    )
    return [Suspect(*suspect) for suspect in suspects]
