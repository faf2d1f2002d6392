"""Streams on a cluster of three nodes: each stream with its bookkeeping in one slot, different ones anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import redis_server
import servers
import weft
from weft import BusyError
from weft.project import Project
from weft.systems.redis.ids import Keys
from workers import declare, drain, log_of

on_cluster = pytest.mark.parametrize("system", ["redis-cluster"], indirect=True)
NAMES = [f"orders_{n}" for n in range(12)]


@on_cluster
def test_the_keys_of_a_stream_are_in_one_slot(streams: Project, client: Any) -> None:
    keys = Keys.of("shop", "orders")
    all_keys = [keys.stream, keys.meta, keys.fields, keys.seen, keys.trims, *keys.books("a{b}c")]
    assert len({client.keyslot(key) for key in all_keys}) == 1
    assert len({client.get_node_from_key(name).name for name in NAMES}) == 3


@on_cluster
def test_everything_a_stream_does(streams: Project) -> None:
    for name in NAMES:
        declare(name, fields={"n": "int64"}, idempotency_key="n", max_deliveries=2)
        weft.publish_sync(name, [{"n": n} for n in range(5)])
        assert weft.publish_sync(name, {"n": 4})["rows_deduplicated"] == 1
    for name in NAMES:
        events = weft.consume_sync(name, "worker", 3, member="a")
        assert weft.ack_sync(name, "worker", events[:1]) == 1
        assert weft.nack_sync(name, "worker", events[1:2], reason="bad") == 1
        assert [event["n"] for event in weft.consume_sync(name, "worker", member="a", batch_size=1)] == [2]
        weft.reset_sync(name, "worker")
        assert [event["n"] for event in drain(name, "worker")] == list(range(5))
        assert weft.trim_sync(name, max_rows=2) == 3
        assert log_of(name).count() == 2
    assert len(log_of(NAMES[0]).store.names()) >= len(NAMES)
    assert log_of(NAMES[0]).store.now() > 0


@on_cluster
def test_publishes_to_many_streams_at_once(streams: Project) -> None:
    """One group of publishes is several scripts; a quarantine may be on another node than its stream."""
    made = [declare(name, fields={"n": "int64"}, on_schema_drift="quarantine") for name in NAMES]

    async def publish() -> list[dict[str, Any]]:
        return await asyncio.gather(*(weft.publish(each, [{"n": 1}, {"n": "x"}]) for each in made for _ in range(5)))

    assert all(result["rows_quarantined"] == 1 for result in asyncio.run(publish()))
    for each in made:
        assert len(drain(each)) == 5
        assert len(drain(each.quarantine)) == 5


@on_cluster
def test_a_key_that_came_again_fails_its_own_publish_alone(streams: Project) -> None:
    """In a group of publishes to streams of many slots, some of which are stored before the key is refused."""
    made = [declare(name, fields={"n": "int64"}) for name in NAMES]
    for each in made:
        weft.publish_sync(each, {"n": 0}, idempotency_key="used")

    async def publish() -> list[Any]:
        plain = [weft.publish(each, {"n": n}) for n in (1, 2) for each in made]
        again = [weft.publish(each, {"n": 3}, idempotency_key="used") for each in made]
        first, last = plain[: len(made)], plain[len(made) :]
        return await asyncio.gather(*first, *again, *last, return_exceptions=True)

    results = asyncio.run(publish())
    refused = [number for number, each in enumerate(results) if isinstance(each, BaseException)]
    assert refused == list(range(len(made), 2 * len(made)))
    assert all(isinstance(results[number], weft.SettingsError) for number in refused)
    for each in made:
        assert [event["n"] for event in drain(each)] == [0, 1, 2]


@on_cluster
def test_a_refused_publish_leaves_nothing_in_the_quarantine(streams: Project) -> None:
    made = [declare(name, fields={"n": "int64"}, on_schema_drift="quarantine") for name in NAMES]
    for each in made:
        weft.publish_sync(each, {"n": 0}, idempotency_key="used")
        with pytest.raises(weft.SettingsError, match="Nothing was stored"):
            weft.publish_sync(each, [{"n": 1}, {"n": "x"}], idempotency_key="used")
        assert [event["n"] for event in drain(each)] == [0]
        assert drain(each.quarantine) == []


@on_cluster
def test_a_node_without_memory_fails_its_own_publishes_alone(streams: Project, client: Any) -> None:
    made = [declare(name, fields={"n": "int64"}) for name in NAMES]
    for each in made:
        weft.publish_sync(each, {"n": 0})
    full = client.get_node_from_key(NAMES[0])
    is_full = [client.get_node_from_key(name).name == full.name for name in NAMES]

    async def publish() -> list[Any]:
        return await asyncio.gather(*(weft.publish(each, {"n": 1}) for each in made), return_exceptions=True)

    node = client.get_redis_connection(full)
    node.config_set("maxmemory", 1)
    try:
        results = asyncio.run(publish())
    finally:
        node.config_set("maxmemory", 0)
    assert [isinstance(each, weft.StorageError) for each in results] == is_full
    assert not [each for each in results if "part of these" in str(each)]
    for each, failed in zip(made, is_full, strict=True):
        assert [event["n"] for event in drain(each)] == ([0] if failed else [0, 1])


@on_cluster
def test_subscribers_on_several_nodes(streams: Project, client: Any) -> None:
    for name in NAMES[:3]:
        declare(name, fields={"n": "int64"})

    async def listen() -> list[int]:
        async with AsyncExitStack() as begun:  # before another client publishes
            live = [await begun.enter_async_context(weft.subscribe(name)) for name in NAMES[:3]]
            for n, name in enumerate(NAMES[:3]):
                await asyncio.to_thread(client.xadd, name, {"n": n})
            return [event["n"] for event in await asyncio.wait_for(asyncio.gather(*map(anext, live)), 30)]

    assert asyncio.run(listen()) == [0, 1, 2]


@pytest.fixture
def two_nodes(need_server: Any) -> Iterator[list[redis_server.RedisNode]]:
    """The first has all slots, the second has none yet."""
    need_server("redis")
    nodes = [redis_server.RedisNode() for _ in range(2)]
    try:
        for node in nodes:
            node.start()
        with closing(nodes[0].connect()) as first, closing(nodes[1].connect()) as second:
            first.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port, nodes[1].bus_port)
            for each in (first, second):
                servers.wait_until(lambda each=each: b"state:ok" in each.execute_command("CLUSTER", "INFO"), "it")
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def test_a_slot_that_moves(two_nodes: list[redis_server.RedisNode], project: Path) -> None:
    """To a node that clients do not know yet. Publishes go on but for a moment, and what fails says that it stored
    nothing."""
    connection = weft.connect(url=f"redis://127.0.0.1:{two_nodes[0].port}/?cluster=true")
    stream = declare(fields={"n": "int64"}, connection=connection)
    weft.publish_sync(stream, {"n": 0})
    with closing(two_nodes[0].connect()) as source, closing(two_nodes[1].connect()) as target:
        slot = source.execute_command("CLUSTER", "KEYSLOT", "orders")
        names = [each.execute_command("CLUSTER", "MYID").decode() for each in (source, target)]
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
        weft.publish_sync(stream, {"n": 1})
        assert log_of(stream).count() == 2
        for key in source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.execute_command("MIGRATE", "127.0.0.1", two_nodes[1].port, key, 0, 5000)
            for call in (lambda: weft.publish_sync(stream, {"n": 2}), log_of(stream).head):
                with pytest.raises(BusyError, match="Nothing was stored"):
                    call()
        for each in (target, source):
            each.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[1])
        assert target.xlen("orders") == 2
    weft.publish_sync(stream, {"n": 2})
    assert [event["n"] for event in drain(stream)] == [0, 1, 2]
    weft.streams.close()
