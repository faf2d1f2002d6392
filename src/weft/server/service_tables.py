"""The service's own tables: in the database that has its keys, where that is an SQL database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from weft.errors import ConnectionFailedError, WeftError
from weft.server.keys import keys_connection
from weft.systems.base import system_for
from weft.systems.sql.tables import SqlTables


@contextmanager
def service_tables() -> Iterator[SqlTables | None]:
    """Yield the tables of that database for a block; `None` where it is no SQL database."""
    connection = keys_connection()
    system = system_for(connection.kind)
    if system.tables is None:
        yield None
        return
    with closing(system.load_tables()(connection)) as tables:
        yield tables


def is_not_there(error: WeftError, tables: SqlTables) -> bool:
    """Return whether a read failed because nothing was ever written: there is no such table, or no such database."""
    connection = tables.driver.connection
    if connection.is_missing():
        return True
    return not isinstance(error, ConnectionFailedError) and connection.reports_missing(error.what) == "table"
