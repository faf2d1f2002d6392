"""Files written from Arrow by whoever has the rows are those that Spark would write, and count as they do."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from systems.objects.test_sink import (  # noqa: F401
    STEPS,
    Stop,
    connection,
    everything,
    leave_to_the_dead,
    load,
    numbers,
    staging,
    stop_at,
    write,
)
from weft import LoadRefusedError, ObjectStoreS3Connection
from weft.engine import frames, inputs, spark_io
from weft.systems.load import Counts, Load
from weft.systems.objects import source
from weft.systems.objects.manifest import Manifest
from weft.systems.objects.target import FileTarget

FLAT = pa.schema(
    {
        "b": pa.bool_(),
        "i8": pa.int8(),
        "i16": pa.int16(),
        "i32": pa.int32(),
        "i64": pa.int64(),
        "f": pa.float32(),
        "d": pa.float64(),
        "small": pa.decimal128(9, 2),
        "middle": pa.decimal128(18, 4),
        "large": pa.decimal128(38, 10),
        "day": pa.date32(),
        "at": pa.timestamp("us", "UTC"),
        "t": pa.string(),
        "raw": pa.binary(),
        "nothing": pa.string(),
    }
)
EDGES = [
    (
        *(True, 127, 32767, 2**31 - 1, 2**63 - 1, 1.5, math.pi, Decimal("9999999.99"), Decimal("12345678901234.5678")),
        *(Decimal("12345678901234567890.0123456789"), date(9999, 12, 31)),
        *(datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC), 'a "text"\n\u00fc' + "x" * 5000, b"\x00\xff", None),
    ),
    (
        *(False, -128, -32768, -(2**31), -(2**63), -0.5, math.inf, Decimal("-0.01"), Decimal("-0.0001")),
        *(Decimal("-0.0000000001"), date(1, 1, 1), datetime(1, 1, 1, 0, 0, 0, 1, UTC), "", b"", None),
    ),
    (None,) * 15,
    (*(None,) * 5, math.nan, math.nan, *(None,) * 8),
]


def table(rows: list[tuple[Any, ...]] = EDGES, schema: pa.Schema = FLAT) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def given(data: Any) -> Any:
    return spark_io.rows_of(inputs.understand(data, has_source=False), None)


def some(*numbers: int) -> Any:
    names = pa.array([f"n{number}" for number in numbers], pa.string())
    return given(pa.table({"id": pa.array(numbers, pa.int64()), "name": names}))


def copy(rows: Any, lake: Any, load: Load, spark: Any) -> Any:
    return FileTarget(lake).copy(rows, load, spark)


def test_the_same_as_spark(spark: Any) -> None:
    lake = connection()
    frame = frames.from_memory(spark, inputs.understand(table(), has_source=False)).coalesce(1)
    wanted = write(frame, lake, load(table="theirs"))
    found = copy(given(table()), lake, load(table="ours"), spark)
    assert (found.rows_read, found.inserted, found.deleted) == (wanted.rows_read, wanted.inserted, wanted.deleted)
    (theirs,), (ours,) = (list(Path(f"lake/sales/{name}").iterdir()) for name in ("theirs", "ours"))
    assert found.bytes == ours.stat().st_size
    assert theirs.name.partition(".")[2] == ours.name.partition(".")[2]
    one, other = pq.ParquetFile(theirs), pq.ParquetFile(ours)
    assert other.schema_arrow.remove_metadata() == one.schema_arrow.remove_metadata()
    for index in range(len(FLAT)):
        columns = [each.schema.column(index) for each in (one, other)]
        assert len({(each.physical_type, str(each.logical_type), each.max_definition_level) for each in columns}) == 1
    texts = [each.metadata.metadata for each in (one, other)]
    assert texts[0].keys() == texts[1].keys()
    row = b"org.apache.spark.sql.parquet.row.metadata"
    assert len({json.dumps(json.loads(each.pop(row)), sort_keys=True) for each in texts}) == 1
    assert texts[0] == texts[1]
    assert repr(other.read().to_pylist()) == repr(one.read().to_pylist())
    assert len({Manifest(_local(), f"lake/sales/{name}").state().schema for name in ("theirs", "ours")}) == 1
    read = [source.read(spark, lake, f"sales/{name}").toArrow() for name in ("theirs", "ours")]
    assert repr(read[0].to_pylist()) == repr(read[1].to_pylist())
    assert read[0].schema == read[1].schema


def _local() -> Any:
    from weft.spark_support.folder import LocalFolder

    return LocalFolder()


def test_append_and_truncate(spark: Any) -> None:
    lake = connection()
    counts = copy(some(1, 2), lake, load(), spark)
    assert (counts.rows_read, counts.inserted, counts.deleted) == (2, 2, 0)
    monday = load(commit_key="monday")
    assert not copy(some(3), lake, monday, spark).replayed
    assert copy(some(3), lake, monday, spark) == Counts(replayed=True)
    # The ledger is one, whichever way a load takes.
    assert write(spark.sql("SELECT 3L AS id, 'x' AS name"), lake, monday) == Counts(replayed=True)
    assert numbers(spark, lake) == [1, 2, 3]
    counts = copy(some(9), lake, load("truncate"), spark)
    assert (counts.inserted, counts.deleted) == (1, 3)
    assert numbers(spark, lake) == [9]
    assert len(list(Path("lake/sales/orders").iterdir())) == 1
    assert staging() == []


def test_empty_source(spark: Any) -> None:
    lake = connection()
    assert copy(some(), lake, load(), spark) == Counts()
    assert everything() == []
    copy(some(1), lake, load(), spark)
    with pytest.raises(LoadRefusedError, match="allow_empty=True"):
        copy(some(), lake, load("truncate"), spark)
    assert copy(some(), lake, load("truncate", allow_empty=True), spark).deleted == 1
    assert numbers(spark, lake) == []
    assert list(Path("lake/sales/orders").iterdir()) == []


@pytest.mark.full
def test_row_groups(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.systems.objects import parquet

    monkeypatch.setattr(parquet, "_GROUP_BYTES", 100_000)
    lake = connection()
    data = pa.table({"id": range(200_000), "name": ["a"] * 200_000})
    assert copy(given(data), lake, load(), spark).inserted == 200_000
    (file,) = Path("lake/sales/orders").iterdir()
    assert pq.ParquetFile(file).num_row_groups == 4
    assert numbers(spark, lake) == list(range(200_000))


def test_columns_follow_the_table(spark: Any) -> None:
    lake = connection()
    copy(some(1), lake, load(), spark)
    turned = pa.table({"name": ["x"], "id": pa.array([2], pa.int64())})
    assert copy(given(turned), lake, load(), spark).inserted == 1
    files = [pq.ParquetFile(path).schema_arrow.names for path in Path("lake/sales/orders").iterdir()]
    assert files == [["id", "name"]] * 2
    before = everything()
    # What must be converted, filled or refused is for Spark.
    for other in (pa.table({"id": [1]}), pa.table({"id": pa.array([1], pa.int32()), "name": ["x"]})):
        assert copy(given(other), lake, load(), spark) is None
    assert everything() == before


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"id": [1], "l": [["a"]]}, id="nested"),
        pytest.param({"id": [1], "at": [datetime(2026, 1, 1)]}, id="a time without a zone, which Spark takes for UTC"),
    ],
)
def test_what_is_left_to_spark(spark: Any, data: dict[str, Any]) -> None:
    assert copy(given(pa.table(data)), connection(), load(), spark) is None
    assert everything() == []


def test_settings_that_are_left_to_spark(spark: Any) -> None:
    assert copy(some(1), connection("csv"), load(), spark) is None
    assert copy(some(1), connection(), load(keys=["id"], deduplicate_by="name"), spark) is None
    short = spark.newSession()
    short.conf.set("spark.sql.files.maxRecordsPerFile", "1")
    assert copy(some(1, 2), connection(), load(), short) is None
    assert everything() == []


@pytest.mark.full
def test_compression(spark: Any) -> None:
    for compression in ("snappy", "gzip", "zstd", "uncompressed"):
        lake = connection(parquet_compression=compression)
        copy(some(1), lake, load(table=compression), spark)
        write(spark.sql("SELECT 1L AS id, 'x' AS name"), lake, load(table=compression))
        files = list(Path(f"lake/sales/{compression}").iterdir())
        assert len({file.name.partition(".")[2] for file in files}) == 1
        for file in files:
            assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == compression.upper()


def test_hostile_names(spark: Any) -> None:
    names = ["select", "a b", 'q"uo`te', "\u00fcn\u00ef", "x" * 80, "a.b", "k=;{}()", "a", "A"]
    rows = given(pa.table({name: [number] for number, name in enumerate(names)}))
    for number in range(2):
        assert copy(rows, connection(), load(table="a*b?[c]{d}"), spark).inserted == 1 - number
        rows = given(pa.table({name: pa.array([], pa.int64()) for name in names}))
    found = source.read(spark, connection(), "sales/a*b?[c]{d}").collect()[0]
    assert found.asDict() == {name: number for number, name in enumerate(names)}


class Attempts:
    """Rows of two parts, of which Spark tries the first one three times: an attempt dies, and one is too slow."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.schema, self.columns = rows, rows.schema, rows.columns

    def each_part(self, work: Callable[..., Any]) -> list[Any]:
        batches = list(self.rows.rows.batches)

        def dies() -> Iterator[pa.RecordBatch]:
            yield from batches
            raise ConnectionError

        with pytest.raises(ConnectionError):
            work(0, dies())
        assert work(0, batches).rows == len(batches[0])
        return [work(0, batches), work(1, iter([])), work(2, batches)]


def test_only_attempts_that_spark_counts(spark: Any) -> None:
    lake = connection()
    assert copy(Attempts(some(1, 2)), lake, load(), spark).inserted == 4
    assert numbers(spark, lake) == [1, 1, 2, 2]
    assert len(list(Path("lake/sales/orders").iterdir())) == 2
    assert staging() == []


@pytest.mark.parametrize(
    ("mode", "step"), [("truncate", "published"), *((mode, step) for mode in FileTarget.modes for step in STEPS)]
)
def test_stopped_at_each_step(
    spark: Any,
    mode: str,
    step: str,
    stop_at: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake = connection()
    copy(some(1, 2), lake, load(), spark)
    planned = load(mode, commit_key="monday")
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "abandon", lambda *_: None)
        stop_at(step)
        with pytest.raises(Stop):
            copy(some(3), lake, planned, spark)
    after = [1, 2, 3] if mode == "append" else [3]
    assert numbers(spark, lake) == (after if step in ("committed", "published") else [1, 2])
    leave_to_the_dead()
    counts = copy(some(3), lake, planned, spark)
    assert counts.replayed == (step in ("recorded", "moved", "published", "committed"))
    assert numbers(spark, lake) == after
    assert staging() == []


def test_a_failed_load_leaves_nothing(spark: Any) -> None:
    def batches() -> Iterator[pa.Table]:
        yield pa.table({"id": [1]})
        raise ValueError("oh no")

    with pytest.raises(ValueError, match="oh no"):
        copy(given(batches()), connection(), load(), spark)
    assert everything() == []


@pytest.mark.timing
def test_loads_at_once(spark: Any) -> None:
    lake = connection()
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            copy(some(number), lake, load(), spark)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert numbers(spark, lake) == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_bucket(spark: Any, s3: Any) -> None:
    lake = ObjectStoreS3Connection(**s3.fields(), prefix="a lake", format="parquet")
    planned = load(commit_key="monday")
    assert copy(some(1, 2), lake, planned, spark).inserted == 2
    assert copy(some(1, 2), lake, planned, spark).replayed
    assert copy(Attempts(some(3)), lake, load(), spark).inserted == 2
    assert numbers(spark, lake) == [1, 2, 3, 3]
    assert copy(some(4), lake, load("truncate"), spark).deleted == 4
    assert numbers(spark, lake) == [4]
    keys = s3.keys(lake.bucket)
    assert len([key for key in keys if key.startswith("a lake/sales/orders/")]) == 1
    assert not [key for key in keys if "/staging/" in key]


def test_a_bucket_whose_server_only_spark_finds(spark: Any, s3: Any) -> None:
    fields = {key: value for key, value in s3.fields().items() if key != "endpoint"}
    lake = ObjectStoreS3Connection(**{**fields, "region": None}, format="parquet")
    assert copy(some(1), lake, load(), spark) is None


def test_times_before_1970_and_the_year_1(spark: Any) -> None:
    moments = [datetime(1, 1, 1, tzinfo=UTC) + timedelta(microseconds=1), datetime(1969, 12, 31, 23, 59, 59, 1, UTC)]
    copy(given(pa.table({"at": pa.array(moments, pa.timestamp("us", "UTC"))})), connection(), load(), spark)
    plain = spark.newSession().read.parquet(str(Path("lake/sales/orders").absolute()))
    assert plain.toArrow()["at"].to_pylist() == moments
