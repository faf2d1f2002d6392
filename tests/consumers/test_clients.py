"""Clients are redis-py's, with names for what streams hold."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio

import servers
import weft
from consumers.numbered import drained, fill, numbers


async def test_they_are_redis_pys(client: Any) -> None:
    assert isinstance(client, redis.asyncio.Redis | redis.asyncio.RedisCluster)
    await client.set("key", "value")
    assert await client.get("key") == b"value"


def test_where_they_lead() -> None:
    client = weft.Redis("cache", 6380, 2, password="hunter2")
    wanted = {"host": "cache", "port": 6380, "db": 2, "password": "hunter2"}
    assert client.get_connection_kwargs().items() >= wanted.items()
    assert weft.Redis.from_url("redis://:hunter2@cache:6380/2").get_connection_kwargs().items() >= wanted.items()
    assert "hunter2" not in repr(client)
    with pytest.raises(TypeError, match="colour"):
        weft.Redis(colour="red")


async def test_entries_have_names(client: Any) -> None:
    await fill(client, 2)
    (entry, last) = await client.xrange("s")
    assert entry.field_values == entry[1] == {b"n": b"0"}
    identifier, values = entry
    assert (identifier, values) == (entry.identifier, entry.field_values) == entry
    assert [each.identifier for each in await client.xrevrange("s")] == [last.identifier, identifier]
    assert pickle.loads(pickle.dumps(entry)) == entry
    await client.xgroup_create("s", "g", "0")
    ((stream, (read,)),) = await client.xread({"s": "0"}, count=1)
    assert (stream, read.identifier) == (b"s", identifier)
    ((stream, (read,)),) = await client.xreadgroup("g", "a", {"s": ">"}, count=1)
    assert (stream, read.field_values) == (b"s", values)
    (claimed,) = await client.xclaim("s", "g", "b", 0, [identifier])
    assert claimed.identifier == identifier
    assert await client.xclaim("s", "g", "b", 0, [identifier], justid=True) == [identifier]
    _, (claimed,), *_ = await client.xautoclaim("s", "g", "a", 0)
    assert claimed.identifier == identifier


async def test_keys_through_a_connection(redis_url: str, client: Any) -> None:
    connection = weft.connect(url=redis_url)
    await fill(client, 3)
    async with connection.xconsumer(streams=["s"], s={"identifier": "0"}) as consumer:
        assert numbers(await drained(consumer)) == [0, 1, 2]
    async with weft.GroupConsumer(connection, ["s"], "g", "a", auto_acknowledge=True) as consumer:
        assert numbers(await drained(consumer)) == [0, 1, 2]
    assert (await client.xpending("s", "g")).pending == 0


async def test_declared_streams_and_keys_together(redis_url: str) -> None:
    connection = weft.connect(url=redis_url)

    @weft.stream("declared", fields={"n": "int64"}, connection=connection)
    def declared(): ...

    with pytest.raises(weft.SettingsError, match="'declared' is a declared stream and 's' a key"):
        await connection.xconsumer(streams=["declared", "s"]).get_entry()
    async with connection.xconsumer(streams=["s"]) as consumer:
        with pytest.raises(weft.SettingsError, match="'declared' is a declared stream and 's' a key"):
            await consumer.add_stream("declared")
        assert await consumer.get_entry() == (None, None)


async def test_acks_of_lists(client: Any) -> None:
    await fill(client, 6)
    await client.xgroup_create("s", "g", "0")
    await client.xreadgroup("g", "a", {"s": ">"}, count=5)
    await client.xreadgroup("g", "b", {"s": ">"})
    ids = [entry.identifier for entry in await client.xrange("s")]
    pending = await client.xpending("s", "g")
    assert pending == (6, ids[0], ids[5], {b"a": 5, b"b": 1})
    assert (pending.minimum_identifier, pending.maximum_identifier) == (ids[0], ids[5])
    assert await client.xack("s", "g", [ids[0], ids[1]]) == 2
    assert await client.xack("s", "g", ids[1], ids[2].decode()) == 1
    assert await client.xack("s", "g", []) == await client.xack("s", "g") == 0
    entries = await client.xrange("s")
    assert await client.xack("s", "g", entries[3]) == await client.xack("s", "g", entries[:5]) == 1
    assert await client.xack("s", "g", iter(ids)) == 1
    assert (await client.xpending("s", "g")).consumers == {}


async def test_pending_entries_of_a_range(client: Any) -> None:
    await fill(client, 4)
    await client.xgroup_create("s", "g", "0")
    await client.xreadgroup("g", "a", {"s": ">"}, count=3)
    await client.xreadgroup("g", "b", {"s": ">"})
    ids = [entry.identifier for entry in await client.xrange("s")]
    pending = await client.xpending("s", "g", "-", "+", 10)
    assert [(each.identifier, each.consumer, each.delivered) for each in pending] == [
        *((identifier, b"a", 1) for identifier in ids[:3]),
        (ids[3], b"b", 1),
    ]
    assert all(each.idle >= 0 for each in pending)
    assert [each.identifier for each in await client.xpending("s", "g", ids[1], "+", count=2)] == ids[1:3]
    assert [each.identifier for each in await client.xpending("s", "g", "-", "+", 10, consumer="b")] == ids[3:]
    assert await client.xpending("s", "g", "-", "+", 10, idle=3_600_000) == ()


async def test_the_last_identifier_is_set(client: Any) -> None:
    await fill(client, 1)
    assert await client.xsetid("s", "9999999999999-5") is True
    assert await client.xadd("s", {"n": 2}) == b"9999999999999-6"
    assert await client.xsetid("s", "9999999999999-9", entries_added=20, max_deleted_id="9999999999999-7") is True
    found = await client.xinfo_stream("s")
    assert (found["entries-added"], found["max-deleted-entry-id"]) == (20, b"9999999999999-7")


@pytest.mark.timing
async def test_connections_that_another_task_closes(need_server: Callable[[str], None]) -> None:
    """As redis-py does after a failover, between looking at a connection and writing to it."""
    need_server("redis-cluster")
    cluster: Any = servers.shared("redis-cluster")
    async with weft.RedisCluster("127.0.0.1", cluster.nodes[0].port) as client:
        await client.initialize()
        node = client.get_node_from_key("closed")
        sent = 0
        while sent < 100:
            waiting = asyncio.create_task(client.xadd("closed", {"n": sent}))
            for _ in range(sent % 7):  # somewhere in the middle
                await asyncio.sleep(0)
            for each in list(node._connections):
                await each.disconnect(nowait=True)
            with contextlib.suppress(redis.ConnectionError):  # of one that was waiting for its answer
                await waiting
            sent += 1
        assert await client.xlen("closed") >= 50


def test_without_redis_py() -> None:
    """It is asked for by name, and only where it is needed."""
    program = """
import sys
sys.modules["redis"] = None
import weft
weft.SQLiteConnection(path="x.db").xconsumer(streams=["s"])
try:
    weft.Redis
except weft.MissingExtraError as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "weft[redis]" in done.stdout, done.stderr
