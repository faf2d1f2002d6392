"""The ledger `weft.commits`: a row for each load that was carried out, written in the load's own transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pyarrow as pa

from weft.systems.load import UNNAMED, Counts, Load
from weft.systems.sql.driver import Session
from weft.systems.sql.system_tables import create_system_table, system_table
from weft.systems.sql.tables import SqlTables

_KEY = ("pipeline", "checkpoint_id", "batch_id")
_COUNTS = ("rows_read", "inserted", "updated", "unchanged", "deleted", "quarantined")
_POSITIONS = "positions"
_FIELDS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("checkpoint_id", pa.string(), nullable=False),
        pa.field("batch_id", pa.int64(), nullable=False),
        pa.field("committed_at", pa.timestamp("us", "UTC"), nullable=False),
        *(pa.field(name, pa.int64()) for name in _COUNTS),
        pa.field(_POSITIONS, pa.string()),
    ]
)
_OF_LOAD = " AND ".join(f"{name} = ?" for name in _KEY)
_UNNAMED_KEPT = timedelta(days=7)
# Of a streaming pipeline, whose batches are numbered: it repeats the last one at most. Looked at once in so many.
_BATCHES_KEPT, _BATCHES_BETWEEN = 1000, 100
_tidied: dict[tuple[object, ...], int] = {}
"""By ledger and checkpoint, the batch in which this process looked last. Not by the number of a batch alone: of windows
few batches are recorded, perhaps none whose number is a round one."""


class ClaimRefusedError(Exception):
    """The ledger rejected the row of a load: most likely another attempt was faster."""

    def __init__(self, reason: BaseException) -> None:
        self.reason = reason


def table(tables: SqlTables) -> str:
    """Return the quoted name of the ledger."""
    return system_table(tables, "commits")


def create(tables: SqlTables) -> None:
    """Create the ledger where it is missing."""
    create_system_table(tables, "commits", _FIELDS, _KEY, later=_POSITIONS)


def is_committed(tables: SqlTables, load: Load) -> bool:
    if not load.is_recorded:
        return False
    with tables.driver.session("read") as session:
        return session.row(f"SELECT 1 FROM {table(tables)} WHERE {_OF_LOAD}", _key(load)) is not None


def last_batch(tables: SqlTables, load: Load) -> tuple[int, str | None] | None:
    """Return the last batch of those that the ledger has from this load on under its key, and its positions."""
    with tables.driver.session("read") as session:
        row = session.row(
            f"SELECT batch_id, {_POSITIONS} FROM {table(tables)} WHERE pipeline = ? AND checkpoint_id = ? "
            "AND batch_id >= ? ORDER BY batch_id DESC",
            _key(load),
        )
    return None if row is None else (int(row[0]), row[1])


def check_committed(tables: SqlTables, load: Load, refused: ClaimRefusedError) -> None:
    """Raise unless the unique key rejected the row: only the ledger itself shows whether it did."""
    if not is_committed(tables, load):
        raise tables.driver.explain(refused.reason) from None


def claim(tables: SqlTables, session: Session, load: Load) -> None:
    """Insert the row of a load: another attempt at the same load waits here, and then finds it."""
    if not load.is_recorded:
        return
    # Nobody asks for a load without a key once its tasks are over.
    session.run(
        f"DELETE FROM {table(tables)} WHERE pipeline = ? AND checkpoint_id LIKE '{UNNAMED}%' "
        f"AND committed_at < {tables.moment(load.moment - _UNNAMED_KEPT)}",
        (load.pipeline,),
    )
    if load.batch_id > _BATCHES_KEPT:
        _tidy(tables, session, load)
    names = tables.listed(_FIELDS.names)
    values = ", ".join([*"?" * len(_KEY), tables.moment(load.moment), *"0" * len(_COUNTS), "?"])
    try:
        session.run(f"INSERT INTO {table(tables)} ({names}) VALUES ({values})", (*_key(load), load.positions))
    except Exception as error:
        if tables.is_rejection(error):
            raise ClaimRefusedError(error) from None
        raise


def _tidy(tables: SqlTables, session: Session, load: Load) -> None:
    """Now and then, remove the rows of batches that nobody repeats."""
    checkpoint = (tables.connection.target, load.pipeline, load.checkpoint_id)
    if load.batch_id - _tidied.get(checkpoint, 0) < _BATCHES_BETWEEN:
        return
    _tidied[checkpoint] = load.batch_id
    # Keep by count, not by batch number: a user's numbers may be dates.
    of_checkpoint = f"FROM {table(tables)} WHERE pipeline = ? AND checkpoint_id = ?"
    newest = f"SELECT batch_id {of_checkpoint} ORDER BY batch_id DESC LIMIT 1 OFFSET {_BATCHES_KEPT - 1}"
    oldest_kept = session.row(newest, checkpoint[1:])
    if oldest_kept is not None:
        session.run(f"DELETE {of_checkpoint} AND batch_id < ?", (*checkpoint[1:], oldest_kept[0]))


def record(tables: SqlTables, session: Session, load: Load, counts: Counts) -> None:
    """Store the counts of a load in its row."""
    if not load.is_recorded:
        return
    changes = ", ".join(f"{name} = {int(getattr(counts, name))}" for name in _COUNTS)
    session.run(f"UPDATE {table(tables)} SET {changes} WHERE {_OF_LOAD}", _key(load))


def last_of(tables: SqlTables, pipelines: Sequence[str]) -> str:
    """Return a text that changes with each load of these pipelines."""
    if tables.connection.is_missing():
        return ""
    # Not `create`: who reads need not own the ledger, and no column of it that came later is read.
    create_system_table(tables, "commits", _FIELDS, _KEY)
    marks = ", ".join("?" * len(pipelines))
    with tables.driver.session("read") as session:
        row = session.row(
            f"SELECT count(*), max(committed_at), max(batch_id) FROM {table(tables)} WHERE pipeline IN ({marks})",
            tuple(pipelines),
        )
    return " ".join(map(str, row or ()))


def _key(load: Load) -> tuple[str, str, int]:
    return load.pipeline, load.checkpoint_id, load.batch_id
