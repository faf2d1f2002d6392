"""A private RabbitMQ for the tests.

    broker = RabbitMQServer()
    broker.start()
    queue = broker.create_queue()
    broker.publish(queue, [b'{"n": 1}'])
    broker.kill()        # -9: durable messages that it confirmed are there after
    broker.restart()

Its `epmd`, by which nodes of Erlang find each other, has a port of its own: the usual one would outlive it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from servers import KINDS, Server, free_port, wait_until

USER, PASSWORD = "weaver", "hunter2"


class RabbitMQServer(Server):
    """One node."""

    name = "RabbitMQ"
    package = "rabbitmq-server"
    user = "rabbitmq"

    @classmethod
    def programs(cls) -> list[str]:
        return ["rabbitmq-server", "rabbitmqctl", "epmd"]

    @classmethod
    def search_path(cls) -> list[str]:
        # Debian's program of this name changes users and folders.
        return [str(path) for path in sorted(Path("/usr/lib/rabbitmq/lib").glob("*/sbin"), reverse=True)]

    def initialise(self) -> None:
        self.epmd_port, self.tls_port, self.dist_port = free_port(), free_port(), free_port()
        self.epmd: subprocess.Popen[bytes] | None = None
        self.certificate, key = self.folder / "certificate.pem", self.folder / "key.pem"
        self.run(
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key)),
            *("-out", str(self.certificate)),
        )
        settings = {
            "listeners.ssl.default": f"127.0.0.1:{self.tls_port}",
            "ssl_options.certfile": str(self.certificate),
            "ssl_options.keyfile": str(key),
            "default_user": USER,
            "default_pass": PASSWORD,
            "default_permissions.configure": ".*",
            "default_permissions.read": ".*",
            "default_permissions.write": ".*",
            # A small disk of a test machine must not stop publishers.
            "disk_free_limit.absolute": "1MB",
            "vm_memory_high_watermark.absolute": "2GB",
        }
        (self.folder / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        (self.folder / "plugins").write_text("[].\n")
        cookie = self.folder / ".erlang.cookie"
        cookie.write_text("weft")
        cookie.chmod(0o400)
        if os.geteuid() == 0:
            account = pwd.getpwnam(self.user)
            for path in self.folder.iterdir():
                os.chown(path, account.pw_uid, account.pw_gid)

    def start(self) -> None:
        if not self.is_running:
            self.epmd = subprocess.Popen(
                [self.find("epmd"), "-address", "127.0.0.1", "-port", str(self.epmd_port)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                **self.as_user(),
            )
            wait_until(self._has_epmd, "epmd")
        super().start()

    def _has_epmd(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.epmd_port), timeout=5):
            return True
        return False

    def kill(self) -> None:
        super().kill()  # epmd too, which works in its folder
        if self.epmd is not None:
            self.epmd.wait()
            self.epmd = None

    def command(self) -> list[str]:
        return [*self._environment(), self.program]

    def _environment(self) -> list[str]:
        settings = {
            "HOME": self.folder,
            "RUNNING_UNDER_SYSTEMD": "true",  # the server itself, without a shell in front of it
            "ERL_EPMD_PORT": self.epmd_port,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"weft{self.port}@localhost",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": self.dist_port,
            "RABBITMQ_MNESIA_BASE": self.data,
            "RABBITMQ_LOG_BASE": self.folder / "log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "plugins",
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq.conf",
            "RABBITMQ_PID_FILE": self.folder / "pid",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2",
        }
        return ["env", *(f"{name}={value}" for name, value in settings.items())]

    def cut_connections(self) -> None:
        """Close the connections of all clients."""
        self.control("close_all_connections", "cut by a test")

    def control(self, *command: str) -> None:
        """Do what an administrator does."""
        self.run(*self._environment(), self.find("rabbitmqctl"), *command)

    def url(self, database: str | None = None) -> str:
        return f"amqp://{USER}:{PASSWORD}@127.0.0.1:{self.port}"

    def connect(self, database: str | None = None) -> Any:
        import pika

        # While it starts, a plain socket is refused at once; pika's own way to fail takes the time that it needs.
        socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        return pika.BlockingConnection(pika.URLParameters(f"{self.url()}?blocked_connection_timeout=60"))

    @contextlib.contextmanager
    def channel(self) -> Iterator[Any]:
        """A channel whose publishes are confirmed."""
        with contextlib.closing(self.connect()) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            yield channel

    def create_queue(self, name: str | None = None, **arguments: Any) -> str:
        """Make an empty durable queue and give its name. `x_dead_letter_exchange="dlx"` is an argument of it."""
        name = name or f"queue-{next(self.numbers)}"
        with self.channel() as channel:
            named = {argument.replace("_", "-"): value for argument, value in arguments.items()}
            channel.queue_declare(name, durable=True, arguments=named)
        return name

    def delete_queue(self, name: str) -> None:
        with self.channel() as channel:
            channel.queue_delete(name)

    def publish(
        self, queue: str, values: Iterable[bytes], *, exchange: str = "", ids: bool = True, **properties: Any
    ) -> None:
        """Store messages in this order, each with an id of its own."""
        import pika

        with self.channel() as channel:
            for value in values:
                named = {"message_id": str(uuid.uuid4()) if ids else None, "delivery_mode": 2, **properties}
                channel.basic_publish(exchange, queue, value, pika.BasicProperties(**named), mandatory=True)

    def count(self, queue: str) -> int:
        """How many messages a queue has that no consumer holds."""
        with self.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)

    def messages(self, queue: str) -> list[tuple[Any, Any, bytes]]:
        """All messages of a queue, (method, properties, body), which stay in it."""
        found = []
        with self.channel() as channel:
            while (got := channel.basic_get(queue))[0] is not None:
                found.append(got)
        return found


def wait_for_count(broker: RabbitMQServer, queue: str, count: int) -> None:
    is_reached: Callable[[], bool] = lambda: broker.count(queue) == count  # noqa: E731
    wait_until(is_reached, f"{count} messages in {queue}")


KINDS["rabbitmq"] = RabbitMQServer
