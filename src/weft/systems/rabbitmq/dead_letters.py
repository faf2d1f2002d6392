"""Dead letters in a queue of RabbitMQ, which is made if there is none. Who looks at them is given all messages, and
gives them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from weft.errors import BusyError
from weft.systems.dead_letter_store import StoredLetter, as_json, decoded
from weft.systems.rabbitmq import client
from weft.systems.rabbitmq.connection import RabbitMQConnection
from weft.systems.rabbitmq.publisher import OutgoingMessage, publish

# A message that was counted may have been taken by somebody else meanwhile.
_QUIET_SECONDS = 0.5
# How long to wait for messages that another process has just given back, and for those that it still holds.
_PATIENCE, _BUSY_SECONDS = 3.0, 30.0


class RabbitMQLetters:
    """The dead letters in one queue. One that is put twice is there twice, and its reader yields both."""

    takes_messages = True

    def __init__(self, connection: RabbitMQConnection, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        self._connection, self._queue = connection, place
        self.name = f"queue {place} of {connection.label}"

    def put(self, letters: Sequence[StoredLetter]) -> None:
        if client.is_missing(self._connection, self._queue):
            client.make_queue(self._connection, self._queue, {})
        properties = {"content_type": "application/json"}
        messages = (OutgoingMessage(self._queue, as_json(each.record()).encode(), properties) for each in letters)
        publish(self._connection, "", messages)

    def records(self) -> Iterator[Mapping[str, Any]]:
        return iter([decoded(body) for body in self._look()])

    def remove(self, ids: Collection[str]) -> None:
        """Acknowledge letters; wait for those that somebody else looks at, who gives them back."""
        self._look(set(ids))

    def _look(self, removed: Collection[str] = ()) -> list[bytes]:
        """Return every message, and remove some. The others go back to their places when the channel closes."""
        if client.is_missing(self._connection, self._queue):
            return []
        bodies: list[bytes] = []
        with client.channel(self._connection) as channel:
            left = channel.queue_declare(self._queue, passive=True).method.message_count
            if not left and not removed:
                return bodies
            missing, began = set(removed), time.monotonic()
            quiet_since = began
            for method, _, body in channel.consume(self._queue, inactivity_timeout=_QUIET_SECONDS):
                if method is not None:
                    quiet_since = time.monotonic()
                    bodies.append(body)
                    letter_id = decoded(body).get("letter_id")
                    if letter_id in removed:
                        channel.basic_ack(method.delivery_tag)
                        missing.discard(letter_id)
                    if len(bodies) < left:
                        continue
                if not removed:
                    break
                # Not only those that are missing: a letter may be there twice.
                if missing and time.monotonic() - quiet_since < _PATIENCE:
                    continue
                if channel.queue_declare(self._queue, passive=True).method.consumer_count <= 1:
                    break
                if time.monotonic() - began > _BUSY_SECONDS:
                    raise BusyError(
                        f"Others read the {self.name}, and hold messages that are to be removed.",
                        hint="Stop what consumes the queue, and try again.",
                    )
            # An answer to this comes when the broker has seen every acknowledgement.
            channel.queue_declare(self._queue, passive=True)
        return bodies
