"""How to reach a MySQL or MariaDB server."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal
from urllib.parse import unquote, urlsplit

from weft import settings
from weft.errors import SettingsError
from weft.systems.base import SIGN_IN_HINT, Connection, measured, require
from weft.systems.sql.tokens import quote_name
from weft.systems.url_parameters import flag, url_parameters

# The parameters after the `?` of a URL, each an argument of pymysql.connect, and how its text is read.
_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "unix_socket": str,
    "charset": str,
    "collation": str,
    "sql_mode": str,
    "connect_timeout": float,
    "read_timeout": float,
    "write_timeout": float,
    "ssl_ca": str,
    "ssl_cert": str,
    "ssl_key": str,
    "ssl_key_password": str,
    "ssl_verify_cert": flag,
    "ssl_verify_identity": flag,
    "ssl_disabled": flag,
    "compress": flag,
}


def with_utf8_password(parameters: dict[str, Any]) -> dict[str, Any]:
    """As Latin-1, which PyMySQL takes for texts, a password with other letters than ASCII's is another or none."""
    password = parameters.get("password")
    return parameters if password is None else {**parameters, "password": password.encode()}


@dataclass(frozen=True)
class MySQLConnection(Connection):
    """A MySQL or MariaDB database: `MySQLConnection("mysql://user:${PASSWORD}@host:3306/database")`.

    Special characters in the URL are percent-encoded. `?unix_socket=/run/mysqld/mysqld.sock` takes the place of a host.
    """

    kind: ClassVar[str] = "mysql"

    url: str = field(metadata={"url": True})

    def validate(self) -> None:
        """Once nothing is left to substitute, the URL can be taken apart."""
        super().validate()
        if self._is_resolved:
            self.parameters()

    def parameters(self) -> dict[str, Any]:
        """The arguments of `pymysql.connect`: host, port, user, password, database, and what follows the `?`."""
        url = self.resolved().url
        try:
            parts = urlsplit(url)
            port = parts.port
            database = unquote(parts.path.removeprefix("/"), errors="strict")
            user, password = (unquote(text or "", errors="strict") for text in (parts.username, parts.password))
        except ValueError:
            # Without the cause, which would quote a piece of the URL.
            raise self._malformed(
                "cannot be read", "A special character in it must be percent-encoded: %40 for @."
            ) from None
        if "/" in database or parts.fragment:
            raise self._malformed("has more than a database after the host", "Encode / as %2F and # as %23.")
        arguments: dict[str, Any] = {"host": parts.hostname or "localhost", "port": port or 3306, "charset": "utf8mb4"}
        arguments |= {"user": user, "password": password} if user or password else {}
        arguments |= {"database": database} if database else {}
        return arguments | url_parameters(parts.query, _PARAMETERS, self._malformed)

    def stream_table(self, stream: Any) -> str:
        """There are no schemas: the table is called `schema.name`."""
        return quote_name(f"{stream.schema}.{stream.name}", "`")

    def reports_missing(self, error: str) -> Literal["table", "database"] | None:
        """In the server's words."""
        if re.search("Unknown database", error, re.IGNORECASE):
            return "database"
        return "table" if re.search("doesn't exist", error, re.IGNORECASE) else None

    def check(self) -> dict[str, Any]:
        """Connect and ask for the server's version."""
        pymysql = require("pymysql", self.kind)
        report: dict[str, Any] = {}
        try:
            connected = closing(pymysql.connect(**with_utf8_password(self.parameters())))
            with connected as connection, connection.cursor() as cursor, measured(report):
                cursor.execute("SELECT VERSION(), DATABASE()")
                version, database = cursor.fetchone()
        except (pymysql.Error, OSError) as error:
            raise self.failed(error, hint=SIGN_IN_HINT) from None
        server = "" if "mariadb" in version.lower() else "MySQL "
        if database is None:
            report["warning"] = "Streams need a database. Name one in the URL: mysql://user@host/database"
        return {"server": f"{server}{version}", "database": database, **report}

    def _malformed(self, what: str, hint: str | None) -> SettingsError:
        what = settings.redact(what, settings.url_secrets(self.resolved().url))
        return SettingsError(f"The URL of {self.label} {what}.", hint=hint)
