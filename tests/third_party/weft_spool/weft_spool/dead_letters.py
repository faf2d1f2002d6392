"""Dead letters in a queue. Nothing is removed from a queue, so another message names the letters that are gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from weft.systems.dead_letter_store import StoredLetter, as_json, decoded
from weft_spool.connection import SpoolConnection


class SpoolLetters:
    """The dead letters in one queue. A letter that is put twice is there twice, under one id."""

    def __init__(self, connection: SpoolConnection, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        self._queue = connection.queue(place)
        self.name = f"queue {place} of {connection.label}"

    def put(self, letters: Sequence[StoredLetter]) -> None:
        """Append letters."""
        self._queue.append(as_json(each.record()).encode() for each in letters)

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the messages, but those of letters that were removed."""
        removed = {each for message in self._queue.read() for each in decoded(message.value).get("removed", ())}
        for message in self._queue.read():
            record = decoded(message.value)
            if record.get("letter_id") not in removed:
                yield record

    def remove(self, ids: Collection[str]) -> None:
        """Append a message that names the letters."""
        self._queue.append([json.dumps({"removed": sorted(ids)}).encode()])
