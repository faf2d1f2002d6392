"""Streaming pipelines from and to Pub/Sub: rows, dead letters, positions, a subscription that is deleted, and a driver
that is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from broker_pipelines import call, check_killed, numbered, shown
from documents import ROOT, blocks_of
from servers import wait_until
from tests.engine.streaming.conftest import rows, run_once
from weft.engine.streaming.query import Query

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("here")]


def test_a_source_and_its_dead_letters(pubsub: Any) -> None:
    topic, subscription = pubsub.create_queue(enable_message_ordering=True)
    failed, _ = pubsub.create_queue()
    connection = weft.PubSubConnection(**pubsub.fields(), name="events", metadata_columns=True, keep_days=1)
    weft.register_connection(connection)
    weft.streaming_pipeline(
        name="copies",
        source=weft.Source(connection=connection, query=subscription),
        target="default",
        target_table="copies",
        dead_letter_topic=failed,
    )(lambda: None)
    pubsub.publish(topic, [*numbered(1), b"{ no JSON", *numbered(2)], "a", source="web")
    call("consume", "copies", "--once")
    first, second = rows("copies", "n, text, _ordering_key, _attributes, _message_id")
    assert (first[:4], second[:4]) == ((1, "é", "a", '{"source": "web"}'), (2, "é", "a", '{"source": "web"}'))
    assert first[4] != second[4]
    assert all(moment is not None for (moment,) in rows("copies", "_event_ts"))
    (letter,) = shown("dlq", "list", "copies")
    assert (letter["payload"], letter["offset"]) == ("{ no JSON", f"{subscription}:2")

    assert shown("checkpoints", "show", "copies")["lag"] == {subscription: 0}
    call("checkpoints", "rewind", "copies", "--to-offset", "3")
    assert shown("checkpoints", "show", "copies")["lag"] == {subscription: 1}
    call("consume", "copies", "--once")
    assert [n for (n,) in rows("copies", "n")] == [1, 2, 2]
    call("dlq", "purge", "copies", "--all", "--yes")
    assert shown("dlq", "list", "copies") == []


@pytest.mark.full
def test_a_running_pipeline(pubsub: Any) -> None:
    """It receives what comes, and ends with a reason when the subscription is deleted."""
    topic, subscription = pubsub.create_queue()
    connection = weft.PubSubConnection(**pubsub.fields(), name="events", subscription=subscription)
    pipeline = weft.streaming_pipeline(name="copies", source=connection, target="default", target_table="copies")(
        lambda: None
    )
    query = Query(pipeline)
    query.start()
    for first in (0, 1000):
        pubsub.publish(topic, numbered(*range(first, first + 1000)))
        wait_until(lambda first=first: len(_numbers()) == first + 1000, f"{first + 1000} rows")
    assert [n for (n,) in sorted(_numbers())] == list(range(2000))
    pubsub.delete_subscription(subscription)
    with pytest.raises(weft.NotFoundError, match=r"is gone, and copies reads it"):
        query.wait(60)


def _numbers() -> list[Any]:
    try:
        return rows("copies", "n")
    except weft.WeftError:  # there is no table yet
        return []


def test_a_target(pubsub: Any) -> None:
    topic, subscription = pubsub.create_queue(enable_message_ordering=True)
    connection = weft.PubSubConnection(**pubsub.fields(), name="events")
    events = weft.stream(name="events", fields={"n": "int64", "text": "string"})(lambda: None)
    weft.publish_sync(events, [{"n": n, "text": "x"} for n in range(3)])
    target = weft.Target(connection=connection, stream=topic, primary_key=["n"])
    run_once(name="out", source=events, targets=[target], transform_sql="SELECT n, text FROM source")
    messages = sorted(pubsub.messages(subscription, 3), key=lambda each: each.ordering_key)
    assert [each.ordering_key for each in messages] == ["0", "1", "2"]
    assert [json.loads(each.data) for each in messages] == [{"n": n, "text": "x"} for n in range(3)]
    assert len({each.attributes["weft-batch-id"] for each in messages}) == 1
    assert len({each.attributes["weft-row"] for each in messages}) == 3


@pytest.mark.full
def test_messages_that_are_bytes(pubsub: Any) -> None:
    topic, subscription = pubsub.create_queue()
    connection = weft.PubSubConnection(**pubsub.fields(), name="events", payload_format="raw_bytes")
    pubsub.publish(topic, [b"\xff\x00", b"{"], "a")
    run_once(name="bytes", source=connection, source_query=subscription, target_table=(None, "copies"))
    found = rows("copies", "key, value, partition, offset")
    assert found == [("a", b"\xff\x00", subscription, "1"), ("a", b"{", subscription, "2")]


def test_the_example_of_the_docs(pubsub: Any, monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    # Spark runs already, without this.
    monkeypatch.setenv("PUBSUB_ENDPOINT", pubsub.url())
    monkeypatch.setenv("PUBSUB_PROJECT", pubsub.fields()["project_id"])
    pubsub.create_subscription(pubsub.create_topic("orders"), "orders-weft")
    pubsub.create_subscription(pubsub.create_topic("orders-failed"), "orders-failed")
    (block,) = (each for each in blocks_of(ROOT / "docs" / "pubsub.md") if each.file == "shop.py")
    Path("shop.py").write_text(block.text)
    monkeypatch.syspath_prepend(project)
    pubsub.publish("orders", [b'{"id": 1, "customer": "ada"}', b"{"])
    for command in ("validate", "consume"):
        once = ["--once"] if command == "consume" else []
        call(command, "--module", "shop", "orders_to_table", *once)
    assert rows("orders", "id, customer") == [(1, "ADA")]
    (letter,) = pubsub.messages("orders-failed", 1)
    assert json.loads(letter.data)["payload"] == "{"


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_driver_that_is_killed(pubsub: Any, shared_server: Callable[[str], Any], count: Callable[..., int]) -> None:
    topic, subscription = pubsub.create_queue(ack_deadline_seconds=10)
    connection = {"kind": "pubsub", "name": "events", **pubsub.fields()}
    with shared_server("postgres").database() as url:
        check_killed(count(60), connection, subscription, url, lambda _, sent: pubsub.publish(topic, sent))
