"""Readers write nothing: to them a stream that nobody made is empty, until somebody makes it."""

from __future__ import annotations

import asyncio
import os
import threading
from datetime import UTC, datetime
from typing import Any

import weft
from weft.project import Project
from weft.streams import close
from weft.streams.runtime import hub_of, open_stream


def declare(**more: str) -> weft.Stream:
    @weft.stream(fields={"n": "int64", **more})
    def orders() -> None: ...

    return orders


def contents(system: Any) -> list[Any]:
    """What there is in the database, as others see it."""
    if system.kind == "sqlite":
        return sorted(os.listdir(os.path.dirname(system.url.removeprefix("sqlite:///"))))
    if system.kind == "redis":
        import redis

        with redis.Redis.from_url(system.url) as client:
            return sorted(client.keys())
    if system.kind == "postgres":
        import psycopg

        with psycopg.connect(system.url) as connection:
            return connection.execute("SELECT relname FROM pg_class ORDER BY 1").fetchall()
    import pymysql

    parameters = weft.connect(system.url).resolved().parameters()
    with pymysql.connect(**{**parameters, "ssl_disabled": True}) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW TABLES")
        return list(cursor.fetchall())


def test_retention_of_a_stream_that_nobody_made(streams: Project) -> None:
    orders = weft.stream("orders", fields={"n": "int64"}, retention={"max_age_days": 7})(lambda: None)
    assert weft.trim_sync(orders) == 0
    weft.publish_sync(orders, {"n": 1})
    assert weft.trim_sync(orders) == 0
    assert open_stream(orders).log.count() == 1


async def test_a_stream_that_nobody_made_is_empty(streams: Project, system: Any) -> None:
    orders = declare()
    before = contents(system)
    log = open_stream(orders, to_read=True).log
    assert (log.head(), log.floor(), log.count(), log.nth_last(1), log.published()) == (0, 0, 0, None, 0)
    assert (log.first_since(datetime.now(UTC)), log.lost_after(0, None), log.extent(0, 9, 9)) == (1, (0, 0), 0)
    assert list(log.fields()) == ["n"]
    assert (log.size(), list(log.read_arrow(0, 9))) == (None, [])
    assert await weft.groups(orders) == []
    assert len(weft.read_stream("default", orders)) == 0
    assert weft.scan_stream("default", orders).collect().height == 0
    async with weft.subscribe(orders) as live:
        assert live.position == 0
        assert contents(system) == before
        await weft.publish(orders, [{"n": 1}, {"n": 2}])
        assert [(await anext(live))["n"], (await anext(live))["n"]] == [1, 2]
    assert (log.count(), len(weft.read_stream("default", orders))) == (2, 2)


def test_readers_of_a_stream_write_nothing(streams: Project, system: Any) -> None:
    """Also not the columns that a newer declaration has."""
    weft.publish_sync(declare(), {"n": 1})
    close(streams)
    orders = declare(more="string")
    log = open_stream(orders, to_read=True).log
    before = contents(system), log.fields(fresh=True)
    assert weft.read_stream("default", orders)["n"].to_list() == [1]
    assert (contents(system), log.fields(fresh=True)) == before
    if system.kind == "redis":
        assert log.store.command("HLEN", log.keys.fields) == 1  # type: ignore[attr-defined]
    else:
        assert list(before[1]) == ["n"]
    weft.publish_sync(orders, {"n": 2, "more": "x"})
    assert weft.read_stream("default", orders)["more"].to_list() == [None, "x"]


async def test_a_subscription_does_not_hold_the_event_loop_up(streams: Project) -> None:
    """While the database lets the first question wait, others go on, and what is published later is not missed."""
    orders, asked = declare(), threading.Event()
    await weft.publish(orders, {"n": 1})
    hub_of(orders).before_commits(asked.wait)
    live = weft.subscribe(orders)
    publishing = asyncio.create_task(weft.publish(orders, {"n": 2}))
    beginning = asyncio.create_task(live.__aenter__())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not publishing.done() and not beginning.done()
    asked.set()
    await publishing
    assert await beginning is live
    assert (await anext(live))["n"] == 2
