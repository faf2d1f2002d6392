"""Connections of the ADBC driver, which reads PostgreSQL as Arrow: ranges of streams and queries of loads."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from psycopg.conninfo import make_conninfo

from weft import settings
from weft.errors import ConnectionFailedError, WeftError
from weft.systems.postgres.sessions import PostgresSessions
from weft.systems.sql.driver import closed_on_error


def connect(dbapi: Any, sessions: PostgresSessions) -> Any:
    """A connection of the ADBC driver."""
    driver = dbapi.connect(make_conninfo(**sessions.parameters()), autocommit=True)
    with closed_on_error(driver), closing(driver.cursor()) as cursor:
        cursor.execute("SET TimeZone = 'UTC'")
    return driver


def explain(dbapi: Any, sessions: PostgresSessions, error: Exception) -> WeftError:
    """The ADBC driver's error as one of ours, without secrets."""
    text = " ".join(settings.redact(str(error), sessions.connection.secrets()).split())
    kind = ConnectionFailedError if isinstance(error, dbapi.OperationalError) else WeftError
    return kind(f"PostgreSQL ({sessions.connection.target}): {text}")
