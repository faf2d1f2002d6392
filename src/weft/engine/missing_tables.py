"""What a query may have meant by a table that is not there."""

from __future__ import annotations

import re

import pyarrow as pa

from weft.errors import WeftError, did_you_mean
from weft.project import current
from weft.systems.sql.driver import MissingTableError
from weft.systems.sql.tables import SqlTables

_NAME = r"""(?:[^\W\d]\w*|"[^"]+"|`[^`]+`)"""
_READ = re.compile(rf"\b(?:from|join)\s+({_NAME}(?:\s*\.\s*{_NAME})?)(?!\w|\s*[.(])", re.IGNORECASE)


def described(tables: SqlTables, sql: str) -> pa.Schema:
    """Return the columns of a query. If a table is not there, the error says which one it may have meant."""
    try:
        return tables.describe(sql)
    except MissingTableError as error:
        try:
            hint = error.hint or _hint(tables, sql, error.what)
        except WeftError:  # the first error is the one to show
            hint = None
        raise MissingTableError(error.what, hint=hint) from error


def _hint(tables: SqlTables, sql: str, what: str) -> str | None:
    for read in _READ.findall(sql):
        parts = [part.strip('"`') for part in re.findall(_NAME, read)]
        schema, name = parts if len(parts) == 2 else (None, parts[0])
        full = ".".join(parts)
        if name not in what:
            continue
        for pipeline in current().pipelines.values():
            for target in pipeline.targets:
                is_named = full.lower() == target.table.full_name.lower()
                if is_named and current().connection(target.connection).resolved() == tables.connection:
                    return f"The first run of {pipeline.name} creates it: weft run {pipeline.name}"
        with tables.driver.session("read") as session:
            if schema is not None and tables.columns(session, schema, name) is not None:
                # Without schemas, the table is one whose name has a dot.
                return f"In quotation marks it is a name: FROM {tables.table(schema, name)}."
            present = sorted(each for each in tables.names(session, schema) if not each.startswith("weft."))
        if near := did_you_mean(name, present):
            return near
    return None
