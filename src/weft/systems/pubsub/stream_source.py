"""A subscription of Pub/Sub as a source of streaming pipelines: see `weft.systems.received`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from weft.errors import NotFoundError, WeftError
from weft.systems.pubsub.client import client
from weft.systems.pubsub.receiver import SubscriptionReceiver
from weft.systems.received import ReceivedSource, Receiver

_METADATA = {"_message_id": "message_id", "_ordering_key": "key", "_attributes": "attributes"}


class PubSubSource(ReceivedSource):
    """Receives one subscription."""

    messaging_system = "gcp_pubsub"
    noun = "subscription"

    @property
    def added_columns(self) -> Mapping[str, str]:
        return _METADATA if self.connection.metadata_columns else {}

    def opener(self) -> Callable[[], Receiver]:
        resolved = self.connection.resolved()
        if resolved.dead_letter_policy is not None:
            client(resolved).set_dead_letters(self.name, resolved.dead_letter_policy)
        return partial(SubscriptionReceiver, resolved, self.name)

    def waiting(self) -> int | None:
        return None

    def queue_identity(self) -> Sequence[str]:
        resolved = self.connection.resolved()
        project, name = resolved.project_id, self.name
        if not name.startswith("projects/"):
            name = f"projects/{project or client(resolved).project}/subscriptions/{name}"
        return [resolved.server, name]

    def check(self, pipeline: str, message: str) -> None:
        """Raise if the subscription is gone. A service that does not answer proves nothing."""
        super().check(pipeline, message)
        try:
            client(self.connection).subscription(self.name)
        except NotFoundError:
            raise NotFoundError(
                f"The subscription {self.name!r} of {self.connection.label} is gone, and {pipeline} reads it.",
                hint=f"Make it again and start {pipeline}: it goes on with what comes. Or name another one.",
            ) from None
        except WeftError:
            return

    def validate(self) -> str:
        topic = client(self.connection).subscription(self.name).topic
        return f"of the topic {topic.rpartition('/')[2]}"
