"""The end of a topic, read by this process: small batches come so often that a job of Spark's for each takes too long.

Spark's query decides which offsets a batch has, and its connector reads the same messages. So whatever goes wrong here
is no error: the batch is left to the connector, which reports what is wrong with the topic.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft import tracing
from weft.columns import UTC_TIME
from weft.systems.base import require
from weft.systems.kafka import options
from weft.systems.messages import MOST_BYTES_HERE, MOST_HERE, TRACEPARENT

if TYPE_CHECKING:
    from weft.systems.kafka.connection import KafkaConnection

_COLUMNS = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", UTC_TIME),
    ]
)
"""As Spark's connector has them."""
# The brokers have the messages already: Spark has seen the ends of the partitions.
_SECONDS = 2.0
_PAUSE = 60.0
"""How long only the connector reads after a failure."""
_SETTINGS = {
    # It joins no group and commits nothing.
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    # The isolation level of Spark's connector.
    "isolation.level": "read_uncommitted",
    "check.crcs": True,
    # Between batches it fetches what comes, so that it is here when Spark has planned the next batch, and no more.
    "queued.min.messages": 2 * MOST_HERE,
    "queued.max.messages.kbytes": MOST_BYTES_HERE >> 10,
    "fetch.queue.backoff.ms": 10,
    "fetch.error.backoff.ms": 50,
}


class Tail:
    """Reads the newest messages of a topic. One thread at a time uses it."""

    def __init__(self, connection: KafkaConnection, topic: str) -> None:
        self._connection, self._topic = connection, topic
        self._library = require("confluent_kafka", connection.kind)
        self._consumer: Any = None
        self._at: dict[int, int] = {}
        """The offset behind what was handed out, of each partition."""
        self._seen: dict[int, int] = {}
        """The offset before which everything has come."""
        self._ahead: deque[Any] = deque()
        """What has come, and was not handed out."""
        self._not_before = 0.0

    def between(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> pa.Table | None:
        """Return the messages between two offsets of each partition, in the order of each; `None` where they cannot be
        read here, or are too large."""
        if time.monotonic() < self._not_before:
            return None
        try:
            messages = self._read(starts, ends)
            if messages is not None:
                return _table(messages)
        except (self._library.KafkaException, pa.ArrowException, OverflowError):
            pass
        self._not_before = time.monotonic() + _PAUSE
        self.close()
        return None

    def close(self) -> None:
        """Read no more."""
        consumer, self._consumer, self._at = self._consumer, None, {}
        self._ahead.clear()
        if consumer is not None:
            consumer.close()

    def _read(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> list[Any] | None:
        if self._at != starts:
            self._assign(starts)
        deadline = time.monotonic() + _SECONDS
        messages: list[Any] = []
        later = deque[Any]()
        size = 0
        while self._ahead or any(self._seen[number] < end for number, end in ends.items()):
            message = self._ahead.popleft() if self._ahead else self._poll(deadline)
            if message is None:
                return None
            if message.error() is not None:  # the end of a partition
                continue
            (later if message.offset() >= ends[message.partition()] else messages).append(message)
            size += len(message.value() or b"") + len(message.key() or b"")
            if size > MOST_BYTES_HERE or len(later) > MOST_HERE:
                return None
        self._ahead, self._at = later, dict(ends)
        # In one order, whatever partition answers first.
        return sorted(messages, key=lambda each: (each.partition(), each.offset()))

    def _assign(self, starts: Mapping[int, int]) -> None:
        if self._consumer is None:
            own = {"group.id": self._connection.resolved().group}
            self._consumer = self._library.Consumer({**options.for_client(self._connection), **own, **_SETTINGS})
        of = self._library.TopicPartition
        self._ahead.clear()
        self._at, self._seen = {}, dict(starts)
        self._consumer.assign([of(self._topic, number, offset) for number, offset in starts.items()])

    def _poll(self, deadline: float) -> Any | None:
        """Return the next message, or the end of a partition; `None` if it is late."""
        message = self._consumer.poll(max(deadline - time.monotonic(), 0.0))
        if message is None:
            return None
        error, number = message.error(), message.partition()
        if error is not None and error.code() != self._library.KafkaError._PARTITION_EOF:
            raise self._library.KafkaException(error)
        # Offsets have gaps, and the last ones may hold no message: then the end of the partition is what counts.
        seen = message.offset() + (0 if error is not None else 1)
        self._seen[number] = max(self._seen[number], seen)
        return message


def _table(messages: list[Any]) -> pa.Table:
    milliseconds = pa.array([each.timestamp()[1] for each in messages], pa.int64())
    columns = [
        pa.array([each.key() for each in messages], pa.binary()),
        pa.array([each.value() for each in messages], pa.binary()),
        pa.array([each.topic() for each in messages], pa.string()),
        pa.array([each.partition() for each in messages], pa.int32()),
        pa.array([each.offset() for each in messages], pa.int64()),
        milliseconds.cast(pa.timestamp("ms", "UTC")).cast(UTC_TIME),
    ]
    table = pa.Table.from_arrays(columns, schema=_COLUMNS)
    if tracing.tracer is None:
        return table
    traced = [dict(each.headers() or ()).get(TRACEPARENT) for each in messages]
    return table.append_column(TRACEPARENT, pa.array(traced, pa.binary()))
