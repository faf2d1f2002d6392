"""A project whose connection `default` is an empty database of each system that holds tables.

def test_something(database):        runs on each of them (-k sqlite: on that one)
    database.run("INSERT …")         one statement
    database.rows("raw_events")      what a table holds, as dicts, in order
    database.execute(pipeline)       one run of a pipeline; gives what was loaded
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import servers
import weft
from duckdb_file import kept_open
from weft.engine.run import Loaded, Run
from weft.pipelines.declare import Pipeline
from weft.project import Project, use
from weft.systems.base import system_for
from weft.systems.sql.tables import SqlTables
from weft.testing import table_rows

KINDS = ["sqlite", "postgres", "mysql", "duckdb"]
_numbers = itertools.count()


@dataclass
class Database:
    """The database behind `default`."""

    project: Project
    tables: SqlTables

    def run(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        for statement in statements:
            with self.tables.driver.session("publish") as session:
                session.run(statement)
        if self.tables.one_writer:
            self.tables.close()

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Everything in a table."""
        return table_rows(table)

    def columns(self, table: str) -> dict[str, str]:
        """The columns of a table with their types, as the database calls them."""
        schema, _, name = table.rpartition(".")
        with self.tables.driver.session("read") as session:
            found = self.tables.columns(session, schema or None, name)
        if self.tables.one_writer:
            self.tables.close()
        assert found is not None
        return {column.name: column.sql for column in found}

    def execute(self, pipeline: Pipeline, key: str | None = None) -> list[Loaded]:
        """Run a pipeline under a key, a new one unless it is given."""
        run = Run(pipeline, key or f"test {next(_numbers)}", datetime.now(UTC))
        run.execute()
        return run.loaded


@pytest.fixture(params=KINDS)
def database(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    shared_server: Callable[[str], servers.Server],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Database]:
    kind = request.param
    if kind in ("sqlite", "duckdb"):
        with kept_open(f"{kind}:///{tmp_path / 'tables.db'}", request) as url:
            yield from _database(url, monkeypatch)
        return
    with shared_server(kind).database() as url:
        yield from _database(url, monkeypatch)


def _database(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setenv("WEFT_DSN", url)
    with use(Project()) as project:
        connection = weft.connect(url=url)
        tables: SqlTables = system_for(connection.kind).load_tables()(connection)
        yield Database(project, tables)
        tables.close()


@pytest.fixture
def local() -> Iterator[Project]:
    """A fresh project on SQLite, for what does not depend on the database."""
    with use(Project()) as project:
        yield project
