"""Exchanges and queues of RabbitMQ as targets of streaming pipelines.

At least once: a batch that is written again after a crash is there twice. Headers say of which batch a message is and
which row of it, and its message id is of both, so that readers can drop the second one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.errors import NotFoundError
from weft.systems.dead_letter_store import digest
from weft.systems.load import Counts, Load
from weft.systems.message_target import BATCH_HEADER, ROW_HEADER, batch_of, messages_of, named
from weft.systems.rabbitmq import client
from weft.systems.rabbitmq.publisher import OutgoingMessage, publish
from weft.systems.stream_source import counted
from weft.systems.target import Reject, SparkTarget

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUEUES = "/queues/"
"""What the name of a target begins with that is a queue, as in RabbitMQ's own addresses."""


class RabbitMQTarget(SparkTarget):
    """Writes each row as a message."""

    exactly_once = False

    def validate(self, name: str) -> str:
        if name.startswith(QUEUES):
            return counted(client.depth(self.connection, name.removeprefix(QUEUES)), "messages")
        try:
            with client.channel(self.connection) as channel:
                channel.exchange_declare(name, passive=True)
        except NotFoundError:
            raise NotFoundError(
                f"There is no exchange {name!r} of {self.connection.label}.",
                hint=f"Declare it at the broker. A queue is {QUEUES}NAME.",
            ) from None
        return ""

    def write(self, frame: DataFrame, load: Load, spark: SparkSession, reject: Reject | None = None) -> Counts:
        """Publish each row as a JSON object.

        The routing key is that of the queue, else the text of the key column or a JSON object of several, else that of
        the connection, else empty.
        """
        is_queue = load.table.startswith(QUEUES)
        queue = load.table.removeprefix(QUEUES) if is_queue else None
        messages = self._messages(messages_of(frame, load), batch_of(load), queue)
        count = publish(self.connection, "" if is_queue else load.table, messages)
        return Counts(rows_read=count, inserted=count)

    def _messages(self, rows: Iterator[Any], batch: str, queue: str | None) -> Iterator[OutgoingMessage]:
        constant, now = self.connection.resolved().routing_key, int(time.time())
        for row, name in named(rows):
            key = queue if queue is not None else row.key or constant or ""
            properties = {
                "message_id": f"{digest(batch)}-{name}",
                "content_type": "application/json",
                "timestamp": now,
                "headers": {BATCH_HEADER: batch, ROW_HEADER: name},
            }
            yield OutgoingMessage(key, row.value.encode(), properties)
