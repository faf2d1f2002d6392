"""A database of the run's Redis, a client of it that is not ours, and the cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

import servers
from consumers.cutter import Cutter
from servers import wait_until


@pytest.fixture
def url(shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    """An empty database."""
    with shared_server("redis").database() as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    """What sees the database without our code."""
    import redis

    with closing(redis.Redis.from_url(url)) as found:
        yield found


@pytest.fixture
def add(client: Any) -> Callable[..., list[str]]:
    """`add("events", {"a": 1}, {"a": 2})` adds entries and gives their ids."""

    def add_all(stream: str, *entries: dict[Any, Any]) -> list[str]:
        pipeline = client.pipeline(transaction=False)
        for entry in entries:
            pipeline.xadd(stream, entry)
        return [found.decode() for found in pipeline.execute()]

    return add_all


@pytest.fixture
def cluster(shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    """An empty cluster of three nodes."""
    with shared_server("redis-cluster").database() as found:
        yield found


@pytest.fixture
def later(client: Any) -> Iterator[Callable[..., None]]:
    """`later(function, …)` calls it in a moment, in another thread, for which the client is there until it is done.
    `later(function, …, when_blocked=True)` waits until a client waits for entries."""
    threads: list[threading.Thread] = []

    def call(function: Callable[..., Any], *arguments: Any, when_blocked: bool = False) -> None:
        def run() -> None:
            if when_blocked:
                wait_until(lambda: client.info("clients")["blocked_clients"] > 0, "a client that waits for entries")
            function(*arguments)

        threads.append(threading.Thread(target=run) if when_blocked else threading.Timer(0.2, run))
        threads[-1].start()

    yield call
    for thread in threads:
        thread.join()


@pytest.fixture
def cutter(url: str) -> Iterator[Cutter]:
    """A way to the database on which replies can be lost."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    found = Cutter(url)
    run(found.__aenter__())
    yield found
    run(found.__aexit__())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
