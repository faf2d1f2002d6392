"""Few messages at the end of a topic, read by this process: the same as Spark's connector reads, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from weft import KafkaConnection
from weft.systems.kafka import tail
from weft.systems.kafka.client import admin
from weft.systems.kafka.stream_source import KafkaSource
from weft.systems.kafka.tail import Tail
from weft.systems.stream_source import SourceSettings

Tails = Callable[[str], Tail]
COLUMNS = ["key", "value", "topic", "partition", "offset", "timestamp"]
OLD = int(datetime(1971, 1, 31, 12, 0, 0, 123_000, UTC).timestamp() * 1000)


@pytest.fixture
def tail_of(connection: KafkaConnection, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tails]:
    """`tail_of(topic)` reads its end. After a failure it tries again at once, and a machine may stand still."""
    monkeypatch.setattr(tail, "_PAUSE", 0.0)
    monkeypatch.setattr(tail, "_SECONDS", 120.0)
    opened: list[Tail] = []

    def make(topic: str) -> Tail:
        opened.append(Tail(connection, topic))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def in_transaction(kafka: Any, topic: str, values: list[bytes], partition: int, *, commits: bool) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(60)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value=value, partition=partition)
    assert producer.flush(60) == 0
    if commits:
        producer.commit_transaction(60)
    else:
        producer.abort_transaction(60)


def test_the_messages_that_spark_reads(
    kafka: Any, connection: KafkaConnection, batch: Callable[[str], Any], tail_of: Tails
) -> None:
    """Keys, nulls and times, offsets that hold no message, in the middle and at the end, and removed ones."""
    from confluent_kafka import TopicPartition

    topic = kafka.create_topic(partitions=4)
    kafka.produce(topic, [b"a", b"", None, b"\xff"], 0, key=b"k", timestamp=OLD)
    in_transaction(kafka, topic, [b"kept"], 1, commits=True)
    in_transaction(kafka, topic, [b"aborted"], 1, commits=False)
    kafka.produce(topic, [b"between"], 1)
    in_transaction(kafka, topic, [b"last"], 1, commits=True)
    kafka.produce(topic, [b"%d" % n for n in range(5)], 2)
    kafka.admin.delete_records([TopicPartition(topic, 2, 2)])[TopicPartition(topic, 2)].result(60)
    starts, ends = admin(connection).earliest(topic), admin(connection).latest(topic)
    wanted = batch(topic).select(COLUMNS).orderBy("partition", "offset").toArrow()
    assert (starts, ends) == ({0: 0, 1: 0, 2: 2, 3: 0}, {0: 4, 1: 7, 2: 5, 3: 0})
    tail = tail_of(topic)
    whole = tail.between(starts, ends)
    assert whole is not None
    assert whole.schema.equals(wanted.schema)
    assert whole.to_pylist() == wanted.to_pylist()
    # Again from the beginning, as after a failure, and on from there.
    some = {0: 1, 1: 3, 2: 2, 3: 0}
    parts = [tail.between(starts, some), tail.between(some, ends)]
    assert all(each is not None for each in parts)
    found = [row for each in parts if each is not None for row in each.to_pylist()]
    assert sorted(found, key=lambda row: (row["partition"], row["offset"])) == wanted.to_pylist()
    # What comes later, behind offsets without a message.
    kafka.produce(topic, [b"new"], 1)
    later = tail.between(ends, {**ends, 1: 8})
    assert later is not None
    assert later["value"].to_pylist() == [b"new"]


def test_what_is_left_to_spark(kafka: Any, tail_of: Tails, monkeypatch: pytest.MonkeyPatch) -> None:
    from confluent_kafka import TopicPartition

    topic = kafka.create_topic()
    kafka.produce(topic, [b"x" * 100] * 10)
    kafka.admin.delete_records([TopicPartition(topic, 0, 2)])[TopicPartition(topic, 0)].result(60)
    tail_here = tail_of(topic)
    assert tail_here.between({0: 0}, {0: 5}) is None  # removed
    monkeypatch.setattr(tail, "MOST_BYTES_HERE", 500)
    assert tail_here.between({0: 2}, {0: 10}) is None  # too large
    few = tail_here.between({0: 2}, {0: 4})
    assert few is not None
    assert few["offset"].to_pylist() == [2, 3]
    monkeypatch.setattr(tail, "_SECONDS", 0.5)
    assert tail_here.between({0: 4}, {0: 20}) is None  # not there
    monkeypatch.setattr(tail, "_PAUSE", 1000.0)
    assert tail_here.between({0: 4}, {0: 20}) is None
    monkeypatch.setattr(tail, "_SECONDS", 120.0)
    assert tail_here.between({0: 4}, {0: 5}) is None  # so soon after


@pytest.mark.parametrize(
    ("before", "after", "is_few"),
    [
        ({"0": 0}, {"0": 3}, True),
        ({"0": 0}, {"0": 5000}, False),
        (None, {"0": 3}, False),
        ({"0": 0}, {"0": 3, "1": 1}, False),
        ({"0": 0, "1": 0}, {"0": 3}, False),
    ],
)
def test_a_batch_that_is_few(
    kafka: Any, connection: KafkaConnection, before: Any, after: Any, is_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_SECONDS", 120.0)
    topic = kafka.create_topic()
    kafka.produce(topic, [b"{}"] * 3)
    source = KafkaSource(connection, SourceSettings(topic))
    try:
        found = source._few(before and {topic: before}, {topic: after})
        assert (found is not None) == is_few
        assert found is None or found.num_rows == 3
    finally:
        source.close()
