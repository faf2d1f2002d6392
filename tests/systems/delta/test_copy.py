"""Rows that are Arrow become commits of Delta tables like those that Delta's own writer makes, or are left to it."""

from __future__ import annotations

import json
import math
import re
import threading
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import weft
from systems.objects.test_copy import EDGES, Attempts, given, some, table
from weft import BusyError, DeltaLocalConnection, DeltaS3Connection, LoadRefusedError
from weft.engine import frames, inputs
from weft.systems.delta import copy
from weft.systems.delta import table as delta
from weft.systems.delta.target import DeltaTarget
from weft.systems.load import Counts, Load


@pytest.fixture
def lake() -> DeltaLocalConnection:
    return DeltaLocalConnection("lake")


def load(mode: str = "append", name: str = "orders", **options: Any) -> Load:
    return Load.declare(target=name, mode=mode, **options)


def log(name: str = "orders") -> list[dict[str, dict[str, Any]]]:
    """The actions of all commits, by their kind."""
    return [
        {kind: value for line in path.read_text().splitlines() for kind, value in json.loads(line).items()}
        for path in sorted(Path(f"lake/{name}/_delta_log").glob("*.json"))
    ]


def ids(spark: Any, lake: Any, name: str = "orders") -> list[int]:
    return sorted(row.id for row in delta.read(spark, lake, name).collect())


def both_ways(spark: Any, lake: Any, data: pa.Table) -> tuple[dict[str, Any], dict[str, Any]]:
    """The commit of Delta's own writer, and ours, of the same rows."""
    frame = frames.from_memory(spark, inputs.understand(data, has_source=False)).coalesce(1)
    wanted = DeltaTarget(lake).write(frame, load(name="theirs"), spark)
    found = copy.copy(given(data), lake, load(name="ours"), spark=spark)
    assert (found.rows_read, found.inserted, found.deleted) == (wanted.rows_read, wanted.inserted, wanted.deleted)
    return log("theirs")[0], log("ours")[0]


@pytest.mark.full
def test_the_same_as_delta(spark: Any, lake: DeltaLocalConnection) -> None:
    # How the ends of long texts are written is ours: see below.
    data = table([(*row[:12], (row[12] or "")[:32], *row[13:]) for row in EDGES])
    theirs, ours = both_ways(spark, lake, data)
    assert ours.keys() == theirs.keys()
    assert json.loads(ours["metaData"]["schemaString"]) == json.loads(theirs["metaData"]["schemaString"])
    assert ours["metaData"]["configuration"] == theirs["metaData"]["configuration"] == {}
    assert ours["protocol"] == theirs["protocol"]
    assert ours["txn"].keys() == theirs["txn"].keys()
    for name in ("operation", "operationParameters", "isBlindAppend"):
        assert ours["commitInfo"][name] == theirs["commitInfo"][name]
    assert ours["commitInfo"]["operationMetrics"].keys() == theirs["commitInfo"]["operationMetrics"].keys()
    (file,) = Path("lake/ours").glob("*.parquet")
    assert ours["add"]["path"] == file.name
    assert ours["add"]["size"] == file.stat().st_size
    assert _statistics(ours) == _statistics(theirs)
    read = [delta.read(spark, lake, name).toArrow() for name in ("theirs", "ours")]
    assert repr(read[0].to_pylist()) == repr(read[1].to_pylist())
    assert read[0].schema == read[1].schema


def _statistics(commit: dict[str, Any]) -> Any:
    return json.loads(commit["add"]["stats"], parse_float=Decimal)


MOMENT = datetime(1969, 12, 31, 23, 59, 59, 999_500, UTC)


COLUMNS: dict[str, Any] = {
    "texts that just fit": ["x" * 32, "\u00fc" * 31 + "a", None],
    "nothing but NaN": [math.nan, math.nan, math.nan],
    "NaN and numbers": [math.nan, 1.0, -math.inf],
    "NaN, numbers and nulls": [math.nan, 1.0, None],
    "float32": pa.array([math.inf, 0.5, 0.5], pa.float32()),
    "nulls": pa.array([None, None, None], pa.int64()),
    "before 1970": pa.array([MOMENT, MOMENT, MOMENT], pa.timestamp("us", "UTC")),
    "booleans": [True, None, True],
    "bytes": [b"a", b"b", b"b"],
    "calendars": [date(1582, 10, 4), date(1582, 10, 15), date(1582, 10, 15)],
    "decimals": pa.array([Decimal("12.50"), Decimal("-0.01"), Decimal("-0.01")], pa.decimal128(10, 2)),
}


def test_statistics(spark: Any, lake: DeltaLocalConnection) -> None:
    """Of all columns in one table: to write it takes longer than to compare them."""
    names = [re.sub(r"\W", "_", name) for name in COLUMNS]
    table = pa.table({"id": range(3), **dict(zip(names, COLUMNS.values(), strict=True))})
    theirs, ours = both_ways(spark, lake, table)
    assert _statistics(ours) == _statistics(theirs)


@pytest.mark.full
def test_ranges_of_long_texts_hold_them(spark: Any, lake: DeltaLocalConnection) -> None:
    texts = ["a" * 40, "z" * 32 + "\U0010fffe" * 5, "b"]
    copy.copy(given(pa.table({"id": range(3), "name": texts})), lake, load(), spark=spark)
    found = json.loads(log()[0]["add"]["stats"])
    assert found["minValues"]["name"] == "a" * 32
    assert found["maxValues"]["name"] > max(texts)
    stored = delta.read(spark, lake, "orders")
    for text in texts:
        assert stored.where(stored.name == text).count() == 1
    # Of texts whose end is not known, because it is the last character that there is or too far away, nothing is said.
    for text in ("z" * 32 + "\U0010ffff", "z" * 5000):
        copy.copy(given(pa.table({"id": [3], "name": [text]})), lake, load(), spark=spark)
        assert "name" not in json.loads(log()[-1]["add"]["stats"])["maxValues"]
        assert stored.where(stored.name == text).count() == 1


@pytest.mark.full
def test_files_are_passed_by(spark: Any, lake: DeltaLocalConnection) -> None:
    for number in (1, 100):
        copy.copy(given(pa.table({"id": [number], "d": [math.nan]})), lake, load(), spark=spark)
    first, second = (Path("lake/orders") / commit["add"]["path"] for commit in log())
    stored = delta.read(spark, lake, "orders")
    # Whoever opens the other one fails.
    first.unlink()
    assert [row.id for row in stored.where("id > 50").collect()] == [100]
    assert [row.id for row in stored.where("id > 50 AND d > 5").collect()] == [100]
    with pytest.raises(Exception, match="FILE_NOT_EXIST"):
        stored.where("d > 5").collect()
    assert second.exists()


@pytest.mark.full
def test_append_and_truncate(spark: Any, lake: DeltaLocalConnection) -> None:
    counts = copy.copy(some(1, 2), lake, load(), spark=spark)
    assert (counts.rows_read, counts.inserted, counts.deleted) == (2, 2, 0)
    assert copy.copy(Attempts(some(3)), lake, load(), spark=spark).inserted == 2
    assert ids(spark, lake) == [1, 2, 3, 3]
    counts = copy.copy(some(9), lake, load("truncate"), spark=spark)
    assert (counts.inserted, counts.deleted) == (1, 4)
    assert ids(spark, lake) == [9]
    assert len(log()) == 3
    assert log()[2]["commitInfo"]["operationParameters"]["mode"] == "Overwrite"


@pytest.mark.brief("append")
@pytest.mark.parametrize("mode", ["append", "truncate"])
def test_a_commit_key_counts_once(spark: Any, lake: DeltaLocalConnection, mode: str) -> None:
    planned = load(mode, commit_key="monday")
    assert not copy.copy(some(1), lake, planned, spark=spark).replayed
    assert copy.copy(some(2), lake, planned, spark=spark) == Counts(replayed=True)
    # The ledger is one, whichever way a load takes.
    assert DeltaTarget(lake).write(spark.sql("SELECT 3L AS id, 'x' AS name"), planned, spark) == Counts(replayed=True)
    tuesday = load(mode, commit_key="tuesday")
    assert not DeltaTarget(lake).write(spark.sql("SELECT 3L AS id, 'x' AS name"), tuesday, spark).replayed
    assert copy.copy(some(2), lake, tuesday, spark=spark) == Counts(replayed=True)


@pytest.mark.full
def test_empty_source(spark: Any, lake: DeltaLocalConnection) -> None:
    # Left to Delta's own writer.
    assert copy.copy(some(), lake, load(), spark=spark) is None
    assert weft.load(pa.table({"id": pa.array([], pa.int64())}), target="orders", connection=lake).inserted == 0
    assert ids(spark, lake) == []
    weft.load(pa.table({"id": [1]}), target="orders", connection=lake)
    with pytest.raises(LoadRefusedError, match="allow_empty=True"):
        copy.copy(given(pa.table({"id": pa.array([], pa.int64())})), lake, load("truncate"), spark=spark)
    assert ids(spark, lake) == [1]


@pytest.mark.full
@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(["CREATE TABLE {} (id BIGINT, name STRING) USING delta PARTITIONED BY (name)"], id="partitions"),
        pytest.param(["CREATE TABLE {} (id BIGINT NOT NULL, name STRING) USING delta"], id="not null"),
        pytest.param(
            ["CREATE TABLE {} (id BIGINT, name STRING) USING delta", "ALTER TABLE {} ADD CONSTRAINT c CHECK (id > 0)"],
            id="constraint",
        ),
        pytest.param(
            ["CREATE TABLE {} (id BIGINT, name STRING) USING delta TBLPROPERTIES (delta.enableChangeDataFeed = true)"],
            id="change feed",
        ),
        pytest.param(
            [
                "CREATE TABLE {} (id BIGINT, name STRING) USING delta "
                "TBLPROPERTIES (delta.columnMapping.mode = 'name', delta.minReaderVersion = 2, "
                "delta.minWriterVersion = 5)"
            ],
            id="column mapping",
        ),
        pytest.param(["CREATE TABLE {} (id BIGINT, name STRING) USING delta CLUSTER BY (id)"], id="clusters"),
        pytest.param(["CREATE TABLE {} (id BIGINT, name STRING, more INT) USING delta"], id="more columns"),
        pytest.param(["CREATE TABLE {} (id DECIMAL(20), name STRING) USING delta"], id="wider"),
    ],
)
def test_what_is_left_to_delta(spark: Any, lake: DeltaLocalConnection, statements: list[str]) -> None:
    path = Path("lake/orders").absolute()
    for statement in statements:
        spark.sql(statement.format(f"delta.`{path}`"))
    before = len(log())
    assert copy.copy(some(1), lake, load(), spark=spark) is None
    assert not list(path.rglob("*.parquet"))
    assert len(log()) == before
    assert weft.load([{"id": 1, "name": "a"}], target="orders", connection=lake).inserted == 1
    assert ids(spark, lake) == [1]


def test_rows_that_are_left_to_delta(spark: Any, lake: DeltaLocalConnection) -> None:
    assert copy.copy(given(pa.table({"a b": [1]})), lake, load(), spark=spark) is None
    assert copy.copy(given(pa.table({"l": [["a"]]})), lake, load(), spark=spark) is None
    for mode in ("merge", "scd2"):
        assert copy.copy(some(1), lake, load(mode, keys=["id"]), spark=spark) is None
    assert not Path("lake").exists()


@pytest.mark.full
def test_the_columns_of_the_table_in_its_order(spark: Any, lake: DeltaLocalConnection) -> None:
    copy.copy(some(1), lake, load(), spark=spark)
    copy.copy(given(pa.table({"name": ["x"], "id": [2]})), lake, load(), spark=spark)
    assert [tuple(row) for row in delta.read(spark, lake, "orders").orderBy("id").collect()] == [(1, "n1"), (2, "x")]


class Meanwhile:
    """Rows during whose reading something else happens."""

    def __init__(self, rows: Any, happens: Any) -> None:
        self.rows, self.schema, self.columns, self.happens = rows, rows.schema, rows.columns, happens

    def each_part(self, work: Any) -> list[Any]:
        found: list[Any] = self.rows.each_part(work)
        self.happens()
        return found


def test_a_table_that_changes_meanwhile(spark: Any, lake: DeltaLocalConnection) -> None:
    def again() -> None:
        copy.copy(some(1), lake, planned, spark=spark)

    def alter() -> None:
        spark.sql(f"ALTER TABLE delta.`{Path('lake/orders').absolute()}` ADD CONSTRAINT c CHECK (id > 0)")

    planned = load(commit_key="monday")
    # Another attempt was faster, and it made the table.
    assert copy.copy(Meanwhile(some(1), again), lake, planned, spark=spark) == Counts(replayed=True)
    assert ids(spark, lake) == [1]
    with pytest.raises(BusyError, match="was altered while this load wrote its files"):
        copy.copy(Meanwhile(some(-1), alter), lake, load(), spark=spark)
    assert ids(spark, lake) == [1]


@pytest.mark.full
@pytest.mark.timing
def test_loads_at_once(spark: Any, lake: DeltaLocalConnection) -> None:
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            copy.copy(some(number), lake, load("truncate" if number == 3 else "append"), spark=spark)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert 3 in ids(spark, lake)
    assert len(log()) == 5


@pytest.mark.full
def test_bucket(spark: Any, s3: Any) -> None:
    bucket = DeltaS3Connection(**s3.fields(), prefix="delta tables")
    for number in (1, 2):
        assert copy.copy(some(number), bucket, load(commit_key=str(number)), spark=spark).inserted == 1
    assert copy.copy(some(2), bucket, load(commit_key="2"), spark=spark).replayed
    assert ids(spark, bucket) == [1, 2]
    folders = ("delta tables/orders/", "delta tables/_weft/orders/lock/")
    assert all(key.startswith(folders) for key in s3.keys(bucket.bucket))


def test_other_readers_see_the_same(spark: Any, lake: DeltaLocalConnection) -> None:
    import deltalake

    copy.copy(some(1, 2), lake, load(), spark=spark)
    stored = deltalake.DeltaTable("lake/orders")
    assert stored.to_pyarrow_table().to_pylist() == [{"id": 1, "name": "n1"}, {"id": 2, "name": "n2"}]
