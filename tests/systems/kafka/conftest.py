"""Connections to a broker, and Spark with its connector.

def test_something(connection, kafka, batch):
    topic = kafka.create_topic()
    kafka.produce(topic, [b'{"n": 1}'])
    rows = source.rows(batch(topic), connection)     the messages that are there now
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft import KafkaConnection
from weft.systems.kafka import options

Batch = Callable[[str], Any]


@pytest.fixture
def connection(kafka: Any) -> KafkaConnection:
    return KafkaConnection(name="events", bootstrap_servers=kafka.bootstrap, group_id="shop")


@pytest.fixture
def spark(plain_spark: Any) -> Any:
    from weft.engine import connectors

    connectors.add(plain_spark, "kafka")
    return plain_spark


@pytest.fixture
def batch(spark: Any, connection: KafkaConnection) -> Batch:
    """`batch(topic)` is a DataFrame of what is in a topic, with the columns that a micro-batch has."""

    def read(topic: str) -> Any:
        reader = spark.read.format("kafka").options(**options.for_spark(connection))
        return reader.options(subscribe=topic, includeHeaders="true").load()

    return read
