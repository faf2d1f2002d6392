"""Queues as targets of streaming pipelines."""

from __future__ import annotations

from typing import Any

from weft.systems.codec import codec_of
from weft.systems.load import Counts, Load
from weft.systems.stream_source import counted
from weft.systems.target import SparkTarget


class SpoolTarget(SparkTarget):
    """Appends each row as a message. A batch that is tried again after a crash is there twice."""

    exactly_once = False

    def validate(self, name: str) -> str:
        """Return how many messages the queue has."""
        return counted(self.connection.queue(name).count(), "messages")

    def write(self, frame: Any, load: Load, spark: Any, reject: Any = None) -> Counts:
        """Append the rows."""
        encoded = frame.select(codec_of("json").encoded(frame.columns).alias("value"))
        count = self.connection.queue(load.table).append(row.value.encode() for row in encoded.toLocalIterator())
        return Counts(rows_read=count, inserted=count)
