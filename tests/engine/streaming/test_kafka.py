"""Topics of Kafka as sources and targets."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, forget_last_commit, rows, run_once
from engine.streaming.letters import letters_of, put, replay_all
from servers import wait_until
from weft.engine.readers import opened_tables, stored_columns
from weft.engine.streaming.dead_letters import stream_of
from weft.engine.streaming.query import Query
from weft.engine.streaming.spark_engine import SparkEngine
from weft.errors import WeftError
from weft.operate.run_options import Running
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.kafka import tail
from weft.systems.kafka.stream_source import KafkaSource

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


@pytest.fixture
def broker(kafka: Any) -> Any:
    return weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap, group_id="shop")


@pytest.mark.brief("driver")
def test_messages_become_rows(kafka: Any, broker: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few messages no batch takes a job, also not the first one of a checkpoint."""
    few, read = KafkaSource._few, list[int | None]()

    def counted(self: KafkaSource, before: Any, position: Any) -> Any:
        found = few(self, before, position)
        read.append(None if found is None else found.num_rows)
        return found

    monkeypatch.setattr(KafkaSource, "_few", counted)
    monkeypatch.setattr(tail, "_SECONDS", 120.0)  # a machine may stand still
    topic = kafka.create_topic()
    kafka.produce(topic, [json.dumps({"id": n, "name": f"é{n}"}).encode() for n in range(5)])
    pipeline: dict[str, Any] = {
        "name": "events",
        "source": broker,
        "source_query": topic,
        "target_table": (None, "copies"),
    }
    run_once(**pipeline)
    kafka.produce(topic, [b'{"id": 5, "name": "x", "more": 1.5}'])
    run_once(**pipeline)
    run_once(**pipeline)
    assert rows("copies", "id, name, more") == [*((n, f"é{n}", None) for n in range(5)), (5, "x", 1.5)]
    assert all(moment is not None for (moment,) in rows("copies", "_event_ts"))
    assert read == [5, 1]


DOCS = [
    *('{"b":1, "a":[{"c":2.5},{"d":null}]}', '{"e":"ß","n":1e15}', "null"),
    *('{"a":null}', '{"x":12345678901234567,"A":-0.0}', "{}", '{"b":7}'),
]


@pytest.mark.brief("driver-True", "tasks-False")
@pytest.mark.parametrize("has_table", [False, True])
def test_json_is_stored_as_it_was_sent(kafka: Any, broker: Any, tmp_path: Path, has_table: bool, way: str) -> None:
    """Objects of one type would have the keys of all, and null for those that they lack; also those of letters."""
    lite = weft.SQLiteConnection(str(tmp_path / "copies.db"), name="lite")
    create = "CREATE TABLE copies (id BIGINT CHECK (id <> 1), doc JSON, list TEXT, _event_ts TIMESTAMP)"
    if has_table:
        with closing(sqlite3.connect(lite.path)) as db:
            db.execute(create)
    topic = kafka.create_topic()
    declared: dict[str, Any] = {"source": broker, "source_query": topic, "dead_letter_stream": "failed"}
    pipeline = make(name="docs", target=lite, target_table=(None, "copies"), **declared)
    sent = [f'{{"id":{n},"doc":{each},"list":[{each}]}}' for n, each in enumerate(DOCS)]
    stored = [each.replace(", ", ",") for each in DOCS]
    for messages in (sent[:3], [*sent[3:], '{"id": 99, "doc": "text"}']):
        kafka.produce(topic, [each.encode() for each in messages])
        supervise(SparkEngine(pipeline), Running(once=True))

    def found() -> dict[int, tuple[str | None, str]]:
        return {id: (doc, texts) for doc, id, texts in rows("copies", "doc, id, list", lite)}

    expected = {n: (None if each == "null" else each, f"[{each}]") for n, each in enumerate(stored)}
    assert found() == {n: each for n, each in expected.items() if n != 1 or not has_table}
    assert [each.error for each in letters_of(pipeline) if '"id": 99' in each.payload] == [
        "'doc' is \"text\", a string, which does not fit an object of this column."
    ]
    if has_table:
        with closing(sqlite3.connect(lite.path)) as db:
            db.execute("DROP TABLE copies")
            db.execute(create.replace("CHECK (id <> 1)", ""))
        put(pipeline, [DeadLetter("read", "No", topic, '{"id":7,"doc":{"b": 8},"list":[{"b":9},{"x":1}]}', "0:9")])
        replay_all(pipeline)
        assert found() == {1: expected[1], 7: ('{"b":8}', '[{"b":9},{"x":1}]')}


@pytest.mark.brief("plain", "duckdb")
@pytest.mark.parametrize("where", ["plain", "sql", "duckdb"])
def test_a_replayed_object_may_have_new_keys(kafka: Any, broker: Any, tmp_path: Path, where: str) -> None:
    """As one of a batch, where the table keeps it as JSON. An object of DuckDB has the keys that it has."""
    duck = weft.DuckDBConnection(str(tmp_path / "copies.duckdb"), name="duck")
    target = duck if where == "duckdb" else "default"
    topic = kafka.create_topic()
    declared: dict[str, Any] = {"source": broker, "source_query": topic, "target": target, "target_table": "docs"}
    declared |= {"dead_letter_table": "failed", "dead_letter_connection": "default"}
    if where == "sql":
        declared["transform_sql"] = "SELECT n, doc FROM source"
    pipeline = make(name="docs", **declared)
    kafka.produce(topic, [b'{"n": 1, "doc": {"a": 1, "in": [{"x": 1}]}}'])
    run_once(name="docs", **declared)
    payloads = ['{"n": 2, "doc": {"b": 2}}', '{"n": 3, "doc": {"in": [{"y": 3}]}}', '{"n": 4, "doc": "text"}']
    put(
        pipeline,
        [DeadLetter("read", "No", topic, each, f"0:{9 + n}") for n, each in enumerate(payloads)],
    )
    assert replay_all(pipeline).again == (3 if where == "duckdb" else 1)
    assert letters_of(pipeline)[-1].payload == payloads[-1]
    if where == "plain":
        assert rows("docs", "n, doc")[1:] == [(2, '{"b":2}'), (3, '{"in":[{"y":3}]}')]
    else:
        assert len(rows("docs", "n", target)) == (1 if where == "duckdb" else 3)


@pytest.mark.brief("wide", "files")
@pytest.mark.parametrize("where", ["wide", "narrow", "files", "frozen"])
def test_a_replayed_number_may_be_wider(kafka: Any, broker: Any, tmp_path: Path, where: str) -> None:
    """As one of a batch. A table that does not take it rejects its row alone."""
    lite = weft.SQLiteConnection(str(tmp_path / "copies.db"), name="lite")
    topic = kafka.create_topic()
    declared: dict[str, Any] = {"source": broker, "source_query": topic, "target": lite, "target_table": (None, "sums")}
    declared |= {"dead_letter_table": "failed", "dead_letter_connection": "default"}
    if where in ("wide", "frozen"):
        with closing(sqlite3.connect(lite.path)) as db:
            db.execute("CREATE TABLE sums (n BIGINT, x DOUBLE, y NUMERIC(38, 0))")
    if where == "frozen":
        declared["on_drift"] = "ignore"
    files = weft.ObjectStoreLocalConnection(str(tmp_path / "files"), name="files")
    if where == "files":
        del declared["target"], declared["target_table"]
        declared["targets"] = [weft.Target(connection=files, prefix="sums")]
    pipeline = make(name="sums", **declared)
    kafka.produce(topic, [b'{"n": 1, "x": 1, "y": 1}'])
    run_once(name="sums", **declared)
    payloads = ['{"n": 2, "x": 2, "y": 2}', '{"n": 3, "x": 2.5, "y": 3}', f'{{"n": 4, "x": 4, "y": {10**20}}}']
    put(pipeline, [DeadLetter("read", "No", topic, each, f"0:{9 + n}") for n, each in enumerate(payloads)])
    stored = [(1, 1, 1), (2, 2, 2), (3, 2.5, 3), (4, 4, 10**20)]
    assert replay_all(pipeline).again == (0 if where == "wide" else 2)
    if where == "files":
        found = sorted(
            tuple(each[name] for name in "nxy") for each in weft.read("sums", source=files).toArrow().to_pylist()
        )
    else:
        found = rows("sums", "n, x, y", lite)
    assert found == (stored if where == "wide" else stored[:2])
    assert {each.stage for each in letters_of(pipeline)} <= {"store" if where == "narrow" else "read"}


@pytest.mark.brief("driver")
def test_sql_that_passes_json_on_leaves_it_as_it_was_sent(
    kafka: Any, broker: Any, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    lite = weft.SQLiteConnection(str(tmp_path / "copies.db"), name="lite")
    topic = kafka.create_topic()
    sql = "SELECT id, doc AS v, upper('a') AS one FROM source WHERE doc IS NOT NULL"
    kafka.produce(topic, [f'{{"id":{n},"doc":{each}}}'.encode() for n, each in enumerate(DOCS)])
    declared: dict[str, Any] = {"source": broker, "source_query": topic, "transform_sql": sql}
    run_once(name="docs", target=lite, target_table=(None, "copies"), transform_on_error="fail", **declared)
    expected = {n: each.replace(", ", ",") for n, each in enumerate(DOCS) if each != "null"}
    assert dict(rows("copies", "id, v", lite)) == expected
    assert not [each for each in caplog.messages if "keys of all" in each]


@pytest.mark.brief("driver-dlq")
@pytest.mark.parametrize("on_error", ["dlq", "drop"])
def test_sql_that_fails_for_a_row_leaves_json_as_it_was_sent(
    kafka: Any, broker: Any, shared_server: Any, way: str, on_error: Any
) -> None:
    """Also that of the row itself, once it is replayed under other SQL, and where no batch has seen its object."""
    topic = kafka.create_topic()
    declared: dict[str, Any] = {"name": "docs", "source": broker, "source_query": topic, "dead_letter_stream": "failed"}
    declared |= {"target_table": (None, "copies"), "transform_on_error": on_error}
    failing, mended = (f"SELECT id, doc, list, 6 DIV ({each}) AS part FROM source" for each in ("id - 1", "id + 1"))
    texts = [each.replace(", ", ",") for each in DOCS]
    expected = {n: (None if each == "null" else each, f"[{each}]") for n, each in enumerate(texts)}
    with shared_server("postgres").database() as url:
        declared["target"] = warehouse = weft.connect(name="warehouse", url=url)

        def found() -> dict[int, tuple[str | None, str]]:
            return {id: (doc, list) for doc, id, list in rows("copies", "doc, id, list", warehouse)}

        for numbers in ([1], [n for n in expected if n != 1]):
            sent = [f'{{"id":{n},"doc":{DOCS[n]},"list":[{DOCS[n]}]}}' for n in numbers]
            kafka.produce(topic, [each.encode() for each in sent])
            run_once(**declared, transform_sql=failing)
            if on_error == "dlq" and numbers == [1]:
                (letter,) = letters_of(make(**declared, transform_sql=mended))
                assert letter.payload.startswith(f'{{"id": 1, "doc": {texts[1]}, "list": [{texts[1]}], ')
                assert replay_all(make(**declared, transform_sql=mended)).again == 0
        assert found() == {n: each for n, each in expected.items() if n != 1 or on_error == "dlq"}
        with opened_tables(warehouse) as tables:
            kinds = {each.name: each.sql for each in stored_columns(tables, None, "copies") or ()}
        assert (kinds["doc"], kinds["list"]) == ("json", "json")


@pytest.mark.brief("driver-sql")
@pytest.mark.parametrize("sql", [None, "SELECT * FROM source WHERE 6 DIV (id - 9) < 9"], ids=["plain", "sql"])
def test_json_of_several_topics_is_stored_as_it_was_sent(
    kafka: Any, broker: Any, shared_server: Any, way: str, sql: str | None
) -> None:
    """Also where one of them has no objects, or none in a batch; and that of letters."""
    topics = [kafka.create_topic() for _ in range(3)]
    with shared_server("postgres").database() as url:
        warehouse = weft.connect(name="warehouse", url=url)
        declared: dict[str, Any] = {"name": "docs", "target": warehouse, "target_table": (None, "copies")}
        declared |= {
            "sources": [weft.Source(connection=broker, query=each) for each in topics],
            "dead_letter_stream": "failed",
        }
        declared |= {"transform_sql": sql, "transform_on_error": "dlq"} if sql else {}
        pipeline = make(**declared)
        for first in (0, 20):
            for at, topic in enumerate(topics):
                # Messages of the second batch have no objects in the first topic.
                docs = [] if at == 2 else DOCS[at * 3 : at * 3 + 3] if first == 0 or at == 1 else ["null"]
                sent = [f'{{"id": {first + at * 3 + n}, "doc": {each}}}' for n, each in enumerate(docs)]
                kafka.produce(topic, [each.encode() for each in (sent or [f'{{"id": {first + 9}}}'])])
            supervise(SparkEngine(pipeline), Running(once=True))
        texts = [None if each == "null" else each.replace(", ", ",") for each in DOCS]
        expected = {**dict(enumerate(texts[:6])), 20: None, 29: None, **dict(enumerate(texts[3:6], 23))}
        expected |= {} if sql else {9: None}
        assert dict(rows("copies", "id, doc", warehouse)) == expected
        with opened_tables(warehouse) as tables:
            assert {each.sql for each in stored_columns(tables, None, "copies") or () if each.name == "doc"} == {"json"}
        put(pipeline, [DeadLetter("read", "No", topics[0], '{"id": 40, "doc": {"new": 1e2}}', "0:9")])
        put(pipeline, [DeadLetter("read", "No", topics[1], '{"id": 41, "doc": {"x": {}}}', "0:9")])
        if sql:
            declared["transform_sql"] = sql.replace("9)", "8)")
        assert replay_all(make(**declared)).again == 0
        assert dict(rows("copies", "id, doc", warehouse)) == expected | {9: None, 40: '{"new":1e2}', 41: '{"x":{}}'}


def test_what_gives_objects_the_keys_of_others_is_said_once(
    kafka: Any, broker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lite = weft.SQLiteConnection(str(tmp_path / "copies.db"), name="lite")
    topic = kafka.create_topic()
    sql = "SELECT id, coalesce(doc, doc) AS doc FROM source"
    declared: dict[str, Any] = {"source": broker, "source_query": topic, "transform_sql": sql}
    pipeline = make(name="docs", target=lite, target_table=(None, "copies"), **declared)
    kafka.produce(topic, [b'{"id": 1, "doc": {"a": 1}}', b'{"id": 2, "doc": {"a": 2}}'])
    supervise(SparkEngine(pipeline), Running(once=True))
    assert not [each for each in caplog.messages if "keys of all" in each]
    kafka.produce(topic, [b'{"id": 3, "doc": {"b": 1}}', b'{"id": 4, "doc": {}}'])
    supervise(SparkEngine(pipeline), Running(once=True))
    found = {id: json.loads(doc) for doc, id in rows("copies", "doc, id", lite)}
    assert [found[3], found[4]] == [{"a": None, "b": 1}, {"a": None, "b": None}]
    (said,) = (each for each in caplog.messages if "keys of all" in each)
    assert 'columns={"doc": "json"}' in said


def test_bad_messages_alone_are_dead_letters(kafka: Any, broker: Any) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, [b"{", b'{"id": 1}', b"\xff", b'{"id": 2}', b"[1]"])
    pipeline: dict[str, Any] = {"source": broker, "source_query": topic}
    with pytest.raises(WeftError, match=r"3 messages or lines of .* cannot be parsed"):
        run_once(name="fail", target_table=(None, "failing"), **pipeline)
    run_once(name="letters", target_table=(None, "copies"), dead_letter_stream="failed", **pipeline)
    assert rows("copies", "id") == [(1,), (2,)]
    letters = weft.consume_sync(stream_of("failed", None), "me")
    assert sorted(each["payload"] for each in letters) == ["[1]", "\\xff", "{"]
    assert {(each["stage"], each["source"]) for each in letters} == {("read", topic)}


def test_the_group_is_told(kafka: Any, broker: Any) -> None:
    topic = kafka.create_topic()
    pipeline = make(name="told", source=broker, source_query=topic, target="default", target_table=(None, "copies"))
    query = Query(pipeline)
    query.start()
    try:
        kafka.produce(topic, [b'{"id": 1}', b'{"id": 2}'])
        wait_until(lambda: _committed(kafka, topic) == 2, "the group's offsets")
        assert rows("copies", "id") == [(1,), (2,)]
    finally:
        query.stop()
        query.wait(60)


def test_rows_become_messages(kafka: Any, broker: Any) -> None:
    topic = kafka.create_topic()
    events = declare(n="int64", body="bytes")
    weft.publish_sync(events, [{"n": n, "body": b"\xff" if n == 3 else b"x"} for n in range(4)])
    target = weft.Target(connection=broker, stream=topic, primary_key=["n"])
    sql = "SELECT n, CAST(body AS STRING) AS text FROM source"
    run_once(name="out", source=events, targets=[target], transform_sql=sql, dead_letter_table=(None, "failed"))
    run_once(name="back", source=broker, source_query=topic, target_table=(None, "copies"))
    assert rows("copies", "n, text") == [(n, "x") for n in range(3)]
    assert rows("failed", "payload") == [('{"n": 3, "text": "\\\\xff"}',)]


@pytest.mark.full
def test_rows_that_are_larger_than_a_message_may_be(kafka: Any, broker: Any, way: str) -> None:
    """They are dead letters with their offsets, and are replayed once the topic takes them."""
    topic = kafka.create_topic(max_message_bytes=1_500_000)
    events = declare(n="int64", text="string")
    lengths = [1, 1_499_000, 1_500_000, 5, 1_600_000]
    weft.publish_sync(events, [{"n": n, "text": "é" * (length // 2)} for n, length in enumerate(lengths)])
    declared: dict[str, Any] = {
        "name": "out",
        "source": events,
        "targets": [weft.Target(connection=broker, stream=topic, primary_key=["n"])],
        "transform_sql": "SELECT n, text FROM source",
    }
    with pytest.raises(WeftError, match=r"takes: up to 1,500,000 bytes, and one has 1,600,\d+\.\n.*bytes=1600\d+"):
        run_once(**declared)
    declared["dead_letter_stream"] = "failed"
    run_once(**declared)

    def sent() -> list[Any]:
        found = [json.loads(each.value()) for each in kafka.messages(topic)]
        return sorted((each["n"], len(each["text"].encode())) for each in found)

    assert sent() == [(0, 0), (1, 1_499_000), (3, 4)]
    letters = letters_of(make(**declared))
    assert {(each.offset, each.stage) for each in letters} == {("3", "store"), ("5", "store")}
    assert {each.error for each in letters} == {
        f"The message is larger than the topic {topic!r} takes (max.message.bytes=1500000)."
    }
    kafka.configure_topic(topic, max_message_bytes=4_000_000)
    replay_all(make(**declared))
    assert sent() == [(0, 0), (1, 1_499_000), (2, 1_500_000), (3, 4), (4, 1_600_000)]
    assert not letters_of(make(**declared))


def test_a_letter_that_is_larger_than_a_message_may_be(kafka: Any, broker: Any) -> None:
    """The batch fails, and says how large messages must be allowed to be: no part of a row is lost."""
    topic, failed = kafka.create_topic(), kafka.create_topic(max_message_bytes=5_000)
    kafka.produce(topic, [b'{"id": 1}', b"{" + b"x" * 5_000, b"{"])
    declared: dict[str, Any] = {
        "name": "letters",
        "source": broker,
        "source_query": topic,
        "target": "default",
        "target_table": (None, "copies"),
        "dead_letter_topic": failed,
        "dead_letter_connection": broker,
    }
    with pytest.raises(WeftError, match=r"up to 5,000 bytes, and one has 5,\d+") as caught:
        run_once(**declared)
    assert not kafka.messages(failed)
    enough = re.search(r"max\.message\.bytes=(\d+)", str(caught.value))
    assert enough
    kafka.configure_topic(failed, max_message_bytes=enough[1])
    run_once(**declared)
    assert rows("copies", "id") == [(1,)]
    assert [len(each.payload) for each in letters_of(make(**declared))] == [1, 5_001]


def _committed(kafka: Any, topic: str) -> int:
    """As any tool that watches lag sees it."""
    from confluent_kafka import ConsumerGroupTopicPartitions

    (found,) = kafka.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("shop")]).values()
    return sum(max(each.offset, 0) for each in found.result().topic_partitions if each.topic == topic)


@pytest.mark.full
def test_columns_that_a_batch_lacks(kafka: Any, broker: Any) -> None:
    topic = kafka.create_topic()
    pipeline: dict[str, Any] = {
        "name": "sparse",
        "source": broker,
        "source_query": topic,
        "target_table": (None, "copies"),
        "transform_sql": "SELECT id, upper(name) AS name, amount FROM source",
    }
    for message in (b'{"id": 1, "name": "a", "amount": 1.5}', b'{"id": 2}', b'{"id": 3, "name": null, "amount": null}'):
        kafka.produce(topic, [message])
        run_once(**pipeline)
    assert rows("copies") == [(1, "A", 1.5), (2, None, None), (3, None, None)]
    kafka.produce(topic, [b'{"id": 4, "other": null}'])
    run_once(name="all", source=broker, source_query=topic, target_table=(None, "everything"))
    assert rows("everything", "id, name") == [(1, "a"), (2, None), (3, None), (4, None)]
    # What `other` is nobody knows before it has a value.
    kafka.produce(topic, [b'{"id": 5, "other": 1.5}'])
    run_once(name="all", source=broker, source_query=topic, target_table=(None, "everything"))
    assert rows("everything", "id, other")[-1] == (5, 1.5)


def test_messages_that_brokers_removed_after_the_target_had_them(kafka: Any, broker: Any) -> None:
    """As after a crash between the target's commit and Spark's: the batch needs them no more."""
    from confluent_kafka import TopicPartition

    topic = kafka.create_topic()
    pipeline: dict[str, Any] = {
        "name": "copy",
        "source": broker,
        "source_query": topic,
        "target_table": (None, "copies"),
    }
    kafka.produce(topic, [b'{"id": %d}' % n for n in range(5)])
    run_once(**pipeline)
    forget_last_commit("copy")
    for future in kafka.admin.delete_records([TopicPartition(topic, 0, 3)]).values():
        future.result(30)
    kafka.produce(topic, [b'{"id": 5}'])
    run_once(**pipeline)
    assert rows("copies", "id") == [(n,) for n in range(6)]


@pytest.mark.brief("tasks")
def test_a_time_in_the_future_holds_up_no_window(kafka: Any, broker: Any, way: str) -> None:
    """A producer whose clock is ahead may send a message with every batch."""
    topic = kafka.create_topic(partitions=2, message_timestamp_after_max_ms=1 << 40)  # as brokers of before 4.0 do
    options: dict[str, Any] = {
        "name": "per_minute",
        "source": broker,
        "source_query": topic,
        "target_table": (None, "counts"),
        "dead_letter_table": "failed",
        "window": weft.Window(
            kind="tumbling", duration_ms=60_000, aggregations=[weft.Aggregation(agg="count", as_="n")]
        ),
    }
    now = int(time.time() * 1000) // 60_000 * 60_000
    for number, moment in enumerate((now - 300_000, now - 200_000, now - 100_000)):
        for partition in (0, 1):
            kafka.produce(topic, [b'{"id": 1}'], partition, timestamp=moment)
        kafka.produce(topic, [b'{"id": 2}'] * number, timestamp=now + 10 * 86_400_000)
        run_once(**options)
    assert rows("counts", "n") == [(2,), (2,)]
    assert len(rows("failed", "error")) == 3
