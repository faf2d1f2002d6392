"""Objects of JSON that reach a table with the keys of others: while they are rows of one type, each has the keys of
all."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import has_objects, hinted, is_nested
from weft.engine import inputs
from weft.engine.inputs import Input
from weft.systems.base import Connection
from weft.systems.load import Load
from weft.systems.sql.tables import Column, SqlTables

_log = logging.getLogger("weft.engine")
_OF_CHANGES = "Objects of changes stay as they were sent without row_sql, where each target is a table of a database."


def warn(
    rows: Input,
    load: Load,
    connection: Connection,
    tables: SqlTables,
    present: Mapping[str, Column | None] | None,
    said: set[tuple[str, str]],
) -> None:
    """Say which columns of JSON get objects with nulls for keys that they perhaps were not sent with. `present`: the
    columns of the table. `said`: of which tables and columns that was said."""
    place = f"{load.name} of {connection.label}"
    for each in inputs.schema_of(rows):
        if (place, each.name) in said or not has_objects(each.type):
            continue
        if (column := (present or {}).get(each.name.lower())) is not None:
            is_json = not is_nested(column.field.type)
        else:
            is_json = tables.sql_type(each) == tables.sql_type(hinted(each.name, "json"))
        if not is_json or not _may_differ(rows, each.name):
            continue
        said.add((place, each.name))
        helps = f'To store each as it was sent, declare the column of the source: columns={{"{each.name}": "json"}}.'
        _log.warning(
            "Each object in the column %r of %s has the keys of all, with nulls. %s",
            each.name,
            place,
            helps if load.changes is None else _OF_CHANGES,
        )


def _may_differ(rows: Input, name: str) -> bool:
    """Return whether an object in a column has a null: of rows of Spark that is not known."""
    if not isinstance(rows, inputs.Memory) or not isinstance(rows.batches, Collection):
        return True
    return any(_has_nulls(batch.column(name)) for batch in rows.batches)


def _has_nulls(array: pa.Array) -> bool:
    """Return whether an object in an array lacks the value of a key."""
    if pa.types.is_struct(array.type):
        there = array.filter(pc.is_valid(array))
        parts = [there.field(number) for number in range(there.type.num_fields)]
        return any(each.null_count or _has_nulls(each) for each in parts)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _has_nulls(array.flatten())
    return False
