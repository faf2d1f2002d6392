"""weft.load: what it takes, which way it goes, what it reports and refuses."""

from __future__ import annotations

import datetime as dt
import functools
import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import weft
import weft.streams
from weft.engine import result_files
from weft.engine.load import open_tables
from weft.project import Project, use
from weft.systems.sql.tables import Slice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = [{"id": 1, "name": "a", "total": 1.5}, {"id": 2, "name": None, "total": 2.5}]


@pytest.fixture(autouse=True)
def own_project(project: Path) -> Iterator[None]:
    """A project without the streams of other tests."""
    with use(Project()) as fresh:
        yield
        weft.streams.close(fresh)


@pytest.fixture
def raw(own_project: None) -> weft.SQLiteConnection:
    """The connection `raw`, with the table `orders`."""
    connection = weft.SQLiteConnection("raw.db", name="raw")
    weft.register_connection(connection, replace=True)
    weft.load(ROWS, target="orders", connection="raw")
    return connection


@pytest.fixture
def warehouse(own_project: None) -> weft.SQLiteConnection:
    """The connection `warehouse`, empty."""
    connection = weft.SQLiteConnection("warehouse.db", name="warehouse")
    weft.register_connection(connection, replace=True)
    return connection


def rows(connection: Any, table: str = "orders") -> list[dict[str, Any]]:
    tables = open_tables(connection)
    try:
        sql = f"SELECT * FROM {tables.table(None, table)}"
        return [row for batch in tables.read(Slice(sql), tables.describe(sql)) for row in batch.to_pylist()]
    finally:
        tables.close()


def test_the_first_example(plain_spark: SparkSession, raw: Any, warehouse: Any) -> None:
    def load() -> weft.LoadResult:
        return weft.load(
            "SELECT id, name, total FROM orders",
            source="raw",
            target=("main", "orders"),
            connection="warehouse",
            mode="merge",
            keys=["id"],
        )

    first, second = load(), load()
    assert (first.rows_read, first.inserted, first.unchanged, first.engine) == (2, 2, 0, "spark")
    assert (second.rows_read, second.inserted, second.updated, second.unchanged) == (2, 0, 0, 2)
    assert first.seconds > 0 and first.bytes > 0
    assert rows(warehouse) == ROWS


class Batches:
    """Things that a load takes, all with the rows of `ROWS`."""

    table = pa.Table.from_pylist(ROWS)
    dicts = ROWS
    pandas = pd.DataFrame({"id": [1, 2], "name": ["a", None], "total": [1.5, 2.5]})
    polars = pl.DataFrame(ROWS)
    lazy = pl.DataFrame(ROWS).lazy()
    reader = table.to_reader

    @staticmethod
    def batches() -> Iterator[pa.RecordBatch]:
        yield from pa.Table.from_pylist(ROWS).to_batches(max_chunksize=1)

    @staticmethod
    def frames() -> Iterator[pl.DataFrame]:
        for row in ROWS:
            yield pl.DataFrame([row], schema={"id": pl.Int64, "name": pl.String, "total": pl.Float64})

    @staticmethod
    def one_by_one() -> Iterator[dict[str, Any]]:
        yield from ROWS


@pytest.mark.parametrize(
    "what", ["table", "dicts", "pandas", "polars", "lazy", "reader", "batches", "frames", "one_by_one"]
)
def test_what_this_process_has_needs_no_spark(warehouse: Any, what: str) -> None:
    data = getattr(Batches, what)
    result = weft.load(data() if callable(data) else data, target="orders", connection="warehouse")
    assert (result.inserted, result.engine) == (2, "pushdown")
    assert rows(warehouse) == ROWS


def test_spark_writes_what_it_is_given(plain_spark: SparkSession, raw: Any, warehouse: Any) -> None:
    frame = plain_spark.createDataFrame(ROWS, "id long, name string, total double")
    assert weft.load(frame, target="one", connection="warehouse").inserted == 2
    assert weft.load(pa.Table.from_pylist(ROWS), target="two", connection="warehouse", engine="spark").inserted == 2
    several = frame.repartition(4).unionAll(frame.filter("id > 5"))
    assert weft.load(several, target="three", connection="warehouse").engine == "spark"
    empty = weft.load(frame.filter("id > 5"), target="four", connection="warehouse")
    assert (empty.rows_read, empty.inserted) == (0, 0)
    for table in ("one", "two", "three"):
        assert sorted(rows(warehouse, table), key=lambda row: row["id"]) == ROWS
    assert rows(warehouse, "four") == []


def test_columns_with_any_sign_in_their_names(plain_spark: SparkSession, warehouse: Any, tmp_path: Path) -> None:
    names = ["a.b", "c`d", "a", 'e"f']
    given = [dict.fromkeys(names, number) for number in range(3)]
    frame = plain_spark.createDataFrame([tuple(row.values()) for row in given], "a long, b long, c long, d long")
    frame = frame.toDF(*names)
    merged = weft.load(frame, target="odd", connection="warehouse", mode="merge", keys=["a.b"])
    assert (merged.inserted, merged.engine) == (3, "spark")
    assert rows(warehouse, "odd") == given
    read = weft.read("SELECT * FROM odd", source="warehouse", columns=["a.b", "c`d"])
    assert sorted(map(tuple, read.collect())) == [(number, number) for number in range(3)]
    result_files.write_frame(frame.orderBy("a"), tmp_path / "odd.ndjson", "ndjson")
    assert [json.loads(line) for line in (tmp_path / "odd.ndjson").read_text().splitlines()] == given


def test_sql_between(plain_spark: SparkSession, raw: Any, warehouse: Any) -> None:
    result = weft.load(
        "SELECT * FROM orders",
        source="raw",
        target="totals",
        connection="warehouse",
        transform_sql="SELECT count(*) AS n, sum(total) AS total FROM source WHERE id < 10",
    )
    assert (result.rows_read, result.engine) == (1, "spark")
    assert rows(warehouse, "totals") == [{"n": 2, "total": 4.0}]


def test_a_variant_becomes_json(plain_spark: SparkSession, warehouse: Any) -> None:
    weft.load(
        [{"id": 1, "data": '{"a": [1, null]}'}, {"id": 2, "data": None}],
        target="variants",
        connection="warehouse",
        transform_sql='SELECT id, parse_json(data) AS "the data" FROM source',
    )
    assert [row["the data"] for row in rows(warehouse, "variants")] == ['{"a":[1,null]}', None]


def test_one_database_is_pushed_down(raw: Any) -> None:
    result = weft.load("SELECT * FROM orders WHERE id = 2", target="two", connection="raw")
    assert (result.rows_read, result.inserted, result.engine) == (1, 1, "pushdown")
    # The same file under another name is the same database.
    again = weft.connect(url=f"sqlite:///{Path('raw.db').absolute()}")
    assert weft.load("SELECT * FROM orders", source=again, target="three", connection="raw").engine == "pushdown"
    assert rows(raw, "two") == ROWS[1:]


def test_a_forced_engine(plain_spark: SparkSession, raw: Any, warehouse: Any) -> None:
    sql = "SELECT * FROM orders"
    assert weft.load(sql, target="two", connection="raw", engine="spark").engine == "spark"
    assert rows(raw, "two") == ROWS
    with pytest.raises(weft.DeclarationError, match="cannot be pushed down"):
        weft.load(sql, source="raw", target="two", connection="warehouse", engine="pushdown")
    with pytest.raises(weft.DeclarationError, match="There is no engine 'duck'"):
        weft.load(sql, target="two", connection="raw", engine="duck")


def test_a_stream_is_a_source(plain_spark: SparkSession, warehouse: Any) -> None:
    @weft.stream(name="clicks", fields={"user": "string", "n": "int64", "id": "uuid", "at": "timestamp"})
    def clicks() -> None: ...

    number, now = uuid.uuid4(), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    weft.publish_sync("clicks", [{"user": f"u{i}", "n": i, "id": number, "at": now, "more": i} for i in range(10)])
    for source, table in (("clicks", "one"), (clicks, "two")):
        result = weft.load(source, target=table, connection="warehouse")
        assert (result.rows_read, result.engine) == (10, "spark")
        found = rows(warehouse, table)
        assert [(row["user"], row["n"], row["id"], row["at"]) for row in found][3] == ("u3", 3, str(number), now)
        assert found[3]["more"] == 3
        assert {"_weft_rowid", "_weft_published_at", "_weft_publish_id"} <= set(found[0])


def test_a_key_makes_it_happen_once(plain_spark: SparkSession, raw: Any, warehouse: Any) -> None:
    def load(data: Any, **more: Any) -> weft.LoadResult:
        return weft.load(data, target="orders", connection="warehouse", commit_key="2026-03-01", **more)

    assert load("SELECT * FROM orders", source="raw").inserted == 2
    again = load("SELECT * FROM orders", source="raw")
    assert (again.replayed, again.inserted, again.rows_read) == (True, 0, 0)
    assert load(ROWS).replayed
    assert rows(warehouse) == ROWS
    # The key belongs to the table.
    assert weft.load(ROWS, target="others", connection="warehouse", commit_key="2026-03-01").inserted == 2


async def test_from_a_coroutine(warehouse: Any) -> None:
    assert (await weft.load_async(ROWS, target="orders", connection="warehouse")).inserted == 2


def test_values_keep_their_types(warehouse: Any) -> None:
    row = {
        "d": Decimal("12.340"),
        "u": uuid.UUID(int=7),
        "day": dt.date(2026, 3, 1),
        "at": dt.datetime(2026, 3, 1, tzinfo=dt.UTC),
        "local": dt.datetime(2026, 3, 1, 12),
        "b": b"\x00\xff",
        "nested": {"a": [1, 2]},
        "none": None,
        "yes": True,
    }
    weft.load([row], target="t", connection="warehouse")
    (found,) = rows(warehouse, "t")
    assert found == {**row, "u": str(row["u"]), "nested": '{"a":[1,2]}'}


def test_an_empty_source_changes_nothing(raw: Any) -> None:
    assert weft.load([], target="orders", connection="raw").rows_read == 0
    assert weft.load([], target="nothing", connection="raw").rows_read == 0
    with pytest.raises(weft.LoadRefusedError, match="would empty the table"):
        weft.load([], target="orders", connection="raw", mode="truncate")
    assert rows(raw) == ROWS
    assert weft.load([], target="orders", connection="raw", mode="truncate", allow_empty=True).deleted == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "upsert"}, "There is no mode 'upsert'"),
        ({"mode": "mergee", "keys": ["id"]}, "Did you mean 'merge'"),
        ({"mode": "merge"}, "needs keys"),
        ({"keys": ["id"]}, "takes no keys"),
        ({"mode": "merge", "keys": ["idd"]}, "has no column 'idd'"),
        ({"mode": "merge", "keys": ["id"], "handle_deletes": "soft"}, "cannot handle deletes"),
        ({"handel_deletes": "hard"}, "Did you mean 'handle_deletes'"),
        ({"mode": "merge", "keys": ["id"], "ttl_seconds": 5}, "ttl_seconds is an option of scd2"),
        ({"mode": "scd2", "keys": ["id"], "ttl_seconds": "5"}, "must be a number of seconds above 0, not '5'"),
        ({"mode": None}, "There is no mode None"),
        ({"mode": "truncate", "allow_empty": "no"}, "allow_empty must be True or False, not 'no'"),
        ({"commit_key": 5}, "A commit_key has 1 to 200 characters"),
        ({"batch_id": "x"}, "batch_id must be a number of 64 bits, not 'x'"),
        ({"batch_id": 2**63}, "batch_id must be a number"),
        ({"schema": "analytics"}, "has no option 'schema'"),
        ({"checkpoint_id": "a"}, "has no option 'checkpoint_id'"),
        ({"partition_by": "id"}, "has no option 'partition_by'"),
        ({"on_bad_rows": "ignore"}, "'fail' or 'quarantine'"),
        ({"target": ("a", "b", "c")}, "A target is"),
        ({"connection": "nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(project: Path, arguments: dict[str, Any], message: str) -> None:
    options = {"target": "orders", "connection": weft.SQLiteConnection("w.db"), **arguments}
    with pytest.raises((weft.DeclarationError, weft.NotFoundError), match=message):
        weft.load(ROWS, **options)
    assert not Path("w.db").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "cannot read a value of type int"),
        ({"id": 1}, "list of dicts"),
        ("orders", "neither SQL nor a path nor a declared stream"),
        ("  ", "empty text"),
        ("SELECT 1 AS a; SELECT 2 AS a;", "several statements"),
        ([{"a": 1}, {"a": "x"}], "'a' are of no one type"),
        pytest.param(
            [{"a": functools.reduce(lambda inner, _: {"a": inner}, range(5000), {})}, {"a": [1]}],
            "'a' is nested too deeply",
            id="deep",
        ),
    ],
)
def test_what_is_no_source(warehouse: Any, data: Any, message: str) -> None:
    with pytest.raises(weft.DeclarationError, match=message):
        weft.load(data, target="orders", connection="warehouse")


def test_errors_of_a_task_are_errors_of_ours(plain_spark: SparkSession, raw: Any, warehouse: Any) -> None:
    weft.load([*ROWS, ROWS[0]], target="doubled", connection="raw")
    with pytest.raises(weft.LoadRefusedError, match=r"share a key: id=1 \(2 rows\)") as caught:
        weft.load("SELECT * FROM doubled", source="raw", target="t", connection="warehouse", mode="merge", keys=["id"])
    assert caught.value.hint is not None and "deduplicate_by" in caught.value.hint
    with pytest.raises(weft.WeftError, match="no such column: nmae"):
        weft.load("SELECT nmae FROM orders", source="raw", target="t", connection="warehouse")
    with pytest.raises(weft.WeftError, match="nothing_here"):
        weft.load(
            "SELECT * FROM orders",
            source="raw",
            target="t",
            connection="warehouse",
            transform_sql="SELECT nothing_here FROM source",
        )


def test_read_gives_a_frame(plain_spark: SparkSession, raw: Any) -> None:
    frame = weft.read("SELECT * FROM orders", source="raw")
    assert frame.schema.simpleString() == "struct<id:bigint,name:string,total:double>"
    assert [row.asDict() for row in frame.collect()] == ROWS
    assert weft.read("SELECT * FROM orders", source="raw", columns=["name"]).columns == ["name"]
    # Spark is told that the database applies this one.
    filtered = frame.filter("id = 2 AND name IS NULL AND total > 1")
    assert filtered.count() == 1
