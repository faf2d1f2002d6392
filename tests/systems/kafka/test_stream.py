"""A streaming query follows a topic: bounded batches, from where it was told, through the end of its broker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import servers
from weft import KafkaConnection
from weft.systems import messages
from weft.systems.kafka import client, stream_source

# A broker takes its time to start again.

Follow = Callable[..., Any]


@pytest.fixture
def own_kafka(need_server: Callable[[str], None]) -> Iterator[Any]:
    """A broker that a test may kill."""
    pytest.importorskip("confluent_kafka")
    need_server("kafka")
    server = servers.KINDS["kafka"]()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def follow(spark: Any, tmp_path: Path) -> Iterator[Follow]:
    """`follow(connection, topic)` is a list to which a query adds the numbers `n` of each batch."""
    queries = []

    def start(connection: KafkaConnection, topic: str, **options: Any) -> list[list[int]]:
        found: list[list[int]] = []

        def take(frame: Any, _: int) -> None:
            with closing(messages.rows(frame, connection)) as rows:
                good = rows.good
                found.append(sorted(row.n for row in good.collect()))

        stream = stream_source.stream(spark, connection, topic, **options)
        queries.append(stream.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path)).start())
        return found

    yield start
    for query in queries:
        query.stop()
        query.awaitTermination(60)


def numbers(*values: int) -> list[bytes]:
    return [b'{"n": %d}' % value for value in values]


def reads(found: list[list[int]], wanted: list[int]) -> None:
    servers.wait_until(lambda: sorted(n for batch in found for n in batch) == wanted, f"{wanted} in {found}", 120)


def test_the_columns_of_messages(spark: Any, kafka: Any, connection: KafkaConnection) -> None:
    frame = stream_source.stream(spark, connection, kafka.create_topic())
    assert set(frame.columns) >= {"key", "value", "topic", "partition", "offset", "timestamp"}


@pytest.mark.full
def test_batches_are_bounded(follow: Follow, kafka: Any, connection: KafkaConnection) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, numbers(*range(5)))
    found = follow(connection, topic, max_rows=2)
    reads(found, list(range(5)))
    assert [batch for batch in found if batch] == [[0, 1], [2, 3], [4]]


@pytest.mark.full
def test_from_now_on(follow: Follow, kafka: Any, connection: KafkaConnection) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, numbers(1))
    found = follow(connection, topic, start="latest")
    servers.wait_until(lambda: bool(found), "the first batch, which is empty", 120)
    kafka.produce(topic, numbers(2))
    reads(found, [2])


@pytest.mark.full
@pytest.mark.timing
def test_a_broker_that_dies_and_comes_back(own_kafka: Any, follow: Follow) -> None:
    # In this order, so that the query is stopped before the broker: it would wait a minute for one that is gone.
    connection = KafkaConnection(own_kafka.bootstrap)
    topic = own_kafka.create_topic()
    own_kafka.produce(topic, numbers(1, 2))
    found = follow(connection, topic)
    reads(found, [1, 2])
    own_kafka.kill()
    own_kafka.restart()
    own_kafka.produce(topic, numbers(3))
    reads(found, [1, 2, 3])
    assert client.admin(connection).latest(topic) == {0: 3}


@pytest.mark.timing
@pytest.mark.full
def test_a_broker_that_was_down_and_answers_late(own_kafka: Any) -> None:
    connection = KafkaConnection(own_kafka.bootstrap)
    topic = own_kafka.create_topic()
    assert client.admin(connection).latest(topic) == {0: 0}
    own_kafka.kill()  # which the client notices, and says the next time that it is asked
    own_kafka.restart()
    own_kafka.process.send_signal(signal.SIGSTOP)
    late = threading.Timer(2, own_kafka.process.send_signal, [signal.SIGCONT])
    late.start()
    assert client.admin(connection).latest(topic) == {0: 0}
    late.join()
