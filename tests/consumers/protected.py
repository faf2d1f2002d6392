"""Servers behind TLS, and servers that Sentinels watch over."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

import redis_server
import servers
import weft


@contextmanager
def behind_tls(folder: Path) -> Iterator[tuple[redis_server.RedisServer, str, Path]]:
    """A server that also speaks TLS: its URL without the certificate's authority, and that."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key)]
    subprocess.run([*make, "-out", str(cert), *subject], check=True, capture_output=True)
    for path in (folder, key, cert, *folder.parents[:3]):
        path.chmod(0o755)
    tls_port = servers.free_port()

    class WithTls(redis_server.RedisServer):
        def settings(self) -> dict[str, str]:
            files = {"--tls-cert-file": str(cert), "--tls-key-file": str(key), "--tls-ca-cert-file": str(cert)}
            return super().settings() | files | {"--tls-port": str(tls_port), "--tls-auth-clients": "no"}

    server = WithTls()
    server.start()
    try:
        yield server, f"rediss://127.0.0.1:{tls_port}", cert
    finally:
        server.kill()


class _Sentinel(redis_server.RedisServer):
    """Watches over one server, and promotes its replica soon after that is gone."""

    watched: redis_server.RedisServer

    def command(self) -> list[str]:
        config = self.folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.data}\n"
            f"sentinel monitor mymaster 127.0.0.1 {self.watched.port} 1\n"
            "sentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 2000\n"
        )
        config.chmod(0o666)
        return [self.program, str(config), "--sentinel"]


@contextmanager
def watched(server: Any) -> Iterator[tuple[redis_server.RedisServer, weft.RedisConnection]]:
    """A replica of the server, and the connection to whichever of both the Sentinel names."""
    replica, sentinel = redis_server.RedisServer(), _Sentinel()
    sentinel.watched = server
    try:
        replica.start()
        with closing(replica.connect()) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", server.port)
        sentinel.start()
        wait_for_replica(server)
        with closing(sentinel.connect()) as client:
            servers.wait_until(
                lambda: len(client.execute_command("SENTINEL", "REPLICAS", "mymaster")) == 1, "the replica to be known"
            )
        yield replica, weft.RedisConnection(sentinels=f"127.0.0.1:{sentinel.port}", service="mymaster")
    finally:
        sentinel.kill()
        replica.kill()


def wait_for_replica(server: Any) -> None:
    """Wait until it has all that was written."""
    with closing(server.connect()) as client:
        client.set("written", "last")
        servers.wait_until(lambda: client.execute_command("WAIT", 1, 100) == 1, "the replica to have it")


def add_after_takeover(replica: redis_server.RedisServer, stream: str, fields: dict[str, Any]) -> None:
    """Wait until the Sentinel has promoted the replica, which ends its connections, and add an entry there."""

    def is_master() -> bool:
        with suppress(redis.ConnectionError), closing(replica.connect()) as client:
            role: str = client.info("replication")["role"]
            return role == "master"
        return False

    servers.wait_until(is_master, "the replica to take over")
    with closing(replica.connect()) as client:
        client.xadd(stream, fields)
