"""Dead letters in a queue of RabbitMQ, which is made if there is none. Who looks at them is given all messages, and
gives them back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from weft.systems.dead_letter_store import StoredLetter, as_json, decoded
from weft.systems.rabbitmq import client
from weft.systems.rabbitmq.connection import RabbitMQConnection
from weft.systems.rabbitmq.publisher import Message, publish

# A message that was counted may have been taken by somebody else meanwhile.
_QUIET_SECONDS = 0.5


class RabbitMQLetters:
    """The dead letters in one queue. One that is put twice is there twice, and its reader yields both."""

    def __init__(self, connection: RabbitMQConnection, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        self._connection, self._queue = connection, place
        self.name = f"queue {place} of {connection.label}"

    def put(self, letters: Sequence[StoredLetter]) -> None:
        if client.is_missing(self._connection, self._queue):
            client.make_queue(self._connection, self._queue, {})
        properties = {"content_type": "application/json"}
        messages = (Message(self._queue, as_json(each.record()).encode(), properties) for each in letters)
        publish(self._connection, "", messages)

    def records(self) -> Iterator[Mapping[str, Any]]:
        return iter([decoded(body) for _, body in self._look(lambda _: False)])

    def remove(self, ids: Collection[str]) -> None:
        self._look(lambda body: decoded(body).get("letter_id") in ids)

    def _look(self, is_removed: Callable[[bytes], bool]) -> list[tuple[int, bytes]]:
        """Return every message, and remove some. The others go back to their places when the channel closes."""
        if client.is_missing(self._connection, self._queue):
            return []
        found: list[tuple[int, bytes]] = []
        with client.channel(self._connection) as channel:
            left = channel.queue_declare(self._queue, passive=True).method.message_count
            if not left:
                return found
            for method, _, body in channel.consume(self._queue, inactivity_timeout=_QUIET_SECONDS):
                if method is None:
                    break
                found.append((method.delivery_tag, body))
                if is_removed(body):
                    channel.basic_ack(method.delivery_tag)
                if len(found) == left:
                    break
            # An answer to this comes when the broker has seen every acknowledgement.
            channel.queue_declare(self._queue, passive=True)
        return found
