"""Who reads a file changes nothing: not its journal mode, nothing beside it, and no file that is not there."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import weft
from systems.conftest import Stranger
from weft.errors import BusyError, ConnectionFailedError
from weft.project import Project, use
from weft.streams import close
from weft.systems.sql.tables import Slice
from weft.systems.sqlite.tables import SqliteTables

SQL = "SELECT i FROM t ORDER BY i"


def make(path: Path, mode: str) -> sqlite3.Connection:
    """A file with two rows, of which a log holds the second one as long as the connection is open."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.executescript("CREATE TABLE t (i INTEGER); INSERT INTO t VALUES (1)")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("INSERT INTO t VALUES (2)")
    return connection


def rows(path: Path) -> list[int]:
    tables = SqliteTables(weft.SQLiteConnection(str(path)))
    try:
        found = [batch.column(0).to_pylist() for batch in tables.read(Slice(SQL), tables.describe(SQL))]
        return [value for values in found for value in values]
    finally:
        tables.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def left_by_a_dead_writer(folder: Path, *names: str) -> Path:
    """A copy of a file while somebody writes to it, with these of the files beside it."""
    with closing(make(folder / "living.db", "WAL")):
        for end in ("", *names):
            shutil.copy(folder / f"living.db{end}", folder / f"s.db{end}")
    (folder / "living.db").unlink()
    return folder / "s.db"


@pytest.mark.spark
@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_a_source_stays_as_it_is(project: Path, mode: str) -> None:
    path = project / "s.db"
    make(path, mode).close()
    before = contents(project)
    assert rows(path) == [1, 2]
    result = weft.load("SELECT 1 AS i", source=weft.SQLiteConnection(str(path)), target="t", connection="default")
    assert result.inserted == 1
    shutil.rmtree(project / ".weft")
    assert contents(project) == before
    assert weft.SQLiteConnection(str(path)).check()["latency_ms"] > 0
    assert contents(project) == before


def test_a_source_that_somebody_writes_to(project: Path) -> None:
    path = project / "s.db"
    with closing(make(path, "WAL")) as writer:
        before = contents(project)
        assert rows(path) == [1, 2]
        assert contents(project).keys() == before.keys()
        writer.execute("INSERT INTO t VALUES (3)")
        assert rows(path) == [1, 2, 3]


@pytest.mark.parametrize("beside", [("-wal",), ("-wal", "-shm")])
def test_what_a_dead_writer_left_in_the_log_is_read(project: Path, beside: tuple[str, ...]) -> None:
    assert rows(left_by_a_dead_writer(project, *beside)) == [1, 2]


def test_a_transaction_that_a_dead_writer_left_is_undone(project: Path) -> None:
    path = project / "s.db"
    with closing(make(path, "DELETE")) as writer:
        writer.executescript("PRAGMA cache_size=1; BEGIN; CREATE TABLE u (x); INSERT INTO t VALUES (3)")
        writer.execute("INSERT INTO u SELECT zeroblob(9000) FROM t")  # more than the cache: some of it is in the file
        for end in ("", "-journal"):
            shutil.copy(f"{path}{end}", project / f"dead.db{end}")
    assert rows(project / "dead.db") == [1, 2]


# ---------------------------------------------------------------------------------------------------- no right to write


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
@pytest.mark.parametrize("rights", [0o755, 0o777], ids=["folder read-only", "file read-only"])
def test_a_source_that_may_only_be_read(folder: Path, stranger: Stranger, mode: str, rights: int) -> None:
    path = folder / "s.db"
    make(path, mode).close()
    folder.chmod(rights)
    before = contents(folder)
    with stranger():
        assert rows(path) == [1, 2]
        assert weft.SQLiteConnection(str(path)).check()["latency_ms"] > 0
    assert contents(folder) == before


@pytest.mark.parametrize("rights", [0o755, 0o777], ids=["folder read-only", "file read-only"])
def test_a_source_that_may_only_be_read_and_that_somebody_writes_to(
    folder: Path, stranger: Stranger, rights: int
) -> None:
    path = folder / "s.db"
    with closing(make(path, "WAL")) as writer:
        folder.chmod(rights)
        before = contents(folder).keys()
        with stranger():
            assert rows(path) == [1, 2]
        writer.execute("INSERT INTO t VALUES (3)")
        with stranger():
            assert rows(path) == [1, 2, 3]
        assert contents(folder).keys() == before


@pytest.mark.parametrize("rights", [0o755, 0o777], ids=["folder read-only", "file read-only"])
def test_rows_in_a_log_that_cannot_be_read_are_not_left_out(folder: Path, stranger: Stranger, rights: int) -> None:
    path = left_by_a_dead_writer(folder, "-wal")
    folder.chmod(rights)
    before = contents(folder)
    with stranger(), pytest.raises(ConnectionFailedError, match=r"has rows in .*s\.db-wal") as caught:
        rows(path)
    assert "Copy the first two" in str(caught.value)
    assert contents(folder) == before


def test_a_log_and_its_index_that_may_only_be_read(folder: Path, stranger: Stranger) -> None:
    path = left_by_a_dead_writer(folder, "-wal", "-shm")
    before = contents(folder)
    with stranger():
        assert rows(path) == [1, 2]
    assert contents(folder) == before


def test_a_file_that_changes_while_it_is_read_without_locks(folder: Path, stranger: Stranger) -> None:
    path = folder / "s.db"
    make(path, "WAL").close()
    tables = SqliteTables(weft.SQLiteConnection(str(path)))
    with stranger():
        batches = tables.read(Slice(SQL), tables.describe(SQL))
        next(batches)
    with closing(sqlite3.connect(path)) as writer:
        writer.executescript("INSERT INTO t VALUES (3)")
    with stranger(), pytest.raises(BusyError, match=r"wrote to .* while it was read"):
        next(batches)
    with stranger():
        assert rows(path) == [1, 2, 3]


def test_a_file_that_may_not_be_read(folder: Path, stranger: Stranger) -> None:
    path = folder / "s.db"
    make(path, "WAL").close()
    path.chmod(0o600)
    with stranger():
        for use in (lambda: rows(path), weft.SQLiteConnection(str(path)).check):
            with pytest.raises(ConnectionFailedError, match=r"denied|unable to open"):
                use()


# ----------------------------------------------------------------------------------------------------------- not there


@pytest.mark.parametrize("connection", [weft.SQLiteConnection, weft.DuckDBConnection])
@pytest.mark.parametrize("sql", ["SELECT * FROM t", "SELECT 1 AS i"])
def test_a_source_that_is_not_there(project: Path, connection: type[weft.SQLiteConnection], sql: str) -> None:
    (project / "orders.db").write_text("")
    before = contents(project)
    with pytest.raises(ConnectionFailedError) as caught:
        weft.load(sql, source=connection("ordres.db"), target="t", connection=weft.SQLiteConnection("w.db"))
    assert caught.value.what.endswith(f"there is no file {project}/ordres.db.")
    assert caught.value.hint is not None and caught.value.hint.startswith(
        "Did you mean 'orders.db', which is in the same folder?"
    )
    with pytest.raises(ConnectionFailedError, match=f"no file {project}/no/s.db") as caught:
        weft.load(sql, source=connection("no/s.db"), target="t", connection=weft.SQLiteConnection("w.db"))
    assert f"The folder {project}/no is not there either." in str(caught.value)
    assert contents(project) == before


def test_a_source_that_goes_away_before_it_is_read(project: Path) -> None:
    make(project / "s.db", "DELETE").close()
    tables = SqliteTables(weft.SQLiteConnection("s.db"))
    schema = tables.describe(SQL)
    tables.close()
    (project / "s.db").unlink()
    with pytest.raises(ConnectionFailedError, match="there is no file"):
        list(tables.read(Slice(SQL), schema))
    assert not list(project.iterdir())


def test_a_target_is_made_also_by_a_query_of_its_own(project: Path) -> None:
    target = weft.SQLiteConnection("new/w.db")
    assert weft.load("SELECT 1 AS i", target="t", connection=target, mode="merge", keys=["i"]).inserted == 1
    with closing(sqlite3.connect("new/w.db")) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert reader.execute("SELECT * FROM t").fetchall() == [(1,)]


def test_a_file_that_is_a_target_too_has_a_log(project: Path) -> None:
    make(project / "s.db", "DELETE").close()
    assert rows(project / "s.db") == [1, 2]
    assert weft.load([{"i": 3}], target="t", connection=weft.SQLiteConnection("s.db")).inserted == 1
    with closing(sqlite3.connect("s.db")) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# -------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("open_elsewhere", [False, True], ids=["alone", "with a writer"])
def test_a_stream_that_may_only_be_read(folder: Path, stranger: Stranger, open_elsewhere: bool) -> None:
    copy = weft.connect(f"sqlite:///{folder / 's.db'}")

    @weft.stream(fields={"n": "int64"})
    def clicks() -> None: ...

    with use(Project()) as writers:
        weft.publish_sync(clicks, [{"n": 1}, {"n": 2}], connection=copy)
        weft.consume_sync(clicks, "other", 1, copy)
        if not open_elsewhere:
            close(writers)
        before = contents(folder).keys()
        with use(Project()) as readers, stranger():
            assert weft.read_stream(copy, clicks)["n"].to_list() == [1, 2]
            assert [each["pending"] for each in weft.groups_sync(clicks, connection=copy)] == [1]
            assert asyncio.run(_numbers(clicks, copy, 2)) == [1, 2]
            with pytest.raises(weft.StorageError, match="readonly"):
                weft.publish_sync(clicks, {"n": 3}, connection=copy)
            close(readers)
        assert contents(folder).keys() == before
        close(writers)


async def _numbers(stream: weft.Stream, connection: weft.Connection, count: int) -> list[int]:
    async with weft.subscribe(stream, since="start", connection=connection) as events:
        return [(await anext(events))["n"] for _ in range(count)]
