"""The guide's chapter "Schema Registry", its examples as written there with our name in place of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weft
from seeds.test_guide_streaming import here, postgres, query, run_streaming_pipeline  # noqa: F401 - fixtures
from systems.codecs.avro_values import message
from weft import KafkaConnection, PostgresConnection, SchemaRegistryConnection, run_pipeline
from weft.systems.schema_registry.client import SchemaRegistry

pytestmark = pytest.mark.usefixtures("spark", "here")


@pytest.mark.brief("toml", "classes")
@pytest.mark.parametrize("form", ["toml", "typed", "named", "classes"])
def test_schema_registry(
    kafka: Any,
    registry: Any,
    postgres: str,  # noqa: F811
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    """The chapter of that name, and "connection registration"."""
    topic = kafka.create_topic()
    monkeypatch.setenv("SR_URL", registry.api)
    monkeypatch.setenv("KAFKA_BOOTSTRAP", kafka.bootstrap)
    schema = {"type": "record", "name": "Event", "fields": [{"name": "id", "type": "long"}]}
    number = SchemaRegistry(SchemaRegistryConnection(registry.api)).register(
        f"{topic}-value", "AVRO", json.dumps(schema)
    )
    kafka.produce(topic, [message(number, {"id": 1}, schema)])
    if form == "toml":
        (project / "pipeline.toml").write_text(
            f"""
pipeline_name = "events-to-pg"
source_query = "{topic}"

[source]
kind = "kafka"
bootstrap_servers = "{kafka.bootstrap}"
group_id = "weft"
payload_format = "avro"
schema_registry_url = "{registry.api}"

[target]
kind = "postgres"
url = "{postgres}"

[target.table]
schema = "public"
name = "events"
"""
        )
        run_pipeline(config="pipeline.toml", once=True)
    else:
        source: Any
        if form == "classes":

            @weft.connection
            class sr_prod:
                kind = "schema_registry"
                url = "${SR_URL}"

            @weft.connection
            class kafka_avro:
                kind = "kafka"
                bootstrap_servers = "${KAFKA_BOOTSTRAP}"
                group_id = "weft"
                payload_format = "avro"
                schema_registry = "sr_prod"

            source = kafka_avro
        else:
            made = SchemaRegistryConnection(name="sr_prod", url="${SR_URL}")
            weft.register_connection(made)
            source = KafkaConnection(
                name="kafka_prod",
                bootstrap_servers="${KAFKA_BOOTSTRAP}",
                group_id="weft",
                payload_format="avro",
                schema_registry=made if form == "typed" else "sr_prod",
            )
        run_streaming_pipeline(
            name="events-to-pg",
            source=source,
            source_query=topic,
            target=PostgresConnection(name="warehouse", url=postgres),
            target_table=("public", "events"),
        )
    assert query(postgres, "SELECT id FROM public.events") == [(1,)]
