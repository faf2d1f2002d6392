"""Loads into Delta tables do what the oracle says, in one commit each, and once however often they are tried."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import pytest

from engine import oracle
from weft import DeltaLocalConnection, DeltaS3Connection, LoadRefusedError
from weft.engine import spark_io
from weft.systems.delta import table as delta
from weft.systems.delta.target import DeltaTarget
from weft.systems.load import Counts, Load

MOMENT = datetime(2026, 11, 15, 12, tzinfo=UTC)
SCHEMA = "id long, name string, amount double, at timestamp"
# A merge into Delta takes seconds, and scd2 merges too.


@pytest.fixture
def lake(tmp_path: Path) -> DeltaLocalConnection:
    return DeltaLocalConnection(str(tmp_path / "lake"))


def load(mode: str = "append", **options: Any) -> Load:
    if mode in ("merge", "scd1", "scd2"):
        options.setdefault("keys", ["id"])
    options.setdefault("moment", MOMENT)
    return Load.declare(target=("sales", "orders"), mode=mode, **options)


def rows_of(lake: DeltaLocalConnection) -> list[dict[str, Any]]:
    """The rows of the table, as others read it: without Spark that takes a tenth of the time."""
    return comparable(delta_table(lake).to_pyarrow_table().to_pylist())


def rows_by_spark(spark: Any, lake: Any) -> list[dict[str, Any]]:
    return comparable([row.asDict() for row in delta.read(spark, lake, "orders", "sales").collect()])


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        assert row.pop("row_hash", "x")
        for name, value in row.items():
            if isinstance(value, datetime):
                row[name] = value.astimezone(UTC)
    return rows


def canonical(rows: list[dict[str, Any]]) -> list[Any]:
    return sorted(tuple(sorted((name, str(value)) for name, value in row.items())) for row in rows)


def write(spark: Any, lake: Any, rows: list[dict[str, Any]], planned: Load) -> Counts:
    frame = spark.createDataFrame([tuple(row.values()) for row in rows], SCHEMA)
    return DeltaTarget(lake).write(frame, planned, spark)


def versions(lake: DeltaLocalConnection) -> int:
    return len(list((Path(lake.root) / "sales" / "orders" / "_delta_log").glob("*.json")))


def delta_table(lake: DeltaLocalConnection) -> deltalake.DeltaTable:
    return deltalake.DeltaTable(f"{lake.root}/sales/orders")


def row(
    number: int, name: str | None = "a", amount: float | None = 1.0, at: datetime | None = MOMENT
) -> dict[str, Any]:
    return {"id": number, "name": name, "amount": amount, "at": at}


@pytest.mark.full
def test_what_a_batch_was_is_in_its_commit(spark: Any, lake: DeltaLocalConnection) -> None:
    """However it is written: a checkpoint that was brought back plans another batch of its number."""
    target = DeltaTarget(lake)
    for number, mode in enumerate(("append", "merge")):
        batch = load(mode, commit_key="stream", batch_id=number, pipeline="p")
        write(spark, lake, [row(number)], dataclasses.replace(batch, positions=f"[{number}]"))
        kept = target.kept(batch)
        assert kept is not None
        assert (kept.batch_id, kept.positions) == (number, f"[{number}]")


def agree(spark: Any, lake: Any, table: list[dict[str, Any]], given: list[dict[str, Any]], planned: Load) -> Any:
    """Load, and compare table and counts with the oracle; gives the table."""
    expected, counts = oracle.apply(table, given, planned)
    found = write(spark, lake, given, planned)
    assert dataclasses.replace(found, bytes=0) == counts
    stored = rows_of(lake) if isinstance(lake, DeltaLocalConnection) else rows_by_spark(spark, lake)
    assert canonical(stored) == canonical(expected)
    return expected


@pytest.mark.full
def test_append_and_truncate(spark: Any, lake: DeltaLocalConnection) -> None:
    table = agree(spark, lake, [], [row(1), row(2, None, None, None)], load())
    table = agree(spark, lake, table, [row(1), row(3)], load())
    assert versions(lake) == 2
    table = agree(spark, lake, table, [row(9)], load("truncate"))
    assert versions(lake) == 3
    with pytest.raises(LoadRefusedError, match="allow_empty=True"):
        write(spark, lake, [], load("truncate"))
    assert write(spark, lake, [], load()) == Counts()
    assert canonical(rows_of(lake)) == canonical(table)
    agree(spark, lake, table, [], load("truncate", allow_empty=True))


@pytest.mark.full
def test_bytes_are_counted(spark: Any, lake: DeltaLocalConnection) -> None:
    assert write(spark, lake, [row(1)], load()).bytes > 100
    assert write(spark, lake, [row(2)], load("merge")).bytes > 100


@pytest.mark.full
@pytest.mark.parametrize("mode", ["append", "truncate", "merge", "scd2"])
def test_a_commit_key_counts_once(spark: Any, lake: DeltaLocalConnection, mode: str) -> None:
    planned = load(mode, commit_key="monday")
    write(spark, lake, [row(1), row(2)], planned)
    before = canonical(rows_of(lake))
    assert write(spark, lake, [row(1, "other"), row(3)], planned) == Counts(replayed=True)
    assert canonical(rows_of(lake)) == before
    later = dataclasses.replace(planned, batch_id=1)
    assert not write(spark, lake, [row(1, "other")], later).replayed
    assert write(spark, lake, [row(1)], planned).replayed


def test_merge(spark: Any, lake: DeltaLocalConnection, count: Any) -> None:
    table = agree(spark, lake, [], [row(1), row(2), row(3, None)], load("merge"))
    files = sorted(delta_table(lake).file_uris())
    table = agree(spark, lake, table, [row(1), row(2), row(3, None)], load("merge"))
    # Nothing differs, so nothing is written again.
    assert sorted(delta_table(lake).file_uris()) == files
    if count(2, 1) > 1:
        before = versions(lake)
        table = agree(spark, lake, table, [row(1), row(2, None), row(3, "x"), row(4)], load("scd1"))
        assert versions(lake) == before + 1
    table = agree(spark, lake, table, [row(1, "y", 5.0)], load("merge", update_columns=["amount"]))
    given = [row(1, "z", 5.0), row(2, "z", 7.0), row(9)]
    table = agree(spark, lake, table, given, load("merge", compare_columns=["amount"], handle_deletes="hard"))
    with pytest.raises(LoadRefusedError, match="allow_empty"):
        write(spark, lake, [], load("merge", handle_deletes="hard"))
    table = agree(spark, lake, table, [], load("merge"))
    assert canonical(rows_by_spark(spark, lake)) == canonical(table)


@pytest.mark.brief("scd2")
@pytest.mark.parametrize("mode", ["merge", "scd2"])
def test_keys_are_checked_before_anything_is_written(spark: Any, lake: DeltaLocalConnection, mode: str) -> None:
    with pytest.raises(LoadRefusedError, match=r"1 of 2 source rows of sales\.orders have no key"):
        write(spark, lake, [row(1), {**row(2), "id": None}], load(mode))
    with pytest.raises(LoadRefusedError, match=r"share a key: id=1 \(2 rows\)"):
        write(spark, lake, [row(1), row(1, "b"), row(2)], load(mode))
    assert not Path(lake.root).exists()
    given = [row(1, "old", at=MOMENT), row(1, "new", at=MOMENT + timedelta(1)), row(1, "none", at=None), row(2)]
    agree(spark, lake, [], given, load(mode, deduplicate_by="at"))
    assert {each["name"] for each in rows_of(lake)} == {"new", "a"}


@pytest.mark.full
def test_scd2_by_load(spark: Any, lake: DeltaLocalConnection, count: Any) -> None:
    def at(hours: int, **options: Any) -> Load:
        return load("scd2", moment=MOMENT + timedelta(hours=hours), **options)

    table = agree(spark, lake, [], [row(1), row(2), row(3)], at(0))
    before = versions(lake)
    table = agree(spark, lake, table, [row(1, None), row(2, "b"), row(3), row(4)], at(2))
    assert versions(lake) == before + 1
    if count(2, 1) > 1:  # of two a column differs that is not compared; three and four are gone
        given = [row(1, "a"), row(2, "b", 2.0), row(5)]
        table = agree(spark, lake, table, given, at(4, compare_columns=["name"], handle_deletes="soft"))
    # Three is back, with the values it had.
    given = [row(1, "a"), row(3), row(5, "e")]
    table = agree(spark, lake, table, given, at(6, handle_deletes="soft", ttl_seconds=3600.5))
    assert canonical(rows_by_spark(spark, lake)) == canonical(table)
    for key in {each["id"] for each in table}:
        assert sum(each["is_current"] for each in table if each["id"] == key) <= 1


@pytest.mark.full
def test_scd2_if_the_clock_went_back(spark: Any, lake: DeltaLocalConnection) -> None:
    write(spark, lake, [row(1)], load("scd2"))
    write(spark, lake, [row(1, "b")], load("scd2", moment=MOMENT - timedelta(1)))
    first, second = sorted(rows_of(lake), key=lambda each: each["valid_from"])
    assert first["valid_to"] == second["valid_from"] == MOMENT + timedelta(microseconds=1)
    assert (first["is_current"], second["is_current"]) == (False, True)


@pytest.mark.full
def test_scd2_by_event(spark: Any, lake: DeltaLocalConnection) -> None:
    def event(number: int, name: str | None, hour: int) -> dict[str, Any]:
        return row(number, name, at=MOMENT + timedelta(hours=hour))

    def planned(**options: Any) -> Load:
        return load("scd2", event_timestamp_column="at", **options)

    first = [event(1, "a", 0), event(1, "b", 5), event(2, "x", 3), event(1, "b", 7)]
    table = agree(spark, lake, [], first, planned())
    table = agree(spark, lake, table, first, planned())
    # Out of order: before all, inside a version, the same values as the version that covers it.
    table = agree(
        spark, lake, table, [event(1, "c", 2), event(1, "z", -4), event(2, "x", 9), event(2, None, 8)], planned()
    )
    with pytest.raises(LoadRefusedError, match="share a key: id=1, at="):
        write(spark, lake, [event(1, "q", 1), event(1, "r", 1)], planned())
    with pytest.raises(LoadRefusedError, match=r"1 source rows of sales\.orders have no event time"):
        write(spark, lake, [row(1, at=None)], planned())
    table = agree(spark, lake, table, [event(1, "k", 20)], planned(handle_deletes="soft", moment=MOMENT + timedelta(2)))
    agree(spark, lake, table, [event(3, "old", -400), event(2, "x", 60)], planned(ttl_seconds=86_400 * 3))


def test_scd2_by_event_at_random(spark: Any, lake: DeltaLocalConnection, count: Any) -> None:
    chance = random.Random(7)
    table: list[dict[str, Any]] = []
    for number in range(count(30, 2)):
        moments = chance.sample(range(40), 12)
        given = [row(chance.randrange(3), chance.choice("ab"), at=MOMENT + timedelta(hours=hour)) for hour in moments]
        options: dict[str, Any] = chance.choice([{}, {}, {"handle_deletes": "soft"}, {"ttl_seconds": 36_000}])
        planned = load("scd2", event_timestamp_column="at", moment=MOMENT + timedelta(hours=20 + number), **options)
        table = agree(spark, lake, table, given, planned)


@pytest.mark.full
def test_hostile_names(spark: Any, lake: DeltaLocalConnection, count: Any) -> None:
    names = ["select", "a b", 'q"uo`te', "ünï", "x" * 80, "a.b", "k=;{}()"]
    frame = spark.createDataFrame([tuple(range(7))], ", ".join(f"`{name.replace('`', '``')}` int" for name in names))
    tables = ("_" + "x" * 100, 'it\'s a "select" ünï`*?[c]{d}%41:')[-count(2, 1) :]
    for table in tables:
        planned = Load.declare(target=(None, table), mode="merge", keys=["a b", "a.b"], moment=MOMENT)
        assert DeltaTarget(lake).write(frame, planned, spark).inserted == 1
    assert DeltaTarget(lake).write(frame, planned, spark).replayed
    again = Load.declare(target=(None, table), mode="merge", keys=["a b", "a.b"], moment=MOMENT)
    assert DeltaTarget(lake).write(frame, again, spark).unchanged == 1
    for table in tables:
        assert delta.read(spark, lake, table).collect()[0].asDict() == dict(zip(names, range(7), strict=True))


def test_columns_that_do_not_fit(spark: Any, lake: DeltaLocalConnection) -> None:
    write(spark, lake, [row(1)], load())
    with pytest.raises(LoadRefusedError, match=r"no column 'nane'[\s\S]*Did you mean 'name'"):
        DeltaTarget(lake).write(spark.sql("SELECT 1L AS id, 'a' AS nane"), load("merge"), spark)
    with pytest.raises(LoadRefusedError, match=r"'amount' of sales\.orders is double, and string in the source"):
        DeltaTarget(lake).write(spark.sql("SELECT 1L AS id, 'a' AS amount"), load(), spark)
    with pytest.raises(LoadRefusedError, match="no column 'valid_from', which scd2 needs"):
        write(spark, lake, [row(1)], load("scd2"))
    # Narrower numbers and nulls without a type fit, and columns may be left out.
    assert (
        DeltaTarget(lake).write(spark.sql("SELECT 2 AS id, NULL AS name, 1.5F AS amount"), load(), spark).inserted == 1
    )


@pytest.mark.brief("merge")
@pytest.mark.parametrize("mode", ["append", "merge"])
def test_a_text_that_is_not_utf8(spark: Any, lake: DeltaLocalConnection, mode: str) -> None:
    """It is put aside before the commit. Other readers could read none of the file's rows."""
    frame = spark.sql(
        "SELECT id, CAST(name AS STRING) AS name, map('k', CAST(inside AS STRING)) AS inside FROM VALUES "
        "(1L, X'ff', X'61'), (2L, X'62', X'63'), (3L, X'64', X'fe'), (4L, NULL, NULL) AS source(id, name, inside)"
    )
    aside: list[tuple[int, str]] = []
    with pytest.raises(LoadRefusedError, match=r"not UTF-8 in 'name', 'inside': 2\."):
        spark_io.write(frame, lake, load(mode))
    assert not Path(lake.root).exists() or DeltaTarget(lake).kept(load(mode)) is None
    counts = spark_io.write(
        frame, lake, load(mode), lambda rows, why: aside.extend((each, why) for each in rows["id"].to_pylist())
    )
    assert (counts.rows_read, counts.inserted, counts.quarantined) == (4, 2, 2)
    assert aside == [
        (1, "Column 'name' has a text that is not UTF-8."),
        (3, "Column 'inside' has a text that is not UTF-8."),
    ]
    assert sorted((row["id"], row["name"], row["inside"]) for row in rows_of(lake)) == [
        (2, "b", [("k", "c")]),
        (4, None, [("k", None)]),
    ]


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("mode", ["append", "merge", "scd2"])
def test_loads_at_once(spark: Any, lake: DeltaLocalConnection, mode: str) -> None:
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            write(spark, lake, [row(0, f"n{number}"), row(number)], load(mode, moment=MOMENT + timedelta(number)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    found = rows_of(lake)
    if mode == "append":
        assert len(found) == 8
        return
    current = [each for each in found if each.get("is_current", True)]
    assert sorted(each["id"] for each in current) == [0, 1, 2, 3, 4]
    history = sorted((each for each in found if each["id"] == 0), key=lambda each: each.get("valid_from", MOMENT))
    assert len(history) == (4 if mode == "scd2" else 1)
    for before, after in itertools.pairwise(history):
        assert before["valid_to"] == after["valid_from"]


@pytest.mark.full
def test_bucket(spark: Any, s3: Any) -> None:
    bucket = DeltaS3Connection(**s3.fields(), prefix="delta tables")
    table = agree(spark, bucket, [], [row(1), row(2)], load("merge"))
    agree(spark, bucket, table, [row(2, "b"), row(3)], load("merge", handle_deletes="hard"))
    folders = ("delta tables/sales/orders/", "delta tables/sales/_weft/orders/lock/")
    assert all(key.startswith(folders) for key in s3.keys(bucket.bucket))
