"""The two tables of a run log, and the words in which databases differ about them.

`weft.runs` has a row an attempt. The number of a scheduled run follows from pipeline and slot, so the primary key alone
keeps one from being begun twice. `weft.claims` has a row a pipeline: whose turn it is, and which rows of `weft.runs`
say how it stands, so that this can be asked of a thousand pipelines at once however long their history is.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from functools import cached_property
from typing import IO, Any

import pyarrow as pa

from weft.errors import DeclarationError, SettingsError, WeftError, nearest
from weft.operate.records import COUNTS, Attempt
from weft.project import build_connection
from weft.systems.base import system_for
from weft.systems.file import MEMORY
from weft.systems.sql.driver import Role, Session
from weft.systems.sql.tables import SqlTables

_INSTANT = pa.timestamp("us", "UTC")
_RUNS = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int64(), nullable=False),
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("slot", _INSTANT),
        pa.field("status", pa.string(), nullable=False),
        pa.field("engine", pa.string()),
        pa.field("host", pa.string()),
        pa.field("pid", pa.int64()),
        pa.field("owner", pa.string()),
        pa.field("started_at", _INSTANT, nullable=False),
        pa.field("finished_at", _INSTANT),
        *(pa.field(name, pa.int64()) for name in COUNTS),
        pa.field("error", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("retry_at", _INSTANT),
        pa.field("metrics", pa.string()),
    ]
)
_CLAIMS = pa.schema(
    [
        pa.field("pipeline", pa.string(), nullable=False),
        pa.field("fence", pa.int64(), nullable=False),
        # Of the attempt that runs, else of the last one.
        pa.field("run_id", pa.string()),
        pa.field("attempt", pa.int64()),
        # Null where nobody runs it.
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

# The server's clock at this statement, not at the beginning of the transaction, which may have waited for a lock.
_NOW = {
    "sqlite": "strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now')",
    "postgres": "clock_timestamp()",
    "mysql": "UTC_TIMESTAMP(6)",
    "duckdb": "now()",
}
_LOCKS_ROWS = ("postgres", "mysql")  # the others have one writer
_HAVE_SCHEMAS = ("postgres", "duckdb")

_TURN_SECONDS, _TURN_PAUSE = 30.0, 0.002

COLUMNS = tuple(each.name for each in fields(Attempt))


class LogTables:
    """`weft.runs` and `weft.claims` in one database."""

    def __init__(self, tables: SqlTables) -> None:
        if tables.dialect not in _NOW:
            raise DeclarationError(
                f"A run log cannot be kept in a {tables.dialect} database.", hint=f"These can: {', '.join(_NOW)}."
            )
        self.tables = tables
        self.now = _NOW[tables.dialect]
        self.for_update = " FOR UPDATE" if tables.dialect in _LOCKS_ROWS else ""

    @cached_property
    def runs(self) -> str:
        """The quoted name."""
        return self.tables.driver.table("weft", "runs")

    @cached_property
    def claims(self) -> str:
        """The quoted name."""
        return self.tables.driver.table("weft", "claims")

    @contextmanager
    def session(self, role: Role) -> Iterator[Session]:
        """A transaction, or a read."""
        with self._turn(role), self.tables.driver.session(role) as session:
            yield session

    @contextmanager
    def _turn(self, role: Role) -> Iterator[None]:
        """DuckDB's file can be opened by one process at a time, and whoever waits longest asks least often: beside busy
        ones it would never get it. So those who use it as a log take turns before they ask."""
        path = getattr(self.tables.connection, "path", MEMORY)
        with ExitStack() as stack:
            if self.tables.dialect == "duckdb" and path != MEMORY:
                # Where no lock can be made the database will say why.
                with suppress(OSError):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    _wait_for(stack.enter_context(open(f"{path}.lock", "a")), exclusive=role != "read")
            yield

    # --------------------------------------------------------------------------------------------------------- creation

    def check(self, *, write: bool) -> None:
        """Raise unless both tables are there, and can be written where that is asked."""
        with self.session("publish" if write else "read") as session:
            for table in (self.runs, self.claims):
                session.rows(f"SELECT 1 FROM {table} WHERE 1 = 0")
            if write:
                # Changes nothing, and is refused by whatever cannot be written.
                session.run(f"UPDATE {self.claims} SET fence = fence WHERE 1 = 0")

    def create(self) -> None:
        """Make the tables where they are missing; somebody else may do so at the same moment."""
        with self.session("publish") as session:
            if self.tables.dialect in _HAVE_SCHEMAS:
                self.tables.create_schema(session, "weft")
            for statement in statements(self.tables, self.runs, self.claims):
                session.run(statement)

    def missing(self, reason: WeftError) -> SettingsError:
        """What to say where the tables are not there and may not be made."""
        return SettingsError(
            f"The run log {self.tables.connection.target} has no usable tables, and create_tables=false forbids to "
            f"make them: {reason.what}",
            hint=f"Create them:\n{_script(self.tables)}",
        )

    # ------------------------------------------------------------------------------------------------------------- rows

    def moment(self, value: datetime | None) -> str:
        """A literal of an instant."""
        return "NULL" if value is None else self.tables.moment(value)

    def insert(self, session: Session, values: dict[str, Any]) -> None:
        """Add a row to `weft.runs`."""
        sql, parameters = self._values(values)
        session.run(
            f"INSERT INTO {self.runs} ({', '.join(map(self.tables.quote, sql))}) VALUES ({', '.join(sql.values())})",
            parameters,
        )

    def update(
        self, session: Session, table: str, values: dict[str, Any], where: str, parameters: Sequence[Any]
    ) -> None:
        """Change rows of one of the two tables."""
        sql, given = self._values(values)
        changes = ", ".join(f"{self.tables.quote(name)} = {value}" for name, value in sql.items())
        session.run(f"UPDATE {table} SET {changes} WHERE {where}", [*given, *parameters])

    def _values(self, values: dict[str, Any]) -> tuple[dict[str, str], list[Any]]:
        """Placeholders, or literals where drivers differ about a type; and what stands for the placeholders."""
        sql, parameters = {}, []
        for name, value in values.items():
            if value is None or isinstance(value, datetime):
                sql[name] = self.moment(value)
            else:
                sql[name] = "?"
                parameters.append(value)
        return sql, parameters

    def columns(self, alias: str) -> str:
        """The columns of an `Attempt`."""
        return ", ".join(f"{alias}.{self.tables.quote(name)}" for name in COLUMNS)


def _wait_for(file: IO[str], *, exclusive: bool) -> None:
    """Lock a file; it is unlocked when it is closed. Who holds it for very long is not waited for."""
    deadline = time.monotonic() + _TURN_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_TURN_PAUSE)


def attempt_of(row: Sequence[Any]) -> Attempt | None:
    """An attempt from its columns, or `None` where a join found none."""
    if row[0] is None:
        return None
    values = dict(zip(COLUMNS, row, strict=True))
    for name in ("slot", "started_at", "finished_at", "retry_at"):
        values[name] = instant(values[name])
    values["metrics"] = None if values["metrics"] is None else json.loads(values["metrics"])
    return Attempt(**values)


def instant(value: Any) -> datetime | None:
    """A timestamp as a driver gives it: a text, or a time that is in UTC if it does not say."""
    if value is None:
        return None
    moment: datetime = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def statements(tables: SqlTables, runs: str, claims: str) -> list[str]:
    """The DDL of both tables."""
    made, indexes = [], []
    for name, (schema, key) in _TABLES.items():
        definitions = [
            f"{tables.quote(field.name)} {tables.sql_type(field, key=field.name in _SHORT)}"
            f"{'' if field.nullable else ' NOT NULL'}"
            for field in schema
        ]
        definitions.append(f"PRIMARY KEY ({', '.join(map(tables.quote, key))})")
        if name == "runs":
            for columns in _INDEXES:
                listed = ", ".join(map(tables.quote, columns))
                # MySQL has no CREATE INDEX IF NOT EXISTS, and DuckDB needs none: it keeps what each block of rows has.
                if tables.dialect == "mysql":
                    definitions.append(f"INDEX ({listed})")
                elif tables.dialect != "duckdb":
                    prefix = "weft." if tables.dialect == "sqlite" else ""
                    index = tables.quote(f"{prefix}runs_by_{columns[0]}")
                    indexes.append(f"CREATE INDEX IF NOT EXISTS {index} ON {runs} ({listed})")
        table = runs if name == "runs" else claims
        made.append(f"CREATE TABLE IF NOT EXISTS {table} (\n  " + ",\n  ".join(definitions) + "\n)")
    return made + indexes


_PLACES = {
    "sqlite": "sqlite:///runs.db",
    "postgres": "postgres://localhost/weft",
    "mysql": "mysql://localhost/weft",
    "mariadb": "mysql://localhost/weft",
    "duckdb": "duckdb:///runs.duckdb",
}


def ddl(kind: str) -> str:
    """The statements that make a run log's tables: for sqlite, postgres, mysql, mariadb or duckdb."""
    if kind not in _PLACES:
        close = nearest(kind, _PLACES)
        hint = f"Did you mean {close!r}? " if close else ""
        raise DeclarationError(f"There is no run log of kind {kind!r}.", hint=f"{hint}Kinds: {', '.join(_PLACES)}.")
    system = system_for("mysql" if kind == "mariadb" else kind)
    tables: SqlTables = system.load_tables()(build_connection(None, {"url": _PLACES[kind]}, "ddl"))
    if system.kind == "mysql":
        # Else it would ask the server which of the two it is.
        vars(tables)["_is_mariadb"] = kind == "mariadb"
    return _script(tables)


def _script(tables: SqlTables) -> str:
    """The statements for a person to run."""
    quote = tables.quote
    if tables.dialect in _HAVE_SCHEMAS:
        made = [f"CREATE SCHEMA IF NOT EXISTS {quote('weft')}"]
        names = [f"{quote('weft')}.{quote(table)}" for table in _TABLES]
    else:
        made, names = [], [quote(f"weft.{table}") for table in _TABLES]
    return ";\n".join([*made, *statements(tables, *names)]) + ";\n"
