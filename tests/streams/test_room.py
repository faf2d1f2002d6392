"""A batch that ends by the size of its events: what had no room is given back at once, and was not delivered."""

from __future__ import annotations

from typing import Any

import weft
from weft.streams.consuming import consume_now
from weft.streams.runtime import open_stream


async def test_what_has_no_room_is_left_to_others(streams: Any) -> None:
    @weft.stream(fields={"n": "int64"}, max_deliveries=4)
    def numbers() -> None: ...

    for first in range(0, 60, 20):
        await weft.publish(numbers, [{"n": n} for n in range(first, first + 20)])
    ready = open_stream(numbers)

    async def consume(member: str, room: int, of: str = "c") -> list[int]:
        taken: list[int] = []

        def has_room(event: dict[str, Any]) -> bool:
            taken.append(event["n"])
            return len(taken) <= room

        events = await consume_now(ready, of, 50, member=member, lease=600, has_room=has_room)
        return [event["n"] for event in events]

    assert await consume("a", 20) == list(range(20))
    assert await consume("b", 20) == list(range(20, 40))
    (group,) = await weft.groups(numbers)
    assert (group["pending"], [member["pending"] for member in group["members"]]) == (60, [20, 20])
    # Its own come first; they are spans of their own now.
    assert await consume("a", 30) == [*range(20), *range(40, 50)]
    assert await consume("c", 100) == list(range(50, 60))
    for member, count in (("a", 30), ("b", 20), ("c", 10)):
        events = await weft.consume(numbers, "c", batch_size=count, member=member)
        assert len(events) == count
        assert await weft.ack(numbers, "c", events) == count
    assert await weft.consume(numbers, "c", member="d") == []

    # Pieces of a batch, which one read brings, are cut as well.
    events = await weft.consume(numbers, "scattered", batch_size=60, member="d")
    await weft.ack(numbers, "scattered", [event for event in events if event["n"] % 3 == 0])
    await weft.nack(numbers, "scattered", [event for event in events if event["n"] % 3 == 1])
    left = list(range(1, 60, 3))
    assert await consume("e", 7, of="scattered") == left[:7]
    assert await consume("f", 100, of="scattered") == left[7:]
    assert await consume("d", 100, of="scattered") == list(range(2, 60, 3))
