"""How to reach RabbitMQ, and what the messages of its queues hold."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as option
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from weft.errors import DeclarationError
from weft.systems.base import Connection, Settings, measured
from weft.systems.endpoint import BrokerEndpoint

FORMATS = ("json", "raw_bytes")
DEAD_LETTER_EXCHANGE = "x-dead-letter-exchange"
PORTS = {"amqp": 5672, "amqps": 5671}


@dataclass(frozen=True)
class RabbitMQConnection(Connection):
    """A broker: `RabbitMQConnection("amqp://user:password@host:5672/vhost", name="broker")`.

    `payload_format` says what messages hold: `json` (an object each) or `raw_bytes`. `received_log` is the connection
    on which received messages are kept until every pipeline has read them, or its name. `queue_args` are the arguments
    by which a queue that is read is declared. Certificates are PEM files.
    """

    kind: ClassVar[str] = "rabbitmq"

    amqp_url: str = option(metadata={"url": True})
    vhost: str | None = option(default=None, kw_only=True)
    payload_format: str = option(default="json", kw_only=True)
    metadata_columns: bool = option(default=False, kw_only=True)
    queue_args: dict[str, Any] | None = option(default=None, kw_only=True)
    prefetch: int = option(default=10_000, kw_only=True)
    max_unread: int = option(default=1_000_000, kw_only=True)
    keep_days: float = option(default=0.0, kw_only=True)
    deduplicate_days: float = option(default=7.0, kw_only=True)
    received_log: str | Connection | None = option(default=None, kw_only=True)
    routing_key: str | None = option(default=None, kw_only=True)
    ssl_ca_location: str | None = option(default=None, kw_only=True)
    ssl_certificate_location: str | None = option(default=None, kw_only=True)
    ssl_key_location: str | None = option(default=None, kw_only=True)
    ssl_key_password: str | None = option(default=None, kw_only=True, metadata={"secret": True})

    def __post_init__(self) -> None:
        if isinstance(self.queue_args, dict):
            # A copy that can be hashed: the caller may change the original later.
            object.__setattr__(self, "queue_args", Settings(self.queue_args))
        super().__post_init__()

    def validate(self) -> None:
        """Raise for fields that contradict each other."""
        super().validate()
        self.one_of("payload_format", FORMATS)
        if self.metadata_columns and self.payload_format == "raw_bytes":
            raise DeclarationError(
                f"{self.label} asks for metadata_columns, and messages that are raw_bytes are not parsed.",
                hint="Their rows have the routing key as the column key. Leave it out.",
            )
        # The broker counts in 16 bits.
        if not 1 <= self.prefetch <= 65_535:
            raise DeclarationError(f"The prefetch of {self.label} is 1 to 65535, not {self.prefetch}.")
        if self.max_unread < 1:
            raise DeclarationError(f"The max_unread of {self.label} is at least 1, not {self.max_unread}.")
        for name in ("keep_days", "deduplicate_days"):
            if getattr(self, name) < 0:
                raise DeclarationError(f"The {name} of {self.label} cannot be less than 0.")
        self.both_or_neither("ssl_certificate_location", "ssl_key_location")
        if self.is_known("amqp_url"):
            _ = self.address
            if self.ssl_ca_location and not self.is_encrypted:
                raise DeclarationError(
                    f"{self.label} has certificates, and its amqp_url is not encrypted.", hint="Begin it with amqps://."
                )

    @property
    def is_encrypted(self) -> bool:
        return self.amqp_url.lower().startswith("amqps://")

    @property
    def address(self) -> tuple[str, int, str]:
        """The host, port and virtual host."""
        parts = urlsplit(self.amqp_url)
        try:
            port = parts.port
        except ValueError:
            port = None
            parts = parts._replace(netloc="")
        if not parts.hostname:
            raise DeclarationError(
                f"The amqp_url of {self.label} is not amqp://user:password@host:port/vhost.",
                hint="Encode special characters (%40 for @, %2F for a / in the name of a virtual host).",
            )
        named = self.vhost if self.vhost is not None else unquote(parts.path[1:])
        return parts.hostname, port or PORTS[parts.scheme.lower()], named or "/"

    @property
    def dead_letter_exchange(self) -> str | None:
        """The exchange to which the broker routes messages that are rejected."""
        return (self.queue_args or {}).get(DEAD_LETTER_EXCHANGE)

    @property
    def rejects_bad(self) -> bool:
        """Whether messages that cannot be parsed go back to the broker, which has a place for them."""
        return self.dead_letter_exchange is not None

    def identity(self) -> object:
        """Return the broker and its virtual host: the queues are the same for all users."""
        return self.address

    def check(self) -> dict[str, Any]:
        """Sign in."""
        from weft.systems.rabbitmq import client

        report: dict[str, Any] = {}
        resolved = self.resolved()
        with measured(report), client.channel(resolved) as opened:
            properties = client.server_properties(opened)
        server = f"{properties.get('product', 'AMQP')} {properties.get('version', '')}".strip()
        return {"server": server, "database": resolved.address[2], **report}


class RabbitMQEndpoint(BrokerEndpoint):
    """A queue to read, an exchange or a queue to write to."""
