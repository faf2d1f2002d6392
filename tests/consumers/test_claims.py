"""What members left behind is delivered to others, and given up on after so many deliveries."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from consumers.numbered import drained, fill, numbers, until_idle
from weft.systems.entries import Membership
from weft.systems.redis.entries import RedisGroupReader


def member(client: Any, name: str, **options: Any) -> Any:
    return client.xconsumer(streams=["s"], group="g", consumer=name, **options)


async def hold(client: Any, name: str) -> None:
    """Be given all that there is, and vanish as a killed process does."""
    await client.xreadgroup("g", name, {"s": ">"})


async def idle_for_hours(client: Any, name: str) -> None:
    """Have the server believe that a consumer got its entries two hours ago."""
    held = [each["message_id"] for each in await client.xpending_range("s", "g", "-", "+", 1000)]
    await client.xclaim("s", "g", name, 0, held, idle=7_200_000, justid=True)


async def test_nobody_claims_by_itself(client: Any) -> None:
    await fill(client, 3)
    await client.xgroup_create("s", "g", "0")
    await hold(client, "dead")
    async with member(client, "b") as consumer:
        assert await drained(consumer) == []


@pytest.mark.timing
async def test_idle_entries_are_claimed(client: Any) -> None:
    await fill(client, 25)
    await client.xgroup_create("s", "g", "0")
    await hold(client, "dead")
    await idle_for_hours(client, "dead")
    await fill(client, 2)
    async with member(client, "b", claim_idle=3_600_000, buffer_size=3) as consumer:
        found = []
        while batch := await consumer.get_batch():
            found += batch
            await consumer.ack(batch)
    assert sorted(numbers(found)) == sorted([*range(25), 0, 1])
    assert sorted(entry.deliveries for _, entry in found) == [1, 1] + [2] * 25
    assert (await client.xpending("s", "g")).pending == 0


async def test_what_is_held_for_less_is_not_claimed(client: Any) -> None:
    await fill(client, 3)
    await client.xgroup_create("s", "g", "0")
    await hold(client, "alive")
    async with member(client, "b", claim_idle=3_600_000) as consumer:
        assert await drained(consumer) == []


async def test_idle_entries_behind_many_that_are_not(client: Any) -> None:
    """A request of the server looks at a part of what is pending; a consumer looks at all of it."""
    await fill(client, 60)
    await client.xgroup_create("s", "g", "0")
    await hold(client, "alive")
    last = (await client.xrevrange("s", count=1))[0].identifier
    await client.xclaim("s", "g", "dead", 0, [last], idle=7_200_000)
    async with member(client, "b", claim_idle=3_600_000) as consumer:
        assert numbers(await drained(consumer)) == [59]


async def test_another_was_faster(client: Any) -> None:
    """One that finds its list taken by another looks for more, and does not end."""
    await fill(client, 3)
    async with member(client, "first", buffer_size=9) as first:
        await first.nack(await first.get_batch())
    reader = RedisGroupReader(client, Membership(group="g", consumer="slow"))
    await reader.begin(b"s", None)
    steps = reader._members[b"s"].delivered_again(1, look=True)
    listed = await reader._script(next(steps))
    async with member(client, "fast") as fast:
        assert numbers([await fast.get_entry()]) == [0]
        taken, _ = await reader._script(steps.send(listed))
        assert taken == []
        listed = await reader._script(steps.send([taken, 0]))
        taken, _ = await reader._script(steps.send(listed))
        assert [fields for _, fields, _ in taken] == [[b"n", b"1"]]


@pytest.mark.timing
async def test_deleted_entries_are_not_claimed(client: Any) -> None:
    await fill(client, 4)
    await client.xgroup_create("s", "g", "0")
    await hold(client, "dead")
    ids = [entry.identifier for entry in await client.xrange("s")]
    await client.xdel("s", ids[0], ids[2])
    await until_idle(client, "s", 10)
    async with member(client, "b", claim_idle=10, buffer_size=9) as consumer:
        assert numbers(await consumer.get_batch()) == [1, 3]
        assert consumer.skipped == 2


async def test_given_back_entries_come_again(client: Any) -> None:
    await fill(client, 3)
    async with member(client, "a", buffer_size=9) as first, member(client, "b", buffer_size=9) as second:
        batch = await first.get_batch()
        assert await first.nack(batch[1:]) == 2
        again = await second.get_batch()
        assert numbers(again) == [1, 2]
        assert [entry.deliveries for _, entry in again] == [2, 2]
        assert await second.nack(again[0]) == 1
        assert numbers(await second.get_batch()) == [1]


async def test_the_name_under_which_they_are_kept(client: Any, redis_url: str) -> None:
    with pytest.raises(weft.SettingsError, match="weft:given-back"):
        await member(client, "weft:given-back").get_entry()
    with pytest.raises(weft.SettingsError, match="weft:given-back"):
        weft.read_stream(redis_url, "s", group="g", consumer="weft:given-back")


async def test_a_deleted_entry_that_was_given_back(client: Any) -> None:
    await fill(client, 2)
    async with member(client, "a", buffer_size=9) as consumer:
        batch = await consumer.get_batch()
        await consumer.nack(batch)
        await client.xdel("s", batch[0][1].identifier)
        assert numbers(await consumer.get_batch()) == [1]
        assert consumer.skipped == 1


@pytest.mark.parametrize("named", [None, "{s}graves"])
async def test_dead_letters(client: Any, named: str | None) -> None:
    is_cluster = isinstance(client, weft.RedisCluster)
    place = named or ("{s}__dead_letter" if is_cluster else "s__dead_letter")
    values = {b"n": b"\xff\r\n", b"_id": b"mine"}
    identifier = await client.xadd("s", values)
    async with member(client, "a", max_deliveries=3, dead_letter=named) as consumer:
        seen = []
        async for _, entry in consumer:
            seen.append(entry.deliveries)
            await consumer.nack(entry)
        assert seen == [1, 2, 3]
    assert (await client.xpending("s", "g")).pending == 0
    ((_, buried),) = await client.execute_command("XRANGE", place, "-", "+")
    own = {b"_stream": b"s", b"_group": b"g", b"_id": identifier, b"_deliveries": b"3"}
    assert buried == {**own, b"n": values[b"n"], b"_id#2": b"mine"}
    assert await client.xrange("s") == [(identifier, values)]


async def test_an_entry_of_very_many_fields_finds_its_grave(client: Any) -> None:
    await client.xadd("s", {f"field {number}": number for number in range(5000)})
    async with member(client, "a", max_deliveries=1, dead_letter="{s}graves") as consumer:
        async for pair in consumer:
            assert await consumer.nack(pair) == 1
    ((_, buried),) = await client.xrange("{s}graves")
    assert len(buried) == 4 + 3500
    assert len((await client.xrange("s"))[0].field_values) == 5000


async def test_the_backlog_is_given_up_on_too(client: Any) -> None:
    await fill(client, 3)
    for deliveries in (1, 2):
        async with member(client, "a", max_deliveries=2, start_from_backlog=True) as consumer:
            found = await drained(consumer)
            assert [(each, entry.deliveries) for each, (_, entry) in zip(numbers(found), found, strict=True)] == [
                (number, deliveries) for number in range(3)
            ]
            await consumer.ack(found[0] if deliveries == 2 else [])
    async with member(client, "a", max_deliveries=2, start_from_backlog=True) as consumer:
        assert await drained(consumer) == []
    place = "{s}__dead_letter" if isinstance(client, weft.RedisCluster) else "s__dead_letter"
    assert [entry.field_values[b"n"] for entry in await client.xrange(place)] == [b"1", b"2"]
    assert (await client.xpending("s", "g")).pending == 0


@pytest.mark.timing
@pytest.mark.parametrize("options", [{"decode_responses": True}, {"protocol": 2}], ids=str)
async def test_other_clients(single_url: str, options: dict[str, Any]) -> None:
    """Backlogs, returns, claims and dead letters, where replies have other shapes."""
    async with weft.Redis.from_url(single_url, **options) as client:
        await fill(client, 4)
        await client.xgroup_create("s", "g", "0")
        await hold(client, "dead")
        await client.xdel("s", (await client.xrange("s"))[3].identifier)
        await until_idle(client, "s", 10)
        async with member(client, "a", claim_idle=10, buffer_size=9) as consumer:
            batch = await consumer.get_batch()
            assert [entry.deliveries for _, entry in batch] == [2, 2, 2]
            assert consumer.skipped == 1
            assert await consumer.nack(batch[0]) == 1
        for expected in ([3, 3, 3], []):
            async with member(client, "a", start_from_backlog=True, max_deliveries=3) as consumer:
                assert [entry.deliveries for _, entry in await drained(consumer)] == expected
        assert await client.xlen("s__dead_letter") == 3


@pytest.mark.parametrize("stream, place", [("{a}s", "{a}s__dead_letter"), ("a{s", "{a{s}__dead_letter")])
async def test_dead_letters_of_names_with_braces(cluster: weft.RedisCluster, stream: str, place: str) -> None:
    await fill(cluster, 1, stream)
    async with cluster.xconsumer(streams=[stream], group="g", consumer="a", max_deliveries=1) as consumer:
        async for pair in consumer:
            await consumer.nack(pair)
    assert await cluster.xlen(place) == 1


async def test_dead_letters_in_another_slot_are_refused(cluster: weft.RedisCluster) -> None:
    with pytest.raises(weft.SettingsError, match="different slots"):
        await member(cluster, "a", max_deliveries=3, dead_letter="elsewhere").get_entry()
