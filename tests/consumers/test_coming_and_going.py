"""Members that come and go, give back and stop waiting at any moment: every entry is acknowledged once.

Nobody needs to claim, or to ask for a backlog."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from consumers.numbered import drained

pytestmark = pytest.mark.timing

STREAMS = ["one", "two", "three"]


async def test_every_entry_is_acknowledged_once(client: Any, count: Callable[[int], int]) -> None:
    choose = random.Random(11)
    added: list[tuple[bytes, bytes]] = []
    acked: list[tuple[bytes, bytes]] = []
    finished = asyncio.Event()

    async def add() -> None:
        for _ in range(count(2000)):
            stream = choose.choice(STREAMS)
            added.append((stream.encode(), await client.xadd(stream, {"n": len(added)})))
        finished.set()

    async def life(name: str) -> None:
        options = {"buffer_size": choose.choice([0, 1, 5, 50]), "timeout": choose.choice([None, 5, 50])}
        async with client.xconsumer(streams=STREAMS, group="g", consumer=name, **options) as consumer:
            for _ in range(choose.randint(1, 5)):
                asking = asyncio.create_task(consumer.get_batch(choose.choice([None, 1, 3])))
                if choose.random() < 0.3:
                    await asyncio.sleep(choose.uniform(0, 0.005))
                    asking.cancel()
                batch = (await asyncio.gather(asking, return_exceptions=True))[0]
                if isinstance(batch, asyncio.CancelledError):
                    continue
                assert not {(stream, entry.identifier) for stream, entry in batch}.intersection(acked)
                back = [pair for pair in batch if choose.random() < 0.2]
                done = [pair for pair in batch if pair not in back]
                assert await consumer.nack(back) == len(back)
                assert await consumer.ack(done) == len(done)
                acked.extend((stream, entry.identifier) for stream, entry in done)

    async def member(name: str) -> None:
        while not finished.is_set():
            await life(name)

    await asyncio.gather(add(), *(member(name) for name in "abcd"))
    async with client.xconsumer(streams=STREAMS, group="g", consumer="last") as consumer:
        rest = await drained(consumer)
        assert await consumer.ack(rest) == len(rest)
    acked.extend((stream, entry.identifier) for stream, entry in rest)
    assert sorted(acked) == sorted(added)
    for stream in STREAMS:
        assert (await client.xpending(stream, "g")).pending == 0
