"""Topics of Pub/Sub as a target of streaming pipelines.

At least once: Pub/Sub takes each request on its own, so a batch that is written again after a crash is there twice. The
attributes of a message say of which batch it is, and which row of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.systems.dead_letter_store import digest
from weft.systems.load import Counts, Load
from weft.systems.message_target import BATCH_HEADER, ROW_HEADER, batch_of, messages_of, named
from weft.systems.pubsub.client import Outgoing, client
from weft.systems.pubsub.connection import MOST_KEY
from weft.systems.stream_source import counted
from weft.systems.target import Reject, SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class PubSubTarget(SparkTarget):
    """Writes each row as a message."""

    exactly_once = False

    def validate(self, name: str) -> str:
        there = client(self.connection).subscriptions_of(name)
        shown = counted(len(there), "subscriptions")
        return shown if there else f"{shown}, so nobody gets what is written"

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, reject: Reject | None = None) -> Counts:
        """Send each row as a JSON object, with the key of the load and the name of the row as attributes.

        The ordering key is the text of the key column, or a JSON object of several; without keys that of the
        connection, if it has one.
        """
        count = client(self.connection).send(load.table, self._messages(messages_of(frame, load), batch_of(load)))
        return Counts(rows_read=count, inserted=count)

    def _messages(self, rows: Iterator[Any], batch: str) -> Iterator[Outgoing]:
        constant = self.connection.resolved().ordering_key
        for row, name in named(rows):
            key = row.key or constant or ""
            key = key if len(key.encode()) <= MOST_KEY else digest(key)
            yield Outgoing(row.value.encode(), {BATCH_HEADER: batch, ROW_HEADER: name}, key)
