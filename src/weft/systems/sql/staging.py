"""Staging tables that many tasks fill at once. They outlive a task, so somebody must remove them, also after a crash.

A load that uses one holds a lock of its name on a connection of its own, which the database releases when that process
ends. A staging table whose lock is free belongs to nobody: the next load removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from uuid import uuid4

import pyarrow as pa

from weft.errors import WeftError
from weft.systems.sql.driver import Session
from weft.systems.sql.tables import SqlTables

ATTEMPT = pa.field("_weft_attempt", pa.string(), nullable=False)
_PREFIX = "stage_"
_TRY_LOCK = {
    "postgres": "SELECT pg_try_advisory_lock(hashtextextended(?, 0))",
    "mysql": "SELECT GET_LOCK(SHA1(?), 0)",
}
_UNLOCK = {
    "postgres": "SELECT pg_advisory_unlock(hashtextextended(?, 0))",
    "mysql": "SELECT RELEASE_LOCK(SHA1(?))",
}
_LIST = {
    "postgres": r"SELECT tablename FROM pg_tables WHERE schemaname = 'weft' AND tablename LIKE 'stage\_%'",
    "mysql": "SELECT substring(TABLE_NAME, 6) FROM information_schema.TABLES "
    r"WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME LIKE 'weft.stage\_%'",
}


@contextmanager
def staging_table(tables: SqlTables, schema: pa.Schema) -> Iterator[str]:
    """Create a table for rows of this schema; yield its quoted name, and drop it when the block ends."""
    sweep(tables)
    name = _PREFIX + uuid4().hex
    table = tables.driver.table("weft", name)
    definitions = ", ".join(f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in schema.append(ATTEMPT))
    holder = tables.driver.connect("read")
    try:
        Session(tables.driver, holder).row(_TRY_LOCK[tables.dialect], (name,))
        with tables.driver.session("publish") as session:
            session.run(f"CREATE TABLE {table} ({definitions})")
        try:
            yield table
        finally:
            with suppress(WeftError), tables.driver.session("publish") as session:
                session.run(f"DROP TABLE IF EXISTS {table}")
    finally:
        with suppress(Exception):
            holder.close()


def sweep(tables: SqlTables) -> list[str]:
    """Remove the staging tables of loads that are dead; return their names."""
    removed = []
    with closing(tables.driver.connect("read")) as holder:
        session = Session(tables.driver, holder)
        for (name,) in session.rows(_LIST[tables.dialect]):
            if session.value(_TRY_LOCK[tables.dialect], (name,)):
                try:
                    with suppress(WeftError), tables.driver.session("publish") as other:
                        other.run(f"DROP TABLE IF EXISTS {tables.driver.table('weft', name)}")
                        removed.append(name)
                finally:
                    session.row(_UNLOCK[tables.dialect], (name,))
    return removed


def fill(tables: SqlTables, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> tuple[str, int, int]:
    """Store the rows of one attempt of a task, tagged with a name of its own; return the name, how many rows and how
    many bytes."""
    attempt = uuid4().hex
    tagged = schema.append(ATTEMPT)
    rows = 0

    def with_attempt() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in batches:
            rows += batch.num_rows
            yield pa.RecordBatch.from_arrays([*batch.columns, pa.repeat(attempt, batch.num_rows)], schema=tagged)

    with tables.driver.session("publish") as session:
        sent = tables.copy_in(session, table, tagged, with_attempt())
    return attempt, rows, sent
