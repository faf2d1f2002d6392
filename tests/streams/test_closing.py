"""`close`, while others publish, consume and open: nobody waits for ever, and what is closed stays closed."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import weft
import weft.streams
import weft.testing
from marks import on_tables
from servers import wait_until
from weft import ConnectionFailedError
from weft.project import Project, use
from weft.streams.runtime import open_stream
from weft.streams.watch import Watch
from weft.systems.log import Batch
from weft.systems.sqlite.store import SqliteStore
from workers import declare, drain


def numbers() -> list[int]:
    return [event["n"] for event in drain("orders", "check")]


@pytest.mark.timing
@pytest.mark.parametrize("way", ["sync", "async"])
def test_publish_during_close(streams: Project, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was queued before is committed, what comes later is refused: nobody waits behind the end."""
    declare(fields={"n": "int64"})
    ready = open_stream("orders")
    hub: Any = ready.hub
    entered, go_on, append = threading.Event(), threading.Event(), hub.store.append

    def slow(batches: Any) -> Any:
        entered.set()
        go_on.wait()
        return append(batches)

    def publish(n: int) -> Any:
        if way == "sync":
            return weft.publish_sync("orders", {"n": n})
        return asyncio.run(weft.publish("orders", {"n": n}))

    monkeypatch.setattr(hub.store, "append", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(publish, 1)
        entered.wait()
        second = pool.submit(publish, 2)
        wait_until(lambda: hub.committer._queue.qsize() == 1, "the second publish to be queued")
        closed = pool.submit(hub.close)
        wait_until(lambda: hub.committer._closed, "the hub to be closing")
        late = pool.submit(publish, 3)
        with pytest.raises(ConnectionFailedError, match="was closed"):
            late.result(timeout=30)
        go_on.set()
        assert first.result(timeout=30)["status"] == second.result(timeout=30)["status"] == "accepted"
        closed.result(timeout=30)
    weft.streams.close()
    assert numbers() == [1, 2]


def test_closed_by_a_signal_in_the_middle_of_a_publish(streams: Project) -> None:
    """A handler runs in the thread that it interrupts, which may hold any lock."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    committer: Any = open_stream("orders").hub.committer
    queue, put = committer._queue, committer._queue.put

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(queue, name)

        def put(self, ticket: Any) -> None:
            if ticket is not None:
                committer.close()
            put(ticket)

    committer._queue = Interrupted()
    with ThreadPoolExecutor() as pool, pytest.raises(ConnectionFailedError, match="was closed"):
        pool.submit(weft.publish_sync, "orders", {"n": 2}).result(timeout=30)


def test_publish_after_close(streams: Project) -> None:
    """What was closed refuses at once; the next use by name opens another."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    before = open_stream("orders").hub
    weft.streams.close()
    weft.streams.close()
    before.close()
    weft.publish_sync("orders", {"n": 2})
    assert open_stream("orders").hub is not before
    assert numbers() == [1, 2]


def test_closed_while_a_stream_is_opened(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is not kept with a hub that is closed: it would be refused from then on."""
    declare(fields={"n": "int64"})
    hub: Any = open_stream("orders").hub
    declare("others", fields={"n": "int64"})
    opened = hub.store.open

    def slow(*arguments: Any) -> Any:
        log = opened(*arguments)
        weft.streams.close()
        return log

    monkeypatch.setattr(hub.store, "open", slow)
    ready = open_stream("others")
    assert ready.hub is not hub
    assert weft.publish_sync("others", {"n": 1})["status"] == "accepted"
    assert open_stream("others") is ready


def test_every_project_is_closed(streams: Project) -> None:
    """Also one that is not in use at the end of the process."""
    from weft.streams import runtime

    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    committer: Any = open_stream("orders").hub.committer
    with use(Project()):
        runtime._close_all()
    assert committer._closed
    assert not committer._thread.is_alive()


@pytest.mark.timing
def test_a_host_that_does_not_answer_delays_nobody_else(tmp_path: Path) -> None:
    """The first use of another connection does not wait for it."""
    pytest.importorskip("psycopg")
    with closing(socket.socket()) as silent, ThreadPoolExecutor() as pool, use(Project()) as project:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        declare("far", connection=weft.connect(url=f"postgres://me@127.0.0.1:{port}/db?connect_timeout=60"))
        declare("near", connection=weft.connect(url=f"sqlite:///{tmp_path / 'near.db'}"))
        far = pool.submit(weft.publish_sync, "far", {"n": 1})
        accepted, _ = silent.accept()
        assert pool.submit(weft.publish_sync, "near", {"n": 1}).result(timeout=30)["status"] == "accepted"
        assert not far.done()
        accepted.close()
        silent.close()
        with pytest.raises(ConnectionFailedError):
            far.result(timeout=30)
        weft.streams.close(project)


# ----------------------------------------------------------------------------------------------------- closed for good


def idle(store: Any) -> int:
    return int(store._client is not None) if hasattr(store, "_client") else sum(map(len, store._idle.values()))


@pytest.mark.brief("sqlite-async", "postgres-sync", "mysql-async", "redis-sync")
@pytest.mark.timing
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_consumer_that_waits_is_told(streams: Project, way: str) -> None:
    """It would else open connections again that nobody closes."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    weft.ack_sync("orders", "c", weft.consume_sync("orders", "c"))
    hub: Any = open_stream("orders").hub

    def consume() -> Any:
        if way == "sync":
            return weft.consume_sync("orders", "c", wait=60)
        return asyncio.run(weft.consume("orders", "c", wait=60))

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(consume)
        wait_until(lambda: hub.watch._waiting > 0, "the consumer to wait")
        weft.streams.close()
        with pytest.raises(ConnectionFailedError, match="was closed"):
            waiting.result(timeout=30)
    assert idle(hub.store) == 0


def test_a_store_that_was_closed(streams: Project) -> None:
    """Whoever still holds it gets an error, from every call."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    ready = open_stream("orders")
    store: Any = ready.hub.store
    batches = ready.log.read_arrow(0, 2**62)
    weft.streams.close()
    for call in (
        store.names,
        ready.log.head,
        lambda: ready.log.lease("c", "m", 1, 60),
        lambda: list(ready.log.read_arrow(0, 2**62)),
        lambda: list(batches),
        lambda: store.open("events", "others", {}),
        lambda: store.append([Batch(ready.log, [("p", 1)], ("n",), [[1]])]),
    ):
        with pytest.raises(ConnectionFailedError, match="was closed"):
            call()
    assert idle(store) == 0
    assert numbers() == [1]


@on_tables
def test_a_connection_that_is_in_use_at_the_end_is_closed_later(streams: Project) -> None:
    declare(fields={"n": "int64"})
    store: Any = open_stream("orders").hub.store
    with store.session("read") as session:
        store.close()
        assert session.row("SELECT 1") == (1,)
    assert idle(store) == 0


def test_a_database_in_memory_does_not_begin_anew() -> None:
    with weft.testing.project():
        declare(fields={"n": "int64"})
        weft.publish_sync("orders", {"n": 1})
        log = open_stream("orders").log
    with pytest.raises(ConnectionFailedError, match="was closed"):
        log.count()


# --------------------------------------------------------------------------------------------------------------- SQLite


@pytest.mark.timing
@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_watching_ends_with_its_last_reader(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that nobody needs would keep the file open."""
    monkeypatch.setattr(Watch, "_LINGER_SECONDS", 0.05)
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    weft.ack_sync("orders", "c", weft.consume_sync("orders", "c"))
    store: Any = open_stream("orders").hub.store
    for n in (2, 3):
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(weft.consume_sync, "orders", "c", wait=60)
            wait_until(lambda: store._watcher is not None, "the watch")
            weft.publish_sync("orders", {"n": n})
            events = waiting.result(timeout=30)
        weft.ack_sync("orders", "c", events)
        assert [event["n"] for event in events] == [n]
        wait_until(lambda: store._watcher is None, "the watch to end")


@pytest.mark.parametrize(
    ("code", "stored"),
    [
        (sqlite3.SQLITE_FULL, "Nothing was stored"),
        (sqlite3.SQLITE_READONLY, "Nothing was stored"),
        (sqlite3.SQLITE_IOERR, "may or may not be stored"),
        (sqlite3.SQLITE_IOERR_FSYNC, "may or may not be stored"),
    ],
)
def test_what_a_failed_disk_leaves_behind(code: int, stored: str, tmp_path: Path) -> None:
    """A commit that the disk did not confirm may be there after a restart."""
    store = SqliteStore(weft.connect(url=f"sqlite:///{tmp_path / 'x.db'}"))
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    explained = store.explain(error)
    assert isinstance(explained, weft.StorageError)
    assert stored in (explained.hint or "")
