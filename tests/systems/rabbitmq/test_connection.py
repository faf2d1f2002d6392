"""A connection refuses what cannot be, says what answered, and keeps its secrets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import weft
from weft.cli import cli

URL = "amqp://me:hunter2@localhost:5672/shop"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"payload_format": "jsn"}, r"Did you mean 'json'\?"),
        ({"amqp_url": "localhost:5672"}, "is not a URL"),
        ({"amqp_url": "http://localhost"}, "needs amqp:// or amqps://"),
        ({"amqp_url": "amqp://"}, "user:password@host:port/vhost"),
        ({"amqp_url": "amqp://me:hunter2@host:port"}, "user:password@host:port/vhost"),
        ({"prefetch": 0}, "1 to 65535"),
        ({"prefetch": 70_000}, "1 to 65535"),
        ({"max_unread": 0}, "at least 1"),
        ({"keep_days": -1}, "less than 0"),
        ({"ssl_certificate_location": "x.pem"}, "both or neither"),
        ({"ssl_ca_location": "x.pem"}, r"Begin it with amqps://"),
        ({"payload_format": "raw_bytes", "metadata_columns": True}, "are not parsed"),
        ({"queue_arg": {}}, r"Did you mean 'queue_args'\?"),
        ({"queue_args": "x"}, "queue_args must be"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(weft.DeclarationError, match=message) as told:
        weft.RabbitMQConnection(**{"amqp_url": URL, **fields})
    assert "hunter2" not in str(told.value)


def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "hunter2")
    made = weft.RabbitMQConnection("amqps://me:${PASSWORD}@localhost", ssl_key_password="hunter3")
    assert made.secrets() == {"hunter2", "hunter3"}
    assert "hunter" not in repr(made) + repr(made.resolved()) + made.target + made.resolved().target


def test_one_place() -> None:
    one = weft.RabbitMQConnection(URL, name="one")
    assert one.address == ("localhost", 5672, "shop")
    assert one.is_same_place(weft.RabbitMQConnection("amqp://you@localhost", vhost="shop", prefetch=1))
    assert not one.is_same_place(weft.RabbitMQConnection("amqp://me@localhost:5672"))
    assert weft.RabbitMQConnection("amqps://h/%2Fa").address == ("h", 5671, "/a")
    assert hash(weft.RabbitMQConnection(URL, queue_args={"x-max-length": 3})) is not None


def test_declared_by_a_class_and_by_url(project: Path) -> None:
    @weft.connection
    class broker:
        kind = "rabbitmq"
        amqp_url = URL
        queue_args = {"x-dead-letter-exchange": "dlx"}  # noqa: RUF012

    assert isinstance(broker, weft.RabbitMQConnection) and broker.rejects_bad
    assert isinstance(weft.connect(url=URL), weft.RabbitMQConnection)


def test_check(rabbitmq: Any, connection: Any) -> None:
    report = connection.check()
    assert report["server"].startswith("RabbitMQ 3") and report["database"] == "/" and report["latency_ms"] > 0
    encrypted = f"amqps://weaver:hunter2@127.0.0.1:{rabbitmq.tls_port}"
    trusting = weft.RabbitMQConnection(encrypted, ssl_ca_location=str(rabbitmq.certificate))
    assert trusting.check()["server"] == report["server"]
    for fields, message in (
        ({"amqp_url": encrypted}, "certificate verify failed"),
        ({"amqp_url": rabbitmq.url().replace("hunter2", "hunter3")}, "ACCESS_REFUSED"),
        ({"amqp_url": rabbitmq.url(), "vhost": "nothing"}, "nothing"),
        ({"amqp_url": encrypted, "ssl_ca_location": "/nothing.pem"}, "No such file"),
    ):
        with pytest.raises(weft.ConnectionFailedError, match=message) as told:
            weft.RabbitMQConnection(**fields).check()
        assert "hunter" not in str(told.value)


def test_check_by_a_command(rabbitmq: Any, project: Path) -> None:
    Path("weft.toml").write_text(f'[connections.broker]\nkind = "rabbitmq"\namqp_url = "{rabbitmq.url()}"\n')
    done = CliRunner().invoke(cli, ["connections", "check", "broker", "--format", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["server"].startswith("RabbitMQ")
    assert "hunter2" not in done.output


def test_nobody_answers() -> None:
    with socket.socket() as taken:  # bound, so that nobody else is there, and not listening
        taken.bind(("127.0.0.1", 0))
        made = weft.RabbitMQConnection(f"amqp://me:hunter2@127.0.0.1:{taken.getsockname()[1]}", name="broker")
        with pytest.raises(weft.ConnectionFailedError, match="Cannot open the connection 'broker'") as told:
            made.check()
        assert "weft connections check broker" in str(told.value) and "hunter2" not in str(told.value)
        assert "nobody answers" in str(told.value)


@pytest.mark.full
def test_a_command_says_once_that_nobody_answers(project: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        source = f'[source]\nkind = "rabbitmq"\namqp_url = "amqp://127.0.0.1:{taken.getsockname()[1]}"\nquery = "q"\n'
        Path("pipeline.toml").write_text(f'pipeline_name = "p"\n{source}[target]\ntable = "t"\n')
        command = [sys.executable, "-m", "weft", "consume", "pipeline.toml", "--once"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    first, hint = done.stderr.splitlines()
    assert first.startswith("error: Cannot open a rabbitmq connection") and first.endswith("nobody answers")
    assert hint == "  Check that the server runs and takes connections."
