"""The keys of the service on Redis: a hash, with a JSON text for each id."""

from __future__ import annotations

import json
from typing import Any

from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.store import RedisStore
from weft.types import to_json

# Outside weft:*: users of streams have the right to write those keys.
_KEYS = "weft-api-keys"


class RedisKeyRows:
    """See `weft.server.keys.KeyRows`."""

    def __init__(self, connection: RedisConnection) -> None:
        self._store = RedisStore(connection)

    def read(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [json.loads(text) for text in self._store.command("HVALS", _KEYS)]
        return sorted(rows, key=lambda row: (row["created_at"], row["id"]))

    def add(self, row: dict[str, Any]) -> None:
        self._store.command("HSET", _KEYS, row["id"], json.dumps(row, default=to_json))

    def revoke(self, row: dict[str, Any]) -> None:
        self.add(row)

    def close(self) -> None:
        self._store.close()
