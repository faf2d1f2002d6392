"""Keys of the service: `weft_<id>_<secret>`, of which the database has the id and a hash of the secret.

The secret is 256 random bits: a plain SHA-256 of it cannot be searched. A key that was revoked keeps its row, so that
a service that was closed by its first key is not opened again by revoking the last one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Literal, Protocol, get_args

import pyarrow as pa

from weft.errors import ConnectionFailedError, NotFoundError, SettingsError, StorageError, WeftError, did_you_mean
from weft.operate.runlog_tables import insert_row
from weft.project import DEFAULT, current
from weft.server.cached_probe import CachedProbe
from weft.server.problems import Problem, later
from weft.server.rates import Rate
from weft.settings import read_project_file
from weft.systems.base import Connection, system_for, systems
from weft.systems.sql.system_tables import create_system_table, instant, system_table
from weft.systems.sql.tables import SqlTables

logger = logging.getLogger("weft.server")

Scope = Literal["read", "write", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "weft_"
CACHED_SECONDS = 5.0
_REFRESH_SECONDS = 2.0
_ID_BYTES, _SECRET_BYTES = 6, 32

_TABLE = "api_keys"
_INSTANT = pa.timestamp("us", "UTC")
_FIELDS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("secret_hash", pa.string(), nullable=False),
        pa.field("scopes", pa.string(), nullable=False),
        pa.field("streams", pa.string()),
        pa.field("requests_per_second", pa.float64()),
        pa.field("burst", pa.float64()),
        pa.field("created_at", _INSTANT, nullable=False),
        pa.field("expires_at", _INSTANT),
        pa.field("revoked_at", _INSTANT),
    ]
)


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key as the service knows it."""

    id: str
    name: str | None
    scopes: tuple[Scope, ...]
    streams: tuple[str, ...]
    """The only ones that it opens; none: it opens all."""
    rate: Rate | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    secret_hash: str = field(repr=False)

    @property
    def ended(self) -> str | None:
        """Why it opens nothing any more."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= datetime.now(UTC):
            return "expired"
        return None

    def has(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes


def verified(token: str, keys: dict[str, ApiKey]) -> ApiKey | None:
    """Return the key of a token, ended or not. To compare takes as long whether there is such a key or not."""
    key_id = _id_of(token)
    key = keys.get(key_id)
    sent = _hash(token[len(PREFIX) + len(key_id) + 1 :])
    wanted = _NO_KEY if key is None else key.secret_hash
    return key if hmac.compare_digest(sent, wanted) and key is not None else None


def _id_of(token: str) -> str:
    return token.removeprefix(PREFIX).partition("_")[0]


def _hash(secret: str) -> str:
    return sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


_NO_KEY = _hash(secrets.token_hex(_SECRET_BYTES))


class KeyRows(Protocol):
    """Where keys are kept."""

    def read(self) -> list[dict[str, Any]]:
        """Return a row of `_FIELDS` for every key that was ever created, the oldest first. Nothing is written."""

    def add(self, row: dict[str, Any]) -> None:
        """Store a row."""

    def revoke(self, row: dict[str, Any]) -> None:
        """Store that a key is revoked: `row` has its `id` and `revoked_at`, with all the rest."""

    def close(self) -> None:
        """Close the connection."""


class SqlKeyRows:
    """`weft.api_keys` in one database."""

    def __init__(self, tables: SqlTables) -> None:
        self._tables = tables
        self._table = system_table(tables, _TABLE)

    def read(self) -> list[dict[str, Any]]:
        names, connection = ", ".join(map(self._tables.quote, _FIELDS.names)), self._tables.driver.connection
        try:
            with self._tables.driver.session("read") as session:
                rows = session.rows(f"SELECT {names} FROM {self._table} ORDER BY created_at, id")
        except WeftError as error:
            # Any other error keeps the service closed: there may be keys. "does not exist" is also said of a role.
            is_there = isinstance(error, ConnectionFailedError) or _TABLE not in error.what
            is_missing = not is_there and connection.reports_missing(error.what) == "table"
            if is_missing or connection.is_missing():
                return []
            raise
        return [dict(zip(_FIELDS.names, row, strict=True)) for row in rows]

    def add(self, row: dict[str, Any]) -> None:
        create_system_table(self._tables, _TABLE, _FIELDS, ("id",))
        with self._tables.driver.session("publish") as session:
            insert_row(self._tables, session, self._table, row)

    def revoke(self, row: dict[str, Any]) -> None:
        with self._tables.driver.session("publish") as session:
            session.run(
                f"UPDATE {self._table} SET revoked_at = {self._tables.moment(row['revoked_at'])} "
                "WHERE id = ? AND revoked_at IS NULL",
                (row["id"],),
            )

    def close(self) -> None:
        self._tables.close()


class KeyTable:
    def __init__(self, rows: KeyRows) -> None:
        self._rows = rows

    def all(self) -> dict[str, ApiKey]:
        """Return every key that was ever created, by its id."""
        return {str(row["id"]): _key_of(row) for row in self._rows.read()}

    def create(
        self,
        *,
        name: str | None,
        scopes: Iterable[Scope],
        streams: Iterable[str] = (),
        expires_at: datetime | None = None,
        rate: Rate | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key. Returns it with the token that its user sends, which is stored nowhere."""
        key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_hex(_SECRET_BYTES)
        key = ApiKey(
            id=key_id,
            name=name,
            scopes=tuple(scope for scope in SCOPES if scope in set(scopes)),
            streams=tuple(streams),
            rate=rate,
            created_at=datetime.now(UTC),
            expires_at=expires_at,
            revoked_at=None,
            secret_hash=_hash(secret),
        )
        row = {
            "id": key.id,
            "name": name,
            "secret_hash": key.secret_hash,
            "scopes": ",".join(key.scopes),
            "streams": ",".join(key.streams) or None,
            "requests_per_second": rate and rate.per_second,
            "burst": rate and rate.burst,
            "created_at": key.created_at,
            "expires_at": expires_at,
            "revoked_at": None,
        }
        self._rows.add(row)
        return key, f"{PREFIX}{key_id}_{secret}"

    def revoke(self, key_id: str) -> ApiKey:
        """End a key. One that was revoked before stays as it is. Errors never repeat the token, if that is passed."""
        key_id = _id_of(key_id)
        rows = {str(row["id"]): row for row in self._rows.read()}
        if key_id not in rows:
            hint = did_you_mean(key_id, rows, "weft apikey list shows what there is.")
            raise NotFoundError(f"There is no key {key_id!r}.", hint=hint)
        if rows[key_id]["revoked_at"] is None:
            self._rows.revoke({**rows[key_id], "revoked_at": datetime.now(UTC)})
        return self.all()[key_id]

    def close(self) -> None:
        self._rows.close()


def _key_of(row: dict[str, Any]) -> ApiKey:
    per_second, burst = row.pop("requests_per_second"), row.pop("burst")
    created_at = instant(row.pop("created_at"))
    assert created_at is not None
    return ApiKey(
        **{
            **row,
            "scopes": tuple(row["scopes"].split(",")),
            "streams": tuple(row["streams"].split(",")) if row["streams"] else (),
            "expires_at": instant(row["expires_at"]),
            "revoked_at": instant(row["revoked_at"]),
        },
        rate=None if per_second is None else Rate(float(per_second), float(burst)),
        created_at=created_at,
    )


def keys_connection() -> Connection:
    """Return the database of the keys: that which `[server] keys` of weft.toml names, else `default`."""
    project = current()
    name = read_project_file(project.root).get("server", {}).get("keys", DEFAULT)
    if not isinstance(name, str):
        raise SettingsError("weft.toml: keys in [server] must be the name of a connection.")
    return project.for_tables(project.connection(name))


def open_key_table() -> KeyTable:
    connection = keys_connection()
    system = system_for(connection.kind)
    if system.api_keys is not None:
        return KeyTable(system.load("api_keys")(connection))
    if system.log is None or system.tables is None:
        # Several processes must be able to open it: as for streams.
        able = ", ".join(each.kind for each in systems().values() if each.log and (each.tables or each.api_keys))
        raise SettingsError(
            f"Keys cannot be kept in a {system.kind} database.",
            hint=f'These can: {able}. Name the connection of one in weft.toml: keys = "…" in [server].',
        )
    return KeyTable(SqlKeyRows(system.load_tables()(connection)))


def key_table() -> closing[KeyTable]:
    """Open the keys of this project for a `with` block."""
    return closing(open_key_table())


class KnownKeys:
    """The keys as they were at most `CACHED_SECONDS` ago.

    When they are older than `_REFRESH_SECONDS`, they are read again in the background, and requests get the known ones.
    A request waits only where the known ones are too old.
    """

    def __init__(self) -> None:
        self._table: KeyTable | None = None
        self._keys: dict[str, ApiKey] = {}
        self._read_at = self._refreshed_at = -CACHED_SECONDS
        self._reading = CachedProbe(self._read_all, fresh_seconds=0)
        self._refreshing: asyncio.Task[None] | None = None

    async def get(self) -> dict[str, ApiKey]:
        """Return all keys by id. Raises where they cannot be read: it is unknown then whether the service is open."""
        now = time.monotonic()
        if now - self._read_at >= CACHED_SECONDS:
            try:
                await self._read()
            except TimeoutError:
                raise _unreadable() from None
            except (ConnectionFailedError, StorageError):
                raise
            except WeftError as error:
                logger.error("the keys of the service cannot be read: %s", error)
                raise _unreadable() from None
        elif now - max(self._read_at, self._refreshed_at) >= _REFRESH_SECONDS:
            self._refreshed_at = now
            self._refreshing = asyncio.create_task(self.refresh())
        return self._keys

    async def refresh(self) -> None:
        """Read them now. An error is logged here, and raised for requests that need them later."""
        try:
            await self._read()
        except Exception as error:  # any error: nobody waits for this
            logger.warning("the keys of the service cannot be read now: %s", str(error) or "no answer")

    async def _read(self) -> None:
        while True:
            began, keys = await self._reading.get(CACHED_SECONDS)
            if began > self._read_at:
                self._keys, self._read_at = keys, began
            # The result of a read that another request began may be too old.
            if time.monotonic() - self._read_at < CACHED_SECONDS:
                return

    def _read_all(self) -> tuple[float, dict[str, ApiKey]]:
        began = time.monotonic()
        if self._table is None:
            self._table = open_key_table()
        keys = self._table.all()
        if self._keys and not keys:
            # A key that is revoked stays: the database was flushed or replaced, which must not open the service.
            raise StorageError(
                "The keys of the service are gone from their database.",
                hint="Create keys again. The service opens without keys when it is restarted.",
            )
        return began, keys

    def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        if self._table is not None:
            self._table.close()


def _unreadable() -> Problem:
    return later(503, "keys", "Keys cannot be read", "The service cannot read its keys now.", CACHED_SECONDS)
