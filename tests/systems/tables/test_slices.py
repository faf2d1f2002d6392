"""The parts of a query show one moment, and together all rows once."""

from __future__ import annotations

from contextlib import closing, nullcontext
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from systems.tables import values
from weft.errors import DeclarationError
from weft.systems.sql.tables import SqlTables

COUNT = 500
DAY = datetime(2026, 1, 1, tzinfo=UTC)


def make(tables: SqlTables) -> str:
    data = pa.table(
        {
            "n": pa.array(range(COUNT), pa.int64()),
            "some": pa.array([None if n % 10 == 0 else n - 100 for n in range(COUNT)], pa.int32()),
            "day": pa.array([None if n % 7 == 0 else date(1, 1, 1) + timedelta(n) for n in range(COUNT)], pa.date32()),
            "at": pa.array([DAY + timedelta(minutes=n * n) for n in range(COUNT)], pa.timestamp("us", "UTC")),
            "local": pa.array([datetime(1999, 1, 1) + timedelta(n) for n in range(COUNT)], pa.timestamp("us")),
            "name": pa.array([f"name {n}" for n in range(COUNT)]),
            "same": pa.array([5] * COUNT, pa.int64()),
            "none": pa.nulls(COUNT, pa.int64()),
        }
    )
    table = values.create(tables, "sliced", data.schema)
    values.copy_in(tables, table, data)
    return table


def holding(held: Any) -> Any:
    return nullcontext() if held is None else closing(held)


@pytest.mark.brief("sqlite-7", "postgres-2", "mysql-7", "duckdb-2")
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_all_rows_once(tables: SqlTables, parts: int) -> None:
    sql = f"SELECT * FROM {make(tables)}"
    schema = tables.describe(sql)
    for by in ("n", "some", "day", "at", "local", "same", "none", None):
        slices, held = tables.slices(sql, parts, by)
        assert 1 <= len(slices) <= parts
        with holding(held):
            found = [
                row for part in slices for batch in tables.read(part, schema, ["n"]) for row in batch["n"].to_pylist()
            ]
        assert sorted(found) == list(range(COUNT)), by


def test_one_moment_while_others_write(tables: SqlTables) -> None:
    table = make(tables)
    sql = f"SELECT * FROM {table}"
    schema = tables.describe(sql)
    both = ", ".join(map(tables.quote, ("n", "some")))
    slices, held = tables.slices(sql, 4, "n")
    with holding(held):
        if tables.dialect == "postgres":
            assert len(slices) == 4
        found: list[Any] = []
        for number, part in enumerate(slices):
            if len(slices) > 1:
                with tables.driver.session("publish") as session:
                    session.run(f"DELETE FROM {table} WHERE n >= {number * 100} AND n < {number * 100 + 150}")
                    session.run(f"INSERT INTO {table} ({both}) VALUES ({10_000 + number}, 1), ({-number}, 2)")
            found += [row for batch in tables.read(part, schema) for row in batch["n"].to_pylist()]
    assert sorted(found) == list(range(COUNT))


@pytest.mark.every_system
def test_a_column_that_cannot_be_split_by(tables: SqlTables) -> None:
    sql = f"SELECT * FROM {make(tables)}"
    _, held = tables.slices(sql, 2, "n")
    with holding(held):
        if held is None:
            return  # its queries are never split
    with pytest.raises(DeclarationError, match="Did you mean 'name'"):
        tables.slices(sql, 2, "nam")
    with pytest.raises(DeclarationError, match="integer, a date or a timestamp"):
        tables.slices(sql, 2, "name")
