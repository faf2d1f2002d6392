"""Dead letters in a stream of Kinesis, for as long as it keeps records. Nothing can be removed from it by hand, so
another record names the letters that are gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from weft.systems.dead_letter_store import StoredLetter, as_json, decoded
from weft.systems.kinesis.client import client
from weft.systems.kinesis.connection import KinesisConnection
from weft.systems.kinesis.shards import Shards

# The ids of letters in one record.
_IDS = 1000


class KinesisLetters:
    """The dead letters in one stream. One that is put twice is there twice, and its reader yields both."""

    def __init__(self, connection: KinesisConnection, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        self._connection, self._stream = connection, place
        self.name = f"stream {place} of {connection.label}"

    def check(self) -> None:
        client(self._connection).shards(self._stream)

    def put(self, letters: Sequence[StoredLetter]) -> None:
        records = [(each.letter_id, as_json(each.record()).encode()) for each in letters]
        client(self._connection).send(self._stream, records)

    def records(self) -> Iterator[Mapping[str, Any]]:
        removed = {each for record in self._all() for each in record.get("removed", ())}
        return (record for record in self._all() if record.get("letter_id") not in removed)

    def _all(self) -> Iterator[dict[str, Any]]:
        shards = Shards(self._connection, self._stream)
        for shard in client(self._connection).shards(self._stream):
            for page in shards.pages(shard, shards.start):
                yield from (decoded(each["Data"]) for each in page.records)

    def remove(self, ids: Collection[str]) -> None:
        """Put records that name the letters."""
        names = sorted(ids)
        parts = (names[first : first + _IDS] for first in range(0, len(names), _IDS))
        records = [(part[0], json.dumps({"removed": part}).encode()) for part in parts]
        client(self._connection).send(self._stream, records)
