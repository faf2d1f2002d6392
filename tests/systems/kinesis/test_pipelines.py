"""Streaming pipelines from and to Kinesis: rows, dead letters, positions, shards that are split while they are read,
and a driver that is killed."""

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


def test_a_source_and_its_dead_letters(kinesis: Any) -> None:
    stream, failed = kinesis.create_stream(), kinesis.create_stream()
    connection = weft.KinesisConnection(**kinesis.fields(), name="events", metadata_columns=True)
    weft.register_connection(connection)
    weft.streaming_pipeline(
        name="copies",
        source=connection,
        source_query=stream,
        target="default",
        target_table="copies",
        dead_letter_topic=failed,
    )(lambda: None)
    kinesis.put(stream, [*numbered(1), b"{ no JSON", *numbered(2)], "a")
    kinesis.split(stream)
    kinesis.put(stream, numbered(3), "a")
    assert shown("checkpoints", "show", "copies")["lag"] == {stream: 4}
    call("consume", "copies", "--once")
    columns = "n, text, _partition_key, _shard_id, _sequence_number"
    first, second, third = rows("copies", columns)
    assert (first, second) == (
        (1, "é", "a", "shardId-000000000000", "1"),
        (2, "é", "a", "shardId-000000000000", "3"),
    )
    assert third[:3] == (3, "é", "a") and third[3] != first[3]
    assert all(moment is not None for (moment,) in rows("copies", "_event_ts"))
    (letter,) = shown("dlq", "list", "copies")
    assert (letter["payload"], letter["offset"]) == ("{ no JSON", "shardId-000000000000:2")

    state = shown("checkpoints", "show", "copies")
    assert state["lag"] == {stream: 0}
    assert state["offsets"][stream]["shards"]["shardId-000000000000"] == "closed"
    call("checkpoints", "rewind", "copies", "--to-offset", "shardId-000000000000:3")
    assert shown("checkpoints", "show", "copies")["lag"] == {stream: 2}
    call("consume", "copies", "--once")
    assert [n for (n,) in rows("copies", "n")] == [1, 2, 2, 3, 3]


@pytest.mark.full
def test_a_shard_that_is_split_while_it_is_read(kinesis: Any) -> None:
    stream = kinesis.create_stream()
    connection = weft.KinesisConnection(**kinesis.fields(), name="events")
    kinesis.put(stream, numbered(0))
    pipeline = weft.streaming_pipeline(
        name="copies",
        source=weft.Source(connection=connection, query=stream, start="latest"),
        target="default",
        target_table="copies",
    )(lambda: None)
    query = Query(pipeline)
    query.start()
    try:
        for number, reshard in enumerate(
            (
                lambda: kinesis.split(stream),
                lambda: kinesis.merge(stream, "shardId-000000000001", "shardId-000000000002"),
                lambda: None,
            )
        ):
            kinesis.put(stream, numbered(2 * number + 1), "a")
            reshard()
            kinesis.put(stream, numbered(2 * number + 2), "b")
            wanted = [(n,) for n in range(1, 2 * number + 3)]
            wait_until(lambda wanted=wanted: _numbers() == wanted, f"{wanted}")
    finally:
        query.stop()
        query.wait(60)


def _numbers() -> list[Any]:
    try:
        return rows("copies", "n")
    except weft.WeftError:  # there is no table yet
        return []


@pytest.mark.timing
def test_a_stream_that_is_deleted_and_made_anew(kinesis: Any) -> None:
    stream = kinesis.create_stream()
    connection = weft.KinesisConnection(**kinesis.fields(), name="events")
    kinesis.put(stream, numbered(1, 2))
    pipeline = weft.streaming_pipeline(
        name="copies", source=connection, source_query=stream, target="default", target_table="copies"
    )(lambda: None)
    query = Query(pipeline)
    query.start()
    wait_until(lambda: len(_numbers()) == 2, "two rows")
    kinesis.client.delete_stream(StreamName=stream)
    with pytest.raises(weft.NotFoundError, match=r"is gone, and copies reads it.\n.*weft checkpoints reset copies"):
        query.wait(60)
    with pytest.raises(weft.NotFoundError, match="There is no stream"):
        Query(pipeline).start()
    kinesis.client.create_stream(StreamName=stream, ShardCount=1)
    kinesis.put(stream, numbered(3))
    again = Query(pipeline)
    again.start()
    with pytest.raises(weft.StorageError, match="does not have what copies is to read"):
        again.wait(60)
    call("checkpoints", "reset", "copies")
    call("consume", "copies", "--once")
    assert _numbers() == [(1,), (2,), (3,)]


def test_a_target(kinesis: Any) -> None:
    stream = kinesis.create_stream(2)
    connection = weft.KinesisConnection(**kinesis.fields(), name="events")
    events = weft.stream(name="events", fields={"n": "int64", "text": "string"})(lambda: None)
    weft.publish_sync(events, [{"n": n, "text": "x"} for n in range(3)])
    target = weft.Target(connection=connection, stream=stream, primary_key=["n"])
    kinesis.refuse(stream, PutRecords=1)
    run_once(name="out", source=events, targets=[target], transform_sql="SELECT n, text FROM source")
    records = sorted(kinesis.records(stream), key=lambda each: each["PartitionKey"])
    assert [each["PartitionKey"] for each in records] == ["0", "1", "2"]
    values = [json.loads(each["Data"]) for each in records]
    assert [(each["n"], each["text"]) for each in values] == [(n, "x") for n in range(3)]
    assert len({each["_weft_batch_id"] for each in values}) == 1
    assert len({each["_weft_row"] for each in values}) == 3


def test_records_that_are_bytes(kinesis: Any) -> None:
    stream = kinesis.create_stream()
    connection = weft.KinesisConnection(**kinesis.fields(), name="events", payload_format="raw_bytes")
    kinesis.put(stream, [b"\xff\x00", b"{"], "a")
    run_once(name="bytes", source=connection, source_query=stream, target_table=(None, "copies"))
    found = rows("copies", "key, value, partition, offset")
    assert found == [("a", b"\xff\x00", "shardId-000000000000", "1"), ("a", b"{", "shardId-000000000000", "2")]


def test_the_example_of_the_docs(kinesis: Any, monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    # Spark runs already, without these.
    monkeypatch.setenv("KINESIS_ENDPOINT", kinesis.fields()["endpoint"])
    monkeypatch.setenv("KINESIS_KEY_ID", "me")
    monkeypatch.setenv("KINESIS_SECRET", "hunter2")
    for name in ("orders", "orders-failed"):
        kinesis.client.create_stream(StreamName=name, ShardCount=1)
    try:
        (block,) = (each for each in blocks_of(ROOT / "docs" / "kinesis.md") if each.file == "shop.py")
        Path("shop.py").write_text(block.text)
        monkeypatch.syspath_prepend(project)
        kinesis.put("orders", [b'{"id": 1, "customer": "ada"}', b"{"])
        for command in ("validate", "consume"):
            once = ["--once"] if command == "consume" else []
            call(command, "--module", "shop", "orders_to_table", *once)
        assert rows("orders", "id, customer") == [(1, "ADA")]
        (letter,) = kinesis.records("orders-failed")
        assert json.loads(letter["Data"])["payload"] == "{"
    finally:
        for name in ("orders", "orders-failed"):
            kinesis.client.delete_stream(StreamName=name)


@pytest.mark.timing
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_driver_that_is_killed(kinesis: Any, shared_server: Callable[[str], Any], count: Callable[..., int]) -> None:
    """Now and then with other shards."""
    stream = kinesis.create_stream()
    connection = {"kind": "kinesis", "name": "events", **kinesis.fields()}

    def publish(number: int, sent: list[bytes]) -> None:
        if number in (1, 2, 3):
            kinesis.split(stream, f"shardId-{2 * (number - 1):012}")
        for each in sent:
            kinesis.put(stream, [each], each.decode())

    with shared_server("postgres").database() as url:
        check_killed(count(60), connection, stream, url, publish)
