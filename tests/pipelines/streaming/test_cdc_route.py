"""How several tables of one source are declared: which goes where, and by which key."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.errors import DeclarationError
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.toml import parse, to_toml

WAREHOUSE = weft.PostgresConnection(name="warehouse", url="postgresql://u@h/d")
KAFKA = weft.KafkaConnection(name="broker", bootstrap_servers="localhost:9092")
ROUTE = {"public.orders": "orders", "public.items": "shop.items"}
KEYS: dict[str, Any] = {"public.orders": "after.id", "public.items": ["order_id", "line"]}


def cdc(**options: Any) -> weft.CDC:
    return weft.CDC(**{"envelope": "debezium", "route": ROUTE, "key_field": KEYS, **options})


def pipeline(**options: Any) -> Any:
    least: dict[str, Any] = {"name": "mirrors", "source": KAFKA, "source_query": "changes", "cdc": cdc()}
    if "targets" not in options:
        least["target"] = WAREHOUSE
    return make(**{**least, **options})


def test_a_connection_stands_for_all_tables() -> None:
    found = pipeline().targets
    assert [(each.table, each.primary_key, each.mode) for each in found] == [
        ((None, "orders"), ("id",), "merge"),
        (("shop", "items"), ("order_id", "line"), "merge"),
    ]
    assert {each.mode for each in pipeline(mode="scd2").targets} == {"scd2"}


def test_targets_of_their_own() -> None:
    targets = [
        weft.Target(connection=WAREHOUSE, table="orders", mode="scd2"),
        weft.Target(connection=WAREHOUSE, table="shop.items", primary_key=["order_id", "line"]),
    ]
    found = pipeline(targets=targets, cdc=cdc(key_field={"public.orders": "id"})).targets
    assert [(each.mode, each.primary_key) for each in found] == [("scd2", ("id",)), ("merge", ("order_id", "line"))]


def test_one_key_for_all_tables_or_none_that_is_said() -> None:
    assert {each.primary_key for each in pipeline(cdc=cdc(key_field="after.id")).targets} == {("id",)}
    assert {each.primary_key for each in pipeline(cdc=cdc(key_field=None)).targets} == {()}


def test_the_same_in_a_file() -> None:
    file = parse(
        """
        pipeline_name = "mirrors"
        source_query = "changes"
        [source]
        kind = "kafka"
        bootstrap_servers = "localhost:9092"
        name = "broker"
        [target]
        kind = "postgres"
        url = "postgresql://u@h/d"
        name = "warehouse"
        [transform.cdc]
        envelope = "debezium"
        unrouted = "fail"
        [transform.cdc.route]
        "public.orders" = "orders"
        "public.items" = "shop.items"
        [transform.cdc.key_field]
        "public.orders" = "after.id"
        "public.items" = ["order_id", "line"]
        """
    )
    declared = pipeline(cdc=cdc(unrouted="fail"))
    assert (file.targets, file.cdc) == (declared.targets, declared.cdc)
    again = parse(to_toml(declared))
    assert (again.targets, again.cdc) == (declared.targets, declared.cdc)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"route": {}}, "route must be a dict"),
        ({"route": {"public.orders": 1}}, "route must be a dict"),
        ({"route": {"a.t": "t", "b.t": "t"}}, "route leads two tables to 't'"),
        ({"key_field": {"public.order": "id"}}, "keys of 'public.order', which route does not name"),
        ({"key_field": {"public.orders": []}}, "key_field of 'public.orders' must be a path"),
        ({"unrouted": "drop"}, "unrouted is 'drop'"),
        ({"row_sql": "SELECT * FROM source"}, "row_sql is over the rows of one table"),
        ({"route": None}, "key_field by table is for route"),
        ({"route": None, "key_field": "after.id", "unrouted": "fail"}, "unrouted is for route"),
        ({"route": None, "key_field": "after.id", "table_field": "t"}, "table_field is for route"),
        ({"delete_mode": "soft", "soft_delete_column": "line"}, "'line' is a key"),
        (
            {
                "envelope": "custom",
                "op_field": "op",
                "before_field": "old",
                "after_field": "new",
                "ts_field": "at",
                "op_map": {"I": "create"},
            },
            "table_field is missing",
        ),
    ],
)
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        cdc(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": [weft.Target(connection=WAREHOUSE, table="order")]}, "target order: route leads no table there"),
        ({"targets": [weft.Target(connection=WAREHOUSE, table="orders")]}, "public.items to shop.items, which is no"),
        ({"target_table": "orders"}, "public.items to shop.items, which is no target"),
        ({"targets": [weft.Target(connection=KAFKA, stream="clean")]}, "gets the changes of one table"),
        ({"target_primary_key": ["no"]}, "its primary key is no, and key_field names id"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        pipeline(**options)
