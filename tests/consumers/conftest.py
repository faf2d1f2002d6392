"""Clients of a single Redis and of a cluster of three, each with nothing in it.

async def test_something(client):    runs on both (-k single, -k cluster)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

import servers
import weft


@pytest.fixture(params=["single", "cluster"])
def redis_url(request: pytest.FixtureRequest, shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    with shared_server("redis" if request.param == "single" else "redis-cluster").database() as url:
        yield url


@pytest_asyncio.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    kind = weft.RedisCluster if "cluster" in redis_url else weft.Redis
    async with kind.from_url(redis_url.partition("?")[0]) as opened:
        yield opened


@pytest_asyncio.fixture
async def cluster(shared_server: Callable[[str], servers.Server]) -> AsyncIterator[weft.RedisCluster]:
    with shared_server("redis-cluster").database() as url:
        async with weft.RedisCluster.from_url(url.partition("?")[0]) as opened:
            yield opened


@pytest.fixture
def single_url(shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    with shared_server("redis").database() as url:
        yield url


@pytest_asyncio.fixture
async def single(single_url: str) -> AsyncIterator[weft.Redis]:
    async with weft.Redis.from_url(single_url) as opened:
        yield opened
