"""Topics of Kafka as a target of streaming pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.systems.kafka import sink
from weft.systems.kafka.stream_source import show_partitions
from weft.systems.load import Counts, Load
from weft.systems.target import PutAside, SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class TopicTarget(SparkTarget):
    """Writes each row as a message. Brokers take messages one by one, so a batch that is tried again is there twice."""

    exactly_once = False

    def validate(self, name: str) -> str:
        """Raise if there is no such topic."""
        return show_partitions(self.connection, name)

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, put_aside: PutAside | None = None) -> Counts:
        """Send the rows, with the key of the load in a header."""
        key = f"{load.checkpoint_id} {load.batch_id}"
        sent = sink.write(frame, self.connection, load.table, keys=load.keys, batch_id=key)
        return Counts(rows_read=sent, inserted=sent)
