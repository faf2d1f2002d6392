"""Which connections to SQLite wait for the disk, and how long a writer waits for another."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import weft
from weft.errors import BusyError
from weft.systems.sqlite import sessions
from weft.systems.sqlite.sessions import SqliteSessions

NORMAL, FULL = 1, 2


@pytest.mark.parametrize(("durable_acks", "expected"), [(False, NORMAL), (True, FULL)])
def test_durability(durable_acks: bool, expected: int) -> None:
    """Publishes always wait, acks where the connection says so."""
    connection = weft.SQLiteConnection("events.db", durable_acks=durable_acks)
    with closing(SqliteSessions(connection)) as driver:
        for role, level in (("publish", FULL), ("keep", expected)):
            with driver.session(role) as session:  # type: ignore[arg-type]
                assert session.row("PRAGMA synchronous") == (level,)


def test_time_in_which_a_writer_stood_still_is_not_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped, with whoever has the lock, gives them the time to go on."""
    path, stops = str(tmp_path / "still.db"), [40.0, 40.0, 0.0]
    now = 1000.0
    driver = SqliteSessions(weft.SQLiteConnection(path))
    with closing(driver), closing(sqlite3.connect(path, isolation_level=None)) as other:
        with driver.session("publish") as session:
            session.run("CREATE TABLE t (n INT)")

        def stand_still(_: float) -> None:
            nonlocal now
            now += stops.pop(0)
            if not stops:
                other.execute("ROLLBACK")

        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: now, sleep=stand_still))
        with driver.session("publish") as session:
            session.run("INSERT INTO t VALUES (1)")
        assert stops == []
        # One that waits all the time gives up.
        other.execute("BEGIN IMMEDIATE")
        stops = [0.9] * 100
        with pytest.raises(BusyError, match="30 seconds"), driver.session("publish"):
            pass
        assert len(stops) == 66


def test_a_file_that_is_not_in_wal_mode_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others made it, and write to it when the first connection is opened."""
    path, sleep = str(tmp_path / "other.db"), time.sleep
    driver = SqliteSessions(weft.SQLiteConnection(path))
    with closing(driver), closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE t (n INT)")
        other.execute("BEGIN IMMEDIATE")

        def end(seconds: float) -> None:
            if other.in_transaction:
                other.execute("COMMIT")
            sleep(seconds)

        monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=time.monotonic, sleep=end))
        with driver.session("keep") as session:
            session.run("INSERT INTO t VALUES (1)")
        assert other.execute("SELECT n FROM t").fetchall() == [(1,)]


def test_a_file_that_is_not_in_wal_mode_and_stays_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "other.db")
    driver = SqliteSessions(weft.SQLiteConnection(path))
    monkeypatch.setattr(sessions, "LOCK_SECONDS", 0.2)
    with closing(driver), closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE t (n INT)")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BusyError, match="has been locked"), driver.session("keep"):
            pass
        other.execute("COMMIT")
        with driver.session("keep") as session:
            session.run("INSERT INTO t VALUES (1)")
