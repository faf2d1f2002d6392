"""A new queue of any broker, for tests that are the same for all of them: the source that reads it, how messages get
there, and the offsets that they then have.

    queue = broker_queue("rabbitmq", request.getfixturevalue, max_rows=10)
    queue.put([b'{"n": 1}'])
    queue.offset(0)              that of this message, as dead letters have it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import weft

BROKERS = ("kafka", "rabbitmq", "pubsub", "kinesis")


@dataclass
class BrokerQueue:
    source: weft.Source
    put: Callable[[list[bytes]], None]
    """Adds messages in this order."""
    partition: str
    first: int = 1
    """The offset of the first message."""

    def offset(self, number: int) -> str:
        return f"{self.partition}:{self.first + number}"


def broker_queue(kind: str, fixture: Callable[[str], Any], **settings: Any) -> BrokerQueue:
    """Make a queue at a broker, which `fixture` returns by its kind. `settings` are those of the source."""
    broker = fixture(kind)
    connection: Any
    if kind == "kafka":
        topic = broker.create_topic()
        connection = weft.KafkaConnection(name="broker", bootstrap_servers=broker.bootstrap)
        source = weft.Source(connection=connection, query=topic, **settings)
        return BrokerQueue(source, lambda messages: broker.produce(topic, messages), "0", 0)
    if kind == "kinesis":
        stream = broker.create_stream()
        connection = weft.KinesisConnection(name="broker", **broker.fields())
        source = weft.Source(connection=connection, query=stream, **settings)
        return BrokerQueue(source, lambda messages: broker.put(stream, messages), "shardId-000000000000")
    if kind == "pubsub":
        topic, subscription = broker.create_queue(enable_message_ordering=True)
        connection = weft.PubSubConnection(name="broker", **broker.fields())
        source = weft.Source(connection=connection, query=subscription, **settings)
        return BrokerQueue(source, lambda messages: broker.publish(topic, messages, key="k"), subscription)
    assert kind == "rabbitmq"
    queue = broker.create_queue()
    connection = weft.RabbitMQConnection(broker.url(), name="broker")
    source = weft.Source(connection=connection, query=queue, **settings)
    return BrokerQueue(source, lambda messages: broker.publish(queue, messages), queue)
