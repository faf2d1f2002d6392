"""The settings of a connection for both clients: librdkafka's and, inside Spark, Java's."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import DeclarationError, SettingsError
from weft.systems.codec import REGISTERED, Codec, codec_of

if TYPE_CHECKING:
    from weft.systems.kafka.connection import KafkaConnection
    from weft.systems.schema_registry.client import SchemaRegistry

PARTITION_OFFSETS = r"\d+:\d+(,\d+:\d+)*"
TOPIC_NAME, RECORD_NAME, TOPIC_RECORD_NAME = "topic_name", "record_name", "topic_record_name"
STRATEGIES = (TOPIC_NAME, RECORD_NAME, TOPIC_RECORD_NAME)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_LOGIN = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def for_client(connection: KafkaConnection) -> dict[str, str | int]:
    """Return the settings of a client of confluent-kafka."""
    resolved = connection.resolved()
    settings: dict[str, str | int] = {
        "bootstrap.servers": ",".join(resolved.servers),
        "security.protocol": resolved.protocol,
        "client.id": "weft",
        # Errors are raised: it would print to stderr as well.
        "log_level": 0,
    }
    if resolved.sasl_plain_username is not None:
        settings |= {
            "sasl.mechanism": resolved.mechanism,
            "sasl.username": resolved.sasl_plain_username,
            "sasl.password": resolved.sasl_plain_password or "",
        }
    for name, value in (
        ("ssl.ca.location", resolved.ssl_ca_location),
        ("ssl.certificate.location", resolved.ssl_certificate_location),
        ("ssl.key.location", resolved.ssl_key_location),
        ("ssl.key.password", resolved.ssl_key_password),
    ):
        if value:
            settings[name] = value if name == "ssl.key.password" else str(Path(value).expanduser())
    return settings


def for_spark(connection: KafkaConnection) -> dict[str, str]:
    """Return the options of Spark's connector that say where the brokers are and who we are."""
    resolved = connection.resolved()
    settings = {"bootstrap.servers": ",".join(resolved.servers), "security.protocol": resolved.protocol}
    if resolved.sasl_plain_username is not None:
        user, password = _quoted(resolved.sasl_plain_username), _quoted(resolved.sasl_plain_password or "")
        settings |= {
            "sasl.mechanism": resolved.mechanism,
            "sasl.jaas.config": f"{_LOGIN[resolved.mechanism]} required username={user} password={password};",
        }
    # The texts of the files, not their names: executors on other machines do not have them.
    if resolved.ssl_ca_location:
        settings |= {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": _read(resolved, resolved.ssl_ca_location),
        }
    if resolved.ssl_certificate_location and resolved.ssl_key_location:
        settings |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _read(resolved, resolved.ssl_certificate_location),
            "ssl.keystore.key": _read(resolved, resolved.ssl_key_location),
        }
        if resolved.ssl_key_password:
            settings["ssl.key.password"] = resolved.ssl_key_password
    return {f"kafka.{name}": value for name, value in settings.items()}


def codec(connection: KafkaConnection, topic: str | None, name: str | None = None) -> Codec:
    """Return the codec of a connection's messages. Of a format with schemas, the newest of the topic is asked for, or
    with the `name` of a record that of its subject."""
    resolved = connection.resolved()
    if resolved.payload_format not in REGISTERED:
        return codec_of(resolved.payload_format)
    registry = registry_of(connection)
    newest = None if topic is None else registry.newest(subject(resolved, topic, name))
    return codec_of(resolved.payload_format, registry, newest)


def registry_of(connection: KafkaConnection) -> SchemaRegistry:
    """Return the schema registry of a connection that has one."""
    from weft.systems.schema_registry.client import SchemaRegistry

    registry = connection.resolved().registry
    assert registry is not None, "validate() refuses such a connection"
    return SchemaRegistry(registry)


def subject(connection: KafkaConnection, topic: str, name: str | None = None) -> str:
    """Return the subject of the schemas of a topic's messages, which are records of a name."""
    strategy = connection.subject_name_strategy or TOPIC_NAME
    if name is None or strategy == TOPIC_NAME:
        return f"{topic}-value"
    return name if strategy == RECORD_NAME else f"{topic}-{name}"


def topic_name(topic: str) -> str:
    """Return the topic, if there can be one of this name: Spark would take a comma for the end of a name."""
    if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
        raise DeclarationError(
            f"{topic!r} cannot be a topic of Kafka.", hint="Letters, digits, dots, underscores and hyphens, up to 249."
        )
    return topic


def partition_offsets(topic: str, text: str, partitions: Collection[int]) -> dict[int, int]:
    """By partition the offset that a text says: one number for a topic of one partition, else `0:120,1:95`."""
    if text.isdecimal():
        if len(partitions) != 1:
            example = ",".join(f"{number}:{text}" for number in sorted(partitions))
            raise DeclarationError(
                f"The topic {topic} has {len(partitions)} partitions, each with offsets of its own.",
                hint=f"Say which: {example}",
            )
        return dict.fromkeys(partitions, int(text))
    if not re.fullmatch(PARTITION_OFFSETS, text):
        raise DeclarationError(
            f"{text!r} is not an offset of the topic {topic}.",
            hint="One number, or partition:offset, as in 0:120,1:95.",
        )
    offsets = {int(number): int(offset) for number, offset in (each.split(":") for each in text.split(","))}
    if len(offsets) <= text.count(","):
        raise DeclarationError(f"{text!r} names a partition of the topic {topic} twice.")
    for number in offsets:
        if number not in partitions:
            known = ", ".join(map(str, sorted(partitions)))
            raise DeclarationError(f"The topic {topic} has no partition {number}.", hint=f"It has {known}.")
    return offsets


def _quoted(text: str) -> str:
    """Return a text in the configuration of Java's sign-in."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _read(connection: KafkaConnection, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a PEM file"
        raise SettingsError(f"{path} of {connection.label} cannot be read: {why}.") from None
