"""What surrounds the modes: staging by several writers, refusals, bad rows, conversions, two loads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from systems.tables.test_modes import rows_of
from weft.errors import DeclarationError, LoadRefusedError, WeftError
from weft.systems.base import system_for
from weft.systems.load import Counts, Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql import ledger, staging
from weft.systems.sql.tables import SqlTables

DAY = datetime(2026, 3, 1, tzinfo=UTC)


def load(tables: SqlTables, rows: Any, **options: Any) -> Counts:
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    planned = Load.declare(**{"target": "t", "moment": DAY, **options})
    sql_commit.prepare(tables, planned, table.schema)
    return sql_commit.commit(tables, planned, sql_commit.BatchedRows(table.schema, table.to_batches()))


def run(tables: SqlTables, *statements: str) -> None:
    with tables.driver.session("publish") as session:
        for statement in statements:
            session.run(statement)


def names_of(tables: SqlTables, table: str = "t", column: str = "name") -> list[Any]:
    return sorted(row[column] for row in rows_of(tables, table))


def test_a_missing_table_is_created_in_its_schema(tables: SqlTables) -> None:
    assert load(tables, [{"id": 1, "name": "a"}], target=("weft_analytics", "orders")).inserted == 1
    assert load(tables, [{"id": 2, "name": "b"}], target="weft_analytics.orders").inserted == 1
    with tables.driver.session("read") as session:
        found = session.rows(f"SELECT count(*) FROM {tables.table('weft_analytics', 'orders')}")
    assert found == [(2,)]
    if tables.dialect == "mysql":
        run(tables, "DROP DATABASE weft_analytics")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_table_with_the_name_of_another_ones_keys(tables: SqlTables) -> None:
    """SQLite has one set of names for tables and indexes."""
    load(tables, [{"id": 1}], mode="scd2", keys=["id"], target="orders")
    assert load(tables, [{"id": 1}], target="orders_keys").inserted == 1
    assert load(tables, [{"id": 1}], target="items_keys").inserted == 1
    assert load(tables, [{"id": 1}], mode="scd2", keys=["id"], target="items").inserted == 1


def test_columns_that_the_target_lacks_are_refused(tables: SqlTables) -> None:
    load(tables, [{"id": 1, "name": "a"}])
    with pytest.raises(LoadRefusedError, match="has no column 'nmae'") as caught:
        load(tables, [{"id": 2, "nmae": "b"}])
    assert caught.value.hint == "Did you mean 'name'?"
    # Fewer columns are fine: the rest is null.
    assert load(tables, [{"id": 2}]).inserted == 1
    assert [row["name"] for row in sorted(rows_of(tables, "t"), key=lambda row: row["id"])] == ["a", None]


DATES = [20261230, 20261231, 20270101]


@pytest.mark.parametrize(
    ("numbers", "kept"), [(range(12), range(7, 12)), (range(1, 60, 5), [41, 46, 51, 56]), (DATES, DATES)]
)
def test_the_ledger_forgets_batches_that_nobody_repeats(
    tables: SqlTables, monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int], kept: Sequence[int]
) -> None:
    """Also where few batches are recorded, as those that emit windows. What stays is counted: numbers have gaps."""
    monkeypatch.setattr(ledger, "_BATCHES_KEPT", 3)
    monkeypatch.setattr(ledger, "_BATCHES_BETWEEN", 5)
    load(tables, [{"id": 0}], commit_key="other")
    for number in numbers:
        assert load(tables, [{"id": number}], commit_key="stream", batch_id=number).inserted == 1
    assert load(tables, [{"id": 0}], commit_key="stream", batch_id=numbers[-1]).replayed
    with tables.driver.session("read") as session:
        found = session.rows(f"SELECT checkpoint_id, batch_id FROM {ledger.table(tables)}")
    assert sorted(found) == [("other", 0), *(("stream", number) for number in kept)]


def test_the_ledger_says_what_a_batch_was(tables: SqlTables) -> None:
    """Also a ledger of before it did: its batches stay, and count as done."""

    def batch(number: int, positions: str | None = None) -> Load:
        planned = Load.declare(target="t", commit_key="stream", batch_id=number, moment=DAY)
        return replace(planned, positions=positions)

    load(tables, [{"id": 0}], commit_key="stream", batch_id=0)
    run(tables, f"ALTER TABLE {ledger.table(tables)} DROP COLUMN positions")
    # Who reads may not be its owner.
    assert ledger.last_of(tables, ["t"])
    with pytest.raises(WeftError):
        ledger.last_batch(tables, batch(0))
    rows = pa.table({"id": [1]})
    for _ in range(2):
        sql_commit.prepare(tables, batch(1, "[5]"), rows.schema)
        sql_commit.commit(tables, batch(1, "[5]"), sql_commit.BatchedRows(rows.schema, rows.to_batches()))
    assert ledger.is_committed(tables, batch(0))
    assert ledger.last_batch(tables, batch(0)) == ledger.last_batch(tables, batch(1)) == (1, "[5]")
    assert ledger.last_batch(tables, batch(2)) is None
    run(tables, f"DELETE FROM {ledger.table(tables)} WHERE batch_id = 1")
    assert ledger.last_batch(tables, batch(0)) == (0, None)


def test_a_ledger_that_others_own_says_what_to_run(tables: SqlTables) -> None:
    """A view cannot get a column, just as a table of another owner."""
    load(tables, [{"id": 0}], commit_key="stream", batch_id=0)
    name, other = ledger.table(tables), tables.table(None, "kept")
    run(tables, f"CREATE TABLE {other} AS SELECT * FROM {name}", f"DROP TABLE {name}")
    run(tables, f"CREATE VIEW {name} AS SELECT pipeline, checkpoint_id, batch_id FROM {other}")
    try:
        with pytest.raises(WeftError, match="lacks the column 'positions'") as caught:
            ledger.create(tables)
        assert (caught.value.hint or "").startswith(f"Run `ALTER TABLE {name} ADD COLUMN ")
    finally:
        run(tables, f"DROP VIEW {name}")


def test_columns_that_must_be_there(tables: SqlTables) -> None:
    run(tables, "CREATE TABLE t (id INTEGER NOT NULL, name VARCHAR(20) NOT NULL, n INTEGER DEFAULT 7)")
    with pytest.raises(LoadRefusedError, match="'name' of t may not be null"):
        load(tables, [{"id": 1}])
    assert load(tables, [{"id": 1, "name": "a"}]).inserted == 1
    assert rows_of(tables, "t")[0]["n"] == 7


def test_values_are_converted_to_the_columns_or_refused(tables: SqlTables) -> None:
    run(tables, "CREATE TABLE t (id BIGINT, name VARCHAR(5), n INTEGER)")
    assert load(tables, [{"id": 1, "name": "abc", "n": 4}]).inserted == 1
    if tables.dialect == "sqlite":
        return  # it takes any value in any column
    for bad in ({"id": 1, "name": "a", "n": 2**40},):
        with pytest.raises(WeftError):
            load(tables, [bad])
    if tables.dialect in ("postgres", "mysql"):
        with pytest.raises(WeftError):
            load(tables, [{"id": 1, "name": "too long", "n": 1}])
    assert len(rows_of(tables, "t")) == 1


def test_merge_refuses_without_writing(tables: SqlTables) -> None:
    load(tables, [{"id": 1, "name": "a"}], mode="merge", keys=["id"])
    with pytest.raises(LoadRefusedError, match=r"share a key: id=2 \(2 rows\)"):
        load(
            tables,
            [{"id": 1, "name": "z"}, {"id": 2, "name": "b"}, {"id": 2, "name": "c"}],
            mode="merge",
            keys=["id"],
        )
    with pytest.raises(LoadRefusedError, match="1 of 2 source rows of t have no key"):
        load(tables, [{"id": 1, "name": "z"}, {"id": None, "name": "b"}], mode="merge", keys=["id"])
    assert names_of(tables) == ["a"]


def test_a_source_that_fails_in_the_middle_changes_nothing(tables: SqlTables) -> None:
    load(tables, [{"id": 1, "name": "a"}])
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])

    def broken() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([{"id": 2, "name": "b"}], schema=schema)
        raise OSError("the source is gone")

    for mode, keys in (("append", []), ("truncate", []), ("merge", ["id"])):
        planned = Load.declare(target="t", mode=mode, keys=keys, moment=DAY)
        sql_commit.prepare(tables, planned, schema)
        with pytest.raises(OSError, match="the source is gone"):
            sql_commit.commit(tables, planned, sql_commit.BatchedRows(schema, broken()))
        assert names_of(tables) == ["a"]
        assert not ledger.is_committed(tables, planned)


@pytest.mark.timing
def test_two_loads_into_one_table_at_once(tables: SqlTables) -> None:
    load(tables, [{"id": 0, "name": "start"}], mode="merge", keys=["id"])
    errors: list[BaseException] = []

    def merge(number: int) -> None:
        own = system_for(tables.connection.kind).load_tables()(tables.connection)
        try:
            for turn in range(5):
                load(own, [{"id": i, "name": f"{number}/{turn}"} for i in range(50)], mode="merge", keys=["id"])
        except BaseException as error:
            errors.append(error)
        finally:
            own.close()

    threads = [threading.Thread(target=merge, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = rows_of(tables, "t")
    assert sorted(row["id"] for row in found) == list(range(50))
    # The last load won, whole.
    assert len({row["name"] for row in found}) == 1


@pytest.mark.every_system
def test_staging_by_several_writers(tables: SqlTables) -> None:
    if tables.one_writer:
        pytest.skip(f"{tables.dialect} takes one writer at a time")
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    planned = Load.declare(target="t", mode="merge", keys=["id"], moment=DAY)
    sql_commit.prepare(tables, planned, schema)

    def batch(*ids: int) -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_pylist([{"id": i, "name": f"n{i}"} for i in ids], schema=schema)]

    with staging.staging_table(tables, schema) as table:
        one, _, _ = staging.fill(tables, table, schema, batch(1, 2))
        # An attempt that does not count: its task was tried again.
        staging.fill(tables, table, schema, batch(3, 4))
        two, rows, _ = staging.fill(tables, table, schema, batch(3, 4))
        assert rows == 2
        # What is in use is not swept away.
        assert staging.sweep(tables) == []
        counts = sql_commit.commit(tables, planned, sql_commit.StagedRows(table, schema, (one, two)))
    assert counts.inserted == 4
    assert names_of(tables) == ["n1", "n2", "n3", "n4"]
    with tables.driver.session("publish") as session:
        session.run(f"CREATE TABLE {tables.driver.table('weft', 'stage_0123')} (id INTEGER)")
    assert staging.sweep(tables) == ["stage_0123"]
    assert staging.sweep(tables) == []


@pytest.mark.brief(
    'sqlite-a"b',
    "sqlite-select",
    "sqlite-a.b",
    'postgres-a"b',
    "postgres-a%s?b",
    f"postgres-{'x' * 60}",
    "mysql-a`b",
    "mysql-a%s?b",
    "mysql-a'b",
    f"mysql-{'x' * 60}",
    'duckdb-a"b',
    "duckdb-a b",
)
@pytest.mark.parametrize("name", ['a"b', "a b", "select", "Grüße 日本", "a'b", "a`b", "a.b", "a%s?b", "x" * 60])
def test_hostile_names(tables: SqlTables, name: str) -> None:
    rows = [{name: 1, f"{name[:50]}2": "a"}, {name: 2, f"{name[:50]}2": "b"}]
    for target, mode in ((name, "merge"), (f"{name[:50]}3", "scd2")):
        load(tables, rows, target=(None, target), mode=mode, keys=[name])
        counts = load(tables, [rows[0], {name: 2, f"{name[:50]}2": "c"}], target=(None, target), mode=mode, keys=[name])
        assert (counts.updated, counts.unchanged) == (1, 1)
    assert {row[f"{name[:50]}2"] for row in rows_of(tables, name)} == {"a", "c"}


def test_a_users_query_is_run_as_it_is(tables: SqlTables) -> None:
    """`?` and `%` in it are not placeholders of ours, and a comment at its end swallows nothing."""
    load(tables, [{"id": 1, "name": "50% off?"}], target="s")
    sql = f"SELECT id, name FROM {tables.table(None, 's')} WHERE name = '50% off?' AND name LIKE '%?' -- 100%?"
    if tables.dialect == "postgres":
        sql = "SELECT id, name FROM s WHERE '{\"a\": 1}'::jsonb ? 'a' AND id % 2 = 1"
    for mode, keys in (("append", []), ("merge", ["id"])):
        planned = Load.declare(target=f"t_{mode}", mode=mode, keys=keys, moment=DAY)
        schema = tables.describe(sql)
        sql_commit.prepare(tables, planned, schema)
        assert sql_commit.commit(tables, planned, sql_commit.QueriedRows(sql, schema)).inserted == 1


def test_the_ledger_keeps_what_has_a_name(tables: SqlTables) -> None:
    """Loads without a key are forgotten after a week, others never."""

    def entries() -> list[str]:
        with tables.driver.session("read") as session:
            found = session.rows(f"SELECT checkpoint_id FROM {ledger.table(tables)}")
        return sorted("unnamed" if row[0].startswith("once:") else row[0] for row in found)

    load(tables, [{"id": 1}], commit_key="first", moment=DAY)
    load(tables, [{"id": 2}], moment=DAY)
    load(tables, [{"id": 3}], moment=DAY + timedelta(days=6))
    assert entries() == ["first", "unnamed", "unnamed"]
    load(tables, [{"id": 4}], moment=DAY + timedelta(days=8))
    assert entries() == ["first", "unnamed", "unnamed"]
    with pytest.raises(DeclarationError, match="does not begin with 'once:'"):
        load(tables, [{"id": 5}], commit_key="once:5")


def test_a_ledger_that_refuses_is_no_replay(tables: SqlTables) -> None:
    """Only what the ledger has was done: a row that it cannot take is an error, not a load that is there already."""
    load(tables, [{"id": 1}])
    long = "p" * 5000
    if tables.dialect != "mysql":
        run(tables, f"DROP TABLE {ledger.table(tables)}")
        run(
            tables,
            f"CREATE TABLE {ledger.table(tables)} (pipeline VARCHAR(99) CHECK (length(pipeline) < 99), "
            "checkpoint_id VARCHAR(99), batch_id BIGINT, committed_at TIMESTAMP, rows_read BIGINT, inserted BIGINT, "
            "updated BIGINT, unchanged BIGINT, deleted BIGINT, quarantined BIGINT)",
        )
    with pytest.raises(WeftError):
        load(tables, [{"id": 2}], pipeline=long)
    assert [row["id"] for row in rows_of(tables, "t")] == [1]
