"""What only tables of MySQL and MariaDB have: their types, their rounding, their locks and their packets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import servers
import weft
from weft.columns import hint_of, hinted, limited
from weft.errors import BusyError, DeclarationError, LoadRefusedError, SchemaError, WeftError
from weft.systems.load import Declared, Load
from weft.systems.mysql import constraints, results
from weft.systems.mysql import tables as mysql_tables
from weft.systems.mysql.tables import MySQLTables
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import Slice
from weft.systems.sql.target import evolution


@pytest.fixture
def make(url: str) -> Iterator[Callable[[], MySQLTables]]:
    made: list[MySQLTables] = []

    def make() -> MySQLTables:
        made.append(MySQLTables(weft.connect(url=url)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def tables(make: Callable[[], MySQLTables]) -> MySQLTables:
    return make()


def test_the_checks_of_a_table_are_sql(tables: MySQLTables) -> None:
    """Also with texts, which MySQL, unlike MariaDB, has in its information schema as parts of a text."""
    run(tables, "CREATE TABLE ruled (name VARCHAR(20) CHECK (name NOT IN ('it''s', 'a\\\\b')))")
    with tables.driver.session("read") as session:
        (check,) = [each.check for each in constraints.of_table(session, None, "ruled") if each.check]
        asked = [
            session.value(f"SELECT {check} FROM (SELECT ? AS name) AS v", (text,)) for text in ("it's", "a\\b", "b")
        ]
    assert asked == [0, 0, 1]
    assert constraints.unescaped(r"(`name` not in (_utf8mb4\'it\\\'s\',_utf8mb4\'a\\\\b\'))") == (
        r"(`name` not in (_utf8mb4'it\'s',_utf8mb4'a\\b'))"
    )


def run(tables: MySQLTables, *statements: str) -> None:
    with tables.driver.session("publish") as session:
        for statement in statements:
            session.run(statement)


def read(tables: MySQLTables, sql: str) -> pa.Table:
    schema = tables.describe(sql)
    return pa.Table.from_batches(list(tables.read(Slice(sql), schema)), schema)


@pytest.mark.parametrize(
    "wrapped", ["({}) AS q", "({} WHERE n > 0 LIMIT 5) AS q WHERE 1 = 1", "(SELECT * FROM ({}) AS r) AS q"]
)
def test_a_subquery_hides_no_types(tables: MySQLTables, wrapped: str) -> None:
    """As an incremental load reads one."""
    schema = pa.schema(
        [("n", pa.int64()), ("ok", pa.bool_()), ("at", pa.timestamp("us", "UTC")), hinted("code", "uuid")]
    )
    columns = ", ".join(f"{tables.quote(field.name)} {tables.sql_type(field)}" for field in schema)
    run(tables, f"CREATE TABLE raw ({columns})", "INSERT INTO raw VALUES (1, 1, '2026-01-01 00:00:00', uuid())")
    found = read(tables, f"SELECT * FROM {wrapped.format('SELECT * FROM raw')}")
    assert [(each.type, hint_of(each)) for each in found.schema] == [(each.type, hint_of(each)) for each in schema]
    assert found.column("ok").to_pylist() == [True]


@pytest.mark.parametrize(
    ("kind", "literal", "wanted", "value"),
    [
        ("TINYINT(1)", "5", pa.int8(), 5),
        ("TINYINT(1) COMMENT 'bool'", "1", pa.bool_(), True),
        ("TINYINT UNSIGNED", "255", pa.int16(), 255),
        ("MEDIUMINT UNSIGNED", "16777215", pa.int32(), 16777215),
        ("INT UNSIGNED ZEROFILL", "42", pa.int64(), 42),
        ("BIGINT UNSIGNED", "18446744073709551615", pa.decimal128(20, 0), Decimal(2**64 - 1)),
        ("YEAR", "1999", pa.int16(), 1999),
        ("BIT(1)", "b'1'", pa.bool_(), True),
        ("BIT(9)", "b'100000001'", pa.int64(), 257),
        ("BIT(64)", "~0", pa.decimal128(20, 0), Decimal(2**64 - 1)),
        ("FLOAT", "16777217", pa.float32(), 16777216.0),
        ("DECIMAL(5,5)", "0.12345", pa.decimal128(5, 5), Decimal("0.12345")),
        ("DECIMAL(10,2) UNSIGNED", "12345678.90", pa.decimal128(10, 2), Decimal("12345678.90")),
        ("ENUM('a','b')", "'b'", pa.string(), "b"),
        ("SET('a','b')", "'a,b'", pa.string(), "a,b"),
        ("CHAR(3) CHARACTER SET latin1", "'é'", pa.string(), "é"),
        ("VARBINARY(4)", "x'00ff'", pa.binary(), b"\x00\xff"),
        ("TIMESTAMP(3) NULL", "'2026-01-01 12:00:00.5'", pa.timestamp("us", "UTC"), None),
        ("DATETIME", "'2026-01-01 12:00:00'", pa.timestamp("us"), None),
    ],
)
def test_types(tables: MySQLTables, kind: str, literal: str, wanted: pa.DataType, value: Any) -> None:
    run(tables, f"CREATE TABLE t (v {kind})", f"INSERT INTO t VALUES ({literal}), (NULL)")
    found = read(tables, "SELECT v FROM t")
    assert found.schema.field("v").type == wanted
    assert None in found["v"].to_pylist()
    assert value is None or value in found["v"].to_pylist()


def test_hints(tables: MySQLTables) -> None:
    run(tables, "CREATE TABLE t (u CHAR(36) COMMENT 'uuid', j JSON, t TIME(6), o TIME)")
    run(tables, "INSERT INTO t VALUES (uuid(), '[1]', '12:30:00.500000', '-01:00:00')")
    found = read(tables, "SELECT * FROM t")
    assert [hint_of(field) for field in found.schema] == ["uuid", "json", "time", "time"]
    assert found["t"].to_pylist() == ["12:30:00.5"] and found["o"].to_pylist() == ["-01:00:00"]


def test_sums_have_as_many_digits_as_a_decimal_may(tables: MySQLTables) -> None:
    run(tables, "CREATE TABLE t (v BIGINT)", "INSERT INTO t VALUES (9223372036854775807), (9223372036854775807)")
    found = read(tables, "SELECT sum(v) AS total, avg(v) AS middle FROM t")
    assert found["total"].to_pylist() == [Decimal(2**64 - 2)]
    run(tables, "CREATE TABLE u (v DECIMAL(65,0))", f"INSERT INTO u VALUES ({'9' * 60})")
    with pytest.raises(SchemaError, match="Column 'v' does not fit"):
        read(tables, "SELECT v FROM u")


def test_times_of_streams_are_instants(tables: MySQLTables) -> None:
    run(tables, "CREATE TABLE t (_weft_rowid BIGINT PRIMARY KEY, at DATETIME(6))")
    assert tables.describe("SELECT at FROM t").field("at").type == pa.timestamp("us", "UTC")


def test_zero_dates_are_refused_by_name(tables: MySQLTables) -> None:
    run(tables, "SET SESSION sql_mode = ''", "CREATE TABLE t (v DATE)", "INSERT INTO t VALUES ('0000-00-00')")
    with pytest.raises(SchemaError, match=r"Column 'v' holds '0000-00-00', which is not a date") as caught:
        read(tables, "SELECT v FROM t")
    assert "NULLIF(v, 0)" in str(caught.value)


def test_geometries_are_refused_by_name(tables: MySQLTables) -> None:
    run(tables, "CREATE TABLE t (v POINT)")
    with pytest.raises(SchemaError, match="Column 'v' is a geometry"):
        tables.describe("SELECT v FROM t")
    with tables.driver.session("read") as session:
        assert tables.columns(session, None, "t")


@pytest.mark.parametrize("sql", ["DROP TABLE t", "SELECT 1; SELECT 2", "SELEC 1", "SELECT * FROM nowhere"])
def test_describing_runs_nothing(tables: MySQLTables, sql: str) -> None:
    run(tables, "CREATE TABLE t (i INT)")
    with pytest.raises((DeclarationError, WeftError)):
        tables.describe(sql)
    with tables.driver.session("read") as session:
        assert tables.columns(session, None, "t")


def test_rows_longer_than_a_packet(tables: MySQLTables, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tables, "CREATE TABLE t (i INT, v LONGTEXT)")
    run(tables, "INSERT INTO t VALUES (1, repeat('a', 12000000)), (2, 'short'), (3, NULL), (4, repeat('é', 5000000))")
    # A row of two such values takes more than one packet has: 16 MiB.
    found = read(tables, "SELECT i, v, v AS again FROM t ORDER BY i")
    lengths = [None if text is None else len(text) for text in found["again"].to_pylist()]
    assert found["i"].to_pylist() == [1, 2, 3, 4] and lengths == [12_000_000, 5, None, 5_000_000]


@pytest.mark.parametrize("size", [0, 1, 250, 251, 252, 253, 255, 65_535, 65_536, 70_000])
def test_every_form_of_a_length(tables: MySQLTables, size: int) -> None:
    found = read(tables, f"SELECT repeat('x', {size}) AS a, NULL AS b, 7 AS c")
    assert found["a"].to_pylist() == ["x" * size] and found["c"].to_pylist() == [7]


def test_parts_that_come_a_byte_at_a_time(tables: MySQLTables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_CHUNK_BYTES", 1)
    found = read(tables, "SELECT seq AS i, repeat('x', seq % 300) AS v FROM seq_1_to_500")
    assert found["i"].to_pylist() == list(range(1, 501))


def test_an_error_in_the_middle_of_the_rows(tables: MySQLTables) -> None:
    with pytest.raises(WeftError, match="more than 1 row"):
        read(tables, "SELECT IF(seq < 40000, seq, (SELECT seq UNION SELECT -seq)) AS v FROM seq_1_to_50000")
    assert read(tables, "SELECT 1 AS v")["v"].to_pylist() == [1]


def test_who_stops_reading_leaves_no_answer_behind(tables: MySQLTables) -> None:
    sql = "SELECT seq AS v, repeat('x', 100) AS w FROM seq_1_to_1000000"
    batches = tables.read(Slice(sql), tables.describe(sql))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert read(tables, "SELECT 5 AS v")["v"].to_pylist() == [5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_refused_by_name(tables: MySQLTables, value: float) -> None:
    schema = pa.schema([("x", pa.float64())])
    run(tables, "CREATE TABLE t (x DOUBLE)")
    with pytest.raises(SchemaError, match="Column 'x' holds") as caught, tables.driver.session("publish") as session:
        tables.copy_in(session, "t", schema, [pa.record_batch([[1.5, value, None]], schema=schema)])
    assert tables.is_rejection(caught.value)
    assert read(tables, "SELECT x FROM t").num_rows == 0


@pytest.mark.parametrize(
    ("kind", "field", "fits", "altered"),
    [
        ("INT", pa.field("v", pa.float64()), 2.0, 1.5),
        ("DECIMAL(10,2)", pa.field("v", pa.decimal128(10, 4)), Decimal("1.2500"), Decimal("1.2345")),
        ("DECIMAL(10,2)", pa.field("v", pa.string()), "1.5", "1.555"),
        ("DECIMAL(10,1)", pa.field("v", pa.string()), "1.25e2", "1.5e-12"),
        ("VARCHAR(2)", pa.field("v", pa.string()), "ab", "abc"),
        ("CHAR(2) CHARACTER SET latin1", pa.field("v", pa.string()), "é", "漢"),
        ("TIME", hinted("v", "time"), "12:00:00", "12:00:00.5"),
        ("YEAR", pa.field("v", pa.int64()), 1999, 1850),
    ],
)
@pytest.mark.parametrize("mode", ["append", "merge"])
def test_nothing_is_stored_altered(
    tables: MySQLTables, kind: str, field: pa.Field, fits: Any, altered: Any, mode: str
) -> None:
    run(tables, f"CREATE TABLE t (k INT PRIMARY KEY, v {kind})", "INSERT INTO t VALUES (1, NULL)")
    schema = pa.schema([pa.field("k", pa.int32()), field])

    def load(value: Any) -> None:
        options: dict[str, Any] = {"keys": ["k"]} if mode == "merge" else {}
        declared = Load.declare(target="t", mode=mode, **options)
        sql_commit.prepare(tables, declared, schema)
        rows = pa.Table.from_pylist([{"k": 1 if mode == "merge" else 2, "v": value}], schema).to_batches()
        sql_commit.commit(tables, declared, sql_commit.BatchedRows(schema, rows))

    with pytest.raises(LoadRefusedError, match="rejected 1 row"):
        load(altered)
    assert read(tables, "SELECT v FROM t")["v"].null_count == 1
    load(fits)
    assert read(tables, "SELECT v FROM t WHERE v IS NOT NULL").num_rows == 1


def test_texts_differ_by_spaces_and_case(tables: MySQLTables) -> None:
    """Also where the column's collation takes them for the same."""
    run(
        tables,
        "CREATE TABLE t (k VARCHAR(20) COLLATE utf8mb4_general_ci PRIMARY KEY, v TEXT COLLATE utf8mb4_general_ci)",
        "INSERT INTO t VALUES ('A', 'text')",
    )
    schema = pa.schema([("k", pa.string()), ("v", pa.string())])
    for value, updated in (("text", 0), ("Text", 1), ("Text ", 1), ("Text ", 0)):
        load = Load.declare(target="t", mode="merge", keys=["k"])
        sql_commit.prepare(tables, load, schema)
        rows = pa.Table.from_pylist([{"k": "a", "v": value}], schema).to_batches()
        assert sql_commit.commit(tables, load, sql_commit.BatchedRows(schema, rows)).updated == updated


def test_a_lock_ends_with_its_transaction(make: Callable[[], MySQLTables], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_tables, "LOAD_LOCK_SECONDS", 1)
    mine, other = make(), make()
    for failing in (False, True):
        with suppress(RuntimeError), mine.driver.session("publish") as session:
            mine.lock(session, None, "t")
            with (
                pytest.raises(BusyError, match="Another load has been changing 't'"),
                other.driver.session("publish") as waiting,
            ):
                other.lock(waiting, None, "t")
            if failing:
                raise RuntimeError
        # The connection rests in the pool, its lock does not.
        with other.driver.session("publish") as session:
            other.lock(session, None, "t")


def test_temporary_tables_end_with_the_transaction(tables: MySQLTables) -> None:
    with pytest.raises(RuntimeError), tables.driver.session("publish") as session:
        tables.create_temporary(session, "stage", "i INT")
        raise RuntimeError
    with tables.driver.session("publish") as session:
        tables.create_temporary(session, "stage", "i INT")


def test_staging_does_not_commit(tables: MySQLTables) -> None:
    run(tables, "CREATE TABLE t (i INT)")
    with pytest.raises(RuntimeError), tables.driver.session("publish") as session:
        session.run("INSERT INTO t VALUES (1)")
        tables.create_temporary(session, "stage", "i INT")
        assert tables.create_temporary_as(session, "more", "SELECT 1 AS i UNION ALL SELECT 2") == 2
        tables.drop_temporary(session, "stage")
        raise RuntimeError
    assert read(tables, "SELECT i FROM t").num_rows == 0


def test_identity(make: Callable[[], MySQLTables], shared_server: Callable[[str], servers.Server]) -> None:
    assert make().identity() == make().identity()
    with shared_server("mysql").database() as url:
        other = MySQLTables(weft.connect(url=url))
        assert other.identity() != make().identity()
        other.close()


def test_a_wider_type_changes_nothing_else(tables: MySQLTables) -> None:
    """MODIFY COLUMN takes the whole definition: what it does not repeat is lost."""
    run(
        tables,
        "CREATE TABLE t (id INT NOT NULL AUTO_INCREMENT PRIMARY KEY, "
        "`n``1` SMALLINT UNSIGNED NOT NULL DEFAULT 7 COMMENT 'it''s\n`s` (a) \\\\' CHECK (`n``1` > 0), "
        "s VARCHAR(50) COLLATE utf8mb4_general_ci NOT NULL DEFAULT 'x,\n  `s` int', "
        "l VARCHAR(3) CHARACTER SET latin1, f DOUBLE NOT NULL DEFAULT 1.5 COMMENT 'float32')",
    )
    wider = [pa.field("id", pa.int64()), pa.field("n`1", pa.int64()), limited("s", 99), limited("l", 9)]
    declared = Declared(schema=pa.schema([*wider, pa.field("f", pa.float64())]), on_drift="evolve")
    planned = replace(Load.declare(target="t"), declared=declared)
    with tables.driver.session("read") as session:
        before = str(session.rows("SHOW CREATE TABLE t")[0][1])
        sql_commit.prepare(tables, planned, pa.schema([wider[0]]))
        after = str(session.rows("SHOW CREATE TABLE t")[0][1])
        widened = {"int(11)": "bigint(20)", "smallint(5) unsigned": "bigint(20)", "char(50)": "char(99)"}
        for old, new in (widened | {"char(3)": "char(9)", " COMMENT 'float32'": ""}).items():
            before = before.replace(old, new)
        assert after == before
        # And nothing is left to do.
        assert evolution(tables, planned, pa.schema([]), tables.columns(session, None, "t") or []) == []


def test_bytes_that_a_column_would_fill_up(tables: MySQLTables) -> None:
    """A BINARY appends zeros to them."""
    run(tables, "CREATE TABLE t (id INT PRIMARY KEY, b BINARY(2))")
    for mode, keys in (("append", []), ("merge", ["id"])):
        load = Load.declare(target="t", mode=mode, keys=keys)
        for at, value in enumerate((b"ab", b"a")):
            rows = pa.table({"id": [len(keys) * 2 + at], "b": [value]})
            sql_commit.prepare(tables, load, rows.schema)
            given = sql_commit.BatchedRows(rows.schema, rows.to_batches())
            if at:
                with pytest.raises(LoadRefusedError, match="'b' would be rounded, cut off or padded"):
                    sql_commit.commit(tables, replace(load, checkpoint_id="other"), given)
            else:
                assert sql_commit.commit(tables, load, given).inserted == 1


@pytest.mark.parametrize("mode", ["append", "merge"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [("TEXT", "é" * 35_000), ("TINYTEXT", "x" * 300), ("BLOB", b"x" * 70_000)],
    ids=["text", "tinytext", "blob"],
)
def test_a_value_that_is_too_long_is_refused(tables: MySQLTables, kind: str, value: Any, mode: str) -> None:
    """MariaDB copies a part of it, without a word, where both columns are texts of one collation, or bytes."""
    run(tables, f"CREATE TABLE short (id BIGINT PRIMARY KEY, v {kind})")
    keys = {"keys": ["id"]} if mode == "merge" else {}
    longest = value[:255] if kind == "TINYTEXT" else value[:32_767] if kind == "TEXT" else value[:65_535]
    with pytest.raises(LoadRefusedError, match=r"short rejected 1 row[\s\S]*id=1"):
        weft.load([{"id": 1, "v": value}], target="short", connection=tables.connection, mode=mode, **keys)
    weft.load([{"id": 2, "v": longest}], target="short", connection=tables.connection, mode=mode, **keys)
    with tables.driver.session("read") as session:
        assert session.rows("SELECT id, length(v) FROM short") == [
            (2, len(longest if isinstance(longest, bytes) else longest.encode()))
        ]
