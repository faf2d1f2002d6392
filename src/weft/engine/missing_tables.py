"""What a query may have meant by a table that is not there."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pyarrow as pa

from weft.errors import WeftError, did_you_mean
from weft.pipelines.shared_tables import table_of
from weft.project import current
from weft.systems.base import Connection
from weft.systems.load import full_name
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


def creation_hint(name: str, connection: Connection) -> str | None:
    """Return which pipeline or model creates a table of this name, with or without a schema, and how."""
    project = current()
    for command, declared in (("run", project.pipelines), ("consume", project.streaming_pipelines)):
        pipelines: list[Any] = list(declared.values())
        for pipeline in pipelines:
            for target in pipeline.targets:
                table = table_of(target)
                if table is None or full_name(*table).lower() != name.lower():
                    continue
                with suppress(WeftError):  # of a connection that cannot be used nothing is known
                    if project.connection(target.connection).is_same_place(connection):
                        return f"The first run of {pipeline.name} creates it: weft {command} {pipeline.name}"
    return None


def _hint(tables: SqlTables, sql: str, what: str) -> str | None:
    for read in _READ.findall(sql):
        parts = [part.strip('"`') for part in re.findall(_NAME, read)]
        schema, name = parts if len(parts) == 2 else (None, parts[0])
        full = ".".join(parts)
        if name not in what:
            continue
        if creation := creation_hint(full, tables.connection):
            return creation
        with tables.driver.session("read") as session:
            if schema is not None and tables.columns(session, schema, name) is not None:
                # Without schemas, the table is one whose name has a dot.
                return f"In quotation marks it is a name: FROM {tables.table(schema, name)}."
            present = sorted(each for each in tables.names(session, schema) if not each.startswith("weft."))
        if near := did_you_mean(name, present):
            return near
    return None
