"""Topics of Kafka as a target of streaming pipelines, written by Spark's connector.

At least once: brokers take each message on its own, so a batch that is written again after a crash is there twice.
Each message says in the header `weft-batch-id` which batch it is of, for readers who count.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from weft.errors import LoadRefusedError
from weft.spark_support.lazy import F
from weft.systems.codec import REGISTERED, Codec
from weft.systems.codecs.json import JsonCodec
from weft.systems.kafka import client, options, sizes
from weft.systems.kafka.stream_source import show_partitions
from weft.systems.load import Counts, Load
from weft.systems.message_target import BATCH_HEADER, batch_of, key_of
from weft.systems.target import Reject, SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_JSON = JsonCodec()


class KafkaTarget(SparkTarget):
    """Writes each row as a message. Brokers take messages one by one, so a batch that is tried again is there twice."""

    exactly_once = False

    def validate(self, name: str) -> str:
        return show_partitions(self.connection, name)

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, reject: Reject | None = None) -> Counts:
        """Send each row as a message, with the key of the load in a header.

        It is a JSON object unless the connection's format has schemas: then the schema of the rows is registered first.
        """
        topic, key = load.table, key_of(frame, load)
        admin = client.admin(self.connection)
        admin.partitions(topic)  # raises for a topic that does not exist
        most = admin.most_bytes(topic)
        codec = self._codec(frame, topic)
        batch = batch_of(load)
        header = F.struct(F.lit(BATCH_HEADER).alias("key"), F.lit(batch).cast("binary").alias("value"))
        # Kept to be counted: what Spark observes of rows on their way is never reported by its writer for Kafka.
        messages = frame.select(
            key.alias("key"), codec.encoded(frame.columns).alias("value"), F.array(header).alias("headers")
        ).persist()
        settings = {**options.for_spark(self.connection), "kafka.acks": "all"} | _limits(most)
        try:
            size = sizes.stored_column(F.col("key"), F.col("value"), {BATCH_HEADER: batch})
            (counted,) = messages.agg(F.count("*").alias("rows"), F.max(size).alias("largest")).collect()
            fitting, refused = messages, 0
            if most is not None and counted.rows and counted.largest > most:
                size_of_row = sizes.stored_column(key, codec.encoded(frame.columns), {BATCH_HEADER: batch})
                refused = _rejected(frame.where(size_of_row > most), topic, most, counted.largest, reject)
                fitting = messages.where(size <= most)
            writer = fitting.write.format("kafka").options(**settings)
            writer.options(topic=topic, includeHeaders="true").save()
            return Counts(rows_read=counted.rows, inserted=counted.rows - refused, quarantined=refused)
        finally:
            messages.unpersist()

    def _codec(self, frame: DataFrame, topic: str) -> Codec:
        connection = self.connection.resolved()
        if connection.payload_format not in REGISTERED:
            return _JSON
        from pyspark.sql.pandas.types import to_arrow_schema

        name = _record_name(topic)
        subject, registry = options.subject(connection, topic, name), options.registry_of(connection)
        codec: Any = options.codec(connection, topic, name)
        text = codec.schema_of(to_arrow_schema(frame.schema, timezone="UTC"), name)
        return cast(Codec, codec.writing(text, registry.register(subject, codec.kind, text)))


def _record_name(topic: str) -> str:
    """Return the name of the records of a topic, in letters that names of schemas may have."""
    words = re.sub(r"[^A-Za-z0-9_]", "_", topic)
    return words if words[0].isalpha() else f"_{words}"


def _limits(most: int | None) -> dict[str, str]:
    """Return the settings of a producer that takes what its topic takes: it reckons with some bytes more than a message
    has."""
    if most is None:
        return {}
    return {"kafka.max.request.size": str(min(most + 100, 2**31 - 1)), "kafka.buffer.memory": str(most + (32 << 20))}


def _rejected(rows: DataFrame, topic: str, most: int, largest: int, reject: Reject | None) -> int:
    """Put rows aside that are larger than a topic takes; return how many."""
    why = f"The message is larger than the topic {topic!r} takes (max.message.bytes={most})."
    if reject is None:
        raise LoadRefusedError(
            f"Rows are larger than the topic {topic!r} takes: up to {most:,} bytes, and one has {largest:,}.",
            hint=f"Let the topic take them: max.message.bytes={largest}. Or name a place where such rows go alone: "
            "dead_letter_stream, dead_letter_table, dead_letter_path …",
        )
    table = rows.toArrow()
    reject(table, why)
    return len(table)
