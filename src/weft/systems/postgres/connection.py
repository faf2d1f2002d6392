"""How to reach a PostgreSQL server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weft.systems.base import SIGN_IN_HINT, Connection, measured, require
from weft.systems.sql.tokens import quote_name


@dataclass(frozen=True)
class PostgresConnection(Connection):
    """A PostgreSQL database: `PostgresConnection("postgres://user:${PASSWORD}@host:5432/database")`.

    The URL goes to libpq as it is, so every parameter of libpq is there (`?sslmode=require`, `?host=/run/postgresql`).
    """

    kind: ClassVar[str] = "postgres"

    url: str = field(metadata={"url": True})
    durable_acks: bool | None = field(default=None, kw_only=True)
    """Leases and acks wait for the disk, as publishes do: none is forgotten when the server crashes."""

    def stream_table(self, stream: Any) -> str:
        """A table in a schema."""
        return f"{quote_name(stream.schema)}.{quote_name(stream.name)}"

    def reports_missing(self, error: str) -> Literal["table", "database"] | None:
        """In the server's words."""
        if re.search(r"database \S+ does not exist", error, re.IGNORECASE):
            return "database"
        return "table" if re.search("does not exist", error, re.IGNORECASE) else None

    def check(self) -> dict[str, Any]:
        """Connect and ask for the server's version."""
        psycopg = require("psycopg", self.kind)
        url = self.resolved().url
        report: dict[str, Any] = {}
        patience = {} if "connect_timeout=" in url else {"connect_timeout": 10}
        try:
            with psycopg.connect(url, autocommit=True, **patience) as connection, measured(report):
                version, database = connection.execute(
                    "SELECT current_setting('server_version'), current_database()"
                ).fetchone()
        except psycopg.Error as error:
            raise self.failed(error, hint=SIGN_IN_HINT) from None
        return {"server": f"PostgreSQL {version}", "database": database, **report}
