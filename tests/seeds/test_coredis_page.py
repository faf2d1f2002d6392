"""The examples of the page on Redis Streams consumers that Weft's surface follows, as written there with our name in
place of theirs. Each runs on a single server and on a cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

import servers
import weft


@pytest_asyncio.fixture(params=["single", "cluster"])
async def client(
    request: pytest.FixtureRequest, shared_server: Callable[[str], servers.Server]
) -> AsyncIterator[weft.Redis | weft.RedisCluster]:
    if request.param == "single":
        with shared_server("redis").database() as url:
            async with aclosing(weft.Redis.from_url(url)) as single:
                yield single
    else:
        server = shared_server("redis-cluster")
        with server.database():
            async with aclosing(weft.RedisCluster("127.0.0.1", server.nodes[0].port)) as cluster:  # type: ignore[attr-defined]
                yield cluster


async def add(client: Any, *streams: str, count: int = 10) -> None:
    for stream in streams:
        [await client.xadd(stream, {"id": i}) for i in range(count)]


def test_the_client_of_the_page() -> None:
    client = weft.Redis()
    assert client.get_connection_kwargs()["host"] == "localhost"
    assert isinstance(client.xconsumer(streams=["one", "two", "three"]), weft.Consumer)
    cluster = weft.RedisCluster("localhost", 7000)
    assert isinstance(cluster.xconsumer(streams=["one", "two", "three"]), weft.Consumer)


# Simple Consumer


@pytest.mark.parametrize("directly", [False, True])
async def test_get_entry(client: Any, directly: bool) -> None:
    await client.xadd("one", {"id": "before"})
    consumer = client.xconsumer(streams=["one", "two", "three"])
    # or directly
    if directly:
        consumer = weft.patterns.streams.Consumer(client, streams=["one", "two", "three"])

    async with client:  # noqa: SIM117, as on the page
        async with consumer:
            assert await consumer.get_entry() == (None, None)
            await client.xadd("two", {"id": "after"})
            stream, entry = await consumer.get_entry()
            assert (stream, entry.field_values) == (b"two", {b"id": b"after"})
            assert await client.xrange("two") == [(entry.identifier, entry.field_values)]


async def test_iterate(client: Any) -> None:
    consumer = client.xconsumer(streams=["one", "two", "three"])
    await add(client, "one")
    async with consumer:
        # What is added from now on: this one is at the end of one stream, and the others are not there yet.
        await add(client, "one", "two", "three")
        found = []
        async with client:
            async for stream, entry in consumer:
                found.append((stream, entry))
    assert sorted((stream, int(entry.field_values[b"id"])) for stream, entry in found) == sorted(
        (stream, i) for stream in (b"one", b"two", b"three") for i in range(10)
    )


async def test_iterate_for_ever(client: Any) -> None:
    consumer = client.xconsumer(streams=["one", "two", "three"])
    found = []
    added = asyncio.Event()

    async def forever() -> None:
        async with client:
            while True:
                async for stream, _ in consumer:
                    found.append(stream)
                    if len(found) == 6:
                        await added.wait()  # through the same client, which is closed then
                        return

    async with consumer:
        running = asyncio.create_task(forever())
        await add(client, "one", "two", count=3)
        added.set()
        await asyncio.wait_for(running, 60)
    assert sorted(found) == [b"one"] * 3 + [b"two"] * 3


# Configuration


async def test_with_a_blocking_timeout(client: Any) -> None:
    consumer = client.xconsumer(
        client,
        streams=["one", "two", "three"],
        timeout=30 * 1000,  # 30 seconds
    )
    async with consumer:
        waiting = asyncio.create_task(consumer.get_entry())
        await asyncio.sleep(0)
        await client.xadd("three", {"id": 1})
        stream, entry = await waiting
    assert (stream, entry.field_values) == (b"three", {b"id": b"1"})


async def test_with_an_internal_buffer(client: Any) -> None:
    consumer = client.xconsumer(
        client,
        streams=["one", "two", "three"],
        # Will fetch upto 10 extra entries per stream
        # on every request to redis
        buffer_size=10,
        timeout=30 * 1000,  # 30 seconds
    )
    async with consumer:
        await add(client, "one", "two", "three", count=20)
        _, first = await consumer.get_entry()
        assert first.field_values == {b"id": b"0"}
        # The ten after it are here: they come also when the server has them no more.
        await client.delete(first.stream)
        rest = [entry for stream, entry in [await consumer.get_entry() for _ in range(10)] if stream == first.stream]
        assert [int(entry.field_values[b"id"]) for entry in rest] == list(range(1, 11))


# Group Consumer


@pytest.mark.timing
@pytest.mark.parametrize("directly", [False, True])
async def test_two_consumers_drain_together(client: Any, directly: bool) -> None:
    consumer1 = client.xconsumer(
        streams=["one", "two", "three"],
        group="group-a",
        consumer="consumer-1",
        auto_acknowledge=True,
    )
    consumer2 = client.xconsumer(
        streams=["one", "two", "three"],
        group="group-a",
        consumer="consumer-2",
        auto_acknowledge=True,
    )
    # Or directly
    if directly:
        consumer1 = weft.GroupConsumer(
            client,
            streams=["one", "two", "three"],
            group="group-a",
            consumer="consumer-1",
            auto_acknowledge=True,
        )

    async with client:
        [await client.xadd("one", {"id": i}) for i in range(10)]
        [await client.xadd("two", {"id": i}) for i in range(10)]
        [await client.xadd("three", {"id": i}) for i in range(10)]

    async def processor(consumer):
        return [(stream, entry) async for (stream, entry) in consumer]

    consumer1_results, consumer2_results = await asyncio.gather(processor(consumer1), processor(consumer2))

    assert len(consumer1_results) + len(consumer2_results) == 30
    assert len({(stream, entry.identifier) for stream, entry in consumer1_results + consumer2_results}) == 30
    # "the received entries not populating the PEL"
    for stream in ("one", "two", "three"):
        assert (await client.xpending(stream, "group-a")).pending == 0


# Backlog management


async def test_backlog(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", random.Random(3).random)  # some of ten fail, not all and not none
    async with client:
        async with client.xconsumer(
            streams=["one"],
            group="group-a",
            consumer="consumer-1",
            start_from_backlog=True,
        ) as consumer:
            [await client.xadd("one", {"id": i}) for i in range(10)]
            failed = []
            # fetch all ten entries and simulate a bug occurring 50% of the time
            # when processing the entry
            async for stream, entry in consumer:
                if random.random() > 0.5:
                    print("success", await client.xack(stream, consumer.group, [entry.identifier]))
                else:
                    print("oh nos!")
                    failed.append(entry)

        pending = await client.xpending("one", "group-a")
        assert pending.consumers[b"consumer-1"] > 0
        assert pending.consumers[b"consumer-1"] == pending.pending == len(failed) < 10

        print("round two")
        again = []
        # Let's pretend the consumer crashed and started again
        # and now doesn't have a bug that fails 50% of the time
        async with client.xconsumer(
            streams=["one"], group="group-a", consumer="consumer-1", start_from_backlog=True
        ) as consumer:
            async for stream, entry in consumer:
                await client.xack(stream, consumer.group, [entry.identifier])
                again.append(entry)

        pending = await client.xpending("one", "group-a")
        assert pending.consumers.get(b"consumer-1") is None
        assert again == failed
