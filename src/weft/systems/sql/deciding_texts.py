"""Texts for columns of other types, where these decide what becomes of a row: keys, event times, `deduplicate_by`.

As texts they would be compared wrongly: `1` and `01` are one key of a column of integers, and `10` is greater than `9`.
"""

from __future__ import annotations

import re

import pyarrow as pa

from weft.columns import hint_of
from weft.systems.load import Load, Projected
from weft.systems.sql.tables import Column, SqlTables


def projection(
    tables: SqlTables, load: Load, written: pa.Schema, columns: dict[str, Column]
) -> tuple[Projected, ...] | None:
    """Return how all columns are made, those that decide with the types of the target; `None` where they have them."""
    if not load.keys or load.changes is not None:  # changes have the types of their source
        return None
    deciding = {*load.keys, load.event_timestamp_column, *load.deduplicate_by}
    texts = {
        field.name: columns[field.name]
        for field in written
        if field.name in deciding and _takes_alike(field, columns[field.name])
    }
    if not texts:
        return None
    made = load.projection or tuple(Projected(f"q.{tables.quote(field.name)}", field) for field in written)
    return tuple(_typed(tables, each, texts[each.field.name]) if each.field.name in texts else each for each in made)


def _typed(tables: SqlTables, each: Projected, column: Column) -> Projected:
    # Of the column's type also where a cast leaves the conversion to the column.
    value = tables.as_hashed(tables.cast(each.sql, each.field, column), column)
    return Projected(value, column.field.with_name(each.field.name))


def _takes_alike(field: pa.Field, column: Column) -> bool:
    """Whether different texts may be one value of a column."""
    if not pa.types.is_string(field.type) or hint_of(field) is not None:
        return False
    is_other = not pa.types.is_string(column.field.type) or hint_of(column.field) is not None
    return is_other or re.match(r"char(acter)?\(", column.sql) is not None  # which has no spaces at the end
