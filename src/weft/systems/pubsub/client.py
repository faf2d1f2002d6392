"""Google's client for a connection: it waits where Pub/Sub asks it to, and its errors are ours.

Google's library takes a second to import, so only this module imports it, and only when a client is made.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft import settings
from weft.errors import ConnectionFailedError, DeclarationError, StorageError, WeftError, unknown
from weft.systems.base import require
from weft.systems.requests import Retries, chunks

if TYPE_CHECKING:
    from weft.systems.pubsub.connection import PubSubConnection

PATIENCE = 60.0
"""How many seconds to go on while Pub/Sub says that there are too many requests, or that it has a problem."""
_NETWORK_PATIENCE = 5.0
_BUSY = {"RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL", "UNKNOWN"}
_LATE, _DENIED = "DEADLINE_EXCEEDED", "PERMISSION_DENIED"
_AWAY = {"UNAVAILABLE", _LATE, "CANCELLED"}
_SCOPES = ("https://www.googleapis.com/auth/pubsub",)
# Limits of one request, and the bytes that a message takes beyond its data.
_MOST_MESSAGES, _MOST_BYTES, _OVERHEAD = 1000, 9_000_000, 100
_MOST_IDS = 1000
PULL_SECONDS = 1.5
"""How long a request for messages waits for some. Who ends a receiver waits for it, too."""
_ATTEMPTS = 5
_WINDOW = 20_000
"""The most messages in memory, to be grouped by ordering key: a request has messages of one key."""
_SENDERS = 8
_HINT = "Check project_id, endpoint and credentials."
_ROLES = "The account needs the role pubsub.subscriber to read, and pubsub.publisher to write."
_CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class Outgoing(NamedTuple):
    """A message to be sent."""

    data: bytes
    attributes: dict[str, str]
    key: str = ""


class PubSubClient:
    """Calls Pub/Sub for one resolved connection. Thread-safe."""

    def __init__(self, connection: PubSubConnection, patience: float = PATIENCE) -> None:
        self.errors = require("google.api_core.exceptions", connection.kind)
        self._auth_errors = require("google.auth.exceptions", connection.kind)
        self.types = require("google.pubsub_v1.types", connection.kind)
        publisher = require("google.pubsub_v1.services.publisher", connection.kind)
        subscriber = require("google.pubsub_v1.services.subscriber", connection.kind)
        self.connection, self.patience = connection, patience
        emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
        endpoint = connection.endpoint or (f"http://{emulator}" if emulator else None)
        scheme, _, host = (endpoint or "").rstrip("/").partition("://")
        project = None
        if scheme == "http":
            grpc = require("grpc", connection.kind)
            route = {"channel": grpc.insecure_channel(host, _CHANNEL)}
        else:
            credentials, project = self._credentials()
            route = {"credentials": credentials, **({"host": host} if host else {})}
        self.project: str = connection.project_id or os.environ.get("GOOGLE_CLOUD_PROJECT") or project or ""
        if not self.project:
            raise ConnectionFailedError(
                f"{connection.label} names no project.", hint='project_id="shop", or the variable GOOGLE_CLOUD_PROJECT.'
            )
        self._publisher = publisher.PublisherClient(transport=publisher.transports.PublisherGrpcTransport(**route))
        self._subscriber = subscriber.SubscriberClient(transport=subscriber.transports.SubscriberGrpcTransport(**route))

    def _credentials(self) -> tuple[Any, str | None]:
        auth, connection = require("google.auth", self.connection.kind), self.connection
        try:
            text = connection.credentials_json
            if connection.credentials_file is not None:
                text = Path(connection.credentials_file).expanduser().read_text()
            if text is None:
                credentials = auth.default(scopes=_SCOPES)
            else:
                with warnings.catch_warnings():
                    # Google warns of keys from strangers; these are from the one who runs the pipeline.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    credentials = auth.load_credentials_from_dict(json.loads(text), scopes=_SCOPES)
        except (self._auth_errors.GoogleAuthError, OSError) as error:
            raise connection.failed(error, hint="credentials_file, credentials_json or gcloud auth.") from None
        except (ValueError, TypeError, AttributeError):
            # Not quoted: its text may have parts of the key.
            raise ConnectionFailedError(f"The credentials of {connection.label} are not a key of Google's.") from None
        return credentials[0], credentials[1]

    def close(self) -> None:
        self._publisher.transport.close()
        self._subscriber.transport.close()

    # ------------------------------------------------------------------------------------------------------------ calls

    def call(self, operation: str, request: Any, timeout: float = 60.0, accepts: str = "") -> Any:
        """Return what Pub/Sub answers. Wait and ask again where it is asked too often, or cannot be reached. An error
        whose code it `accepts` is an answer too, `None`."""
        client = self._publisher if hasattr(self._publisher, operation) else self._subscriber
        retries = Retries()
        while True:
            try:
                return getattr(client, operation)(request=request, timeout=timeout, retry=None)
            except self.errors.GoogleAPICallError as error:
                code = getattr(error.grpc_status_code, "name", "UNKNOWN")
                if code == accepts:
                    return None
                patience = self.patience if code in _BUSY else _NETWORK_PATIENCE if code in _AWAY else 0.0
                failure = self._failure(error, code, request)
            except self._auth_errors.GoogleAuthError as error:
                raise self.connection.failed(error, hint=self.connection.checked(_HINT)) from None
            retries.pause(failure, min(patience, self.patience))

    def _failure(self, error: Any, code: str, request: Any) -> WeftError:
        text = settings.redact(error.message or code, self.connection.secrets())
        if code == "NOT_FOUND":
            return self._not_found(request)
        if code in _AWAY:
            return self.connection.unreachable(ConnectionError(f"{code}: {text}"), answered=False)
        if code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "ALREADY_EXISTS"):
            return StorageError(f"{self.connection.label} ({self.connection.target}): {code}: {text}")
        hint = self.connection.checked(_ROLES if code == _DENIED else _HINT)
        return self.connection.failed(ConnectionError(f"{code}: {text}"), hint=hint)

    def _not_found(self, request: Any) -> WeftError:
        names = request if isinstance(request, dict) else {"topic": request.topic}
        kind, path = next((kind, names[kind]) for kind in ("subscription", "topic", "project") if kind in names)
        known: list[str] = []
        if kind != "project":
            try:
                known = self.topics() if kind == "topic" else self.subscriptions()
            except WeftError:  # who may use one need not be allowed to list them
                known = []
        return unknown(
            f"{kind} of {self.connection.label}",
            str(getattr(path, "name", path)).rpartition("/")[2],
            known,
            otherwise=f"Weft makes no {kind}s: create it, or name another one.",
        )

    def _path(self, kind: str, name: str) -> str:
        return name if name.startswith("projects/") else f"projects/{self.project}/{kind}/{name}"

    # ---------------------------------------------------------------------------------------------------------- looking

    def topics(self) -> list[str]:
        topics = self.call("list_topics", {"project": f"projects/{self.project}"})
        return [each.name.rpartition("/")[2] for each in topics]

    def subscriptions(self) -> list[str]:
        subscriptions = self.call("list_subscriptions", {"project": f"projects/{self.project}"})
        return [each.name.rpartition("/")[2] for each in subscriptions]

    def subscriptions_of(self, topic: str) -> list[str]:
        """Return the paths of the subscriptions of a topic; raise if there is no such topic."""
        path = self._path("topics", topic)
        self.call("get_topic", {"topic": path})
        return list(self.call("list_topic_subscriptions", {"topic": path}))

    def subscription(self, name: str) -> Any:
        """Return what is known of a subscription; raise if there is none of that name."""
        return self.call("get_subscription", {"subscription": self._path("subscriptions", name)})

    def set_dead_letters(self, name: str, policy: Mapping[str, Any]) -> None:
        """Give a subscription a dead-letter policy, unless it has this one; raise where it has another."""
        subscription = self.subscription(name)
        there, topic = subscription.dead_letter_policy, self._path("topics", policy["topic"])
        wanted = (topic, policy.get("max_delivery_attempts") or there.max_delivery_attempts or _ATTEMPTS)
        if (there.dead_letter_topic, there.max_delivery_attempts) == wanted:
            return
        if there.dead_letter_topic:
            raise DeclarationError(
                f"The subscription {name!r} has another dead_letter_policy than {self.connection.label}: "
                f"{there.dead_letter_topic.rpartition('/')[2]} after {there.max_delivery_attempts} attempts.",
                hint="Give the connection the one that it has, or change that of the subscription.",
            )
        self.call("get_topic", {"topic": topic})
        subscription.dead_letter_policy = {"dead_letter_topic": topic, "max_delivery_attempts": wanted[1]}
        mask = {"paths": ["dead_letter_policy"]}
        self.call("update_subscription", {"subscription": subscription, "update_mask": mask})

    # -------------------------------------------------------------------------------------------------------- receiving

    def sign_in(self, subscription: str) -> None:
        """Have the connection opened, and raise if there is no such subscription. On a slow network that takes longer
        than a pull waits. A client that may consume need not be allowed to look: a refusal is an answer too."""
        self.call("get_subscription", {"subscription": self._path("subscriptions", subscription)}, accepts=_DENIED)

    def pull(self, subscription: str, most: int, *, waits: bool) -> Sequence[Any]:
        """Return messages that a subscription has now, in the form of protocol buffers: there may be more."""
        request = {
            "subscription": self._path("subscriptions", subscription),
            "max_messages": min(most, _MOST_MESSAGES),
            "return_immediately": not waits,
        }
        with nullcontext() if waits else warnings.catch_warnings():
            if not waits:
                # Google advises to wait, for who wants many messages soon. Who lists letters wants to know the end.
                warnings.simplefilter("ignore", DeprecationWarning)
            # A pull that waited and got nothing means an empty subscription.
            answer = self.call("pull", request, PULL_SECONDS, _LATE) if waits else self.call("pull", request)
        return () if answer is None else type(answer).pb(answer).received_messages

    def acknowledge(self, subscription: str, ids: Sequence[str]) -> None:
        """Have Pub/Sub forget messages, of which these are the ids of deliveries."""
        path = self._path("subscriptions", subscription)
        for first in range(0, len(ids), _MOST_IDS):
            self.call("acknowledge", {"subscription": path, "ack_ids": ids[first : first + _MOST_IDS]})

    def extend(self, subscription: str, ids: Sequence[str], seconds: int) -> None:
        """Keep messages for so many seconds from now; with 0 give them back."""
        path = self._path("subscriptions", subscription)
        for first in range(0, len(ids), _MOST_IDS):
            part = ids[first : first + _MOST_IDS]
            request = {"subscription": path, "ack_ids": part, "ack_deadline_seconds": seconds}
            self.call("modify_ack_deadline", request)

    # ---------------------------------------------------------------------------------------------------------- sending

    def send(self, topic: str, messages: Iterable[Outgoing]) -> int:
        """Send messages and return their number once Pub/Sub has all of them. Those of one key stay in order."""
        count, path = 0, self._path("topics", topic)
        with ThreadPoolExecutor(_SENDERS, "weft-pubsub") as senders:
            for window in chunks(messages, lambda each: len(each.data), _WINDOW, 8 * _MOST_BYTES):
                by_key: dict[str, list[Outgoing]] = {}
                for each in window:
                    by_key.setdefault(each.key, []).append(each)
                # All of a window before the next: messages of a key are sent one request after the other.
                for _ in senders.map(lambda part: self._send(path, part), by_key.values()):
                    pass
                count += len(window)
        return count

    def _send(self, path: str, messages: Sequence[Outgoing]) -> None:
        request_class = self.types.PublishRequest
        for chunk in chunks(messages, lambda each: _size(each, path), _MOST_MESSAGES, _MOST_BYTES):
            request = request_class.pb()(topic=path)
            for each in chunk:
                request.messages.add(data=each.data, attributes=each.attributes, ordering_key=each.key)
            # A request is taken as a whole, or not at all as far as anybody knows: then it is sent again.
            self.call("publish", request_class.wrap(request))


@lru_cache(maxsize=32)
def _client(connection: PubSubConnection) -> PubSubClient:
    return PubSubClient(connection)


def client(connection: PubSubConnection) -> PubSubClient:
    """Return the process's client of a connection, as its variables are now."""
    return _client(connection.resolved())


def _size(message: Outgoing, topic: str) -> int:
    attributes = sum(len(name) + len(text) for name, text in message.attributes.items())
    size = len(message.data) + _OVERHEAD + attributes
    if size > _MOST_BYTES:
        raise StorageError(
            f"A message for the topic {topic.rpartition('/')[2]!r} has {size:,} bytes, and Pub/Sub takes "
            f"{_MOST_BYTES:,}.",
            hint="Leave columns out, or write such rows elsewhere.",
        )
    return size
