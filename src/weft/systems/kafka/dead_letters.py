"""Dead letters in a topic of Kafka.

The key of a letter is its id, so that a message of that key without a value marks it as removed: it goes to the same
partition, and where topics are compacted both are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from weft.systems.dead_letter_store import StoredLetter, as_json, decoded
from weft.systems.kafka import client
from weft.systems.kafka.connection import KafkaConnection


class KafkaLetters:
    """The dead letters in one topic. One that is put twice is there twice, and its reader yields both."""

    def __init__(self, connection: KafkaConnection, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        self._connection, self._topic = connection, place
        self.name = f"topic {place} of {connection.label}"

    def check(self) -> None:
        client.admin(self._connection).partitions(self._topic)

    def put(self, letters: Sequence[StoredLetter]) -> None:
        messages = [(each.letter_id.encode(), as_json(each.record()).encode()) for each in letters]
        client.send(self._connection, self._topic, messages)

    def records(self) -> Iterator[Mapping[str, Any]]:
        removed: set[bytes] = set()
        for key, value in client.messages(self._connection, self._topic):
            if value is None and key is not None:
                removed.add(key)
        for _, value in client.messages(self._connection, self._topic):
            record = decoded(value)
            if str(record.get("letter_id")).encode() not in removed:
                yield record

    def remove(self, ids: Collection[str]) -> None:
        """Send messages without values under the keys of letters."""
        client.send(self._connection, self._topic, [(each.encode(), None) for each in ids])
