"""`subscribe(timeout=)`: a short batch comes when no event that is wanted came for so long, whatever else goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import weft
from weft.project import Project
from workers import PATIENCE, declare

pytestmark = pytest.mark.timing


async def publish(*numbers: int) -> None:
    await weft.publish("orders", [{"n": n} for n in numbers])


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["n"] for event in events]


async def test_what_the_filter_drops_does_not_hold_back_a_batch(streams: Project) -> None:
    """Events go on coming, none of them wanted: the one that is wanted does not wait for ever."""
    declare()
    subscription = weft.subscribe("orders", batch_size=10, timeout=0.3, filter_fn=lambda event: event["n"] == 0)
    await publish(0)
    waiting = asyncio.create_task(anext(subscription))
    async with asyncio.timeout(PATIENCE):
        while not waiting.done():
            await publish(1)
            await asyncio.sleep(0.02)
    assert numbers(await waiting) == [0]


async def test_it_counts_from_the_last_event(streams: Project) -> None:
    """Not from the last call: a reader that looks in for shorter whiles gets its short batch too."""
    declare()
    subscription = weft.subscribe("orders", batch_size=10, timeout=0.3)
    await publish(0, 1)
    batch = None
    async with asyncio.timeout(PATIENCE):
        while batch is None:
            try:
                batch = await asyncio.wait_for(anext(subscription), 0.05)
            except TimeoutError:
                continue
    assert numbers(batch) == [0, 1]
