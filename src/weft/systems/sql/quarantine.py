"""Rows that a target rejects: found by halving, and put aside alone, while their neighbours go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress

import pyarrow as pa

from weft.errors import DeclarationError, SchemaError, WeftError
from weft.systems.load import Counts, Load
from weft.systems.sql.driver import Session
from weft.systems.sql.merge import Move
from weft.systems.sql.tables import SqlTables

ROW = "_weft_row"
_SAVEPOINT = "weft_piece"
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


def table_name(load: Load) -> str:
    """Where the rejected rows of a table go."""
    return f"{load.table}__quarantine"


def prepare(tables: SqlTables, load: Load) -> None:
    """Make the table for rejected rows."""
    if not tables.savepoints:
        raise DeclarationError(
            f"A {tables.connection.kind} table cannot put bad rows aside: it cannot undo a part of a transaction.",
            hint='Load with on_bad_rows="fail".',
        )
    with tables.driver.session("read") as session:
        if tables.columns(session, load.schema, table_name(load)) is not None:
            return
    definitions = ", ".join(f"{tables.quote(field.name)} {tables.sql_type(field)} NOT NULL" for field in _FIELDS)
    with suppress(WeftError), tables.driver.session("publish") as session:
        # Where two do it at once, one fails, and the first INSERT would say so.
        session.run(f"CREATE TABLE IF NOT EXISTS {tables.table(load.schema, table_name(load))} ({definitions})")


class Quarantine:
    """Moves rows piece by piece, halving each piece that is rejected until the rows alone are left that are bad."""

    def __init__(self, tables: SqlTables, session: Session, load: Load) -> None:
        self.tables, self.session, self.load = tables, session, load
        self.count = 0
        self.unstaged = 0
        """Those of them that not even the staging table took."""
        self._given = 0

    # ------------------------------------------------------------------------------------------------------------ stage

    def stage(
        self, name: str, definitions: list[str], schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> tuple[int, int]:
        """Fill a staging table with numbered rows; how many, and how many bytes."""
        tables = self.tables
        number = pa.field(ROW, pa.int64(), nullable=False)
        tables.create_temporary(
            self.session, name, ", ".join([*definitions, f"{tables.quote(ROW)} {tables.sql_type(number)}"])
        )
        table, numbered = tables.temporary(name), schema.append(number)
        rows = sent = 0

        def copy(batch: pa.RecordBatch) -> None:
            nonlocal rows, sent
            if self._try(lambda: tables.copy_in(self.session, table, numbered, [batch])) is None:
                rows += batch.num_rows
                sent += batch.nbytes
            elif batch.num_rows > 1:
                half = batch.num_rows // 2
                copy(batch.slice(0, half))
                copy(batch.slice(half))
            else:
                self.unstaged += 1
                self._put_aside(self._error, batch.select(schema.names).to_pylist()[0])

        given = 0
        for batch in batches:
            if batch.num_rows:
                numbers = pa.array(range(given, given + batch.num_rows), pa.int64())
                given += batch.num_rows
                copy(pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=numbered))
        self._given = given
        return rows, sent

    # ------------------------------------------------------------------------------------------------------------- move

    def run(self, move: Move, rows: int) -> Counts:
        """Move what can be moved; everything else is put aside."""
        counts = move.clear()
        # Numbers begin at 0 or 1, and some may be missing.
        counts += self._pieces(move, 0, max(rows, self._given) + 1)
        move.condition = "1 = 1"
        return counts + move.delete_missing()

    def _pieces(self, move: Move, first: int, end: int) -> Counts:
        row = self.tables.quote(ROW)
        move.condition = f"{row} >= {first} AND {row} < {end}"
        counts = Counts()

        def apply() -> None:
            nonlocal counts
            counts = move.apply()

        if self._try(apply) is None:
            return counts
        for name in Move.OF_A_PIECE:
            self.tables.drop_temporary(self.session, name)
        if end - first > 1:
            middle = (first + end) // 2
            return self._pieces(move, first, middle) + self._pieces(move, middle, end)
        error = self._error
        names = ", ".join(self.tables.quote(name) for name in move.names)
        found = self.session.row(f"SELECT {names} FROM {self.tables.temporary(move.stage)} WHERE {row} = {first}")
        self._put_aside(error, dict(zip(move.names, found or (), strict=False)))
        return Counts()

    def _try(self, attempt: Callable[[], object]) -> Exception | None:
        """Do it, or undo it and give the reason where the database refused a row."""
        self.session.run(f"SAVEPOINT {_SAVEPOINT}")
        try:
            attempt()
        except Exception as error:
            if not isinstance(error, SchemaError) and not self.tables.is_rejection(error):
                raise
            self.session.run(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            self._error = error
            return error
        self.session.run(f"RELEASE SAVEPOINT {_SAVEPOINT}")
        return None

    def _put_aside(self, error: Exception, row: dict[str, object]) -> None:
        tables, load = self.tables, self.load
        said = error if isinstance(error, WeftError) else tables.driver.explain(error)
        payload = json.dumps(row, ensure_ascii=False, default=_text)
        names = ", ".join(tables.quote(field.name) for field in _FIELDS)
        self.session.run(
            f"INSERT INTO {tables.table(load.schema, table_name(load))} ({names}) "
            f"VALUES ({tables.moment(load.moment)}, ?, ?, ?, ?, ?)",
            # A text with NUL is what PostgreSQL refuses; in the payload it is an escape.
            (said.what.replace("\0", "\\0"), load.pipeline, load.checkpoint_id, load.batch_id, payload),
        )
        self.count += 1


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes | bytearray | memoryview) else str(value)
