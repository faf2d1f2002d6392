"""Change data capture through Spark: messages of Kafka and events of streams into tables, streams and topics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from engine.streaming.letters import letters_of, replay_all
from weft.columns import hint_of
from weft.engine.load import open_tables
from weft.engine.streaming import transform
from weft.engine.streaming.query import Query
from weft.engine.streaming.spark_engine import SparkEngine
from weft.engine.streaming.validate import validate
from weft.errors import DeclarationError, WeftError
from weft.operate.listener import RunListener
from weft.operate.run_options import Running
from weft.operate.streaming_metrics import StreamingMetrics
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.toml import parse
from weft.systems.sql.tables import Slice

pytestmark = pytest.mark.usefixtures("plain_spark", "here")
BEGAN = 1_770_000_000_000
CDC: dict[str, Any] = {"envelope": "debezium", "key_field": "after.id"}


def change(op: str, before: Any, after: Any, lsn: int, **more: Any) -> dict[str, Any]:
    source = {"version": "3.0", "table": "customers", "lsn": lsn, "ts_ms": BEGAN + lsn}
    return {"before": before, "after": after, "source": source, "op": op, "ts_ms": BEGAN + lsn + 7, **more}


def customer(id_: int, name: str | None, **more: Any) -> dict[str, Any]:
    return {"id": id_, "name": name, **more}


def encoded(*changes: dict[str, Any] | None, wrapped: bool = False) -> list[bytes | None]:
    whole = [{"schema": {"type": "struct"}, "payload": each} if wrapped else each for each in changes]
    return [None if each is None else json.dumps(each).encode() for each in whole]


class Reports(RunListener):
    def __init__(self) -> None:
        self.all: list[Any] = []

    def batch(self, report: Any) -> None:
        self.all.append(report)


def reported(**declared: Any) -> Any:
    """Run a pipeline over what is there now; what its last batch did."""
    reports = Reports()
    supervise(SparkEngine(make(**declared)), Running(once=True), [reports])
    return reports.all[-1].cdc if reports.all else None


@pytest.fixture
def broker(kafka: Any) -> Any:
    return weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap, group_id="cdc")


@pytest.fixture
def warehouse(shared_server: Any) -> Iterator[Any]:
    with shared_server("postgres").database() as url:
        yield weft.connect(name="warehouse", url=url)


def test_the_guide(kafka: Any, warehouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TOML file and the decorator as the guide has them: the same mirror."""
    topic = kafka.create_topic()
    kafka.produce(
        topic,
        encoded(
            change("r", None, customer(1, "Ann"), 1),
            change("c", None, customer(2, "Bob"), 2),
            change("u", customer(1, "Ann"), customer(1, "Anna"), 3),
            change("d", customer(2, "Bob"), None, 4),
            None,
        ),
    )
    file = parse(
        f"""
        pipeline_name = "cdc-mirror-customers"
        source_query = "{topic}"
        [source]
        kind = "kafka"
        bootstrap_servers = "{kafka.bootstrap}"
        group_id = "weft-cdc"
        [target]
        kind = "postgres"
        url = "{warehouse.url}"
        [target.table]
        schema = "public"
        name = "customers"
        [transform.cdc]
        envelope = "debezium"
        key_field = "after.id"
        """
    )
    reports, engine = Reports(), SparkEngine(file)
    metrics = StreamingMetrics(engine)
    supervise(engine, Running(once=True), [reports, metrics])
    assert rows("customers", "id, name", warehouse) == [(1, "Anna")]
    counted = {"creates": 2, "updates": 1, "deletes": 1, "skipped": 1, "idempotent_skipped": 0}
    for name, number in counted.items():
        labels = {"pipeline": "cdc-mirror-customers"}
        assert metrics.registry.get_sample_value(f"weft_streaming_cdc_{name}_total", labels) == number
    # Messages that tasks have, as of large batches.
    monkeypatch.setattr(transform, "SMALL", 0)
    report = reports.all[-1].cdc
    assert (report.creates, report.updates, report.deletes, report.skipped) == (2, 1, 1, 1)
    assert report.lag_seconds > 0

    @weft.table(connection=warehouse)
    class copies:
        schema = "public"
        name = "copies"
        primary_key = ["id"]  # noqa: RUF012

    declared: dict[str, Any] = {
        "name": "cdc-mirror-copies",
        "source_kind": "kafka",
        "source_query": topic,
        "bootstrap_servers": kafka.bootstrap,
        "group_id": "weft-cdc",
        "target": copies,
        "cdc": weft.CDC(**CDC),
    }
    run_once(**declared)
    assert rows("copies", "id, name", warehouse) == [(1, "Anna")]
    # Redelivered, in one batch with what is new; with the schema in each message.
    again = [change("u", customer(1, "Ann"), customer(1, "Anna"), 3), change("d", customer(2, "Bob"), None, 4)]
    kafka.produce(topic, encoded(*again, change("c", None, customer(3, "Cid", age=5), 5)))
    report = reported(**declared)
    assert (report.creates, report.updates, report.deletes, report.idempotent_skipped) == (1, 0, 0, 2)
    assert rows("copies", "id, name", warehouse) == [(1, "Anna"), (3, "Cid")]


def test_malformed_messages_alone_are_dead_letters(kafka: Any, broker: Any) -> None:
    topic = kafka.create_topic()
    kafka.produce(
        topic,
        encoded(
            change("c", None, customer(1, "Ann"), 1),
            change("x", None, customer(2, "Bob"), 2),
            change("u", None, None, 3),
            change("c", None, customer(4, "Dan"), 4),
            wrapped=True,
        ),
    )
    declared: dict[str, Any] = {"source": broker, "source_query": topic, "cdc": weft.CDC(**CDC)}
    with pytest.raises(
        WeftError, match=r"2 messages of .* are no changes in the form of debezium, the first at 0:1: 'x'"
    ):
        run_once(name="fails", target_table=(None, "failing"), **declared)
    letters: dict[str, Any] = {"name": "letters", "target_table": (None, "copies"), "dead_letter_stream": "failed"}
    run_once(**letters, **declared)
    assert rows("copies", "id, name") == [(1, "Ann"), (4, "Dan")]
    found = letters_of(make(**letters, target="default", **declared))
    assert sorted((each.offset, each.error) for each in found) == [
        ("0:1", "'x' is no operation."),
        ("0:2", "It has no row at 'after'."),
    ]
    report = reported(
        name="drops", target="default", target_table=(None, "dropping"), transform_on_error="drop", **declared
    )
    assert (report.creates, report.skipped) == (2, 2)


def test_events_of_a_stream_into_a_stream_and_a_topic(kafka: Any, broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform, "SMALL", 0)
    topic = kafka.create_topic()
    events = declare(op="string", before="json", after="json", source="json")
    weft.publish_sync(
        events,
        [
            {"op": "c", "after": customer(1, "Ann"), "source": {"lsn": 1, "ts_ms": BEGAN}},
            {"op": "d", "before": customer(1, "Ann"), "source": {"lsn": 2, "ts_ms": BEGAN + 1}},
        ],
    )
    clean = weft.stream(name="clean", fields={})(lambda: None)
    run_once(
        name="clean",
        source=events,
        cdc=weft.CDC(**CDC),
        targets=[
            weft.Target(connection="default", table=(None, "copies")),
            weft.Target(stream=clean),
            weft.Target(connection=broker, stream=topic),
        ],
    )
    assert rows("copies", "id") == []
    wanted = [
        ("create", '{"id":1}', None, customer(1, "Ann"), BEGAN),
        ("delete", '{"id":1}', customer(1, "Ann"), None, BEGAN + 1),
    ]
    sent = [json.loads(each.value()) for each in kafka.messages(topic)]
    assert [tuple(each[name] for name in ("op", "key", "before", "after", "ts_ms")) for each in sent] == wanted
    assert {each.key() for each in kafka.messages(topic)} == {b'{"id":1}'}
    got = weft.consume_sync(clean, "me")
    assert [(each["op"], each.get("before"), each.get("after")) for each in got] == [
        (op, before, after) for op, _, before, after, _ in wanted
    ]


def test_columns_that_the_table_does_not_have(kafka: Any, broker: Any, caplog: pytest.LogCaptureFixture) -> None:
    topic = kafka.create_topic()
    kafka.produce(topic, encoded(change("c", None, customer(1, "Ann"), 1)))
    declared: dict[str, Any] = {"source": broker, "source_query": topic}
    run_once(name="skips", target_table=(None, "skipped"), cdc=weft.CDC(**CDC), **declared)
    kafka.produce(topic, encoded(change("u", None, customer(1, "Anna", age=5), 2)))
    run_once(name="skips", target_table=(None, "skipped"), cdc=weft.CDC(**CDC), **declared)
    assert rows("skipped") == [(1, "Anna")]
    assert "The table skipped has no column 'age'" in caplog.text
    failing = weft.CDC(**CDC, schema_evolution="fail")
    with pytest.raises(WeftError, match="a column 'age' that the table does not have"):
        run_once(name="fails", target_table=(None, "skipped"), cdc=failing, **declared)
    assert rows("skipped") == [(1, "Anna")]
    run_once(name="grows", target_table=(None, "skipped"), cdc=weft.CDC(**CDC, schema_evolution="evolve"), **declared)
    assert rows("skipped", "id, name, age") == [(1, "Anna", 5)]


@pytest.mark.parametrize("database", ["postgres", "sqlite"])
@pytest.mark.parametrize("has_table", [False, True])
def test_objects_keep_their_keys_in_a_new_column(
    kafka: Any, broker: Any, warehouse: Any, database: str, has_table: bool, tmp_path: Path
) -> None:
    """Objects of one type would have the keys of all, and null for those that they lack."""
    connection = weft.SQLiteConnection(str(tmp_path / "copies.db"), name="lite") if database == "sqlite" else warehouse
    if has_table:
        weft.load([{"id": 0}], target="copies", connection=connection, keys="id", mode="merge")
    topic = kafka.create_topic()
    docs = [{"a": 1}, {"b": [{"c": 2.0}, {"d": None}]}, None, {}]
    sent = [{"id": number, "doc": doc} for number, doc in enumerate(docs, 1)]
    kafka.produce(topic, encoded(*(change("c", None, row, at) for at, row in enumerate(sent, 1))))
    cdc = weft.CDC(**CDC, schema_evolution="evolve")
    run_once(name="grows", source=broker, source_query=topic, target=connection, target_table=(None, "copies"), cdc=cdc)
    tables = open_tables(connection)
    with closing(tables):
        sql = "SELECT doc FROM copies WHERE id > 0 ORDER BY id"
        schema = tables.describe(sql)
        found = [each for batch in tables.read(Slice(sql), schema) for each in batch["doc"].to_pylist()]
    assert hint_of(schema.field("doc")) == "json"
    assert [None if each is None else json.loads(each) for each in found] == docs


@pytest.mark.parametrize("others", ["duckdb", "row_sql"])
def test_objects_in_json_of_one_table_beside_what_needs_their_type(
    kafka: Any, broker: Any, others: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They keep their keys where tables have a type for them, and a warning says where they cannot."""
    lite = weft.SQLiteConnection(str(tmp_path / "copies.db"), name="lite")
    duck = weft.DuckDBConnection(str(tmp_path / "duck.db"), name="duck")
    topic = kafka.create_topic()
    docs: list[Any] = [{"a": 1}, {"b": 2}, {}]
    cdc = weft.CDC(
        **CDC, **({} if others == "duckdb" else {"row_sql": "SELECT id, coalesce(doc, doc) AS doc FROM source"})
    )
    used = [lite, duck] if others == "duckdb" else [lite]
    targets = [weft.Target(connection=each, table="copies") for each in used]
    pipeline = make(name="grows", source=broker, source_query=topic, targets=targets, cdc=cdc)
    for at, doc in enumerate(docs, 1):
        sent = [{"id": at, "doc": doc}, {"id": at + 10, "doc": {"c": at}}]
        kafka.produce(topic, encoded(*(change("c", None, row, at) for row in sent)))
        supervise(SparkEngine(pipeline), Running(once=True))
    for each in used:
        found = {id: json.loads(doc) for id, doc in rows("copies", "id, doc", each)}
        if others == "duckdb":
            assert [found[at] for at in (1, 2, 3)] == docs
        else:
            assert found[2] == {"a": None, "b": 2, "c": None}
    said = [each for each in caplog.messages if "keys of all" in each]
    assert ["row_sql" in each for each in said] == ([] if others == "duckdb" else [True] * 3)  # one a run


def test_the_table_decides_about_values(kafka: Any, broker: Any, warehouse: Any) -> None:
    """Not what most messages of a batch have; a value that it cannot have makes its message a letter alone."""
    tables = open_tables(warehouse)
    with closing(tables), tables.driver.session("publish") as session:
        session.run("CREATE TABLE copies (id int PRIMARY KEY, name text, n int, day date, doc jsonb, one bit(1))")
    topic = kafka.create_topic()
    rows_sent = (
        {"id": 1, "name": 5, "n": "7", "day": 19782, "doc": {"a": 1}, "one": True},
        {"id": 2, "name": 6, "n": 8, "day": "2024-02-29", "doc": [1], "one": False},
        {"id": 3, "name": "c", "n": 9, "day": None, "doc": {"b": 2.5}},
        {"id": 3, "name": "d", "n": "a lot", "day": None, "doc": None},
    )
    kafka.produce(topic, encoded(*(change("c", None, row, at) for at, row in enumerate(rows_sent, 1))))
    declared: dict[str, Any] = {
        "name": "decides",
        "source": broker,
        "source_query": topic,
        "target": warehouse,
        "target_table": ("public", "copies"),
        "dead_letter_stream": "failed",
        "cdc": weft.CDC(**CDC),
    }
    run_once(**declared)
    assert rows("copies", "id, name, n, day::text, doc::text, one::text", warehouse) == [
        (1, "5", 7, "2024-02-29", '{"a": 1}', "1"),
        (2, "6", 8, "2024-02-29", "[1]", "0"),
        (3, "c", 9, None, '{"b": 2.5}', None),
    ]
    (letter,) = letters_of(make(**declared))
    assert (letter.offset, letter.stage) == ("0:3", "transform")
    assert "Its 'n' is a lot, which the table cannot have as int32" in letter.error
    # It fails again, and is not lost by that.
    assert replay_all(make(**declared)).again == 1
    # A batch of other types is read as the first one was.
    kafka.produce(topic, encoded(change("u", None, {"id": 2, "name": "b", "n": 1.0, "day": 19783, "doc": "x"}, 9)))
    run_once(**declared)
    assert rows("copies", "name, n, day::text, doc::text", warehouse)[1] == ("b", 1, "2024-03-01", '"x"')


def test_what_is_wrong_at_the_start(kafka: Any, broker: Any) -> None:
    weft.load([{"no": 1, "name": "Ann"}], target="mirror", connection="default", mode="merge", keys=["no"])
    declared: dict[str, Any] = {
        "name": "starts",
        "source": broker,
        "source_query": kafka.create_topic(),
        "target": "default",
        "target_table": "mirror",
    }
    for key, options, said in (
        ("after.noo", {}, "The key 'noo' is not a column of the table mirror"),
        ("after.name", {}, "The primary key of the table mirror is no, and key_field names name"),
        ("after.no", {"delete_mode": "soft", "soft_delete_column": "gone"}, "The soft_delete_column 'gone' is not"),
    ):
        cdc = weft.CDC(envelope="debezium", key_field=key, **options)
        with pytest.raises(DeclarationError, match=said):
            Query(make(**declared, cdc=cdc)).start()
        problems = [each.problem for each in validate(make(**declared, cdc=cdc)) if each.problem is not None]
        assert len(problems) == 1 and said in str(problems[0])
    found = list(validate(make(**declared, cdc=weft.CDC(envelope="debezium", key_field="after.no"))))
    assert "where messages have neither" in " ".join(str(each.detail) for each in found)


def test_letters_are_replayed(kafka: Any, broker: Any) -> None:
    """A message of an operation that was not known is applied in its place, when it is."""
    topic = kafka.create_topic()
    kafka.produce(
        topic,
        encoded(
            change("upsert", None, customer(1, "old"), 1),
            change("c", None, customer(1, "new"), 2),
            change("upsert", None, customer(2, "Bob"), 3),
        ),
    )
    declared: dict[str, Any] = {
        "name": "letters",
        "source": broker,
        "source_query": topic,
        "target": "default",
        "target_table": (None, "copies"),
        "dead_letter_stream": "failed",
    }
    run_once(**declared, cdc=weft.CDC(**CDC))
    assert rows("copies") == [(1, "new")]
    assert replay_all(make(**declared, cdc=weft.CDC(**CDC))).again == 2
    known = weft.CDC(**CDC, op_map={"c": "create", "upsert": "update"})
    assert replay_all(make(**declared, cdc=known)).again == 0
    assert rows("copies") == [(1, "new"), (2, "Bob")]


def test_sql_over_the_rows(kafka: Any, broker: Any) -> None:
    """A row that the SQL leaves out is not in the mirror, also if it was there."""
    topic = kafka.create_topic()
    kafka.produce(
        topic,
        encoded(
            change("c", None, customer(1, "ann", country="DE"), 1),
            change("c", None, customer(2, "bob", country="FR"), 2),
            change("c", None, customer(3, "cid", country="DE"), 3),
        ),
    )
    sql = "SELECT upper(name) AS name, length(country) AS letters FROM source WHERE country = 'DE'"
    declared: dict[str, Any] = {
        "name": "chosen",
        "source": broker,
        "source_query": topic,
        "target": "default",
        "target_table": (None, "copies"),
        "cdc": weft.CDC(**CDC, row_sql=sql),
    }
    run_once(**declared)
    assert rows("copies", "id, name, letters") == [(1, "ANN", 2), (3, "CID", 2)]
    moved = change("u", None, customer(1, "ann", country="FR"), 4)
    kafka.produce(topic, encoded(moved, change("d", customer(3, None), None, 5)))
    report = reported(**declared)
    assert (rows("copies", "id"), report.updates, report.deletes) == ([], 1, 1)
