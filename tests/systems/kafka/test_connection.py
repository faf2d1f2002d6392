"""A connection is what both clients need, refuses what cannot be, signs in, and keeps its secrets."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kafka_server import PASSWORD, SCRAM, USER
from servers import wait_until
from weft import ConnectionFailedError, DeclarationError, KafkaConnection, NotFoundError, SettingsError
from weft.systems import messages
from weft.systems.kafka import client, options, stream_source
from weft.systems.kafka.target import KafkaTarget
from weft.systems.load import Load


def test_what_the_clients_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP", "a, b:9093,[::1]")
    monkeypatch.setenv("KAFKA_PASS", 'p"w\\')
    made = KafkaConnection(
        "${KAFKA_BOOTSTRAP}", sasl_plain_username="me", sasl_plain_password="${KAFKA_PASS}", sasl_mechanism="PLAIN"
    )
    client, spark = options.for_client(made), options.for_spark(made)
    assert client["bootstrap.servers"] == spark["kafka.bootstrap.servers"] == "a:9092,b:9093,[::1]:9092"
    # A password does not go in the clear unless somebody says so.
    assert client["security.protocol"] == spark["kafka.security.protocol"] == "SASL_SSL"
    assert (client["sasl.username"], client["sasl.password"]) == ("me", 'p"w\\')
    assert spark["kafka.sasl.jaas.config"].endswith(r'PlainLoginModule required username="me" password="p\"w\\";')
    assert made.group == "weft"


def test_certificates_travel_as_texts(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"-----{name}-----")
    made = KafkaConnection(
        "h",
        ssl_ca_location=str(tmp_path / "ca"),
        ssl_certificate_location=str(tmp_path / "cert"),
        ssl_key_location=str(tmp_path / "key"),
        ssl_key_password="hunter2",
    )
    spark = options.for_spark(made)
    assert spark["kafka.security.protocol"] == "SSL"
    assert spark["kafka.ssl.truststore.certificates"] == "-----ca-----"
    assert spark["kafka.ssl.keystore.key"] == "-----key-----"
    assert options.for_client(made)["ssl.key.location"] == str(tmp_path / "key")
    assert "hunter2" not in repr(made)
    (tmp_path / "ca").unlink()
    with pytest.raises(SettingsError, match=r"/ca of a kafka connection cannot be read: No such file"):
        options.for_spark(made)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"payload_format": "jsn"}, r"Did you mean 'json'\?"),
        ({"sasl_plain_username": "me"}, "sasl_plain_password, both or neither"),
        ({"sasl_mechanism": "PLAIN"}, "without a user"),
        ({"security_protocol": "SASL_SSL"}, "without a user"),
        (
            {"sasl_plain_username": "me", "sasl_plain_password": "x", "security_protocol": "SSL"},
            "does not sign in",
        ),
        (
            {"sasl_plain_username": "me", "sasl_plain_password": "x", "sasl_mechanism": "scram-sha-256"},
            r"Did you mean 'SCRAM-SHA-256'\?",
        ),
        ({"ssl_key_location": "/k"}, "both or neither"),
        ({"bootstrap_servers": ""}, "has no bootstrap_servers"),
        ({"bootstrap_servers": "kafka://h:1"}, "not host:port"),
        ({"bootstrap_servers": "h:99999"}, "not host:port"),
        ({"bootstap_servers": "h"}, r"Did you mean 'bootstrap_servers'\?"),
        ({"group_id": 3}, "group_id must be str"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        KafkaConnection(**{"bootstrap_servers": "h:9092", **fields})


def test_check(kafka: Any, connection: KafkaConnection) -> None:
    kafka.create_topic()
    # A broker says that a topic is made before it lists it.
    wait_until(lambda: connection.check()["topics"] >= 1, "the topic to be listed")
    report = connection.check()
    assert report["server"] == "Kafka, 1 broker"
    assert report["latency_ms"] > 0


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.systems.kafka.client.SECONDS", 1.5)
    with socket.socket() as taken:  # bound, so that nobody else is there, and not listening
        taken.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        made = KafkaConnection(at, name="events")
        with pytest.raises(
            ConnectionFailedError, match=rf"'events' \({at}\).*refused[\s\S]*Check that the server runs"
        ):
            made.check()


@pytest.mark.brief("SCRAM-SHA-512")
@pytest.mark.parametrize("mechanism", ["PLAIN", *SCRAM])
def test_sign_in(kafka: Any, spark: Any, mechanism: str) -> None:
    """Both clients, with a password of the characters that configurations give a meaning to."""
    made = KafkaConnection(
        kafka.sasl_bootstrap,
        sasl_plain_username=USER,
        sasl_plain_password=PASSWORD,
        sasl_mechanism=mechanism,
        security_protocol="SASL_PLAINTEXT",
    )
    topic = kafka.create_topic()
    if mechanism in SCRAM:
        kafka.add_scram_user()
    assert made.check()["server"] == "Kafka, 1 broker"
    frame = spark.createDataFrame([(1,)], "n int")
    assert KafkaTarget(made).write(frame, Load.declare(target=topic), spark).inserted == 1
    assert client.send(made, topic, [(None, b'{"n": 2}')]) == 1
    read = spark.read.format("kafka").options(**options.for_spark(made)).option("subscribe", topic).load()
    with closing(messages.rows(read, made)) as rows:
        good = rows.good
        assert sorted(row.n for row in good.collect()) == [1, 2]


def test_tls(kafka: Any, spark: Any) -> None:
    """Both clients."""
    made = KafkaConnection(kafka.tls_bootstrap, ssl_ca_location=str(kafka.certificate))
    topic = kafka.create_topic()
    assert made.check()["server"] == "Kafka, 1 broker"
    frame = spark.createDataFrame([(1,)], "n int")
    assert KafkaTarget(made).write(frame, Load.declare(target=topic), spark).inserted == 1
    assert [json.loads(message.value()) for message in kafka.messages(topic)] == [{"n": 1}]
    with pytest.raises(ConnectionFailedError, match=r"(?i)certificate verify failed|SSL handshake failed"):
        KafkaConnection(kafka.tls_bootstrap, security_protocol="SSL").check()


def test_a_wrong_password_is_told_without_it(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASS", "correct-horse")
    made = KafkaConnection(
        kafka.sasl_bootstrap,
        name="events",
        sasl_plain_username=USER,
        sasl_plain_password="${KAFKA_PASS}",
        security_protocol="SASL_PLAINTEXT",
    )
    with pytest.raises(ConnectionFailedError, match=r"(?i)authentication failed[\s\S]*password") as raised:
        made.check()
    assert "correct-horse" not in f"{raised.value} {made!r} {made.resolved()!r}"


def test_a_password_on_a_listener_without_encryption(kafka: Any) -> None:
    made = KafkaConnection(kafka.sasl_bootstrap, sasl_plain_username=USER, sasl_plain_password=PASSWORD)
    with pytest.raises(ConnectionFailedError, match="The protocol is SASL_SSL") as raised:
        made.check()
    assert 'security_protocol="SASL_PLAINTEXT"' in str(raised.value.hint)


def test_a_topic_that_is_not_there(kafka: Any, connection: KafkaConnection, spark: Any) -> None:
    topic = kafka.create_topic()
    for ask in (
        lambda: client.admin(connection).latest(f"{topic}x"),
        lambda: stream_source.stream(spark, connection, f"{topic}x"),
        lambda: client.send(connection, f"{topic}x", []),
    ):
        with pytest.raises(NotFoundError, match=rf"no topic of the connection 'events' named '{topic}x'[\s\S]*{topic}"):
            ask()
    with pytest.raises(DeclarationError, match="cannot be a topic"):
        stream_source.stream(spark, connection, f"{topic},{topic}")
