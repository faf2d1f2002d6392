"""A large table is read and written in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from systems.tables import values
from weft.systems.sql.tables import Slice, SqlTables

MEGABYTE = 1024 * 1024


def resident() -> int:
    """The memory that this process has now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError


@pytest.mark.full  # takes long
def test_reading_and_writing(tables: SqlTables) -> None:
    rows, size = 2_000_000, 50_000
    batch = pa.record_batch({"id": pa.array(range(size), pa.int64()), "text": [f"some text {n}" for n in range(size)]})

    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(rows // size):
            yield batch

    table = values.create(tables, "large", batch.schema)
    before = resident()
    with tables.driver.session("publish") as session:
        tables.copy_in(session, table, batch.schema, batches())
    # DuckDB keeps what it writes in a cache of its own.
    allowed = (500 if tables.dialect == "duckdb" else 100) * MEGABYTE
    assert resident() - before < allowed
    sql = f"SELECT * FROM {table}"
    before, count, most = resident(), 0, 0
    for found in tables.read(Slice(sql), tables.describe(sql)):
        count += found.num_rows
        most = max(most, resident())
    assert count == rows
    assert most - before < allowed
