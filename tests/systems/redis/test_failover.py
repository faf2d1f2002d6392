"""A replica takes over under those who publish and consume."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import redis_server
import servers
import weft
from weft import ConnectionFailedError, RedisConnection
from workers import declare

pytestmark = pytest.mark.timing


class Sentinel(redis_server.RedisServer):
    """Says where the server is. The tests tell it."""

    def initialise(self) -> None:
        super().initialise()
        config = self.folder / "sentinel.conf"
        config.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self.data}\n")
        config.chmod(0o666)

    def command(self) -> list[str]:
        return [self.program, str(self.folder / "sentinel.conf"), "--sentinel"]

    def point_to(self, server: servers.Server) -> None:
        with closing(self.connect()) as client:
            if client.execute_command("SENTINEL", "MASTERS"):
                client.execute_command("SENTINEL", "REMOVE", "mymaster")
            client.execute_command("SENTINEL", "MONITOR", "mymaster", "127.0.0.1", server.port, 1)


@pytest.fixture
def replica(own_server: servers.Server) -> Iterator[redis_server.RedisServer]:
    server = redis_server.RedisServer()
    server.start()
    with closing(server.connect()) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", own_server.port)
    yield server
    server.kill()


@pytest.fixture
def sentinel(own_server: servers.Server) -> Iterator[Sentinel]:
    server = Sentinel()
    server.start()
    server.point_to(own_server)
    yield server
    server.kill()


def test_a_replica_takes_over(
    own_server: servers.Server,
    replica: redis_server.RedisServer,
    sentinel: Sentinel,
    project: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it had heard of stays as it was, leases too. What it had not is gone, and its offsets are not used again."""
    connection = RedisConnection(sentinels=f"127.0.0.1:{sentinel.port}", service="mymaster")
    stream = declare(fields={"n": "int64"}, connection=connection)

    async def go() -> None:
        live = weft.subscribe(stream)
        await weft.publish(stream, [{"n": n} for n in range(10)])
        mine = await weft.consume(stream, "worker", 4, member="a")
        await weft.ack(stream, "worker", mine[:2])
        with closing(own_server.connect()) as client:
            servers.wait_until(lambda: client.execute_command("WAIT", 1, 100) == 1, "the replica to have them")
        with closing(replica.connect()) as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        with closing(own_server.connect()) as client:  # its clock is ahead
            client.xadd("orders", {"n": 10}, id=f"{int(datetime.now(UTC).timestamp() * 1000) + 3_600_000}-0")
        unheard = await weft.publish(stream, {"n": 11})
        assert [(await anext(live))["n"] for _ in range(12)] == list(range(12))

        own_server.kill()
        sentinel.point_to(replica)
        assert (await published({"n": 20}))["first_rowid"] > unheard["last_rowid"]
        assert (await asyncio.wait_for(anext(live), 30))["n"] == 20
        assert await weft.ack(stream, "worker", mine[2:]) == 2
        rest = await weft.consume(stream, "worker", member="b")
        assert [event["n"] for event in rest] == [4, 5, 6, 7, 8, 9, 20]
        assert await weft.ack(stream, "worker", rest) == 7

    async def published(event: dict[str, Any]) -> dict[str, Any]:
        while True:
            with suppress(ConnectionFailedError):
                return await weft.publish(stream, event)

    asyncio.run(go())
    assert "The server lost its last events" in caplog.text
    with closing(replica.connect()) as client:
        assert client.xpending("orders", "worker")["pending"] == 0
    weft.streams.close()
