"""Consumers over TLS, and through Sentinels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import redis_server
import weft
from consumers.numbered import drained, fill, numbers
from consumers.protected import add_after_takeover, behind_tls, wait_for_replica, watched


async def test_tls(need_server: Callable[[str], None], tmp_path: Path) -> None:
    need_server("redis")
    with behind_tls(tmp_path) as (_, url, authority):
        async with weft.Redis.from_url(url, ssl_ca_certs=str(authority)) as client:
            await fill(client, 30)
            await taken_by_members(client)
        await taken_by_members(weft.connect(url=f"{url}/?tls_ca={authority}"), group="h")
        async with weft.Redis.from_url(url) as unknown:
            with pytest.raises(weft.ConnectionFailedError):
                await unknown.xconsumer(streams=["s"]).get_entry()


async def taken_by_members(client: Any, group: str = "g") -> None:
    """All that is there, by two members of a group, one of which gives back what it did not hand out."""
    async with client.xconsumer(streams=["s"], group=group, consumer="a", buffer_size=19) as first:
        found = await first.get_batch(5)
        assert await first.ack(found) == 5
    async with client.xconsumer(streams=["s"], group=group, consumer="b", auto_acknowledge=True) as second:
        found += await drained(second)
    assert sorted(numbers(found)) == list(range(30))


@pytest.mark.brief("group")
@pytest.mark.timing
@pytest.mark.parametrize("member", [{}, {"group": "g", "consumer": "a"}], ids=["alone", "group"])
async def test_a_failover(need_server: Callable[[str], None], member: dict[str, str]) -> None:
    """The replica takes the place of the server that a consumer reads from, while it waits."""
    need_server("redis")
    server = redis_server.RedisServer()
    server.start()
    try:
        with watched(server) as (replica, connection):
            async with connection.xconsumer(streams=["s"], timeout=60_000, buffer_size=5, **member) as consumer:
                async with weft.Redis.from_url(server.url()) as client:
                    await fill(client, 10)
                found = await consumer.get_batch()
                while len(found) < 10:
                    found += await consumer.get_batch()
                waiting = asyncio.create_task(consumer.get_entry())
                await asyncio.to_thread(wait_for_replica, server)
                server.kill()
                await asyncio.to_thread(add_after_takeover, replica, "s", {"n": 10})
                found.append(await waiting)
                # What the replica had not heard of may be delivered again.
                while 10 not in numbers(found):
                    found.append(await consumer.get_entry())
            assert sorted(set(numbers(found))) == list(range(11))
    finally:
        server.kill()
