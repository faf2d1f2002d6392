"""Topics of Kafka as a target of streaming pipelines, written by Spark's connector.

At least once: brokers take each message on its own, so a batch that is written again after a crash is there twice.
Each message says in the header `weft-batch-id` which batch it is of, for readers who count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.errors import DeclarationError, did_you_mean
from weft.spark_support.lazy import F
from weft.spark_support.sessions import quoted
from weft.systems.codecs.json import JsonCodec
from weft.systems.kafka import client, options
from weft.systems.kafka.stream_source import show_partitions
from weft.systems.load import Counts, Load
from weft.systems.target import Reject, SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

BATCH_HEADER = "weft-batch-id"
_JSON = JsonCodec()


class TopicTarget(SparkTarget):
    """Writes each row as a message. Brokers take messages one by one, so a batch that is tried again is there twice."""

    exactly_once = False

    def validate(self, name: str) -> str:
        return show_partitions(self.connection, name)

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, reject: Reject | None = None) -> Counts:
        """Send each row as a JSON object, with the key of the load in a header.

        The key of a message is the text of its key column, or a JSON object of several: rows of one key stay in order,
        in one partition.
        """
        topic, keys = load.table, load.keys
        for name in keys:
            if name not in frame.columns:
                raise DeclarationError(
                    f"The key {name!r} of messages for {topic!r} is not a column of the rows.",
                    hint=did_you_mean(name, frame.columns, f"They have {', '.join(frame.columns)}."),
                )
        client.admin(self.connection).partitions(topic)  # raises for a topic that does not exist
        batch = F.lit(f"{load.checkpoint_id} {load.batch_id}").cast("binary").alias("value")
        # Kept to be counted: what Spark observes of rows on their way is never reported by its writer for Kafka.
        messages = frame.select(
            _key(keys).alias("key"),
            _JSON.encoded(frame.columns).alias("value"),
            F.array(F.struct(F.lit(BATCH_HEADER).alias("key"), batch)).alias("headers"),
        ).persist()
        try:
            count = messages.count()
            writer = messages.write.format("kafka").options(**options.for_spark(self.connection))
            writer.options(**{"topic": topic, "includeHeaders": "true", "kafka.acks": "all"}).save()
            return Counts(rows_read=count, inserted=count)
        finally:
            messages.unpersist()


def _key(keys: Sequence[str]) -> Column:
    if not keys:
        return F.lit(None).cast("string")
    if len(keys) == 1:
        return F.col(quoted(keys[0])).cast("string")
    return _JSON.encoded(keys)
