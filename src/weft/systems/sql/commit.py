"""The one transaction of a load: rows are staged, checked, moved into the target and recorded in the ledger, or nothing
of it happened.

It runs wherever the rows are: in a Spark task that reads them, or in the driver after tasks have staged them or where
the database has them already. The ledger `weft.commits` is written in the same transaction, so that a task which Spark
tries again, or a load that is repeated under the same key, finds what was done and does nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import pyarrow as pa

from weft.columns import canonical_batch
from weft.errors import LoadRefusedError, WeftError
from weft.systems.load import Counts, Load
from weft.systems.sql import checks, ledger, quarantine, watermarks
from weft.systems.sql.driver import Session
from weft.systems.sql.modes import move_for
from weft.systems.sql.move import Move
from weft.systems.sql.queries import subquery
from weft.systems.sql.staging import ATTEMPT
from weft.systems.sql.tables import Column, SqlTables
from weft.systems.sql.target import check_columns, ensure

# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.commit")

STAGE, _RAW, _MADE = "_weft_stage", "_weft_raw", "_weft_made"
# How far a database may be behind what was sent to it, and how much more is looked through for rows that it rejects.
_RECENT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Query:
    """Rows that the target's database has itself."""

    sql: str
    schema: pa.Schema


@dataclass(frozen=True)
class Batches:
    """Rows that this process has, or reads from elsewhere as it goes."""

    schema: pa.Schema
    batches: Iterable[pa.RecordBatch]


@dataclass(frozen=True)
class Staged:
    """Rows that tasks have put into a table, of which only some attempts count."""

    table: str
    schema: pa.Schema
    attempts: tuple[str, ...]
    bytes: int = 0


Rows = Query | Batches | Staged
CarryOut = Callable[[SqlTables, Load, Rows], Counts]
"""`commit`, or a trial of it."""
T = TypeVar("T")


def reached(step: str) -> None:
    """Say which step of the protocol is done."""
    _steps.debug(step)


# ---------------------------------------------------------------------------------------------------------- preparation


def prepare(tables: SqlTables, load: Load, schema: pa.Schema) -> None:
    """Make the ledger and the target where they are missing, and refuse what cannot go into the target that is there.

    Before the load's own transaction, because some databases commit at each CREATE TABLE.
    """
    written = load.written(schema)
    load.check_source(written.names)
    if load.is_recorded:
        ledger.create(tables)
    ensure(tables, load, written)
    if load.watermark is not None:
        watermarks.prepare(tables)
    if load.on_bad_rows == "quarantine" or any(check.reaction == "quarantine" for check in load.checks):
        quarantine.prepare(tables, load)


# ------------------------------------------------------------------------------------------------------ the transaction


def commit(tables: SqlTables, load: Load, rows: Rows) -> Counts:
    """Carry out a prepared load; safe to call again with the same load, whatever became of the first call."""
    if ledger.is_committed(tables, load):
        return Counts(replayed=True)
    attempt: _Commit | None = None
    try:
        with tables.driver.session("publish") as session:
            reached("begun")
            attempt = _Commit(tables, session, load, rows)
            counts = attempt.run()
            reached("recorded")
    except ledger.ClaimRefusedError as refused:
        ledger.check_committed(tables, load, refused)
        return Counts(replayed=True)
    except WeftError as error:
        refusal = _refusal(attempt) if attempt is not None and tables.is_rejection(error) else None
        if refusal is None:
            raise
        raise refusal from None
    reached("committed")
    return counts


class _UndoneError(Exception):
    """Ends an attempt of which nothing may stay."""


def _refusal(failed: _Commit) -> LoadRefusedError | None:
    """Which rows the target rejected while they were copied, by another attempt at them of which nothing stays; `None`
    if that cannot be told."""
    suspects, found = failed.suspects(), None
    if suspects is None:
        return None
    # Whatever happens here, the database's own message says no less.
    with suppress(Exception), failed.tables.driver.session("publish") as session:
        found = _Commit(failed.tables, session, failed.load, suspects).refusal(failed)
        raise _UndoneError
    return found


def attempt(tables: SqlTables, load: Load, rows: Rows) -> Counts:
    """What a load would do to a target that is there: it is carried out, and undone."""
    return _undone(tables, replace(load, watermark=None), rows, _Commit.run)


def attempt_unmade(tables: SqlTables, load: Load, rows: Rows) -> Counts:
    """What a load would do to a target that is not there, or not yet as it will be: its rows are staged and checked."""
    more = checks.implied(load, load.written(rows.schema).names)
    return _undone(tables, replace(load, watermark=None, checks=(*load.checks, *more)), rows, _Commit.check)


def _undone(tables: SqlTables, load: Load, rows: Rows, work: Callable[[_Commit], Counts]) -> Counts:
    counts = Counts()
    with suppress(_UndoneError), tables.driver.session("publish") as session:
        counts = work(_Commit(tables, session, load, rows, is_trial=True))
        raise _UndoneError
    return counts


def run_once(tables: SqlTables, load: Load, statement: str) -> bool:
    """Run a statement in one transaction with the ledger's entry of this load; `False` where it had one already."""
    ledger.create(tables)
    if ledger.is_committed(tables, load):
        return False
    try:
        with tables.driver.session("publish") as session:
            reached("begun")
            # First, because some statements commit on some databases: what failed must not count as done.
            session.run(statement)
            reached("moved")
            ledger.claim(tables, session, load)
            reached("recorded")
    except ledger.ClaimRefusedError as refused:
        ledger.check_committed(tables, load, refused)
        return False
    reached("committed")
    return True


class _Commit:
    def __init__(self, tables: SqlTables, session: Session, load: Load, rows: Rows, *, is_trial: bool = False) -> None:
        self.tables, self.session, self.load, self.rows = tables, session, load, rows
        self.is_trial = is_trial
        """Whether all of it is undone, so that the ledger shall not know of it."""
        self.schema = load.written(rows.schema)
        self.rows_read = 0
        self.bytes = rows.bytes if isinstance(rows, Staged) else 0
        self._batches = iter(rows.batches if isinstance(rows, Batches) else ())
        self._recent: deque[pa.RecordBatch] = deque()
        self._is_copying = False
        self.is_cut_short = False
        """Whether there are more rows than the suspects."""
        self._stage_name = STAGE

    def run(self) -> Counts:
        tables, session, load = self.tables, self.session, self.load
        self._claim()
        reached("claimed")
        by_name = self._columns()
        if load.mode != "append":
            tables.lock(session, load.schema, load.table)
        try:
            counts = self._straight(by_name) if self._goes_straight(by_name) else self._staged(by_name)
        finally:
            with suppress(Exception):
                if self._stage_name == _MADE:
                    tables.drop_temporary_view(session, _MADE)
                # Where it is not the transaction that ends them.
                for name in (STAGE, _RAW, checks.REPEATED, *Move.TEMPORARY):
                    tables.drop_temporary(session, name)
        counts = replace(counts, bytes=self.bytes)
        if not self.is_trial:
            ledger.record(tables, session, load, counts)
        if load.watermark is not None:
            watermarks.write(tables, session, load, load.watermark, counts.rows_read)
        return counts

    def _columns(self) -> dict[str, Column]:
        load = self.load
        columns = self.tables.columns(self.session, load.schema, load.table)
        if columns is None:
            raise LoadRefusedError(f"The table {load.name} is gone.", hint="Run the load again: it is created anew.")
        check_columns(load, self.schema, columns)
        return {column.name: column for column in columns}

    def _claim(self) -> None:
        if not self.is_trial:
            ledger.claim(self.tables, self.session, self.load)

    # -------------------------------------------------------------------------------------------------- without staging

    def _goes_straight(self, columns: dict[str, Column]) -> bool:
        """Whether rows can be written to the target at once: nothing to compare, nothing to convert."""
        load = self.load
        if load.tracks_rows or load.deduplicate_by or load.on_bad_rows != "fail" or load.checks:
            return False
        if isinstance(self.rows, Query) or load.projection is not None:
            return True
        return isinstance(self.rows, Batches) and all(
            self.tables.fits(columns[field.name], field) for field in self.schema
        )

    def _straight(self, columns: dict[str, Column]) -> Counts:
        tables, load = self.tables, self.load
        target = tables.table(load.schema, load.table)
        rows = self._projected()
        self._is_copying = True
        move = move_for(tables, self.session, load, self.schema, columns, STAGE, {})
        deleted = move.clear().deleted
        if isinstance(rows, Query):
            names = ", ".join(tables.quote(name) for name in self.schema.names)
            values = ", ".join(
                f"{tables.cast(f's.{tables.quote(field.name)}', field, columns[field.name])}" for field in self.schema
            )
            insert = f"INSERT INTO {target} ({names}) SELECT {values} FROM {subquery(rows.sql)} AS s"
            if rows is self.rows:
                cursor = self.session.run(insert)
            else:
                cursor = self._or_named(
                    lambda: self.session.run(insert), lambda: self._unmade() or self._refusal_of(move, rows.sql)
                )
            self.rows_read = int(cursor.rowcount)
        else:
            self.bytes = tables.copy_in(self.session, target, self.schema, self._counted())
        self._is_copied()
        reached("staged")
        self._check_empty()
        reached("moved")
        return Counts(rows_read=self.rows_read, inserted=self.rows_read, deleted=deleted)

    def _counted(self) -> Iterator[pa.RecordBatch]:
        held = 0
        for batch in self._batches:
            self.rows_read += batch.num_rows
            made = canonical_batch(batch, self.rows.schema)
            if self._is_copying:
                self._recent.append(made)
                held += made.nbytes
            while held > _RECENT_BYTES and len(self._recent) > 1:
                held -= self._recent.popleft().nbytes
            yield made

    def _is_copied(self) -> None:
        self._is_copying = False
        self._recent.clear()

    def _projected(self) -> Rows:
        """The rows as the target has them: where columns are not taken as they are, a query over the source's."""
        rows, tables, load = self.rows, self.tables, self.load
        if load.projection is None:
            return rows
        if isinstance(rows, Batches):
            tables.drop_temporary(self.session, _RAW)
            types = (f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in rows.schema)
            tables.create_temporary(self.session, _RAW, ", ".join(types))
            self._is_copying = True
            self.bytes = tables.copy_in(self.session, tables.temporary(_RAW), rows.schema, self._counted())
            self._is_copied()
            source = tables.temporary(_RAW)
        else:
            source = subquery(self._select(rows))
        return Query(f"SELECT {self._made()} FROM {source} AS q", self.schema)

    # ----------------------------------------------------------------------------------------------------- with staging

    def _staged(self, columns: dict[str, Column]) -> Counts:
        tables, session, load = self.tables, self.session, self.load
        if not tables.savepoints:
            # What is staged must outlive a move that is rejected, so it is kept alone: the claim comes again below.
            quarantine.undo(tables, session)
        bad = self._bad_rows()
        staged_as = self._stage(bad, columns)
        reached("staged")
        self._check_empty()
        move = move_for(tables, session, load, self.schema, columns, self._stage_name, staged_as)
        keyless, left_out = self._check_keys(move)
        moving = self.rows_read - left_out
        reached("checked")
        expected = checks.Checks(tables, session, load, move.stage, self.schema, is_trial=self.is_trial)
        if expected.may_put_aside and load.handle_deletes:
            move.remember_keys()
        if tables.savepoints:
            aside = expected.run(self.rows_read)
        elif bad is None:
            quarantine.keep(tables, session)
            self._claim()
            aside = expected.run(self.rows_read)
        else:
            aside = expected.run(self.rows_read, is_found_first=True)
            quarantine.keep(tables, session)
            bad.find(move, self.rows_read)
            self._claim()
        if bad is None:
            staged = f"SELECT * FROM {tables.temporary(move.stage)}"
            is_made = move.stage != _MADE
            counts = self._or_named(
                move.run, lambda: (None if is_made else self._unmade()) or self._refusal_of(move, staged)
            )
        else:
            counts = bad.run(move, self.rows_read)
        reached("moved")
        if bad is not None:
            self.rows_read += bad.unstaged
            counts = replace(counts, quarantined=bad.count)
            moving -= bad.count - bad.unstaged
        quarantined = counts.quarantined + keyless + aside
        counts = replace(counts, quarantined=quarantined, warnings=tuple(expected.warnings))
        moving -= aside
        if load.mode == "truncate" and not counts.inserted and self.rows_read and not load.allow_empty:
            raise LoadRefusedError(
                f"All {self.rows_read:,} rows for {load.name} were put aside, and this load would empty the table.",
                hint="Look at the source. If that is meant, say so: allow_empty=True.",
            )
        # Every row that meant something and changed nothing.
        unchanged = moving - counts.inserted - counts.updated if load.tracks_rows else 0
        return replace(counts, rows_read=self.rows_read, unchanged=unchanged)

    def _check_keys(self, move: Move) -> tuple[int, int]:
        """How many rows were put aside because they have no key, and how many do not go on, those included."""
        keyless = 0

        def put_aside() -> None:
            nonlocal keyless
            found = checks.Checks(self.tables, self.session, self.load, move.stage, self.schema, is_trial=self.is_trial)
            keyless = found.put_keyless_aside(is_found_first=not self.tables.savepoints)

        puts_aside = self.load.on_bad_rows == "quarantine"
        left_out = move.check_keys(self.rows_read, put_aside if puts_aside else None)
        return keyless, left_out

    def _bad_rows(self) -> quarantine.BadRows | None:
        if self.load.on_bad_rows != "quarantine":
            return None
        return quarantine.BadRows(self.tables, self.session, self.load, is_trial=self.is_trial)

    def check(self) -> Counts:
        """Stage the rows and see whether they are as expected: all that can be known without the target."""
        tables, session, load = self.tables, self.session, self.load
        bad = self._bad_rows()
        try:
            self._stage(bad, {})
            self._check_empty()
            move = move_for(tables, session, load, self.schema, {}, STAGE, {})
            keyless, left_out = self._check_keys(move)
            expected = checks.Checks(tables, session, load, move.stage, self.schema, is_trial=True)
            aside = expected.run(self.rows_read)
        finally:
            with suppress(Exception):
                for name in (STAGE, _RAW, checks.REPEATED, *Move.TEMPORARY):
                    tables.drop_temporary(session, name)
        unstaged = bad.unstaged if bad is not None else 0
        return Counts(
            rows_read=self.rows_read + unstaged,
            inserted=self.rows_read - left_out - aside,
            quarantined=keyless + aside + unstaged,
            warnings=tuple(expected.warnings),
        )

    def _or_named(self, work: Callable[[], T], name: Callable[[], LoadRefusedError | None]) -> T:
        """What `work` gives; where the target rejects rows, the error says which."""
        tables, session = self.tables, self.session
        quarantine.mark(tables, session)
        try:
            return work()
        except Exception as error:
            if not tables.is_rejection(error):
                raise
            refusal = None
            # Whatever happens here, the database's own message says no less.
            with suppress(Exception):
                quarantine.undo(tables, session)
                refusal = name()
            if refusal is None:
                raise
            raise refusal from None

    def _unmade(self) -> LoadRefusedError | None:
        """The error that names the rows of which the columns of the target cannot be made, where there are such."""
        tables, rows, load = self.tables, self.rows, self.load
        if load.projection is None or not tables.savepoints:
            return None
        bad = quarantine.BadRows(tables, self.session, load, only_name=True)
        names = ", ".join(tables.quote(name) for name in rows.schema.names)
        source = tables.temporary(_RAW) if isinstance(rows, Batches) else subquery(self._select(rows))
        return bad.unmade(STAGE, f"SELECT {names} FROM {source} AS q", self._made(), rows.schema.names)

    def _select(self, rows: Query | Staged) -> str:
        return rows.sql if isinstance(rows, Query) else self._of_attempts(rows)

    def _made(self) -> str:
        return ", ".join(f"{each.sql} AS {self.tables.quote(each.field.name)}" for each in self.load.projection or ())

    def _refusal_of(self, move: Move, select: str) -> LoadRefusedError | None:
        tables, session = self.tables, self.session
        for name in (*Move.OF_A_PIECE, quarantine.NUMBERED):
            tables.drop_temporary(session, name)
        bad = quarantine.BadRows(tables, session, self.load, only_name=True)
        rows = tables.create_temporary_as(
            session,
            quarantine.NUMBERED,
            quarantine.numbered(tables, select),
            keys=quarantine.with_number(
                tables, tables.stage_keys([self.schema.field(name) for name in self.load.keys], move.columns)
            ),
        )
        quarantine.keep(tables, session)
        move.stage = quarantine.NUMBERED
        return bad.refusal(lambda: bad.find(move, rows))

    def _stage(self, bad: quarantine.BadRows | None, columns: dict[str, Column]) -> dict[str, str]:
        """Fill the temporary table; gives the types of its columns where they are known."""
        tables, session = self.tables, self.session
        tables.drop_temporary(session, STAGE)
        if bad is not None and self.load.projection is not None:
            return self._stage_projected(bad, columns)
        rows = self._projected()
        names = ", ".join(tables.quote(name) for name in self.schema.names)
        keys = tables.stage_keys([self.schema.field(name) for name in self.load.keys], columns)
        if isinstance(rows, Batches):
            types = {field.name: tables.sql_type(field) for field in self.schema} | keys
            definitions = [f"{tables.quote(name)} {kind}" for name, kind in types.items()] + tables.stage_index(keys)
            if bad is None:
                tables.create_temporary(session, STAGE, ", ".join(definitions))
                self._is_copying = True
                self.bytes = tables.copy_in(session, tables.temporary(STAGE), self.schema, self._counted())
                self._is_copied()
            else:
                self.rows_read, self.bytes = bad.stage(STAGE, definitions, self.schema, self._counted())
        elif isinstance(rows, Query) and self._is_read_once(bad):
            tables.create_temporary_view(session, _MADE, rows.sql)
            self._stage_name = _MADE
            tables.filled(session, tables.temporary(_RAW))
            return keys
        else:
            if isinstance(rows, Query):
                select = f"SELECT {names} FROM {subquery(rows.sql)} AS q"
            else:
                select = self._of_attempts(rows)
            if bad is not None:
                select, keys = quarantine.numbered(tables, select), quarantine.with_number(tables, keys)
            if bad is None and self.rows is not rows:
                self.rows_read = self._or_named(
                    lambda: tables.create_temporary_as(session, STAGE, select, keys=keys), self._unmade
                )
            else:
                self.rows_read = tables.create_temporary_as(session, STAGE, select, keys=keys)
            types = {field.name: tables.sql_type(field) for field in self.schema} if isinstance(rows, Staged) else {}
            types |= keys
        tables.filled(session, tables.temporary(STAGE))
        return types

    def _is_read_once(self, bad: quarantine.BadRows | None) -> bool:
        """Whether all columns but the keys are made of the staged rows once: to store them made would take a tenth of
        the load."""
        load = self.load
        again = load.checks or load.handle_deletes or load.deduplicate_by
        if not self.tables.has_temporary_views or load.mode != "merge" or bad is not None or again:
            return False
        made = {each.field.name: each.sql for each in load.projection or ()}
        return isinstance(self.rows, Batches) and all(made[key] == f"q.{self.tables.quote(key)}" for key in load.keys)

    def _stage_projected(self, bad: quarantine.BadRows, columns: dict[str, Column]) -> dict[str, str]:
        """The same, where rows are put aside of which the columns of the target cannot be made."""
        tables, session, rows = self.tables, self.session, self.rows
        assert self.load.projection is not None
        tables.drop_temporary(session, _RAW)
        if isinstance(rows, Batches):
            types = [f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in rows.schema]
            given, self.bytes = bad.stage(_RAW, types, rows.schema, self._counted())
        else:
            if isinstance(rows, Query):
                names = ", ".join(tables.quote(name) for name in rows.schema.names)
                select = f"SELECT {names} FROM {subquery(rows.sql)} AS q"
            else:
                select = self._of_attempts(rows)
            given = tables.create_temporary_as(session, _RAW, quarantine.numbered(tables, select))
            quarantine.keep(tables, session)
        keys = tables.stage_keys([self.schema.field(name) for name in self.load.keys], columns)
        self.rows_read = bad.project(_RAW, STAGE, self._made(), rows.schema.names, given, keys)
        tables.filled(session, tables.temporary(STAGE))
        return keys

    def _of_attempts(self, rows: Staged) -> str:
        names = ", ".join(self.tables.quote(name) for name in rows.schema.names)
        # Ours: they hold nothing but letters and digits.
        attempts = ", ".join(f"'{attempt}'" for attempt in rows.attempts) or "''"
        return f"SELECT {names} FROM {rows.table} WHERE {self.tables.quote(ATTEMPT.name)} IN ({attempts})"

    def _check_empty(self) -> None:
        load = self.load
        empties = load.mode == "truncate" or load.handle_deletes is not None
        if self.rows_read == 0 and empties and not load.allow_empty:
            raise LoadRefusedError(
                f"The source of {load.name} is empty, and this load would empty the table.",
                hint="If that is meant, say so: allow_empty=True.",
            )

    # ---------------------------------------------------------------------------------------------------- rejected rows

    def suspects(self) -> Rows | None:
        """The rows among which are those that the target rejected while they were copied, and some more."""
        if not self._is_copying or self.load.on_bad_rows != "fail":
            return None
        return Batches(self.rows.schema, self._bounded()) if isinstance(self.rows, Batches) else self.rows

    def _bounded(self) -> Iterator[pa.RecordBatch]:
        more = 0
        yield from self._recent
        for batch in self._batches:
            if more > _RECENT_BYTES:
                self.is_cut_short = True
                return
            more += batch.nbytes
            yield batch

    def refusal(self, failed: _Commit) -> LoadRefusedError | None:
        """The error that names those of the rows which the target rejects, where another attempt failed."""
        tables, session, load = self.tables, self.session, self.load
        columns = self._columns()
        bad = quarantine.BadRows(tables, session, load, only_name=True)

        def search() -> None:
            is_plain = isinstance(self.rows, Batches) and load.projection is None
            if tables.savepoints and is_plain and self._goes_straight(columns):
                move_for(tables, session, load, self.schema, columns, STAGE, {}).clear()
                for batch in self._counted():
                    bad.copy(tables.table(load.schema, load.table), self.schema, batch)
            else:
                staged_as = self._stage(bad, columns)
                quarantine.keep(tables, session)
                if not load.keys:
                    bad.find(move_for(tables, session, load, self.schema, columns, STAGE, staged_as), self.rows_read)
            if failed.is_cut_short:
                raise quarantine.EnoughError

        return bad.refusal(search)
