"""What a queue has is received into a log, once, and removed from it when every pipeline has read it. Without Spark."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pika
import pika.data
import pika.exceptions
import pytest

import weft
from rabbitmq_server import wait_for_count
from servers import wait_until
from tests.systems.rabbitmq.conftest import drain, offsets_of, received_values
from weft.engine.streaming.sources import open_source
from weft.project import Project
from weft.systems import received
from weft.systems.rabbitmq import client
from weft.systems.rabbitmq.receiver import QueueReceiver, sent_at


@pytest.fixture(params=["sqlite", "postgres", "mysql", "redis"])
def on(
    request: pytest.FixtureRequest, here: Project, open_system: Callable[[str], AbstractContextManager[Any]]
) -> Iterator[Any]:
    """The connection that keeps the log, on each system that can."""
    with open_system(request.param) as system:
        connection = weft.connect(url=system.url, name="log")
        weft.register_connection(connection)
        yield connection


@pytest.mark.brief("sqlite", "postgres")
def test_messages_are_received_once(rabbitmq: Any, connection: Any, on: Any) -> None:
    queue = rabbitmq.create_queue()
    connection = replace(connection, received_log="log", keep_days=1)
    rabbitmq.publish(queue, [b"1", b"2"], message_id="a")
    rabbitmq.publish(queue, [b"3", b"3"], ids=False)
    end = drain(offsets_of(connection, queue))
    assert received_values(offsets_of(connection, queue)) == [b"1", b"2", b"3", b"3"]
    assert rabbitmq.count(queue) == 0
    # The same again, as after a crash before the acknowledgement: those with an id are known.
    rabbitmq.publish(queue, [b"1", b"2"], message_id="a")
    rabbitmq.publish(queue, [b"4"])
    drain(offsets_of(connection, queue), end)
    assert received_values(offsets_of(connection, queue), end) == [b"4"]


@pytest.mark.parametrize("stored", [30, 50])
def test_a_receiver_that_dies_before_it_acknowledges(
    rabbitmq: Any, connection: Any, here: Project, stored: int
) -> None:
    """The broker delivers all messages again."""
    queue = rabbitmq.create_queue()
    rabbitmq.publish(queue, [b"%d" % n for n in range(50)])
    offsets = offsets_of(replace(connection, keep_days=1), queue)
    dying = QueueReceiver(connection.resolved(), queue)
    messages: list[Any] = []
    wait_until(lambda: messages.extend(dying.receive(20, 0.1)) or len(messages) >= 50, "all messages")
    received.store(offsets, offsets.made(), messages[:stored])
    dying.close()
    wait_for_count(rabbitmq, queue, 50)
    drain(offsets)
    assert sorted(map(int, received_values(offsets))) == list(range(50))


def test_what_every_pipeline_has_read_is_removed(
    rabbitmq: Any, connection: Any, here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received, "_TIDY_SECONDS", 0.0)
    queue = rabbitmq.create_queue()
    one, two = offsets_of(connection, queue, "one"), offsets_of(connection, queue, "two")
    for each in (one, two):
        each.following(each.first())  # both receive, and have read nothing
    rabbitmq.publish(queue, [b"1", b"2", b"3"])
    wait_until(lambda: two.log.count() == 3, "all messages")
    end = two.log.head()
    one.following(end)
    time.sleep(0.3)
    assert two.log.count() == 3
    two.following(end)
    wait_until(lambda: two.log.count() == 0, "them to go")
    assert two.log.floor() == end


def test_a_slow_pipeline_pushes_back(
    rabbitmq: Any, connection: Any, here: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received, "_TIDY_SECONDS", 0.0)
    queue = rabbitmq.create_queue()
    rabbitmq.publish(queue, [b"%d" % n for n in range(100)])
    offsets = offsets_of(replace(connection, prefetch=10, max_unread=30), queue)
    first = offsets.first()
    offsets.following(first)
    wait_until(lambda: offsets.log.count() == 30, "so many as may be unread")
    wait_for_count(rabbitmq, queue, 60)  # 10 more are on their way
    time.sleep(0.3)
    assert offsets.log.count() == 30 and rabbitmq.count(queue) == 60
    offsets.following(offsets.log.head())
    wait_for_count(rabbitmq, queue, 30)


def test_messages_that_go_back_to_the_broker(rabbitmq: Any, connection: Any, here: Project) -> None:
    dead = rabbitmq.create_queue()
    with rabbitmq.channel() as channel:
        channel.exchange_declare("weft.dlx", "fanout", durable=True)
        channel.queue_bind(dead, "weft.dlx")
    connection = replace(connection, queue_args={"x-dead-letter-exchange": "weft.dlx"})
    queue = f"made-{dead}"
    offsets = offsets_of(connection, queue)  # which makes the queue
    rabbitmq.publish(queue, [b'{"n": 1}', b"{", b'{"n": 2}', b'{"n": "text"}', b"[]"])
    drain(offsets)
    # One of another type than its neighbours is for the pipeline to judge.
    assert [json.loads(each) for each in received_values(offsets)] == [{"n": 1}, {"n": 2}, {"n": "text"}]
    wait_for_count(rabbitmq, dead, 2)
    assert [body for _, _, body in rabbitmq.messages(dead)] == [b"{", b"[]"]
    missing = replace(connection, queue_args={"x-dead-letter-exchange": "no-such"})
    with pytest.raises(weft.NotFoundError, match="There is no exchange 'no-such'"):
        offsets_of(missing, f"other-{dead}")
    with pytest.raises(weft.NotFoundError, match="There is no exchange 'no-such'"):
        open_source(weft.Source(connection=missing, query=queue)).validate()
    with pytest.raises(weft.DeclarationError, match="with other arguments"):
        offsets_of(replace(connection, queue_args={}), queue)


def _table(name: bytes, value: bytes) -> bytes:
    entry = bytes([len(name)]) + name + value
    return struct.pack(">I", len(entry)) + entry


def _nested(depth: int) -> bytes:
    table = _table(b"a", b"V")
    for _ in range(depth - 1):
        table = _table(b"a", b"F" + table)
    return table


@pytest.mark.parametrize(
    ("table", "headers"),
    [
        (_table(b"at", b"T" + struct.pack(">Q", 1_700_000_000_000)), None),
        (_table(b"\xff", b"S" + struct.pack(">I", 1) + b"\xfe"), {"\\xff": "\\xfe"}),
        (_table(b"n", b"l" + struct.pack(">q", 2**40)), {"n": 2**40}),
        (_nested(2), {"a": {"a": None}}),
        (_nested(150), None),  # pika can read these, and calls itself for each
        (_nested(600), None),
    ],
)
def test_messages_whose_properties_are_odd(
    rabbitmq: Any, connection: Any, here: Project, monkeypatch: pytest.MonkeyPatch, table: bytes, headers: Any
) -> None:
    """They are received like others, and those behind them too."""
    queue = rabbitmq.create_queue()
    with monkeypatch.context() as patched, rabbitmq.channel() as channel:
        patched.setattr(pika.data, "encode_table", lambda pieces, _: pieces.append(table) or len(table))
        properties = pika.BasicProperties(content_type="a", headers={"a": 1}, message_id=b"\xff", timestamp=1)
        channel.basic_publish("", queue, b"1", properties)
    rabbitmq.publish(queue, [b"2"])
    offsets = offsets_of(connection, queue)
    drain(offsets)
    assert received_values(offsets) == [b"1", b"2"]
    page = offsets.log.read(0, offsets.log.head(), 1)
    about = json.loads(page.columns[page.names.index("about")][0])
    assert about["message_id"] == "\\xff" and about.get("headers") == headers


def test_a_queue_that_is_not_there(rabbitmq: Any, connection: Any, here: Project) -> None:
    with pytest.raises(weft.NotFoundError, match="There is no queue 'nothing' of the connection 'broker'"):
        offsets_of(connection, "nothing")
    queue = rabbitmq.create_queue()
    offsets = offsets_of(connection, queue)
    offsets.following(offsets.first())
    rabbitmq.delete_queue(queue)
    with pytest.raises(weft.NotFoundError, match="There is no queue"):
        wait_until(lambda: bool(offsets.following(0)), "the error")


def test_where_messages_cannot_be_kept(rabbitmq: Any, connection: Any, here: Project) -> None:
    queue = rabbitmq.create_queue()
    memory = weft.SQLiteConnection(":memory:", name="memory")
    with pytest.raises(weft.DeclarationError, match="received_log"):
        offsets_of(replace(connection, received_log=memory), queue)
    with pytest.raises(weft.DeclarationError, match="holds no streams"):
        offsets_of(replace(connection, received_log=connection), queue)


def test_messages_that_wait_too_long_for_their_acknowledgement(connection: Any) -> None:
    """The broker closes the channel of a receiver that is held up by a slow pipeline: it takes another one."""
    why = "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used: 1800000 ms"
    with pytest.raises(weft.ConnectionFailedError, match="timed out"), client.explained(connection):
        raise pika.exceptions.ChannelClosedByBroker(406, why)


def test_a_node_that_is_down() -> None:
    """The queue is there: it is tried again."""
    connection = weft.RabbitMQConnection("amqp://localhost", name="broker")
    why = "NOT_FOUND - home node 'rabbit@two' of durable queue 'orders' in vhost '/' is down or inaccessible"
    with pytest.raises(weft.ConnectionFailedError, match="home node"), client.explained(connection):
        raise pika.exceptions.ChannelClosedByBroker(404, why)
    with pytest.raises(weft.NotFoundError), client.explained(connection):
        raise pika.exceptions.ChannelClosedByBroker(404, "NOT_FOUND - no queue 'orders' in vhost '/'")


def test_a_consumer_that_the_broker_ends(rabbitmq: Any, connection: Any) -> None:
    """Another receiver finds out whether there is still a queue."""
    queue = rabbitmq.create_queue()
    receiver = QueueReceiver(connection.resolved(), queue)
    rabbitmq.delete_queue(queue)
    with pytest.raises(weft.ConnectionFailedError, match=f"ended the consumer of the queue '{queue}'"):
        wait_until(lambda: bool(receiver.receive(1, 0.1)), "the error", 120)
    receiver.close()
    with pytest.raises(weft.NotFoundError, match="There is no queue"):
        QueueReceiver(connection.resolved(), queue)


def test_a_client_library_that_gives_messages_to_itself(
    rabbitmq: Any, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of pika that are not public may change: then nothing is acknowledged that was not stored."""
    monkeypatch.setattr(client, "deliver_to", lambda *_: None)
    queue = rabbitmq.create_queue()
    rabbitmq.publish(queue, [b"1"])
    receiver = QueueReceiver(connection.resolved(), queue)
    with pytest.raises(weft.StorageError, match="version of pika"):
        wait_until(lambda: bool(receiver.receive(1, 0.1)), "the error", 120)
    receiver.close()
    wait_for_count(rabbitmq, queue, 1)


@pytest.mark.parametrize(("heartbeat", "seconds"), [(6, 2.0), (0, 10.0), (60, 10.0)])
def test_how_often_a_receiver_answers_that_holds_much(
    rabbitmq: Any, connection: Any, heartbeat: int, seconds: float
) -> None:
    url = f"{rabbitmq.url()}?heartbeat={heartbeat}"
    receiver = QueueReceiver(replace(connection, amqp_url=url).resolved(), rabbitmq.create_queue())
    assert receiver._look_seconds == seconds
    receiver.close()


def test_options_of_the_url_that_cannot_be_read() -> None:
    broken = weft.RabbitMQConnection("amqp://u:secret@localhost/?client_properties={", name="broker")
    with pytest.raises(weft.SettingsError, match="options of the amqp_url of the connection 'broker'"):
        client.parameters(broken.resolved())


@pytest.mark.parametrize(
    ("timestamp", "moment"),
    [
        (1_700_000_000, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (1_700_000_000_123, datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)),
        (None, None),
        (2**62, None),
    ],
)
def test_times_of_messages(timestamp: Any, moment: datetime | None) -> None:
    assert sent_at(timestamp) == moment


@pytest.mark.timing
@pytest.mark.full
def test_a_broker_that_is_killed_and_comes_back(here: Project) -> None:
    from rabbitmq_server import RabbitMQServer

    if RabbitMQServer.is_missing():
        pytest.skip("RabbitMQ is not installed")
    broker = RabbitMQServer()
    broker.start()
    try:
        queue = broker.create_queue()
        offsets = offsets_of(weft.RabbitMQConnection(broker.url(), name="broker"), queue)
        offsets.following(offsets.first())
        for number in range(3):
            broker.publish(queue, [b"%d" % n for n in range(100 * number, 100 * (number + 1))])
            broker.kill()
            broker.restart()
        with suppress(weft.ConnectionFailedError):
            wait_until(lambda: offsets.log.count() >= 300, "all messages")
        assert sorted(map(int, received_values(offsets))) == list(range(300))
    finally:
        broker.kill()
