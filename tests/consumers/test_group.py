"""Members of a group share its entries: each goes to one of them, and none is missed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import weft
from consumers.numbered import drained, fill, numbers

GROUP = {"group": "g", "consumer": "a"}


@pytest.mark.timing
@pytest.mark.parametrize("buffer_size", [0, 7, 100])
async def test_complete_and_disjoint(client: Any, buffer_size: int) -> None:
    streams = ["one", "two", "three"]
    await fill(client, 40, *streams)
    members = [client.xconsumer(streams=streams, group="g", consumer=name, buffer_size=buffer_size) for name in "abc"]

    async def work(consumer: Any) -> list[Any]:
        found = []
        async with consumer:
            while batch := await consumer.get_batch(5):
                found += batch
                assert await consumer.ack(batch) == len(batch)
        return found

    found = [each for part in await asyncio.gather(*map(work, members)) for each in part]
    assert len(found) == len({(stream, entry.identifier) for stream, entry in found}) == 120
    assert all(entry.deliveries == 1 for _, entry in found)
    for stream in streams:
        assert (await client.xpending(stream, "g")).pending == 0


async def test_where_a_group_begins(client: Any) -> None:
    await fill(client, 3)
    third = (await client.xrange("s"))[1].identifier
    for start, expected in ({}, [0, 1, 2]), ({"group_start": "$"}, []), ({"group_start": third.decode()}, [2]):
        async with client.xconsumer(streams=["s"], group=f"g{start}", consumer="a", **start) as consumer:
            assert numbers(await drained(consumer)) == expected
    async with client.xconsumer(streams=["s"], group="bytes", consumer="a", group_start=b"$") as consumer:
        assert await drained(consumer) == []
    with pytest.raises(weft.SettingsError, match="identifier"):
        await client.xconsumer(streams=["s"], **GROUP, group_start="now").get_entry()


async def test_a_group_that_is_there_keeps_its_place(client: Any) -> None:
    await fill(client, 3)
    await client.xgroup_create("s", "g", "$")
    async with client.xconsumer(streams=["s"], **GROUP) as consumer:
        await client.xadd("s", {"n": 3})
        assert numbers(await drained(consumer)) == [3]


async def test_nobody_creates_it(client: Any) -> None:
    with pytest.raises(weft.NotFoundError, match="has no group 'g'"):
        await client.xconsumer(streams=["s"], **GROUP, auto_create=False).get_entry()
    await client.xgroup_create("s", "g", "0", mkstream=True)
    async with client.xconsumer(streams=["s"], **GROUP, auto_create=False) as consumer:
        assert await consumer.get_entry() == (None, None)


@pytest.mark.timing
async def test_many_create_it_at_once(client: Any) -> None:
    await fill(client, 5)
    members = [client.xconsumer(streams=["s"], group="g", consumer=f"m{i}") for i in range(10)]
    found = await asyncio.gather(*map(drained, members))
    assert sorted(n for part in found for n in numbers(part)) == list(range(5))


async def test_ack_takes_what_consumers_give(client: Any) -> None:
    await fill(client, 8)
    async with client.xconsumer(streams=["s"], **GROUP, buffer_size=7) as consumer:
        batch = await consumer.get_batch()
        pair, (_, entry), *others = batch
        assert await consumer.ack(pair) == 1
        assert await consumer.ack(entry) == 1
        assert await consumer.ack([each for _, each in others[:2]]) == 2
        assert await consumer.ack(tuple(others[2:4])) == 2
        assert await consumer.ack(batch) == 2
        assert await consumer.ack(batch) == 0
        assert await consumer.ack([]) == 0
        for wrong in ("1-0", [("s", "1-0")], {"s": 1}, [entry.identifier], (await client.xrange("s"))[0]):
            with pytest.raises(weft.SettingsError, match="that a consumer gave"):
                await consumer.ack(wrong)


async def test_entries_are_pending_until_acknowledged(client: Any) -> None:
    await fill(client, 2)
    async with client.xconsumer(streams=["s"], **GROUP) as consumer:
        assert numbers(await drained(consumer)) == [0, 1]
        assert numbers(await drained(consumer)) == []
    assert (await client.xpending("s", "g")).consumers == {b"a": 2}


async def test_acknowledged_by_itself(client: Any) -> None:
    await fill(client, 10)
    async with client.xconsumer(streams=["s"], **GROUP, auto_acknowledge=True, buffer_size=3) as consumer:
        assert len(await consumer.get_batch()) == 4
        assert (await client.xpending("s", "g")).pending == 4
        assert numbers([await consumer.get_entry()]) == [4]
        # The four are done; of the next four one was handed out.
        assert (await client.xpending("s", "g")).pending == 4
    assert (await client.xpending("s", "g")).consumers == {b"weft:given-back": 3}
    async with client.xconsumer(streams=["s"], group="g", consumer="b") as consumer:
        assert sorted(numbers(await drained(consumer))) == [5, 6, 7, 8, 9]


async def test_backlog_then_new(client: Any) -> None:
    await fill(client, 10)
    async with client.xconsumer(streams=["s"], **GROUP, buffer_size=9) as consumer:
        batch = await consumer.get_batch()
        await consumer.ack(batch[3:6])
    await client.xadd("s", {"n": 10})
    async with client.xconsumer(streams=["s"], **GROUP, start_from_backlog=True, buffer_size=1) as consumer:
        found = await drained(consumer)
    assert numbers(found) == [0, 1, 2, 6, 7, 8, 9, 10]
    assert [entry.deliveries for _, entry in found] == [2] * 7 + [1]
    async with client.xconsumer(streams=["s"], **GROUP, s={"identifier": found[5][1].identifier}) as consumer:
        assert numbers(await drained(consumer)) == [9, 10]


async def test_deleted_entries_in_the_backlog(client: Any) -> None:
    await fill(client, 6)
    async with client.xconsumer(streams=["s"], **GROUP, buffer_size=9) as consumer:
        ids = [entry.identifier for _, entry in await consumer.get_batch()]
    await client.xdel("s", *ids[:2], ids[4])
    async with client.xconsumer(streams=["s"], **GROUP, start_from_backlog=True) as consumer:
        assert numbers(await drained(consumer)) == [2, 3, 5]
        assert consumer.skipped == 3
    assert (await client.xpending("s", "g")).pending == 3
    await client.xdel("s", *ids)
    async with client.xconsumer(streams=["s"], **GROUP, start_from_backlog=True, buffer_size=9) as consumer:
        await client.xadd("s", {"n": 9})
        assert numbers(await drained(consumer)) == [9]
    assert consumer.skipped == 3


async def test_a_client_of_redis_py_does_too(single_url: str) -> None:
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(single_url) as plain:
        await plain.xadd("s", {"n": 1})
        async with weft.GroupConsumer(plain, streams=["s"], group="g", consumer="a", claim_idle=60_000) as consumer:
            found = await drained(consumer)
            assert numbers(found) == [1]
            assert await consumer.nack(found) == 1
            (_, entry), *_ = again = await consumer.get_batch()
            assert (numbers(again), entry.deliveries) == ([1], 2)
            assert await consumer.ack(again) == 1
