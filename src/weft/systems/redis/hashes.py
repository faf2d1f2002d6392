"""Rows as hashes of Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.systems.redis.client import Client, run_with_retries
from weft.systems.redis.connection import RedisConnection

_ROWS_AT_ONCE = 1_000
Value = str | bytes | None


def write_hashes(connection: RedisConnection, keys: Sequence[bytes], fields: Mapping[str, Sequence[Value]]) -> None:
    """Write row after row to the hash of its key. A null removes its field; other fields of the hash stay."""

    def write(client: Client) -> None:
        for begin in range(0, len(keys), _ROWS_AT_ONCE):
            pipeline = client.pipeline(transaction=False)
            asked = []
            for row in range(begin, min(begin + _ROWS_AT_ONCE, len(keys))):
                values = {name: column[row] for name, column in fields.items()}
                present = {name: value for name, value in values.items() if value is not None}
                if present:
                    pipeline.hset(keys[row], mapping=present)  # type: ignore[arg-type]
                    asked.append(keys[row])
                if len(present) < len(values):
                    pipeline.hdel(keys[row], *(name for name, value in values.items() if value is None))
                    asked.append(keys[row])
            for key, reply in zip(asked, pipeline.execute(raise_on_error=False), strict=True):
                if isinstance(reply, Exception):
                    # Without the command, which redis-py quotes with all of its values.
                    message = str(reply).rpartition(" of pipeline caused error: ")[2]
                    raise type(reply)(f"{message} (about {key.decode(errors='backslashreplace')!r})")

    run_with_retries(connection, write)
