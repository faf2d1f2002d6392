"""Tables and databases that somebody drops, removes or replaces under a running process."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.project import Project
from weft.streams.runtime import close, open_stream
from workers import declare, start


@contextmanager
def sql(system: Any) -> Iterator[Any]:
    """A session of another process, so to say."""
    store: Any = type(open_stream("orders").hub.store)(system.connection)
    try:
        with store.session("read") as session:
            yield session
    finally:
        store.close()


def table(system: Any, name: str = "orders") -> str:
    store: Any = open_stream("orders").hub.store
    return str(store.table("events", name))


def numbers() -> list[int]:
    log = open_stream("orders", to_read=True).log
    page = log.read(0, log.head(), 100)
    return list(dict(zip(page.names, page.columns, strict=True)).get("n", []))


DATABASES = pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)


@pytest.fixture
def orders(streams: Project) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", [{"n": 0, "more": "x"}, {"n": 1}])
    assert [event["n"] for event in weft.consume_sync("orders", "worker")] == [0, 1]


@DATABASES
def test_a_dropped_table_is_made_again(orders: None, system: Any) -> None:
    last = open_stream("orders").log.head()
    with sql(system) as session:
        session.run(f"DROP TABLE {table(system)}")
    with pytest.raises(weft.WeftError, match="the next publish or consume makes it again"):
        numbers()
    done = weft.publish_sync("orders", {"n": 2, "more": "y"})
    assert done["first_rowid"] > last, "an offset was used again"
    assert numbers() == [2]
    with suppress(weft.EventsLostError):
        assert [event["n"] for event in weft.consume_sync("orders", "worker")] == [2]


@DATABASES
def test_a_dropped_table_seen_by_a_new_process(orders: None, system: Any) -> None:
    with sql(system) as session:
        session.run(f"DROP TABLE {table(system)}")
    close()
    assert open_stream("orders", to_read=True).log.head() == 0
    assert weft.publish_sync("orders", {"n": 2})["rows_received"] == 1
    assert numbers() == [2]


@DATABASES
def test_a_consumer_of_a_dropped_table(orders: None, system: Any) -> None:
    """It waits for a publisher, as for a stream that nobody made yet."""
    with sql(system) as session:
        session.run(f"DROP TABLE {table(system)}")
    with suppress(weft.EventsLostError):
        assert weft.consume_sync("orders", "other") == []
    weft.publish_sync("orders", {"n": 2})
    assert [event["n"] for event in weft.consume_sync("orders", "other")] == [2]


def drop_everything(system: Any) -> None:
    with sql(system) as session:
        if system.kind == "postgres":
            session.run("DROP SCHEMA weft CASCADE")
            session.run("DROP SCHEMA events CASCADE")
        else:
            (database,) = session.row("SELECT database()")
            session.run(f"DROP DATABASE `{database}`")
            session.run(f"CREATE DATABASE `{database}`")


@pytest.mark.parametrize("system", ["postgres", "mysql"], indirect=True)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "made again elsewhere"])
def test_a_database_that_is_made_again(orders: None, system: Any, elsewhere: bool) -> None:
    """Also where another process made the tables again, and the stream's number is another one."""
    reader = open_stream("orders", to_read=True).log
    assert reader.head() > 0
    drop_everything(system)
    if elsewhere:
        code = (
            'declare("others"); declare(); weft.publish_sync("others", {"n": 7}); weft.publish_sync("orders", {"n": 2})'
        )
        start(f"{code}; answer(1)").answer()
    else:
        weft.publish_sync("orders", {"n": 2})
    done = weft.publish_sync("orders", {"n": 3}, idempotency_key="k")
    assert done["rows_received"] == 1
    assert numbers() == [2, 3]
    assert [event["n"] for event in weft.consume_sync("orders", "worker")] == [2, 3]
    assert weft.ack_sync("orders", "worker", weft.consume_sync("orders", "worker")) == 2


# ------------------------------------------------------------------------------------------------------ files of SQLite

SQLITE = pytest.mark.parametrize("system", ["sqlite"], indirect=True)


def path_of(system: Any) -> Path:
    return Path(system.connection.resolved().path)


@SQLITE
@pytest.mark.parametrize("with_log", [False, True], ids=["the file alone", "with its log"])
def test_a_file_that_is_removed(orders: None, system: Any, with_log: bool) -> None:
    path = path_of(system)
    for each in path.parent.glob(f"{path.name}*") if with_log else [path]:
        each.unlink()
    assert weft.publish_sync("orders", {"n": 2})["rows_received"] == 1
    assert numbers() == [2]
    assert [event["n"] for event in weft.consume_sync("orders", "worker")] == [2]
    close()
    with sqlite3.connect(path) as other:
        assert other.execute('SELECT n FROM "events.orders"').fetchall() == [(2,)]
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@SQLITE
def test_a_backup_that_is_restored(orders: None, system: Any, tmp_path: Path) -> None:
    """The log of the old file is not taken for one of the backup."""
    path = path_of(system)
    with sqlite3.connect(path) as live, sqlite3.connect(tmp_path / "backup.db") as backup:
        live.backup(backup)
    weft.publish_sync("orders", [{"n": n} for n in range(10, 500)])
    os.replace(tmp_path / "backup.db", path)
    assert numbers() == [0, 1]
    assert weft.publish_sync("orders", {"n": 2})["rows_received"] == 1
    assert numbers() == [0, 1, 2]
    close()
    with sqlite3.connect(path) as other:
        assert other.execute('SELECT n FROM "events.orders"').fetchall() == [(0,), (1,), (2,)]
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@SQLITE
def test_a_file_that_is_moved_away(orders: None, system: Any, tmp_path: Path) -> None:
    """It has what was stored up to then, also what was in its log."""
    weft.publish_sync("orders", {"n": 2})
    shutil.move(path_of(system), tmp_path / "moved.db")
    weft.publish_sync("orders", {"n": 3})
    assert numbers() == [3]
    with sqlite3.connect(tmp_path / "moved.db") as moved:
        assert moved.execute('SELECT n FROM "events.orders"').fetchall() == [(0,), (1,), (2,)]


@SQLITE
def test_a_file_that_is_removed_during_a_publish(orders: None, system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is acknowledged is in the file that is there."""
    store: Any = open_stream("orders").hub.store
    commit = store.commit

    def remove_and_commit(driver: Any, role: Any) -> None:
        if role == "publish":
            path_of(system).unlink(missing_ok=True)
        commit(driver, role)

    monkeypatch.setattr(store, "commit", remove_and_commit)
    with pytest.raises(weft.ConnectionFailedError, match="removed or replaced while it was written"):
        weft.publish_sync("orders", {"n": 2})
    monkeypatch.undo()
    weft.publish_sync("orders", {"n": 2})
    assert numbers() == [2]


@SQLITE
@pytest.mark.timing
def test_a_reader_follows_the_new_file(orders: None, system: Any) -> None:
    hub = open_stream("orders").hub
    seen = hub.store.changed(None, 0)
    path_of(system).unlink()
    start('declare(); weft.publish_sync("orders", {"n": 2}); answer(1)').answer()
    assert hub.store.changed(seen, 5) != seen
    assert numbers() == [2]


# --------------------------------------------------------------------------------------------------------------- delete


def test_delete_a_stream(orders: None, system: Any) -> None:
    """Nothing of it is left, and the next publish makes it anew; others stay."""
    declare("others")
    weft.publish_sync("others", {"n": 7}, idempotency_key="k")
    weft.publish_sync("orders", {"n": 2}, idempotency_key="k")
    assert weft.delete_stream_sync("orders") is True
    store: Any = open_stream("others").hub.store
    assert store.names() == [("events", "others")]
    assert weft.delete_stream_sync("orders") is False
    assert numbers() == []
    assert weft.groups_sync("orders") == []
    weft.publish_sync("orders", {"n": 3}, idempotency_key="k")
    assert numbers() == [3]
    assert list(open_stream("orders").log.fields()) == ["n"]
    assert [event["n"] for event in weft.consume_sync("orders", "worker")] == [3]
    assert [event["n"] for event in weft.consume_sync("others", "worker")] == [7]
    if system.kind == "redis":
        weft.delete_stream_sync("orders")
        assert not [key for key in store.command("KEYS", "*") if b"orders" in key]


def test_delete_a_stream_that_another_process_uses(orders: None) -> None:
    process = start("""
        declare(fields={"n": "int64"})
        weft.publish_sync("orders", {"n": 2})
        line()
        answer(weft.publish_sync("orders", [{"n": 3}, {"n": 4}])["rows_received"])
    """)
    process.ready()
    weft.delete_stream_sync("orders")
    process.tell()
    assert process.answer() == 2
    assert numbers() == [3, 4]


async def test_delete_a_stream_with_asyncio(orders: None) -> None:
    assert await weft.delete_stream("orders") is True
    assert numbers() == []
