"""Change data capture of several tables in one pipeline, through Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import weft
from engine.streaming.conftest import declare, forget_last_commit, rows, run_once
from engine.streaming.letters import letters_of, replay_all
from weft.engine.load import open_tables
from weft.engine.streaming.query import Query
from weft.engine.streaming.spark_engine import SparkEngine
from weft.engine.streaming.validate import validate
from weft.errors import DeclarationError, WeftError
from weft.operate.listener import RunListener
from weft.operate.run_options import Running
from weft.operate.streaming_metrics import StreamingMetrics
from weft.operate.supervisor import supervise
from weft.pipelines.streaming.declare import make

pytestmark = pytest.mark.usefixtures("plain_spark", "here")
BEGAN = 1_770_000_000_000
ROUTE = {"public.orders": "orders", "public.items": "items"}
KEYS: dict[str, Any] = {"public.orders": "id", "public.items": ["order_id", "line"]}


def change(table: str | None, op: str, after: Any, lsn: int, before: Any = None) -> dict[str, Any]:
    source = {"schema": "public", "table": table, "lsn": lsn, "ts_ms": BEGAN + lsn}
    return {"op": op, "before": before, "after": after, "source": source}


def item(order_id: int, line: str, **more: Any) -> dict[str, Any]:
    return {"order_id": order_id, "line": line, **more}


def encoded(*changes: dict[str, Any]) -> list[bytes | None]:
    return [json.dumps(each).encode() for each in changes]


@pytest.fixture
def broker(kafka: Any) -> Any:
    return weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap, group_id="cdc")


@pytest.fixture
def warehouse(shared_server: Any) -> Iterator[Any]:
    with shared_server("postgres").database() as url:
        yield weft.connect(name="warehouse", url=url)


class Reports(RunListener):
    def __init__(self) -> None:
        self.all: list[Any] = []

    def batch(self, report: Any) -> None:
        self.all.append(report)


def run_sql(connection: Any, *statements: str) -> None:
    tables = open_tables(connection)
    try:
        with tables.driver.session("publish") as session:
            for each in statements:
                session.run(each)
    finally:
        tables.close()


def test_two_tables_of_one_topic(kafka: Any, broker: Any, warehouse: Any) -> None:
    """Each has its own columns and key, and both change together or not at all; again after a crash each once."""
    topic = kafka.create_topic()
    kafka.produce(
        topic,
        encoded(
            change("orders", "c", {"id": 1, "state": "new"}, 1),
            change("items", "c", item(1, "a", state=7), 2),
            change("items", "c", item(1, "b", state=8), 3),
            change("users", "c", {"id": 9}, 4),
            change("orders", "u", {"id": 1, "state": "paid"}, 5),
            change("items", "d", None, 6, before=item(1, "b")),
        ),
    )
    cdc = weft.CDC(envelope="debezium", route=ROUTE, key_field=KEYS, schema_evolution="evolve")
    declared: dict[str, Any] = {"name": "shop", "source": broker, "source_query": topic, "target": warehouse}
    reports, engine = Reports(), SparkEngine(make(**declared, cdc=cdc))
    metrics = StreamingMetrics(engine)
    supervise(engine, Running(once=True), [reports, metrics])
    assert rows("orders", "id, state", warehouse) == [(1, "paid")]
    assert rows("items", "order_id, line, state", warehouse) == [(1, "a", 7)]
    report = reports.all[-1]
    assert (report.written, report.consumed) == ({"orders": 1, "items": 2}, 6)
    told = report.cdc
    assert (told.creates, told.updates, told.deletes, told.skipped) == (3, 1, 1, 1)
    assert (told.tables["items"].creates, told.tables["items"].deletes) == (2, 1)
    for table, number in (("orders", 1), ("items", 2)):
        labels = {"pipeline": "shop", "table": table}
        assert metrics.registry.get_sample_value("weft_streaming_cdc_table_creates_total", labels) == number
    # Each table evolves by itself; what comes late does nothing.
    run_sql(warehouse, "ALTER TABLE orders ADD CONSTRAINT never CHECK (id <> 2)")
    kafka.produce(
        topic,
        encoded(
            change("items", "u", item(1, "a", state=7, price=2.5), 7),
            change("orders", "c", {"id": 1, "state": "late"}, 1),
            change("orders", "c", {"id": 2, "state": "new"}, 8),
        ),
    )
    with pytest.raises(WeftError, match="never"):
        run_once(**declared, cdc=cdc)
    assert (rows("orders", "id", warehouse), rows("items", "price", warehouse)) == ([(1,)], [(None,)])
    run_sql(warehouse, "ALTER TABLE orders DROP CONSTRAINT never")
    for _ in range(2):
        run_once(**declared, cdc=cdc)
        assert rows("orders", "*", warehouse) == [(1, "paid"), (2, "new")]
        assert rows("items", "order_id, line, state, price", warehouse) == [(1, "a", 7, 2.5)]
        forget_last_commit("shop")


def test_a_topic_for_each_table(kafka: Any, broker: Any, warehouse: Any) -> None:
    """Keys are those of the tables that are there; a malformed message is a letter alone, and is replayed."""
    run_sql(
        warehouse,
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text)",
        "CREATE TABLE items (order_id bigint, line text, state int, PRIMARY KEY (order_id, line))",
    )
    orders, items = kafka.create_topic(), kafka.create_topic()
    kafka.produce(orders, encoded(change("orders", "c", {"id": 1, "state": "new"}, 1), change(None, "c", {"id": 2}, 2)))
    kafka.produce(
        items,
        encoded(
            change("items", "c", item(1, "a", state=7), 3),
            change("items", "upsert", item(1, "b", state=8), 4),
            change("items", "c", item(1, "c", state=1 << 40), 5),
        ),
    )
    declared: dict[str, Any] = {
        "name": "shop",
        "sources": [weft.Source(connection=broker, query=each) for each in (orders, items)],
        "target": warehouse,
        "dead_letter_stream": "failed",
    }
    cdc = weft.CDC(envelope="debezium", route=ROUTE)
    run_once(**declared, cdc=cdc)
    assert rows("orders", "*", warehouse) == [(1, "new")]
    assert rows("items", "*", warehouse) == [(1, "a", 7)]
    found = letters_of(make(**declared, cdc=cdc))
    assert sorted((each.source, each.offset) for each in found if each.stage == "transform") == sorted(
        [(orders, "0:1"), (items, "0:1")]
    )
    assert [each.target for each in found if each.stage == "store"] == ["items"]
    known = weft.CDC(envelope="debezium", route=ROUTE, op_map={"c": "create", "upsert": "update"})
    replay_all(make(**declared, cdc=known))
    assert rows("items", "*", warehouse) == [(1, "a", 7), (1, "b", 8)]


def test_events_of_a_stream() -> None:
    """A table without a key is refused at the start, with the way to name it."""
    events = declare(op="string", before="json", after="json", source="json")
    weft.publish_sync(events, [change("orders", "c", {"id": 1}, 1), change("items", "c", item(1, "a"), 2)])
    declared: dict[str, Any] = {"name": "shop", "source": events, "target": "default"}
    keyless = make(**declared, cdc=weft.CDC(envelope="debezium", route=ROUTE, key_field={"public.orders": "id"}))
    with pytest.raises(
        DeclarationError, match=r"The key of public\.items is not known: items of .* has no primary key"
    ):
        Query(keyless).start()
    assert "The key of public.items" in str([each.problem for each in validate(keyless) if each.problem is not None])
    cdc = weft.CDC(envelope="debezium", route=ROUTE, key_field=KEYS)
    assert "public.orders to orders" in str([each.detail for each in validate(make(**declared, cdc=cdc))])
    run_once(**declared, cdc=cdc)
    assert (rows("orders"), rows("items")) == ([(1,)], [(1, "a")])


@pytest.mark.full
def test_delta_tables_that_begin_with_a_copy(project: Path) -> None:
    """Delta commits table by table; a batch that is tried again leaves out those that have it."""
    lake = weft.DeltaLocalConnection(name="lake", path=str(project / "lake"))
    weft.load([{"id": 1, "state": "new"}], target="orders", connection="default", mode="merge", keys=["id"])
    weft.load([item(1, "a")], target="items", connection="default", mode="merge", keys=["order_id", "line"])
    events = declare(op="string", before="json", after="json", source="json")
    cdc = weft.CDC(
        envelope="debezium",
        route={"public.orders": "shop/orders", "public.items": "shop/items"},
        key_field=KEYS,
        table_field=["source.schema", "source.table"],
        snapshot="copy",
        snapshot_connection="default",
    )
    declared: dict[str, Any] = {"name": "shop", "source": events, "target": lake, "cdc": cdc}
    with pytest.raises(WeftError, match=r"There is no table public\.orders"):
        run_once(**declared)
    route = {"orders": "shop/orders", "items": "shop/items"}
    declared["cdc"] = replace(
        cdc, route=route, key_field={"orders": "id", "items": ["order_id", "line"]}, table_field=["source.table"]
    )
    run_once(**declared)
    weft.publish_sync(
        events, [change("orders", "u", {"id": 1, "state": "paid"}, 1), change("items", "c", item(2, "b"), 2)]
    )
    for _ in range(2):
        run_once(**declared)
        orders = weft.read("shop/orders", source=lake).collect()
        assert [(each.id, each.state) for each in orders] == [(1, "paid")]
        items = weft.read("shop/items", source=lake).collect()
        assert sorted((each.order_id, each.line) for each in items) == [(1, "a"), (2, "b")]
        forget_last_commit("shop")
