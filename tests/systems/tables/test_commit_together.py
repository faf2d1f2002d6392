"""Loads into several tables of a database are one transaction: all of them, or none."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from weft.errors import WeftError
from weft.systems.load import Counts, Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import Slice, SqlTables


def prepared(tables: SqlTables, table: str, key: str, *rows: dict[str, Any]) -> tuple[Load, sql_commit.BatchedRows]:
    load = Load.declare(target=table, mode="merge", keys=["id"], pipeline="mirrors", commit_key=f"{key} {table}")
    batch = pa.RecordBatch.from_pylist(list(rows), pa.schema([("id", pa.int64()), ("name", pa.string())]))
    sql_commit.prepare(tables, load, batch.schema)
    return load, sql_commit.BatchedRows(batch.schema, [batch])


def rows(tables: SqlTables, table: str) -> list[tuple[Any, ...]]:
    sql = f"SELECT id, name FROM {tables.table(None, table)} ORDER BY id"
    found = [row for each in tables.read(Slice(sql), tables.describe(sql)) for row in each.to_pylist()]
    return [tuple(row.values()) for row in found]


def test_all_of_them_once(tables: SqlTables) -> None:
    both = [prepared(tables, "orders", "1", {"id": 1, "name": "a"}), prepared(tables, "items", "1", {"id": 2})]
    assert [each.inserted for each in sql_commit.commit_together(tables, both)] == [1, 1]
    # A table that came later is not in the ledger.
    more = [*both, prepared(tables, "users", "1", {"id": 3})]
    again = sql_commit.commit_together(tables, more)
    assert [each.replayed for each in again] == [True, True, False]
    assert sql_commit.commit_together(tables, more) == [Counts(replayed=True)] * 3
    assert [rows(tables, each) for each in ("orders", "items", "users")] == [[(1, "a")], [(2, None)], [(3, None)]]


def test_none_of_them_where_one_is_refused(tables: SqlTables) -> None:
    with tables.driver.session("publish") as session:
        session.run(f"CREATE TABLE {tables.table(None, 'items')} (id BIGINT PRIMARY KEY, name VARCHAR(9) NOT NULL)")
    good = prepared(tables, "orders", "1", {"id": 1, "name": "a"})
    bad = prepared(tables, "items", "1", {"id": 2, "name": "b"}, {"id": 3, "name": None})
    with pytest.raises(WeftError):
        sql_commit.commit_together(tables, [good, bad])
    # Without savepoints each table has a transaction of its own.
    assert rows(tables, "orders") == ([] if tables.savepoints else [(1, "a")])
    assert rows(tables, "items") == []
    mended = prepared(tables, "items", "1", {"id": 2, "name": "b"})
    counts = sql_commit.commit_together(tables, [good, mended])
    assert [each.replayed for each in counts] == [not tables.savepoints, False]
    assert (rows(tables, "orders"), rows(tables, "items")) == ([(1, "a")], [(2, "b")])
