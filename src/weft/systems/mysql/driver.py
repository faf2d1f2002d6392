"""PyMySQL's connection, as streams need it."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from functools import cache
from typing import Any

import pymysql
from pymysql.constants import FIELD_TYPE
from pymysql.converters import conversions

from weft.systems.mysql.connection import with_utf8_password
from weft.systems.sql.driver import closed_on_error

# How long a statement waits for somebody's lock before it gives up with an error.
LOCK_SECONDS = 30

# How long it may take to reach the server once more, to end a statement there.
_STOP_SECONDS = 5

# What GROUP_CONCAT of a user's query may give at once: no more than a packet has by default.
_JOINED_BYTES = 16 * 1024 * 1024

# Each statement sees what is committed at its start: a reader's head must not come from an older view than its locks.
_ISOLATION = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"

# Dates and times stay texts, which are decoded a column at a time.
_CONVERSIONS = {
    key: convert
    for key, convert in conversions.items()
    if key not in (FIELD_TYPE.DATE, FIELD_TYPE.DATETIME, FIELD_TYPE.TIMESTAMP, FIELD_TYPE.TIME)
}
# A peer that vanished silently is noticed within a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


class Driver(pymysql.Connection):
    """A connection with our session settings."""

    def __init__(self, **parameters: Any) -> None:
        self.at_end: list[str] = []
        """The statements to run when the transaction is over."""
        self._parameters = parameters
        super().__init__(**parameters)

    def connect(self, sock: socket.socket | None = None) -> None:
        """Connect, and notice dead peers soon."""
        super().connect(sock)
        opened = self._sock  # type: ignore[attr-defined]
        if opened.family != socket.AF_UNIX:
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def query(self, sql: Any, unbuffered: bool = False) -> int:
        """Run a statement. A signal that stops this process also stops the statement on the server, which would
        otherwise run to its end and hold its locks, because it does not notice that nobody waits for its answer."""
        try:
            return int(super().query(sql, unbuffered))
        except Exception:
            raise
        except BaseException:
            if not self.open:
                self._end_on_server()
            raise

    def _end_on_server(self) -> None:
        # Stopping this process must not wait for a server that has stopped: the statement ended with it.
        with suppress(Exception):
            limits = dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), _STOP_SECONDS)
            other = pymysql.Connection(**{**self._parameters, **limits})
            try:
                other.query(f"KILL {self.thread_id()}")  # type: ignore[no-untyped-call]
            finally:
                other.close()

    @property
    def file(self) -> int:
        """The number of the socket."""
        return int(self._sock.fileno())  # type: ignore[attr-defined]

    def is_mariadb(self) -> bool:
        """Whether the server is MariaDB, as it says itself."""
        return "mariadb" in str(self.server_version).lower()  # type: ignore[attr-defined]

    def clean_up(self) -> None:
        """Run what was left for the end of the transaction."""
        while self.at_end:
            self.query(self.at_end.pop())

    def cut(self) -> None:
        """Close the connection without the protocol's farewell: an answer may still be under way."""
        self._force_close()  # type: ignore[attr-defined]

    def end(self) -> None:
        """End the connection that another thread uses: it gets no answer any more, and closes it itself."""
        with suppress(OSError, AttributeError):  # it ended meanwhile
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # type: ignore[attr-defined]

    def _create_ssl_ctx(self, sslp: Any) -> ssl.SSLContext:
        if not sslp:
            # The URL asks for nothing: PyMySQL encrypts if the server can, and verifies nobody. Yet it would load the
            # machine's certificates for that, which takes 30 times as long as to connect.
            return _unverified()
        context: ssl.SSLContext = super()._create_ssl_ctx(sslp)  # type: ignore[misc]
        # PyMySQL compares the host's name only where a CA file is given, not with the machine's own authorities.
        context.check_hostname = context.check_hostname or bool(sslp.get("check_hostname"))
        return context


@cache
def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def connect(parameters: dict[str, Any], *, autocommit: bool) -> Driver:
    """A connection by the parameters of a URL. What the encoding of values rests on is not the URL's to choose."""
    chosen = {name: value for name, value in parameters.items() if name not in ("charset", "collation", "sql_mode")}
    # Strict: no value is stored altered. Neither ANSI_QUOTES nor NO_BACKSLASH_ESCAPES: publishes quote as JSON does.
    session = (
        "SET SESSION sql_mode = 'STRICT_TRANS_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,"
        f"NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', group_concat_max_len = {_JOINED_BYTES}, "
        f"innodb_lock_wait_timeout = {LOCK_SECONDS}, lock_wait_timeout = {LOCK_SECONDS}"
    )
    driver = Driver(
        **with_utf8_password(chosen),
        charset="utf8mb4",
        init_command=session,
        autocommit=autocommit,
        conv=_CONVERSIONS,
        program_name="weft",
    )
    with closed_on_error(driver):
        driver.query(_ISOLATION)
    return driver
