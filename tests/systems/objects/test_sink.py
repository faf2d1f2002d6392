"""Loads into files: all of a load or nothing of it, once, and in files that everybody can read."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from weft import DeclarationError, LoadRefusedError, ObjectStoreLocalConnection, ObjectStoreS3Connection
from weft.systems import process
from weft.systems.load import Counts, Load
from weft.systems.objects import source
from weft.systems.objects.manifest import Manifest
from weft.systems.objects.target import FileTarget

FORMATS = ["parquet", "csv", "json_lines", "orc"]
each_format = pytest.mark.parametrize("format", FORMATS)


def connection(format: str = "parquet", **options: Any) -> ObjectStoreLocalConnection:
    return ObjectStoreLocalConnection("lake", format=format, **options)


def load(mode: str = "append", table: str = "orders", **options: Any) -> Load:
    return Load.declare(target=("sales", table), mode=mode, **options)


def frame(spark: Any, *numbers: int) -> Any:
    return spark.createDataFrame([(number, f"n{number}") for number in numbers], "id long, name string").coalesce(1)


def write(rows: Any, lake: Any, load: Load) -> Counts:
    target = FileTarget(lake)
    target.check(load)
    return target.write(rows, load, rows.sparkSession)


def numbers(spark: Any, lake: Any, table: str = "orders") -> list[int]:
    return sorted(row.id for row in source.read(spark, lake, f"sales/{table}").collect())


def everything(folder: str = "lake") -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def staging(folder: str = "lake") -> list[str]:
    return [name for name in everything(folder) if "/staging/" in name]


@pytest.mark.brief("parquet")
@each_format
def test_append_and_truncate(spark: Any, format: str) -> None:
    lake = connection(format)
    counts = write(frame(spark, 1, 2), lake, load())
    assert (counts.rows_read, counts.inserted, counts.deleted) == (2, 2, 0)
    assert counts.bytes == sum(path.stat().st_size for path in Path("lake/sales/orders").iterdir())
    write(frame(spark, 3), lake, load())
    assert numbers(spark, lake) == [1, 2, 3]
    counts = write(frame(spark, 9), lake, load("truncate"))
    assert (counts.inserted, counts.deleted) == (1, 3)
    assert numbers(spark, lake) == [9]
    assert len(list(Path("lake/sales/orders").iterdir())) == 1
    assert staging() == []


def test_empty_source(spark: Any) -> None:
    lake = connection()
    assert write(frame(spark), lake, load()) == Counts()
    assert everything() == []
    write(frame(spark, 1), lake, load())
    before = everything()
    with pytest.raises(LoadRefusedError, match="allow_empty=True"):
        write(frame(spark), lake, load("truncate"))
    assert write(frame(spark), lake, load()) == Counts()
    assert everything() == before
    assert write(frame(spark), lake, load("truncate", allow_empty=True)).deleted == 1
    assert numbers(spark, lake) == []
    assert list(Path("lake/sales/orders").iterdir()) == []


@pytest.mark.parametrize("mode", ["append", "truncate"])
def test_a_commit_key_counts_once(spark: Any, mode: str) -> None:
    lake, planned = connection(), load(mode, commit_key="monday")
    write(frame(spark, 1), lake, planned)
    before = everything()
    assert write(frame(spark, 2), lake, planned) == Counts(replayed=True)
    assert everything() == before
    assert not write(frame(spark, 2), lake, load(mode, commit_key="tuesday")).replayed


@pytest.mark.parametrize(("mode", "instead"), [("merge", "append, truncate"), ("scd2", "delta_local")])
def test_what_files_cannot_do(spark: Any, mode: str, instead: str) -> None:
    with pytest.raises(DeclarationError, match=f"in the mode '{mode}'[\\s\\S]*{instead}"):
        write(frame(spark, 1), connection(), load(mode, keys=["id"]))
    with pytest.raises(DeclarationError, match="quarantine"):
        write(frame(spark, 1), connection(), load(on_bad_rows="quarantine"))
    assert not Path("lake").exists()


def test_columns_follow_the_table(spark: Any) -> None:
    lake = connection("csv")
    write(frame(spark, 1), lake, load())
    write(spark.sql("SELECT 'x' AS name, 2 AS id"), lake, load())
    write(spark.sql("SELECT 3L AS id"), lake, load())
    rows = source.read(spark, lake, "sales/orders").collect()
    assert {(row.id, row.name) for row in rows} == {(1, "n1"), (2, "x"), (3, None)}
    with pytest.raises(LoadRefusedError, match=r"no column 'nane'[\s\S]*Did you mean 'name'"):
        write(spark.sql("SELECT 1L AS id, 'a' AS nane"), lake, load())
    with pytest.raises(LoadRefusedError, match=r"'id' of sales\.orders is bigint, and string in the source"):
        write(spark.sql("SELECT 'a' AS id"), lake, load())
    with pytest.raises(LoadRefusedError, match=r"are csv, and orc is to be added"):
        write(frame(spark, 1), connection("orc"), load())
    with pytest.raises(LoadRefusedError, match=r"have sep ',', and ';' is to be added"):
        write(frame(spark, 1), connection("csv", csv_delimiter=";"), load())
    # What is replaced may be anything.
    write(spark.sql("SELECT 'a' AS other"), connection("orc"), load("truncate"))


def test_one_row_a_key(spark: Any) -> None:
    lake = connection()
    given = spark.createDataFrame([(1, "old"), (1, "new"), (2, "a")], "id long, name string")
    counts = write(given, lake, load(keys=["id"], deduplicate_by="name"))
    assert (counts.rows_read, counts.inserted) == (3, 2)
    assert {row.name for row in source.read(spark, lake, "sales/orders").collect()} == {"old", "a"}


TYPES = """b boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint, f float, d double, n decimal(38, 10), day date,
    at timestamp, local timestamp_ntz, t string, raw binary, l array<string>, s struct<a: int, `b c`: timestamp>,
    m map<string, double>"""
ROWS = [
    (
        *(True, 127, 32767, 2**31 - 1, 2**63 - 1, 1.5, math.pi, Decimal("12345678901234567890.0123456789")),
        *(date(9999, 12, 31), datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC), datetime(1, 1, 1, 0, 0, 0, 1)),
        *(
            'a "quoted", text\nof two\r\nlines; \\ and \t tabs',
            b"\x00\xff",
            ["x", None, ""],
            (1, datetime(2026, 1, 1, tzinfo=UTC)),
        ),
        {"a": 1.0},
    ),
    (
        *(False, -128, -32768, -(2**31), -(2**63), -0.5, math.inf, Decimal("-0.0000000001")),
        *(date(1, 1, 1), datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999)),
        *("", b"", [], (None, None), {}),
    ),
    (*(None,) * 16,),
    (None, None, None, None, None, math.nan, math.nan, *(None,) * 4, "  blanks  ", *(None,) * 4),
    (*(None,) * 11, "NULL", *(None,) * 4),
    (*(None,) * 11, "#no comment", *(None,) * 4),
    (*(None,) * 11, "line\rfeed", *(None,) * 4),
]


@pytest.mark.brief("csv", "orc")
@each_format
def test_types_survive(spark: Any, format: str) -> None:
    lake = connection(format)
    given = spark.createDataFrame(ROWS, TYPES)
    write(given, lake, load())
    found = source.read(spark, lake, "sales/orders")
    assert [(field.name, field.dataType) for field in found.schema] == [
        (field.name, field.dataType) for field in given.schema
    ]
    # By Arrow: Python's own datetime cannot be had of the year 1 in every zone.
    one, other = (sorted(map(repr, each.toArrow().to_pylist())) for each in (given, found))
    assert other == one


def test_csv_dialect(spark: Any) -> None:
    lake = connection("csv", csv_delimiter=";", csv_header=False, csv_quote="'", csv_escape="\\", csv_null_value="\\N")
    given = spark.createDataFrame([(1, "it's;"), (2, None), (3, ""), (4, 'a\\"b')], "id long, name string")
    write(given.coalesce(1), lake, load())
    (file,) = Path("lake/sales/orders").iterdir()
    assert file.read_text().splitlines() == ["1;'it\\'s;'", "2;\\N", "3;''", '4;a\\"b']
    assert sorted(source.read(spark, lake, "sales/orders").collect()) == sorted(given.collect())


def test_csv_of_one_column(spark: Any) -> None:
    given = spark.createDataFrame([("a",), (None,)], "name string")
    with pytest.raises(LoadRefusedError, match=r"1 rows of sales\.orders are nothing but a null[\s\S]*csv_null_value"):
        write(given, connection("csv"), load())
    assert everything() == []
    lake = connection("csv", csv_null_value="\\N")
    write(given, lake, load())
    assert source.read(spark, lake, "sales/orders").count() == 2


def test_csv_of_a_text_that_means_null(spark: Any) -> None:
    given = spark.createDataFrame([(1, "NULL"), (2, None)], "rows long, name string")
    with pytest.raises(LoadRefusedError, match=r"1 rows of sales\.orders have the value 'NULL' in 'name'"):
        write(given, connection("csv", csv_null_value="NULL"), load())
    assert everything() == []
    given = spark.createDataFrame([(1, "\\N")], "rows long, name string")
    with pytest.raises(LoadRefusedError, match='for example "NULL"'):
        write(given, connection("csv", csv_null_value="\\N"), load())


@pytest.mark.full
def test_parquet_compression(spark: Any) -> None:
    import pyarrow.parquet as pq

    for compression in ("snappy", "gzip", "zstd", "uncompressed"):
        write(frame(spark, 1), connection(parquet_compression=compression), load(table=compression))
        file = next(Path(f"lake/sales/{compression}").iterdir())
        assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == compression.upper()


@pytest.mark.full
def test_other_readers(spark: Any) -> None:
    import duckdb
    import polars
    import pyarrow.dataset

    lake = connection()
    given = spark.createDataFrame(ROWS, TYPES).select("i64", "at", "day", "t", "n")
    write(given, lake, load())
    write(given, lake, load())
    folder = str(Path("lake/sales/orders").absolute())
    assert spark.read.parquet(folder).count() == 14
    assert pyarrow.dataset.dataset(folder).to_table().num_rows == 14
    assert polars.read_parquet(folder)["at"].drop_nulls().dt.year().to_list() == [9999, 1] * 2
    assert duckdb.sql(f"SELECT count(*), max(n) FROM '{folder}/*.parquet'").fetchall() == [(14, ROWS[0][7])]
    for format, scan in (("csv", polars.read_csv), ("json_lines", polars.read_ndjson)):
        write(frame(spark, 1, 2), connection(format), load(table=format))
        assert scan(f"lake/sales/{format}/*")["id"].sort().to_list() == [1, 2]


TABLES = ("a b", "it's", 'q"uo`te', "ünï", "x" * 100, "a*b?[c]{d}", "%41", "_hidden", ".dot", "a:b", "y=1")


@pytest.mark.full
def test_hostile_names(spark: Any) -> None:
    names = ["select", "a b", 'q"uo`te', "ünï", "x" * 80, "a.b", "k=;{}()"]
    given = spark.createDataFrame([tuple(range(7))], ", ".join(f"`{name.replace('`', '``')}` int" for name in names))
    for format in FORMATS:
        lake = connection(format, prefix=format)
        if format == "orc":
            with pytest.raises(LoadRefusedError, match="ORC files lose columns with a ` in their name"):
                write(given, lake, Load.declare(target=(None, "x")))
            given = given.drop('q"uo`te')
            names.remove('q"uo`te')
        # The format decides about names of columns; those of tables are folders, whatever the files are.
        for table in TABLES if format == FORMATS[0] else ["it's a*b?[c]{d}%41:y=1"]:
            write(given, lake, Load.declare(target=(None, table)))
            assert source.read(spark, lake, table).collect()[0].asDict() == given.collect()[0].asDict()
    with pytest.raises(DeclarationError, match="cannot be part of a table's name"):
        write(given, connection(), Load.declare(target=(None, "../outside")))


class Stop(Exception):
    """What a process that is killed does not do."""


@pytest.fixture
def stop_at() -> Iterator[Any]:
    """`stop_at("moved")` lets the next load end after that step, as if killed."""
    log, handlers = logging.getLogger("weft.commit"), []
    level = log.level

    def stop(step: str) -> None:
        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if record.getMessage() == step:
                    log.removeHandler(self)
                    raise Stop

        handlers.append(Handler())
        log.addHandler(handlers[-1])
        log.setLevel(logging.DEBUG)

    yield stop
    for handler in handlers:
        log.removeHandler(handler)
    log.setLevel(level)


def leave_to_the_dead() -> None:
    """Whoever staged something is gone: a process with the number of this one, which began earlier."""
    host, number, _, machine = process.this_process().rsplit(":", 3)
    for owner in Path("lake/sales/_weft/orders/staging").glob("*.owner"):
        owner.write_text(json.dumps({**json.loads(owner.read_text()), "process": f"{host}:{number}:1:{machine}"}))


STEPS = ["begun", "staged", "recorded", "moved", "committed"]


@pytest.mark.brief("truncate-published", "append-recorded", "truncate-begun")
@pytest.mark.parametrize(
    ("mode", "step"), [("truncate", "published"), *((mode, step) for mode in FileTarget.modes for step in STEPS)]
)
def test_stopped_at_each_step(spark: Any, mode: str, step: str, stop_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = connection()
    write(frame(spark, 1, 2), lake, load())
    planned = load(mode, commit_key="monday")
    with monkeypatch.context() as patch:
        # Nobody cleans up after a killed process.
        patch.setattr(Manifest, "abandon", lambda *_: None)
        stop_at(step)
        with pytest.raises(Stop):
            write(frame(spark, 3), lake, planned)
    # Readers see the state before or after, never half of it.
    after = [1, 2, 3] if mode == "append" else [3]
    is_seen = step in ("committed", "published")
    assert numbers(spark, lake) == (after if is_seen else [1, 2])
    leave_to_the_dead()
    counts = write(frame(spark, 3), lake, planned)
    assert counts.replayed == (step in ("recorded", "moved", "published", "committed"))
    assert numbers(spark, lake) == after
    assert len(list(Path("lake/sales/orders").iterdir())) == len(Manifest(_local(), "lake/sales/orders").state().files)
    assert staging() == []


def _local() -> Any:
    from weft.spark_support.folder import LocalFolder

    return LocalFolder()


def test_the_next_load_finishes_a_dead_one(spark: Any, stop_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = connection()
    write(frame(spark, 1), lake, load())
    stop_at("recorded")
    with pytest.raises(Stop):
        write(frame(spark, 2), lake, load("truncate"))
    write(frame(spark, 3), lake, load())
    assert numbers(spark, lake) == [2, 3]
    assert staging() == []


def test_a_failed_load_leaves_nothing(spark: Any) -> None:
    lake = connection()
    with pytest.raises(Exception, match="oh no"):
        write(spark.sql("SELECT raise_error('oh no') AS x"), lake, load())
    assert everything() == []


@pytest.mark.full
@pytest.mark.timing
def test_loads_at_once(spark: Any) -> None:
    lake = connection()
    write(frame(spark, 0), lake, load())
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            mode = "truncate" if number == 4 else "append"
            write(frame(spark, number), lake, load(mode))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    found = numbers(spark, lake)
    assert 4 in found
    assert 0 not in found
    assert len(list(Path("lake/sales/orders").iterdir())) == len(found)
    assert staging() == []


@pytest.mark.full
def test_the_log_stays_short(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.systems.objects import manifest

    monkeypatch.setattr(manifest, "_WHOLE_EVERY", 2)
    lake = connection()
    for number in range(9):
        write(frame(spark, number), lake, load(commit_key=str(number)))
    assert numbers(spark, lake) == list(range(9))
    assert write(frame(spark, 0), lake, load(commit_key="0")).replayed
    assert len([name for name in everything() if "/log/" in name and name.endswith(".json")]) <= 5


@pytest.mark.full
def test_bucket(spark: Any, s3: Any) -> None:
    lake = ObjectStoreS3Connection(**s3.fields(), prefix="lake", format="parquet")
    planned = load(commit_key="monday")
    assert write(frame(spark, 1, 2), lake, planned).inserted == 2
    assert write(frame(spark, 1, 2), lake, planned).replayed
    write(frame(spark, 3), lake, load())
    assert numbers(spark, lake) == [1, 2, 3]
    counts = write(frame(spark, 4), lake, load("truncate"))
    assert (counts.inserted, counts.deleted) == (1, 3)
    assert numbers(spark, lake) == [4]
    keys = s3.keys(lake.bucket)
    assert len([key for key in keys if key.startswith("lake/sales/orders/")]) == 1
    assert not [key for key in keys if "/staging/" in key]
