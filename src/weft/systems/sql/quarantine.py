"""Rows that a target rejects: found by halving, and named or put aside alone, while the other rows are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import pyarrow as pa

from weft.errors import DeclarationError, LoadRefusedError, SchemaError, WeftError
from weft.systems.load import Counts, Load
from weft.systems.sql.merge import ComparedMove
from weft.systems.sql.move import LoadTransaction, Move
from weft.systems.sql.tables import ROW, SqlTables

NUMBERED, _ASIDE = "_weft_numbered", "_weft_aside"
_PIECE, _STAGED = "weft_piece", "weft_staged"
# How many rejected rows an error names, how many columns of a row without keys, and how much of a value.
_NAMED_ROWS, _NAMED_COLUMNS, _NAMED_LETTERS = 5, 3, 60
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
_NUMBER = pa.field(ROW, pa.int64(), nullable=False)
NOWHERE = -1
"""The number of a row that is not staged."""


def table_name(load: Load) -> str:
    """Return the name of the table for rejected rows."""
    return f"{load.table}__quarantine"


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


def numbered(tables: SqlTables, select: str) -> str:
    """Return a query for the same rows, each with a number, from 1."""
    return f"SELECT q.*, row_number() OVER () AS {tables.quote(ROW)} FROM ({select}) AS q"


def with_number(tables: SqlTables, keys: dict[str, str]) -> dict[str, str]:
    """Return the types of keys in a staging table whose rows have a number too."""
    return {**keys, ROW: tables.sql_type(_NUMBER)}


def keep(transaction: LoadTransaction) -> None:
    """Let what is staged outlive a transaction that is undone, where that undoes all of it. Nothing else is open."""
    tables, connection = transaction.tables, transaction.session.driver
    if not tables.savepoints:
        tables.driver.commit(connection, "publish")
        tables.driver.begin(connection, "publish")


def mark(transaction: LoadTransaction) -> None:
    """Set the savepoint to which `undo` returns, once everything is staged."""
    if transaction.tables.savepoints:
        transaction.session.run(f"SAVEPOINT {_STAGED}")


def undo(transaction: LoadTransaction, savepoint: str = _STAGED) -> None:
    """Undo what was done since `mark`, or where there are no savepoints since `keep`."""
    tables, session = transaction.tables, transaction.session
    if tables.savepoints:
        session.run(f"ROLLBACK TO SAVEPOINT {savepoint}")
        return
    tables.driver.rollback(session.driver)
    tables.driver.begin(session.driver, "publish")


class EnoughError(Exception):
    """The search for rejected rows ended early."""


class BadRows:
    """Moves rows piece by piece, halves each piece that is rejected until only the bad rows are left, and puts those
    into the quarantine.

    With savepoints, a piece that is accepted stays. Without them, `find` tries pieces in transactions that are rolled
    back, and `run` then moves all that were accepted at once. What is staged must have been kept before.

    `is_trial`: only count them, because there may be no quarantine yet.
    """

    def __init__(self, transaction: LoadTransaction, *, is_trial: bool = False) -> None:
        self.transaction = transaction
        self.tables, self.session, self.load = transaction.tables, transaction.session, transaction.load
        self.count = 0
        self.unstaged = 0
        """Those of them that not even the staging table accepted."""
        self._numbered = 0
        self._is_trial = is_trial
        self._is_rejected = False
        if not self.tables.savepoints:
            definitions = ", ".join(_definitions(self.tables, [*_FIELDS, _NUMBER]))
            self.tables.create_temporary(self.session, _ASIDE, definitions)
            keep(transaction)

    # ------------------------------------------------------------------------------------------------------------ stage

    def stage(
        self, name: str, definitions: list[str], schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> tuple[int, int]:
        """Fill a staging table with numbered rows; return how many, and how many bytes."""
        tables = self.tables
        kind = tables.sql_type(_NUMBER)
        index = tables.stage_index({ROW: kind})
        tables.create_temporary(self.session, name, ", ".join([*definitions, f"{tables.quote(ROW)} {kind}", *index]))
        keep(self.transaction)
        table, numbered = tables.temporary(name), schema.append(_NUMBER)
        last = rows = sent = 0
        for batch in batches:
            if batch.num_rows:
                numbers = pa.array(range(last, last + batch.num_rows), pa.int64())
                last += batch.num_rows
                part = pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=numbered)
                copied, size = self.copy(table, numbered, part)
                rows, sent = rows + copied, sent + size
        self._numbered, self.unstaged = last, self.count
        self._refuse_deletes()
        return rows, sent

    def project(
        self, raw: str, stage: str, projection: str, names: Sequence[str], rows: int, keys: dict[str, str]
    ) -> int:
        """Fill a staging table with the projection of numbered rows; return how many. Rows that have none are bad."""
        tables, session = self.tables, self.session
        number = f"q.{tables.quote(ROW)}"
        select = f"SELECT {projection}, {number} FROM {tables.temporary(raw)} AS q"
        if not self._try(lambda: tables.create_temporary_as(session, stage, select, keys=keys)):
            tables.create_temporary_as(session, stage, f"{select} WHERE 1 = 0", keys=keys)
            keep(self.transaction)

            def fill(first: int, end: int) -> bool:
                into = f"INSERT INTO {tables.temporary(stage)} {select} WHERE {number} >= {first} AND {number} < {end}"
                return self._try_and_keep(lambda: session.run(into))

            def aside(row: int) -> None:
                self.unstaged += 1
                self._put_row_aside(raw, names, row)

            self._halve(0, self._end(rows), fill, aside)
        keep(self.transaction)
        self._refuse_deletes()
        return int(session.value(f"SELECT count(*) FROM {tables.temporary(stage)}"))

    def _refuse_deletes(self) -> None:
        if self.unstaged and self.load.handle_deletes:
            raise LoadRefusedError(
                f"{self.unstaged:,} source rows of {self.load.name} have values that the database cannot even stage, "
                "so it is unknown which of the table's rows the source no longer has.",
                hint="Filter them out in the source, or load without handle_deletes.",
            )

    def copy(self, table: str, schema: pa.Schema, batch: pa.RecordBatch) -> tuple[int, int]:
        """Copy what a table accepts of a batch; return how many rows, and how many bytes."""
        rows = sent = 0

        def copy(first: int, end: int) -> bool:
            nonlocal rows, sent
            part = batch.slice(first, end - first)
            if not self._try_and_keep(lambda: self.tables.copy_in(self.session, table, schema, [part])):
                return False
            rows, sent = rows + part.num_rows, sent + part.nbytes
            return True

        def aside(number: int) -> None:
            (row,) = batch.slice(number, 1).to_pylist()
            row.pop(ROW, None)
            self._quarantine(row, NOWHERE)

        self._halve(0, batch.num_rows, copy, aside)
        return rows, sent

    def _halve(
        self,
        first: int,
        end: int,
        attempt: Callable[[int, int], bool],
        aside: Callable[[int], None],
        *,
        is_bad: bool = False,
    ) -> None:
        """Try a range of rows, then its halves where it is rejected, until the rows alone are left that are bad.

        `is_bad`: the range is known to be rejected. One row is always tried: it may have been its neighbour's fault.
        """
        is_one = end - first == 1
        if (is_one or not is_bad) and attempt(first, end):
            return
        if is_one:
            aside(first)
            return
        middle, before = (first + end) // 2, self.count
        self._halve(first, middle, attempt, aside)
        # Where the first half is good, the second one is not.
        self._halve(middle, end, attempt, aside, is_bad=self.count == before)

    # ------------------------------------------------------------------------------------------------------------- move

    def run(self, move: Move, rows: int) -> Counts:
        """Move what can be moved; put everything else aside."""
        counts = move.clear()
        if self.tables.savepoints:
            counts += self._pieces(move, rows)
        else:
            move.condition = self._not_aside
            counts += move.apply()
            if not self._is_trial:
                names, aside = self.tables.listed(_FIELDS.names), self.tables.temporary(_ASIDE)
                self.session.run(f"INSERT INTO {_quarantine(self.transaction)} ({names}) SELECT {names} FROM {aside}")
        move.condition = Move.condition
        return counts + move.delete_missing()

    def find(self, move: Move, rows: int) -> None:
        """Try to move the rows, only to see which of them are bad."""
        if self.tables.savepoints:
            move.clear()
            self._pieces(move, rows)
            return
        end = self._end(rows)
        self._pieces(move, rows)
        # Rows that are good alone may contradict each other: the first one that contradicts those before it is bad.
        while self._is_rejected and self._attempt(move, 0, end) is None:
            accepted, rejected = 0, end
            while rejected - accepted > 1:
                middle = (accepted + rejected) // 2
                if self._attempt(move, 0, middle) is None:
                    rejected = middle
                else:
                    accepted = middle
            self._put_row_aside(move.stage, move.names, rejected - 1)

    def _end(self, rows: int) -> int:
        # Numbers begin at 0 or 1, and some may be missing.
        return max(rows, self._numbered) + 1

    def _pieces(self, move: Move, rows: int) -> Counts:
        """Move the rows piece by piece."""
        counts = Counts()

        def attempt(first: int, end: int) -> bool:
            nonlocal counts
            moved = self._attempt(move, first, end)
            counts += moved or Counts()
            return moved is not None

        self.tables.index_rows(self.session, move.stage)
        if isinstance(move, ComparedMove) and move.can_compare:
            self._compare(move, rows)
        self._halve(0, self._end(rows), attempt, lambda row: self._put_row_aside(move.stage, move.names, row))
        return counts

    def _compare(self, move: ComparedMove, rows: int) -> None:
        """Compare all rows at once; those that the target's types cannot hold are bad."""
        end = self._end(rows)

        def compare(first: int, end: int) -> bool:
            move.condition = self._between(first, end)
            return self._try_and_keep(move.compare_more)

        move.condition = self._between(0, end)
        if not self._try_and_keep(move.compare):
            move.condition = self._between(0, 0)
            move.compare()
            keep(self.transaction)
            self._halve(0, end, compare, lambda row: self._put_row_aside(move.stage, move.names, row), is_bad=True)
        move.compared_all()
        keep(self.transaction)

    def _between(self, first: int, end: int) -> str:
        row = self.tables.quote(ROW)
        return f"{row} >= {first} AND {row} < {end}"

    def _attempt(self, move: Move, first: int, end: int) -> Counts | None:
        """Move the rows of a range; `None` where that was rejected."""
        tables = self.tables
        move.condition = self._between(first, end)
        counts = Counts()

        def apply() -> None:
            nonlocal counts
            if not tables.savepoints:
                move.condition += f" AND {self._not_aside}"
                move.clear()
            counts = move.apply()

        if not self._try(apply):
            return None
        if not tables.savepoints:
            undo(self.transaction)
        return counts

    def _try_and_keep(self, attempt: Callable[[], object]) -> bool:
        if not self._try(attempt):
            return False
        keep(self.transaction)
        return True

    def _try(self, attempt: Callable[[], object]) -> bool:
        """Do it and return `True`, or undo it where the database refused a row, and remember the reason."""
        tables, session = self.tables, self.session
        if tables.savepoints:
            session.run(f"SAVEPOINT {_PIECE}")
        try:
            attempt()
        except Exception as error:
            if not isinstance(error, SchemaError) and not tables.is_rejection(error):
                raise
            undo(self.transaction, _PIECE)
            self._error, self._is_rejected = error, True
            return False
        if tables.savepoints:
            session.run(f"RELEASE SAVEPOINT {_PIECE}")
        return True

    # ------------------------------------------------------------------------------------------------------------ aside

    @property
    def _not_aside(self) -> str:
        row = self.tables.quote(ROW)
        return f"{row} NOT IN (SELECT {row} FROM {self.tables.temporary(_ASIDE)})"

    def _put_row_aside(self, table: str, names: Sequence[str], number: int) -> None:
        row = self.session.row(
            f"SELECT {self.tables.listed(names)} FROM {self.tables.temporary(table)} "
            f"WHERE {self.tables.quote(ROW)} = {number}"
        )
        self._quarantine(dict(zip(names, row or (), strict=False)), number)

    def _quarantine(self, row: dict[str, object], number: int) -> None:
        """Count a row that was rejected last, and store it with the reason."""
        self.count += 1
        if not self.tables.savepoints:
            insert(self.transaction, self._reason.what, row, number)
            keep(self.transaction)
        elif not self._is_trial:
            insert(self.transaction, self._reason.what, row)

    @property
    def _reason(self) -> WeftError:
        return self._error if isinstance(self._error, WeftError) else self.tables.driver.explain(self._error)


class RejectedRows(BadRows):
    """Searches for bad rows to name some of them in an error, and puts none aside."""

    def __init__(self, transaction: LoadTransaction) -> None:
        super().__init__(transaction, is_trial=True)
        self._named: list[str] = []
        self._are_duplicates = False

    def refusal(self, search: Callable[[], object]) -> LoadRefusedError | None:
        """The error that names the rows which this search finds, or `None` where it finds none."""
        stopped = False
        try:
            search()
        except EnoughError:
            stopped = True
        if not self._named:
            return None
        rows = f"{'at least ' if stopped else ''}{self.count} row{'s' if self.count > 1 else ''}"
        lines = "".join(f"\n    {line}" for line in self._named)
        aside = f'on_bad_rows="quarantine" puts such rows aside into {table_name(self.load)} and loads the others.'
        return LoadRefusedError(
            f"The table {self.load.name} rejected {rows}, and nothing was written:{lines}",
            can_quarantine=True,
            hint=f"{repeated_hint(self.load)} {aside}" if self._are_duplicates else aside,
        )

    def unprojected(self, stage: str, select: str, projection: str, names: Sequence[str]) -> LoadRefusedError | None:
        """The error that names the rows of a query of which the columns of the target cannot be computed."""
        tables, session = self.tables, self.session
        rows = tables.create_temporary_as(session, NUMBERED, numbered(tables, select))
        return self.refusal(lambda: self.project(NUMBERED, stage, projection, names, rows, {}))

    def _refuse_deletes(self) -> None:
        """The load has failed already."""

    def _quarantine(self, row: dict[str, object], number: int) -> None:
        super()._quarantine(row, number)
        reason = self._reason
        self._are_duplicates |= self.tables.is_duplicate(self._error)
        self._named.append(f"{name_of(row, self.load, getattr(reason, 'field', None))}: {reason.what}")
        if len(self._named) == _NAMED_ROWS:
            raise EnoughError


def repeated_hint(load: Load) -> str:
    """What to do about rows whose key is there already."""
    merge = 'mode="merge" updates the rows whose key is there.'
    if load.mode != "append" or load.watermark is not None:
        return merge
    return f'mode="append" inserts all rows of its query: incremental_column of a pipeline reads only new ones, {merge}'


def insert(transaction: LoadTransaction, reason: str, row: dict[str, object], number: int | None = None) -> None:
    """Put a row aside; with a `number` into the list of those that are put aside in the end."""
    tables, load = transaction.tables, transaction.load
    if number is None:
        into, fields, last = _quarantine(transaction), _FIELDS.names, ""
    else:
        into, fields, last = tables.temporary(_ASIDE), [*_FIELDS.names, ROW], f", {number}"
    transaction.session.run(
        f"INSERT INTO {into} ({tables.listed(fields)}) VALUES ({tables.moment(load.moment)}, ?, ?, ?, ?, ?{last})",
        (
            # A text with NUL is what PostgreSQL refuses; in the payload it is an escape.
            reason.replace("\0", "\\0"),
            load.pipeline,
            load.checkpoint_id,
            load.batch_id,
            payload(row),
        ),
    )


def _quarantine(transaction: LoadTransaction) -> str:
    return transaction.tables.table(transaction.load.schema, table_name(transaction.load))


def payload(row: dict[str, object]) -> str:
    """Return a row that is put aside as JSON."""
    return json.dumps(row, ensure_ascii=False, default=_text)


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
