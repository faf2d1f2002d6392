"""`weft.sql`: tables of every system in one query, what of them is read, and what is no query."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import weft
from weft.engine import queries, readers, result_files
from weft.errors import DeclarationError, NotFoundError
from weft.project import Project

pytestmark = pytest.mark.usefixtures("shop_and_lake")


def declare(**options: Any) -> weft.Stream:
    @weft.stream(name="orders", fields={"id": "int64", "city": "string"}, **options)
    def declared() -> None:
        pass

    return declared


def named(sql: str, default: str | None = None) -> list[str]:
    return [each.name for each in queries.understand(sql, default).tables]


# ------------------------------------------------------------------------------------------------------- without Spark


def test_tables_of_a_query() -> None:
    assert named("SELECT 1") == []
    assert named("SELECT * FROM a JOIN shop.b USING (id) WHERE x IN (SELECT y FROM lake.c.d)") == [
        "a",
        "shop.b",
        "lake.c.d",
    ]
    assert named('SELECT "q" FROM lake."2024/*.parquet" AS f, a') == ['lake."2024/*.parquet"', "a"]
    # Parts of the query, functions, hints and columns are no tables.
    assert named("WITH a AS (SELECT * FROM b), c AS (SELECT * FROM a) SELECT * FROM c JOIN a") == ["b"]
    assert named("WITH a AS (SELECT * FROM a) SELECT * FROM a") == ["a"]
    assert named("WITH RECURSIVE a AS (SELECT 1 UNION ALL SELECT * FROM a) SELECT * FROM a") == []
    assert named("SELECT (WITH b AS (SELECT 1) SELECT * FROM b) FROM c") == ["c"]
    assert named("WITH b AS (SELECT 1) SELECT * FROM shop.b") == ["shop.b"]
    assert named("SELECT /*+ BROADCAST(x) */ a.b.c FROM range(3), t x LATERAL VIEW explode(xs) AS e") == ["t"]
    assert named("FROM a SELECT 'FROM b' -- FROM c") == ["a"]


def test_only_names_of_tables_change() -> None:
    query = queries.understand(
        "SELECT é.x, shop . b.y, b.z /* shop.b */ FROM é JOIN  shop . `b` TABLESAMPLE (5 ROWS)", "shop"
    )
    assert query.naming(["V0", "V1"], str, "spark") == (
        "SELECT é.x, b.y, b.z /* shop.b */ FROM V0 AS é JOIN  V1 TABLESAMPLE (5 ROWS)"
    )


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("DROP TABLE orders", "Only queries are run here"),
        ("INSERT INTO orders SELECT 1", "Only queries"),
        ("WITH a AS (SELECT 1) INSERT INTO b SELECT * FROM a", "Only queries"),
        ("CREATE VIEW v AS SELECT 1", "Only queries"),
        ("SHOW TABLES", "Only queries"),
        ("SET a = b", "Only queries"),
        ("SELECT 1; SELECT 2", "One query is needed, not 2"),
        ("", "One query is needed, not an empty text"),
        ("SELECT FROM WHERE", "cannot be understood in line 1 at 'WHERE'"),
        ("SELECT 'a", "cannot be understood"),
    ],
)
def test_what_is_no_query(sql: str, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        weft.sql(sql)


def test_negative_parameter_begins_no_comment() -> None:
    text = queries.understand("SELECT 3 -:x AS n, 'kept' AS k").naming([], str, "spark", {"x": -1})
    assert "--" not in text and "kept" in text


def test_parameters() -> None:
    sql = "SELECT :a, x::int, xs[1:n], ':no' FROM range(3) WHERE id>:b AND :a /* :c */"
    query = queries.understand(sql)
    assert query.naming([], str, "spark", {"a": "it's", "b": 2**40, "n": 1}) == (
        "SELECT 'it\\'s', x::int, xs[1:n], ':no' FROM range(3) WHERE id>1099511627776 AND 'it\\'s' /* :c */"
    )
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert queries.understand("SELECT ?, ?").naming([], str, "spark", [Decimal("1.50"), at]) == (
        "SELECT 1.50, TIMESTAMP '2026-01-31 12:00:00.000000+00:00'"
    )
    for text, values in (("SELECT :x", {"y": 1}), ("SELECT :x", None), ("SELECT ?, ?", [1]), ("SELECT ?", {"a": 1})):
        with pytest.raises(DeclarationError, match=r"a parameter without a value: (:x|1|0)\."):
            queries.understand(text).naming([], str, "spark", values)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="A list cannot be written into a query"):
        queries.understand("SELECT :x").naming([], str, "spark", {"x": []})


def test_frames_that_there_are_none_of() -> None:
    with pytest.raises(DeclarationError, match=r"no frames 'polar'.*\n.*Did you mean 'polars'"):
        weft.sql("SELECT 1", to="polar")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_inside_a_database(kind: str, open_system: Callable[[str], AbstractContextManager[Any]]) -> None:
    with open_system(kind) as system:
        weft.connect(url=system.url, name="log")
        weft.publish_sync(declare(connection="log"), [{"id": n, "city": "Oslo"} for n in range(3)])
        weft.load([{"id": 1, "name": "x"}], target="plain", connection="log")
        sql = "SELECT orders.city, count(*) AS n FROM events.orders JOIN log.plain p ON p.id <= orders.id GROUP BY city"
        assert weft.sql(sql, pushdown=True, to="rows") == [{"city": "Oslo", "n": 2}]
        assert weft.sql("SELECT 1 AS one", pushdown=True, connection="log", to="rows") == [{"one": 1}]
        with pytest.raises(DeclarationError, match=r"lake.x is not a table of the database of all others"):
            weft.sql("SELECT * FROM log.plain, lake.x", pushdown=True)
        sql = "SELECT name FROM log.plain WHERE id = :id AND name = :name"
        assert weft.sql(sql, pushdown=True, parameters={"id": 1, "name": "x"}, to="rows") == [{"name": "x"}]
        weft.streams.close()


ROW = {
    "n": 2**63 - 1,
    "d": Decimal("0.10"),
    "f": float("nan"),
    "t": datetime(2026, 1, 31, 12, tzinfo=UTC),
    "day": date(2026, 1, 31),
    "s": 'a "b",\nc',
    "empty": "",
    "nothing": None,
    "b": b"\x00",
    "yes": True,
    "xs": [1.5, float("inf")],
}


def test_files_of_a_result(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([ROW, {}])
    for name in ("r.json", "r.ndjson", "r.csv", "r.parquet"):
        assert (
            result_files.write_rows(table.schema, table.to_batches(), tmp_path / name, result_files.format_of(name))
            == 2
        )
    first = {**ROW, "d": "0.10", "f": "NaN", "t": "2026-01-31T12:00:00+00:00", "day": "2026-01-31", "b": "AA=="}
    first["xs"] = [1.5, "Infinity"]
    assert json.loads((tmp_path / "r.json").read_text()) == [first, dict.fromkeys(first)]
    assert json.loads((tmp_path / "r.ndjson").read_text().splitlines()[0]) == first
    assert (tmp_path / "r.csv").read_text() == (
        "n,d,f,t,day,s,empty,nothing,b,yes,xs\n"
        '9223372036854775807,0.10,NaN,2026-01-31T12:00:00+00:00,2026-01-31,"a ""b"",\nc",'
        '"",,AA==,true,"[1.5, ""Infinity""]"\n'
        ",,,,,,,,,,\n"
    )
    assert pq.read_table(tmp_path / "r.parquet").column("n").to_pylist() == [2**63 - 1, None]
    result_files.write_rows(table.schema, [], tmp_path / "none.json", "json")
    assert json.loads((tmp_path / "none.json").read_text()) == []
    with pytest.raises(DeclarationError, match="more than one column 'a'"):
        result_files.write_rows(pa.schema([("a", pa.int8()), ("a", pa.int8())]), [], tmp_path / "x.csv", "csv")
    with pytest.raises(weft.StorageError, match="Cannot write a file in"):
        result_files.write_rows(table.schema, [], tmp_path / "no" / "x.csv", "csv")
    with pytest.raises(DeclarationError, match="says no format"):
        result_files.format_of("x.xlsx")
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".")) == []


# ---------------------------------------------------------------------------------------------------------- with Spark


def test_all_systems_in_one_query(
    spark: Any, open_system: Callable[[str], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    with (
        open_system("postgres") as postgres,
        open_system("mysql") as mysql,
        open_system("redis") as redis,
    ):
        for name, url in (
            ("pg", postgres.url),
            ("my", mysql.url),
            ("red", redis.url),
            ("duck", f"duckdb:///{tmp_path / 'd.db'}"),
        ):
            weft.connect(url=url, name=name)
        weft.register_connection(weft.DeltaLocalConnection("delta", name="delta"))
        weft.publish_sync(declare(connection="red"), [{"id": n, "city": f"c{n % 3}"} for n in range(9)])
        for number, name in enumerate(
            ("pg.sales.a", "my.sales.b", "duck.sales.c", "shop.d", "delta.raw.e", "lake.raw.f")
        ):
            connection, target = name.split(".", 1)
            weft.load([{"city": f"c{n}", "n": n + number} for n in range(3)], target=target, connection=connection)
        pq.write_table(pa.table({"city": ["c1", "c2"], "n": [10, 20]}), "g.parquet")
        sql = """
            SELECT o.city, count(*) AS orders, max(a.n) a, max(b.n) b, max(c.n) c, max(d.n) d, max(e.n) e, max(f.n) f,
                max(g.n) g
            FROM events.orders o JOIN pg.sales.a USING (city) JOIN my.sales.b USING (city)
            JOIN duck.sales.c USING (city) JOIN shop.d USING (city) JOIN delta.raw.e USING (city)
            JOIN lake.raw.f USING (city) JOIN "g.parquet" g USING (city)
            WHERE o._weft_rowid > :after GROUP BY o.city ORDER BY o.city
        """
        rows = weft.sql(sql, parameters={"after": 0}, to="rows")
        assert [list(row.values()) for row in rows] == [
            ["c1", 3, 1, 2, 3, 4, 5, 6, 10],
            ["c2", 3, 2, 3, 4, 5, 6, 7, 20],
        ]
        weft.streams.close()


def test_only_what_is_used_is_read(plain_spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weft.publish_sync(declare(connection="shop"), [{"id": n, "city": f"c{n % 3}"} for n in range(10)])
    weft.load([{"id": n, "wide": "x" * 10, "n": n} for n in range(5)], target="t", connection="shop")

    def read_by(sql: str) -> tuple[list[dict[str, Any]], str]:
        frame = weft.sql(sql, to="spark")
        return frame.toArrow().to_pylist(), frame._jdf.queryExecution().executedPlan().toString()

    def scanned(plan: str) -> set[str]:
        return {line.partition("[")[2].partition("]")[0] for line in plan.splitlines() if "BatchScan" in line}

    rows, plan = read_by("SELECT a.n FROM shop.t a JOIN shop.t b ON a.id = b.n WHERE b.n >= 3 ORDER BY 1")
    assert rows == [{"n": 3}, {"n": 4}]
    assert all("wide" not in each for each in scanned(plan))
    rows, plan = read_by("SELECT count(*) AS c FROM shop.t")
    assert rows == [{"c": 5}] and all(each.count("#") == 1 for each in scanned(plan))
    rows, plan = read_by("SELECT count(*) AS c FROM orders WHERE _weft_rowid BETWEEN 4 AND 6")
    assert rows == [{"c": 3}] and all("city" not in each for each in scanned(plan))
    rows, _ = read_by("WITH t AS (SELECT n FROM shop.t) SELECT (SELECT max(id) FROM orders) AS m, t.* FROM t LIMIT 1")
    assert rows == [{"m": 9, "n": 0}]
    # The branches of a union are joined by place, and a loop forgets no filter.
    rows, _ = read_by("SELECT id, wide FROM shop.t WHERE id < 1 UNION ALL SELECT n, wide FROM shop.t WHERE n > 3")
    assert rows == [{"id": 0, "wide": "x" * 10}, {"id": 4, "wide": "x" * 10}]
    rows, _ = read_by(
        "WITH RECURSIVE r AS (SELECT id, wide FROM shop.t WHERE id = 1 UNION ALL "
        "SELECT t.id, t.wide FROM shop.t t JOIN r ON t.id = r.id + 1) SELECT * FROM r ORDER BY id"
    )
    assert rows == [{"id": number, "wide": "x" * 10} for number in range(1, 5)]
    # A subquery may name columns that nobody uses.
    rows, plan = read_by("SELECT n FROM (SELECT n, wide, id FROM shop.t) WHERE n = 2")
    assert rows == [{"n": 2}] and all("wide" not in each for each in scanned(plan))


def test_a_stream_is_read_from_the_offset_that_a_filter_names(streams: Project) -> None:
    orders = declare()
    weft.publish_sync(orders, [{"id": n} for n in range(10)])
    reader = readers.stream_reader(orders)
    parts = [(reader.after, 4), (4, 8), (8, reader.upto)]
    ROWID, AT = ("_weft_rowid",), ("_weft_published_at",)
    first = reader.after

    def within(*comparisons: Any) -> list[tuple[int, int]]:
        return reader.within(parts, comparisons)

    assert within() == parts
    assert within((ROWID, ">", 5)) == [(5, 8), (8, reader.upto)]
    assert within((ROWID, ">=", 5), (ROWID, "<", 7)) == [(4, 6)]
    assert within((ROWID, "=", 5)) == [(4, 5)]
    assert within((ROWID, "<=", 2)) == [(first, 2)]
    assert within((ROWID, ">", 100)) == []
    assert within((("id",), ">", 5)) == parts
    now = datetime.now(UTC)
    assert within((AT, ">=", now - timedelta(hours=1))) == parts
    assert within((AT, ">", now + timedelta(hours=1))) == []
    assert within((AT, "<", now - timedelta(hours=1))) == parts


def test_results_as_frames(plain_spark: Any) -> None:
    weft.load([{"id": 1, "n": 2**62}, {"id": 2, "n": None}], target="t", connection="shop")
    sql = 'SELECT ID, "n" FROM shop.t ORDER BY id'
    assert weft.sql(sql).to_pylist() == [{"ID": 1, "n": 2**62}, {"ID": 2, "n": None}]
    assert weft.sql(sql, to="polars")["n"].to_list() == [2**62, None]
    assert weft.sql(sql, to="pandas")["n"].tolist()[0] == 2**62
    assert weft.sql(sql, to="spark").count() == 2
    assert weft.sql("SELECT ? AS x, ? AS y", to="rows", parameters=[1, "a"]) == [{"x": 1, "y": "a"}]
    twins = "SELECT a.id, b.id FROM shop.t a JOIN shop.t b USING (id)"
    assert weft.sql(twins).num_columns == 2
    with pytest.raises(DeclarationError, match="more than one column 'id'"):
        weft.sql(twins, to="rows")
    # Two columns whose names differ by case alone.
    weft.load([{"a": 1, "A": 2}], target="twins", connection="lake")
    assert weft.sql('SELECT "A", a FROM lake.twins', to="rows") == [{"A": 2, "a": 1}]


def test_what_a_query_gets_wrong(plain_spark: Any) -> None:
    weft.load([{"id": 1, "city": "Oslo"}], target="t", connection="shop")
    for sql, message in (
        ("SELECT cty FROM shop.t", r"do not have: cty.\n.*Did you mean 'city'"),
        ('SELECT * FROM shop.t WHERE city = "Oslo"', r"do not have: Oslo.\n.*single quotes: 'Oslo'"),
        ("SELECT cnt(id) FROM shop.t", r"a function that is not there: cnt.\n"),
    ):
        with pytest.raises(DeclarationError, match=message):
            weft.sql(sql)
    with pytest.raises(NotFoundError, match=r"no table shop.tt .*\n.*shop.t\?"):
        weft.sql("SELECT * FROM shop.tt")
    with pytest.raises(weft.WeftError, match=r"could not run the query: .*DIVIDE_BY_ZERO"):
        weft.sql("SELECT 1 / (id - 1) FROM shop.t")


def test_a_result_goes_to_a_file_in_its_order(plain_spark: Any, tmp_path: Path) -> None:
    with sqlite3.connect("shop.db") as database:
        database.execute("CREATE TABLE t (id INTEGER)")
        database.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(500)])
    database.close()
    frame = weft.sql("SELECT id FROM shop.t ORDER BY id DESC", to="spark")
    assert result_files.write_frame(frame, tmp_path / "t.parquet", "parquet") == 500
    assert pq.read_table(tmp_path / "t.parquet").column("id").to_pylist() == list(range(499, -1, -1))
    assert result_files.write_frame(frame.limit(0), tmp_path / "t.csv", "csv") == 0
    assert (tmp_path / "t.csv").read_text() == "id\n"
    bad = weft.sql("SELECT 1 / (id - 250) AS x FROM shop.t", to="spark")
    with pytest.raises(weft.WeftError, match="DIVIDE_BY_ZERO"):
        result_files.write_frame(bad, tmp_path / "bad.csv", "csv")
    assert not (tmp_path / "bad.csv").exists()
