"""How change data capture is declared, and what it is refused with."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.errors import DeclarationError
from weft.pipelines.streaming.declare import make
from weft.pipelines.streaming.toml import parse, to_toml

WAREHOUSE = weft.PostgresConnection(name="warehouse", url="postgresql://u@h/d")
KAFKA = weft.KafkaConnection(name="broker", bootstrap_servers="localhost:9092")
DEBEZIUM: dict[str, Any] = {"envelope": "debezium", "key_field": "after.id"}
COPY: dict[str, Any] = {"snapshot": "copy", "snapshot_connection": "warehouse"}
CUSTOM: dict[str, Any] = {
    "envelope": "custom",
    "key_field": ["new.a", "new.b"],
    "op_field": "kind",
    "op_map": {"I": "Create", "D": "delete"},
    "before_field": "old",
    "after_field": "new",
    "ts_field": "at",
}


def pipeline(**options: Any) -> Any:
    least: dict[str, Any] = {"name": "mirror", "source": KAFKA, "source_query": "changes"}
    if "targets" not in options:
        least |= {"target": WAREHOUSE, "target_table": "customers"}
    return make(**{**least, "cdc": weft.CDC(**DEBEZIUM), **options})


def test_the_defaults_of_the_guide() -> None:
    paths = weft.CDC(**DEBEZIUM).paths
    assert (paths.op, paths.before, paths.after, paths.ts[0]) == ("op", "before", "after", "source.ts_ms")
    assert {word: paths.ops[word] for word in "cudr"} == {"c": "create", "u": "update", "d": "delete", "r": "read"}
    paths = weft.CDC(envelope="maxwell", key_field="data.id").paths
    assert (paths.op, paths.before, paths.after, paths.ts) == ("type", "old", "data", ("ts",))
    assert [paths.ops[word] for word in ("insert", "update", "delete")] == ["create", "update", "delete"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"envelope": "debezium"}, "CDC: key_field is missing"),
        ({"key_field": "after.id"}, "CDC: envelope is missing"),
        ({"envelope": "canal", "key_field": "id"}, "CDC: envelope is 'canal'"),
        (
            {"envelope": "custom", "key_field": "id", "op_field": "op"},
            "CDC: before_field, after_field, ts_field, op_map are missing",
        ),
        ({**CUSTOM, "ts_field": None}, "CDC: ts_field is missing"),
        ({**CUSTOM, "op_map": {"I": "insert"}}, "op_map has 'insert' for 'I'"),
        ({**CUSTOM, "op_map": {}}, "op_map must be a dict"),
        ({**DEBEZIUM, "key_field": "after..id"}, "key_field must be a path in the message"),
        ({**DEBEZIUM, "key_field": []}, "key_field must be a path or a list of paths"),
        ({**DEBEZIUM, "key_field": "after.id,before.id"}, "key_field names a column twice"),
        ({**DEBEZIUM, "delete_mode": "soft"}, 'delete_mode = "soft" requires soft_delete_column'),
        ({**DEBEZIUM, "soft_delete_column": "gone"}, 'soft_delete_column is for delete_mode = "soft"'),
        ({**DEBEZIUM, "delete_mode": "soft", "soft_delete_column": "id"}, "'id' is a key"),
        ({**DEBEZIUM, "out_of_order_tolerance_ms": -1}, "out_of_order_tolerance_ms must be a whole number"),
        ({**DEBEZIUM, "row_sql": "SELECT count(*) AS n FROM source"}, "row_sql depends on several rows"),
        ({**DEBEZIUM, "schema_evolution": "warn"}, "schema_evolution is 'warn'"),
        ({**DEBEZIUM, "snapshot": "copy"}, 'snapshot = "copy" requires snapshot_connection'),
        ({**DEBEZIUM, "snapshot_connection": "shop"}, 'snapshot_connection is for snapshot = "copy"'),
        ({**DEBEZIUM, "snapshot_table": "t"}, 'snapshot_table is for snapshot = "copy"'),
        ({**DEBEZIUM, **COPY, "snapshot_connection": "postgresql://u:p@h/d"}, "snapshot_connection is the URL"),
        ({**DEBEZIUM, **COPY, "row_sql": "SELECT * FROM source"}, "row_sql is over changes"),
        (
            {**DEBEZIUM, **COPY, "route": {"public.orders": "orders"}, "snapshot_table": "t"},
            "snapshot_table is one table",
        ),
    ],
)
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=f"^{said}|{said}"):
        weft.CDC(**options)


def test_a_copy_in_a_file() -> None:
    declared = pipeline(cdc=weft.CDC(**DEBEZIUM, **{**COPY, "snapshot_connection": WAREHOUSE}, snapshot_table="shop.t"))
    again = parse(to_toml(declared))
    assert (again.cdc.snapshot_connection, again.cdc.snapshot_table) == ("warehouse", "shop.t")
    assert again.cdc == weft.CDC(**DEBEZIUM, **COPY, snapshot_table="shop.t")


WINDOW = weft.Window(kind="tumbling", duration_ms=1000, aggregations=[weft.Aggregation(agg="count", as_="n")])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": WINDOW}, "cdc and window are mutually exclusive"),
        ({"transform_sql": "SELECT * FROM source"}, "cdc and transform_sql are mutually exclusive"),
        ({"mode": "append"}, "target customers: cdc changes the rows of a table, and the mode is 'append'"),
        ({"target_primary_key": ["customer_id"]}, "its primary key is customer_id, and key_field names id"),
        (
            {"targets": [weft.Target(connection=weft.ObjectStoreLocalConnection("/data"), prefix="raw")]},
            "target raw: files cannot be changed",
        ),
        (
            {"targets": [weft.Target(connection=WAREHOUSE, table="t", mode="merge", update_columns=["a"])]},
            "update_columns is not an option of cdc",
        ),
        (
            {"mode": "scd2", "cdc": weft.CDC(**DEBEZIUM, delete_mode="soft", soft_delete_column="gone")},
            "delete_mode = 'soft' marks the rows of a mirror, and the mode is 'scd2'",
        ),
        ({"cdc": object()}, "cdc is a object"),
        ({"mode": "scd2", "cdc": weft.CDC(**DEBEZIUM, **COPY)}, "fills a mirror, and this is a history"),
        (
            {"targets": [weft.Target(connection=KAFKA, stream="clean")], "cdc": weft.CDC(**DEBEZIUM, **COPY)},
            "fills a mirror, and this is a stream or topic",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        pipeline(**options)


def test_join_by_name_of_its_table() -> None:
    tables = """
        pipeline_name = "mirror"
        source_query = "changes"
        [source]
        kind = "kafka"
        bootstrap_servers = "localhost:9092"
        [target]
        kind = "postgres"
        url = "postgresql://u@h/d"
        table = "customers"
        [transform]
        sql = "SELECT * FROM source"
        [transform.cdc]
        envelope = "debezium"
        key_field = "after.id"
    """
    with pytest.raises(DeclarationError, match=r"\[transform\.cdc\] and \[transform\] sql are mutually exclusive"):
        parse(tables)


@pytest.mark.parametrize(
    "options", [DEBEZIUM, CUSTOM, {**DEBEZIUM, "delete_mode": "soft", "soft_delete_column": "gone"}]
)
def test_a_file_and_back(options: dict[str, Any]) -> None:
    cdc = weft.CDC(**options)
    made = pipeline(cdc=cdc)
    assert made.targets[0].primary_key == cdc.keys
    again = parse(to_toml(made))
    assert (again.cdc, again.targets) == (cdc, made.targets)
