"""What a member fetched and did not hand out is neither lost nor hidden when it leaves, is cancelled, or is slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import weft
from consumers.numbered import drained, fill, numbers, until_idle


async def test_given_back(client: Any) -> None:
    await fill(client, 30, "one", "two", "three")
    streams = ["one", "two", "three"]
    async with client.xconsumer(streams=streams, group="g", consumer="a", buffer_size=100) as first:
        seen = [await first.get_entry() for _ in range(3)]
    async with client.xconsumer(streams=streams, group="g", consumer="b", buffer_size=7) as second:
        rest = await drained(second)
    found = seen + rest
    assert len(found) == len({(stream, entry.identifier) for stream, entry in found}) == 90
    # Nobody saw them before.
    assert {entry.deliveries for _, entry in rest} == {1}


@pytest.mark.parametrize("auto_acknowledge", [False, True])
async def test_an_error_in_the_loop(client: Any, auto_acknowledge: bool) -> None:
    await fill(client, 10)
    options = {"streams": ["s"], "group": "g", "buffer_size": 9, "auto_acknowledge": auto_acknowledge}
    with pytest.raises(ZeroDivisionError):
        async with client.xconsumer(consumer="a", **options) as first:
            async for _ in first:
                raise ZeroDivisionError
    async with client.xconsumer(consumer="b", **options) as second:
        assert numbers(await drained(second)) == list(range(1, 10))


async def test_somebody_claimed_them_meanwhile(client: Any) -> None:
    """Then they are not this member's to give back."""
    await fill(client, 4)
    async with client.xconsumer(streams=["s"], group="g", consumer="a", buffer_size=9) as first:
        _, entry = await first.get_entry()
        ids = [each.identifier for each in await client.xrange("s")]
        await client.xclaim("s", "g", "other", 0, ids[1:3])
        assert await first.nack(entry) == 1
        assert await first.nack(entry) == 0
    assert (await client.xpending("s", "g")).consumers == {b"other": 2, b"weft:given-back": 2}


@pytest.mark.timing
async def test_cancelled_while_it_waits(client: Any) -> None:
    """The request goes on: what it gives comes with the next call, or goes back."""
    member = {"group": "g", "consumer": "a", "timeout": 60_000}
    found = []
    async with client.xconsumer(streams=["s", "t"], **member) as consumer:
        for number in range(20):
            waiting = asyncio.create_task(consumer.get_entry())
            await asyncio.sleep(0.001 * (number % 3))
            await client.xadd("st"[number % 2], {"n": number})
            waiting.cancel()
            outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if not isinstance(outcome, BaseException):
                found.append(outcome)
    async with client.xconsumer(streams=["s", "t"], group="g", consumer="b") as consumer:
        found += await drained(consumer)
    assert sorted(numbers(found)) == list(range(20))


@pytest.mark.brief(
    "single-alone-0",
    "single-alone-0.01",
    "single-group-0.002",
    "single-group-0.2",
    "cluster-alone-0.002",
    "cluster-alone-0.2",
    "cluster-group-0",
    "cluster-group-0.01",
)
@pytest.mark.timing
@pytest.mark.parametrize("seconds", [0, 0.002, 0.01, 0.2])
@pytest.mark.parametrize("member", [{}, {"group": "g", "consumer": "a"}], ids=["alone", "group"])
async def test_closed_while_somebody_waits(client: Any, member: dict[str, str], seconds: float) -> None:
    """Who waits is told that there is nothing; what comes in that moment goes back."""
    consumer = client.xconsumer(streams=["s", "t"], timeout=60_000, **member)
    waiting = [asyncio.create_task(consumer.get_entry()) for _ in range(3)]
    await asyncio.sleep(seconds)
    closing = asyncio.create_task(consumer.aclose())
    await asyncio.sleep(0)
    await fill(client, 3)
    await closing
    assert await asyncio.gather(*waiting) == [(None, None)] * 3
    async with client.xconsumer(streams=["s"], group="g", consumer="b") as other:
        assert sorted(numbers(await drained(other))) == [0, 1, 2]


async def test_members_of_others_find_them_idle(client: Any) -> None:
    await fill(client, 5)
    async with client.xconsumer(streams=["s"], group="g", consumer="a", buffer_size=9) as consumer:
        await consumer.get_entry()
    _, entries, *_ = await client.xautoclaim("s", "g", "somebody", 3_600_000)
    assert [int(entry.field_values[b"n"]) for entry in entries] == [1, 2, 3, 4]


@pytest.mark.timing
async def test_what_lay_too_long_is_fetched_again(client: Any) -> None:
    """Another member may claim it any moment; to hand it out here too would be to process it twice."""
    await fill(client, 6)
    member = {"streams": ["s"], "group": "g", "buffer_size": 9, "claim_idle": 200}
    async with client.xconsumer(consumer="a", **member) as slow, client.xconsumer(consumer="b", **member) as other:
        first = await slow.get_entry()
        await slow.ack(first)
        await until_idle(client, "s", 200)
        taken = await other.get_batch(3)
        assert await other.ack(taken) == 3
        rest = await drained(slow)
        assert numbers([first]) + numbers(taken) == [0, 1, 2, 3]
        # What the other holds in its buffer is given back when it leaves, or claimed once it is idle.
        assert not set(numbers(rest)) & set(numbers(taken))


async def test_what_was_given_back_is_not_acknowledged_by_itself(client: Any) -> None:
    await fill(client, 3)
    options = {"streams": ["s"], "group": "g", "auto_acknowledge": True}
    async with client.xconsumer(consumer="a", **options) as first:
        _, entry = await first.get_entry()
        assert await first.nack(entry) == 1
    async with client.xconsumer(consumer="b", **options) as second:
        assert numbers(await drained(second)) == [0, 1, 2]
    assert (await client.xpending("s", "g")).pending == 0


async def test_acks_after_leaving(redis_url: str, client: Any) -> None:
    """What is opened for them is closed again."""
    await fill(client, 2)
    async with weft.connect(url=redis_url).xconsumer(streams=["s"], group="g", consumer="a", buffer_size=9) as consumer:
        batch = await consumer.get_batch()
    assert await consumer.ack(batch[0]) == 1
    assert await consumer.nack(batch[1]) == 1
    assert consumer._reader is None
    async with client.xconsumer(streams=["s"], group="g", consumer="b") as other:
        assert numbers(await drained(other)) == [1]


def test_another_event_loop(single_url: str) -> None:
    consumer = weft.connect(url=single_url).xconsumer(streams=["s"])
    with asyncio.Runner() as runner:
        assert runner.run(consumer.get_entry()) == (None, None)
        with pytest.raises(weft.SettingsError, match="another event loop"):
            asyncio.run(consumer.get_entry())
        runner.run(consumer.aclose())


async def test_what_redis_refuses(client: Any) -> None:
    """The stream is named, and the error is ours."""
    await client.set("{s}text", "x")
    for member in ({}, {"group": "g", "consumer": "a"}):
        with pytest.raises(weft.WeftError, match=r"'\{s\}text': WRONGTYPE[^@]*$"):
            await client.xconsumer(streams=["{s}text"], **member).get_entry()
    with pytest.raises(weft.SettingsError, match="identifier"):
        await client.xconsumer(streams=["s"], s={"identifier": "9" * 30}).get_entry()
