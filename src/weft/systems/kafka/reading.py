"""The messages that a topic has now, one by one: for topics that hold few."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple
from uuid import uuid4

from weft.errors import ConnectionFailedError
from weft.systems.base import require
from weft.systems.kafka import options
from weft.systems.kafka.client import SECONDS, admin
from weft.systems.kafka.connection import KafkaConnection

_MESSAGES, _STEP = 1000, 0.1


class Message(NamedTuple):
    """One of a topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


def messages(connection: KafkaConnection, topic: str) -> Iterator[Message]:
    """What a topic holds when this begins, in the order of each partition."""
    library = require("confluent_kafka", connection.kind)
    of = library.TopicPartition
    numbers = admin(connection).partitions(topic)
    settings = {
        **options.for_client(connection),
        # It joins no group and commits nothing. The name must be one's own all the same.
        "group.id": f"weft-{uuid4()}",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
    }
    consumer = library.Consumer(settings)
    try:
        ends = {number: consumer.get_watermark_offsets(of(topic, number), SECONDS) for number in numbers}
        left = {number: high for number, (low, high) in ends.items() if high > low}
        consumer.assign([of(topic, number, ends[number][0]) for number in left])
        heard = time.monotonic()
        while left:
            # It waits for so many messages, or for so long: not for as long as brokers may take.
            found = consumer.consume(_MESSAGES, _STEP)
            if found:
                heard = time.monotonic()
            elif time.monotonic() - heard > SECONDS:
                raise ConnectionFailedError(
                    f"{connection.label} ({connection.target}) sent nothing of the topic {topic!r} "
                    f"for {SECONDS:.0f} seconds."
                )
            for each in found:
                error, place = each.error(), each.partition()
                if error is not None and error.code() != library.KafkaError._PARTITION_EOF:
                    raise library.KafkaException(error)
                # Offsets have gaps, and the last ones may hold no message: the end of a partition is told by itself.
                if error is not None or each.offset() + 1 >= left.get(place, 0):
                    is_over = left.pop(place, None) is None
                    if error is not None or is_over:
                        continue
                yield Message(place, each.offset(), each.key(), each.value())
    except library.KafkaException as error:
        raise admin(connection).failed(error) from None
    finally:
        consumer.close()
