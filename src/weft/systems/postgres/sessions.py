"""Sessions on PostgreSQL, and what the server's errors mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any, ClassVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.string import TextBinaryLoader, TextLoader

from weft import settings
from weft.errors import (
    MAYBE_STORED,
    NOTHING_STORED,
    BusyError,
    ConnectionFailedError,
    DeclarationError,
    SchemaError,
    StorageError,
    WeftError,
)
from weft.systems.postgres.connection import PostgresConnection
from weft.systems.sql.driver import MissingTableError, Role, Session, SqlDriver, closed_on_error, readable

# How long a statement waits for somebody's lock before it gives up with an error.
LOCK_SECONDS = 30
# The key of the advisory lock around CREATE: "weft" in ASCII. Two-part keys never meet the one-part keys of appends.
_CREATE_LOCK = f"{0x77656674}, 0"
# PostgreSQL cuts longer names without an error, and two of them could become one.
_NAME_BYTES = 63

_DEFAULTS: dict[str, str | int] = {
    "connect_timeout": 10,
    "application_name": "weft",
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


class PostgresSessions(SqlDriver):
    """Pooled connections to a PostgreSQL database."""

    dialect: ClassVar[str] = "postgres"
    driver_error: ClassVar[type[BaseException]] = psycopg.Error
    connection: PostgresConnection
    configuration: ClassVar[dict[str, str]] = {"TimeZone": "UTC", "default_transaction_isolation": "read committed"}
    """Settings of the server, by their names."""
    is_pooled = False
    """Whether a pooler answers: each transaction may be in another session of the server, which others have set up."""

    # ------------------------------------------------------------------------------------------------------ connections

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of libpq: those of the URL, and our defaults for the others."""
        return {**_DEFAULTS, **conninfo_to_dict(self.connection.url), "client_encoding": "UTF8"}

    def connect(self, role: Role) -> psycopg.Connection[Any]:
        return self.connect_as(role, autocommit=role == "read")

    def connect_as(self, role: Role, *, autocommit: bool) -> psycopg.Connection[Any]:
        """Return a connection for a role, in autocommit mode or not."""
        try:
            driver = psycopg.connect(**self.parameters(), autocommit=True)
            with closed_on_error(driver):
                # One round trip; as startup options they would replace those of the URL, and poolers refuse them.
                is_pooled = f"pg_backend_pid() <> {driver.info.backend_pid}"
                row = driver.execute(f"SELECT {is_pooled}, {self._settings(role, is_pooled)}").fetchone()
                if row is not None and row[0]:
                    self.is_pooled = True
                    driver.prepare_threshold = None  # in another session nothing was prepared
                # Of each transaction, not of the session: one that begins by another default sees no later commit, so
                # that a consumer would skip what appears below what it sees.
                driver.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
                driver.autocommit = autocommit
                # Load JSON as text, to be decoded a column at a time.
                driver.adapters.register_loader("json", TextLoader)
                driver.adapters.register_loader("json", TextBinaryLoader)
        except psycopg.Error as error:
            # Only a server says FATAL; libpq gives no SQLSTATE here.
            said = str(error)
            raise self.connection.unreachable(error, answered="FATAL" in said, denied=_denies(said)) from None
        return driver

    def _settings(self, role: Role, is_local: str) -> str:
        """Return the expressions that set up a session; with `is_local` true, what others in it must not have until the
        end of the transaction alone."""
        # A server that waits for its replicas keeps doing so: only `off` is made stricter.
        durability = "coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on')"
        if role == "keep" and not self.connection.durable_acks:
            durability = "'off'"
        configuration = {**self.configuration, "lock_timeout": f"{LOCK_SECONDS}s"}
        others = (f"set_config('{name}', '{value}', false)" for name, value in configuration.items())
        return ", ".join((f"set_config('synchronous_commit', {durability}, {is_local})", *others))

    def connect_adbc(self, dbapi: Any) -> Any:
        """A connection of the ADBC driver, which reads Arrow: ranges of streams and queries of loads."""
        driver = dbapi.connect(make_conninfo(**self.parameters()), autocommit=True)
        with closed_on_error(driver), closing(driver.cursor()) as cursor:
            cursor.execute("SET TimeZone = 'UTC'")
        return driver

    def explain_adbc(self, dbapi: Any, error: Exception) -> WeftError:
        """An error of the ADBC driver as one of Weft, without secrets."""
        text = " ".join(settings.redact(str(error), self.connection.secrets()).split())
        what = f"PostgreSQL ({self.connection.target}): {text}"
        if not isinstance(error, dbapi.OperationalError):
            return WeftError(what)
        code = getattr(error, "sqlstate", None) or ""
        is_denied = code.startswith(_UNKNOWN) if code else _denies(text)
        return ConnectionFailedError(what, is_transient=not is_denied and (not code or code.startswith(_LOST)))

    def begin(self, driver: psycopg.Connection[Any], role: Role) -> None:
        if driver.prepare_threshold is None and role != "read":
            driver.execute(f"SELECT {self._settings(role, 'true')}")
        if self.silent_seconds is not None and role != "read":
            # Not of the session: where a pooler hands out single transactions, the next one is a stranger's.
            driver.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{self.silent_seconds}s'")

    def rollback(self, driver: psycopg.Connection[Any]) -> None:
        if driver.closed:
            raise psycopg.OperationalError("the connection is closed")
        driver.rollback()

    def execute(
        self, driver: psycopg.Connection[Any], sql: str, parameters: Sequence[Any] | None
    ) -> psycopg.Cursor[Any]:
        """Run a statement; results come in binary, which is faster to read."""
        # A prepared SELECT * fails once somebody has added a column.
        prepare = False if sql.startswith("SELECT *") else None
        return driver.cursor(binary=True).execute(sql, parameters, prepare=prepare)

    def has_input(self, driver: psycopg.Connection[Any]) -> bool:
        """The end of the connection, or a message."""
        return driver.closed or readable(driver.fileno())

    def alive(self, driver: psycopg.Connection[Any]) -> bool:
        try:
            driver.execute("SELECT 1")
            driver.rollback()
        except psycopg.Error:
            return False
        return True

    def explain(self, error: BaseException) -> WeftError:
        """Map by SQLSTATE; https://www.postgresql.org/docs/current/errcodes-appendix.html lists them."""
        assert isinstance(error, psycopg.Error)
        code = error.sqlstate or ""
        said = " ".join((error.diag.message_primary or str(error)).split())
        what = f"PostgreSQL ({self.connection.target}): {settings.redact(said, self.connection.secrets())}"
        outside = isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
        if code.startswith((*_LOST, *_UNKNOWN)) or (outside and not code):
            hint = f"The connection is lost. {MAYBE_STORED}"
            return ConnectionFailedError(what, hint=hint, is_transient=not code.startswith(_UNKNOWN))
        if code in _BUSY:
            return BusyError(what, hint=f"{NOTHING_STORED} Somebody else held a lock for too long; try again.")
        if code.startswith(_FULL):
            # A server that cannot write its own log stops at once: it may have been about to confirm a commit.
            stored = NOTHING_STORED
            if error.diag.severity_nonlocalized in ("FATAL", "PANIC"):
                stored = f"The server stopped. {MAYBE_STORED}"
            return StorageError(what, hint=f"{stored} Free disk space, or use a server that can be written.")
        if isinstance(error, psycopg.DataError) or code.startswith("54"):
            return SchemaError(what)
        if code in _MISSING:
            return MissingTableError(what)
        if code == "42501":
            return WeftError(
                what,
                hint="GRANT it what docs/streams.md lists under Rights in the database. Tables are made at first use, "
                "which needs CREATE on the database, or on the schema weft and the stream's own.",
            )
        return WeftError(what)

    # ------------------------------------------------------------------------------------------------------------ names

    def create_schema(self, session: Session, schema: str) -> None:
        """Create a schema where it is missing; nobody else creates anything until the transaction ends."""
        # Two CREATE … IF NOT EXISTS at once can both find nothing, and the second fails: one at a time.
        session.run(f"SELECT pg_advisory_xact_lock({_CREATE_LOCK})")
        # CREATE SCHEMA IF NOT EXISTS needs the right to create schemas even where there is nothing to create.
        if not self.has_schema(session, schema):
            session.run(f"CREATE SCHEMA {self.quote(schema)}")

    def has_schema(self, session: Session, schema: str) -> bool:
        return session.row("SELECT 1 FROM pg_namespace WHERE nspname = ?", (schema,)) is not None

    def quote(self, name: str) -> str:
        if len(name.encode()) > _NAME_BYTES:
            raise DeclarationError(f"The name {name!r} is too long for PostgreSQL, which takes {_NAME_BYTES} bytes.")
        return super().quote(name)


def _denies(said: str) -> bool:
    """Return whether a server that was asked for a connection says that it knows no such user, password or database;
    in other languages than English it seems to be gone for a while."""
    # Names are quoted, and may be any words.
    return re.search(_DENIED, re.sub(r'"[^"]*"', '""', said), re.DOTALL) is not None


# Connection exceptions, too many connections, ended by a timeout or an administrator.
_LOST = ("08", "53300", "25P03", "57P")
# Authorisation, no such database.
_UNKNOWN = ("28", "3D000")
# "No such" is what PgBouncer says.
_DENIED = (
    r"(FATAL|fe_sendauth):.*(authentication failed|no password supplied|empty password|no pg_hba\.conf entry|"
    r'pg_hba\.conf rejects|(role|database) "" does not exist|permission denied|not permitted to log in|'
    r"not currently accepting|no such (user|database))"
)
# No such table or sequence, no such schema.
_MISSING = ("42P01", "3F000")
# Serialization failure, deadlock, lock timeout, cancelled (by statement_timeout, most often).
_BUSY = ("40001", "40P01", "55P03", "57014")
# Out of disk, memory or other resources; an I/O error; a read-only server.
_FULL = ("53", "58", "25006")
