"""Types that only DuckDB has, as they are read."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.columns import hint_of
from weft.errors import DeclarationError, SchemaError, WeftError
from weft.systems.duckdb.tables import DuckDBTables
from weft.systems.sql.tables import Slice


@pytest.fixture
def tables() -> DuckDBTables:
    return DuckDBTables(weft.DuckDBConnection(":memory:", name="types"))


def read(tables: DuckDBTables, expression: str) -> tuple[pa.Field, Any]:
    sql = f"SELECT {expression} AS v"
    schema = tables.describe(sql)
    (batch,) = tables.read(Slice(sql), schema)
    assert batch.schema.equals(schema, check_metadata=True)
    return schema.field("v"), batch["v"][0].as_py()


@pytest.mark.parametrize(
    ("expression", "kind", "value"),
    [
        (
            "CAST(12345678901234567890123456789012345678 AS HUGEINT)",
            pa.decimal128(38, 0),
            Decimal("1" + "2345678901" * 3 + "2345678"),
        ),
        ("CAST(18446744073709551615 AS UBIGINT)", pa.decimal128(20, 0), Decimal(2**64 - 1)),
        ("CAST(255 AS UTINYINT)", pa.int16(), 255),
        ("CAST('b' AS ENUM('a', 'b'))", pa.string(), "b"),
        ("CAST('0101' AS BIT)", pa.string(), "0101"),
        ("TIMESTAMP_S '2026-01-01 00:00:00'", pa.timestamp("us"), None),
        ("TIMESTAMP_NS '2026-01-01 00:00:00.123456'", pa.timestamp("us"), None),
        ("CAST('12:00:00+02' AS TIMETZ)", pa.string(), "12:00:00+02"),
        ("[1, NULL]", pa.list_(pa.field("element", pa.int32())), [1, None]),
        ("MAP {'a': 1.5}", pa.map_(pa.string(), pa.decimal128(2, 1)), [("a", Decimal("1.5"))]),
        ("{'a': {'b': [TIME '12:00:00']}}", None, {"a": {"b": ["12:00:00.000000"]}}),
        ("NULL", pa.string(), None),
    ],
)
def test_read(tables: DuckDBTables, expression: str, kind: pa.DataType | None, value: Any) -> None:
    field, found = read(tables, expression)
    assert kind is None or field.type == kind
    assert value is None or found == value


@pytest.mark.parametrize(
    ("expression", "hint", "value"),
    [
        ("CAST('00000000-0000-0000-0000-00000000000A' AS UUID)", "uuid", "00000000-0000-0000-0000-00000000000a"),
        ("""CAST('{"a": 1.10}' AS JSON)""", "json", '{"a": 1.10}'),
        ("TIME '12:30:00.5'", "time", "12:30:00.5"),
    ],
)
def test_hints(tables: DuckDBTables, expression: str, hint: str, value: str) -> None:
    field, found = read(tables, expression)
    assert hint_of(field) == hint and found == value


@pytest.mark.parametrize(
    "expression", ["INTERVAL 1 DAY", "union_value(a := 1)", "[CAST('1' AS BIT)]", "CAST(1 AS BIGNUM)"]
)
def test_refused_by_name(tables: DuckDBTables, expression: str) -> None:
    with pytest.raises(SchemaError, match=r"Column 'v' is of DuckDB's type") as caught:
        tables.describe(f"SELECT {expression} AS v")
    assert "CAST(v AS VARCHAR)" in str(caught.value)


@pytest.mark.parametrize("kind", ["TIMESTAMP", "TIMESTAMPTZ", "DATE"])
@pytest.mark.parametrize("sign", ["", "-"])
def test_infinity_is_refused(tables: DuckDBTables, kind: str, sign: str) -> None:
    with pytest.raises(SchemaError, match="'v' holds infinity"):
        read(tables, f"CAST('{sign}infinity' AS {kind})")


def test_what_would_be_altered_is_refused(tables: DuckDBTables) -> None:
    with pytest.raises(SchemaError, match="does not fit"):
        read(tables, "TIMESTAMP_NS '2026-01-01 00:00:00.123456789'")
    with pytest.raises(SchemaError):
        read(tables, "CAST(170141183460469231731687303715884105727 AS HUGEINT)")


@pytest.mark.parametrize("sql", ["DROP TABLE t", "SELECT 1; SELECT 2", "INSERT INTO t VALUES (1)", ""])
def test_a_source_is_one_query(tables: DuckDBTables, sql: str) -> None:
    with pytest.raises((DeclarationError, WeftError)):
        tables.describe(sql)


@pytest.mark.brief("doc0-docs0-append", "doc1-docs1-merge")
@pytest.mark.parametrize("mode", ["append", "merge"])
@pytest.mark.parametrize(
    ("doc", "docs"),
    [({"b": 1}, [{"a": 1}]), ({"a": 1}, [{"b": 1}]), ({"a": 1, "c": {"e": 1}}, [{"a": 1}])],
)
def test_an_object_with_other_keys_than_its_column_is_a_bad_row(
    tmp_path: Path, mode: Any, doc: dict[str, Any], docs: list[dict[str, Any]]
) -> None:
    """DuckDB refuses to cast between such types at all."""
    wh = weft.DuckDBConnection(str(tmp_path / "wh.duckdb"), name="wh")
    good = {"id": 1, "doc": {"a": 1, "c": {"d": 1}}, "docs": [{"a": 1}]}
    options: dict[str, Any] = {"target": "t", "connection": wh, "mode": mode, "keys": "id" if mode == "merge" else ()}
    weft.load(pa.Table.from_pylist([good]), **options)
    rows = pa.Table.from_pylist([{"id": 2, "doc": doc, "docs": docs}, {"id": 3, "doc": None, "docs": None}])
    assert weft.load(rows, **options, on_bad_rows="quarantine").quarantined == 1
    with closing(DuckDBTables(wh)) as tables:
        sql = "SELECT id FROM t ORDER BY id"
        (found,) = tables.read(Slice(sql), tables.describe(sql))
        assert found["id"].to_pylist() == [1, 3]


def test_what_is_nested_becomes_json_in_columns_of_texts(tmp_path: Path) -> None:
    """DuckDB would write {'a': 1}, which is no JSON."""
    wh = weft.DuckDBConnection(str(tmp_path / "wh.duckdb"), name="wh")
    doc = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
    docs = [{"a": 1, "b": ["é'\""]}, None, {"a": None, "b": None}]
    rows = pa.table(
        {
            "id": pa.array(range(3)),
            "doc": pa.array(docs, doc),
            "docs": pa.array([[each] for each in docs], pa.list_(doc)),
            "by_name": pa.array([[("k", each)] for each in docs], pa.map_(pa.string(), doc)),
            "within": pa.array([{"doc": each} for each in docs], pa.struct([("doc", doc)])),
        }
    )
    texts = ['{"a":1,"b":["é\'\\""]}', None, '{"a":null,"b":null}']
    for kind in ("VARCHAR", "JSON"):
        with closing(DuckDBTables(wh)) as tables, tables.driver.session("publish") as session:
            columns = ", ".join(f"{name} {kind}" for name in ("doc", "docs", "by_name"))
            session.run(f"CREATE TABLE {kind}s (id BIGINT, {columns}, within STRUCT(doc {kind}))")
        weft.load(rows, target=f"{kind}s", connection=wh)
        with closing(DuckDBTables(wh)) as tables:
            sql = f"SELECT doc, docs, by_name, within.doc AS within FROM {kind}s ORDER BY id"
            (found,) = tables.read(Slice(sql), tables.describe(sql))
        expected = {"doc": texts, "docs": [f"[{each or 'null'}]" for each in texts], "within": texts}
        expected["by_name"] = [f'{{"k":{each or "null"}}}' for each in texts]
        assert found.to_pydict() == expected


@pytest.mark.parametrize("mode", ["append", "merge"])
def test_an_object_of_which_a_column_would_lose_something_is_a_bad_row(tmp_path: Path, mode: Any) -> None:
    """By itself, whatever keys its neighbours have."""
    wh = weft.DuckDBConnection(str(tmp_path / "wh.duckdb"), name="wh")
    with closing(DuckDBTables(wh)) as tables, tables.driver.session("publish") as session:
        members = 'a BIGINT, moment TIMESTAMP, docs STRUCT(c BIGINT)[], "it\'s" DECIMAL(5,1)'
        session.run(f"CREATE TABLE t (id BIGINT PRIMARY KEY, doc STRUCT({members}))")
    docs: list[Any] = [
        {"a": 4},
        {"a": 5.0, "it's": None},
        {"moment": "2026-01-31T10:00:00+02:00", "docs": [{"c": 1}, None, {}], "it's": 2.5},
        {"docs": []},
        None,
    ]
    bad = [
        {"b": 1},
        {"a": 4, "b": 1},
        {"a": 1.5},
        {"docs": [{"c": 1}, {"d": 2}]},
        {"docs": [{"c": 1.5}]},
        {"it's": 2.25},
    ]
    rows = [{"id": number, "doc": doc} for number, doc in enumerate([*docs, *bad])]
    keys = "id" if mode == "merge" else ()
    for part in (rows[:-1], rows[-1:]):
        result = weft.load(
            pa.Table.from_pylist(part), target="t", connection=wh, mode=mode, keys=keys, on_bad_rows="quarantine"
        )
        assert result.quarantined == sum(row["doc"] in bad for row in part)
    with closing(DuckDBTables(wh)) as tables:
        sql = 'SELECT doc.a AS a, doc.moment AS moment, doc.docs AS docs, doc."it\'s" AS half FROM t ORDER BY id'
        (found,) = tables.read(Slice(sql), tables.describe(sql))
    assert found["a"].to_pylist() == [4, 5, None, None, None]
    assert found["moment"].to_pylist() == [None, None, datetime(2026, 1, 31, 8), None, None]
    assert found["docs"].to_pylist() == [None, None, [{"c": 1}, None, {"c": None}], [], None]
    assert found["half"].to_pylist() == [None, None, Decimal("2.5"), None, None]
