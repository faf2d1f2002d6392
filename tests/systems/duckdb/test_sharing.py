"""One process may write a file, or several may read it: who has to wait, and what is said to who waits in vain."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

import weft
from weft.errors import BusyError, ConnectionFailedError
from weft.systems.duckdb import sessions, tables
from weft.systems.duckdb.sessions import CONFIG

# Opens the file, says so, and closes it when told.
HOLDER = """
import sys, duckdb
connection = duckdb.connect(sys.argv[1], read_only=sys.argv[2] == "read")
print("open", flush=True)
sys.stdin.readline()
connection.close()
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def file(project: Path) -> str:
    made = str(project / "shared.duckdb")
    with of(made).driver.session("publish") as session:
        session.run("CREATE TABLE t (i INTEGER)")
        session.run("INSERT INTO t VALUES (1)")
    return made


def test_a_file_that_is_removed_while_it_is_written(file: str) -> None:
    tables = of(file)
    with (
        pytest.raises(ConnectionFailedError, match="removed or replaced while it was written"),
        tables.driver.session("publish") as session,
    ):
        session.run("INSERT INTO t VALUES (2)")
        os.remove(file)
    with tables.driver.session("publish") as session:
        session.run("CREATE TABLE t (i INTEGER)")


def of(file: str) -> tables.DuckDBTables:
    return tables.DuckDBTables(weft.DuckDBConnection(file, name="shared"))


class Holder:
    def __init__(self, file: str, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, file, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "open\n"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def hold(file: str) -> Iterator[type[Holder]]:
    made: list[Holder] = []

    def make(how: str) -> Holder:
        made.append(Holder(file, how))
        return made[-1]

    yield make  # type: ignore[misc]
    for holder in made:
        holder.process.kill()
        holder.process.communicate()


@pytest.mark.timing
def test_a_writer_waits_for_another_process(file: str, hold: type[Holder]) -> None:
    holder = hold("write")  # type: ignore[call-arg]
    timer = threading.Timer(0.5, holder.close)
    timer.start()
    began = time.monotonic()
    with of(file).driver.session("publish") as session:
        session.run("INSERT INTO t VALUES (2)")
    assert time.monotonic() - began > 0.4
    timer.join()


@pytest.mark.timing
def test_who_waits_in_vain_is_told_for_whom(file: str, hold: type[Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "WAIT_SECONDS", 0.3)
    holder = hold("write")  # type: ignore[call-arg]
    for role in ("read", "publish"):
        with (
            pytest.raises(BusyError, match=f"the process {holder.process.pid} ") as caught,
            of(file).driver.session(role),
        ):  # type: ignore[arg-type]
            pass
        assert "the connection 'shared'" in str(caught.value)


def test_readers_share(file: str, hold: type[Holder]) -> None:
    hold("read")  # type: ignore[call-arg]
    with of(file).driver.session("read") as session, of(file).driver.session("read") as other:
        assert session.rows("FROM t") == other.rows("FROM t") == [(1,)]


def test_nothing_stays_open(file: str, hold: type[Holder]) -> None:
    mine = of(file)
    with mine.driver.session("publish") as session:
        session.run("INSERT INTO t VALUES (2)")
    assert [b.num_rows for b in mine.read(tables.Slice("FROM t"), mine.describe("FROM t"))] == [2]
    hold("write")  # type: ignore[call-arg]


def test_who_stops_reading_closes_the_file(file: str, hold: type[Holder]) -> None:
    mine = of(file)
    sql = "SELECT * FROM range(1000000) AS r(i)"
    batches = mine.read(tables.Slice(sql), mine.describe(sql))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    hold("write")  # type: ignore[call-arg]


def test_readers_see_what_was_committed_while_this_process_writes(file: str) -> None:
    mine = of(file)
    with mine.driver.session("publish") as session:
        session.run("INSERT INTO t VALUES (2)")
        with mine.driver.session("read") as reader:
            assert reader.rows("FROM t") == [(1,)]
    with mine.driver.session("read") as reader:
        assert reader.rows("FROM t ORDER BY i") == [(1,), (2,)]


@pytest.mark.timing
def test_writers_of_one_process_take_turns(file: str) -> None:
    def add() -> None:
        with of(file).driver.session("publish") as session:
            session.run("UPDATE t SET i = i + 1")

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with of(file).driver.session("read") as reader:
        assert reader.rows("FROM t") == [(9,)]


def test_a_conflict_with_another_part_of_this_process_can_be_tried_again(file: str) -> None:
    with of(file).driver.session("publish") as session:
        session.run("UPDATE t SET i = 5")
        # Not one of ours, but in the same process.
        with duckdb.connect(file, config=dict(CONFIG)) as other, pytest.raises(duckdb.TransactionException) as caught:
            other.execute("UPDATE t SET i = 6")
        assert isinstance(session.store.explain(caught.value), BusyError)


def test_a_process_that_dies_leaves_nothing_locked_and_nothing_half_done(file: str) -> None:
    code = (
        "import sys, os, weft; from weft.systems.duckdb.tables import DuckDBTables\n"
        "with DuckDBTables(weft.DuckDBConnection(sys.argv[1])).driver.session('publish') as session:\n"
        "    session.run('INSERT INTO t SELECT * FROM range(200000)')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, file], env=os.environ, check=False)
    assert done.returncode == -9
    with of(file).driver.session("publish") as session:
        assert session.rows("FROM t") == [(1,)]
