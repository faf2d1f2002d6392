"""`weft.load` and `weft.read` with files and Delta tables on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import weft
from engine.test_pairs import KINDS, database, every_edge  # noqa: F401
from weft import (
    ConnectionFailedError,
    DeclarationError,
    DeltaLocalConnection,
    NotFoundError,
    ObjectStoreLocalConnection,
    WeftError,
)
from weft.columns import hint_of, is_nested
from weft.engine import config
from weft.engine.load import open_tables
from weft.engine.readers import opened_tables
from weft.testing import table_rows

ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]

# What reads knows nothing of what writes.


def found(path: str, source: Any = None) -> list[tuple[Any, ...]]:
    return sorted((row.id, row.name) for row in weft.read(path, source=source).collect())


@pytest.mark.full
def test_from_rows_to_files_to_delta_to_files(spark: Any) -> None:
    lake = ObjectStoreLocalConnection("lake", format="csv", csv_delimiter=";")
    delta = DeltaLocalConnection("delta")
    done = weft.load(ROWS, target=("sales", "orders"), connection=lake, commit_key="one")
    assert (done.inserted, done.engine) == (2, "spark")
    assert done.bytes > 0
    assert weft.load(ROWS, target=("sales", "orders"), connection=lake, commit_key="one").replayed
    assert found("sales/orders", lake) == [(1, "a"), (2, "b")]
    # By the path alone: the table's log says what belongs to it, and which types.
    assert found("lake/sales/orders") == [(1, "a"), (2, "b")]

    done = weft.load(
        "sales/orders", source=lake, target=("sales", "orders"), connection=delta, mode="merge", keys=["id"]
    )
    assert (done.rows_read, done.inserted) == (2, 2)
    done = weft.load([{"id": 2, "name": "c"}], target=("sales", "orders"), connection=delta, mode="merge", keys=["id"])
    assert (done.inserted, done.updated) == (0, 1)
    assert found("sales/orders", delta) == found("delta/sales/orders") == [(1, "a"), (2, "c")]

    done = weft.load(
        "sales/orders",
        source=delta,
        target="copy",
        connection=ObjectStoreLocalConnection("lake"),
        transform_sql="SELECT id, upper(name) AS name FROM source",
    )
    assert found("lake/copy") == [(1, "A"), (2, "C")]


LINES = [
    *({"id": 1, "doc": '{"b":1, "a":1e400}', "docs": '[{"a":1},{"b":-0.0}]'}, {"id": 2, "doc": "{}", "docs": "[]"}),
    {"id": 3, "doc": '{"c":12345678901234567890123,"é":"\\u00e9","d":1.10}', "docs": None},
    {"id": 4, "doc": None, "docs": '[{"a":[{"x":1},{"y":null}]}]'},
]


@pytest.mark.parametrize("by", ["path", "connection", "table"])
def test_json_of_files_is_stored_as_it_is_there(plain_spark: Any, tmp_path: Path, by: str) -> None:
    """Objects of one type would have the keys of all, and floats for numbers that are none."""
    (tmp_path / "docs").mkdir()
    rows = ({name: "null" if value is None else value for name, value in row.items()} for row in LINES)
    lines = ('{{"id":{id},"doc":{doc},"docs":{docs}}}\n'.format(**row) for row in rows)
    (tmp_path / "docs" / "a.ndjson").write_text("".join(lines))
    lite = weft.SQLiteConnection(str(tmp_path / "lite.db"), name="lite")
    if by == "table":
        weft.load([{"id": 0, "doc": "{}", "docs": "[]"}], target="t", connection=lite)
    lake = None if by == "path" else ObjectStoreLocalConnection(str(tmp_path), format="json_lines")
    weft.load(str(tmp_path / "docs") if lake is None else "docs", source=lake, target="t", connection=lite)
    found = sorted(table_rows("t", connection=lite), key=itemgetter("id"))
    assert [row for row in found if row["id"]] == LINES
    with opened_tables(lite) as tables:
        doc = tables.describe("SELECT * FROM t").field("doc")
    assert hint_of(doc) == (None if by == "table" else "json")


@pytest.mark.parametrize("ending", ["csv", "ndjson"])
def test_numbers_of_files_keep_their_digits(plain_spark: Any, tmp_path: Path, ending: str) -> None:
    """In a column of decimals or texts: the type of the column in the file would be a float."""
    values = [("12345678901234567890.123456789012345678", "1.50"), ("0.10", "12345678901234567890.125"), ("1e3", "7")]
    lines = [f'{{"id":{n},"amount":{amount},"note":{note}}}' for n, (amount, note) in enumerate(values)]
    if ending == "csv":
        lines = ["id,amount,note", *(f"{n},{amount},{note}" for n, (amount, note) in enumerate(values))]
    path = tmp_path / f"sums.{ending}"
    path.write_text("".join(f"{line}\n" for line in lines))
    lite = weft.SQLiteConnection(str(tmp_path / "lite.db"), name="lite")
    with opened_tables(lite) as tables, tables.driver.session("publish") as session:
        for name in ("plain", "passed"):
            session.run(f"CREATE TABLE {name} (id BIGINT, amount DECIMAL_TEXT(38,18), note TEXT)")
    weft.load(str(path), target="plain", connection=lite)
    weft.load(str(path), target="passed", connection=lite, transform_sql="SELECT id, amount, note FROM source")
    weft.load(str(path), target="new", connection=lite)
    expected = [(n, Decimal(amount), note) for n, (amount, note) in enumerate(values)]
    for name in ("plain", "passed"):
        found = sorted(table_rows(name, connection=lite), key=itemgetter("id"))
        assert [(row["id"], row["amount"], row["note"]) for row in found] == expected
    assert {type(row["amount"]) for row in table_rows("new", connection=lite)} == {float}
    path.write_text(path.read_text().replace("0.10", "0.1234567890123456789"))
    with pytest.raises(WeftError, match="id=1"):
        weft.load(str(path), target="plain", connection=lite)


def test_rows_that_pass_through_spark_keep_their_objects(plain_spark: Any, tmp_path: Path) -> None:
    lite = weft.SQLiteConnection(str(tmp_path / "lite.db"), name="lite")
    docs: list[Any] = [{"b": 1}, {"a": [{"c": 1}, {"d": 2}]}, {}, None]
    weft.load([{"id": n, "doc": doc} for n, doc in enumerate(docs)], target="t", connection=lite, engine="spark")
    found = sorted(table_rows("t", connection=lite), key=itemgetter("id"))
    assert [None if row["doc"] is None else json.loads(row["doc"]) for row in found] == docs


@pytest.mark.parametrize("form", ["rows", "lines"])
def test_sql_that_passes_objects_on_keeps_their_keys(
    plain_spark: Any, tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SQL that reads them needs one type, in which each has the keys of all: that is said."""
    docs: list[Any] = [{"b": 1}, {"a": [{"c": 1}, {"d": 2}]}, {}, None]
    rows = [{"id": n, "doc": doc} for n, doc in enumerate(docs)]
    (tmp_path / "docs.ndjson").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    data = rows if form == "rows" else str(tmp_path / "docs.ndjson")
    lite = weft.SQLiteConnection(str(tmp_path / "lite.db"), name="lite")

    def loaded(table: str, sql: str) -> list[Any]:
        weft.load(data, target=table, connection=lite, transform_sql=sql)
        found = sorted(table_rows(table, connection=lite), key=itemgetter("id"))
        return [None if row["v"] is None else json.loads(row["v"]) for row in found]

    assert loaded("passed", "SELECT id, s.doc AS v FROM source s WHERE doc IS NOT NULL") == docs[:3]
    assert not [each for each in caplog.messages if "keys of all" in each]
    assert loaded("read", "SELECT id, coalesce(doc, doc) AS v FROM source")[0] == {"a": None, "b": 1}
    (said,) = (each for each in caplog.messages if "keys of all" in each)
    assert "'v' of" in said


def test_refused_before_spark_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.engine import session

    monkeypatch.setattr(session, "spark", lambda **_: pytest.fail("Spark was started"))
    lake = ObjectStoreLocalConnection("lake")
    with pytest.raises(DeclarationError, match=r"mode 'merge'[\s\S]*Modes of files: append, truncate"):
        weft.load(ROWS, target="orders", connection=lake, mode="merge", keys=["id"])
    with pytest.raises(DeclarationError, match="runs on Spark"):
        weft.load(ROWS, target="orders", connection=lake, engine="pushdown")
    monkeypatch.setattr(session, "running", lambda: None)
    monkeypatch.setenv("WEFT_SPARK_MASTER", "spark://elsewhere:7077")
    assert not config.read_settings(Path()).is_local
    for connection in (lake, DeltaLocalConnection("lake")):
        with pytest.raises(DeclarationError, match=r"target of this load, .* on this machine[\s\S]*WEFT_SPARK_MASTER"):
            weft.load(ROWS, target="orders", connection=connection)


def test_nothing_there(spark: Any) -> None:
    with pytest.raises(NotFoundError, match="no Delta table 'sales/orders'"):
        weft.read("sales/orders", source=DeltaLocalConnection("delta"))
    with pytest.raises(NotFoundError, match="no parquet files"):
        weft.read("nothing/here")
    with pytest.raises(DeclarationError, match="gs://"):
        weft.read("gs://bucket/x.csv")


def test_a_folder_that_cannot_be_made(spark: Any) -> None:
    Path("lake").write_text("a file in its place")
    with pytest.raises(ConnectionFailedError, match=r"Cannot open the connection 'lake' .*Not a directory"):
        weft.load(ROWS, target="orders", connection=ObjectStoreLocalConnection("lake", name="lake"))


@pytest.mark.full
@pytest.mark.parametrize("target", ["parquet", "delta"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_task_writes_what_spark_would(
    spark: Any,
    database: Callable[[str], Any],  # noqa: F811
    kind: str,
    target: str,
) -> None:
    source = database(kind)
    lake: Any = DeltaLocalConnection("lake") if target == "delta" else ObjectStoreLocalConnection("lake")
    data = every_edge(kind)
    flat = data.select([field.name for field in data.schema if not is_nested(field.type)])
    weft.load(flat, target="t", connection=source)
    sql = "SELECT * FROM t ORDER BY n"
    # A name that Delta maps needs its own writer.
    names = [name if target == "parquet" else f"c{number}" for number, name in enumerate(flat.column_names)]
    tables = open_tables(source)
    if target == "delta":
        listed = ", ".join(f"{tables.quote(old)} AS {new}" for old, new in zip(flat.column_names, names, strict=True))
        sql = f"SELECT {listed} FROM t ORDER BY {names[-1]}"
    tables.close()
    for name, options in (("theirs", {"transform_sql": "SELECT * FROM source"}), ("ours", {})):
        result = weft.load(sql, source=source, target=name, connection=lake, **options)
        assert (result.rows_read, result.inserted, result.engine) == (flat.num_rows, flat.num_rows, "spark")
    theirs, ours = (weft.read(name, source=lake).toArrow() for name in ("theirs", "ours"))
    assert ours.schema == theirs.schema
    assert ours.column_names == names
    assert sorted(map(repr, ours.to_pylist())) == sorted(map(repr, theirs.to_pylist()))
    for name, writer in (("theirs", "parquet-mr"), ("ours", "parquet-cpp")):
        for file in Path("lake", name).glob("*.parquet"):
            assert pq.ParquetFile(file).metadata.created_by.startswith(writer)


@pytest.mark.brief("parquet")
@pytest.mark.parametrize("target", ["parquet", "delta"])
def test_a_stream_in_parts(spark: Any, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    from weft.engine import readers

    monkeypatch.setattr(readers, "_EVENTS_A_PART", 10)
    lake: Any = DeltaLocalConnection("lake") if target == "delta" else ObjectStoreLocalConnection("lake")
    name = f"orders_{target}"

    @weft.stream(name=name, fields={"id": "int64"})
    def orders() -> None: ...

    weft.publish_sync(name, [{"id": number} for number in range(25)])
    assert weft.load(name, target="orders", connection=lake, commit_key="x").inserted == 25
    assert weft.load(name, target="orders", connection=lake, commit_key="x").replayed
    # One for each core of the session.
    assert len(list(Path("lake/orders").glob("*.parquet"))) == 2
    assert sorted(row.id for row in weft.read("orders", source=lake).collect()) == list(range(25))


def test_a_source_that_fails_in_the_middle(spark: Any, database: Callable[[str], Any]) -> None:  # noqa: F811
    source = database("postgres")
    weft.load([{"id": number} for number in range(10)], target="t", connection=source)
    for lake in (ObjectStoreLocalConnection("lake"), DeltaLocalConnection("delta")):
        with pytest.raises(weft.WeftError, match="division by zero"):
            weft.load("SELECT 1 / (id - 5) AS x FROM t", source=source, target="orders", connection=lake)
    assert [path for folder in ("lake", "delta") for path in Path(folder).rglob("*") if path.is_file()] == []


@pytest.mark.brief("files")
@pytest.mark.parametrize("kind", ["delta", "files"])
def test_sql_over_files_and_delta(spark: Any, kind: str) -> None:
    lake: Any = DeltaLocalConnection("lake", name="lake") if kind == "delta" else ObjectStoreLocalConnection("lake")
    for name in ("orders", "more"):
        weft.load(ROWS, target=("raw", name), connection=lake)
    sql = "SELECT o.id, upper(m.name) AS name FROM raw.orders o JOIN raw.more m USING (id) WHERE id > 1"
    shop = weft.SQLiteConnection("shop.db")
    done = weft.load(sql, source=lake, target="upper", connection=shop)
    assert (done.inserted, done.engine) == (1, "spark")
    assert weft.read("SELECT * FROM upper", source=shop).collect() == [(2, "B")]
    # From the target itself, and with a query of what it makes.
    weft.load("SELECT * FROM raw.orders", target="copy", connection=lake, transform_sql="SELECT id AS i FROM source")
    assert weft.read('SELECT max(i) AS m FROM "copy"', source=lake).collect() == [(2,)]
    if kind == "delta":
        assert (
            weft.read("WITH o AS (SELECT * FROM lake.raw.orders) SELECT count(*) FROM o", source=lake).first()[0] == 2
        )
        with pytest.raises(DeclarationError, match=r"shop.main.x is no table of the connection 'lake'"):
            weft.read("SELECT * FROM shop.main.x", source=lake)
    else:
        pq.write_table(pq.read_table(next(Path("lake/raw/orders").glob("*.parquet"))), "lake/one.parquet")
        assert weft.read('SELECT count(*) FROM "*.parquet"', source=lake).first()[0] == 2
    with pytest.raises(DeclarationError, match="Only queries are run here"):
        weft.load("WITH a AS (SELECT 1) DELETE FROM raw.orders", source=lake, target="x", connection=shop)
    with pytest.raises(NotFoundError):
        weft.load("SELECT * FROM raw.nothing", source=lake, target="x", connection=shop)
