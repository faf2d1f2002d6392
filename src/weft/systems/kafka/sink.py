"""Rows into topics: whole DataFrames by Spark's connector, a few messages by our own client.

At least once: brokers take each message on its own, so a batch that is written again after a crash is there twice.
Each message says in the header `weft-batch-id` which batch it is of, for readers who count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from weft.errors import DeclarationError, nearest
from weft.spark_support.sessions import quoted
from weft.systems.codecs.json import JsonCodec
from weft.systems.kafka import client, options
from weft.systems.kafka.connection import KafkaConnection

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BATCH_HEADER = "weft-batch-id"
_JSON = JsonCodec()


def write(frame: DataFrame, connection: KafkaConnection, topic: str, *, keys: Sequence[str] = (), batch_id: str) -> int:
    """Each row as a JSON object; how many there were. The key of a message is the text of its key column, or a JSON
    object of several: rows of one key stay in order, in one partition."""
    from pyspark.sql import functions as F

    for name in keys:
        if name not in frame.columns:
            close = nearest(name, frame.columns)
            raise DeclarationError(
                f"The key {name!r} of messages for {topic!r} is no column of the rows.",
                hint=f"Did you mean {close!r}?" if close else f"They have {', '.join(frame.columns)}.",
            )
    client.admin(connection).partitions(topic)  # one that is missing is told here, by its name
    header = F.struct(F.lit(BATCH_HEADER).alias("key"), F.lit(batch_id).cast("binary").alias("value"))
    messages = frame.select(
        _key(keys).alias("key"),
        _JSON.encoded(frame.columns).alias("value"),
        F.array(header).alias("headers"),
    )
    # Kept to be counted: what Spark observes of rows on their way is never reported by its writer for Kafka.
    messages = messages.persist()
    try:
        count = messages.count()
        writer = messages.write.format("kafka").options(**options.for_spark(connection))
        writer.options(**{"topic": topic, "includeHeaders": "true", "kafka.acks": "all"}).save()
        return count
    finally:
        messages.unpersist()


def produce(
    connection: KafkaConnection, topic: str, records: Iterable[tuple[bytes | None, bytes | None, Mapping[str, bytes]]]
) -> int:
    """Store messages (key, value, headers). When this returns, every replica in sync has all of them."""
    client.admin(connection).partitions(topic)
    return client.send(connection, topic, records)


def _key(keys: Sequence[str]) -> Column:
    from pyspark.sql import functions as F

    if not keys:
        return F.lit(None).cast("string")
    if len(keys) == 1:
        return F.col(quoted(keys[0])).cast("string")
    return _JSON.encoded(keys)
