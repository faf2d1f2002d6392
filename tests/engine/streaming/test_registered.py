"""Pipelines over topics of Avro and Protobuf, whose schemas are in a registry."""

from __future__ import annotations

import base64
import contextlib
import json
import urllib.request
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, rows, run_once
from systems.codecs.avro_values import message
from weft.engine.streaming.dead_letters import stream_of
from weft.errors import WeftError
from weft.systems.kafka import options
from weft.systems.kafka.stream_source import KafkaSource
from weft.systems.schema_registry import client
from weft.systems.stream_source import SourceSettings

pytestmark = pytest.mark.usefixtures("plain_spark", "here")


def record(*fields: tuple[str, Any, *tuple[Any, ...]]) -> dict[str, Any]:
    made = [
        {"name": name, "type": kind, **({"default": default[0]} if default else {})} for name, kind, *default in fields
    ]
    return {"type": "record", "name": "Order", "fields": made}


OLD = record(("id", "long"), ("name", "string"))
NEW = record(("id", "long"), ("name", "string"), ("more", ["null", "double"], None))

EVERY = record(
    ("small", "int"),
    ("large", "long"),
    ("single", "float"),
    ("flag", "boolean"),
    ("data", "bytes"),
    ("text", "string"),
    ("choice", {"type": "enum", "name": "Choice", "symbols": ["RED", "GREEN"]}),
    ("price", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}),
    ("day", {"type": "int", "logicalType": "date"}),
    ("at", {"type": "long", "logicalType": "timestamp-micros"}),
    ("lists", {"type": "array", "items": {"type": "array", "items": "string"}}),
    ("by_name", {"type": "map", "values": "double"}),
    ("part", {**record(("x", "int"), ("y", ["null", "string"])), "name": "Part"}),
)
FULL: dict[str, Any] = {
    "small": 7,
    "large": 2**62,
    "single": 0.5,
    "flag": True,
    "data": b"\0\xff",
    "text": "é",
    "choice": "GREEN",
    "price": (-125).to_bytes(2, "big", signed=True),
    "day": (date(2026, 1, 31) - date(1970, 1, 1)).days,
    "at": 1,
    "lists": [["a"], []],
    "by_name": {"k": 1.5},
    "part": {"x": 1, "y": (1, "why")},
}


@pytest.fixture
def broker(kafka: Any, registry: Any) -> Any:
    return _broker(kafka, registry, "avro")


def _broker(kafka: Any, registry: Any, payload_format: str) -> Any:
    return weft.KafkaConnection(
        bootstrap_servers=kafka.bootstrap,
        payload_format=payload_format,
        schema_registry=weft.SchemaRegistryConnection(registry.api),
    )


def test_avro_messages_become_rows(kafka: Any, broker: Any) -> None:
    """Of two schemas, with bad ones among them; a new field is a new column."""
    topic = kafka.create_topic()
    registry = options.registry_of(broker)
    old = registry.register(f"{topic}-value", "AVRO", json.dumps(OLD))
    kafka.produce(topic, [message(old, {"id": 1, "name": "é"}, OLD)])
    pipeline: dict[str, Any] = {
        "name": "orders",
        "source": broker,
        "source_query": topic,
        "target_table": (None, "copies"),
        "dead_letter_stream": "failed",
    }
    run_once(**pipeline)
    assert rows("copies", "id, name") == [(1, "é")]
    new = registry.register(f"{topic}-value", "AVRO", json.dumps(NEW))
    whole = message(new, {"id": 2, "name": "b", "more": (1, 1.5)}, NEW)
    unknown = b"\0\x7f\xff\xff\xff" + whole[5:]
    kafka.produce(topic, [whole, whole[:-1], message(old, {"id": 3, "name": "c"}, OLD), unknown, b'{"id": 4}'])
    run_once(**pipeline)
    assert rows("copies", "id, name, more") == [(1, "é", None), (2, "b", 1.5), (3, "c", None)]
    letters = weft.consume_sync(stream_of("failed", None), "me")
    assert base64.b64decode(min(letters, key=lambda each: each["offset"])["payload"]) == whole[:-1]
    assert sorted((each["offset"], each["error"].split(":")[0]) for each in letters) == [
        ("0:2", "It is truncated"),
        ("0:4", "The schema registry has no schema of its id, 2147483647."),
        ("0:5", "It does not begin with a zero byte and the id of a schema"),
    ]
    source = KafkaSource(broker, SourceSettings(topic))
    assert source.validate() == f"1 partition, newest schema {new}"
    # Its bytes cannot be sent as a row.
    assert "rewind the pipeline to read 0:2" in str(source.why_not_replayed("0:2"))


@pytest.mark.brief("mysql")
@pytest.mark.parametrize("kind", ["default", "postgres", "mysql"])
def test_every_avro_type_in_tables(kafka: Any, broker: Any, kind: str, shared_server: Any) -> None:
    topic = kafka.create_topic()
    number = options.registry_of(broker).register(f"{topic}-value", "AVRO", json.dumps(EVERY))
    kafka.produce(topic, [message(number, FULL, EVERY)])
    pipeline: dict[str, Any] = {"name": "every", "source": broker, "source_query": topic}
    columns = ("small", "large", "single", "flag", "text", "choice", "price", "day", "lists", "by_name", "part")
    with contextlib.ExitStack() as stack:
        target: Any = "default"
        if kind != "default":
            target = weft.connect(url=stack.enter_context(shared_server(kind).database()))
        run_once(**pipeline, target=target, target_table=(None, "copies"))
        ((*plain, lists, by_name, part),) = rows("copies", ", ".join(columns), target)
        assert [str(each) for each in plain[4:8]] == ["é", "GREEN", "-1.25", "2026-01-31"]
        assert (plain[0], plain[1], plain[2], bool(plain[3])) == (7, 2**62, 0.5, True)
        assert [each if isinstance(each, list | dict) else json.loads(each) for each in (lists, by_name, part)] == [
            [["a"], []],
            {"k": 1.5},
            {"x": 1, "y": "why"},
        ]


@pytest.mark.brief("protobuf")
@pytest.mark.parametrize("payload_format", ["avro", "protobuf"])
def test_rows_become_messages_and_rows_again(kafka: Any, registry: Any, payload_format: str) -> None:
    broker = _broker(kafka, registry, payload_format)
    topic = kafka.create_topic()
    events = declare(n="int64", text="string", price="decimal(10,2)", at="timestamp")
    at = datetime(2026, 1, 31, 12, 0, 0, 123456, UTC)
    sent = [{"n": n, "text": None if n else "é", "price": Decimal("1.25"), "at": at} for n in range(3)]
    weft.publish_sync(events, sent)
    target = weft.Target(connection=broker, stream=topic, primary_key=["n"])
    out: dict[str, Any] = {"source": events, "targets": [target]}
    sql = "SELECT n, text, price, at, array('x') AS tags, named_struct('a', n) AS part FROM source"
    run_once(name="out", **out, transform_sql=sql)
    run_once(name="back", source=broker, source_query=topic, target_table=(None, "copies"))
    assert [(n, text, str(price)) for n, text, price in rows("copies", "n, text, price")] == [
        (0, "é", "1.25"),
        (1, None, "1.25"),
        (2, None, "1.25"),
    ]
    assert {(json.loads(tags)[0], json.loads(part)["a"]) for tags, part in rows("copies", "tags, part")} == {
        ("x", n) for n in range(3)
    }
    # What readers of the subject could not read is refused before a message is written.
    request = urllib.request.Request(
        f"{registry.api}/config/{topic}-value",
        b'{"compatibility": "BACKWARD"}',
        {"Content-Type": "application/json"},
        method="PUT",
    )
    urllib.request.urlopen(request, timeout=30).close()
    before = len(kafka.messages(topic))
    with pytest.raises(WeftError, match="refuses the schema: it is not compatible"):
        run_once(name="other", **out, transform_sql="SELECT n, cast(n AS double) AS text FROM source")
    assert len(kafka.messages(topic)) == before


def test_a_registry_that_is_away_loses_nothing(
    kafka: Any, broker: Any, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.create_topic()
    number = options.registry_of(broker).register(f"{topic}-value", "AVRO", json.dumps(OLD))
    kafka.produce(topic, [message(number, {"id": 1, "name": "a"}, OLD)])
    monkeypatch.setattr(client, "_PAUSES", ())
    monkeypatch.setenv("REGISTRY", "http://127.0.0.1:9")
    away = weft.KafkaConnection(
        bootstrap_servers=kafka.bootstrap, payload_format="avro", schema_registry_url="${REGISTRY}"
    )
    pipeline: dict[str, Any] = {"name": "p", "source": away, "source_query": topic, "target_table": (None, "copies")}
    with pytest.raises(WeftError, match=r"Cannot open a schema_registry connection \(http://127.0.0.1:9\)"):
        run_once(**pipeline)
    monkeypatch.setenv("REGISTRY", registry.api)
    run_once(**pipeline)
    assert rows("copies", "id, name") == [(1, "a")]
