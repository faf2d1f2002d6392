"""A connection is taken apart into what the client needs, and tells what is wrong with it."""

from __future__ import annotations

import contextlib
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import redis_server
import servers
import weft
from servers import wait_until
from weft import ConnectionFailedError, DeclarationError, RedisConnection, SettingsError
from weft.systems.redis.client import durability_warning, open_client


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", {}),
        ("redis://h:1/2", {"host": "h", "port": 1, "database": 2}),
        ("redis://me:p%40w@h", {"host": "h", "username": "me", "password": "p@w"}),
        ("redis://:pw@h", {"host": "h", "password": "pw"}),
        ("rediss://h", {"host": "h", "tls": True}),
        ("redis://[::1]:7/", {"host": "::1", "port": 7}),
        ("redis://h/?cluster=true", {"host": "h", "cluster": True}),
        (
            "rediss://h?tls_ca=/ca.pem&tls_verify=no",
            {"host": "h", "tls": True, "tls_ca": "/ca.pem", "tls_verify": False},
        ),
        ("redis:///1?sentinels=a:1,b:2&service=m", {"sentinels": "a:1,b:2", "service": "m", "database": 1}),
    ],
)
def test_options(url: str, expected: dict[str, object]) -> None:
    assert RedisConnection(url).options() == expected


def test_a_password_of_the_environment_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "s3cr@t/?#:")
    for made in (
        RedisConnection("redis://app:${SHOP_PASSWORD}@host/1"),
        RedisConnection(host="host", username="app", password="${SHOP_PASSWORD}", database=1),
    ):
        found = made.resolved().options()
        assert found == {"host": "host", "username": "app", "password": "s3cr@t/?#:", "database": 1}
        assert "s3cr" not in repr(made.resolved())
        assert "s3cr@t/?#:" in made.secrets()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"url": "redis://h?clutser=true"},
            SettingsError,
            r"unknown parameter 'clutser'[\s\S]*Did you mean 'cluster'\?",
        ),
        ({"url": "redis://h?cluster=perhaps"}, SettingsError, "invalid value of 'cluster'"),
        ({"url": "redis://me:hunter2@h:port"}, SettingsError, "cannot be read"),
        ({"url": "redis://me:hunter2@h/shop"}, SettingsError, "Databases of Redis have numbers"),
        ({"url": "redis://h", "port": 1}, DeclarationError, "port is part of the URL"),
        ({"url": "redis://h/3?cluster=true"}, DeclarationError, "has no database 3"),
        ({"sentinels": "a:1"}, DeclarationError, "both sentinels and service"),
        ({"host": "h", "sentinels": "a:1", "service": "m"}, DeclarationError, "a host and sentinels"),
        ({"host": "h", "tls_key": "k"}, DeclarationError, "needs a tls_cert"),
        ({"hots": "h"}, DeclarationError, r"no field 'hots'[\s\S]*Did you mean 'host'\?"),
        ({"url": "mysql://h"}, DeclarationError, "needs redis:// or rediss://"),
        ({"url": "redis://h?connect_timeout=nan"}, DeclarationError, "from above 0 to 3,600, not nan"),
        ({"host": "h", "connect_timeout": -1}, DeclarationError, "from above 0 to 3,600, not -1"),
        ({"url": "redis://me:hunter2@h..example"}, DeclarationError, "'h..example', which is not a name"),
    ],
)
def test_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        RedisConnection(**fields)
    assert "hunter2" not in str(caught.value)


def test_a_stream_where_nobody_is(project: Path) -> None:
    """What to check, not what may be stored."""
    connection = weft.connect(url=f"redis://127.0.0.1:{servers.free_port()}")

    @weft.stream(fields={"n": "int64"}, connection=connection)
    def unreachable() -> None: ...

    with pytest.raises(ConnectionFailedError, match="Check that the server runs"):
        weft.publish_sync(unreachable, {"n": 1})


def test_a_server_that_is_no_cluster(system: Any) -> None:
    with pytest.raises(ConnectionFailedError, match="Cluster mode is not enabled"):
        weft.connect(url=f"{system.url.rpartition('/')[0]}/?cluster=true").check()


def test_check(own_server: servers.Server) -> None:
    found = RedisConnection(own_server.url()).check()
    assert found["server"].startswith("Redis 7")
    assert found.keys() == {"server", "database", "latency_ms"}
    with contextlib.closing(own_server.connect()) as client:
        client.config_set("appendonly", "no")
        assert "no append-only file" in RedisConnection(own_server.url()).check()["warning"]
        client.config_set("maxmemory", "1gb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert "(allkeys-lru), whole streams" in RedisConnection(own_server.url()).check()["warning"]
        client.config_set("appendonly", "yes")
        client.config_set("maxmemory-policy", "volatile-lru")
        assert "warning" not in RedisConnection(own_server.url()).check()
        client.execute_command("ACL", "SETUSER", "default", "resetpass", ">hunter2")
    assert RedisConnection(host="127.0.0.1", port=own_server.port, password="hunter2").check()["server"]
    for password in ("wrong-one", None):
        with pytest.raises(ConnectionFailedError) as caught:
            RedisConnection(host="127.0.0.1", port=own_server.port, password=password).check()
        assert "wrong-one" not in str(caught.value)


@contextlib.contextmanager
def as_version(server: servers.Server, version: bytes) -> Iterator[int]:
    """The port of a proxy, through which a server says that it has another version."""
    with contextlib.closing(server.connect()) as client:
        now = client.info("server")["redis_version"].encode()
    assert len(now) == len(version)  # an answer says how long it is

    class Proxy(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", server.port)) as behind:
                while request := self.request.recv(1 << 16):
                    behind.sendall(request)
                    self.request.sendall(behind.recv(1 << 16).replace(b"_version:" + now, b"_version:" + version))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever).start()
        try:
            yield proxy.server_address[1]
        finally:
            proxy.shutdown()


def test_a_server_that_is_too_old(own_server: servers.Server, project: Path) -> None:
    with as_version(own_server, b"6.2.14") as port:
        connection = weft.connect(name="cache", url=f"redis://127.0.0.1:{port}")

        @weft.stream(fields={"n": "int64"}, connection=connection)
        def clicks() -> None: ...

        assert "Redis 7 or newer" in connection.check()["warning"]
        for use in (lambda: weft.publish_sync(clicks, {"n": 1}), lambda: weft.consume_sync(clicks, "c")):
            with pytest.raises(SettingsError, match=r"'cache'.* Redis 6\.2\.14: streams of Weft need Redis 7 or newer"):
                use()
        weft.streams.close()
    with contextlib.closing(own_server.connect()) as client:
        assert client.keys() == []


class TlsServer(redis_server.RedisServer):
    """Talks TLS alone, and wants to know who comes."""

    def initialise(self) -> None:
        super().initialise()
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        files = ["-keyout", str(self.folder / "key.pem"), "-out", str(self.folder / "cert.pem")]
        subprocess.run([*make, *files, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
        (self.folder / "key.pem").chmod(0o644)

    def settings(self) -> dict[str, str]:
        cert, key = str(self.folder / "cert.pem"), str(self.folder / "key.pem")
        tls = {"--tls-port": str(self.port), "--tls-cert-file": cert, "--tls-key-file": key, "--tls-ca-cert-file": cert}
        return super().settings() | {"--port": "0"} | tls

    def fields(self) -> dict[str, Any]:
        cert, key = str(self.folder / "cert.pem"), str(self.folder / "key.pem")
        return {"host": "127.0.0.1", "port": self.port, "tls_ca": cert, "tls_cert": cert, "tls_key": key}

    def connect(self, database: str | None = None) -> Any:
        client = open_client(RedisConnection(**self.fields()))
        client.ping()
        return client


@pytest.fixture
def tls_server(need_server: Any) -> Iterator[TlsServer]:
    need_server("redis")
    server = TlsServer()
    server.start()
    yield server
    server.kill()


def test_tls(tls_server: TlsServer) -> None:
    fields = tls_server.fields()
    assert RedisConnection(**fields).check()["server"]
    with pytest.raises(ConnectionFailedError):  # nobody's certificate is known without its authority
        RedisConnection(**{**fields, "tls_ca": None}).check()
    assert RedisConnection(**{**fields, "tls_ca": None}, tls_verify=False).check()["server"]
    connection = weft.connect(kind="redis", **fields)

    @weft.stream(connection=connection)
    def over_tls() -> None: ...

    weft.publish_sync(over_tls, {"n": 1})
    assert [event["n"] for event in weft.consume_sync(over_tls, "worker")] == [1]
    weft.streams.close()


class Sentinel(redis_server.RedisServer):
    """Watches over one server."""

    def watch(self, server: servers.Server) -> Sentinel:
        config = self.folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.data}\nsentinel monitor mymaster 127.0.0.1 {server.port} 1\n"
        )
        config.chmod(0o666)
        return self

    def command(self) -> list[str]:
        return [self.program, str(self.folder / "sentinel.conf"), "--sentinel"]


def test_sentinels_name_the_server(own_server: servers.Server) -> None:
    sentinel = Sentinel().watch(own_server)
    sentinel.start()
    try:
        made = RedisConnection(sentinels=f"127.0.0.1:{sentinel.port}", service="mymaster")
        assert made.check()["server"].startswith("Redis 7")
        with pytest.raises(ConnectionFailedError, match="mynobody"):
            RedisConnection(sentinels=f"127.0.0.1:{sentinel.port}", service="mynobody").check()
        with pytest.raises(DeclarationError, match="not host:port"):
            RedisConnection(sentinels="a:b", service="mymaster").check()
    finally:
        sentinel.kill()


@pytest.mark.timing
def test_a_server_that_says_nothing() -> None:
    """It accepts connections, as one does that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for where in ({"host": "127.0.0.1", "port": port}, {"sentinels": f"127.0.0.1:{port}", "service": "mymaster"}):
            with pytest.raises(ConnectionFailedError):
                RedisConnection(**where, connect_timeout=0.1).check()


@pytest.mark.timing
def test_acknowledged_events_survive_a_kill(own_server: servers.Server, project: Path) -> None:
    connection = weft.connect(url=own_server.url())

    @weft.stream(fields={"n": "int64"}, connection=connection)
    def numbers() -> None: ...

    stored = []
    for n in range(5):
        with contextlib.suppress(ConnectionFailedError):
            weft.publish_sync(numbers, {"n": n})
            stored.append(n)
        assert own_server.process is not None
        own_server.process.send_signal(signal.SIGKILL)
        own_server.restart()
    assert stored
    found = [event["n"] for event in weft.consume_sync(numbers, "worker")]
    assert [n for n in found if n in stored] == stored
    assert len(found) == len(set(found))
    weft.streams.close()


@pytest.mark.timing
def test_no_warning_while_a_server_loads_its_file(own_server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    with contextlib.closing(own_server.connect()) as client, client.pipeline(transaction=False) as pipe:
        for n in range(20_000):
            pipe.set(f"key {n}", n)
        pipe.execute()
    own_server.kill()
    # It serves clients each time that it has loaded a thousand keys.
    slow = {**own_server.settings(), "--key-load-delay": "50"}
    monkeypatch.setattr(own_server, "settings", lambda: slow)
    starting = threading.Thread(target=own_server.restart)
    starting.start()
    try:
        with contextlib.closing(redis.Redis(port=own_server.port, retry=Retry(NoBackoff(), 0))) as client:

            def is_loading() -> bool:
                with contextlib.suppress(redis.ConnectionError):
                    return client.info("persistence")["loading"] == 1
                return False

            wait_until(is_loading, "the server to load its file")
            assert durability_warning(client) is None
            assert is_loading()
    finally:
        starting.join()


def test_a_server_that_keeps_nothing_is_warned_of(own_server: servers.Server, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(own_server.connect()) as client:
        client.config_set("appendonly", "no")

    @weft.stream(connection=weft.connect(url=own_server.url()))
    def forgotten() -> None: ...

    weft.publish_sync(forgotten, {"n": 1})
    assert "no append-only file" in caplog.text
    weft.streams.close()


@pytest.mark.timing
def test_ctrl_c_ends_a_process_whose_server_does_not_answer(own_server: servers.Server) -> None:
    """It waited for the thread that watches for new events, and that one a minute for an answer."""
    command = [sys.executable, "-c", CONSUME.format(url=own_server.url())]
    with (
        contextlib.closing(own_server.connect()) as client,
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as process,
    ):
        try:
            wait_until(lambda: client.info("clients")["blocked_clients"] > 0, "a client that waits for entries")
            assert own_server.process is not None
            own_server.process.send_signal(signal.SIGSTOP)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) != 0
        finally:
            process.kill()


CONSUME = """
import signal, weft
signal.signal(signal.SIGINT, signal.default_int_handler)
weft.stream(name="orders")(lambda: None)
weft.consume_sync("orders", "worker", connection=weft.connect(url="{url}"), wait=3600)
"""
