"""A target that goes away, is full or is locked during a load: nothing of it is there, and a re-run is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import servers
import weft
from faults.test_disk_full import mounted
from faults.test_locked import limit_waiting
from systems.tables.test_modes import rows_of
from weft.errors import BusyError, ConnectionFailedError, StorageError
from weft.systems.base import system_for
from weft.systems.load import Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.tables import SqlTables

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
MODES = [("append", []), ("truncate", []), ("merge", ["id"]), ("scd2", ["id"])]


def opened(url: str) -> SqlTables:
    connection = weft.connect(url=url)
    found: SqlTables = system_for(connection.kind).load_tables()(connection)
    return found


def batches(count: int, meanwhile: Callable[[], None] = lambda: None, width: int = 10) -> Iterator[pa.RecordBatch]:
    """Batches of 1,000 rows; in the middle, something happens."""
    for number in range(count):
        if number == count // 2:
            meanwhile()
        rows = [{"id": number * 1000 + i, "text": f"{i}".ljust(width, "x")} for i in range(1000)]
        yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def load(tables: SqlTables, mode: str, keys: list[str], given: Iterator[pa.RecordBatch], key: str) -> Any:
    planned = Load.declare(target=f"t_{mode}", mode=mode, keys=keys, commit_key=key)
    sql_commit.prepare(tables, planned, SCHEMA)
    return sql_commit.commit(tables, planned, sql_commit.BatchedRows(SCHEMA, given))


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_the_server_dies_in_the_middle(kind: str, need_server: Callable[[str], None]) -> None:
    need_server(kind)
    server = servers.KINDS[kind]()
    server.start()
    try:
        tables = opened(server.create_database("dies"))
        for mode, keys in MODES:
            load(tables, mode, keys, batches(1), "first")
            before = len(rows_of(tables, f"t_{mode}"))
            with pytest.raises(ConnectionFailedError):
                load(tables, mode, keys, batches(4, server.kill), "second")
            server.start()
            assert len(rows_of(tables, f"t_{mode}")) == before
            load(tables, mode, keys, batches(4), "second")
            assert len(rows_of(tables, f"t_{mode}")) == (5000 if mode == "append" else 4000)
        tables.close()
    finally:
        server.kill()


LOCKS = {"sqlite": "BEGIN EXCLUSIVE", "postgres": 'LOCK TABLE "t_append" IN ACCESS EXCLUSIVE MODE'}


@pytest.mark.timing
def test_the_target_is_locked(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_waiting(system.kind, monkeypatch)
    tables, other = opened(system.url), opened(system.url)
    load(tables, "append", [], batches(1), "first")
    holder = other.driver.connect("read")
    cursor = holder.cursor()
    if system.kind == "mysql":
        cursor.execute("LOCK TABLES t_append WRITE")
    else:
        if system.kind == "postgres":
            cursor.execute("BEGIN")
        cursor.execute(LOCKS[system.kind])
    try:
        with pytest.raises(BusyError):
            load(tables, "append", [], batches(2), "second")
    finally:
        holder.close()
    assert load(tables, "append", [], batches(2), "second").inserted == 2000
    assert len(rows_of(tables, "t_append")) == 3000
    tables.close()
    other.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_the_disk_is_full(kind: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 16) as disk:
        tables = opened(f"{kind}:///{disk.folder}/full.db")
        for mode, keys in MODES[:1] + MODES[2:3]:
            load(tables, mode, keys, batches(1), "first")
            with pytest.raises(StorageError):
                load(tables, mode, keys, batches(100, width=400), "second")
            assert len(rows_of(tables, f"t_{mode}")) == 1000
            assert load(tables, mode, keys, batches(4), "second").rows_read == 4000
            assert len(rows_of(tables, f"t_{mode}")) == (5000 if mode == "append" else 4000)
        tables.close()
