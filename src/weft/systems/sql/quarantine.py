"""The table for rows that a target rejects, and how they are stored and named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import pyarrow as pa

from weft.errors import DeclarationError, WeftError
from weft.systems import payloads
from weft.systems.load import Load
from weft.systems.sql.move import LoadTransaction
from weft.systems.sql.tables import ROW, SqlTables

LISTED = "_weft_aside"
"""The temporary table of rows that are put aside in the end, where there are no savepoints."""
STORED_ROWS = 500
"""How many rows are stored together at most."""
# MySQL takes no statement of more than 16 MB.
_STORED_LETTERS = 1_000_000
# How many columns an error names of a row without keys, and how much of a value.
_NAMED_COLUMNS, _NAMED_LETTERS = 3, 60
# PostgreSQL cuts longer names off silently.
_NAME_BYTES = 63
_FIELDS = pa.schema(
    [
        pa.field("_weft_quarantined_at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("_weft_error", pa.string(), nullable=False),
        pa.field("_weft_pipeline", pa.string(), nullable=False),
        pa.field("_weft_checkpoint_id", pa.string(), nullable=False),
        pa.field("_weft_batch_id", pa.int64(), nullable=False),
        pa.field("payload", pa.string(), nullable=False),
    ]
)
NOWHERE = -1
"""The number of a row that is not staged."""


def table_name(load: Load) -> str:
    """Return the name of the table for rejected rows."""
    return f"{load.replaces or load.table}__quarantine"


def prepare(tables: SqlTables, load: Load) -> None:
    """Create the table for rejected rows."""
    if len(table_name(load).encode()) > _NAME_BYTES:
        raise DeclarationError(
            f"{table_name(load)!r} is longer than {_NAME_BYTES} bytes, so {load.name} cannot have a quarantine.",
            hint="Give the table a shorter name, or let a load with bad rows fail.",
        )
    with tables.driver.session("read") as session:
        if tables.columns(session, load.schema, table_name(load)) is not None:
            return
    with suppress(WeftError), tables.driver.session("publish") as session:
        # Where two create it at once, one fails; if both do, the first INSERT raises the reason.
        session.run(
            f"CREATE TABLE IF NOT EXISTS {tables.table(load.schema, table_name(load))} "
            f"({', '.join(_definitions(tables, _FIELDS))})"
        )


def _definitions(tables: SqlTables, fields: Iterable[pa.Field]) -> list[str]:
    return [f"{tables.quote(field.name)} {tables.sql_type(field)} NOT NULL" for field in fields]


def create_list(transaction: LoadTransaction) -> None:
    """Create the list of rows that are put aside in the end."""
    tables = transaction.tables
    number = pa.field(ROW, pa.int64(), nullable=False)
    tables.create_temporary(transaction.session, LISTED, ", ".join(_definitions(tables, [*_FIELDS, number])))


def insert_listed(transaction: LoadTransaction) -> None:
    """Put the rows of that list aside."""
    tables = transaction.tables
    names, listed = tables.listed(_FIELDS.names), tables.temporary(LISTED)
    transaction.session.run(f"INSERT INTO {_quarantine(transaction)} ({names}) SELECT {names} FROM {listed}")


def insert(
    transaction: LoadTransaction, rows: Sequence[tuple[str, dict[str, object]]], numbers: Sequence[int] | None = None
) -> None:
    """Put rows aside, each with the reason; with `numbers` into the list of those that are put aside in the end."""
    tables, load = transaction.tables, transaction.load
    into, fields = _quarantine(transaction), _FIELDS.names
    if numbers is not None:
        into, fields = tables.temporary(LISTED), [*fields, ROW]
    marks, values, size = list[str](), list[object](), 0
    for at, (reason, row) in enumerate(rows):
        text = payload(row)
        marks.append(f"({tables.moment(load.moment)}, ?, ?, ?, ?, ?{'' if numbers is None else f', {numbers[at]}'})")
        # A text with NUL is what PostgreSQL refuses; in the payload it is an escape.
        values += (reason.replace("\0", "\\0"), load.pipeline, load.checkpoint_id, load.batch_id, text)
        size += len(text)
        if len(marks) == STORED_ROWS or size > _STORED_LETTERS or at == len(rows) - 1:
            listed = ", ".join(marks)
            transaction.session.run(f"INSERT INTO {into} ({tables.listed(fields)}) VALUES {listed}", values)
            marks, values, size = [], [], 0


def _quarantine(transaction: LoadTransaction) -> str:
    return transaction.tables.table(transaction.load.schema, table_name(transaction.load))


def payload(row: dict[str, object]) -> str:
    """Return a row that is put aside as JSON."""
    return payloads.dumps(row, _text)


def keyless(load: Load) -> str:
    """Return the reason for which a row without a key is put aside."""
    return f"The row has no key ({', '.join(load.keys)} is null)."


def name_of(row: dict[str, object], load: Load, wrong: str | None = None) -> str:
    """Describe a row by its keys, or by its first columns, and by the one that is wrong."""
    names = list(load.keys or list(row)[:_NAMED_COLUMNS])
    if wrong in row and wrong not in names:
        names.append(wrong)
    return ", ".join(f"{name}={_shortened(row.get(name))}" for name in names)


def _shortened(value: object) -> str:
    text = "null" if value is None else _text(value)
    return text if len(text) <= _NAMED_LETTERS else f"{text[:_NAMED_LETTERS]}…"


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes | bytearray | memoryview) else str(value)
