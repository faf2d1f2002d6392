"""A member of a group on Redis, against coredis with the same buffer. Both iterate entry by entry."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from bench.harness import Case
from bench.processes import in_processes

Job = Callable[[], int]
BUFFER = 1000
COREDIS = ("coredis==6.9.0", "hiredis==3.5.0")


def ours(url: str, entries: int) -> Job:
    """Acknowledge a thousand entries at a time."""
    import weft

    async def work() -> int:
        async with weft.Redis.from_url(url) as client:
            group = await _new_group(client)
            done: list[Any] = []
            count = 0
            async with client.xconsumer(streams=["entries"], group=group, consumer="a", buffer_size=BUFFER) as consumer:
                async for _, entry in consumer:
                    done.append(entry)
                    count += 1
                    if len(done) == BUFFER:
                        await consumer.ack(done)
                        done = []
                    if count == entries:
                        break
                await consumer.ack(done)
            await client.xgroup_destroy("entries", group)
        return count

    return lambda: asyncio.run(work())


def theirs(url: str, entries: int) -> Job:
    """Acknowledge each entry, as the page on coredis does. Runs where coredis is, and Weft is not."""
    import coredis  # type: ignore[import-not-found]

    async def work() -> int:
        client = coredis.Redis.from_url(url)
        async with client:
            group = await _new_group(client)
            count = 0
            async with client.xconsumer(streams=["entries"], group=group, consumer="a", buffer_size=BUFFER) as consumer:
                async for stream, entry in consumer:
                    await client.xack(stream, group, [entry.identifier])
                    count += 1
                    if count == entries:
                        break
            await client.xgroup_destroy("entries", group)
        return count

    return lambda: asyncio.run(work())


async def _new_group(client: Any) -> str:
    name = uuid.uuid4().hex
    await client.xgroup_create("entries", name, "0")
    return name


def _prepare(scale: float) -> tuple[Job, Job]:
    import redis

    from bench.references import python_with
    from redis_server import RedisServer

    python = python_with(*COREDIS)
    # Not the shared one: this one keeps nothing on disk, where each ack of theirs would wait for it.
    server = RedisServer()
    server.start()
    url, entries = server.url(), int(1_000_000 * scale)
    with redis.Redis.from_url(url) as client:
        client.config_set("appendonly", "no")
        client.flushall()
        for first in range(0, entries, 10_000):
            pipeline = client.pipeline(transaction=False)
            for number in range(first, min(first + 10_000, entries)):
                pipeline.xadd("entries", {"user_id": f"u_{number % 1000}", "action": "click", "amount": number * 1.37})
            pipeline.execute()
    return (
        in_processes("bench.redis_consumers:ours", [(url, entries // 4)]),
        in_processes("bench.redis_consumers:theirs", [(url, entries // 50)], python=python),
    )


CASES = [
    Case(
        "GroupConsumer, buffer 1,000, acks of 1,000 (Redis)",
        "coredis, the same buffer, acking each entry",
        20,
        _prepare,
        needs="redis",
    )
]
