"""`weft.streams.close()`: everything opens again at the next use, whoever uses it meanwhile."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest

import weft
from servers import wait_until
from weft import ConnectionFailedError
from weft.project import Project
from workers import PATIENCE, declare, drain


def test_it_opens_again(streams: Project) -> None:
    declare()
    for n in range(3):
        weft.publish_sync("orders", {"n": n})
        events = weft.consume_sync("orders", "worker", member="a")
        weft.streams.close(streams)
        weft.streams.close(streams)
        assert weft.ack_sync("orders", "worker", events) == 1
    assert [event["n"] for event in drain("orders")] == [0, 1, 2]


@pytest.mark.timing
def test_beside_publishers(streams: Project) -> None:
    """A publish either is stored or says that it is not; none waits for ever."""
    declare(fields={"n": "int64"})
    stop = threading.Event()
    stored: list[int] = []

    def publish(number: int) -> None:
        n = number
        while not stop.is_set():
            n += 10
            try:
                weft.publish_sync("orders", {"n": n})
            except ConnectionFailedError:
                continue
            stored.append(n)

    threads = [threading.Thread(target=publish, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        weft.streams.close(streams)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert sorted(event["n"] for event in drain("orders")) == sorted(stored)


@pytest.mark.timing
def test_no_connection_is_left(streams: Project, system: Any, shared_server: Any) -> None:
    """Not even one that was in use while the project was closed."""
    declare(fields={"n": "int64"})
    if system.kind == "sqlite":
        import os

        def connections() -> int:
            path = system.connection.resolved().path
            links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
            return sum(os.path.lexists(link) and os.readlink(link).startswith(path) for link in links)

    elif system.kind == "redis":

        def connections() -> int:
            with closing(shared_server("redis").connect()) as client:
                return sum(each["db"] == system.url.rsplit("/", 1)[1] for each in client.client_list())

    else:
        query = {
            "postgres": "SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND state IS NOT NULL",
            "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = '{}'",
        }[system.kind].format(system.url.rsplit("/", 1)[1])

        def connections() -> int:
            with closing(shared_server(system.kind).connect()) as driver, driver.cursor() as cursor:
                cursor.execute(query)
                return int(cursor.fetchone()[0])

    def use() -> None:
        for _ in range(10):
            try:
                weft.consume_sync("orders", "worker")
            except ConnectionFailedError:
                continue

    weft.publish_sync("orders", {"n": 1})
    assert connections() > 0
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        weft.streams.close(streams)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    weft.streams.close(streams)
    wait_until(lambda: connections() == 0, "the connections to end")
