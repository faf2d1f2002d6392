"""The two tables of a run log, in the dialects of the databases.

`weft.runs` has a row for each attempt. The id of a scheduled run follows from pipeline and slot, so the primary key
alone keeps one from being begun twice. `weft.claims` has a row for each pipeline: its owner, and which rows of
`weft.runs` hold its state, so that one query gets the states of a thousand pipelines however long their history is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import pyarrow as pa

from weft.errors import ConnectionFailedError, DeclarationError, SettingsError, WeftError, nearest
from weft.operate.records import Attempt, PipelineState, Status
from weft.operate.run_store import Claim, LockedPipeline, RunStore, is_live
from weft.options import variants
from weft.project import build_connection
from weft.systems.base import system_for, systems
from weft.systems.sql.driver import Role, Session
from weft.systems.sql.system_tables import instant
from weft.systems.sql.tables import SqlTables

_log = logging.getLogger("weft.operate")
_INSTANT = pa.timestamp("us", "UTC")
# Other values are stored as texts.
_ARROW_TYPES = {int: pa.int64(), datetime: _INSTANT}
_RUNS = pa.schema(
    pa.field(name, _ARROW_TYPES.get(variants(hint)[0], pa.string()), nullable=NoneType in get_args(hint))
    for name, hint in get_type_hints(Attempt).items()
)
# Logs that are older do not have these: the oldest none, later ones the first of them.
_CONTROLS = (pa.field("paused_at", _INSTANT), pa.field("cancelled", pa.string()))
_NOTES = (pa.field("watched_at", _INSTANT), pa.field("stale_at", _INSTANT))
_LEASES = (pa.field("lease_seconds", pa.float64()),)
_LATER = (*_CONTROLS, *_NOTES, *_LEASES)
_CLAIMS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("fence", pa.int64(), nullable=False),
        # The attempt that runs, or else the last one.
        pa.field("run_id", pa.string()),
        pa.field("attempt", pa.int64()),
        # Null where no process runs it.
        pa.field("owner", pa.string()),
        pa.field("expires_at", _INSTANT),
        # The last attempt for a slot, and the last skip.
        pa.field("slot_run_id", pa.string()),
        pa.field("slot_attempt", pa.int64()),
        pa.field("skip_run_id", pa.string()),
        pa.field("failures", pa.int64(), nullable=False),
        pa.field("succeeded_at", _INSTANT),
        *_LATER,
    ]
)
_TABLES = {"runs": (_RUNS, ("run_id", "attempt")), "claims": (_CLAIMS, ("pipeline",))}
# What MySQL must be able to index.
_SHORT = {"run_id", "pipeline", "status", "slot_run_id", "skip_run_id"}
# A transaction of the run log takes milliseconds.
_SILENT_SECONDS = 10
_INDEXES = (("started_at",), ("pipeline", "started_at"))
# A query for more pipelines than this asks for all.
_LISTED = 200

T = TypeVar("T")


class LogTables(RunStore):
    """`weft.runs` and `weft.claims` in one database. Every operation is one short transaction."""

    def __init__(self, tables: SqlTables) -> None:
        if tables.clock is None:
            able = [system.kind for system in systems().values() if system.tables and system.kind != tables.dialect]
            raise DeclarationError(
                f"A run log cannot be kept in a {tables.dialect} database.", hint=f"These can: {', '.join(able)}."
            )
        self.tables, self.shown = tables, tables.connection.target
        self.is_private = tables.connection.resolved().is_private_memory
        # Another scheduler could not take over from one that is stopped while it renews its lease.
        tables.driver.silent_seconds = _SILENT_SECONDS
        self.now = tables.clock
        self.for_update = tables.row_lock
        self._missing: list[pa.Field] = []
        """The columns of `_LATER` that this log does not have."""

    @property
    def has_notes(self) -> bool:
        return not any(each in self._missing for each in _NOTES)

    @cached_property
    def runs_table(self) -> str:
        return self.tables.driver.table("weft", "runs")

    @cached_property
    def claims(self) -> str:
        return self.tables.driver.table("weft", "claims")

    def secrets(self) -> Collection[str]:
        return self.tables.connection.secrets()

    def close(self) -> None:
        self.tables.close()

    @contextmanager
    def session(self, role: Role) -> Iterator[Session]:
        with self.tables.waiting_turn(role), self.tables.driver.session(role) as session:
            yield session

    # --------------------------------------------------------------------------------------------------------- creation

    def check(self, *, write: bool, create: bool) -> None:
        """Raise unless both tables exist, and with `write` can be written."""
        with self.session("publish" if write else "read") as session:
            for table in (self.runs_table, self.claims):
                session.rows(f"SELECT 1 FROM {table} WHERE 1 = 0")
            if write:
                # Changes nothing, and fails where the table cannot be written.
                session.run(f"UPDATE {self.claims} SET fence = fence WHERE 1 = 0")

        missing = [] if self._has_columns(*_LATER) else [each for each in _LATER if not self._has_columns(each)]
        if write and create:
            missing = [each for each in missing if not self._add_column(each)]
        self._missing = missing
        if write and missing:
            notes = {"pauses and cancels": _CONTROLS, "what is stale": _NOTES, "how long leases are": _LEASES}
            what = [each for each, fields in notes.items() if any(field in missing for field in fields)]
            text = "The run log %s cannot note %s. %s"
            _log.warning(text, self.shown, " and ".join(what), self._alterations())

    def _has_columns(self, *fields: pa.Field) -> bool:
        # Not quoted: SQLite takes an unknown name in quotes for a text.
        names = ", ".join(each.name for each in fields)
        try:
            with self.session("read") as session:
                session.rows(f"SELECT {names} FROM {self.claims} WHERE 1 = 0")
            return True
        except ConnectionFailedError:
            raise
        except WeftError:
            return False

    def _add_column(self, field: pa.Field) -> bool:
        """Add a column that an older log lacks; another process may do so at the same moment."""
        try:
            with self.session("publish") as session:
                session.run(self._alteration(field))
            return True
        except ConnectionFailedError:
            raise
        except WeftError:
            return self._has_columns(field)

    def _alteration(self, field: pa.Field) -> str:
        return f"ALTER TABLE {self.claims} ADD COLUMN {self.tables.quote(field.name)} {self.tables.sql_type(field)}"

    def _alterations(self) -> str:
        return f"Have them added: {'; '.join(map(self._alteration, self._missing))}"

    def require_control(self) -> None:
        if any(each in self._missing for each in _CONTROLS):
            raise SettingsError(
                f"The run log {self.shown} is of an older version, which cannot note pauses and cancels.",
                hint=self._alterations(),
            )

    def known(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of columns that this log has."""
        missing = {each.name for each in self._missing}
        return {name: value for name, value in values.items() if name not in missing}

    def _later(self, alias: str = "") -> str:
        return ", ".join("NULL" if each in self._missing else f"{alias}{each.name}" for each in _LATER)

    def create(self) -> None:
        """Create missing tables; another process may do so at the same moment."""
        with self.session("publish") as session:
            if self.tables.driver.has_schemas:
                self.tables.create_schema(session, "weft")
            for statement in statements(self.tables, self.runs_table, self.claims):
                session.run(statement)

    def missing(self, reason: WeftError) -> SettingsError:
        """Return the error for tables that do not exist and may not be created."""
        return SettingsError(
            f"The run log {self.tables.connection.target} has no usable tables, and create_tables=false forbids to "
            f"make them: {reason.what}",
            hint=f"Create them:\n{_script(self.tables)}",
        )

    # ------------------------------------------------------------------------------------------------------------- rows

    def locked(self, pipeline: str, work: Callable[[LockedPipeline], T]) -> T:
        for _ in range(2):
            with self.session("publish") as session:
                claim = self._lock(session, pipeline)
                if claim is not None:
                    return work(_LockedRow(session, self, claim))
            self._add(pipeline)
        raise WeftError(f"The row of {pipeline} in {self.shown} was removed.", hint="Run it again.")

    def _lock(self, session: Session, pipeline: str) -> Claim | None:
        """Lock the pipeline's row until the transaction ends, and return it."""
        row = session.row(
            f"SELECT fence, run_id, attempt, owner, expires_at, failures, {self.now}, {self._later()} "
            f"FROM {self.claims} WHERE pipeline = ?{self.for_update}",
            (pipeline,),
        )
        if row is None:
            return None
        fence, run_id, attempt, owner, expires_at, failures, now, *later = row
        paused_at, cancelled, watched_at, stale_at, lease_seconds = later
        moment = instant(now)
        assert moment is not None
        return Claim(
            pipeline,
            fence,
            run_id,
            attempt,
            owner,
            instant(expires_at),
            failures,
            moment,
            instant(paused_at),
            cancelled,
            instant(watched_at),
            instant(stale_at),
            lease_seconds,
        )

    def _add(self, pipeline: str) -> None:
        sql = f"INSERT INTO {self.claims} (pipeline, fence, failures) VALUES (?, 0, 0)"
        try:
            with self.session("publish") as session:
                session.run(sql, (pipeline,))
        except WeftError as error:
            # Another process was faster.
            if not self.tables.is_rejection(error):
                raise

    def update(
        self, session: Session, table: str, values: Mapping[str, Any], where: str, parameters: Sequence[Any]
    ) -> None:
        sql, new = _placeholders(self.tables, values)
        changes = ", ".join(f"{self.tables.quote(name)} = {value}" for name, value in sql.items())
        session.run(f"UPDATE {table} SET {changes} WHERE {where}", [*new, *parameters])

    def latest(self, pipelines: Sequence[str] | None) -> list[PipelineState]:
        wanted = list(pipelines or ())
        where = f" WHERE c.pipeline IN ({', '.join('?' * len(wanted))})" if 0 < len(wanted) <= _LISTED else ""
        # Mostly the last attempt is that of the last slot: it is read once.
        same = "CASE WHEN c.slot_run_id = c.run_id AND c.slot_attempt = c.attempt THEN 1 ELSE 0 END"
        with self.session("read") as session:
            rows = session.rows(
                f"SELECT c.pipeline, c.owner, c.expires_at, c.succeeded_at, c.failures, {self.now}, "
                f"{self._later('c.')}, {same}, {self.columns('l')}, {self.columns('s')}, {self.columns('k')} "
                f"FROM {self.claims} c "
                f"LEFT JOIN {self.runs_table} l ON l.run_id = c.run_id AND l.attempt = c.attempt "
                f"LEFT JOIN {self.runs_table} s "
                f"ON s.run_id = c.slot_run_id AND s.attempt = c.slot_attempt AND {same} = 0 "
                f"LEFT JOIN {self.runs_table} k ON k.run_id = c.skip_run_id AND k.attempt = 0{where}",
                wanted if where else (),
            )
        names = None if pipelines is None else set(wanted)
        states = []
        for name, owner, expires_at, succeeded_at, failures, now, *rest in rows:
            if names is not None and name not in names:
                continue
            (paused_at, _, watched_at, stale_at, _, is_same), attempts = rest[:6], rest[6:]
            width = len(attempts) // 3
            last, scheduled, skipped = (attempt_of(attempts[at : at + width]) for at in (0, width, 2 * width))
            scheduled = last if is_same else scheduled
            moment = instant(now)
            assert moment is not None
            live = is_live(owner, instant(expires_at), moment)
            later = instant(paused_at), instant(watched_at), instant(stale_at), moment, instant(expires_at), owner
            states.append(PipelineState(name, last, scheduled, skipped, instant(succeeded_at), failures, live, *later))
        return states

    def runs(self, pipeline: str | None, status: Status | None, since: datetime | None, limit: int) -> list[Attempt]:
        conditions, parameters = ["1 = 1"], []
        for name, value in (("pipeline", pipeline), ("status", status)):
            if value is not None:
                conditions.append(f"r.{name} = ?")
                parameters.append(value)
        if since is not None:
            conditions.append(f"r.started_at >= {self.tables.moment(since)}")
        order = f"ORDER BY r.started_at DESC, r.run_id, r.attempt DESC LIMIT {int(limit)}"
        with self.session("read") as session:
            return self.attempts(session, f"WHERE {' AND '.join(conditions)} {order}", parameters)

    def run(self, run_id: str) -> list[Attempt]:
        with self.session("read") as session:
            return self.attempts_at(session, run_id)

    def forget(self, pipeline: str, keep: int) -> None:
        attempts = self.runs(pipeline, None, None, keep + 1)
        if len(attempts) > keep:
            since = self.tables.moment(attempts[-2].started_at)
            with self.session("publish") as session:
                session.run(
                    f"DELETE FROM {self.runs_table} WHERE pipeline = ? AND started_at < {since} "
                    "AND status = 'succeeded' AND slot IS NULL",
                    (pipeline,),
                )

    def attempts(self, session: Session, rest: str, parameters: Sequence[Any]) -> list[Attempt]:
        """Return the attempts that the rest of a query over `runs r` selects."""
        rows = session.rows(f"SELECT {self.columns('r')} FROM {self.runs_table} r {rest}", parameters)
        return [attempt for row in rows if (attempt := attempt_of(row)) is not None]

    def attempts_at(self, session: Session, run_id: str) -> list[Attempt]:
        """Return all attempts at a run, the first one first; none where the log has no such run."""
        return self.attempts(session, "WHERE r.run_id = ? ORDER BY r.attempt", (run_id,))

    def columns(self, alias: str) -> str:
        return ", ".join(f"{alias}.{self.tables.quote(name)}" for name in _RUNS.names)


class _LockedRow(LockedPipeline):
    """The row of a pipeline, locked until its transaction ends."""

    def __init__(self, session: Session, book: LogTables, claim: Claim) -> None:
        self._session, self._book, self.claim = session, book, claim

    def attempts_at(self, run_id: str, since: datetime | None = None) -> list[Attempt]:
        return self._book.attempts_at(self._session, run_id)

    def add(self, values: Mapping[str, Any]) -> None:
        insert_row(self._book.tables, self._session, self._book.runs_table, values)

    def end(self, run_id: str, attempt: int, values: Mapping[str, Any], was: Status = "running") -> None:
        where = "run_id = ? AND attempt = ? AND status = ?"
        self._book.update(self._session, self._book.runs_table, values, where, (run_id, attempt, was))

    def change(self, values: Mapping[str, Any]) -> None:
        known = self._book.known(values)
        self._book.update(self._session, self._book.claims, known, "pipeline = ?", (self.claim.pipeline,))


def insert_row(tables: SqlTables, session: Session, table: str, values: Mapping[str, Any]) -> None:
    sql, parameters = _placeholders(tables, values)
    columns = ", ".join(map(tables.quote, sql))
    session.run(f"INSERT INTO {table} ({columns}) VALUES ({', '.join(sql.values())})", parameters)


def _placeholders(tables: SqlTables, values: Mapping[str, Any]) -> tuple[dict[str, str], list[Any]]:
    """Return placeholders, or literals where drivers differ about a type; and the values of the placeholders."""
    sql, parameters = {}, []
    for name, value in values.items():
        if value is None:
            sql[name] = "NULL"
        elif isinstance(value, datetime):
            sql[name] = tables.moment(value)
        else:
            sql[name] = "?"
            parameters.append(json.dumps(value, default=str) if isinstance(value, dict) else value)
    return sql, parameters


def attempt_of(row: Sequence[Any]) -> Attempt | None:
    """Return an attempt from its columns, or `None` where a join had no row."""
    if row[0] is None:
        return None
    values = dict(zip(_RUNS.names, row, strict=True))
    for name in ("slot", "started_at", "finished_at", "retry_at"):
        values[name] = instant(values[name])
    values["metrics"] = None if values["metrics"] is None else json.loads(values["metrics"])
    return Attempt(**values)


def statements(tables: SqlTables, runs: str, claims: str) -> list[str]:
    names = {"runs": runs, "claims": claims}
    creates = []
    for name, (schema, key) in _TABLES.items():
        definitions = [
            f"{tables.quote(field.name)} {tables.sql_type(field, key=field.name in _SHORT)}"
            f"{'' if field.nullable else ' NOT NULL'}"
            for field in schema
        ]
        definitions.append(f"PRIMARY KEY ({', '.join(map(tables.quote, key))})")
        if name == "runs":
            definitions += filter(None, map(tables.index_clause, _INDEXES))
        creates.append(f"CREATE TABLE IF NOT EXISTS {names[name]} (\n  " + ",\n  ".join(definitions) + "\n)")
    indexes = [tables.create_index(f"runs_by_{columns[0]}", runs, columns) for columns in _INDEXES]
    return creates + [each for each in indexes if each is not None]


def ddl(kind: str) -> str:
    """Return the statements that create a run log's tables: for sqlite, postgres, mysql, mariadb or duckdb."""
    known = schemes()
    if kind not in known:
        close = nearest(kind, known)
        hint = f"Did you mean {close!r}? " if close else ""
        raise DeclarationError(f"There is no run log of kind {kind!r}.", hint=f"{hint}Kinds: {', '.join(known)}.")
    connection = build_connection(None, {"url": f"{kind}:///weft"}, "ddl")
    tables: SqlTables = system_for(connection.kind).load_tables()(connection)
    tables.assume(kind)
    return _script(tables)


def schemes() -> list[str]:
    """Return the schemes that the URL of a run log may have: those of all systems with tables."""
    return [scheme for system in systems().values() if system.tables for scheme in system.schemes]


def _script(tables: SqlTables) -> str:
    """Return the statements for a person to run."""
    quote = tables.quote
    if tables.driver.has_schemas:
        schema = [f"CREATE SCHEMA IF NOT EXISTS {quote('weft')}"]
        names = [f"{quote('weft')}.{quote(table)}" for table in _TABLES]
    else:
        schema, names = [], [quote(f"weft.{table}") for table in _TABLES]
    return ";\n".join([*schema, *statements(tables, *names)]) + ";\n"
