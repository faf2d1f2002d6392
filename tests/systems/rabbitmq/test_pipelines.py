"""Streaming pipelines from and to RabbitMQ: rows, dead letters, positions, faults, and a driver that is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from broker_pipelines import call, check_killed, numbered, shown
from collector import attributes, collector
from documents import ROOT, blocks_of
from servers import wait_until
from tests.engine.streaming.conftest import rows, run_once
from weft.engine.streaming.checkpoint import Checkpoint
from weft.engine.streaming.query import Query
from weft.operate.traces import open_traces

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("here")]


def test_a_source_and_its_dead_letters(rabbitmq: Any) -> None:
    queue = rabbitmq.create_queue()
    failed = f"{queue}-failed"
    connection = weft.RabbitMQConnection(rabbitmq.url(), name="broker", metadata_columns=True, keep_days=1)
    weft.register_connection(connection)
    weft.streaming_pipeline(
        name="copies",
        source=connection,
        source_query=queue,
        target="default",
        target_table="copies",
        dead_letter_topic=failed,
    )(lambda: None)
    rabbitmq.publish(queue, numbered(1), timestamp=1_700_000_000, headers={"a": 1, "b": [b"x"]}, message_id="m1")
    rabbitmq.publish(queue, [b"{ no JSON", *numbered(2)])
    assert shown("checkpoints", "show", "copies")["lag"] == {queue: 3}
    call("consume", "copies", "--once")
    first, second = rows("copies", "n, text, _routing_key, _exchange, _message_id, _headers")
    assert first == (1, "é", queue, None, "m1", '{"a": 1, "b": ["x"]}')
    assert second[:4] == (2, "é", queue, None) and second[5] is None
    (sent,), (arrived,) = rows("copies", "_event_ts")
    assert "2023-11-14" in str(sent) and "2023" not in str(arrived)
    (letter,) = shown("dlq", "list", "copies")
    assert (letter["payload"], letter["offset"]) == ("{ no JSON", f"{queue}:2")
    assert rabbitmq.count(failed) == 1

    assert shown("checkpoints", "show", "copies")["lag"] == {queue: 0}
    # The log knows the checkpoint, and no other one of that name, and where the run ended.
    (log,) = (each["name"] for each in shown("streams", "list") if each["name"].startswith("received_rabbitmq"))
    groups = [(each["consumer"], each["lag"]) for each in shown("streams", "groups", log)]
    assert groups == [(Checkpoint("copies").reader(), 0)]
    call("checkpoints", "rewind", "copies", "--to-offset", f"{queue}:3")
    assert shown("checkpoints", "show", "copies")["lag"] == {queue: 1}
    rabbitmq.publish(queue, numbered(3))
    call("consume", "copies", "--once")
    assert [n for (n,) in rows("copies", "n")] == [1, 2, 2, 3]


def _numbers() -> list[Any]:
    try:
        return rows("copies", "n")
    except weft.WeftError:  # there is no table yet
        return []


@pytest.mark.timing
def test_a_connection_that_is_cut_and_a_queue_that_is_deleted(rabbitmq: Any) -> None:
    queue = rabbitmq.create_queue()
    connection = weft.RabbitMQConnection(rabbitmq.url(), name="broker")
    rabbitmq.publish(queue, numbered(1, 2))
    pipeline = weft.streaming_pipeline(
        name="copies", source=connection, source_query=queue, target="default", target_table="copies"
    )(lambda: None)
    query = Query(pipeline)
    query.start()
    wait_until(lambda: len(_numbers()) == 2, "two rows")
    rabbitmq.cut_connections()
    rabbitmq.publish(queue, numbered(3))
    wait_until(lambda: len(_numbers()) == 3, "the third row")
    rabbitmq.delete_queue(queue)
    with pytest.raises(weft.NotFoundError, match=r"is gone, and copies reads it.\n.*start copies"):
        query.wait(60)
    with pytest.raises(weft.NotFoundError, match="There is no queue"):
        Query(pipeline).start()
    rabbitmq.create_queue(queue)
    rabbitmq.publish(queue, numbered(4))
    call("consume", "copies", "--once")
    assert _numbers() == [(1,), (2,), (3,), (4,)]


def test_a_target(rabbitmq: Any) -> None:
    one, two = rabbitmq.create_queue(), rabbitmq.create_queue()
    exchange = f"exchange-{one}"
    with rabbitmq.channel() as channel:
        channel.exchange_declare(exchange, "direct", durable=True)
        for queue, key in ((one, "0"), (one, "1"), (two, "2")):
            channel.queue_bind(queue, exchange, key)
    connection = weft.RabbitMQConnection(rabbitmq.url(), name="broker")
    events = weft.stream(name="events", fields={"n": "int64", "body": "bytes"})(lambda: None)
    weft.publish_sync(events, [{"n": n, "body": b"\xff" if n == 3 else b"x"} for n in range(4)])
    target = weft.Target(connection=connection, stream=exchange, primary_key=["n"])
    sql = "SELECT n, CAST(body AS STRING) AS text FROM source"
    run_once(name="out", source=events, targets=[target], transform_sql=sql, dead_letter_table=(None, "failed"))
    assert rows("failed", "payload") == [('{"n": 3, "text": "\\\\xff"}',)]
    messages = [*rabbitmq.messages(one), *rabbitmq.messages(two)]
    assert sorted((method.routing_key, json.loads(body)["n"]) for method, _, body in messages) == [
        ("0", 0),
        ("1", 1),
        ("2", 2),
    ]
    headers = [properties.headers for _, properties, _ in messages]
    assert len({each["weft-batch-id"] for each in headers}) == 1
    assert len({each["weft-row"] for each in headers}) == 3
    assert all(properties.delivery_mode == 2 and properties.message_id for _, properties, _ in messages)
    # A row that no queue takes is not lost in silence.
    weft.publish_sync(events, [{"n": 7, "body": b"x"}])
    with pytest.raises(weft.WeftError, match="No queue takes what is written to the exchange"):
        run_once(name="out", source=events, targets=[target], transform_sql=sql)


def test_messages_that_are_bytes(rabbitmq: Any) -> None:
    queue = rabbitmq.create_queue()
    connection = weft.RabbitMQConnection(rabbitmq.url(), name="broker", payload_format="raw_bytes")
    rabbitmq.publish(queue, [b"\xff\x00", b"{"])
    run_once(name="bytes", source=connection, source_query=queue, target_table=(None, "copies"))
    found = rows("copies", "key, value, partition, offset")
    assert found == [(queue, b"\xff\x00", queue, "1"), (queue, b"{", queue, "2")]


def test_the_example_of_the_docs(rabbitmq: Any, monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    monkeypatch.setenv("AMQP_URL", rabbitmq.url())
    rabbitmq.create_queue("orders")
    try:
        (block,) = (each for each in blocks_of(ROOT / "docs" / "rabbitmq.md") if each.file == "shop.py")
        Path("shop.py").write_text(block.text)
        monkeypatch.syspath_prepend(project)
        rabbitmq.publish("orders", [b'{"id": 1, "customer": "ada"}', b"{"])
        for command in ("validate", "consume"):
            once = ["--once"] if command == "consume" else []
            call(command, "--module", "shop", "orders_to_table", *once)
        assert rows("orders", "id, customer") == [(1, "ADA")]
        ((_, _, letter),) = rabbitmq.messages("orders-failed")
        assert json.loads(letter)["payload"] == "{"
    finally:
        rabbitmq.delete_queue("orders")
        rabbitmq.delete_queue("orders-failed")


def test_the_spans_that_published_the_messages(rabbitmq: Any) -> None:
    connection, queue = weft.RabbitMQConnection(rabbitmq.url(), name="broker"), rabbitmq.create_queue()
    callers = [f"00-{n:032x}-{n:016x}-01" for n in (1, 2)]
    for number in range(4):
        rabbitmq.publish(queue, numbered(number), headers={"traceparent": callers[number % 2]})
    rabbitmq.publish(queue, numbered(4), headers={"traceparent": 5})
    with collector() as collected:
        with open_traces(collected.url):
            source = weft.Source(connection=connection, query=queue)
            run_once(name="copies", source=source, target_table=(None, "copies"))
        spans = [each for each in collected.all_spans() if each.name.startswith("process ")]
    assert {each.span_id.hex() for span in spans for each in span.links} == {f"{n:016x}" for n in (1, 2)}
    assert sum(attributes(each)["messaging.batch.message_count"] for each in spans) == 5
    assert len(rows("copies", "n")) == 5


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.timeout(3600)
def test_a_driver_that_is_killed(rabbitmq: Any, shared_server: Callable[[str], Any], count: Callable[..., int]) -> None:
    queue = rabbitmq.create_queue()
    connection = {"kind": "rabbitmq", "name": "broker", "amqp_url": rabbitmq.url(), "prefetch": 7}
    with shared_server("postgres").database() as url:
        check_killed(count(60, 1), connection, queue, url, lambda _, sent: rabbitmq.publish(queue, sent))
    assert rabbitmq.count(queue) == 0
