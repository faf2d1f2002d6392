"""Rows that a target rejects: found, and named or put aside alone, while the other rows are loaded."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

import pyarrow as pa

from weft.columns import not_utf8, python_rows, why_no_text
from weft.errors import LoadRefusedError, SchemaError, WeftError
from weft.systems.load import Counts, RowsOf
from weft.systems.sql import quarantine
from weft.systems.sql.merge import ComparedMove
from weft.systems.sql.move import LoadTransaction, Move
from weft.systems.sql.tables import ROW, SqlTables, Suspect

NUMBERED = "_weft_numbered"
_PIECE, _STAGED = "weft_piece", "weft_staged"
# How many rows are tried together at least, where some were rejected.
_PIECE_ROWS = 64
# How often the database is asked in vain which rows a constraint rejects: each time it reads all of them.
_MOST_VAIN = 5
_NUMBER = pa.field(ROW, pa.int64(), nullable=False)


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


class Reason(NamedTuple):
    """Why a row was rejected."""

    error: WeftError
    is_duplicate: bool


class BadRows:
    """Moves rows piece by piece, until only those are left that are rejected alone, and puts them into the quarantine.

    Where a piece is rejected, the database says which row the statement read last, or which rows a constraint rejects:
    those before it, it alone and those behind it come next. Where it does not say, the piece is halved.

    With savepoints, a piece that is accepted stays. Without them, `find` tries pieces in transactions that are rolled
    back, and `run` then moves all that were accepted at once. What is staged must have been kept before.

    `is_trial`: only count them, because there may be no quarantine yet.
    """

    most_waiting: ClassVar[int] = quarantine.STORED_ROWS
    """How many bad rows wait to be stored."""

    def __init__(self, transaction: LoadTransaction, *, is_trial: bool = False) -> None:
        self.transaction = transaction
        self.tables, self.session, self.load = transaction.tables, transaction.session, transaction.load
        self.count = 0
        self.unstaged = 0
        """How many of them not even the staging table accepted."""
        self._numbered = 0
        self._rows_of: RowsOf = "table"
        """Which columns the rows have that are tried."""
        self._is_trial = is_trial
        self._is_rejected = False
        self._waiting: list[tuple[int, Reason]] = []
        """Bad rows that are not stored yet, each with the reason."""
        self._mark: str | None = None
        """The condition by which the database notes the rows that a statement reads, while rows are searched."""
        self._is_saved = False
        """Whether a savepoint is open to which the next attempt that is rejected returns."""
        self._move: Move | None = None
        """The move whose rows are searched."""
        self._suspects: list[int] = []
        """The rows that a constraint of its target rejects, in order."""
        self._vain = 0
        """How often the database was asked for them and named none that helped."""
        if not self.tables.savepoints:
            quarantine.create_list(transaction)
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
        self._rows_of = "table" if self.load.projection is None else "source"
        last = rows = sent = 0
        for batch in batches:
            if batch.num_rows:
                numbers = pa.array(range(last, last + batch.num_rows), pa.int64())
                last += batch.num_rows
                part = pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=numbered)
                copied, size = self.copy(table, numbered, part)
                rows, sent = rows + copied, sent + size
        self._numbered, self.unstaged = last, self.count
        self._rows_of = "table"
        self._refuse_deletes()
        return rows, sent

    def project(
        self, raw: str, stage: str, projection: str, names: Sequence[str], rows: int, keys: dict[str, str]
    ) -> int:
        """Fill a staging table with the projection of numbered rows; return how many. Rows that have none are bad."""
        tables, session = self.tables, self.session
        # Rows that have no projection keep their numbers: without this the last ones would be moved nowhere.
        self._numbered = max(self._numbered, rows)
        self._rows_of = "source"
        number = f"q.{tables.quote(ROW)}"
        select = f"SELECT {projection}, {number} FROM {tables.temporary(raw)} AS q"
        if not self._try(lambda: tables.create_temporary_as(session, stage, select, keys=keys)):
            tables.create_temporary_as(session, stage, f"{select} WHERE 1 = 0", keys=keys)
            keep(self.transaction)

            def insert(first: int, end: int) -> None:
                rows = f"{self._between(first, end)} AND {self._mark or '1 = 1'}"
                session.run(f"INSERT INTO {tables.temporary(stage)} {select} WHERE {rows}")

            def fill(first: int, end: int) -> bool:
                return self._try_and_keep(lambda: insert(first, end))

            def aside(row: int) -> None:
                self.unstaged += 1
                self._put_aside(raw, names, row)

            end = self._end(rows)
            if tables.savepoints or not self._weed_unreadable(raw, names, insert, aside) or not fill(0, end):
                tables.index_rows(session, raw)
                self._search_table(raw, names, end, fill, aside)
        self._rows_of = "table"
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
            rejected = batch.slice(number, 1)
            (row,) = python_rows(rejected)
            row.pop(ROW, None)
            self.count += 1
            # Each database has other words for it.
            no_texts = [Reason(SchemaError(why_no_text(name)), False) for name in not_utf8(rejected).values()]
            self._store([(quarantine.NOWHERE, row, next(iter(no_texts), self._reason))])

        if not copy(0, batch.num_rows):
            self._search(0, batch.num_rows, copy, aside, self.tables.copied_rows)
        return rows, sent

    # ----------------------------------------------------------------------------------------------------------- search

    def _search_table(
        self,
        table: str,
        names: Sequence[str],
        end: int,
        attempt: Callable[[int, int], bool],
        aside: Callable[[int], None] | None = None,
    ) -> None:
        """Try pieces of all rows of a staging table, and put the bad ones aside."""
        self._mark = self.tables.mark_rows(self.session, table)
        self._search(0, end, attempt, aside or (lambda row: self._put_aside(table, names, row)))
        self._mark = None
        self._store_waiting(table, names)
        self._release()

    def _search(
        self,
        first: int,
        end: int,
        attempt: Callable[[int, int], bool],
        aside: Callable[[int], None],
        locate: Callable[[BaseException], int | None] | None = None,
    ) -> None:
        """Try pieces of a range of rows that was rejected, until the rows alone are left that are bad.

        `locate` returns how many rows of a piece were good before it was rejected; without it, the marks do."""
        size = _PIECE_ROWS
        while first < end:
            at = bisect_left(self._suspects, first)
            suspect = self._suspects[at] if at < len(self._suspects) else end
            last = min(first + size, end, max(suspect, first + 1))
            if attempt(first, last):
                first, size = last, size * 2
                continue
            if last - first == 1:
                aside(first)
                first = last
                continue
            marked = self._marked(first) if locate is None else locate(self._error)
            # If the last row was read, the database may have read all rows before it refused the first one.
            if marked is None or not 0 <= marked < last - first - 1:
                if not self._find_suspects(first, last):
                    self._halve(first, last, attempt, aside, is_bad=True)
                    first = last
                continue
            bad = first + marked
            if marked and not attempt(first, bad):
                self._search(first, bad, attempt, aside, locate)
            self._halve(bad, bad + 1, attempt, aside)
            first, size = bad + 1, max(4 * marked, _PIECE_ROWS)

    def _find_suspects(self, first: int, last: int) -> bool:
        """Ask which rows the constraints of the target reject; `False` if none of a range."""
        if self._move is None or not self.tables.savepoints or self._vain == _MOST_VAIN:
            return False
        numbers = [suspect.row for suspect in self._ask_suspects(self._move)]
        self._suspects = sorted({*self._suspects, *numbers})
        are_here = any(first <= row < last for row in numbers)
        self._vain += not are_here
        return are_here

    def _ask_suspects(self, move: Move) -> list[Suspect]:
        tables, session = self.tables, self.session
        if tables.savepoints and not self._is_saved:
            session.run(f"SAVEPOINT {_PIECE}")
            self._is_saved = True
        try:
            suspects = tables.suspects(session, self.load, *move.candidates())
        except Exception:
            # Without the right to read another table, for example.
            undo(self.transaction, _PIECE)
            return []
        finally:
            self._release()
        return suspects

    def _weed(self, move: Move, work: Callable[[], object], *, unfit: bool = False) -> bool:
        """Where all attempts are undone, put the suspects aside that are rejected alone, or with a good row that they
        contradict, or for what another one was rejected for; return whether there were any. `unfit`: only those with a
        value that does not fit."""
        if self.tables.savepoints:
            return False
        bad, reasons = set[int](), dict[str, tuple[Reason, str | None]]()

        def is_rejected(*numbers: int) -> bool:
            move.condition = f"{self.tables.quote(ROW)} IN ({', '.join(map(str, numbers))})"
            return not self._try_and_undo(move, work)

        for number, first, is_unfit, broken, shown in self._ask_suspects(move):
            if unfit and not is_unfit:
                continue
            others = () if first is None or first in bad else (first,)
            # In a merge each row is tried: one that updates need not write the value that breaks a rule.
            are_inserted = self.load.mode in ("append", "truncate")
            alike = self._alike(*reasons[broken], shown) if are_inserted and broken in reasons else None
            if alike is not None:
                self._reason = alike
            elif (others and is_rejected(*others)) or not is_rejected(number, *others):
                continue
            elif broken:
                reasons[broken] = self._reason, shown
            bad.add(number)
            self._put_aside(move.stage, move.names, number)
        self._store_waiting(move.stage, move.names)
        return bool(bad)

    def _weed_unreadable(
        self, raw: str, names: Sequence[str], insert: Callable[[int, int], None], aside: Callable[[int], None]
    ) -> bool:
        """Where there are no savepoints, put the rows aside of which columns cannot be computed, if the database knows
        them; return whether there were any."""
        expressions = [each.sql for each in self.load.projection or ()]
        before = self.count
        try:
            numbers = self.tables.unreadable(self.session, self.tables.temporary(raw), expressions)
        except Exception:  # the rows are not known
            numbers = []
            undo(self.transaction)
        for row in numbers:
            if self._try(functools.partial(insert, row, row + 1)):
                undo(self.transaction)
            else:
                aside(row)
        self._store_waiting(raw, names)
        return self.count > before

    def _alike(self, reason: Reason, shown: str | None, value: str | None) -> Reason | None:
        """The reason of a row with another value, where a reason shows its value once."""
        if shown is None and value is None:
            return reason
        what = reason.error.what
        if not shown or value is None or what.count(shown) != 1:
            return None
        return reason._replace(error=SchemaError(what.replace(shown, value)))

    def _marked(self, first: int) -> int | None:
        row = None if self._mark is None else self.tables.marked_row(self.session)
        return None if row is None else row - first

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
                quarantine.insert_listed(self.transaction)
        move.condition, move.mark = Move.condition, Move.mark
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
            self._put_aside(move.stage, move.names, rejected - 1)
            self._store_waiting(move.stage, move.names)

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
        changes = self.load.changes
        # Without savepoints the target still has the rows that a truncate removes: those that come after it would be
        # taken for updates of them, or for nothing new.
        is_emptied = not self.tables.savepoints and changes is not None and bool(changes.truncates)
        if isinstance(move, ComparedMove) and move.can_compare and not is_emptied:
            self._compare(move, rows)
        end = self._end(rows)
        if not attempt(0, end) and not (self._weed(move, lambda: move.apply()) and attempt(0, end)):
            self._move = move
            self._search_table(move.stage, move.names, end, attempt)
            self._move = None
        return counts

    def _compare(self, move: ComparedMove, rows: int) -> None:
        """Compare all rows at once; those that the target's types cannot hold are bad."""
        end = self._end(rows)

        def compare(first: int, end: int) -> bool:
            move.condition, move.mark = self._between(first, end), self._mark or Move.mark
            return self._try_and_keep(move.compare_more)

        def compare_all() -> bool:
            move.condition = self._between(0, end)
            return self._try_and_keep(move.compare)

        if not compare_all() and not (self._weed(move, move.compare, unfit=True) and compare_all()):
            move.condition = self._between(0, 0)
            move.compare()
            keep(self.transaction)
            self._search_table(move.stage, move.names, end, compare)
        move.compared_all()
        keep(self.transaction)

    def _between(self, first: int, end: int) -> str:
        row = self.tables.quote(ROW)
        between = f"{row} >= {first} AND {row} < {end}"
        return between if self.tables.savepoints else f"{between} AND {self._not_aside}"

    def _attempt(self, move: Move, first: int, end: int) -> Counts | None:
        """Move the rows of a range; `None` where that was rejected."""
        tables = self.tables
        move.condition, move.mark = self._between(first, end), self._mark or Move.mark
        counts = Counts()

        def apply() -> None:
            nonlocal counts
            counts = move.apply()

        if not (self._try(apply) if tables.savepoints else self._try_and_undo(move, apply)):
            return None
        return counts

    def _try_and_undo(self, move: Move, work: Callable[[], object]) -> bool:
        def clear_and_work() -> None:
            move.clear()
            work()

        if not self._try(clear_and_work):
            return False
        undo(self.transaction)
        return True

    def _try_and_keep(self, attempt: Callable[[], object]) -> bool:
        if not self._try(attempt):
            return False
        keep(self.transaction)
        return True

    def _try(self, attempt: Callable[[], object]) -> bool:
        """Do it and return `True`, or undo it where the database refused a row, and remember the reason."""
        tables, session = self.tables, self.session
        if tables.savepoints and not self._is_saved:
            session.run(f"SAVEPOINT {_PIECE}")
        try:
            attempt()
            self.transaction.check_deferred()
        except Exception as error:
            if not isinstance(error, SchemaError) and not tables.is_rejection(error):
                raise
            undo(self.transaction, _PIECE)
            self._error, self._is_rejected, self._is_saved = error, True, tables.savepoints
            # At once: SQLite's driver knows the last reason alone.
            explained = error if isinstance(error, WeftError) else tables.driver.explain(error)
            self._reason = Reason(explained, tables.is_duplicate(error))
            if self._mark is None:
                self._release()
            return False
        self._is_saved = tables.savepoints
        self._release()
        return True

    def _release(self) -> None:
        """Keep what was done since the savepoint. One that stays open makes each statement slower."""
        if self._is_saved:
            self.session.run(f"RELEASE SAVEPOINT {_PIECE}")
        self._is_saved = False

    # ------------------------------------------------------------------------------------------------------------ aside

    @property
    def _not_aside(self) -> str:
        row = self.tables.quote(ROW)
        return f"{row} NOT IN (SELECT {row} FROM {self.tables.temporary(quarantine.LISTED)})"

    def _put_aside(self, table: str, names: Sequence[str], number: int) -> None:
        """Count a staged row that was rejected last, and remember it with the reason."""
        self.count += 1
        self._waiting.append((number, self._reason))
        if len(self._waiting) >= self.most_waiting:
            self._store_waiting(table, names)

    def _store_waiting(self, table: str, names: Sequence[str]) -> None:
        if not self._waiting:
            return
        reasons = dict(self._waiting)
        self._waiting.clear()
        number = self.tables.quote(ROW)
        rows = self.session.rows(
            f"SELECT {number}, {self.tables.listed(names)} FROM {self.tables.temporary(table)} "
            f"WHERE {number} IN ({', '.join(map(str, reasons))}) ORDER BY {number}"
        )
        self._store([(row[0], dict(zip(names, row[1:], strict=True)), reasons[row[0]]) for row in rows])

    def _store(self, rejected: list[tuple[int, dict[str, object], Reason]]) -> None:
        """Store rows in the quarantine, each with the reason."""
        self._release()
        rows = [(reason.error.what, row) for _, row, reason in rejected]
        if not self.tables.savepoints:
            quarantine.insert(self.transaction, rows, [number for number, _, _ in rejected], self._rows_of)
            keep(self.transaction)
        elif not self._is_trial:
            quarantine.insert(self.transaction, rows, rows_of=self._rows_of)
