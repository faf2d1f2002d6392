"""The registry's own clients and ours read each other's messages, by schemas under the same subjects."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from google_messages import message_class
from weft import KafkaConnection
from weft.systems.kafka import options
from weft.systems.kafka.target import KafkaTarget

confluent = pytest.importorskip("confluent_kafka.schema_registry")
from confluent_kafka.schema_registry import avro, protobuf  # noqa: E402
from confluent_kafka.serialization import SerializationContext  # noqa: E402

ROWS = [
    {"id": 2**62, "text": "é", "amount": 0.5, "data": b"\0\xff"},
    {"id": -1, "text": None, "amount": -1.0, "data": None},
]
SUBJECTS = {
    "topic_name": confluent.topic_subject_name_strategy,
    "record_name": confluent.record_subject_name_strategy,
    "topic_record_name": confluent.topic_record_subject_name_strategy,
}


@pytest.mark.brief("record_name-avro", "topic_record_name-protobuf")
@pytest.mark.parametrize("payload_format", ["avro", "protobuf"])
@pytest.mark.parametrize("strategy", SUBJECTS)
def test_messages_both_ways(plain_spark: Any, registry: Any, payload_format: str, strategy: str) -> None:
    topic = f"clients_{payload_format}_{strategy}"
    broker = KafkaConnection(
        "nobody:1", payload_format=payload_format, schema_registry_url=registry.api, subject_name_strategy=strategy
    )
    frame = plain_spark.createDataFrame([], "id long, text string, amount double, data binary")
    columns = [("id", pa.int64()), ("text", pa.string()), ("amount", pa.float64()), ("data", pa.binary())]
    codec: Any = KafkaTarget(broker)._codec(frame, topic)
    ours = codec.encode(pa.array(ROWS, pa.struct(columns))).to_pylist()

    where, (text, number) = SerializationContext(topic, "value"), codec._written
    with confluent.SchemaRegistryClient({"url": registry.api}) as client:
        assert client.get_latest_version(SUBJECTS[strategy](where, topic)).schema_id == number
        if payload_format == "protobuf":
            message = message_class(topic, id="int64", text="string", amount="double", data="bytes")
            read = protobuf.ProtobufDeserializer(message, {"use.deprecated.format": False})
            found = [{field.name: value for field, value in read(each, where).ListFields()} for each in ours]
            assert found == [{name: value for name, value in row.items() if value is not None} for row in ROWS]
            return
        read = avro.AvroDeserializer(client)
        assert [read(each, where) for each in ours] == ROWS
        # They write by our schema, too.
        settings = {
            "auto.register.schemas": False,
            "use.latest.version": True,
            "subject.name.strategy": SUBJECTS[strategy],
        }
        write = avro.AvroSerializer(client, text, conf=settings)
        theirs = pa.array([write(each, where) for each in ROWS], pa.binary())
    parsed = options.codec(broker, topic).decoder({}).parse(theirs)
    assert (pa.table(dict(parsed.columns)).to_pylist(), parsed.bad) == (ROWS, {})


@pytest.mark.parametrize("payload_format", ["avro", "protobuf"])
def test_schemas_that_they_register(registry: Any, payload_format: str) -> None:
    """Of Protobuf they are compiled, and this registry keeps them so."""
    topic, row = f"theirs_{payload_format}", {"id": 5, "text": "é"}
    broker = KafkaConnection("nobody:1", payload_format=payload_format, schema_registry_url=registry.api)
    where = SerializationContext(topic, "value")
    with confluent.SchemaRegistryClient({"url": registry.api}) as client:
        if payload_format == "avro":
            fields = [{"name": "id", "type": "long"}, {"name": "text", "type": "string"}]
            write = avro.AvroSerializer(client, json.dumps({"type": "record", "name": "Order", "fields": fields}))
            sent = write(row, where)
        else:
            message = message_class("Order", id="int64", text="string")
            sent = protobuf.ProtobufSerializer(message, client)(message(**row), where)
    parsed = options.codec(broker, topic).decoder({}).parse(pa.array([sent], pa.binary()))
    assert (pa.table(dict(parsed.columns)).to_pylist(), parsed.bad) == ([row], {})
