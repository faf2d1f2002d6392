"""Streams of Kinesis as a target of streaming pipelines.

At least once: Kinesis takes each record on its own, so a batch that is written again after a crash is there twice. A
record has no headers, so the object itself says of which batch it is, and which row of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.systems.dead_letter_store import digest
from weft.systems.kinesis.client import client
from weft.systems.kinesis.connection import MOST_KEY
from weft.systems.kinesis.stream_source import show_shards
from weft.systems.load import Counts, Load
from weft.systems.message_target import batch_of, messages_of, named
from weft.systems.target import Reject, SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH, ROW = "_weft_batch_id", "_weft_row"


class KinesisTarget(SparkTarget):
    """Writes each row as a record."""

    exactly_once = False

    def validate(self, name: str) -> str:
        return show_shards(self.connection, name)

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, reject: Reject | None = None) -> Counts:
        """Put each row as a JSON object with the key of the load and the name of the row.

        The partition key is the text of the key column, or a JSON object of several; without keys that of the
        connection, else the name of the row, which spreads rows over all shards.
        """
        records = self._records(messages_of(frame, load, "records"), batch_of(load))
        count = client(self.connection).send(load.table, records)
        return Counts(rows_read=count, inserted=count)

    def _records(self, rows: Iterator[Any], batch: str) -> Iterator[tuple[str, bytes]]:
        constant = self.connection.resolved().partition_key
        for row, name in named(rows):
            marks = json.dumps({BATCH: batch, ROW: name})[1:]
            value = f"{row.value[:-1]}{', ' if len(row.value) > 2 else ''}{marks}"
            key = row.key or constant or name
            yield key if len(key) <= MOST_KEY else digest(key), value.encode()
