"""The two tables of a run log, in the dialects of the databases.

`weft.runs` has a row for each attempt. The id of a scheduled run follows from pipeline and slot, so the primary key
alone keeps one from being begun twice. `weft.claims` has a row for each pipeline: its owner, and which rows of
`weft.runs` hold its state, so that one query gets the states of a thousand pipelines however long their history is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from types import NoneType
from typing import Any, get_args, get_type_hints

import pyarrow as pa

from weft.errors import DeclarationError, SettingsError, WeftError, nearest
from weft.operate.records import Attempt
from weft.options import variants
from weft.project import build_connection
from weft.systems.base import system_for, systems
from weft.systems.sql.driver import Role, Session
from weft.systems.sql.tables import SqlTables

_INSTANT = pa.timestamp("us", "UTC")
# Other values are stored as texts.
_ARROW_TYPES = {int: pa.int64(), datetime: _INSTANT}
_RUNS = pa.schema(
    pa.field(name, _ARROW_TYPES.get(variants(hint)[0], pa.string()), nullable=NoneType in get_args(hint))
    for name, hint in get_type_hints(Attempt).items()
)
_CLAIMS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("fence", pa.int64(), nullable=False),
        # Of the attempt that runs, else of the last one.
        pa.field("run_id", pa.string()),
        pa.field("attempt", pa.int64()),
        # Null where no process runs it.
        pa.field("owner", pa.string()),
        pa.field("expires_at", _INSTANT),
        # Of the last attempt that was for a slot, and of the last skip.
        pa.field("slot_run_id", pa.string()),
        pa.field("slot_attempt", pa.int64()),
        pa.field("skip_run_id", pa.string()),
        pa.field("failures", pa.int64(), nullable=False),
        pa.field("succeeded_at", _INSTANT),
    ]
)
_TABLES = {"runs": (_RUNS, ("run_id", "attempt")), "claims": (_CLAIMS, ("pipeline",))}
# What MySQL must be able to index.
_SHORT = {"run_id", "pipeline", "status", "slot_run_id", "skip_run_id"}
_INDEXES = (("started_at",), ("pipeline", "started_at"))


class LogTables:
    """`weft.runs` and `weft.claims` in one database."""

    def __init__(self, tables: SqlTables) -> None:
        if tables.clock is None:
            able = [system.kind for system in systems().values() if system.tables and system.kind != tables.dialect]
            raise DeclarationError(
                f"A run log cannot be kept in a {tables.dialect} database.", hint=f"These can: {', '.join(able)}."
            )
        self.tables = tables
        self.now = tables.clock
        self.for_update = tables.row_lock

    @cached_property
    def runs(self) -> str:
        return self.tables.driver.table("weft", "runs")

    @cached_property
    def claims(self) -> str:
        return self.tables.driver.table("weft", "claims")

    @contextmanager
    def session(self, role: Role) -> Iterator[Session]:
        with self.tables.waiting_turn(role), self.tables.driver.session(role) as session:
            yield session

    # --------------------------------------------------------------------------------------------------------- creation

    def check(self, *, write: bool) -> None:
        """Raise unless both tables exist, and with `write` can be written."""
        with self.session("publish" if write else "read") as session:
            for table in (self.runs, self.claims):
                session.rows(f"SELECT 1 FROM {table} WHERE 1 = 0")
            if write:
                # Changes nothing, and fails where the table cannot be written.
                session.run(f"UPDATE {self.claims} SET fence = fence WHERE 1 = 0")

    def create(self) -> None:
        """Create missing tables; another process may do so at the same moment."""
        with self.session("publish") as session:
            if self.tables.driver.has_schemas:
                self.tables.create_schema(session, "weft")
            for statement in statements(self.tables, self.runs, self.claims):
                session.run(statement)

    def missing(self, reason: WeftError) -> SettingsError:
        """Return the error for tables that do not exist and may not be created."""
        return SettingsError(
            f"The run log {self.tables.connection.target} has no usable tables, and create_tables=false forbids to "
            f"make them: {reason.what}",
            hint=f"Create them:\n{_script(self.tables)}",
        )

    # ------------------------------------------------------------------------------------------------------------- rows

    def insert(self, session: Session, values: dict[str, Any]) -> None:
        insert_row(self.tables, session, self.runs, values)

    def update(
        self, session: Session, table: str, values: dict[str, Any], where: str, parameters: Sequence[Any]
    ) -> None:
        sql, new = _placeholders(self.tables, values)
        changes = ", ".join(f"{self.tables.quote(name)} = {value}" for name, value in sql.items())
        session.run(f"UPDATE {table} SET {changes} WHERE {where}", [*new, *parameters])

    def attempts(self, session: Session, rest: str, parameters: Sequence[Any]) -> list[Attempt]:
        """Return the attempts that the rest of a query over `runs r` selects."""
        rows = session.rows(f"SELECT {self.columns('r')} FROM {self.runs} r {rest}", parameters)
        return [attempt for row in rows if (attempt := attempt_of(row)) is not None]

    def attempts_at(self, session: Session, run_id: str) -> list[Attempt]:
        """Return all attempts at a run, the first one first; none where the log has no such run."""
        return self.attempts(session, "WHERE r.run_id = ? ORDER BY r.attempt", (run_id,))

    def columns(self, alias: str) -> str:
        return ", ".join(f"{alias}.{self.tables.quote(name)}" for name in _RUNS.names)


def insert_row(tables: SqlTables, session: Session, table: str, values: dict[str, Any]) -> None:
    sql, parameters = _placeholders(tables, values)
    columns = ", ".join(map(tables.quote, sql))
    session.run(f"INSERT INTO {table} ({columns}) VALUES ({', '.join(sql.values())})", parameters)


def _placeholders(tables: SqlTables, values: dict[str, Any]) -> tuple[dict[str, str], list[Any]]:
    """Return placeholders, or literals where drivers differ about a type; and the values of the placeholders."""
    sql, parameters = {}, []
    for name, value in values.items():
        if value is None:
            sql[name] = "NULL"
        elif isinstance(value, datetime):
            sql[name] = tables.moment(value)
        else:
            sql[name] = "?"
            parameters.append(value)
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


def instant(value: Any) -> datetime | None:
    """Return a driver's timestamp in UTC: it may be a text, or a time without a zone, which is in UTC."""
    if value is None:
        return None
    moment: datetime = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


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
