"""Keys of Redis, read page by page. See `weft.systems.pages`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from weft.errors import SettingsError
from weft.systems.base import require
from weft.systems.entries import Membership
from weft.systems.pages import Comparison, FieldNames, PageFeed
from weft.systems.redis import ranges
from weft.systems.redis.client import persistently
from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.feed import ACKS_A_COMMAND, GroupFeed, ManyFeed, RangeFeed
from weft.systems.redis.quarantine import quarantine_of
from weft.systems.redis.wire import Key, ReplyError, Wire


class RedisPages:
    """Streams of Redis by their keys, whoever made them."""

    def __init__(self, connection: RedisConnection) -> None:
        require("hiredis", connection.kind)  # which parses replies
        self.connection = connection

    def read_range(
        self, stream: object, names: FieldNames, start: str, end: str, stopped: Callable[[], bool] = lambda: False
    ) -> PageFeed:
        """Open the entries between two ids."""
        key = _key(stream)
        return RangeFeed(Wire(self.connection, key, stopped), key, names, start, end)

    def read_group(
        self,
        stream: object,
        names: FieldNames,
        membership: Membership,
        *,
        iterates: bool,
        confirms: bool,
        stopped: Callable[[], bool],
    ) -> PageFeed:
        """Open what a consumer of a group is given."""
        key = _key(stream)
        wire = Wire(self.connection, key, stopped)
        return GroupFeed(wire, key, names, membership, iterates=iterates, confirms=confirms)

    def read_matching(self, pattern: str, names: FieldNames, start: str, end: str) -> PageFeed:
        """Open every stream whose key matches a pattern, in the order of the keys; not the quarantine of one."""
        keys = persistently(
            self.connection, lambda client: set(client.scan_iter(match=pattern, count=1000, _type="stream"))
        )
        aside = {quarantine_of(key) for key in keys}
        streams = [_text_or_bytes(key) for key in sorted(keys) if key not in aside]
        return ManyFeed(Wire(self.connection, streams[0] if streams else pattern), streams, names, start, end)

    def partition(
        self, stream: object, start: str, end: str, count: int, comparisons: Sequence[Comparison]
    ) -> list[tuple[str, str]]:
        """Return ranges of ids of about the same time."""
        key = _key(stream)
        with closing(Wire(self.connection, key)) as wire:
            return ranges.partition(wire, key, start, end, count, comparisons)

    def acknowledge(self, stream: object, group: str, ids: Sequence[str]) -> int:
        """Acknowledge entries; how many were pending."""
        key, acknowledged = _key(stream), 0
        with closing(Wire(self.connection, key)) as wire:
            try:
                for begin in range(0, len(ids), ACKS_A_COMMAND):
                    acknowledged += wire.run("XACK", key, group, *ids[begin : begin + ACKS_A_COMMAND])
            except ReplyError as error:
                raise wire.explained(error) from None
        return acknowledged


def _key(stream: object) -> Key:
    if not isinstance(stream, str | bytes) or not stream:
        raise SettingsError(f"A stream of Redis is named by its key, not by {stream!r}.")
    return stream


def _text_or_bytes(key: bytes) -> Key:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key
