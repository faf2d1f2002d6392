"""The audit log: who did what to pipelines and runs over HTTP, and what came of it.

Each action is a line of the service's log, and a row of `weft.audit` in the database of the keys, where that is an SQL
database. The row is written before the action, and says afterwards how it ended: no action is without a row.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from weft.errors import WeftError
from weft.operate.runlog_tables import insert_row
from weft.server.keys import ApiKey
from weft.server.service_tables import is_not_there, service_tables
from weft.systems.dead_letter_store import digest
from weft.systems.sql.system_tables import create_system_table, instant, system_table

logger = logging.getLogger("weft.audit")

_TABLE = "audit"
FILTERS = ("key", "action", "object")
"""By what actions are chosen."""
_INSTANT = pa.timestamp("us", "UTC")
_FIELDS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("at", _INSTANT, nullable=False),
        pa.field("key_id", pa.string(), nullable=False),
        pa.field("key_name", pa.string()),
        pa.field("client", pa.string()),
        pa.field("action", pa.string(), nullable=False),
        pa.field("object", pa.string(), nullable=False),
        pa.field("outcome", pa.string()),
    ]
)
_ABANDONED = "failed: the service ended before it was known how the command ended"


def _of_host() -> str:
    """Return what the ids of this machine's records end with."""
    return f"-{digest(socket.gethostname())[:8]}"


class Audit:
    """The audit log of the project. Used in threads: each call opens the database for itself, actions are rare."""

    def begin(self, key: ApiKey, client: str | None, action: str, named: str) -> str:
        """Record that somebody begins an action, and return the id of the record."""
        row = {
            "id": f"{secrets.token_hex(10)}{_of_host()}",
            "at": datetime.now(UTC),
            "key_id": key.id,
            "key_name": key.name,
            "client": client,
            "action": action,
            "object": named,
            "outcome": None,
        }
        logger.info("action", extra={name: str(value) for name, value in row.items() if value is not None})
        with service_tables() as tables:
            if tables is not None:
                create_system_table(tables, _TABLE, _FIELDS, ("id",))
                with tables.driver.session("publish") as session:
                    insert_row(tables, session, system_table(tables, _TABLE), row)
        return str(row["id"])

    def end(self, record: str, outcome: str) -> None:
        """Record how an action ended. It has: where its row cannot be changed, the service's log alone says so."""
        logger.info("action ended", extra={"id": record, "outcome": outcome})
        try:
            with service_tables() as tables:
                if tables is not None:
                    sql = f"UPDATE {system_table(tables, _TABLE)} SET outcome = ? WHERE id = ?"
                    with tables.driver.session("publish") as session:
                        session.run(sql, (outcome[:500], record))
        except WeftError as error:
            logger.error("The audit log does not say how an action ended: %s", error, extra={"id": record})

    def close_abandoned(self, before: datetime) -> None:
        """Say of the actions that a service of this machine began before a time, and whose end is not known, that it is
        not. One that goes on, in another process of the service, says later how it ended."""
        try:
            with service_tables() as tables:
                if tables is None:
                    return
                table, name, at = system_table(tables, _TABLE), tables.quote("id"), tables.quote("at")
                sql = f"SELECT {name} FROM {table} WHERE outcome IS NULL AND {at} < {tables.moment(before)}"
                try:
                    with tables.driver.session("read") as session:
                        records = [row[0] for row in session.rows(sql) if row[0].endswith(_of_host())]
                except WeftError as error:
                    if is_not_there(error, tables):
                        return
                    raise
                for record in records:
                    with tables.driver.session("publish") as session:
                        session.run(
                            f"UPDATE {table} SET outcome = ? WHERE {name} = ? AND outcome IS NULL", (_ABANDONED, record)
                        )
        except WeftError as error:
            logger.error("The audit log does not say which actions were abandoned: %s", error)

    def latest(self, limit: int, *, before: datetime | None = None, **wanted: str) -> list[dict[str, Any]]:
        """Return the last actions, the newest first, before a time and with these values; `key` is the id or the name
        of one, and an action is also named by its last word. None where there was no action yet."""
        with service_tables() as tables:
            if tables is None:
                return []
            names = ", ".join(map(tables.quote, _FIELDS.names))
            conditions, values = [], []
            for name, value in wanted.items():
                columns = [*map(tables.quote, ("key_id", "key_name") if name == "key" else (name,))]
                values += [value] * len(columns)
                choices = [f"{each} = ?" for each in columns]
                if name == "action":  # `purge` is that of dead letters, of a quarantine and of rejected events
                    choices.append(f"{columns[0]} LIKE ? ESCAPE '!'")
                    values.append("% " + re.sub("[!%_]", r"!\g<0>", value))
                if name == "object":  # what follows the name of a pipeline says what of it
                    choices.append(f"substr({columns[0]}, 1, {len(value) + 1}) = ?")
                    values.append(f"{value} ")
                conditions.append(f"({' OR '.join(choices)})")
            if before is not None:
                conditions.append(f"{tables.quote('at')} < {tables.moment(before)}")
            where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
            order = f"ORDER BY {tables.quote('at')} DESC, {tables.quote('id')} LIMIT {int(limit)}"
            try:
                with tables.driver.session("read") as session:
                    rows = session.rows(f"SELECT {names} FROM {system_table(tables, _TABLE)} {where} {order}", values)
            except WeftError as error:
                if is_not_there(error, tables):
                    return []
                raise
        actions = [dict(zip(_FIELDS.names, row, strict=True)) for row in rows]
        return [{**row, "at": instant(row["at"])} for row in actions]
