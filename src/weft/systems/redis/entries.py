"""Keys of Redis, read entry by entry. See `weft.systems.entries`."""

from __future__ import annotations

from typing import Any, ClassVar

from redis.asyncio import Redis, RedisCluster

from weft.systems.entries import Membership
from weft.systems.redis.entry_group import RedisGroupReader
from weft.systems.redis.entry_reader import RedisReader


class RedisEntries:
    """Streams of Redis by their keys, whoever made them."""

    noun: ClassVar[str] = "a key of Redis"
    clients: ClassVar[str] = 'weft.Redis("localhost"), weft.RedisCluster("localhost", 7000)'

    @staticmethod
    def takes(client: object) -> bool:
        """Return whether this is one of redis-py's clients for asyncio."""
        return isinstance(client, Redis | RedisCluster)

    @staticmethod
    def open(client: Any, membership: Membership | None) -> RedisReader:
        """Open a reader on a client or a connection."""
        return RedisReader(client) if membership is None else RedisGroupReader(client, membership)
