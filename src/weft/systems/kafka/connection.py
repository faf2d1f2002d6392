"""How to reach the brokers of a Kafka cluster, and what its messages hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from dataclasses import field as option
from typing import Any, ClassVar

from weft import hooks
from weft.errors import DeclarationError
from weft.systems.base import Connection, measured
from weft.systems.codec import CODECS, REGISTERED
from weft.systems.endpoint import BrokerEndpoint
from weft.systems.kafka.options import PARTITION_OFFSETS, STRATEGIES
from weft.systems.schema_registry.connection import SchemaRegistryConnection

PORT = 9092
FORMATS = tuple(CODECS)
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_SERVER = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True)
class KafkaConnection(Connection):
    """A Kafka cluster: `KafkaConnection(bootstrap_servers="broker-1:9092,broker-2:9092", group_id="weft")`.

    `payload_format` says what messages hold: `json` (an object each), `avro` or `protobuf` with a `schema_registry` (a
    connection or its name) or `schema_registry_url`, or `raw_bytes`. With `sasl_plain_username` the connection is
    encrypted unless `security_protocol="SASL_PLAINTEXT"` says otherwise. Certificates are PEM files.
    """

    kind: ClassVar[str] = "kafka"

    bootstrap_servers: str
    group_id: str | None = option(default=None, kw_only=True)
    payload_format: str = option(default="json", kw_only=True)
    sasl_plain_username: str | None = option(default=None, kw_only=True)
    sasl_plain_password: str | None = option(default=None, kw_only=True, metadata={"secret": True})
    sasl_mechanism: str | None = option(default=None, kw_only=True)
    security_protocol: str | None = option(default=None, kw_only=True)
    ssl_ca_location: str | None = option(default=None, kw_only=True)
    ssl_certificate_location: str | None = option(default=None, kw_only=True)
    ssl_key_location: str | None = option(default=None, kw_only=True)
    ssl_key_password: str | None = option(default=None, kw_only=True, metadata={"secret": True})
    schema_registry: Any = option(default=None, kw_only=True)
    schema_registry_url: str | None = option(default=None, kw_only=True, metadata={"url": True})
    subject_name_strategy: str | None = option(default=None, kw_only=True)

    def validate(self) -> None:
        """Raise for fields that contradict each other, or that this version cannot use."""
        super().validate()
        self.one_of("payload_format", FORMATS)
        self.one_of("subject_name_strategy", STRATEGIES)
        self.one_of("sasl_mechanism", MECHANISMS)
        self.one_of("security_protocol", PROTOCOLS)
        self._check_registry()
        self._check_sign_in()
        self.both_or_neither("ssl_certificate_location", "ssl_key_location")
        if self.is_known("bootstrap_servers"):
            _ = self.servers

    def _check_registry(self) -> None:
        registry, url = self.schema_registry, self.schema_registry_url
        if registry is not None and url is not None:
            raise DeclarationError(f"{self.label} has both schema_registry and schema_registry_url.")
        if registry is not None and not isinstance(registry, str | SchemaRegistryConnection):
            raise DeclarationError(
                f"The schema_registry of {self.label} must be a schema_registry connection or its name, "
                f"not {type(registry).__name__}."
            )
        if self.payload_format in REGISTERED and registry is None and url is None:
            raise DeclarationError(
                f"{self.label} has the payload_format {self.payload_format!r}, which needs a schema registry.",
                hint='schema_registry="NAME" of a schema_registry connection, or '
                'schema_registry_url="http://localhost:8081".',
            )
        if url is not None:
            _ = self._registry_of_url()

    def _check_scheme(self, field_name: str, url: str) -> None:
        """Leave the URL of a registry to its own connection."""

    def _registry_of_url(self) -> SchemaRegistryConnection:
        return SchemaRegistryConnection(self.schema_registry_url or "", name=self.name)

    @property
    def registry(self) -> SchemaRegistryConnection | None:
        if self.schema_registry_url is not None:
            return self._registry_of_url()
        if self.schema_registry is None:
            return None
        registry = hooks.find_connection(self.schema_registry)
        if not isinstance(registry, SchemaRegistryConnection):
            raise DeclarationError(
                f"The schema_registry of {self.label} is {registry.label}, {registry.any_such}.",
                hint='It must be one of the kind "schema_registry".',
            )
        return registry

    def secrets(self) -> set[str]:
        registry = self.registry
        return super().secrets() | (set() if registry is None else registry.secrets())

    def _check_sign_in(self) -> None:
        if (self.sasl_plain_username is None) != (self.sasl_plain_password is None):
            raise DeclarationError(f"{self.label} needs sasl_plain_username and sasl_plain_password, both or neither.")
        signs_in = self.sasl_plain_username is not None
        if not signs_in and (self.sasl_mechanism or (self.security_protocol or "").startswith("SASL")):
            raise DeclarationError(
                f"{self.label} signs in ({self.sasl_mechanism or self.security_protocol}) without a user.",
                hint="Give sasl_plain_username and sasl_plain_password.",
            )
        if signs_in and self.security_protocol in ("PLAINTEXT", "SSL"):
            raise DeclarationError(
                f"{self.label} has a user, and a security_protocol that does not sign in ({self.security_protocol}).",
                hint="SASL_SSL, or SASL_PLAINTEXT for a network that nobody listens to.",
            )

    @property
    def servers(self) -> list[str]:
        """Each bootstrap server as host:port."""
        servers = []
        for each in filter(None, (text.strip() for text in self.bootstrap_servers.split(","))):
            parts = _SERVER.fullmatch(each)
            if parts is None or not 0 < int(parts["port"] or PORT) < 65536:
                raise DeclarationError(
                    f"The bootstrap_servers of {self.label} have an entry that is not host:port.",
                    hint='bootstrap_servers="broker-1:9092,broker-2:9092"',
                )
            servers.append(f"{parts['host']}:{parts['port'] or PORT}")
        if not servers:
            raise DeclarationError(f"{self.label} has no bootstrap_servers.", hint='bootstrap_servers="localhost:9092"')
        return servers

    @property
    def protocol(self) -> str:
        """The security protocol. With a password it is encrypted, unless the connection says otherwise."""
        if self.security_protocol is not None:
            return self.security_protocol
        if self.sasl_plain_username is not None:
            return "SASL_SSL"
        return "SSL" if self.ssl_ca_location or self.ssl_certificate_location else "PLAINTEXT"

    @property
    def mechanism(self) -> str:
        return self.sasl_mechanism or "PLAIN"

    @property
    def group(self) -> str:
        """The consumer group that offsets are committed to."""
        return self.group_id or "weft"

    @property
    def target(self) -> str:
        return self.bootstrap_servers

    def check(self) -> dict[str, Any]:
        from weft.systems.kafka import client

        report: dict[str, Any] = {}
        with measured(report):
            metadata = client.Admin(self.resolved()).metadata()  # a new client: it connects again
        brokers = len(metadata.brokers)
        return {
            "server": f"Kafka, {brokers} broker{'s' if brokers != 1 else ''}",
            "cluster": metadata.cluster_id,
            "topics": sum(not name.startswith("__") for name in metadata.topics),
            **report,
        }


class KafkaEndpoint(BrokerEndpoint):
    """A topic. A source may start at an offset of each partition: `0:120,1:95`."""

    start_forms: ClassVar = {**BrokerEndpoint.start_forms, PARTITION_OFFSETS: "offsets of partitions, which Kafka has"}

    def why_no_columns(self, connection: Any) -> str | None:
        """Return the reason for messages that are not parsed."""
        if connection.payload_format in REGISTERED:
            return f"{connection.payload_format} messages have the types of their schema"
        return super().why_no_columns(connection)
