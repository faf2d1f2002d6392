"""Staging tables that many tasks fill at once. They outlive a task, so somebody must remove them, also after a crash.

Whoever uses one holds a lock of its name on a connection of its own, which the database gives up when that process is
gone. A staging table whose lock is free belongs to nobody: the next load removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    """A new table for rows of this schema, by its quoted name, gone when the block ends."""
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
    """Remove the staging tables of loads that are dead; their names."""
    removed = []
    holder = tables.driver.connect("read")
    try:
        session = Session(tables.driver, holder)
        for (name,) in session.rows(_LIST[tables.dialect]):
            row = session.row(_TRY_LOCK[tables.dialect], (name,))
            if row is not None and row[0]:
                try:
                    with suppress(WeftError), tables.driver.session("publish") as other:
                        other.run(f"DROP TABLE IF EXISTS {tables.driver.table('weft', name)}")
                        removed.append(name)
                finally:
                    session.row(_UNLOCK[tables.dialect], (name,))
    finally:
        holder.close()
    return removed


def fill(tables: SqlTables, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> tuple[str, int, int]:
    """One attempt of one task: its rows, tagged with a name of their own. The name, how many rows, how many bytes."""
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
