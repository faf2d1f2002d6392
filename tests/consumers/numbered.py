"""What the tests of consumers share: streams of numbers."""

from __future__ import annotations

from typing import Any


async def fill(client: Any, count: int, *streams: str) -> None:
    """Add the entries 0, 1, … to each stream, or to `s`."""
    for stream in streams or ("s",):
        for number in range(count):
            await client.xadd(stream, {"n": number})


def numbers(entries: Any) -> list[int]:
    """The numbers of pairs that a consumer gave."""
    return [int(entry.field_values[b"n"]) for _, entry in entries]


async def drained(consumer: Any) -> list[Any]:
    """What a consumer gives until there is nothing."""
    return [each async for each in consumer]


async def until_idle(client: Any, stream: str, milliseconds: int) -> None:
    """Wait until the server says that every pending entry has been held for so long: they are not all of one
    millisecond."""
    while min(each["time_since_delivered"] for each in await client.xpending_range(stream, "g", "-", "+", 1000)) < (
        milliseconds
    ):
        await client.ping()
