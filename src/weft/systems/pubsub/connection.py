"""How to reach Pub/Sub, and what its messages hold."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from dataclasses import field as option
from typing import Any, ClassVar

from weft.errors import DeclarationError
from weft.options import refuse_unknown
from weft.systems.base import Connection, Settings, measured
from weft.systems.endpoint import BrokerEndpoint

FORMATS = ("json", "raw_bytes")
_ENDPOINT = re.compile(r"https?://[^/@]+/?")
_GOOGLE = re.compile(r"https://[a-z0-9.-]+\.googleapis\.com(:443)?")
_POLICY = ("topic", "max_delivery_attempts")
_ATTEMPTS = range(5, 101)
MOST_KEY = 1024
"""The bytes of an ordering key."""


@dataclass(frozen=True)
class PubSubConnection(Connection):
    """The topics and subscriptions of a project: `PubSubConnection(project_id="shop", name="events")`.

    Without credentials, those of the machine are used (`GOOGLE_APPLICATION_CREDENTIALS`, `gcloud auth`, a service
    account). `endpoint` names a server other than Google's. `payload_format` says what messages hold: `json` (an object
    each) or `raw_bytes`. `received_log` is the connection on which received messages are kept until every pipeline has
    read them, or its name. With `dead_letter_policy` messages that cannot be parsed go back to Pub/Sub, which sends
    them to another topic: `{"topic": "events-dlq", "max_delivery_attempts": 5}`.
    """

    kind: ClassVar[str] = "pubsub"

    project_id: str | None = option(default=None, kw_only=True)
    subscription: str | None = option(default=None, kw_only=True)
    topic: str | None = option(default=None, kw_only=True)
    endpoint: str | None = option(default=None, kw_only=True)
    credentials_file: str | None = option(default=None, kw_only=True)
    credentials_json: str | None = option(default=None, kw_only=True, metadata={"secret": True})
    payload_format: str = option(default="json", kw_only=True)
    metadata_columns: bool = option(default=False, kw_only=True)
    ordering_key: str | None = option(default=None, kw_only=True)
    dead_letter_policy: dict[str, Any] | None = option(default=None, kw_only=True)
    prefetch: int = option(default=5_000, kw_only=True)
    max_unread: int = option(default=1_000_000, kw_only=True)
    keep_days: float = option(default=0.0, kw_only=True)
    deduplicate_days: float = option(default=7.0, kw_only=True)
    received_log: str | Connection | None = option(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.dead_letter_policy, dict):
            # A copy that can be hashed: the caller may change the original later.
            object.__setattr__(self, "dead_letter_policy", Settings(self.dead_letter_policy))
        super().__post_init__()

    def validate(self) -> None:
        """Raise for fields that contradict each other."""
        super().validate()
        self.one_of("payload_format", FORMATS)
        if self.is_known("endpoint") and self.endpoint and not _ENDPOINT.fullmatch(self.endpoint):
            raise DeclarationError(
                f"The endpoint of {self.label} must be http://host:port or https://host.",
                hint="http:// is an emulator, which asks for no credentials.",
            )
        if self.credentials_file is not None and self.credentials_json is not None:
            raise DeclarationError(f"{self.label} has both credentials_file and credentials_json.")
        if self.ordering_key is not None and not 0 < len(self.ordering_key.encode()) <= MOST_KEY:
            raise DeclarationError(f"The ordering_key of {self.label} has 1 to {MOST_KEY} bytes.")
        if self.metadata_columns and self.payload_format == "raw_bytes":
            raise DeclarationError(
                f"{self.label} asks for metadata_columns, and messages that are raw_bytes are not parsed.",
                hint="Their rows have the ordering key as the column key. Leave it out.",
            )
        if self.dead_letter_policy is not None:
            self._check_policy(self.dead_letter_policy)
        for name in ("prefetch", "max_unread"):
            if getattr(self, name) < 1:
                raise DeclarationError(f"The {name} of {self.label} is at least 1, not {getattr(self, name)}.")
        for name in ("keep_days", "deduplicate_days"):
            if getattr(self, name) < 0:
                raise DeclarationError(f"The {name} of {self.label} cannot be less than 0.")

    def _check_policy(self, policy: dict[str, Any]) -> None:
        refuse_unknown(policy, _POLICY, f"The dead_letter_policy of {self.label}", "Its keys", noun="key")
        if not isinstance(policy.get("topic"), str) or not policy["topic"]:
            raise DeclarationError(
                f"The dead_letter_policy of {self.label} names no topic.", hint='topic = "events-dlq"'
            )
        if policy.get("max_delivery_attempts", _ATTEMPTS[0]) not in _ATTEMPTS:
            raise DeclarationError(
                f"The max_delivery_attempts of {self.label} are {_ATTEMPTS[0]} to {_ATTEMPTS[-1]}, as Pub/Sub has them."
            )

    @property
    def target(self) -> str:
        parts = [f"in {self.project_id}" if self.project_id else "", f"at {self.endpoint}" if self.endpoint else ""]
        return " ".join(filter(None, ["Pub/Sub", self.subscription or self.topic, *parts]))

    def identity(self) -> object:
        """Return the project, or the server in its place: the topics are the same for all credentials."""
        return self.project_id, self.server

    @property
    def server(self) -> str:
        """The server in Google's place; empty for Google, all of whose endpoints have the same subscriptions."""
        emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
        endpoint = (self.endpoint or (f"http://{emulator}" if emulator else "")).rstrip("/").lower()
        return "" if _GOOGLE.fullmatch(endpoint) else endpoint

    def check(self) -> dict[str, Any]:
        """Look at the subscription and the topic, or list the topics where the connection names neither."""
        from weft.systems.pubsub.client import PubSubClient

        report: dict[str, Any] = {}
        resolved, contents = self.resolved(), {}
        client = PubSubClient(resolved, patience=0.0)
        try:
            with measured(report):
                if resolved.subscription:
                    topic = client.subscription(resolved.subscription).topic
                    contents = {"subscription": resolved.subscription, "topic": topic.rpartition("/")[2]}
                if resolved.topic:
                    count = len(client.subscriptions_of(resolved.topic))
                    contents |= {"topic": resolved.topic, "subscriptions": count}
                if not contents:
                    contents = {"topics": len(client.topics())}
        finally:
            client.close()
        return {"server": "Pub/Sub", "database": client.project, **contents, **report}


class PubSubEndpoint(BrokerEndpoint):
    """A subscription to read, a topic to write to."""

    def default_query(self, connection: Any) -> str | None:
        """Return the subscription of the connection."""
        subscription: str | None = connection.subscription
        return subscription
