"""A user with the rights that the guide names, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import weft
from consumers.numbered import drained, fill, numbers
from consumers.rights import rights_of

GUIDE = Path(__file__).parents[2] / "docs" / "consumers.md"


@pytest.fixture
def administrator(single_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(single_url) as client:
        yield client
        client.execute_command("ACL", "DELUSER", "app")


def user_of(url: str, administrator: Any, *rights: str) -> weft.Redis:
    administrator.execute_command("ACL", "SETUSER", "app", "reset", "on", ">hunter2", "~s*", *rights)
    return weft.Redis.from_url(url.replace("redis://", "redis://app:hunter2@"))


async def test_alone(single_url: str, administrator: Any) -> None:
    everybody, _, _ = rights_of(GUIDE)
    administrator.xadd("s", {"n": 1})
    async with user_of(single_url, administrator, *everybody) as client:
        async with client.xconsumer(streams=["s"], s={"identifier": "0"}) as consumer:
            assert numbers(await drained(consumer)) == [1]
        with pytest.raises(weft.ConnectionFailedError, match=r"(?s)'s'.*ACL") as caught:
            await client.xconsumer(streams=["s"], group="g", consumer="a").get_entry()
        assert "hunter2" not in str(caught.value)


async def test_in_a_group(single_url: str, administrator: Any, single: weft.Redis) -> None:
    everybody, groups, buried = rights_of(GUIDE)
    await fill(single, 5)
    async with user_of(single_url, administrator, *everybody, *groups) as client:
        options: dict[str, Any] = {"streams": ["s"], "group": "g", "buffer_size": 9, "claim_idle": 60_000}
        async with client.xconsumer(consumer="a", start_from_backlog=True, **options) as consumer:
            assert await consumer.ack(await consumer.get_entry()) == 1
            assert await consumer.nack(await consumer.get_entry()) == 1
        async with client.xconsumer(consumer="b", **options) as consumer:
            assert sorted(numbers(await drained(consumer))) == [1, 2, 3, 4]
    async with user_of(single_url, administrator, *everybody, *groups, *buried) as client:
        options |= {"consumer": "b", "start_from_backlog": True, "max_deliveries": 1}
        async with client.xconsumer(**options) as consumer:
            assert await drained(consumer) == []
    assert await single.xlen("s__dead_letter") == 4
