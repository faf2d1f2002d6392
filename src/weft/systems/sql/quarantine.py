"""Rows that a target rejects: found by halving, and named or put aside alone, while their neighbours go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import pyarrow as pa

from weft.errors import DeclarationError, LoadRefusedError, SchemaError, WeftError
from weft.systems.load import Counts, Load
from weft.systems.sql.driver import Session
from weft.systems.sql.move import Move
from weft.systems.sql.tables import ROW, SqlTables

NUMBERED, _ASIDE = "_weft_numbered", "_weft_aside"
_PIECE, _STAGED = "weft_piece", "weft_staged"
# How many rejected rows an error names, how many columns of a row without keys, and how much of a value.
_NAMED_ROWS, _NAMED_COLUMNS, _NAMED_LETTERS = 5, 3, 60
# PostgreSQL cuts longer names without a word.
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
    """Where the rejected rows of a table go."""
    return f"{load.table}__quarantine"


def prepare(tables: SqlTables, load: Load) -> None:
    """Make the table for rejected rows."""
    if len(table_name(load).encode()) > _NAME_BYTES:
        raise DeclarationError(
            f"{table_name(load)!r} is longer than {_NAME_BYTES} bytes, so {load.name} cannot have a quarantine.",
            hint="Give the table a shorter name, or let a load with bad rows fail.",
        )
    with tables.driver.session("read") as session:
        if tables.columns(session, load.schema, table_name(load)) is not None:
            return
    with suppress(WeftError), tables.driver.session("publish") as session:
        # Where two do it at once, one fails, and the first INSERT would say so.
        session.run(
            f"CREATE TABLE IF NOT EXISTS {tables.table(load.schema, table_name(load))} "
            f"({', '.join(_definitions(tables, _FIELDS))})"
        )


def _definitions(tables: SqlTables, fields: Iterable[pa.Field]) -> list[str]:
    return [f"{tables.quote(field.name)} {tables.sql_type(field)} NOT NULL" for field in fields]


def numbered(tables: SqlTables, select: str) -> str:
    """The rows of a query, each with a number, from 1."""
    return f"SELECT q.*, row_number() OVER () AS {tables.quote(ROW)} FROM ({select}) AS q"


def with_number(tables: SqlTables, keys: dict[str, str]) -> dict[str, str]:
    """The types of keys in a staging table whose rows have a number too."""
    return {**keys, ROW: tables.sql_type(_NUMBER)}


def keep(tables: SqlTables, session: Session) -> None:
    """Let what is staged outlive a transaction that is undone, where that undoes all of it. Nothing else is open."""
    if not tables.savepoints:
        tables.driver.commit(session.driver, "publish")
        tables.driver.begin(session.driver, "publish")


def mark(tables: SqlTables, session: Session) -> None:
    """Everything is staged: `undo` comes back to here."""
    if tables.savepoints:
        session.run(f"SAVEPOINT {_STAGED}")


def undo(tables: SqlTables, session: Session) -> None:
    """Undo what was done since `mark`, or where there are no savepoints since `keep`."""
    if tables.savepoints:
        session.run(f"ROLLBACK TO SAVEPOINT {_STAGED}")
        return
    tables.driver.rollback(session.driver)
    tables.driver.begin(session.driver, "publish")


class EnoughError(Exception):
    """The search for rejected rows ended early."""


class BadRows:
    """Moves rows piece by piece, halving each piece that is rejected until the rows alone are left that are bad.

    With savepoints, a piece that is accepted stays. Without them, `find` tries pieces in transactions that are rolled
    back, and `run` then moves all that were accepted at once. What is staged must have been kept before.

    `only_name`: remember some rows for an error, and put none aside. `is_trial`: only count them, because there may be
    no place to put them yet.
    """

    def __init__(
        self, tables: SqlTables, session: Session, load: Load, *, only_name: bool = False, is_trial: bool = False
    ) -> None:
        self.tables, self.session, self.load = tables, session, load
        self.count = 0
        self.unstaged = 0
        """Those of them that not even the staging table took."""
        self._given = 0
        self._only_name, self._is_trial = only_name, is_trial
        self._named: list[str] = []
        self._is_rejected = False
        if not tables.savepoints:
            tables.drop_temporary(session, _ASIDE)
            tables.create_temporary(session, _ASIDE, ", ".join(_definitions(tables, [*_FIELDS, _NUMBER])))
            keep(tables, session)

    # ------------------------------------------------------------------------------------------------------------ stage

    def stage(
        self, name: str, definitions: list[str], schema: pa.Schema, batches: Iterable[pa.RecordBatch]
    ) -> tuple[int, int]:
        """Fill a staging table with numbered rows; how many, and how many bytes."""
        tables = self.tables
        kind = tables.sql_type(_NUMBER)
        index = tables.stage_index({ROW: kind})
        tables.create_temporary(self.session, name, ", ".join([*definitions, f"{tables.quote(ROW)} {kind}", *index]))
        keep(tables, self.session)
        table, numbered = tables.temporary(name), schema.append(_NUMBER)
        given = rows = sent = 0
        for batch in batches:
            if batch.num_rows:
                numbers = pa.array(range(given, given + batch.num_rows), pa.int64())
                given += batch.num_rows
                taken = self.copy(
                    table, numbered, pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=numbered)
                )
                rows += taken[0]
                sent += taken[1]
        self._given, self.unstaged = given, self.count
        self._refuse_deletes()
        return rows, sent

    def project(self, raw: str, stage: str, made: str, names: Sequence[str], rows: int, keys: dict[str, str]) -> int:
        """Fill a staging table with what is made of numbered rows; how many. Rows without are bad."""
        tables, session = self.tables, self.session
        number = f"q.{tables.quote(ROW)}"
        select = f"SELECT {made}, {number} FROM {tables.temporary(raw)} AS q"
        if self._try(lambda: tables.create_temporary_as(session, stage, select, keys=keys)) is not None:
            # Not everywhere does it go with the savepoint.
            tables.drop_temporary(session, stage)
            tables.create_temporary_as(session, stage, f"{select} WHERE 1 = 0", keys=keys)
            keep(tables, session)

            def fill(first: int, end: int) -> bool:
                into = f"INSERT INTO {tables.temporary(stage)} {select} WHERE {number} >= {first} AND {number} < {end}"
                return self._try_and_keep(lambda: session.run(into))

            def aside(row: int) -> None:
                self.unstaged += 1
                self._put_row_aside(raw, names, row)

            self._halve(0, self._end(rows), fill, aside)
        keep(tables, session)
        self._refuse_deletes()
        found = session.row(f"SELECT count(*) FROM {tables.temporary(stage)}")
        assert found is not None
        return int(found[0])

    def _refuse_deletes(self) -> None:
        if self.unstaged and self.load.handle_deletes and not self._only_name:
            raise LoadRefusedError(
                f"{self.unstaged:,} source rows of {self.load.name} have values that the database cannot even stage: "
                "nobody can tell which of its rows the source no longer has.",
                hint="Filter them out in the source, or load without handle_deletes.",
            )

    def copy(self, table: str, schema: pa.Schema, batch: pa.RecordBatch) -> tuple[int, int]:
        """Copy what a table takes of a batch; how many rows, and how many bytes."""
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
            self._put_aside(self._error, row, NOWHERE)

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
        """Move what can be moved; everything else is put aside."""
        counts = move.clear()
        if self.tables.savepoints:
            counts += self._pieces(move, rows)
        else:
            move.condition = self._not_aside
            counts += move.apply()
            if not self._is_trial:
                names = self._listed(_FIELDS)
                self.session.run(
                    f"INSERT INTO {self._quarantine} ({names}) SELECT {names} FROM {self.tables.temporary(_ASIDE)}"
                )
        move.condition = "1 = 1"
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
        return LoadRefusedError(
            f"The table {self.load.name} rejected {rows}, and nothing was written:{lines}",
            can_quarantine=True,
            hint=f'on_bad_rows="quarantine" puts such rows aside into {table_name(self.load)} and loads the others.',
        )

    def unmade(self, stage: str, select: str, made: str, names: Sequence[str]) -> LoadRefusedError | None:
        """The error that names the rows of a query of which the columns of the target cannot be made."""
        tables, session = self.tables, self.session
        for name in (NUMBERED, stage):
            tables.drop_temporary(session, name)
        rows = tables.create_temporary_as(session, NUMBERED, numbered(tables, select))
        return self.refusal(lambda: self.project(NUMBERED, stage, made, names, rows, {}))

    def _end(self, rows: int) -> int:
        # Numbers begin at 0 or 1, and some may be missing.
        return max(rows, self._given) + 1

    def _pieces(self, move: Move, rows: int) -> Counts:
        """Move the rows piece by piece."""
        counts = Counts()

        def attempt(first: int, end: int) -> bool:
            nonlocal counts
            moved = self._attempt(move, first, end)
            counts += moved or Counts()
            return moved is not None

        self.tables.index_rows(self.session, move.stage)
        if move.can_compare:
            self._compare(move, rows)
        self._halve(0, self._end(rows), attempt, lambda row: self._put_row_aside(move.stage, move.names, row))
        return counts

    def _compare(self, move: Move, rows: int) -> None:
        """Compare all rows at once; those that the target's types do not take are bad."""
        end = self._end(rows)

        def compare(first: int, end: int) -> bool:
            move.condition = self._between(first, end)
            return self._try_and_keep(move.compare_more)

        move.condition = self._between(0, end)
        if not self._try_and_keep(move.compare):
            move.condition = self._between(0, 0)
            move.compare()
            keep(self.tables, self.session)
            self._halve(0, end, compare, lambda row: self._put_row_aside(move.stage, move.names, row), is_bad=True)
        move.compared_all()
        keep(self.tables, self.session)

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
            counts = move.apply()

        def alone() -> None:
            move.condition += f" AND {self._not_aside}"
            move.clear()
            apply()

        if self._try(apply if tables.savepoints else alone) is not None:
            for name in move.of_a_piece:
                tables.drop_temporary(self.session, name)
            return None
        if not tables.savepoints:
            undo(tables, self.session)
        return counts

    def _try_and_keep(self, attempt: Callable[[], object]) -> bool:
        if self._try(attempt) is not None:
            return False
        keep(self.tables, self.session)
        return True

    def _try(self, attempt: Callable[[], object]) -> Exception | None:
        """Do it, or undo it and give the reason where the database refused a row."""
        tables, session = self.tables, self.session
        if tables.savepoints:
            session.run(f"SAVEPOINT {_PIECE}")
        try:
            attempt()
        except Exception as error:
            if not isinstance(error, SchemaError) and not tables.is_rejection(error):
                raise
            if tables.savepoints:
                session.run(f"ROLLBACK TO SAVEPOINT {_PIECE}")
            else:
                undo(tables, session)
            self._error, self._is_rejected = error, True
            return error
        if tables.savepoints:
            session.run(f"RELEASE SAVEPOINT {_PIECE}")
        return None

    # ------------------------------------------------------------------------------------------------------------ aside

    @property
    def _quarantine(self) -> str:
        return self.tables.table(self.load.schema, table_name(self.load))

    @property
    def _not_aside(self) -> str:
        row = self.tables.quote(ROW)
        return f"{row} NOT IN (SELECT {row} FROM {self.tables.temporary(_ASIDE)})"

    def _listed(self, fields: Iterable[pa.Field]) -> str:
        return ", ".join(self.tables.quote(field.name) for field in fields)

    def _put_row_aside(self, table: str, names: Sequence[str], number: int) -> None:
        error = self._error
        listed = ", ".join(self.tables.quote(name) for name in names)
        found = self.session.row(
            f"SELECT {listed} FROM {self.tables.temporary(table)} WHERE {self.tables.quote(ROW)} = {number}"
        )
        self._put_aside(error, dict(zip(names, found or (), strict=False)), number)

    def _put_aside(self, error: Exception, row: dict[str, object], number: int) -> None:
        tables, load = self.tables, self.load
        said = error if isinstance(error, WeftError) else tables.driver.explain(error)
        self.count += 1
        if self._only_name:
            self._named.append(f"{name_of(row, load, getattr(said, 'field', None))}: {said.what}")
            if len(self._named) == _NAMED_ROWS:
                raise EnoughError
            if tables.savepoints:
                return
        if self._is_trial and tables.savepoints:
            return
        number_aside = None if tables.savepoints else number
        insert(tables, self.session, load, said.what, row, number_aside)
        keep(tables, self.session)


def insert(
    tables: SqlTables, session: Session, load: Load, reason: str, row: dict[str, object], number: int | None = None
) -> None:
    """Put a row aside; with a `number` into the list of those that are put aside in the end."""
    into, fields = tables.table(load.schema, table_name(load)), list(_FIELDS)
    if number is not None:
        into, fields = tables.temporary(_ASIDE), [*fields, _NUMBER]
    names = ", ".join(tables.quote(field.name) for field in fields)
    last = "" if number is None else f", {number}"
    session.run(
        f"INSERT INTO {into} ({names}) VALUES ({tables.moment(load.moment)}, ?, ?, ?, ?, ?{last})",
        (
            # A text with NUL is what PostgreSQL refuses; in the payload it is an escape.
            reason.replace("\0", "\\0"),
            load.pipeline,
            load.checkpoint_id,
            load.batch_id,
            payload(row),
        ),
    )


def payload(row: dict[str, object]) -> str:
    """A row that is put aside, as JSON."""
    return json.dumps(row, ensure_ascii=False, default=_text)


def keyless(load: Load) -> str:
    """Why a row without a key is put aside."""
    return f"The row has no key ({', '.join(load.keys)} is null)."


def name_of(row: dict[str, object], load: Load, wrong: str | None = None) -> str:
    """A row by its keys, or by its first columns, and by the one that is wrong."""
    names = list(load.keys or list(row)[:_NAMED_COLUMNS])
    if wrong in row and wrong not in names:
        names.append(wrong)
    return ", ".join(f"{name}={_shortened(row.get(name))}" for name in names)


def _shortened(value: object) -> str:
    text = "null" if value is None else _text(value)
    return text if len(text) <= _NAMED_LETTERS else f"{text[:_NAMED_LETTERS]}…"


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes | bytearray | memoryview) else str(value)
