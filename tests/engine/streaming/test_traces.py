"""The trace from a publish through a micro-batch to the commits of its targets."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from collector import attributes, collector
from engine.streaming.conftest import declare, run_once
from weft.operate.traces import open_traces


def test_from_the_publish_to_the_commits(plain_spark: Any, streams: Any) -> None:
    orders = declare("orders", n="int64")
    with collector() as collected:
        with open_traces(collected.url):
            done = [weft.publish_sync(orders, [{"n": n}, {"n": n}]) for n in range(2)]
            run_once(name="copy", source=orders, target_table=(None, "copies"))
        spans = collected.all_spans()
    publishes = [each for each in spans if each.name == "publish orders"]
    (process,) = (each for each in spans if each.name == "process orders")
    (commit,) = (each for each in spans if each.name.startswith("commit "))
    assert [(each.trace_id, each.span_id) for each in process.links] == [
        (each.trace_id, each.span_id) for each in publishes
    ]
    assert [attributes(each)["weft.publish_id"] for each in publishes] == [each["publish_id"] for each in done]
    about = attributes(process)
    query_id = about.pop("weft.query_id")
    assert about == {
        "weft.pipeline": "copy",
        "weft.batch_id": 0,
        "messaging.system": "weft",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "copy",
        "messaging.batch.message_count": 4,
    }
    assert process.kind == process.SPAN_KIND_CONSUMER
    assert (commit.trace_id, commit.parent_span_id) == (process.trace_id, process.span_id)
    stored = attributes(commit)
    assert (stored["weft.query_id"], stored["weft.batch_id"], stored["weft.rows_read"]) == (query_id, 0, 4)
    assert stored["weft.replayed"] is False


def test_the_spans_that_published_messages_of_kafka(kafka: Any, plain_spark: Any, here: Any) -> None:
    pytest.importorskip("confluent_kafka")
    topic, connection = kafka.create_topic(1), weft.KafkaConnection(kafka.bootstrap, name="broker")
    caller, first = (f"00-{n:032x}-{n:016x}-01" for n in (1, 2))
    kafka.produce(topic, [b'{"n": 1}', b'{"n": 2}', None], headers=[("traceparent", first), ("traceparent", caller)])
    kafka.produce(topic, [b'{"n": 3}'], headers=[("traceparent", b"\xff"), ("other", None)])
    kafka.produce(topic, [b'{"n": 4}'], headers={"traceparent": "x" * 1000})
    kafka.produce(topic, [b'{"n": 5}'])
    with collector() as collected:
        with open_traces(collected.url):
            run_once(name="copy", source=weft.Source(connection=connection, query=topic), target_table=(None, "copies"))
        (process,) = (each for each in collected.all_spans() if each.name.startswith("process "))
    assert [each.span_id.hex() for each in process.links] == [f"{1:016x}"]
    assert attributes(process)["messaging.batch.message_count"] == 5
