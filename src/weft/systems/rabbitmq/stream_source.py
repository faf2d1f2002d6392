"""A queue of RabbitMQ as a source of streaming pipelines: see `weft.systems.received`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from weft.errors import NotFoundError, WeftError
from weft.systems.rabbitmq import client
from weft.systems.rabbitmq.receiver import QueueReceiver
from weft.systems.received import ReceivedSource, Receiver
from weft.systems.stream_source import counted

_METADATA = {"_routing_key": "key", "_exchange": "exchange", "_message_id": "message_id", "_headers": "headers"}
_REPEATED = "one without a message_id may become two rows after a crash"


class RabbitMQSource(ReceivedSource):
    """Receives one queue."""

    messaging_system = "rabbitmq"
    noun = "queue"

    @property
    def added_columns(self) -> Mapping[str, str]:
        return _METADATA if self.connection.metadata_columns else {}

    def opener(self) -> Callable[[], Receiver]:
        resolved = self.connection.resolved()
        if resolved.queue_args is not None:
            client.check_dead_letter_exchange(resolved)
            client.make_queue(resolved, self.name, dict(resolved.queue_args))
        client.depth(resolved, self.name)  # raises for a queue that does not exist
        return partial(QueueReceiver, resolved, self.name)

    def waiting(self) -> int:
        return client.depth(self.connection.resolved(), self.name)

    def queue_identity(self) -> Sequence[str]:
        return [*map(str, self.connection.resolved().address), self.name]

    def check(self, pipeline: str, message: str) -> None:
        """Raise if the queue is gone. A broker that does not answer proves nothing."""
        super().check(pipeline, message)
        try:
            self.waiting()
        except NotFoundError:
            raise NotFoundError(
                f"The queue {self.name!r} of {self.connection.label} is gone, and {pipeline} reads it.",
                hint=f"Declare it again and start {pipeline}: it goes on with what comes. Or name another queue.",
            ) from None
        except WeftError:
            return

    def validate(self) -> str:
        client.check_dead_letter_exchange(self.connection.resolved())
        if self.connection.queue_args is not None and client.is_missing(self.connection, self.name):
            return f"is made at the start; {_REPEATED}"
        return f"{counted(self.waiting(), self.unit)}; {_REPEATED}"
