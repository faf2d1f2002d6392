"""A database that somebody else has locked: publish waits for them, and says so when it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import pytest

import servers
from faults.actors import actor, declared, said
from weft.dataframes.reading import read_stream
from weft.errors import BusyError
from weft.project import Project, connect, use
from weft.streams import ack_sync, consume_sync, groups_sync, publish_sync, subscribe
from weft.streams.declare import Stream
from weft.streams.events import to_dicts
from weft.streams.runtime import close, open_stream
from weft.systems.sqlite.sessions import SqliteSessions

pytestmark = pytest.mark.timing

STREAM = "locked"
LIMITS = {"sqlite": 0.2, "postgres": 0.2, "mysql": 1}  # seconds; MySQL knows no less


def hold(pipe: Pipe, kind: str, url: str, statements: list[str]) -> None:
    """Run statements in a transaction, and keep it open until told to end it."""
    driver: Any
    if kind == "sqlite":
        import sqlite3

        driver = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    elif kind == "postgres":
        import psycopg

        driver = psycopg.connect(url)
    else:
        import pymysql

        parameters = connect(url=url).resolved().parameters()
        driver = pymysql.connect(**{**parameters, "ssl_disabled": True})
    cursor = driver.cursor()
    for statement in statements:
        cursor.execute(statement)
        if cursor.description:
            cursor.fetchall()
    pipe.send("locked")
    pipe.recv()
    driver.rollback()
    driver.close()
    pipe.send("free")


# What is in the way of a publish: the first leaves readers alone, the second does not (but SQLite's never wait).
LOCKS = {
    "sqlite": [["BEGIN IMMEDIATE"], ["BEGIN EXCLUSIVE"]],
    "postgres": [
        ['LOCK TABLE "events"."locked" IN SHARE MODE'],
        ['LOCK TABLE "events"."locked" IN ACCESS EXCLUSIVE MODE'],
    ],
    "mysql": [["BEGIN", "SELECT * FROM `weft.streams` FOR UPDATE"], ["LOCK TABLES `events.locked` WRITE"]],
}


@pytest.fixture
def publish(system: Any) -> Iterator[Callable[[int], Any]]:
    """Publishes one numbered event. There is one already."""
    stream = declared(STREAM)
    with use(Project()) as project:

        def publish(n: int) -> Any:
            return publish_sync(stream, {"writer": "w", "n": n}, connection=system.connection)

        publish(0)
        yield publish
        close(project)


def stored(system: Any) -> list[int]:
    log = open_stream(declared(STREAM), system.connection, to_read=True).log
    return [event["n"] for event in to_dicts(log.read(0, log.head(), 1000))]


def lock(system: Any, number: int) -> Any:
    return actor(hold, system.kind, system.url, LOCKS[system.kind][number])


def until_waiting(system: Any, *jobs: Future[Any]) -> None:
    """Until the database says that somebody waits for a lock. None of the jobs may be done by then."""
    with contextlib.ExitStack() as stack:
        if system.kind == "sqlite":

            def waits() -> bool:
                return any(_is_in(SqliteSessions.begin, frame) for frame in sys._current_frames().values())

        else:
            database = system.url.rpartition("/")[2]
            cursor = stack.enter_context(contextlib.closing(servers.shared(system.kind).connect())).cursor()

            def waits() -> bool:
                time.sleep(0.15)  # InnoDB shows the same again to who looks more often than every 100 ms
                cursor.execute(WAITING[system.kind], (database,))
                return bool(cursor.fetchone()[0])

        servers.wait_until(lambda: waits() or any(job.done() for job in jobs), "somebody to wait for the lock")
        assert not any(job.done() for job in jobs)


WAITING = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s",
    "mysql": "SELECT count(*) FROM information_schema.processlist "
    "LEFT JOIN information_schema.innodb_trx ON trx_mysql_thread_id = id "
    "WHERE (trx_state = 'LOCK WAIT' OR state LIKE 'Waiting for table%%') AND db = %s",
}


def _is_in(function: Any, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.brief("sqlite-stronger", "postgres-weaker", "mysql-stronger")
@pytest.mark.parametrize("number", [0, 1], ids=["weaker", "stronger"])
def test_publish_waits(system: Any, publish: Callable[[int], Any], number: int) -> None:
    with lock(system, number) as (_, pipe), ThreadPoolExecutor() as threads:
        assert said(pipe) == "locked"
        waiting = [threads.submit(publish, n) for n in (1, 2, 3)]
        until_waiting(system, *waiting)
        pipe.send("end")
        assert said(pipe) == "free"
        assert len({each.result(30)["publish_id"] for each in waiting}) == 3
    assert sorted(stored(system)) == [0, 1, 2, 3]


@pytest.mark.brief("sqlite-stronger", "postgres-stronger", "mysql-weaker")
@pytest.mark.parametrize("number", [0, 1], ids=["weaker", "stronger"])
def test_publish_goes_on_when_the_holder_is_killed(system: Any, publish: Callable[[int], Any], number: int) -> None:
    process: BaseProcess
    with lock(system, number) as (process, pipe), ThreadPoolExecutor() as threads:
        assert said(pipe) == "locked"
        waiting = threads.submit(publish, 1)
        until_waiting(system, waiting)
        process.kill()
        waiting.result(30)
    assert stored(system) == [0, 1]


@pytest.mark.brief("sqlite-stronger", "postgres-weaker", "mysql-stronger")
@pytest.mark.parametrize("number", [0, 1], ids=["weaker", "stronger"])
def test_publish_gives_up(system: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    limit_waiting(system.kind, monkeypatch)
    stream = declared(STREAM)
    with use(Project()) as project:

        def publish(n: int) -> Any:
            return publish_sync(stream, {"writer": "w", "n": n}, connection=system.connection)

        publish(0)
        with lock(system, number) as (_, pipe):
            assert said(pipe) == "locked"
            for n in (1, 2):
                begin = time.monotonic()
                with pytest.raises(BusyError, match="Nothing was stored"):
                    publish(n)
                assert time.monotonic() - begin >= LIMITS[system.kind]  # and not at once
            if number == 0:
                assert stored(system) == [0]
            pipe.send("end")
            assert said(pipe) == "free"
        publish(3)
        assert stored(system) == [0, 3]
        close(project)


def test_readers_wait_for_nobody(system: Any, publish: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come first in their process."""
    limit_waiting(system.kind, monkeypatch)
    consume_sync(declared(STREAM), "group", 1, system.connection)
    with lock(system, 1 if system.kind == "sqlite" else 0) as (_, pipe), use(Project()) as fresh:
        assert said(pipe) == "locked"
        stream = declared(STREAM)
        assert asyncio.run(_first(stream, system.connection)) == 0
        assert [each["consumer"] for each in groups_sync(stream, connection=system.connection)] == ["group"]
        assert read_stream(system.connection, stream)["n"].to_list() == [0]
        assert stored(system) == [0]
        close(fresh)


async def _first(stream: Stream, connection: Any) -> Any:
    async with subscribe(stream, since="start", connection=connection) as events:
        return (await anext(events))["n"]


def test_consumers_wait_too(system: Any, publish: Callable[[int], Any]) -> None:
    """Their bookkeeping is written. A refused ack can be repeated."""
    stream, connection = declared(STREAM), system.connection
    consume_sync(stream, "group", 1, connection, "one")
    statements = {
        "sqlite": ["BEGIN IMMEDIATE"],
        "postgres": ["SELECT * FROM weft.groups FOR UPDATE"],
        "mysql": ["BEGIN", "SELECT * FROM `weft.groups` FOR UPDATE"],
    }[system.kind]
    with actor(hold, system.kind, system.url, statements) as (_, pipe), ThreadPoolExecutor() as threads:
        assert said(pipe) == "locked"
        consuming = threads.submit(consume_sync, stream, "group", 1, connection, "one")
        until_waiting(system, consuming)
        pipe.send("end")
        assert said(pipe) == "free"
        assert ack_sync(stream, "group", consuming.result(30), connection=connection) == 1


@pytest.mark.parametrize("system", ["sqlite"], indirect=True)
def test_those_who_wait_in_turn_wait_once(
    system: Any, publish: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them wait for the same lock, so none waits for the time of those before it as well."""
    stream, connection = declared(STREAM), system.connection
    consume_sync(stream, "group", 1, connection, "one")
    monkeypatch.setattr("weft.systems.sqlite.sessions.LOCK_SECONDS", 1.0)

    def seconds(member: str) -> float:
        begin = time.monotonic()
        with pytest.raises(BusyError, match="Nothing was stored"):
            consume_sync(stream, "group", 1, connection, member)
        return time.monotonic() - begin

    with lock(system, 0) as (_, pipe), ThreadPoolExecutor() as threads:
        assert said(pipe) == "locked"
        waited = list(threads.map(seconds, "abcdef"))
        pipe.send("end")
        assert said(pipe) == "free"
    assert 1.0 <= min(waited) <= max(waited) < 3.0


def limit_waiting(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for locks for a moment, not for thirty seconds."""
    place = {
        "sqlite": "weft.systems.sqlite.sessions",
        "postgres": "weft.systems.postgres.sessions",
        "mysql": "weft.systems.mysql.driver",
    }[kind]
    monkeypatch.setattr(f"{place}.LOCK_SECONDS", LIMITS[kind])
