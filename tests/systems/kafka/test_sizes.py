"""The size of a message is the one that a broker counts."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.errors import StorageError
from weft.systems.kafka import client, sizes


@pytest.mark.parametrize("limit", [200, 9_000, 1_500_000])
def test_a_broker_counts_the_same(limit: int, kafka: Any) -> None:
    broker = weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap)
    topic = kafka.create_topic(max_message_bytes=limit)
    assert client.admin(broker).most_bytes(topic) == limit
    for key in (None, b"k", b"k" * 64):
        value = b"v" * (limit - 160)
        while sizes.stored(key, value) < limit:
            value += b"v"
        assert sizes.stored(key, value) == limit
        assert _is_taken(kafka, topic, key, value)
        assert not _is_taken(kafka, topic, key, value + b"v")
        assert client.send(broker, topic, [(key, value), (key, None), (key, value)]) == 3
        with pytest.raises(StorageError, match=f"max.message.bytes={limit + 1},"):
            client.send(broker, topic, [(key, b"v"), (key, value + b"v")])
    assert len(kafka.messages(topic)) == 12


def test_messages_that_are_together_larger_than_one_may_be(kafka: Any) -> None:
    broker = weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap)
    topic = kafka.create_topic(max_message_bytes=1_000)
    values = [b"%0*d" % (size, 0) for size in (10, 300, 700, 50) * 20]
    client.send(broker, topic, [(b"key", value) for value in values])
    assert [each.value() for each in kafka.messages(topic)] == values


def _is_taken(kafka: Any, topic: str, key: bytes | None, value: bytes) -> bool:
    """Whether a broker takes a message of a client without a limit of its own."""
    from confluent_kafka import Producer

    answers: list[bool] = []
    settings = {"bootstrap.servers": kafka.bootstrap, "log_level": 0, "message.max.bytes": 10**8}
    producer = Producer(settings)
    producer.produce(topic, value, key, on_delivery=lambda error, _: answers.append(error is None))
    assert producer.flush(30) == 0
    return answers == [True]
