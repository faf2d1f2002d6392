"""Dead letters in a topic of Kafka.

The key of a letter is its id, so that a message of that key without a value marks it as removed: it goes to the same
partition, and where topics are compacted both are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from weft.systems.dead_letter_store import StoredLetter, as_json, decoded
from weft.systems.kafka import reading, sink
from weft.systems.kafka.connection import KafkaConnection


class TopicLetters:
    """The dead letters in one topic. One that is put twice is there twice, and its reader yields both."""

    def __init__(self, connection: KafkaConnection, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        self._connection, self._topic = connection, place
        self.name = f"topic {place} of {connection.label}"

    def put(self, letters: Sequence[StoredLetter]) -> None:
        """Send letters."""
        self._send((each.letter_id, as_json(each.record()).encode()) for each in letters)

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the messages, but those of letters that were removed."""
        removed: set[bytes] = set()
        for each in reading.messages(self._connection, self._topic):
            if each.value is None and each.key is not None:
                removed.add(each.key)
        for each in reading.messages(self._connection, self._topic):
            record = decoded(each.value)
            if str(record.get("letter_id")).encode() not in removed:
                yield record

    def remove(self, ids: Collection[str]) -> None:
        """Send messages without values under the keys of letters."""
        self._send((each, None) for each in ids)

    def _send(self, messages: Iterable[tuple[str, bytes | None]]) -> None:
        sink.produce(self._connection, self._topic, [(key.encode(), value, {}) for key, value in messages])
