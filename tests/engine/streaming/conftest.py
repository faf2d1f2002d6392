"""What tests of streaming pipelines share.

def test_something(plain_spark, streams):
    events = declare(n="int64")
    run_once(name="copy", source=events, target_table=(None, "copies"))
    assert rows("copies") == […]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.engine.load import open_tables
from weft.engine.streaming import batch
from weft.engine.streaming.query import run
from weft.pipelines.streaming.declare import make
from weft.project import Project, current, use
from weft.systems.sql.tables import Slice


def declare(stream: str = "events", /, **fields: str) -> Any:
    """A stream with these fields."""
    return weft.stream(name=stream, fields=fields)(lambda: None)


def run_once(**declared: Any) -> None:
    """Run a pipeline over what is there now."""
    if "target" not in declared and "targets" not in declared:
        declared["target"] = "default"
    run(make(**declared), once=True)


def rows(table: str, columns: str = "*", connection: Any = None) -> list[tuple[Any, ...]]:
    """The rows of a table, in order."""
    tables = open_tables(current().connection(connection))
    try:
        sql = f"SELECT {columns} FROM {tables.table(None, table)}"
        found = [row for each in tables.read(Slice(sql), tables.describe(sql)) for row in each.to_pylist()]
        return sorted((tuple(row.values()) for row in found), key=repr)
    finally:
        tables.close()


@pytest.fixture
def here(project: Path) -> Iterator[Project]:
    """A project on the embedded default."""
    import weft.streams

    fresh = Project()
    with use(fresh):
        yield fresh
        weft.streams.close(fresh)


@pytest.fixture(params=["driver", "tasks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows are read and written by the driver, which takes few of them, or by Spark's tasks."""
    if request.param == "tasks":
        monkeypatch.setattr(batch, "SMALL", 0)
    return str(request.param)
