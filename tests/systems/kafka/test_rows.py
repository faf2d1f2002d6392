"""What Spark makes of topics: rows with the types of their values, bad messages beside them, each message read once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from weft import DeclarationError, KafkaConnection
from weft.systems import messages
from weft.systems.kafka import client
from weft.systems.kafka.stream_source import KafkaSource
from weft.systems.kafka.target import KafkaTarget
from weft.systems.load import Load
from weft.systems.stream_source import SourceSettings

Batch = Callable[[str], Any]
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def write(frame: Any, connection: KafkaConnection, topic: str, *keys: str) -> int:
    load = Load(table=topic, keys=keys, checkpoint_id="load", batch_id=7, moment=NOON)
    return KafkaTarget(connection).write(frame, load, frame.sparkSession).inserted


def test_json(kafka: Any, connection: KafkaConnection, batch: Batch) -> None:
    topic = kafka.create_topic(partitions=2)
    kafka.produce(topic, [b'{"id": 1, "name": "a"}', b"bad", None], timestamp=milliseconds(NOON))
    kafka.produce(topic, [b'{"ID": 2.5, "deep": {"x": [1]}, "at": "2026-01-01"}'], 1, timestamp=milliseconds(NOON))
    with closing(messages.rows(batch(topic), connection, {"at": pa.date32()})) as rows:
        good, bad = rows.good, rows.bad
        assert (rows.good_rows, rows.bad_rows, rows.tombstones) == (2, 1, 1)
        assert dict(good.dtypes) == {
            "ID": "double",
            "name": "string",
            "deep": "struct<x:array<bigint>>",
            "at": "date",
            "_event_ts": "timestamp",
        }
        one, two = sorted(good.toArrow().to_pylist(), key=lambda row: row["ID"])
        assert one == {"ID": 1.0, "name": "a", "deep": None, "at": None, "_event_ts": NOON}
        assert two == {"ID": 2.5, "name": None, "deep": {"x": [1]}, "at": date(2026, 1, 1), "_event_ts": NOON}
        assert good.selectExpr("id", "deep.x[0] AS x").where("x = 1").collect()[0].id == 2.5
        (row,) = bad.toArrow().to_pylist()
        assert row.pop("error").startswith("It is not JSON")
        assert row == {"payload": b"bad", "partition": "0", "offset": "1"}


def test_messages_are_read_once(kafka: Any, connection: KafkaConnection, batch: Batch) -> None:
    """Whatever is asked of the frames, the broker is not: what it has removed is still there."""
    from confluent_kafka import TopicPartition

    topic = kafka.create_topic()
    kafka.produce(topic, [b'{"n": 1}', b"bad"])
    with closing(messages.rows(batch(topic), connection)) as rows:
        good, bad = rows.good, rows.bad
        kafka.admin.delete_records([TopicPartition(topic, 0, 2)])[TopicPartition(topic, 0)].result(30)
        for _ in range(2):
            assert [row.n for row in good.collect()] == [1]
            assert [bytes(row.payload) for row in bad.collect()] == [b"bad"]


def test_what_was_kept_is_let_go(kafka: Any, connection: KafkaConnection, batch: Batch, spark: Any) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, [b'{"n": 1}'])
    before = spark.sparkContext._jsc.getPersistentRDDs().size()
    with closing(messages.rows(batch(topic), connection)) as rows:
        good = rows.good
        assert good.count() == 1
        assert spark.sparkContext._jsc.getPersistentRDDs().size() == before + 1
    assert spark.sparkContext._jsc.getPersistentRDDs().size() == before


def test_nothing_but_tombstones(kafka: Any, connection: KafkaConnection, batch: Batch) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, [None, None], key=b"k")
    with closing(messages.rows(batch(topic), connection)) as rows:
        good, bad = rows.good, rows.bad
        assert (rows.good_rows, rows.bad_rows, rows.tombstones) == (0, 0, 2)
        assert good.columns == ["_event_ts"]
        assert good.count() == bad.count() == 0


@pytest.mark.full
def test_an_empty_topic(kafka: Any, connection: KafkaConnection, batch: Batch) -> None:
    with closing(messages.rows(batch(kafka.create_topic()), connection, {"n": pa.int64()})) as rows:
        good, bad = rows.good, rows.bad
        assert (rows.good_rows, rows.bad_rows, rows.tombstones) == (0, 0, 0)
        assert good.count() == bad.count() == 0


def test_columns_that_spark_gives_a_meaning_to(kafka: Any, connection: KafkaConnection, batch: Batch) -> None:
    topic = kafka.create_topic()
    names = ["a.b", "back`tick", "two words", "_event_ts", "value", "nothing"]
    kafka.produce(
        topic, [json.dumps({**dict.fromkeys(names, 1), "nothing": None}).encode()], timestamp=milliseconds(NOON)
    )
    with closing(messages.rows(batch(topic), connection)) as rows:
        good = rows.good
        assert dict(good.dtypes)["nothing"] == "void"
        (row,) = good.toArrow().to_pylist()
        assert row == {**dict.fromkeys(names, 1), "nothing": None, "_event_ts": NOON}


def _add(batches: Any, more: int) -> Any:
    import pyarrow as pa

    for batch in batches:
        yield pa.RecordBatch.from_pydict({"total": [sum(batch["n"].to_pylist()) + more]})


def test_rows_in_a_task(kafka: Any, connection: KafkaConnection, batch: Batch) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, [b'{"n": 1}', b'{"n": 2}', b"bad"])
    with closing(messages.rows(batch(topic), connection)) as rows:
        assert rows.packed is not None
        assert rows.columns is not None
        unpack = functools.partial(messages.unpack, pa.schema([rows.columns.field("n")]))
        found = rows.packed.mapInArrow(lambda batches: _add(unpack(batches), more=10), "total bigint").collect()
        assert [row.total for row in found] == [13]


def test_raw_bytes(kafka: Any, batch: Batch) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, [b"\xff\n", None], key=b"k", timestamp=milliseconds(NOON))
    raw = KafkaConnection(kafka.bootstrap, payload_format="raw_bytes")
    with closing(messages.rows(batch(topic), raw)) as rows:
        good, bad = rows.good, rows.bad
        assert good.toArrow().to_pylist() == [
            {"key": b"k", "value": value, "topic": topic, "partition": 0, "offset": number, "_event_ts": NOON}
            for number, value in enumerate([b"\xff\n", None])
        ]
        assert bad.count() == rows.bad_rows == 0


def test_rows_there_and_back(kafka: Any, connection: KafkaConnection, batch: Batch, spark: Any) -> None:
    topic = kafka.create_topic(partitions=2)
    schema = (
        "id bigint, name string, price decimal(10,2), day date, at timestamp, local timestamp_ntz, data binary, "
        "ok boolean, tags array<string>, `a.b` struct<x: int>"
    )
    at = datetime(2026, 1, 31, 12, 0, 0, 123456)
    rows = [
        (1, 'é"\n', Decimal("1.25"), date(2026, 1, 31), at, at, b"hi", True, ["x"], (1,)),
        (2, None, None, None, None, None, None, None, None, None),
    ]
    frame = spark.createDataFrame(rows, schema)
    assert write(frame, connection, topic, "id") == 2
    sent = kafka.messages(topic)
    assert {message.key() for message in sent} == {b"1", b"2"}
    assert all(message.headers() == [("weft-batch-id", b"load 7")] for message in sent)
    known = {
        "price": pa.decimal128(10, 2),
        "day": pa.date32(),
        "at": pa.timestamp("us", "UTC"),
        "local": pa.timestamp("us"),
        "data": pa.binary(),
    }
    with closing(messages.rows(batch(topic), connection, known)) as rows:
        good, bad = rows.good, rows.bad
        assert bad.count() == 0
        found = good.drop("_event_ts").orderBy("id").toArrow().to_pylist()
        assert found == frame.orderBy("id").toArrow().to_pylist()


def test_keys_of_messages(kafka: Any, connection: KafkaConnection, spark: Any) -> None:
    topic = kafka.create_topic()
    frame = spark.createDataFrame([(1, "x")], "a int, b string")
    assert write(frame, connection, topic) == 1
    assert write(frame, connection, topic, "a", "b") == 1
    assert write(frame.limit(0), connection, topic) == 0
    assert [message.key() for message in kafka.messages(topic)] == [None, b'{"a":1,"b":"x"}']
    with pytest.raises(DeclarationError, match=r"key 'bb' of messages[\s\S]*Did you mean 'b'"):
        write(frame, connection, topic, "bb")


def test_send(kafka: Any, connection: KafkaConnection) -> None:
    topic = kafka.create_topic()
    assert client.send(connection, topic, [(b"k", b"\xff"), (None, None)]) == 2
    one, two = kafka.messages(topic)
    assert (one.key(), one.value()) == (b"k", b"\xff")
    assert (two.key(), two.value()) == (None, None)


def test_offsets(kafka: Any, connection: KafkaConnection) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions

    topic = kafka.create_topic(partitions=2)
    for second in range(3):
        kafka.produce(topic, [b"{}"], timestamp=milliseconds(NOON + timedelta(seconds=second)))
    admin = client.admin(connection)
    assert admin.latest(topic) == {0: 3, 1: 0}
    for moment, expected in (
        (NOON - timedelta(days=1), 0),
        (NOON, 0),
        (NOON + timedelta(microseconds=1), 1),
        (NOON + timedelta(seconds=2), 2),
        (NOON + timedelta(seconds=3), 3),
    ):
        assert admin.first_since(topic, moment) == {0: expected, 1: 0}
    KafkaSource(connection, SourceSettings(topic)).committed({topic: {"0": 2, "1": 0}})
    asked = kafka.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("shop")])["shop"]
    found = {place.partition: place.offset for place in asked.result(30).topic_partitions if place.topic == topic}
    assert found == {0: 2, 1: 0}


def test_offsets_that_cannot_be_committed_are_a_line_in_the_log(
    kafka: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.create_topic()
    for bootstrap, seconds in ((kafka.bootstrap, client.SECONDS), ("127.0.0.1:1", 0.5)):
        monkeypatch.setattr(client, "SECONDS", seconds)
        caplog.clear()
        connection = KafkaConnection(bootstrap, group_id="g")
        KafkaSource(connection, SourceSettings(f"{topic}-missing")).committed({f"{topic}-missing": {"0": 1}})
        assert f"The offsets of {topic}-missing were not committed" in caplog.text
