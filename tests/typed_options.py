"""Public functions with the options that they take. tests/test_types.py has mypy read this file: lines that end in
`# refused` must be errors, all others must be none."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import weft
from weft.transforms import limit
from weft.types import BigInt, Text


@weft.connection
class warehouse:
    kind = "postgres"
    url = "${WAREHOUSE}"


@weft.stream(fields={"id": "int64"})
def clicks() -> None: ...


@weft.table(schema="public", load_columns=True)
class Events:
    id: Annotated[BigInt, weft.pk()]
    name: Text | None


lake = weft.ObjectStoreLocalConnection("/data/lake", format="csv")
kafka = weft.KafkaConnection("localhost:9092")


@weft.streaming_pipeline(
    source=clicks,
    target=warehouse,
    target_table=("public", "clicks"),
    mode="merge",
    keys=["id"],
    every=timedelta(seconds=10),
    transform_sql="SELECT * FROM source JOIN users USING (id)",
    transform_on_error="dlq",
    lookups={"users": weft.Lookup(connection=warehouse, table="users", refresh_interval_ms=5)},
    dead_letter_path=Path("failed"),
    checkpoint=None,
)
def clicks_to_warehouse() -> None: ...


name: str = clicks_to_warehouse.name
fields_of_a_connection = weft.streaming_pipeline(
    source_kind="kafka", bootstrap_servers="h:1", source_query="a", target=Events
)
weft.streaming_pipeline(source=clicks, target=Events, evry="10s")  # refused
weft.streaming_pipeline(source=clicks, target=Events, mode="truncate")  # refused
weft.streaming_pipeline(source=clicks, target=Events, idle_pause_ms="5")  # refused
weft.streaming_pipeline(source=clicks, target=Events, lookups=[weft.Lookup(table="a")])  # refused
weft.run_streaming_pipeline(name="p", source=clicks, target=Events, once=True, metrics_port=9000)
weft.run_streaming_pipeline(name="p", source=clicks, target=Events, onec=True)  # refused
weft.run_pipeline("pipeline.toml", restart_on_error=True, max_restarts=None)
weft.run_pipeline("pipeline.toml", max_restarts="5")  # refused

weft.Source(connection=kafka, query="orders", start="0:120", max_rows=5)
weft.Source(connection=lake, query="raw/", csv_read_options={"delimiter": ";"})
weft.Source(connection=kafka, query="orders", max_row=5)  # refused
weft.Source(connection=kafka, query=5)  # refused
weft.Target(connection=lake, prefix="raw", format="csv", csv_delimiter=";")
weft.Target(connection=warehouse, table=Events, mode="merge", primary_key="id", update_columns=["name"])
weft.Target(connection=lake, prefix="raw", format="xml")  # refused
weft.Target(connection=lake, perfix="raw")  # refused
weft.Lookup(connection="refdata", query="SELECT 1")
weft.Lookup(tabel="users")  # refused


@weft.pipeline(
    target=Events,
    schedule="*/5 * * * *",
    mode="scd2",
    keys="id",
    ttl=timedelta(days=1),
    transforms_pre=[limit(5)],
    depends_on=["other"],
    retry={"max_attempts": 5},
)
def daily() -> str:
    return "SELECT 1 AS id"


weft.pipeline(targets=[weft.target(Events, mode="append"), weft.target("public.archive", column_map={"a": "b"})])
weft.pipeline(target=Events, shedule="* * * * *")  # refused
weft.pipeline(target=Events, continue_on_failure="yes")  # refused
weft.target(Events, mode="upsert")  # refused
weft.table(shcema="public")  # refused

result: weft.LoadResult = weft.load([{"id": 1}], target="events", mode="merge", keys=["id"], deduplicate_by="id")
weft.load([{"id": 1}], target="events", handle_deletes="hard", allow_empty=True)
weft.load([{"id": 1}], target="events", mode="upsert")  # refused
weft.load([{"id": 1}], target="events", alow_empty=True)  # refused


async def later() -> int:
    loaded = await weft.load_async([{"id": 1}], target="events", commit_key="a")
    await weft.load_async([{"id": 1}], target="events", comit_key="a")  # refused
    return loaded.inserted
