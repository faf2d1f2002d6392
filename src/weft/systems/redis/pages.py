"""Keys of Redis, read page by page. See `weft.systems.pages`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise

from weft.errors import SettingsError
from weft.systems.base import require
from weft.systems.entries import Membership
from weft.systems.pages import Comparison, FieldNames, PageFeed
from weft.systems.redis.client import run_with_retries
from weft.systems.redis.connection import RedisConnection
from weft.systems.redis.feed import ACKS_A_COMMAND, GroupFeed, ManyFeed, RangeFeed
from weft.systems.redis.group_member import LARGEST
from weft.systems.redis.quarantine import quarantine_of
from weft.systems.redis.wire import Key, Wire


class RedisPages:
    """Streams of Redis by their keys, of any writer."""

    def __init__(self, connection: RedisConnection) -> None:
        require("hiredis", connection.kind)  # which parses replies
        self.connection = connection

    def read_range(
        self, stream: object, names: FieldNames, start: str, end: str, stopped: Callable[[], bool] = lambda: False
    ) -> PageFeed:
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
        key = _key(stream)
        wire = Wire(self.connection, key, stopped)
        return GroupFeed(wire, key, names, membership, iterates=iterates, confirms=confirms)

    def read_matching(self, pattern: str, names: FieldNames, start: str, end: str) -> PageFeed:
        """Open every stream whose key matches a pattern, in the order of the keys; not the quarantine of one."""
        keys = run_with_retries(
            self.connection, lambda client: set(client.scan_iter(match=pattern, count=1000, _type="stream"))
        )
        aside = {quarantine_of(key) for key in keys}
        streams = [_text_or_bytes(key) for key in sorted(keys) if key not in aside]
        return ManyFeed(Wire(self.connection, streams[0] if streams else pattern), streams, names, start, end)

    def partition(
        self, stream: object, start: str, end: str, count: int, comparisons: Sequence[Comparison]
    ) -> list[tuple[str, str]]:
        key = _key(stream)
        with closing(Wire(self.connection, key)) as wire:
            return partition(wire, key, start, end, count, comparisons)

    def acknowledge(self, stream: object, group: str, ids: Sequence[str]) -> int:
        key, acknowledged = _key(stream), 0
        with closing(Wire(self.connection, key)) as wire:
            for begin in range(0, len(ids), ACKS_A_COMMAND):
                acknowledged += wire.query("XACK", key, group, *ids[begin : begin + ACKS_A_COMMAND])
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


def partition(
    wire: Wire, stream: Key, start: str, end: str, count: int, comparisons: Sequence[Comparison] = ()
) -> list[tuple[str, str]]:
    """Return up to so many ranges of ids, of about the same time, that hold all entries for which the comparisons can
    be true."""
    first = wire.query("XRANGE", stream, start, end, "COUNT", 1)
    last = wire.query("XREVRANGE", stream, end, start, "COUNT", 1)
    if not first or not last:
        return []
    (first_id, _), (last_id, _) = first[0], last[0]
    first_ms, last_ms = (int(each.partition(b"-")[0]) for each in (first_id, last_id))
    least, most = first_ms, last_ms
    for comparison in comparisons:
        moment = _moment(comparison, first_ms, last_ms)
        if moment is not None and comparison.operator in ("=", ">", ">="):
            least = max(least, moment)
        if moment is not None and comparison.operator in ("=", "<", "<="):
            most = min(most, moment)
    parts = min(count, most - least + 1)
    edges = [least + number * (most - least + 1) // max(parts, 1) for number in range(parts + 1)]
    return [
        (
            first_id.decode() if begin == first_ms else f"{begin}-0",
            last_id.decode() if following == last_ms + 1 else f"{following - 1}-{LARGEST}",
        )
        for begin, following in pairwise(edges)
    ]


def _moment(comparison: Comparison, first_ms: int, last_ms: int) -> int | None:
    """Return the milliseconds that ids are compared with; `None` where that says nothing about them."""
    value = comparison.value
    if comparison.column == "timestamp":
        return value if type(value) is int else None
    digits = value.partition("-")[0] if isinstance(value, str) else ""
    # Texts of as many digits as ids have now are in the order of time, others are not.
    is_ordered = all(len(each) == 13 for each in (digits, str(first_ms), str(last_ms)))
    return int(digits) if is_ordered and digits.isascii() and digits.isdigit() else None
