"""What consumers give."""

from __future__ import annotations

from typing import Any, NamedTuple


class _Pair(NamedTuple):
    identifier: Any
    field_values: dict[Any, Any]


class StreamEntry(_Pair):
    """An entry of a stream: the pair of its `identifier` and its `field_values`.

    One that a consumer gave also knows its `stream`, and one of a group on Redis how often it was delivered."""

    stream: Any = None
    deliveries: int | None = None


class StreamPending(NamedTuple):
    """What the members of a group were given and have not acknowledged: how many, the first and the last, and how many
    by the name of each member."""

    pending: int
    minimum_identifier: Any
    maximum_identifier: Any
    consumers: dict[Any, int]
