"""The table of watermarks: beside the target's rows, written in their transaction."""

from __future__ import annotations

import pyarrow as pa

from weft.errors import ConnectionFailedError, LoadRefusedError, WeftError
from weft.systems.load import Load
from weft.systems.sql.driver import Session
from weft.systems.sql.own import create_own_table, own_table
from weft.systems.sql.tables import SqlTables
from weft.systems.watermark import Watermark

_FIELDS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("target", pa.string(), nullable=False),
        pa.field("column_name", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("value", pa.string(), nullable=False),
        pa.field("seen", pa.int64(), nullable=False),
        pa.field("moved_at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)
_KEY = ("pipeline", "target")


def _table(tables: SqlTables) -> str:
    return own_table(tables, "watermarks")


def prepare(tables: SqlTables) -> None:
    """Make the table where it is missing."""
    create_own_table(tables, "watermarks", _FIELDS, _KEY)


def read(tables: SqlTables, load: Load) -> Watermark | None:
    """How far a pipeline has come with a target."""
    try:
        with tables.driver.session("read") as session:
            found = session.row(
                f"SELECT column_name, kind, {tables.quote('value')}, seen FROM {_table(tables)} "
                "WHERE pipeline = ? AND target = ?",
                (load.pipeline, load.name),
            )
    except ConnectionFailedError:
        raise
    except WeftError:
        # No table yet. If it was something else, the load is refused: it would write the first watermark of the target.
        return None
    return None if found is None else Watermark(str(found[0]), str(found[1]), str(found[2]), int(found[3]))


def write(tables: SqlTables, session: Session, load: Load, mark: Watermark) -> None:
    """Move it, in the transaction of the rows."""
    key = (load.pipeline, load.name)
    values = (mark.column, mark.kind, mark.text, mark.seen)
    moved_at = tables.moment(load.moment)
    if mark.after is None:
        names = ", ".join(tables.quote(field.name) for field in _FIELDS)
        session.run(f"INSERT INTO {_table(tables)} ({names}) VALUES (?, ?, ?, ?, ?, ?, {moved_at})", (*key, *values))
        return
    changed = session.run(
        f"UPDATE {_table(tables)} SET column_name = ?, kind = ?, {tables.quote('value')} = ?, seen = ?, "
        f"moved_at = {moved_at} WHERE pipeline = ? AND target = ? AND {tables.quote('value')} = ?",
        (*values, *key, mark.after),
    )
    if int(changed.rowcount) != 1:
        raise LoadRefusedError(
            f"Another run of {load.pipeline} has loaded {load.name} meanwhile; nothing of this one was written.",
            hint="Let them share one run log: it lets one run at a time.",
        )
