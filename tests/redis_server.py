"""Private Redis servers for the tests: one by itself, and a cluster of three.

server = RedisServer()
server.start()
url = server.create_database("orders")
server.kill()        # -9
server.restart()
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
from typing import Any

from servers import KINDS, Server, free_port, wait_until


class RedisServer(Server):
    """One Redis, with everything it acknowledges on disk."""

    name = "Redis"
    package = "redis-server"
    user = "redis"

    @classmethod
    def programs(cls) -> list[str]:
        return ["redis-server"]

    def initialise(self) -> None:
        self.indexes: dict[str, int] = {}
        self.data.mkdir()
        if os.geteuid() == 0:
            os.chown(self.data, pwd.getpwnam(self.user).pw_uid, pwd.getpwnam(self.user).pw_gid)

    def command(self) -> list[str]:
        return [self.program, *(word for pair in self.settings().items() for word in pair)]

    def settings(self) -> dict[str, str]:
        return {
            "--port": str(self.port),
            "--bind": "127.0.0.1",
            "--dir": str(self.data),
            "--appendonly": "yes",
            "--appendfsync": "always",
            "--save": "",
            "--databases": "1024",
        }

    def connect(self, database: str | None = None) -> Any:
        import redis

        client = redis.Redis(port=self.port, db=int(database or 0), socket_connect_timeout=5, socket_timeout=60)
        try:
            client.ping()  # not while it still loads
        except BaseException:
            client.close()
            raise
        return client

    def url(self, database: str | None = None) -> str:
        return f"redis://127.0.0.1:{self.port}/{database or 0}"

    # A database of Redis has a number, and is there when the server is.

    def create_database(self, name: str) -> str:
        self.indexes[name] = len(self.indexes) % 1023 + 1
        self._flush(self.indexes[name])
        return self.url(str(self.indexes[name]))

    def drop_database(self, name: str) -> None:
        self._flush(self.indexes[name])

    def _flush(self, number: int) -> None:
        with contextlib.closing(self.connect(str(number))) as client:
            client.flushdb()


class RedisNode(RedisServer):
    """A node of a cluster."""

    def settings(self) -> dict[str, str]:
        return super().settings() | {
            "--databases": "1",
            "--cluster-enabled": "yes",
            "--cluster-config-file": "nodes.conf",
            "--cluster-node-timeout": "2000",
            # The bus is at this port, not at ten thousand more, which clients may have.
            "--cluster-port": str(self.bus_port),
        }

    @functools.cached_property
    def bus_port(self) -> int:
        return free_port()


class RedisCluster(RedisServer):
    """Three nodes that share the slots. `nodes` are servers: one can be killed and started again."""

    name = "Redis cluster"

    def initialise(self) -> None:
        self.indexes = {}
        self.nodes = [RedisNode() for _ in range(3)]
        self.formed = False

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        if not self.formed:
            self._form()
            self.formed = True
        wait_until(self._is_ready, "the cluster to be ready")

    def _form(self) -> None:
        import redis

        first, *others = self.nodes
        share = 16384 // len(self.nodes) + 1
        for i, node in enumerate(self.nodes):
            with contextlib.closing(node.connect()) as client:
                slots = range(i * share, min((i + 1) * share, 16384))
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
                try:
                    client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
                except redis.ResponseError as error:
                    # Once in some fifty runs it is refused as done already. `_is_ready` sees whether all is well.
                    if "already non-zero" not in str(error):
                        raise
        with contextlib.closing(first.connect()) as client:
            for node in others:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)

    def _is_ready(self) -> bool:
        for node in self.nodes:
            with contextlib.closing(node.connect()) as client:
                found = client.execute_command("CLUSTER", "INFO")
                known = dict(line.split(":", 1) for line in _text(found).split() if ":" in line)
                if known["cluster_state"] != "ok" or known["cluster_known_nodes"] != "3":
                    return False
        return True

    @property
    def is_running(self) -> bool:
        return all(node.is_running for node in self.nodes)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def connect(self, database: str | None = None) -> Any:
        import redis

        return redis.RedisCluster("127.0.0.1", self.nodes[0].port)

    def url(self, database: str | None = None) -> str:
        return f"redis://127.0.0.1:{self.nodes[0].port}/?cluster=true"

    def _flush(self, number: int) -> None:
        for node in self.nodes:
            with contextlib.closing(node.connect()) as client:
                client.flushall()


def _text(found: Any) -> str:
    if isinstance(found, dict):
        return "\n".join(f"{key}:{value}" for key, value in found.items())
    return found.decode() if isinstance(found, bytes) else str(found)


KINDS["redis"] = RedisServer
KINDS["redis-cluster"] = RedisCluster
