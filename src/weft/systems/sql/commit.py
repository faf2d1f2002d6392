"""The one transaction of a load: rows are staged, checked, moved into the target and recorded in the ledger, or nothing
of it happened.

It runs wherever the rows are: in a Spark task that reads them, or in the driver after tasks have staged them or where
the database has them already. The ledger `weft.commits` is written in the same transaction, so that a task which Spark
tries again, or a load that is repeated under the same key, finds what was done and does nothing.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import pyarrow as pa

from weft.columns import canonical_batch
from weft.errors import EventsLostError, LoadRefusedError, WeftError
from weft.systems.load import Counts, Load
from weft.systems.sql import bad_rows, cdc_gate, checks, deciding_texts, ledger, quarantine, watermarks
from weft.systems.sql.cdc import Mirror
from weft.systems.sql.cdc_history import ChangeHistory
from weft.systems.sql.driver import Session
from weft.systems.sql.merge import Merge
from weft.systems.sql.move import LoadTransaction, Move
from weft.systems.sql.rejected_rows import RejectedRows
from weft.systems.sql.scd2 import Scd2, Scd2ByEvent
from weft.systems.sql.staging import ATTEMPT
from weft.systems.sql.system_tables import system_table
from weft.systems.sql.tables import Column, SqlTables, subquery
from weft.systems.sql.target import check_columns, ensure

# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.commit")

_STAGE, _RAW, _PROJECTED = "_weft_stage", "_weft_raw", "_weft_made"
# How far a database may be behind what was sent to it, and how much more is looked through for rows that it rejects.
_RECENT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class QueriedRows:
    """Rows that the target's database has itself."""

    sql: str
    schema: pa.Schema


@dataclass(frozen=True)
class BatchedRows:
    """Rows that this process has, or reads from elsewhere as it goes."""

    schema: pa.Schema
    batches: Iterable[pa.RecordBatch]


@dataclass(frozen=True)
class StagedRows:
    """Rows that tasks have put into a table, of which only some attempts count."""

    table: str
    schema: pa.Schema
    attempts: tuple[str, ...]
    bytes: int = 0


SourceRows = QueriedRows | BatchedRows | StagedRows
CarryOut = Callable[[SqlTables, Load, SourceRows], Counts]
"""`commit`, or a trial of it."""
T = TypeVar("T")


def reached(step: str) -> None:
    """Log which step of the protocol is done."""
    _steps.debug(step)


# ---------------------------------------------------------------------------------------------------------- preparation


def prepare(tables: SqlTables, load: Load, schema: pa.Schema) -> None:
    """Create the ledger and the target where they are missing, and refuse what the existing target cannot hold.

    Before the load's own transaction, because some databases commit at each CREATE TABLE.
    """
    written = load.written(schema)
    load.check_source(written.names, folds=tables.folds_columns)
    if load.is_recorded:
        ledger.create(tables)
    if load.changes is not None:
        cdc_gate.prepare(tables)
    ensure(tables, load, load.stored(written))
    if load.watermark is not None:
        watermarks.prepare(tables)
    if load.on_bad_rows == "quarantine" or any(check.reaction == "quarantine" for check in load.checks):
        quarantine.prepare(tables, load)


# ------------------------------------------------------------------------------------------------------ the transaction


def commit(tables: SqlTables, load: Load, rows: SourceRows) -> Counts:
    """Carry out a prepared load; safe to call again with the same load, whatever became of the first call."""
    return commit_together(tables, [(load, rows)])[0]


def commit_together(tables: SqlTables, loads: Sequence[tuple[Load, SourceRows]]) -> list[Counts]:
    """Carry out prepared loads into several tables of a database in one transaction. Those that the ledger has are left
    out. Where there are no savepoints, a load ends its transaction in between: there each one has its own."""
    if not tables.savepoints and len(loads) > 1:
        return [commit(tables, *each) for each in loads]
    counts = [Counts(replayed=True)] * len(loads)
    left = [number for number, (load, _) in enumerate(loads) if not ledger.is_committed(tables, load)]
    if not left:
        return counts
    done, attempt = list(counts), None
    try:
        with tables.driver.session("publish") as session:
            reached("begun")
            for number in left:
                attempt = LoadAttempt(tables, session, *loads[number], is_alone=len(left) == 1)
                done[number] = attempt.run()
            reached("recorded")
    except ledger.ClaimRefusedError as refused:
        for number in left:
            ledger.check_committed(tables, loads[number][0], refused)
        return counts
    except WeftError as error:
        name_rejected(attempt, error)
        raise
    reached("committed")
    return done


class UndoneError(Exception):
    """Ends an attempt of which nothing may stay."""


def name_rejected(attempt: LoadAttempt | None, error: WeftError) -> None:
    """Raise the error that names the rows which the target rejected, where that is why an attempt failed."""
    refusal = _refusal(attempt) if attempt is not None and attempt.tables.is_rejection(error) else None
    if refusal is not None:
        raise refusal from None


def _refusal(failed: LoadAttempt) -> LoadRefusedError | None:
    """The error that names the rows which the target rejected while they were copied, by another attempt of which
    nothing stays; `None` where that attempt does not find them."""
    suspects, refusal = failed.suspects(), None
    if suspects is None:
        return None
    # Whatever happens here, the database's own message says no less.
    with suppress(Exception), failed.tables.driver.session("publish") as session:
        refusal = LoadAttempt(failed.tables, session, failed.load, suspects).refusal(failed)
        raise UndoneError
    return refusal


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


class LoadAttempt:
    """One attempt at a load, inside its transaction."""

    is_trial: ClassVar[bool] = False

    def __init__(
        self, tables: SqlTables, session: Session, load: Load, rows: SourceRows, *, is_alone: bool = True
    ) -> None:
        self.tables, self.session, self.load, self.rows = tables, session, load, rows
        self.schema = load.written(rows.schema)
        self.transaction = LoadTransaction(tables, session, load, self.schema, is_alone)
        self.rows_read = 0
        self.bytes = rows.bytes if isinstance(rows, StagedRows) else 0
        self._batches = iter(rows.batches if isinstance(rows, BatchedRows) else ())
        self._recent: deque[pa.RecordBatch] = deque()
        self._is_copying = False
        self.is_cut_short = False
        """Whether there are more rows than the suspects."""

    def run(self) -> Counts:
        """Carry out the load."""
        self._claim()
        reached("claimed")
        columns = self._columns()
        self._read_texts(columns)
        if self.load.mode != "append" or self.load.replaces_all:
            self.tables.lock(self.session, self.load.schema, self.load.table)
        with self._temporary_tables():
            counts = self._straight(columns) if self._goes_straight(columns) else self._staged(columns)
        counts = replace(counts, bytes=self.bytes)
        self._record(counts)
        return counts

    def _claim(self) -> None:
        ledger.claim(self.tables, self.session, self.load)
        if self.load.from_quarantine is not None:
            quarantine.take(self.transaction, self.load.from_quarantine)

    def _record(self, counts: Counts) -> None:
        if counts.quarantined:
            quarantine.remove_earlier(self.transaction)
        ledger.record(self.tables, self.session, self.load, counts)
        if self.load.watermark is not None:
            watermarks.write(self.tables, self.session, self.load, self.load.watermark, counts.rows_read)

    def _columns(self) -> dict[str, Column]:
        load = self.load
        columns = self.tables.columns(self.session, load.schema, load.table)
        if columns is None:
            raise LoadRefusedError(
                f"The table {load.name} no longer exists.", hint="Run the load again: it creates the table again."
            )
        check_columns(load, load.stored(self.schema), columns)
        return {column.name: column for column in columns}

    def _read_texts(self, columns: dict[str, Column]) -> None:
        """Compute the columns that decide about rows before these are compared, where the source has texts for them."""
        projection = deciding_texts.projection(self.tables, self.load, self.schema, columns)
        if projection is not None:
            self.load = replace(self.load, projection=projection)
            self.schema = self.load.written(self.rows.schema)
            self.transaction = replace(self.transaction, load=self.load, schema=self.schema)

    @contextmanager
    def _temporary_tables(self) -> Iterator[None]:
        """Drop them at the end, where the transaction does not."""
        try:
            yield
        finally:
            with suppress(Exception):
                if self.tables.has_temporary_views:
                    self.tables.drop_temporary_view(self.session, _PROJECTED)
                for name in (_STAGE, _RAW, checks.REPEATED, cdc_gate.SURVIVORS, *Move.TEMPORARY):
                    self.tables.drop_temporary(self.session, name)

    def _move(self, columns: dict[str, Column], stage: str = _STAGE, types: dict[str, str] | None = None) -> Move:
        """The move of this load's mode, from the table `stage` whose columns have these types."""
        scd2: type[Move] = Scd2 if self.load.event_timestamp_column is None else Scd2ByEvent
        merge: type[Move] = Merge
        if self.load.changes is not None:
            merge, scd2 = Mirror, ChangeHistory
        modes: dict[str, type[Move]] = {"append": Move, "truncate": Move, "merge": merge, "scd2": scd2}
        return modes[self.load.mode](self.transaction, columns, stage, types or {})

    def _check_events(self) -> None:
        # After they were read: what is removed from now on was there.
        for stream, after in self.load.events_after:
            floor = self.session.value(
                f"SELECT floor FROM {system_table(self.tables, 'streams')} WHERE name = ?", (stream,)
            )
            lost = int(floor or 0) - after  # of a stream that is gone, its table is gone too
            if lost > 0:
                raise EventsLostError(
                    f"The stream {stream} lost up to {lost:,} events before {self.load.pipeline} read them: "
                    "retention removed them.",
                    lost=lost,
                    hint=f"Build it from what is there: weft run {self.load.pipeline} --full",
                )

    def _check_empty(self) -> None:
        load = self.load
        empties = load.mode == "truncate" or load.handle_deletes is not None
        if self.rows_read == 0 and empties and not load.allow_empty:
            raise LoadRefusedError(
                f"The source of {load.name} is empty, and this load would empty the table.",
                hint="If that is meant, say so: allow_empty=True.",
            )

    # -------------------------------------------------------------------------------------------------- without staging

    def _goes_straight(self, columns: dict[str, Column]) -> bool:
        """Whether rows can be written to the target at once: nothing to compare, nothing to convert."""
        load = self.load
        if load.tracks_rows or load.deduplicate_by or load.on_bad_rows != "fail" or load.checks:
            return False
        if load.null_is_default and any(columns[name].default is not None for name in self.schema.names):
            return False
        if isinstance(self.rows, QueriedRows) or load.projection is not None:
            return True
        return isinstance(self.rows, BatchedRows) and all(
            self.tables.fits(columns[field.name], field) for field in self.schema
        )

    def _straight(self, columns: dict[str, Column]) -> Counts:
        rows = self._projected()
        self._is_copying = True
        move = self._move(columns)
        deleted = move.clear().deleted
        if isinstance(rows, QueriedRows):
            self._insert(move, rows)
            self.transaction.check_deferred()
        else:
            self._copy(move.target, self.schema)
        self._is_copying = False
        reached("staged")
        self._check_events()
        self._check_empty()
        reached("moved")
        return Counts(rows_read=self.rows_read, inserted=self.rows_read, deleted=deleted)

    def _insert(self, move: Move, rows: QueriedRows) -> None:
        """Insert the rows of a query into the target."""
        values = ", ".join(
            self.tables.cast(f"s.{self.tables.quote(field.name)}", field, move.columns[field.name])
            for field in self.schema
        )
        names, source = self.tables.listed(self.schema.names), subquery(rows.sql)
        insert = f"INSERT INTO {move.target} ({names}) SELECT {values} FROM {source} AS s"
        if rows is self.rows:
            cursor = self.session.run(insert)
        else:
            cursor = self._or_refuse(
                lambda: self.session.run(insert), lambda: self._unprojected() or self._rejected(move, rows.sql)
            )
        self.rows_read = int(cursor.rowcount)

    def _copy(self, table: str, schema: pa.Schema) -> None:
        """Copy the source's batches into a table; where that fails, `suspects` has the rows to search."""
        self._is_copying = True
        self.bytes = self.tables.copy_in(self.session, table, schema, self._counted())
        self.transaction.check_deferred()
        self._is_copying = False
        self._recent.clear()

    def _counted(self) -> Iterator[pa.RecordBatch]:
        held = 0
        for batch in self._batches:
            self.rows_read += batch.num_rows
            canonical = canonical_batch(batch, self.rows.schema)
            if self._is_copying:
                self._recent.append(canonical)
                held += canonical.nbytes
            while held > _RECENT_BYTES and len(self._recent) > 1:
                held -= self._recent.popleft().nbytes
            yield canonical

    # ----------------------------------------------------------------------------------------------------- with staging

    def _staged(self, columns: dict[str, Column]) -> Counts:
        tables, load = self.tables, self.load
        if not tables.savepoints:
            # Staged rows must outlive a rejected move, so they are committed alone; the load is claimed again below.
            bad_rows.undo(self.transaction)
        bad = self._bad_rows()
        move = self._move(columns, *self._stage(bad, columns))
        reached("staged")
        self._check_events()
        self._check_empty()
        expected = checks.Checks(self.transaction, move, is_trial=self.is_trial)
        moving = self.rows_read - self._check_keys(move, expected)
        reached("checked")
        if expected.may_quarantine and load.handle_deletes:
            move.remember_keys()
        if not tables.savepoints and bad is None:
            bad_rows.keep(self.transaction)
            self._claim()
        aside = expected.run(self.rows_read)
        if bad is None:
            staged = f"SELECT * FROM {tables.temporary(move.stage)}"
            counts = self._or_refuse(
                move.run,
                lambda: (self._unprojected() if move.stage == _PROJECTED else None) or self._rejected(move, staged),
            )
        else:
            if not tables.savepoints:
                bad_rows.keep(self.transaction)
                bad.find(move, self.rows_read)
                self._claim()
            counts = bad.run(move, self.rows_read)
            self.rows_read += bad.unstaged
            moving -= bad.count - bad.unstaged
        reached("moved")
        quarantined = (0 if bad is None else bad.count) + expected.incomplete + aside
        counts = replace(counts, quarantined=quarantined, warnings=tuple(expected.warnings))
        if load.mode == "truncate" and not counts.inserted and self.rows_read and not load.allow_empty:
            raise LoadRefusedError(
                f"All {self.rows_read:,} rows for {load.name} were put aside, and this load would empty the table.",
                hint="Look at the source. If that is meant, say so: allow_empty=True.",
            )
        # Every row that meant something and changed nothing.
        unchanged = moving - aside - counts.inserted - counts.updated if load.tracks_rows else 0
        if load.changes is not None:
            unchanged = max(unchanged - counts.deleted, 0)  # a truncate deletes more than its own row
        return replace(counts, rows_read=self.rows_read, unchanged=unchanged)

    def _check_keys(self, move: Move, expected: checks.Checks) -> int:
        """Check the keys of the staged rows; return how many rows do not go on, those put aside included."""
        if self.load.on_bad_rows != "quarantine":
            return move.check_keys(self.rows_read)
        if self.load.handle_deletes is not None:
            # A key that is missing is one that the source no longer has: nobody knows whose rows these are.
            return move.check_keys(self.rows_read)
        timeless = expected.put_timeless_aside()
        return timeless + move.check_keys(self.rows_read - timeless, expected.put_keyless_aside)

    def _bad_rows(self) -> bad_rows.BadRows | None:
        if self.load.on_bad_rows != "quarantine":
            return None
        return bad_rows.BadRows(self.transaction, is_trial=self.is_trial)

    def _stage(self, bad: bad_rows.BadRows | None, columns: dict[str, Column]) -> tuple[str, dict[str, str]]:
        """Fill the staging table; return its name, and the types of its columns where they are known."""
        tables, session = self.tables, self.session
        keys = tables.stage_keys([self.schema.field(name) for name in self.load.keys], columns)
        if bad is not None and self.load.projection is not None:
            self._stage_projected(bad, keys)
            return _STAGE, keys
        rows = self._projected()
        if isinstance(self.rows, BatchedRows) and rows is not self.rows:
            bad_rows.keep(self.transaction)  # they are searched where their columns cannot be computed
        types = keys
        if not isinstance(rows, QueriedRows):
            types = {field.name: tables.sql_type(field) for field in self.schema} | keys
        if isinstance(rows, BatchedRows):
            definitions = [f"{tables.quote(name)} {kind}" for name, kind in types.items()] + tables.stage_index(keys)
            if bad is None:
                tables.create_temporary(session, _STAGE, ", ".join(definitions))
                self._copy(tables.temporary(_STAGE), self.schema)
            else:
                self.rows_read, self.bytes = bad.stage(_STAGE, definitions, self.schema, self._counted())
        elif isinstance(rows, QueriedRows) and self._is_read_once(bad):
            tables.create_temporary_view(session, _PROJECTED, rows.sql)
            tables.filled(session, tables.temporary(_RAW))
            return _PROJECTED, keys
        else:
            select = rows.sql if isinstance(rows, QueriedRows) and rows is not self.rows else self._source_query()
            if bad is not None:
                select, keys = bad_rows.numbered(tables, select), bad_rows.with_number(tables, keys)

            def create() -> int:
                return tables.create_temporary_as(session, _STAGE, select, keys=keys)

            is_projected = bad is None and rows is not self.rows
            search = functools.partial(self._unprojected, is_staged=True)
            self.rows_read = self._or_refuse(create, search) if is_projected else create()
        tables.filled(session, tables.temporary(_STAGE))
        return _STAGE, types

    def _is_read_once(self, bad: bad_rows.BadRows | None) -> bool:
        """Whether all columns but the keys are computed from the staged rows once: to store the results would take a
        tenth of the load."""
        load = self.load
        again = load.checks or load.handle_deletes or load.deduplicate_by
        if not self.tables.has_temporary_views or load.mode != "merge" or bad is not None or again:
            return False
        sql = {each.field.name: each.sql for each in load.projection or ()}
        return isinstance(self.rows, BatchedRows) and all(
            sql[key] == f"q.{self.tables.quote(key)}" for key in load.keys
        )

    def _stage_projected(self, bad: bad_rows.BadRows, keys: dict[str, str]) -> None:
        """Fill the staging table, and put rows aside of which the columns of the target cannot be computed."""
        tables, session, rows = self.tables, self.session, self.rows
        if isinstance(rows, BatchedRows):
            types = [f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in rows.schema]
            count, self.bytes = bad.stage(_RAW, types, rows.schema, self._counted())
        else:
            select, number = bad_rows.numbered(tables, self._source_query()), bad_rows.with_number(tables, {})
            count = tables.create_temporary_as(session, _RAW, select, keys=number)
            bad_rows.keep(self.transaction)
        self.rows_read = bad.project(_RAW, _STAGE, self._projection(), rows.schema.names, count, keys)
        tables.filled(session, tables.temporary(_STAGE))

    # ---------------------------------------------------------------------------------------------------------- queries

    def _projected(self) -> SourceRows:
        """The rows as the target has them: where the load computes columns, a query over those of the source."""
        rows, tables = self.rows, self.tables
        if self.load.projection is None:
            return rows
        if isinstance(rows, BatchedRows):
            types = (f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in rows.schema)
            tables.create_temporary(self.session, _RAW, ", ".join(types))
            source = tables.temporary(_RAW)
            self._copy(source, rows.schema)
        else:
            source = subquery(rows.sql if isinstance(rows, QueriedRows) else self._source_query())
        return QueriedRows(f"SELECT {self._projection()} FROM {source} AS q", self.schema)

    def _projection(self) -> str:
        return ", ".join(f"{each.sql} AS {self.tables.quote(each.field.name)}" for each in self.load.projection or ())

    def _source_query(self) -> str:
        """The source's columns, from the place where its rows are."""
        rows, tables = self.rows, self.tables
        names = tables.listed(rows.schema.names)
        if isinstance(rows, StagedRows):
            # Ours: they hold nothing but letters and digits.
            attempts = ", ".join(f"'{attempt}'" for attempt in rows.attempts) or "''"
            return f"SELECT {names} FROM {rows.table} WHERE {tables.quote(ATTEMPT.name)} IN ({attempts})"
        source = subquery(rows.sql) if isinstance(rows, QueriedRows) else tables.temporary(_RAW)
        return f"SELECT {names} FROM {source} AS q"

    # ---------------------------------------------------------------------------------------------------- rejected rows

    def _or_refuse(self, work: Callable[[], T], search: Callable[[], LoadRefusedError | None]) -> T:
        """Do it; where the target rejects rows, raise the error that names them."""
        bad_rows.mark(self.transaction)
        try:
            result = work()
            self.transaction.check_deferred()
            return result
        except Exception as error:
            if not self.tables.is_rejection(error):
                raise
            refusal = None
            # Whatever happens here, the database's own message says no less.
            with suppress(Exception):
                bad_rows.undo(self.transaction)
                refusal = search()
            if refusal is None:
                raise
            raise refusal from None

    def _unprojected(self, *, is_staged: bool = False) -> LoadRefusedError | None:
        """The error that names the rows of which the columns of the target cannot be computed, where there are such.
        `is_staged`: nothing but staged rows is in the transaction."""
        if self.load.projection is None or not (self.tables.savepoints or is_staged):
            return None
        search = RejectedRows(self.transaction)
        return search.unprojected(_STAGE, self._source_query(), self._projection(), self.rows.schema.names)

    def _rejected(self, move: Move, select: str) -> LoadRefusedError | None:
        """The error that names the rows of a query which the target rejects, where there are such."""
        tables, session = self.tables, self.session
        search = RejectedRows(self.transaction)
        keys = tables.stage_keys([self.schema.field(name) for name in self.load.keys], move.columns)
        rows = tables.create_temporary_as(
            session,
            bad_rows.NUMBERED,
            bad_rows.numbered(tables, select),
            keys=bad_rows.with_number(tables, keys),
        )
        bad_rows.keep(self.transaction)
        move.stage = bad_rows.NUMBERED
        return search.refusal(lambda: search.find(move, rows))

    def suspects(self) -> SourceRows | None:
        """The rows among which are those that the target rejected while they were copied, and some more."""
        if not self._is_copying or self.load.on_bad_rows != "fail":
            return None
        return BatchedRows(self.rows.schema, self._bounded()) if isinstance(self.rows, BatchedRows) else self.rows

    def _bounded(self) -> Iterator[pa.RecordBatch]:
        more = 0
        yield from self._recent
        for batch in self._batches:
            if more > _RECENT_BYTES:
                self.is_cut_short = True
                return
            more += batch.nbytes
            yield batch

    def refusal(self, failed: LoadAttempt) -> LoadRefusedError | None:
        """The error that names those of the rows which the target rejects, where another attempt failed."""
        tables, load = self.tables, self.load
        columns = self._columns()
        search = RejectedRows(self.transaction)

        def find() -> None:
            is_plain = isinstance(self.rows, BatchedRows) and load.projection is None
            if tables.savepoints and is_plain and self._goes_straight(columns):
                move = self._move(columns)
                move.clear()
                for batch in self._counted():
                    search.copy(move.target, self.schema, batch)
            else:
                staging = self._stage(search, columns)
                bad_rows.keep(self.transaction)
                if not load.keys:
                    search.find(self._move(columns, *staging), self.rows_read)
            if failed.is_cut_short:
                raise bad_rows.EnoughError

        return search.refusal(find)
