"""Ranges of ids that many readers read at the same time, of a stream of Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from weft.systems.pages import Comparison
from weft.systems.redis.members import LARGEST
from weft.systems.redis.wire import Key, ReplyError, Wire

# Which ends of a range each comparison moves.
_ENDS: dict[str, tuple[Literal["least", "most"], ...]] = {
    "=": ("least", "most"),
    ">": ("least",),
    ">=": ("least",),
    "<": ("most",),
    "<=": ("most",),
}


@dataclass(frozen=True)
class Window:
    """The milliseconds between which ids are wanted. The second pair holds for ids of 13 digits alone."""

    least_ms: int = 0
    most_ms: int = LARGEST
    least_of_13_digits: int = 0
    most_of_13_digits: int = LARGEST

    def narrowed(self, comparison: Comparison) -> Window:
        """Return the part of the window in which a comparison can be true."""
        value = comparison.value
        if comparison.column == "timestamp":
            if type(value) is not int:
                return self
            moment, suffix = min(max(value, 0), LARGEST), "ms"
        else:
            digits = value.partition("-")[0] if isinstance(value, str) else ""
            # Texts of as many digits as ids have now are in the order of time, others are not.
            if not (digits.isascii() and digits.isdigit() and len(digits) == 13):
                return self
            moment, suffix = int(digits), "of_13_digits"
        within = {"least": max, "most": min}
        names = {end: f"{end}_{suffix}" for end in _ENDS[comparison.operator]}
        return replace(self, **{name: within[end](getattr(self, name), moment) for end, name in names.items()})


def partition(
    wire: Wire, stream: Key, start: str, end: str, count: int, comparisons: Sequence[Comparison] = ()
) -> list[tuple[str, str]]:
    """Return up to so many ranges of ids, of about the same time, that hold what is there now and can be compared
    true."""
    window = Window()
    for comparison in comparisons:
        window = window.narrowed(comparison)
    try:
        first = wire.run("XRANGE", stream, start, end, "COUNT", 1)
        last = wire.run("XREVRANGE", stream, end, start, "COUNT", 1)
    except ReplyError as error:
        raise wire.explained(error) from None
    if not first or not last:
        return []
    (first_id, _), (last_id, _) = first[0], last[0]
    first_ms, last_ms = (int(each.partition(b"-")[0]) for each in (first_id, last_id))
    least, most = max(first_ms, window.least_ms), min(last_ms, window.most_ms)
    if len(str(first_ms)) == len(str(last_ms)) == 13:
        least, most = max(least, window.least_of_13_digits), min(most, window.most_of_13_digits)
    parts = min(count, most - least + 1)
    edges = [least + number * (most - least + 1) // max(parts, 1) for number in range(parts + 1)]
    return [
        (
            first_id.decode() if begin == first_ms else f"{begin}-0",
            last_id.decode() if following == last_ms + 1 else f"{following - 1}-{LARGEST}",
        )
        for begin, following in pairwise(edges)
    ]
