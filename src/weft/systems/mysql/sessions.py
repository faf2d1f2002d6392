"""Sessions on MySQL and MariaDB, and what the server's errors mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pymysql
from pymysql.constants import CR, ER

from weft import settings
from weft.errors import (
    MAYBE_STORED,
    NOTHING_STORED,
    BusyError,
    ConnectionFailedError,
    SchemaError,
    StorageError,
    WeftError,
)
from weft.systems.mysql.connection import MySQLConnection
from weft.systems.mysql.driver import Driver, connect
from weft.systems.sql.driver import MissingTableError, Role, SqlDriver, closed_on_error, readable

_SILENCE = "idle_transaction_timeout"


class MySQLSessions(SqlDriver):
    """Pooled connections. There are no schemas: what is `name` in schema `schema` elsewhere is `schema.name` here."""

    dialect: ClassVar[str] = "mysql"
    quotation_mark: ClassVar[str] = "`"
    has_schemas: ClassVar[bool] = False
    driver_error: ClassVar[type[BaseException]] = pymysql.Error
    connection: MySQLConnection

    # ------------------------------------------------------------------------------------------------------ connections

    def connect(self, role: Role) -> Driver:
        """A connection; only readers are in autocommit mode."""
        try:
            driver = connect(self.connection.parameters(), autocommit=role == "read")
            with closed_on_error(driver):
                self._limit_silence(driver)
            return driver
        except (pymysql.Error, RuntimeError) as error:  # RuntimeError: the package cryptography is missing
            code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
            answered = code >= 1000 and code // 1000 != 2  # those from 2000 on are the client's own
            # A later statement may name a database that the user may not use; here it is that of the connection.
            is_denied = code in _UNKNOWN or code == ER.DBACCESS_DENIED_ERROR
            raise self.connection.unreachable(error, answered=answered, denied=is_denied) from None

    def _limit_silence(self, driver: Driver) -> None:
        if self.silent_seconds is None:
            return
        try:
            driver.query(f"SET SESSION {_SILENCE} = {self.silent_seconds}")
        except pymysql.OperationalError as error:
            if error.args[0] != ER.UNKNOWN_SYSTEM_VARIABLE:  # MySQL has none, nor has MariaDB before 10.3
                raise

    def execute(self, driver: Driver, sql: str, parameters: Sequence[Any] | None) -> Any:
        cursor = driver.cursor()
        try:
            cursor.execute(sql, None if parameters is None else tuple(parameters))
        except pymysql.OperationalError as error:
            if error.args[0] == ER.NO_DB_ERROR:  # somebody dropped the database: made again, it is another one
                driver.close()
            raise
        return cursor

    def has_input(self, driver: Driver) -> bool:
        """The end of the connection, or why the server ended it."""
        return not driver.open or readable(driver.file)

    def alive(self, driver: Driver) -> bool:
        try:
            driver.ping(reconnect=False)
        except pymysql.Error:
            return False
        return True

    def explain(self, error: BaseException) -> WeftError:
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        said = " ".join(str(error.args[1] if len(error.args) > 1 else error).split())
        said = settings.redact(said, self.connection.secrets()) or "the connection is closed"
        what = f"MySQL ({self.connection.target}): {said}" + (f" (error {code})." if code else ".")
        if code in _LOST or code in _UNKNOWN or isinstance(error, pymysql.InterfaceError):
            hint = f"The connection is lost. {MAYBE_STORED}"
            return ConnectionFailedError(what, hint=hint, is_transient=code not in _UNKNOWN)
        if code in BUSY:
            return BusyError(what, hint=f"{NOTHING_STORED} Somebody else held a lock for too long; try again.")
        if code in _FULL:
            return StorageError(what, hint=f"{NOTHING_STORED} Free disk space, or use a server that can be written.")
        if code in _DENIED:
            return WeftError(
                what,
                hint="Weft creates its tables at first use. Grant the user CREATE, ALTER, SELECT, INSERT, UPDATE and "
                "DELETE on the database.",
            )
        if code == ER.NO_SUCH_TABLE or (code == ER.NO_DB_ERROR and self.connection.parameters().get("database")):
            return MissingTableError(what)
        if code == ER.NO_DB_ERROR:
            return ConnectionFailedError(what, hint="Name a database in the URL: mysql://user@host/database.")
        if code in _TOO_LARGE or isinstance(error, pymysql.DataError):
            return SchemaError(what)
        return WeftError(what)


# No connection, refused, too many, shut down, killed, cut off, silent.
_LOST = {
    *range(CR.CR_CONNECTION_ERROR, CR.CR_SERVER_LOST + 1),
    *(ER.CON_COUNT_ERROR, ER.OUT_OF_RESOURCES),
    *(ER.SERVER_SHUTDOWN, ER.NORMAL_SHUTDOWN, ER.NEW_ABORTING_CONNECTION),
    *(ER.NET_READ_ERROR, ER.NET_READ_INTERRUPTED, ER.NET_ERROR_ON_WRITE, ER.NET_WRITE_INTERRUPTED),
    *(1203, 1226, 1317, 1927, 2055, 4031),
}
# A user, password or database that is not there; a user who may not sign in: from this host, by this method, at all.
_UNKNOWN = {
    *(ER.ACCESS_DENIED_ERROR, ER.BAD_DB_ERROR, ER.HOST_NOT_PRIVILEGED, ER.NOT_SUPPORTED_AUTH_MODE),
    *(1698, 1820, 1862, 3118, 4151),
}
# Lock wait timeout, deadlock, a row changed since it was read.
BUSY = {ER.LOCK_WAIT_TIMEOUT, ER.LOCK_DEADLOCK, ER.CHECKREAD}
# Disk full, table full, write errors; read-only.
_FULL = {
    *(ER.DISK_FULL, ER.RECORD_FILE_FULL, ER.ERROR_ON_WRITE, ER.OPTION_PREVENTS_STATEMENT),
    *(1026, 1030, 1036, 1792, 1836),
}
_DENIED = {ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR, ER.COLUMNACCESS_DENIED_ERROR, 1227}
# A packet, a row, a number of columns or of decimals (MySQL: 30) beyond the server's limits; a text that is none.
_TOO_LARGE = {ER.NET_PACKET_TOO_LARGE, ER.TOO_BIG_ROWSIZE, ER.TOO_MANY_FIELDS, 1425, 1366}
