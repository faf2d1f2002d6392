"""Redis streams as sources, targets and dead letters of streaming pipelines."""

from __future__ import annotations

from typing import ClassVar

from weft.systems.base import Connection
from weft.systems.endpoint import StoreEndpoint
from weft.systems.redis.ids import to_offset


class RedisEndpoint(StoreEndpoint):
    """A stream. A source may start at the id of an entry, which is kept as its offset."""

    start_forms: ClassVar = {**StoreEndpoint.start_forms, r"\d+-\d+": "an id of Redis"}

    def parse_start(self, start: str, connection: Connection, query: str) -> str:
        """Return an offset, `earliest` or `latest`."""
        start = super().parse_start(start, connection, query)
        return str(to_offset(start, query)) if "-" in start else start
