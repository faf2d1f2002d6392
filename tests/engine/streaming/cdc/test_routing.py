"""Messages about several tables are led apart, each with the columns of its own table; without Spark and databases."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.engine.inputs import Memory
from weft.engine.streaming.cdc.routing import Routed, malformed, routed, well_formed
from weft.engine.streaming.transform import Transformed
from weft.errors import LoadRefusedError
from weft.systems.codecs.json import JsonCodec
from weft.systems.load import Counts

ROUTE = {"public.orders": "orders", "public.items": "items"}
KEYS = {"public.orders": "id", "public.items": ["order_id", "line"]}
DEBEZIUM = weft.CDC(envelope="debezium", route=ROUTE, key_field=KEYS)
NAMED = {"schema": "public", "table": "orders", "lsn": 1, "ts_ms": 1}
AS_JSON = {name: pa.json_() for name in ("before", "after", "payload", "schema", "data", "old")}


def change(table: str | None, op: str, after: Any, lsn: int, before: Any = None) -> dict[str, Any]:
    schema, _, name = (table or "").rpartition(".")
    named = {} if table is None else {"schema": schema, "table": name}
    return {"op": op, "before": before, "after": after, "source": {"lsn": lsn, "ts_ms": lsn, "db": "shop", **named}}


def parsed(*messages: Any) -> pa.Table:
    """Messages as a source of such a pipeline has them."""
    read = JsonCodec().decoder(AS_JSON).parse(pa.array([json.dumps(each).encode() for each in messages]))
    assert not read.bad
    return pa.table(read.columns)


def shown(found: Routed) -> dict[str, list[dict[str, Any]]]:
    tables = {name: each.set.rows for name, each in found.by_table.items()}
    own = {name: [each for each in rows.column_names if not each.startswith("_weft_")] for name, rows in tables.items()}
    return {name: rows.select(own[name]).to_pylist() for name, rows in tables.items()}


MESSAGES = [
    change("public.orders", "c", {"id": 1, "state": "new"}, 1),
    # A column of the same name is of another type here.
    change("public.items", "c", {"order_id": 1, "line": "a", "state": 7, "price": 2.5}, 2),
    change("public.orders", "u", {"id": 1, "state": "paid"}, 3),
    change("public.items", "d", None, 4, before={"order_id": 1, "line": "b"}),
    change("other.orders", "c", {"id": 9}, 5),
    change("public.users", "c", {"id": 9}, 6),
]
ORDERS = [{"id": 1, "state": "paid"}]
ITEMS = [
    {"order_id": 1, "line": "a", "state": 7, "price": 2.5},
    {"order_id": 1, "line": "b", "state": None, "price": None},
]


@pytest.mark.parametrize("form", ["plain", "wrapped"])
def test_each_table_has_its_own_columns(form: str) -> None:
    wrapped = [{"schema": {"type": "struct", "fields": []}, "payload": each} for each in MESSAGES]
    found = well_formed(parsed(*(wrapped if form == "wrapped" else MESSAGES)), DEBEZIUM)
    assert shown(found) == {"orders": ORDERS, "items": ITEMS}
    assert found.skipped == 2
    report = found.report({"orders": [Counts()], "items": [Counts(late=(0, 0, 1))]}, 3)
    assert (report.creates, report.updates, report.deletes) == (2, 1, 0)
    assert (report.skipped, report.idempotent_skipped) == (5, 1)
    assert report.tables is not None
    assert [(name, each.creates, each.updates, each.skipped) for name, each in report.tables.items()] == [
        ("orders", 1, 1, 0),
        ("items", 1, 0, 0),
    ]
    assert report.lag_seconds == pytest.approx(report.tables["items"].lag_seconds, abs=1)


def test_tables_of_maxwell_and_of_mysql() -> None:
    maxwell = weft.CDC(envelope="maxwell", route={"shop.orders": "orders"}, key_field="id")
    message = {"database": "shop", "table": "orders", "type": "insert", "ts": 1_770_000_000, "data": {"id": 1}}
    assert shown(well_formed(parsed(message, {**message, "table": "t"}), maxwell)) == {"orders": [{"id": 1}]}
    mysql = weft.CDC(envelope="debezium", route={"shop.orders": "orders"}, key_field="id")
    source = {"file": "f.1", "pos": 1, "db": "shop", "table": "orders"}
    found = well_formed(parsed({"op": "c", "after": {"id": 1}, "source": source}), mysql)
    assert shown(found) == {"orders": [{"id": 1}]}
    # The database of PostgreSQL is no schema.
    assert shown(well_formed(parsed(change("public.orders", "c", {"id": 1}, 1)), mysql)) == {}


def test_a_table_of_a_path() -> None:
    custom = weft.CDC(
        envelope="custom",
        route={"shop.public.orders": "orders"},
        key_field="id",
        op_field="op",
        op_map={"c": "create"},
        before_field="before",
        after_field="after",
        ts_field="source.ts_ms",
        table_field=["source.db", "source.schema", "source.table"],
    )
    assert shown(well_formed(parsed(MESSAGES[0]), custom)) == {"orders": [{"id": 1, "state": "new"}]}


def test_malformed_messages_by_their_numbers() -> None:
    found = malformed(
        parsed(
            MESSAGES[0],
            change("public.items", "c", {"order_id": 1}, 1),
            change(None, "c", {"id": 1}, 2),
            change("public.orders", "x", {"id": 1}, 3),
            change(None, "m", None, 4),
            change("public.users", "x", None, 5),
        ),
        DEBEZIUM,
    )
    assert found == {
        1: "It has no key at 'line'.",
        2: "It has no table at 'source.schema' and 'source.table'.",
        3: "'x' is no operation.",
    }


def test_tables_without_a_route_are_refused_where_that_is_said() -> None:
    strict = weft.CDC(envelope="debezium", route=ROUTE, key_field=KEYS, unrouted="fail")
    with pytest.raises(LoadRefusedError, match=r"1 messages .* are of the table other\.orders") as refused:
        well_formed(parsed(*MESSAGES[:5]), strict)
    assert "unrouted='skip'" in str(refused.value.hint)
    assert shown(well_formed(parsed(*MESSAGES[:4]), strict)) == {"orders": ORDERS, "items": ITEMS}


def test_rows_of_several_tables_in_one_type_are_refused() -> None:
    """As Avro has them: each table would get the columns of all."""
    row = pa.struct([("id", pa.int64()), ("line", pa.string())])
    source = pa.struct([("schema", pa.string()), ("table", pa.string())])
    schema = pa.schema([("op", pa.string()), ("before", row), ("after", row), ("source", source)])
    rows = [
        {"op": "c", "after": {"id": 1}, "source": {"schema": "public", "table": name}} for name in ("orders", "items")
    ]
    with pytest.raises(LoadRefusedError, match=r"public\.orders, public\.items come from one source"):
        well_formed(pa.Table.from_pylist(rows, schema=schema), DEBEZIUM)
    found = well_formed(pa.Table.from_pylist(rows[:1], schema=schema), DEBEZIUM)
    assert shown(found) == {"orders": [{"id": 1, "line": None}]}


def test_a_table_that_two_sources_have_in_other_types_is_refused() -> None:
    parts = [
        pa.Table.from_pylist([{"op": "c", "after": json.dumps({"id": 1}), "source": {**NAMED, "snapshot": snapshot}}])
        for snapshot in ("false", False)
    ]
    with pytest.raises(LoadRefusedError, match=r"public\.orders come from several sources, in which they have other"):
        routed([(Transformed(Memory(each.schema, each.to_batches()), [], pa.Table), Any) for each in parts], DEBEZIUM)  # type: ignore[misc]
