"""A group that vanishes while its members read is created again, and nothing that is added is missed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import weft
from consumers.numbered import drained, fill, numbers


async def flush(client: Any) -> None:
    if isinstance(client, weft.RedisCluster):
        await client.flushall(target_nodes=weft.RedisCluster.PRIMARIES)
    else:
        await client.flushdb()


async def destroy(client: Any) -> None:
    await client.xgroup_destroy("s", "g")


async def delete(client: Any) -> None:
    await client.delete("s")


@pytest.mark.parametrize("vanish", [destroy, delete, flush])
async def test_between_two_reads(client: Any, vanish: Any) -> None:
    await fill(client, 3)
    async with client.xconsumer(streams=["s"], group="g", consumer="a", group_start="$", buffer_size=5) as consumer:
        assert await drained(consumer) == []
        await fill(client, 2)
        found = await drained(consumer)
        assert numbers(found) == [0, 1]
        await consumer.ack(found)
        await vanish(client)
        await client.xadd("s", {"n": 7})
        await client.xadd("s", {"n": 8})
        # From where it began: what was added after that may come again, and is not missed.
        assert numbers(await drained(consumer)) == ([0, 1, 7, 8] if vanish is destroy else [7, 8])
        assert consumer.recovered == 1
        await client.xadd("s", {"n": 9})
        assert numbers(await drained(consumer)) == [9]
    assert consumer.recovered == 1


@pytest.mark.timing
@pytest.mark.parametrize("vanish", [destroy, delete, flush])
async def test_while_it_waits(client: Any, vanish: Any) -> None:
    async with client.xconsumer(streams=["s"], group="g", consumer="a", timeout=60_000) as consumer:
        waiting = asyncio.create_task(consumer.get_entry())
        await asyncio.sleep(0.05)
        await vanish(client)
        await client.xadd("s", {"n": 7})
        assert numbers([await waiting]) == [7]


async def test_set_back_by_somebody_else(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Or destroyed and created again."""
    await fill(client, 3)
    async with client.xconsumer(streams=["s"], group="g", consumer="a", buffer_size=5) as consumer:
        await consumer.ack(await drained(consumer))
        await client.xgroup_setid("s", "g", "0")
        assert numbers(await drained(consumer)) == [0, 1, 2]
        assert consumer.recovered == 1
    assert "was set back" in caplog.text


async def test_a_stream_with_lower_identifiers(client: Any) -> None:
    await client.xadd("s", {"n": 1}, id="100-0")
    async with client.xconsumer(streams=["s"], group="g", consumer="a", group_start="$") as consumer:
        assert await drained(consumer) == []
        await client.delete("s")
        await client.xadd("s", {"n": 2}, id="5-0")
        assert numbers(await drained(consumer)) == [2]


async def test_a_group_that_was_there_before(client: Any) -> None:
    """Where it begins again is known from when this member began: not the end by the time it is missed."""
    await fill(client, 3)
    await client.xgroup_create("s", "g", "0")
    async with client.xconsumer(streams=["s"], group="g", consumer="a", group_start="$") as consumer:
        assert numbers(await drained(consumer)) == [0, 1, 2]
        await destroy(client)
        await client.xadd("s", {"n": 7})
        assert numbers(await drained(consumer)) == [7]


@pytest.mark.timing
async def test_two_members_recover_at_once(client: Any) -> None:
    await fill(client, 4)
    members = [client.xconsumer(streams=["s"], group="g", consumer=name) for name in "ab"]
    async with members[0], members[1]:
        await asyncio.gather(*map(drained, members))
        await flush(client)
        await fill(client, 20)
        found = await asyncio.gather(*map(drained, members))
    assert sorted(numbers(found[0] + found[1])) == list(range(20))
    assert members[0].recovered + members[1].recovered == 1


async def test_not_where_groups_are_not_created(client: Any) -> None:
    await client.xgroup_create("s", "g", "0", mkstream=True)
    async with client.xconsumer(streams=["s"], group="g", consumer="a", auto_create=False) as consumer:
        assert await drained(consumer) == []
        await destroy(client)
        with pytest.raises(weft.NotFoundError, match="has no group 'g'"):
            await consumer.get_entry()
        await client.xgroup_create("s", "g", "0")
        await client.xadd("s", {"n": 1})
        assert numbers(await drained(consumer)) == [1]


async def test_acks_and_returns_of_what_is_gone(client: Any) -> None:
    await fill(client, 5)
    async with client.xconsumer(streams=["s"], group="g", consumer="a", buffer_size=9) as consumer:
        first = await consumer.get_entry()
        await flush(client)
        assert await consumer.ack(first) == 0
        assert await consumer.nack(first) == 0
        # What it had fetched is handed out all the same.
        assert numbers(await consumer.get_batch()) == [1, 2, 3, 4]


@pytest.mark.timing
async def test_a_consumer_that_is_alone_goes_on(client: Any) -> None:
    async with client.xconsumer(streams=["s"], timeout=60_000) as consumer:
        await fill(client, 2)
        assert numbers([await consumer.get_entry(), await consumer.get_entry()]) == [0, 1]
        waiting = asyncio.create_task(consumer.get_entry())
        await asyncio.sleep(0.05)
        await flush(client)
        await client.xadd("s", {"n": 7})
        assert numbers([await waiting]) == [7]
