"""Tables of Weft's own in a user's database, in the schema `weft`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from weft.errors import ConnectionFailedError, WeftError
from weft.systems.load import Load
from weft.systems.sql.driver import Session
from weft.systems.sql.tables import SqlTables


def system_table(tables: SqlTables, name: str) -> str:
    """Return the quoted name of a table of Weft."""
    return tables.driver.table("weft", name)


def create_system_table(
    tables: SqlTables, name: str, fields: pa.Schema, key: Sequence[str], later: str | None = None
) -> None:
    """Create a table of Weft where it is missing. `later`: a column that its first version did not have, which is
    added."""
    table = system_table(tables, name)
    if _has(tables, table, later):
        return
    definitions = [
        # Among key columns only texts need a type that can be indexed.
        f"{tables.quote(field.name)} {tables.sql_type(field, key=field.name in key and pa.types.is_string(field.type))}"
        f"{'' if field.nullable else ' NOT NULL'}"
        for field in fields
    ]
    definitions.append(f"PRIMARY KEY ({', '.join(key)})")
    try:
        _create(tables, table, definitions)
    except WeftError:
        # Two processes created it at once, and the other one was faster.
        _create(tables, table, definitions)
    if later is None or _has(tables, table, later):
        return
    change = f"ALTER TABLE {table} ADD COLUMN {tables.quote(later)} {tables.sql_type(fields.field(later))}"
    try:
        with tables.driver.session("publish") as session:
            session.run(change)
    except ConnectionFailedError:
        raise
    except WeftError as error:
        # Two processes added it at once, and the other one was faster.
        if not _has(tables, table, later):
            raise WeftError(
                f"The table {table} lacks the column {later!r}, which could not be added: {error.what}",
                hint=f"Run `{change}` as its owner.",
            ) from error


def _has(tables: SqlTables, table: str, column: str | None) -> bool:
    """Return whether there is a table, with a column. Its name is not quoted: SQLite takes a quoted one for a text."""
    with suppress(WeftError), tables.driver.session("read") as session:
        session.rows(f"SELECT {column or 1} FROM {table} WHERE 1 = 0")
        return True
    return False


def _create(tables: SqlTables, table: str, definitions: Sequence[str]) -> None:
    with tables.driver.session("publish") as session:
        if tables.driver.has_schemas:
            tables.create_schema(session, "weft")
        session.run(f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(definitions)})")


def instant(value: Any) -> datetime | None:
    """Return a driver's timestamp in UTC: it may be a text, or a time without a zone, which is in UTC."""
    if value is None:
        return None
    moment: datetime = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


class CreatedError(Exception):
    """Another process has created the table of a load; what was done in the transaction is undone."""


def refuse_created(tables: SqlTables, session: Session, load: Load) -> None:
    """Raise `CreatedError` where the table of a load is there, after what is kept of it was removed: that may be of
    its first loads."""
    if tables.columns(session, load.schema, load.table) is not None:
        raise CreatedError
