"""How a DuckDB file is named, opened and checked."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import weft
from systems.conftest import Stranger
from weft.errors import ConnectionFailedError, DeclarationError
from weft.systems.duckdb.tables import DuckDBTables
from weft.systems.sql.tables import Slice


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
    assert connection.check()["note"] == "the file is created at first use"
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
    (project / "something.duckdb").write_text("")
    tables = DuckDBTables(weft.DuckDBConnection("nosomething.duckdb"))
    with pytest.raises(ConnectionFailedError, match=f"there is no file {project}/nosomething.duckdb") as caught:
        tables.describe("SELECT 1")
    assert "Did you mean 'something.duckdb', which is in the same folder?" in str(caught.value)
    assert [each.name for each in project.iterdir()] == ["something.duckdb"]


@pytest.mark.parametrize("ends", ["closed", "killed"])
@pytest.mark.parametrize("may_write", [True, False])
def test_reading_changes_nothing(folder: Path, stranger: Stranger, ends: str, may_write: bool) -> None:
    """Of a process that was killed, rows are in a log beside the file."""
    path = folder / "s.duckdb"
    code = (
        "import os, sys, duckdb; c = duckdb.connect(sys.argv[1]); c.execute('CREATE TABLE t (i INTEGER)'); "
        "c.execute('CHECKPOINT'); c.execute('INSERT INTO t VALUES (1)'); "
    )
    code += "os.kill(os.getpid(), 9)" if ends == "killed" else "c.close()"
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    assert len(before) == (2 if ends == "killed" else 1)
    tables = DuckDBTables(weft.DuckDBConnection(str(path)))
    with nullcontext() if may_write else stranger():
        schema = tables.describe("FROM t")
        assert [batch.to_pylist() for batch in tables.read(Slice("FROM t"), schema)] == [[{"i": 1}]]
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


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
