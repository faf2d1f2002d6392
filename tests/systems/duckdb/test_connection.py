"""How a DuckDB file is named, opened and checked."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import weft
from weft.errors import ConnectionFailedError, DeclarationError
from weft.systems.duckdb.tables import DuckDBTables


@pytest.mark.parametrize("url", ["duckdb:///sales%20of%20may.duckdb", "duckdb:///{folder}/sales of may.duckdb"])
def test_urls(url: str, project: Path) -> None:
    connection = weft.connect(url=url.format(folder=project))
    assert isinstance(connection, weft.DuckDBConnection)
    assert connection.resolved().path == str(project / "sales of may.duckdb")


@pytest.mark.parametrize("url", ["duckdb://sales.duckdb", "duckdb:///sales.duckdb?threads=1"])
def test_urls_that_name_no_file(url: str) -> None:
    with pytest.raises(DeclarationError, match=r"slashes|parameters"):
        weft.connect(url=url).resolved()


def test_a_path_or_a_url() -> None:
    with pytest.raises(DeclarationError, match="Either path or url"):
        weft.DuckDBConnection()
    with pytest.raises(DeclarationError, match="Either path or url"):
        weft.DuckDBConnection("a.duckdb", url="duckdb:///a.duckdb")


def test_check(project: Path) -> None:
    connection = weft.DuckDBConnection("sales.duckdb")
    assert connection.check()["note"] == "the file is made at first use"
    assert not (project / "sales.duckdb").exists()
    tables = DuckDBTables(connection)
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE t (i INTEGER)")
    found = connection.check()
    assert found["server"].startswith("DuckDB ") and found["latency_ms"] > 0


def test_check_of_another_file(project: Path) -> None:
    (project / "notes.txt").write_text("no database " * 1000)
    with pytest.raises(ConnectionFailedError, match="Cannot open"):
        weft.DuckDBConnection("notes.txt").check()


def test_reading_makes_no_file(project: Path) -> None:
    tables = DuckDBTables(weft.DuckDBConnection("nothing.duckdb"))
    with pytest.raises(ConnectionFailedError, match="does not exist") as caught:
        tables.describe("SELECT 1")
    assert "made by the first load" in str(caught.value)
    assert not (project / "nothing.duckdb").exists()


def test_memory_stays_in_its_process() -> None:
    tables = DuckDBTables(weft.DuckDBConnection(":memory:", name="scratch"))
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE t AS SELECT 1 AS i")
    again = DuckDBTables(weft.DuckDBConnection(":memory:", name="scratch"))
    assert again.describe("FROM t").names == ["i"]
    with pytest.raises(DeclarationError, match="Spark's tasks cannot reach the connection 'scratch'"):
        pickle.dumps(tables)


def test_a_schema_named_as_the_file(project: Path) -> None:
    tables = DuckDBTables(weft.DuckDBConnection("sales.duckdb"))
    with tables.driver.session("publish") as session:
        tables.create_schema(session, "sales")
        session.run(f"CREATE TABLE {tables.table('sales', 't')} (i INTEGER)")
        assert tables.columns(session, "SALES", "T")


def test_nothing_is_downloaded(project: Path) -> None:
    tables = DuckDBTables(weft.DuckDBConnection("sales.duckdb"))
    with tables.driver.session("publish") as session:
        assert session.row("SELECT current_setting('autoinstall_known_extensions')") == (False,)
        # What the zone of an instant needs is part of the package.
        assert session.row("SELECT CAST(TIMESTAMPTZ '2026-01-01 00:30:00+01' AS VARCHAR)") == (
            "2025-12-31 23:30:00+00",
        )
