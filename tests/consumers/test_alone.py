"""A consumer that is alone reads all that is added after it began, once and in order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import weft
from consumers.numbered import numbers


async def drained(consumer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [(stream, entry.field_values) async for stream, entry in consumer]


async def test_begins_at_the_end(client: Any) -> None:
    await client.xadd("s", {"n": 1})
    async with client.xconsumer(streams=["s"]) as consumer:
        await client.xadd("s", {"n": 2})
        assert await drained(consumer) == [(b"s", {b"n": b"2"})]
        await client.xadd("s", {"n": 3})
        assert await drained(consumer) == [(b"s", {b"n": b"3"})]


async def test_a_deleted_last_entry_does_not_move_the_end(client: Any) -> None:
    await client.xadd("s", {"n": 1})
    last = await client.xadd("s", {"n": 2})
    await client.xdel("s", last)
    async with client.xconsumer(streams=["s"]) as consumer:
        assert await drained(consumer) == []


@pytest.mark.parametrize("given", ["5-0", b"5-0", "5", 5])
async def test_begins_after_an_identifier(client: Any, given: Any) -> None:
    for number in range(1, 9):
        await client.xadd("s", {"n": number}, id=f"{number}-0")
        await client.xadd("t", {"n": number}, id=f"{number}-0")
    async with client.xconsumer(streams=["s", b"t"], s={"identifier": given}, t={"identifier": "$"}) as consumer:
        assert await drained(consumer) == [(b"s", {b"n": b"%d" % n}) for n in (6, 7, 8)]


async def test_entering_again_begins_anew(client: Any) -> None:
    consumer = client.xconsumer(streams=["s"], buffer_size=5)
    async with consumer:
        for number in range(3):
            await client.xadd("s", {"n": number})
        assert (await consumer.get_entry())[1].field_values == {b"n": b"0"}
    async with consumer:
        assert await consumer.get_entry() == (None, None)


async def test_batches(client: Any) -> None:
    async with client.xconsumer(streams=["s", "t"], buffer_size=3) as consumer:
        assert await consumer.get_batch() == []
        for number in range(10):
            await client.xadd("s", {"n": number})
        found = []
        while batch := await consumer.get_batch():
            assert len(batch) <= 4
            found += batch
        assert [entry.field_values for _, entry in found] == [{b"n": b"%d" % n} for n in range(10)]
        for number in range(4):
            await client.xadd("t", {"n": number})
        assert [len(await consumer.get_batch(3)) for _ in range(3)] == [3, 1, 0]


async def test_values_are_exact(client: Any) -> None:
    values = {b"binary": bytes(range(256)), b"lines": b"a\r\nb\r\n", b"": b"", b"long": b"x" * 100_000}
    async with client.xconsumer(streams=["s"]) as consumer:
        identifier = await client.xadd("s", values)
        stream, entry = await consumer.get_entry()
    assert (stream, entry.identifier, entry.field_values) == (b"s", identifier, values)
    assert (entry.stream, entry.deliveries) == (b"s", None)


@pytest.mark.parametrize("group", [{}, {"group": "g", "consumer": "c"}], ids=["alone", "group"])
@pytest.mark.parametrize("of", ["client", "connection"])
async def test_fields_of_one_name_are_kept(client: Any, redis_url: str, of: str, group: dict[str, str]) -> None:
    """In frames they have the same names."""
    kept = {b"a": b"1", b"": b"2", b"a#2": b"3", b"#2": b"4", b"a#3": b"5"}
    opener = client if of == "client" else weft.connect(url=redis_url)
    async with opener.xconsumer(streams=["s"], **group) as consumer:
        for _ in range(2):
            await client.execute_command("XADD", "s", "*", *"a1", "", "2", *"a3", "", "4", *"a5")
        assert [values for _, values in await drained(consumer)] == [kept, kept]
    assert [entry.field_values for entry in await client.xrange("s")] == [kept, kept]
    names = weft.read_stream(redis_url, "s").columns[2:]
    assert names == [name.decode() for name in kept]


@pytest.mark.timing
async def test_more_streams_meanwhile(client: Any) -> None:
    await client.xadd("t", {"n": 1})
    await client.xadd("u", {"n": 1}, id="1-0")
    async with client.xconsumer(streams=["s"], timeout=60_000) as consumer:
        # The request for the one stream is under way, and must not read it twice.
        first = asyncio.create_task(consumer.get_entry())
        await asyncio.sleep(0.05)
        assert await consumer.add_stream("t")
        assert await consumer.add_stream("u", "0")
        assert not await consumer.add_stream("t")
        assert (await first)[0] == b"u"
        await client.xadd("s", {"n": 2})
        assert (await consumer.get_entry())[0] == b"s"
        await client.xadd("t", {"n": 3})
        stream, entry = await consumer.get_entry()
        assert (stream, entry.field_values) == (b"t", {b"n": b"3"})


@pytest.mark.timing
async def test_streams_join_one_that_is_read(client: Any) -> None:
    async with client.xconsumer(streams=["s0"], timeout=60_000, buffer_size=3) as consumer:
        found: list[Any] = []

        async def read() -> None:
            while len(found) < 60:
                found.extend(await consumer.get_batch())

        reading = [asyncio.create_task(read())]
        for number in range(60):
            if number % 20 == 10:
                await consumer.add_stream(f"s{number // 20 + 1}")
                reading.append(asyncio.create_task(read()))
                await asyncio.sleep(0)
            await client.xadd(f"s{number % len(consumer.streams)}", {"n": number})
        await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        for task in reading:
            task.cancel()
    assert sorted(numbers(found)) == list(range(60))


@pytest.mark.timing
async def test_who_stops_waiting_loses_nothing(client: Any) -> None:
    async with client.xconsumer(streams=["s", "t"], timeout=60_000, buffer_size=10) as consumer:
        found = []
        for number in range(20):
            waiting = asyncio.create_task(consumer.get_entry())
            await asyncio.sleep(0.001 * (number % 3))
            await client.xadd("st"[number % 2], {"n": number})
            waiting.cancel()
            outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if not isinstance(outcome, BaseException):
                found.append(outcome)
        while len(found) < 20:
            found.append(await consumer.get_entry())
    assert sorted(numbers(found)) == list(range(20))


async def test_tasks_share_a_consumer(client: Any) -> None:
    async with client.xconsumer(streams=["s", "t"], timeout=60_000) as consumer:
        waiting = [asyncio.create_task(consumer.get_entry()) for _ in range(10)]
        for number in range(10):
            await client.xadd("st"[number % 2], {"n": number})
        found = [int(entry.field_values[b"n"]) for _, entry in await asyncio.gather(*waiting)]
    assert sorted(found) == list(range(10))


@pytest.mark.timing
async def test_waits_longer_than_the_socket(single_url: str) -> None:
    async with (
        weft.Redis.from_url(single_url, socket_timeout=0.2) as client,
        client.xconsumer(streams=["s"], timeout=1000) as consumer,
    ):
        assert await consumer.get_entry() == (None, None)


async def test_waits_for_all_slots_at_once(cluster: weft.RedisCluster) -> None:
    """Each node has a request that waits, all at the same time."""
    client: Any = cluster
    async with client.xconsumer(streams=["one", "two", "three"], timeout=60_000) as consumer:
        assert len({client.get_node_from_key(stream).name for stream in consumer.streams}) > 1
        waiting = asyncio.create_task(consumer.get_entry())
        nodes = [client.get_node_from_key(stream) for stream in consumer.streams]
        while True:
            about = [await client.info("clients", target_nodes=node) for node in nodes]
            if all(each["blocked_clients"] for each in about):
                break
            assert not waiting.done()
        await client.xadd("three", {"n": 1})
        assert (await waiting)[0] == b"three"


async def test_texts_where_the_client_decodes(single_url: str) -> None:
    async with (
        weft.Redis.from_url(single_url, decode_responses=True) as client,
        client.xconsumer(streams=["s"]) as consumer,
    ):
        identifier = await client.xadd("s", {"n": 1})
        assert await consumer.get_entry() == ("s", (identifier, {"n": "1"}))
        await client.xadd("s", {"n": b"\xff"})
        with pytest.raises(weft.WeftError, match=r"'s' is not text[\s\S]*decode_responses"):
            await consumer.get_entry()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_both_protocols(single_url: str, protocol: int) -> None:
    async with (
        weft.Redis.from_url(single_url, protocol=protocol) as client,
        client.xconsumer(streams=["s"]) as consumer,
    ):
        await client.xadd("s", {"n": 1})
        assert await drained(consumer) == [(b"s", {b"n": b"1"})]


async def test_a_stream_that_began_anew(client: Any) -> None:
    """With identifiers below those that were read, as when they are not made of the time."""
    async with client.xconsumer(streams=["s"], timeout=60_000) as consumer:
        await client.xadd("s", {"n": 1}, id="9-0")
        assert (await consumer.get_entry())[1].field_values == {b"n": b"1"}
        await client.delete("s")
        await client.xadd("s", {"n": 2}, id="1-0")
        assert (await consumer.get_entry())[1].field_values == {b"n": b"2"}


def test_what_is_refused() -> None:
    client = weft.Redis()
    itself: Any = {"streams": ["s"], "group": "g", "consumer": "c", "max_deliveries": 1, "dead_letter": b"s"}
    for options, words in (
        (itself, "dead letters cannot go to 's'"),
        ({"streams": []}, "at least one stream"),
        ({"streams": "one"}, "list of streams"),
        ({"streams": {"one": "0"}}, r"one=\{\"identifier\": \"0\"\}"),
        ({"streams": [3]}, "has a name"),
        ({}, "needs the streams"),
        ({"streams": ["s"], "bufer_size": 3}, "'buffer_size'"),
        ({"streams": ["s"], "buffer_size": -1}, "from 0 to 99,999"),
        ({"streams": ["s"], "timeout": "1"}, "timeout must be"),
        ({"streams": ["s"], "claim_idle": 5}, "group and consumer"),
        ({"streams": ["s"], "group": "g"}, "go together"),
        ({"streams": ["s"], "group": "g", "consumer": ""}, "must be a name"),
        ({"streams": ["s"], "group": "g", "consumer": "c", "dead_letter": "d"}, "needs max_deliveries"),
        ({"streams": ["s"], "group": "g", "consumer": "c", "auto_acknowledge": "no"}, "True or False, not 'no'"),
        ({"streams": ["s"], "s": {"start": 1}}, "identifier"),
    ):
        with pytest.raises(weft.SettingsError, match=words):
            client.xconsumer(**options)


async def test_no_identifier_of_redis(single: weft.Redis) -> None:
    with pytest.raises(weft.SettingsError, match="1700000000000-0"):
        await single.xconsumer(streams=["s"], s={"identifier": "yesterday"}).get_entry()
    with pytest.raises(weft.SettingsError, match=r"weft\.Redis"):
        await weft.Consumer(object(), streams=["s"]).get_entry()
