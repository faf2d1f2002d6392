"""A fresh database of each system that holds tables.

def test_something(tables):      runs on each of them (-k sqlite: on that one)
    tables                       the `SqlTables` of an empty database
    tables.dialect               "sqlite", "postgres" …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import servers
import weft
from duckdb_file import kept_open
from weft.systems.base import system_for, systems
from weft.systems.sql.tables import SqlTables

KINDS = [system.kind for system in systems().values() if system.tables]
FILES = ("sqlite", "duckdb")


@pytest.fixture(params=KINDS)
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, shared_server: Callable[[str], servers.Server]
) -> Iterator[str]:
    """The URL of an empty database."""
    kind = request.param
    if kind in FILES:
        with kept_open(f"{kind}:///{tmp_path / 'tables.db'}", request) as url:
            yield url
        return
    with shared_server(kind).database() as url:
        yield url


@pytest.fixture
def tables(database_url: str) -> Iterator[SqlTables]:
    """The tables of that database."""
    connection = weft.connect(url=database_url)
    made: SqlTables = system_for(connection.kind).load_tables()(connection)
    yield made
    made.close()
