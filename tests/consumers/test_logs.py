"""The same two classes read streams in databases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import weft
from consumers.numbered import drained
from weft.streams.rejected import replay_sync
from weft.streams.runtime import open_stream
from workers import declare, wait_until_expired


@pytest.fixture
def connection(streams: Any) -> Any:
    return weft.get_connection("default")


async def fill(name: str, count: int, first: int = 0) -> None:
    await weft.publish(name, [{"n": number} for number in range(first, first + count)])


def numbers(entries: Any) -> list[int]:
    return [entry.field_values["n"] for _, entry in entries]


async def test_alone(connection: Any) -> None:
    declare("one", fields={"n": "int64"})
    two = declare("two", fields={"n": "int64"})
    await fill("one", 2)
    consumer = connection.xconsumer(["one", two], buffer_size=2)
    assert isinstance(consumer, weft.Consumer)
    async with consumer:
        assert await consumer.get_entry() == (None, None)
        await fill("one", 5, first=2)
        await fill("two", 2)
        found = await drained(consumer)
        assert sorted((stream, entry.field_values["n"]) for stream, entry in found) == [
            *(("one", n) for n in range(2, 7)),
            ("two", 0),
            ("two", 1),
        ]
        third = next(entry for stream, entry in found if stream == "one")
        assert (third.stream, third.identifier) == ("one", third.field_values["_weft_rowid"])
    async with weft.Consumer(connection, ["one"], one={"identifier": third.identifier}) as consumer:
        assert numbers(await drained(consumer)) == [3, 4, 5, 6]


async def test_waits(connection: Any) -> None:
    declare("one", fields={"n": "int64"})
    declare("two", fields={"n": "int64"})
    for member in ({}, {"group": "g", "consumer": "a"}):
        async with connection.xconsumer(streams=["one", "two"], timeout=60_000, **member) as consumer:
            waiting = asyncio.create_task(consumer.get_entry())
            await asyncio.sleep(0.02)
            await fill("two", 1)
            assert (await waiting)[0] == "two"


async def test_retention_was_faster(connection: Any) -> None:
    declare("one", fields={"n": "int64"}, retention={"max_rows": 2})
    await fill("one", 1)
    async with connection.xconsumer(streams=["one"]) as consumer:
        await fill("one", 5, first=1)
        await weft.trim("one")
        with pytest.raises(weft.EventsLostError):
            await consumer.get_entry()
        assert numbers(await drained(consumer)) == [4, 5]


async def test_a_stream_that_was_created_again(connection: Any, system: Any) -> None:
    """It is said once, where its offsets begin again; later events come."""
    one = declare("one", fields={"n": "int64"})
    await fill("one", 3)
    async with connection.xconsumer(streams=["one"], timeout=60_000) as consumer:
        await weft.delete_stream(one)
        await fill("one", 2)
        if system.kind == "redis":  # where offsets are moments
            assert numbers([await consumer.get_entry(), await consumer.get_entry()]) == [0, 1]
        else:
            with pytest.raises(weft.EventsLostError, match=r"ends at offset 2, before 3.*created again"):
                await consumer.get_entry()
        await fill("one", 1, first=2)
        assert numbers([await consumer.get_entry()]) == [2]


async def test_a_nack_whose_answer_is_lost(connection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = declare("one", fields={"n": "int64"})
    await fill("one", 1)
    async with connection.xconsumer(streams=["one"], group="g", consumer="c") as consumer:
        _, entry = await consumer.get_entry()
        kind, fails = type(open_stream(one).log), [True]
        settle = kind.settle

        def failing(*arguments: Any, **options: Any) -> Any:
            outcome = settle(*arguments, **options)
            if fails:
                fails.pop()
                raise weft.ConnectionFailedError("gone")
            return outcome

        monkeypatch.setattr(kind, "settle", failing)
        assert await consumer.nack(entry) == 1
        assert numbers([await consumer.get_entry()]) == [0]


@pytest.mark.timing
async def test_complete_and_disjoint(connection: Any) -> None:
    declare("one", fields={"n": "int64"})
    declare("two", fields={"n": "int64"})
    await fill("one", 30)
    await fill("two", 30)
    streams = ["one", "two"]
    members = [connection.xconsumer(streams=streams, group="g", consumer=name, buffer_size=4) for name in "ab"]

    async def work(consumer: Any) -> list[Any]:
        found = []
        async with consumer:
            while batch := await consumer.get_batch():
                found += batch
                assert await consumer.ack(batch) == len(batch)
        return found

    found = [each for part in await asyncio.gather(*map(work, members)) for each in part]
    assert sorted(numbers(found)) == sorted([*range(30), *range(30)])
    for stream in streams:
        (group,) = await weft.groups(stream)
        assert (group["lag"], group["pending"]) == (0, 0)


async def test_leaving_gives_back(connection: Any) -> None:
    declare("one", fields={"n": "int64"})
    await fill("one", 10)
    member = {"streams": ["one"], "group": "g", "buffer_size": 5}
    async with connection.xconsumer(consumer="a", **member) as consumer:
        assert numbers([await consumer.get_entry()]) == [0]
    async with connection.xconsumer(consumer="b", **member, auto_acknowledge=True) as consumer:
        assert sorted(numbers(await drained(consumer))) == list(range(1, 10))
    (group,) = await weft.groups("one")
    assert (group["pending"], [each["deliveries"] for each in group["members"]]) == (1, [1])


async def test_not_given_twice_without_an_ack(connection: Any) -> None:
    declare("one", fields={"n": "int64"})
    await fill("one", 5)
    async with connection.xconsumer(streams=["one"], group="g", consumer="a") as consumer:
        found = await drained(consumer)
        assert numbers(found) == [0, 1, 2, 3, 4]
        assert await consumer.ack(found[1:3]) == 2
        assert await consumer.nack(found[3]) == 1
        assert numbers(await drained(consumer)) == [3]
    # What it has not acknowledged is what it begins with, after a restart.
    await fill("one", 1, first=9)
    async with connection.xconsumer(streams=["one"], group="g", consumer="a", start_from_backlog=True) as consumer:
        found = await drained(consumer)
        assert sorted(numbers(found)) == [0, 3, 4, 9]
        assert await consumer.ack(found) == 4
    # A name that begins alike is another member's.
    await fill("one", 1, first=10)
    async with connection.xconsumer(streams=["one"], group="g", consumer="ab") as consumer:
        assert numbers(await drained(consumer)) == [10]
    async with connection.xconsumer(streams=["one"], group="g", consumer="a", start_from_backlog=True) as consumer:
        assert await drained(consumer) == []


@pytest.mark.timing
async def test_idle_entries_are_claimed(connection: Any) -> None:
    one = declare("one", fields={"n": "int64"})
    await fill("one", 3)
    member = {"streams": ["one"], "group": "g", "claim_idle": 50, "buffer_size": 5}
    async with connection.xconsumer(consumer="a", **member) as slow, connection.xconsumer(consumer="b", **member) as b:
        held = await slow.get_batch()
        await asyncio.to_thread(wait_until_expired, one)
        taken = await b.get_batch()
        assert numbers(taken) == numbers(held) == [0, 1, 2]
        with pytest.raises(weft.LeaseLostError):
            await slow.ack(held)


async def test_dead_letters(connection: Any) -> None:
    declare("one", fields={"n": "int64"})
    await fill("one", 2)
    async with connection.xconsumer(streams=["one"], group="g", consumer="a", max_deliveries=2) as consumer:
        seen = []
        while (pair := await consumer.get_entry())[0]:
            seen += numbers([pair])
            if seen[-1] == 0:
                await consumer.nack(pair)
            else:
                await consumer.ack(pair)
    assert sorted(seen) == [0, 0, 1]
    # By name, although the stream itself is not declared with max_deliveries.
    (buried,) = await weft.consume("one__dead_letter", "grave", connection=connection)
    assert (buried["stream"], buried["consumer"], buried["event"]) == ("one", "g", {"n": 0})
    frame = await asyncio.to_thread(weft.read_stream, connection, "one__dead_letter")
    assert frame["stream"].to_list() == ["one"]
    async with connection.xconsumer(streams=["one__dead_letter"], one__dead_letter={"identifier": 0}) as consumer:
        assert len(await drained(consumer)) == 1
    assert (await asyncio.to_thread(replay_sync, "one__dead_letter", connection=connection)).replayed == 1
    with pytest.raises(weft.NotFoundError, match="'two__dead_letter'"):
        await weft.consume("two__dead_letter", "grave", connection=connection)


async def test_what_is_refused(connection: Any) -> None:
    declare("one", fields={"n": "int64"})
    with pytest.raises(weft.NotFoundError, match="'one'"):
        await connection.xconsumer(streams=["one", "onee"]).get_entry()
    with pytest.raises(weft.NotFoundError, match="has no group"):
        await connection.xconsumer(streams=["one"], group="g", consumer="a", auto_create=False).get_entry()
    with pytest.raises(weft.SettingsError, match=r"weft\.reset"):
        await connection.xconsumer(streams=["one"], group="g", consumer="a", group_start="$").get_entry()
    with pytest.raises(weft.SettingsError, match="claim_idle is 1,000,000,000,000"):
        await connection.xconsumer(streams=["one"], group="g", consumer="a", claim_idle=10**12).get_entry()
    with pytest.raises(weft.SettingsError, match="start_from_backlog"):
        await connection.xconsumer(streams=["one"], group="g", consumer="a", one={"identifier": 3}).get_entry()
    with pytest.raises(weft.SettingsError, match="offset"):
        await connection.xconsumer(streams=["one"], one={"identifier": "1-0"}).get_entry()


def test_only_where_there_are_streams() -> None:
    with pytest.raises(weft.DeclarationError, match="cannot hold a stream"):
        weft.DuckDBConnection("x.duckdb").xconsumer(streams=["one"])
