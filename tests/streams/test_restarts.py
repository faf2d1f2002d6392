"""Consumers and iterations of declared streams wait for a server that is restarted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import servers
import weft
from servers import wait_until
from weft.project import Project, use
from weft.systems import reader_retries
from workers import declare

pytestmark = pytest.mark.timing


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The threads that have met the outage. They wait for longer than a machine stands still that is moved."""
    monkeypatch.setattr(reader_retries, "PATIENCE_SECONDS", 600.0)
    met: set[str] = set()
    pause_after = reader_retries.Patience.pause_after

    def noted(self: reader_retries.Patience, error: Any) -> float:
        pause = pause_after(self, error)
        met.add(threading.current_thread().name)
        return pause

    monkeypatch.setattr(reader_retries.Patience, "pause_after", noted)
    return met


@pytest.mark.brief("redis")
@pytest.mark.parametrize("own_server", ["postgres", "mysql", "redis"], indirect=True)
def test_a_restart_while_they_read(own_server: servers.Server, waiting: set[str]) -> None:
    # Keyed: who publishes around a restart may have to publish again.
    project, found = Project(), {}

    def publish(*numbers: int) -> None:
        while True:
            try:
                weft.publish_sync("orders", [{"n": number} for number in numbers])
                return
            except weft.ConnectionFailedError:
                pass

    def consume(member: dict[str, str]) -> Any:
        async def run() -> None:
            async with connection.xconsumer(
                streams=["orders"], timeout=600_000, orders={"identifier": ">" if member else "0"}, **member
            ) as consumer:
                while len(seen) < 6:
                    _, entry = await consumer.get_entry()
                    seen.append(entry.field_values["n"])
                    if member:
                        await consumer.ack(entry)

        seen = found[threading.current_thread().name] = []
        asyncio.run(run())

    def iterate(member: dict[str, Any]) -> None:
        seen = found[threading.current_thread().name] = []
        for frame in weft.iter_stream(connection, "orders", count=6, **member):
            seen += frame["n"].to_list()

    def run(work: Callable[[Any], None], options: Any) -> None:
        with use(project):
            work(options)

    with use(project), own_server.database() as url:
        connection = weft.connect(url=url, name="default")
        declare("orders", fields={"n": "int64"}, idempotency_key="n")
        readers = {
            "alone": (consume, {}),
            "group": (consume, {"group": "a", "consumer": "c"}),
            "frames": (iterate, {}),
            "frames of a group": (iterate, {"group": "b", "consumer": "c", "auto_ack": True}),
        }
        threads = [threading.Thread(target=run, args=each, name=name) for name, each in readers.items()]
        publish(0, 1, 2)
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: sum(map(len, found.values())) == 12, "the first events", 120)
            own_server.kill()
            wait_until(lambda: waiting >= readers.keys(), "all readers to meet the outage", 120)
            own_server.start()
            publish(3, 4, 5)
        finally:
            for thread in threads:
                thread.join(300)
            weft.streams.close(project)
    assert found == {key: [0, 1, 2, 3, 4, 5] for key in readers}
