"""The table of watermarks: in the target's database, written in the transaction of its rows."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import pyarrow as pa

from weft.errors import BusyError, ConnectionFailedError, StorageError, WeftError
from weft.systems.load import Load
from weft.systems.sql.driver import Session
from weft.systems.sql.system_tables import CreatedError, create_system_table, instant, refuse_created, system_table
from weft.systems.sql.tables import SqlTables
from weft.systems.watermark import LoadWatermark

_log = logging.getLogger("weft.engine")

_COUNTED = "counted_to"
_FIELDS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("target", pa.string(), nullable=False),
        pa.field("column_name", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("value", pa.string(), nullable=False),
        pa.field("seen", pa.int64(), nullable=False),
        pa.field("moved_at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field(_COUNTED, pa.string()),
    ]
)
_KEY = ("pipeline", "target")


def _table(tables: SqlTables) -> str:
    return system_table(tables, "watermarks")


def prepare(tables: SqlTables) -> None:
    """Create the table where it is missing, and add the column that its first version did not have."""
    create_system_table(tables, "watermarks", _FIELDS, _KEY)
    if _COUNTED in (_columns(tables) or ()):
        return
    # Where two add it at once, one of them fails, and the column is there.
    with suppress(WeftError), tables.driver.session("publish") as session:
        kind = tables.sql_type(_FIELDS.field(_COUNTED))
        session.run(f"ALTER TABLE {_table(tables)} ADD COLUMN {tables.quote(_COUNTED)} {kind}")


def _columns(tables: SqlTables) -> list[str] | None:
    """Return the columns of the table; `None` where it does not exist yet."""
    try:
        return list(tables.describe(f"SELECT * FROM {_table(tables)}").names)
    except (ConnectionFailedError, BusyError, StorageError):
        raise
    except WeftError:
        return None


def forget(tables: SqlTables, load: Load) -> None:
    """Remove all watermarks of a target that is about to be created: before that, so that a process which dies in
    between leaves no table that seems to have rows which it lacks.

    Those of a table that is there by now stay: this process may have stood still since it looked, and another one has
    created and loaded the table meanwhile."""
    if load.replaces is not None or _columns(tables) is None:
        return
    removed = 0
    with suppress(CreatedError), tables.driver.session("publish") as session:
        cursor = session.run(f"DELETE FROM {_table(tables)} WHERE target = ?", (load.name,))
        # After it: a watermark that it has found was stored after its table was created.
        refuse_created(tables, session, load)
        removed = cursor.rowcount
    if removed > 0:
        _log.warning("The table %s is created again: its pipelines read their sources from the beginning.", load.name)


def read(tables: SqlTables, load: Load) -> LoadWatermark | None:
    """Return how far a pipeline has read its source for a target; `None` where it has not."""
    columns = _columns(tables)
    if columns is None:
        return None
    with tables.driver.session("read") as session:
        counted = _COUNTED if _COUNTED in columns else "NULL"
        row = session.row(
            f"SELECT column_name, kind, {tables.quote('value')}, seen, {counted} FROM {_table(tables)} "
            "WHERE pipeline = ? AND target = ?",
            (load.pipeline, load.name),
        )
    if row is None:
        return None
    column, kind, text, seen, counted = row
    return LoadWatermark(
        str(column), str(kind), str(text), int(seen), counted=None if counted is None else str(counted)
    )


def read_all(tables: SqlTables, column: str) -> list[tuple[str, str, str, Any]]:
    """Return the watermarks of a column: the pipeline and target of each, its text, and when it was stored."""
    if _columns(tables) is None:
        return []
    with tables.driver.session("read") as session:
        rows = session.rows(
            f"SELECT pipeline, target, {tables.quote('value')}, moved_at FROM {_table(tables)} WHERE column_name = ?",
            (column,),
        )
    return [(str(pipeline), str(target), str(value), instant(moved)) for pipeline, target, value, moved in rows]


def remove(tables: SqlTables, session: Session, pipeline: str, target: str) -> None:
    session.run(f"DELETE FROM {_table(tables)} WHERE pipeline = ? AND target = ?", (pipeline, target))


def write(tables: SqlTables, session: Session, load: Load, mark: LoadWatermark, rows_read: int) -> None:
    """Store a watermark, in the transaction of the rows."""
    key = (load.pipeline, load.name)
    values = (mark.column, mark.kind, mark.text, mark.seen + (rows_read if mark.adds_read else 0))
    moved_at = tables.moment(load.moment)
    if mark.after is None:
        names = tables.listed(_FIELDS.names)
        try:
            session.run(
                f"INSERT INTO {_table(tables)} ({names}) VALUES (?, ?, ?, ?, ?, ?, {moved_at}, ?)",
                (*key, *values, mark.counted),
            )
        except Exception as error:
            if tables.is_duplicate(error):
                raise load.overtaken() from None
            raise
        return
    changed = session.run(
        f"UPDATE {_table(tables)} SET column_name = ?, kind = ?, {tables.quote('value')} = ?, seen = ?, "
        f"moved_at = {moved_at}, {_COUNTED} = ? WHERE pipeline = ? AND target = ? AND {tables.quote('value')} = ?",
        (*values, mark.counted, *key, mark.after),
    )
    if int(changed.rowcount) != 1:
        raise load.overtaken()
