"""The table for rows that a target rejects, and how they are stored and named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b

import pyarrow as pa

from weft.errors import DeclarationError, LoadRefusedError, WeftError
from weft.systems import payloads
from weft.systems.load import Load, QuarantinedRows, RowsOf
from weft.systems.sql.driver import Session
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
ROWS_OF = "_weft_rows_of"
"""The column that says which columns the row has; null where an older version put it aside."""
_FIELDS = pa.schema(
    [
        pa.field("_weft_quarantined_at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("_weft_error", pa.string(), nullable=False),
        pa.field("_weft_pipeline", pa.string(), nullable=False),
        pa.field("_weft_checkpoint_id", pa.string(), nullable=False),
        pa.field("_weft_batch_id", pa.int64(), nullable=False),
        pa.field("payload", pa.string(), nullable=False),
        pa.field(ROWS_OF, pa.string()),
    ]
)
NOWHERE = -1
"""The number of a row that is not staged."""


def table_name(load: Load) -> str:
    """Return the name of the table for rejected rows."""
    return name_for(load.replaces or load.table)


def name_for(table: str) -> str:
    """Return the name of the table for the rows that a table rejects."""
    return f"{table}__quarantine"


def prepare(tables: SqlTables, load: Load) -> None:
    """Create the table for rejected rows."""
    if len(table_name(load).encode()) > _NAME_BYTES:
        raise DeclarationError(
            f"{table_name(load)!r} is longer than {_NAME_BYTES} bytes, so {load.name} cannot have a quarantine.",
            hint="Give the table a shorter name, or let a load with bad rows fail.",
        )
    table = tables.table(load.schema, table_name(load))
    with tables.driver.session("read") as session:
        columns = tables.columns(session, load.schema, table_name(load))
    if columns is None:
        change = f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(_definitions(tables, _FIELDS))})"
    elif ROWS_OF not in {each.name for each in columns}:
        change = f"ALTER TABLE {table} ADD COLUMN {', '.join(_definitions(tables, [_FIELDS.field(ROWS_OF)]))}"
    else:
        return
    # Where two do it at once, one fails; if both do, the first INSERT raises the reason.
    with suppress(WeftError), tables.driver.session("publish") as session:
        session.run(change)


def _definitions(tables: SqlTables, fields: Iterable[pa.Field]) -> list[str]:
    return [
        f"{tables.quote(field.name)} {tables.sql_type(field)}{'' if field.nullable else ' NOT NULL'}"
        for field in fields
    ]


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
    transaction: LoadTransaction,
    rows: Sequence[tuple[str, dict[str, object]]],
    numbers: Sequence[int] | None = None,
    rows_of: RowsOf = "table",
) -> None:
    """Put rows aside, each with the reason; with `numbers` into the list of those that are put aside in the end."""
    _insert(transaction, [(reason, payload(row)) for reason, row in rows], numbers, rows_of)


def _insert(
    transaction: LoadTransaction,
    rows: Sequence[tuple[str, str]],
    numbers: Sequence[int] | None,
    rows_of: RowsOf | None,
) -> None:
    tables, load = transaction.tables, transaction.load
    into, fields = _quarantine(transaction), _FIELDS.names
    if numbers is not None:
        into, fields = tables.temporary(LISTED), [*fields, ROW]
    marks, values, size = list[str](), list[object](), 0
    for at, (reason, text) in enumerate(rows):
        marks.append(f"({tables.moment(load.moment)}, ?, ?, ?, ?, ?, ?{'' if numbers is None else f', {numbers[at]}'})")
        # A text with NUL is what PostgreSQL refuses; in the payload it is an escape.
        values += (reason.replace("\0", "\\0"), load.pipeline, load.checkpoint_id, load.batch_id, text, rows_of)
        size += len(text)
        if len(marks) == STORED_ROWS or size > _STORED_LETTERS or at == len(rows) - 1:
            listed = ", ".join(marks)
            transaction.session.run(f"INSERT INTO {into} ({tables.listed(fields)}) VALUES {listed}", values)
            marks, values, size = [], [], 0


def remove_earlier(transaction: LoadTransaction) -> None:
    """Remove what earlier loads of the pipeline put aside and this one has put aside again. Equal rows of loads that
    append are different rows."""
    tables, load = transaction.tables, transaction.load
    if load.mode == "append":
        return
    place = _quarantine(transaction)
    pipeline, checkpoint, row = map(tables.quote, ("_weft_pipeline", "_weft_checkpoint_id", "payload"))
    # A table of its own: MySQL cannot read the one that it deletes from.
    again = f"SELECT {row} FROM (SELECT {row} FROM {place} WHERE {pipeline} = ? AND {checkpoint} = ?) AS q"
    transaction.session.run(
        f"DELETE FROM {place} WHERE {pipeline} = ? AND {checkpoint} <> ? AND {row} IN ({again})",
        (load.pipeline, load.checkpoint_id) * 2,
    )


def _quarantine(transaction: LoadTransaction) -> str:
    return transaction.tables.table(transaction.load.schema, table_name(transaction.load))


# ------------------------------------------------------------------------------------------ taking rows out of it again


def group_of(error: str) -> str:
    """Return the id of the rows whose errors have the same first line."""
    return blake2b(error.partition("\n")[0].encode(), digest_size=16).hexdigest()


def sets(tables: SqlTables, schema: str | None, table: str, pipeline: str) -> list[tuple[QuarantinedRows, str]]:
    """Return what the quarantine of a table has of a pipeline, the oldest first: the rows of one load with one error,
    and that error."""
    at, error, of, checkpoint, batch = map(tables.quote, _FIELDS.names[:5])
    with tables.driver.session("read") as session:
        columns = tables.columns(session, schema, name_for(table))
        if columns is None:
            return []
        kind = tables.quote(ROWS_OF) if ROWS_OF in {each.name for each in columns} else "NULL"
        rows = session.rows(
            f"SELECT {checkpoint}, {batch}, {kind}, {error}, count(*) FROM {tables.table(schema, name_for(table))} "
            f"WHERE {of} = ? GROUP BY {checkpoint}, {batch}, {kind}, {error} ORDER BY min({at}), {checkpoint}",
            (pipeline,),
        )
    return [(QuarantinedRows(row[0], int(row[1]), row[2], (row[3],), int(row[4])), str(row[3])) for row in rows]


def read(tables: SqlTables, load: Load, chosen: QuarantinedRows) -> list[tuple[str, str]]:
    """Return the errors and payloads of a set."""
    stored: list[tuple[str, str]] = []
    error = tables.quote("_weft_error")
    with tables.driver.session("read") as session:
        for condition, values in _conditions(tables, load, chosen):
            place = tables.table(load.schema, table_name(load))
            stored += session.rows(f"SELECT {error}, payload FROM {place} WHERE {condition}", values)
    return stored


def take(transaction: LoadTransaction, chosen: QuarantinedRows) -> None:
    """Remove a set from the quarantine, but for what stays in it. Raises where it is not what it was."""
    removed = remove(transaction.tables, transaction.session, transaction.load, chosen)
    if removed != chosen.count:
        raise LoadRefusedError(
            f"Rows of {table_name(transaction.load)} were replayed or removed by another meanwhile; nothing was done.",
            hint="Try again.",
        )
    _insert(transaction, chosen.returned, None, chosen.rows_of)


def remove(tables: SqlTables, session: Session, load: Load, chosen: QuarantinedRows) -> int:
    """Remove a set from the quarantine; return how many rows it had."""
    place = tables.table(load.schema, table_name(load))
    return sum(
        int(session.run(f"DELETE FROM {place} WHERE {condition}", values).rowcount)
        for condition, values in _conditions(tables, load, chosen)
    )


def _conditions(tables: SqlTables, load: Load, chosen: QuarantinedRows) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield the conditions that the rows of a set meet, each one of them."""
    _, error, pipeline, checkpoint, batch = map(tables.quote, _FIELDS.names[:5])
    condition = f"{pipeline} = ? AND {checkpoint} = ? AND {batch} = ?"
    values: tuple[object, ...] = (load.pipeline, chosen.checkpoint_id, chosen.batch_id)
    if chosen.rows_of is not None:
        condition += f" AND {tables.quote(ROWS_OF)} = ?"
        values = (*values, chosen.rows_of)
    for first in range(0, len(chosen.errors), STORED_ROWS):
        some = chosen.errors[first : first + STORED_ROWS]
        yield f"{condition} AND {error} IN ({', '.join('?' * len(some))})", (*values, *some)


def payload(row: dict[str, object]) -> str:
    """Return a row that is put aside as JSON."""
    return payloads.dumps(row, _text)


def keyless(load: Load) -> str:
    """Return the reason for which a row without a key is put aside."""
    return f"The row has no key ({', '.join(load.keys)} is null)."


def timeless(load: Load) -> str:
    """Return the reason for which a row without an event time is put aside."""
    return f"The row has no event time ({load.event_timestamp_column} is null)."


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
