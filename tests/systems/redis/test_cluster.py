"""Streams on a cluster of three nodes: each stream with its bookkeeping in one slot, different ones anywhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import weft
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
def test_subscribers_on_several_nodes(streams: Project, client: Any) -> None:
    for name in NAMES[:3]:
        declare(name, fields={"n": "int64"})

    async def listen() -> list[int]:
        live = [weft.subscribe(name) for name in NAMES[:3]]
        tasks = [asyncio.ensure_future(anext(each)) for each in live]
        await asyncio.sleep(0)
        for n, name in enumerate(NAMES[:3]):
            await asyncio.to_thread(client.xadd, name, {"n": n})
        return [event["n"] for event in await asyncio.wait_for(asyncio.gather(*tasks), 30)]

    assert asyncio.run(listen()) == [0, 1, 2]
