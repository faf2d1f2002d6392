"""Tables and databases that somebody drops, removes or replaces under a running process."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.project import Project, use
from weft.streams.runtime import close, open_stream
from weft.systems.file_connection import file_number, is_file
from weft.systems.log import Batch, ColumnsChangedError
from weft.systems.sqlite import sessions
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
def test_no_offset_is_used_again_where_nobody_consumed(streams: Project, system: Any) -> None:
    """A model, a pipeline or a subscriber that had read up to the last one would skip the next events."""
    declare(fields={"n": "int64"})
    last = weft.publish_sync("orders", [{"n": n} for n in range(1500)])["last_rowid"]
    for _ in range(2):
        with sql(system) as session:
            session.run(f"DROP TABLE {table(system)}")
        done = weft.publish_sync("orders", {"n": 7})
        assert done["first_rowid"] > last
        last = done["last_rowid"]


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


@DATABASES
def test_a_column_that_went_while_its_event_was_encoded(orders: None, system: Any) -> None:
    """Another thread deleted the stream, and made it again of other columns."""
    ready = open_stream("orders")
    with pytest.raises(ColumnsChangedError):
        ready.hub.store.append([Batch(ready.log, [("p", 1)], ("gone",), [[1]])])
    assert numbers() == [0, 1]


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
        start("""
            declare("others"); declare()
            weft.publish_sync("others", {"n": 7}, idempotency_key="k")
            weft.publish_sync("orders", {"n": 2})
            answer(1)
        """).answer()
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
@pytest.mark.parametrize("is_there", [False, True], ids=["removed", "replaced by an empty one"])
def test_a_new_stream_in_a_file_that_is_removed(orders: None, system: Any, is_there: bool) -> None:
    declare("others", fields={"n": "int64"})
    path = path_of(system)
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    if is_there:
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE t (i INTEGER)")
    assert weft.publish_sync("others", {"n": 2})["rows_received"] == 1
    assert [event["n"] for event in weft.consume_sync("others", "worker")] == [2]


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


def backup_of(path: Path, to: Path) -> Path:
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(to)) as backup:
        live.backup(backup)
    return to


def stored(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return [n for (n,) in other.execute('SELECT n FROM "events.orders"')]


def test_a_file_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """It is neither gone nor another one."""
    (tmp_path / "file").write_text("")
    number = file_number(str(tmp_path / "file"))
    (tmp_path / "loop").symlink_to("loop")
    assert is_file(str(tmp_path / "file"), number) and is_file(str(tmp_path / "loop"), number)
    assert not is_file(str(tmp_path / "none"), number) and not is_file(str(tmp_path), number)


@SQLITE
@pytest.mark.timing
def test_a_file_that_is_away_for_a_moment(orders: None, system: Any, tmp_path: Path) -> None:
    """Whoever looks meanwhile leaves the log alone: another process still writes to it."""
    process = start("""
        declare(fields={"n": "int64"})
        weft.publish_sync("orders", {"n": 2})
        line()
        answer(weft.publish_sync("orders", {"n": 3})["rows_received"])
    """)
    process.ready()
    path, log = path_of(system), open_stream("orders").log
    assert log.count() == 3
    os.rename(path, tmp_path / "away.db")
    with pytest.raises(weft.ConnectionFailedError, match="there is no file"):
        log.count()
    os.rename(tmp_path / "away.db", path)
    assert log.count() == 3
    process.tell()
    assert process.answer() == 1
    assert log.count() == 4
    weft.publish_sync("orders", {"n": 4})
    close()
    assert stored(path) == [0, 1, 2, 3, 4]


@SQLITE
def test_a_backup_that_is_restored_after_a_while(orders: None, system: Any, tmp_path: Path) -> None:
    """The log that waits for a file to come back is removed once another one is there."""
    path, log = path_of(system), open_stream("orders").log
    backup = backup_of(path, tmp_path / "backup.db")
    weft.publish_sync("orders", [{"n": n} for n in range(10, 500)])
    path.unlink()
    with pytest.raises(weft.ConnectionFailedError, match="there is no file"):
        log.count()
    os.replace(backup, path)
    assert numbers() == [0, 1]
    close()
    assert stored(path) == [0, 1]


@SQLITE
def test_a_read_during_which_the_file_is_replaced(orders: None, system: Any, tmp_path: Path) -> None:
    """The log of the new file is not taken for that of the old one."""
    path, store = path_of(system), open_stream("orders").hub.store
    backup = backup_of(path, tmp_path / "backup.db")
    assert isinstance(store, sessions.SqliteSessions)
    store.drop_idle()
    with store.session("read") as session:
        session.rows('SELECT * FROM "events.orders"')
        os.replace(backup, path)
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("""INSERT INTO "events.orders" (n, _weft_published_at, _weft_publish_id)
                         SELECT 2, _weft_published_at, _weft_publish_id FROM "events.orders" LIMIT 1""")
        log = os.stat(f"{path}-wal").st_ino
    with closing(other):
        assert numbers() == [0, 1, 2]
        assert os.stat(f"{path}-wal").st_ino == log


@SQLITE
def test_a_watcher_knows_its_log(orders: None, system: Any, tmp_path: Path) -> None:
    path, store = path_of(system), open_stream("orders").hub.store
    backup = backup_of(path, tmp_path / "backup.db")
    weft.publish_sync("orders", [{"n": n} for n in range(10, 500)])
    seen = store.changed(None, 0)
    os.replace(backup, path)
    assert store.changed(seen, 0) != seen
    assert numbers() == [0, 1]
    close()
    assert stored(path) == [0, 1]


@SQLITE
def test_a_file_behind_a_symbolic_link(streams: Project, tmp_path: Path) -> None:
    """SQLite has its log beside the real file."""
    declare(fields={"n": "int64"})
    (tmp_path / "real").mkdir()
    link, real = tmp_path / "link.db", tmp_path / "real" / "app.db"
    link.symlink_to(real)
    connection = weft.SQLiteConnection(str(link))
    weft.publish_sync("orders", [{"n": 0}, {"n": 1}], connection=connection)
    backup = backup_of(real, tmp_path / "backup.db")
    weft.publish_sync("orders", [{"n": n} for n in range(10, 500)], connection=connection)
    os.replace(backup, real)
    weft.publish_sync("orders", {"n": 2}, connection=connection)
    # A link to another file: the log of the first one stays.
    shutil.copy(backup_of(real, tmp_path / "backup.db"), tmp_path / "second.db")
    link.unlink()
    link.symlink_to(tmp_path / "second.db")
    weft.publish_sync("orders", {"n": 3}, connection=connection)
    close()
    assert stored(real) == [0, 1, 2]
    assert stored(link) == [0, 1, 2, 3]


@SQLITE
def test_a_file_that_is_moved_away_while_somebody_reads_it(
    orders: None, system: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the log alone has stays in it."""
    path, moved = path_of(system), tmp_path / "moved.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute('SELECT * FROM "events.orders"').fetchall()
        weft.publish_sync("orders", {"n": 2})
        shutil.move(path, moved)
        weft.publish_sync("orders", {"n": 3})
    assert numbers() == [3]
    (aside,) = path.parent.glob(f"{path.name}-wal.*")
    assert str(aside) in caplog.text
    aside.rename(f"{moved}-wal")
    assert stored(moved) == [0, 1, 2]


@SQLITE
def test_a_folder_that_another_process_locks(
    orders: None, system: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it for long, and an old log that cannot be removed is not taken for a new one."""
    monkeypatch.setattr(sessions, "_FOLDER_SECONDS", 0.01)
    path = path_of(system)
    backup = backup_of(path, tmp_path / "backup.db")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        weft.publish_sync("orders", {"n": 2}, connection=weft.SQLiteConnection(str(path.parent / "new.db")))
        os.replace(backup, path)
        with pytest.raises(weft.BusyError, match="locked the folder"):
            weft.publish_sync("orders", {"n": 3})
    finally:
        os.close(folder)
    weft.publish_sync("orders", {"n": 3})
    assert numbers() == [0, 1, 3]


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


@DATABASES
def test_a_number_is_not_given_again(streams: Project, system: Any) -> None:
    """The keys and the floor of another stream are not taken for those of one that was deleted and made anew."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 0}, idempotency_key="first")
    log = open_stream("orders").log
    start("""
        declare(fields={"n": "int64"}); declare("others", fields={"n": "int64"})
        weft.delete_stream_sync("orders")
        weft.publish_sync("others", [{"n": n} for n in range(9)])
        weft.trim_sync("others", max_rows=1)
        weft.publish_sync("others", {"n": 9}, idempotency_key="k")
        weft.publish_sync("orders", [{"n": 1}, {"n": 2}, {"n": 3}])
        weft.consume_sync("orders", "worker")
        answer(1)
    """).answer()
    assert log.floor() == 0
    assert sum(batch.num_rows for batch in log.read_arrow(0, 100)) == 3
    assert [group["consumer"] for group in weft.groups_sync("orders")] == ["worker"]
    assert weft.publish_sync("orders", {"n": 4}, idempotency_key="k")["rows_deduplicated"] == 0
    assert numbers() == [1, 2, 3, 4]


@DATABASES
def test_keys_of_a_stream_made_anew_elsewhere(streams: Project, system: Any) -> None:
    """The first use after that is a publish with a key."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 0}, idempotency_key="first")
    start("""
        declare(fields={"n": "int64"}); declare("others", fields={"n": "int64"})
        weft.delete_stream_sync("orders")
        weft.publish_sync("others", {"n": 9}, idempotency_key="k")
        weft.publish_sync("orders", {"n": 1}, idempotency_key="used")
        answer(1)
    """).answer()
    assert weft.publish_sync("orders", {"n": 2}, idempotency_key="k")["rows_deduplicated"] == 0
    assert weft.publish_sync("orders", {"n": 1}, idempotency_key="used")["rows_deduplicated"] == 1
    assert numbers() == [1, 2]


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
@pytest.mark.timing
def test_delete_waits_for_consumers(orders: None, system: Any) -> None:
    """It holds no table that they need meanwhile."""
    store: Any = open_stream("orders").hub.store
    with ThreadPoolExecutor(1) as pool:
        with store.session("keep") as consumer:
            consumer.run(f"SELECT * FROM {store.groups} FOR UPDATE")
            deleted = pool.submit(weft.delete_stream_sync, "orders")
            deadline = time.monotonic() + 10
            while not consumer.value("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                assert time.monotonic() < deadline and not deleted.done()
            consumer.run("SET LOCAL lock_timeout = '2s'")
            assert consumer.value(f"SELECT count(*) FROM {table(system)}") == 2
        assert deleted.result() is True


def test_dead_letters_of_a_stream_made_anew(streams: Project) -> None:
    """Its events have the offsets of those before, and are letters of their own."""
    declare(fields={"n": "int64"}, max_deliveries=1)
    for n in (1, 2):
        weft.publish_sync("orders", {"n": n})
        assert [event["n"] for event in weft.consume_sync("orders", "worker")] == [n]
        weft.nack_sync("orders", "worker", weft.consume_sync("orders", "worker"))
        assert weft.consume_sync("orders", "worker") == []
        weft.delete_stream_sync("orders")
    letters = weft.read_stream(streams.connection(), "orders__dead_letter", to="arrow")
    assert len(letters) == 2


async def test_delete_a_stream_with_asyncio(orders: None) -> None:
    assert await weft.delete_stream("orders") is True
    assert numbers() == []


@contextmanager
def elsewhere(system: Any) -> Iterator[Any]:
    """The stream as another process has it, so to say, and that process's connection."""
    project = Project()
    try:
        with use(project):
            yield weft.stream(name="orders")(elsewhere), system.connection
    finally:
        close(project)


@DATABASES
async def test_readers_of_a_stream_that_another_process_deletes(orders: None, system: Any) -> None:
    """It is empty, as to those that begin after that; then they get what is published anew."""
    live = weft.subscribe("orders", since="start")
    assert [(await anext(live))["n"] for _ in range(2)] == [0, 1]
    with elsewhere(system) as (stream, connection):
        weft.delete_stream_sync(stream, connection=connection)
    assert numbers() == []
    assert weft.groups_sync("orders") == []
    assert weft.trim_sync("orders", max_rows=1) == 0
    assert open_stream("orders", to_read=True).log.count() == 0
    with pytest.raises(weft.EventsLostError, match="ends at offset 0"):
        await anext(live)
    with elsewhere(system) as (stream, connection):
        weft.publish_sync(stream, {"n": "a text"}, connection=connection)
    assert (await anext(live))["n"] == "a text"
    assert weft.reset_sync("orders", "worker", "end") == 1


@DATABASES
def test_a_new_field_of_a_stream_that_another_process_deleted(orders: None, system: Any) -> None:
    with elsewhere(system) as (stream, connection):
        weft.delete_stream_sync(stream, connection=connection)
    weft.publish_sync("orders", {"n": 2, "new": 1})
    assert [(event["n"], event["new"]) for event in weft.consume_sync("orders", "worker")] == [(2, 1)]


@DATABASES
@pytest.mark.parametrize(
    "before, then", [(1, "x"), ("x", 1), ({"a": 1}, "x"), ("a text", datetime(2026, 1, 31, tzinfo=UTC))]
)
def test_a_stream_that_another_process_made_anew_of_other_types(
    streams: Project, system: Any, before: Any, then: Any
) -> None:
    """Values do not become those of other columns."""
    declare()
    weft.publish_sync("orders", {"value": before})
    with elsewhere(system) as (stream, connection):
        weft.delete_stream_sync(stream, connection=connection)
        weft.publish_sync(stream, {"value": then}, connection=connection)
    weft.publish_sync("orders", {"value": before})
    assert [event["value"] for event in weft.consume_sync("orders", "worker")][1:] == [before]
