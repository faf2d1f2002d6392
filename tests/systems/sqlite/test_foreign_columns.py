"""Tables of SQLite that others made: their types, what is read of them, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from weft.columns import hinted
from weft.errors import SchemaError, WeftError
from weft.systems.sql.tables import Column, Slice
from weft.systems.sqlite import types
from weft.systems.sqlite.tables import SqliteTables


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[SqliteTables]:
    (tmp_path / "foreign.db").touch()
    made = SqliteTables(weft.connect(url=f"sqlite:///{tmp_path / 'foreign.db'}"))
    yield made
    made.close()


def run(tables: SqliteTables, *statements: str) -> None:
    with tables.driver.session("publish") as session:
        for sql in statements:
            session.run(sql)


def rows(tables: SqliteTables, sql: str) -> list[dict[str, Any]]:
    return [row for batch in tables.read(Slice(sql), tables.describe(sql)) for row in batch.to_pylist()]


def test_declared_types(tables: SqliteTables) -> None:
    run(
        tables,
        "CREATE TABLE f (id INTEGER PRIMARY KEY NOT NULL, a VARCHAR(20) NOT NULL, b DATETIME, c NUMERIC, "
        "d DECIMAL(10,2), e DATE, f BIGINT, g BOOL, h JSON, i, j DATETIME, k FLOAT, l STRING)",
        "INSERT INTO f VALUES (1, 'x', '2020-01-01 10:00:00', 1.5, 1.25, '2020-01-02', 5, 1, '{}', 't', 5, 1, 'a'), "
        "(2, 'y', NULL, 2, 3, NULL, 6, NULL, 7, 8, NULL, 2.5, 12)",
    )
    assert rows(tables, "SELECT * FROM f") == [
        {
            "id": 1,
            "a": "x",
            "b": datetime(2020, 1, 1, 10),
            "c": 1.5,
            "d": Decimal("1.25"),
            "e": date(2020, 1, 2),
            "f": 5,
            "g": True,
            "h": "{}",
            "i": "t",
            "j": 5,
            "k": 1.0,
            "l": "a",
        },
        {
            "id": 2,
            "a": "y",
            "b": None,
            "c": 2.0,
            "d": Decimal(3),
            "e": None,
            "f": 6,
            "g": None,
            "h": "7",
            "i": "8",
            "j": None,
            "k": 2.5,
            "l": "12",
        },
    ]
    with tables.driver.session("read") as session:
        columns = tables.columns(session, None, "f") or []
    assert [column.name for column in columns if column.required] == ["a"]


def test_expressions(tables: SqliteTables) -> None:
    sql = "SELECT 1.5 AS r, 2 AS i, 'a' AS t, NULL AS n, x'00' AS b, count(*) AS c, count(*) AS c FROM sqlite_master;"
    schema = tables.describe(sql)
    assert schema.names == ["r", "i", "t", "n", "b", "c", "c"]
    assert list(map(str, schema.types)) == ["double", "int64", "string", "string", "binary", "int64", "int64"]
    assert rows(tables, "SELECT 1 AS x UNION ALL SELECT 2.5 -- both") == [{"x": 1.0}, {"x": 2.5}]
    assert rows(tables, "SELECT 1 AS x UNION ALL SELECT 'b'") == [{"x": "1"}, {"x": "b"}]
    assert tables.describe("SELECT 1 AS x WHERE 0").field("x").type == pa.int64()
    with pytest.raises(SchemaError, match="'x' holds both bytes"):
        tables.describe("SELECT 1 AS x UNION ALL SELECT x'00'")
    with pytest.raises(WeftError, match="no such table"):
        tables.describe("SELECT * FROM nowhere")


def test_values_that_do_not_fit_their_column(tables: SqliteTables) -> None:
    run(
        tables,
        "CREATE TABLE wrong (i INTEGER, b BOOLEAN, t TIMESTAMP_TEXT, d DECIMAL_TEXT(5,2))",
        "INSERT INTO wrong VALUES ('text', 2, 'yesterday', '1.555')",
    )
    for name in ("i", "b", "t", "d"):
        with pytest.raises(SchemaError, match=f"'{name}' does not fit"):
            rows(tables, f"SELECT {name} FROM wrong")


def test_nan_is_refused(tables: SqliteTables) -> None:
    data = pa.table({"x": [1.0, math.nan]})
    run(tables, "CREATE TABLE floats (x REAL)")
    with pytest.raises(SchemaError, match="'x' has NaN"), tables.driver.session("publish") as session:
        tables.copy_in(session, '"floats"', data.schema, data.to_batches())


@pytest.mark.parametrize(
    ("value", "field", "sql", "stored"),
    [
        (1.5, pa.field("x", pa.float64()), "DECIMAL_TEXT(5,2)", "1.50"),
        (1.555, pa.field("x", pa.float64()), "DECIMAL_TEXT(5,2)", None),
        ("1234.5", pa.field("x", pa.decimal128(6, 1)), "DECIMAL_TEXT(5,2)", None),
        ("-12.5", pa.field("x", pa.decimal128(6, 1)), "DECIMAL_TEXT(5,2)", "-12.50"),
        ("12", pa.field("x", pa.string()), "INTEGER", 12),
        ("twelve", pa.field("x", pa.string()), "INTEGER", None),
        (2.5, pa.field("x", pa.float64()), "INTEGER", None),
        (math.inf, pa.field("x", pa.float64()), "INTEGER", None),
        (300, pa.field("x", pa.int64()), "INTEGER_8", None),
        (2, pa.field("x", pa.int64()), "BOOLEAN", None),
        ("true", pa.field("x", pa.string()), "BOOLEAN", 1),
        (7, pa.field("x", pa.int64()), "VARCHAR(9)", "7"),
        (1, pa.field("x", pa.bool_()), "TEXT", "true"),
        ("2026-01-02", pa.field("x", pa.date32()), "TIMESTAMP_TEXT", "2026-01-02T00:00:00.000000+00:00"),
        ("2026-01-02T10:00:00.000000", pa.field("x", pa.timestamp("us")), "DATE_TEXT", None),
        ("2026-01-02 10:00", pa.field("x", pa.string()), "LOCAL_TIMESTAMP_TEXT", "2026-01-02T10:00:00.000000"),
        ("{", hinted("x", "json"), "TEXT", "{"),
        ("{", pa.field("x", pa.string()), "JSON_TEXT", None),
        (b"ab", pa.field("x", pa.binary()), "TEXT", "ab"),
        (b"\xff", pa.field("x", pa.binary()), "TEXT", None),
        (5, pa.field("x", pa.int64()), "NUMERIC", 5),
        # SQLite makes floats of decimals there.
        ("1.50", pa.field("x", pa.decimal128(10, 2)), "DECIMAL(10,2)", 1.5),
        ("12345678901234567890.12", pa.field("x", pa.decimal128(38, 2)), "DECIMAL(38,2)", None),
        ("12345678901234567890.12", pa.field("x", pa.decimal128(38, 2)), "NUMERIC", None),
        ("9007199254740993.00", pa.field("x", pa.decimal128(38, 2)), "NUMERIC(38,2)", 9007199254740993),
        (9007199254740993, pa.field("x", pa.int64()), "NUMERIC(38,2)", 9007199254740993),
        (
            "12345678901234567890.12",
            pa.field("x", pa.decimal128(38, 2)),
            "DECIMAL_TEXT(38,2)",
            "12345678901234567890.12",
        ),
    ],
)
def test_a_cast_alters_nothing(tables: SqliteTables, value: Any, field: pa.Field, sql: str, stored: Any) -> None:
    known = types.declared_field("x", sql)
    column = Column("x", known or pa.field("x", pa.string()), sql)
    query = f"SELECT {tables.cast('?', field, column)}, {tables.cast('NULL', field, column)}"
    if stored is None:
        with pytest.raises(SchemaError, match="does not fit") as refused, tables.driver.session("publish") as session:
            session.run(query, (value,))
        assert tables.is_rejection(refused.value)
    else:
        with tables.driver.session("publish") as session:
            assert session.row(query, (value,)) == (stored, None)


def test_values_of_others_are_written_in_our_way(tables: SqliteTables) -> None:
    run(tables, "CREATE TABLE theirs (at DATETIME)", "INSERT INTO theirs VALUES ('2020-01-01 10:00:00')")
    field = tables.describe("SELECT * FROM theirs").field("at")
    column = Column("at", pa.field("at", pa.timestamp("us")), "LOCAL_TIMESTAMP_TEXT")
    with tables.driver.session("read") as session:
        found = session.row(f"SELECT {tables.cast('at', field, column)} FROM theirs")
    assert found == ("2020-01-01T10:00:00.000000",)


def test_rejections(tables: SqliteTables) -> None:
    run(tables, "CREATE TABLE ruled (x INTEGER PRIMARY KEY, y TEXT NOT NULL CHECK (y <> ''))")
    for sql, is_rejection in (
        ("INSERT INTO ruled VALUES (1, '')", True),
        ("INSERT INTO ruled VALUES (1, NULL)", True),
        ("INSERT INTO ruled VALUES ('x', 'y')", True),
        ("INSERT INTO ruled VALUES (1, 'a'), (1, 'b')", True),
        ("INSERT INTO nowhere VALUES (1)", False),
    ):
        with pytest.raises(WeftError) as refused:
            run(tables, sql)
        assert tables.is_rejection(refused.value) is is_rejection, sql


def test_hashes_tell_rows_apart(tables: SqliteTables) -> None:
    pairs = ["NULL, ''", "'', NULL", "'a', 'b'", "'ab', ''", "1, '1'", "'1', 1", "1.0, 1", "x'31', '1'", "NULL, NULL"]
    with tables.driver.session("read") as session:
        found = [session.row(f"SELECT {tables.row_hash([pair])}") for pair in pairs]
        assert session.row("SELECT " + tables.add_seconds("'2026-01-01T00:00:00.000001+00:00'", -1.5)) == (
            "2025-12-31T23:59:58.500001+00:00",
        )
    assert len(set(found)) == len(pairs)


def test_a_reader_that_stops_early_leaves_nothing_open(tables: SqliteTables) -> None:
    run(
        tables,
        "CREATE TABLE many AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 5000) "
        "SELECT x FROM n",
    )
    found = tables.read(Slice("SELECT * FROM many"), tables.describe("SELECT * FROM many"))
    assert next(found).num_rows == 256
    found.close()  # type: ignore[attr-defined]
    with tables.driver.session("read") as session:
        # A reader of the past would keep this from starting the log over.
        assert session.row("PRAGMA wal_checkpoint(TRUNCATE)") == (0, 0, 0)


def test_computed_numbers_are_known_without_rows(tables: SqliteTables) -> None:
    known = [
        *("-n", "n + 1", "n * f", "n / 2", "n % 2", "n > 1", "s IN ('a')", "length(s)", "round(n, 1)", "abs(f)"),
        *(
            "CAST(s AS INTEGER)",
            "coalesce(n, 0)",
            "max(n, f)",
            "CASE s WHEN 'a' THEN 1.5 ELSE n END",
            "iif(n > 1, f, NULL)",
        ),
        *("sum(n)", "sum(f)", "sum(b)", "avg(n)", "min(f)", "count(*)", "count(DISTINCT s)", "sum(n) * 1.0 / count(*)"),
        *("sum(CASE WHEN s = 'a' THEN 1 ELSE 0 END)", "sum(n) OVER (PARTITION BY s)", "row_number() OVER ()"),
    ]
    others = [
        *(
            "coalesce(n, 'x')",
            "max(n, s)",
            "iif(n > 1, n, s)",
            "s + 1",
            "sum(s)",
            "d + 1",
            "n || 1",
            "date(d)",
            "s",
            "NULL",
        ),
        *("json_extract('{}', '$.a') + 1", "CASE WHEN n > 1 THEN n ELSE s END"),
    ]
    run(
        tables,
        "CREATE TABLE t (n INTEGER, f REAL, s TEXT, b BOOLEAN, d DATE_TEXT)",
        "INSERT INTO t VALUES (2, 2.5, '1.5', 1, '2026-01-01'), (3, 3.5, 'a', 0, '2026-01-02')",
    )

    def kinds(origin: str) -> dict[str, pa.DataType]:
        queries = {each: f"WITH q AS (SELECT * FROM {origin}) SELECT {each} AS x FROM q" for each in (*known, *others)}
        return {each: tables.describe(sql).field("x").type for each, sql in queries.items()}

    of_rows, of_none = kinds("t"), kinds("t WHERE n > 100")
    assert {each: of_none[each] for each in known} == {each: of_rows[each] for each in known}
    assert {of_none[each] for each in others} == {pa.string()}
    united = "SELECT n + 0 AS x FROM t WHERE n > 100 UNION ALL SELECT {} FROM t WHERE n > 100"
    assert [tables.describe(united.format(each)).field("x").type for each in ("-n", "s")] == [pa.int64(), pa.string()]
