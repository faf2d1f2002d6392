"""Ranges of ids that many readers read at the same time, of a stream of Redis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from weft.systems.pages import Comparison
from weft.systems.redis.group_member import LARGEST
from weft.systems.redis.wire import Key, ReplyError, Wire


def partition(
    wire: Wire, stream: Key, start: str, end: str, count: int, comparisons: Sequence[Comparison] = ()
) -> list[tuple[str, str]]:
    """Return up to so many ranges of ids, of about the same time, that hold what is there now. Where the comparisons
    are never true, entries are left out."""
    try:
        first = wire.run("XRANGE", stream, start, end, "COUNT", 1)
        last = wire.run("XREVRANGE", stream, end, start, "COUNT", 1)
    except ReplyError as error:
        raise wire.explained(error) from None
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
