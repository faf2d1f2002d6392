"""A subscription that is interrupted: it goes on later, is cancelled, closed or cut off, and skips nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import threading
from typing import Any

import pytest

import weft
import weft.streams
from servers import wait_until
from streams.subscribers import NUMBER, publish, some, soon, until_it_waits, waiting
from weft import ConnectionFailedError
from weft.project import Project
from workers import declare, log_of, next_millisecond, start

# ------------------------------------------------------------------------------------------------------- going on later


async def test_position_goes_on(streams: Project) -> None:
    declare(fields=NUMBER)
    await publish(*range(10))
    live = weft.subscribe("orders", since="start")
    await some(live, 4)
    assert await some(weft.subscribe("orders", since=live.position), 6) == list(range(4, 10))


async def test_position_before_the_first_event(streams: Project) -> None:
    declare(fields=NUMBER)
    await publish(0, 1)
    live = weft.subscribe("orders")
    await publish(2)
    assert await some(weft.subscribe("orders", since=live.position), 1) == [2]


@pytest.mark.timing
async def test_position_leaves_out_what_was_not_yielded(streams: Project) -> None:
    """Events that wait for their batch to fill are not done: who goes on from `position` must see them."""
    declare(fields=NUMBER)
    live = weft.subscribe("orders", batch_size=3)
    await publish(*range(5))
    assert [event["n"] for event in await soon(anext(live))] == [0, 1, 2]
    with waiting(live) as task:
        await until_it_waits()
        await asyncio.wait([task], timeout=0.2)
    later = weft.subscribe("orders", since=live.position)
    await publish(5)
    assert await some(later, 3) == [3, 4, 5]


async def test_position_passes_what_was_filtered_out(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders", filter_fn=lambda event: event["n"] == 5)
    await publish(*range(6))
    await publish(6)
    assert await some(live, 1) == [5]
    assert await some(weft.subscribe("orders", since=live.position), 1) == [6]


# ------------------------------------------------------------------------------------------------ cancelled and closed


@pytest.mark.timing
async def test_cancelled_while_waiting(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    for n in range(5):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(live), 0.02)
        await publish(n)
        assert await some(live, 1) == [n]


@pytest.mark.timing
async def test_cancelled_with_half_a_batch(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders", batch_size=4)
    await publish(0, 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(live), 0.2)
    await publish(2, 3)
    assert [event["n"] for event in await soon(anext(live))] == [0, 1, 2, 3]


@pytest.mark.timing
async def test_cancelled_at_any_moment(streams: Project) -> None:
    """Nothing is skipped and nothing comes twice, wherever in a read the task was."""
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    seen = []
    for n in range(30):
        await publish(n)
        task = asyncio.ensure_future(anext(live))
        for _ in range(n % 5):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            seen.append((await task)["n"])
    while len(seen) < 30:
        seen += await some(live, 1)
    assert seen == list(range(30))


async def test_closing(streams: Project) -> None:
    declare(fields=NUMBER)
    async with weft.subscribe("orders") as live:
        await publish(1, 2)
        assert await some(live, 1) == [1]
    with pytest.raises(StopAsyncIteration):
        await soon(anext(live))
    assert [event async for event in live] == []
    await live.aclose()


@pytest.mark.timing
async def test_closing_ends_a_reader_that_waits(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders")

    async def read() -> list[int]:
        return [event["n"] async for event in live]

    task = asyncio.ensure_future(read())
    await publish(1)
    await until_it_waits()
    await live.aclose()
    assert await soon(task) in ([], [1])


@pytest.mark.timing
async def test_the_project_is_closed_while_a_reader_waits(streams: Project) -> None:
    """Nobody would wake it any more, so it is told, with where to go on."""
    declare(fields=NUMBER)
    await publish(0)
    live = weft.subscribe("orders")
    with waiting(live) as task:
        await until_it_waits()
        await asyncio.to_thread(weft.streams.close, streams)
        with pytest.raises(ConnectionFailedError, match=f"since={live.position}"):
            await soon(task)
    with pytest.raises(ConnectionFailedError):
        await soon(anext(live))
    again = weft.subscribe("orders", since=live.position)
    await publish(1)
    assert await some(again, 1) == [1]


@pytest.mark.timing
def test_the_loop_is_closed_while_a_reader_waits(streams: Project) -> None:
    """Neither publishers nor other readers suffer, and the subscription itself goes on in another loop."""
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    loop = asyncio.new_event_loop()
    task = loop.create_task(anext(live))
    loop.run_until_complete(until_it_waits())
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()
    weft.publish_sync("orders", {"n": 1})
    task._log_destroy_pending = False
    with contextlib.suppress(RuntimeError):
        task.get_coro().close()
    del task
    gc.collect()
    other = weft.subscribe("orders")
    weft.publish_sync("orders", {"n": 2})
    assert asyncio.run(some(other, 1)) == [2]
    assert asyncio.run(some(live, 2)) == [1, 2]


@pytest.mark.timing
def test_many_loops_one_after_the_other(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders")

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(live), 0.02)

    for n in range(5):
        asyncio.run(give_up())
        weft.publish_sync("orders", {"n": n})
        assert asyncio.run(some(live, 1)) == [n]


# ------------------------------------------------------------------------------------------------------------- failures


def cut_connections(system: Any) -> None:
    """End every connection to the database, as a restarted proxy would."""
    if system.kind == "postgres":
        import psycopg

        with contextlib.closing(psycopg.connect(system.connection.resolved().url, autocommit=True)) as driver:
            driver.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
    elif system.kind == "redis":
        from weft.systems.redis.client import open_client

        with contextlib.closing(open_client(system.connection)) as client:
            number = system.url.rsplit("/", 1)[1]
            for each in client.client_list():
                if each["db"] == number and int(each["id"]) != client.client_id():
                    client.client_kill_filter(_id=each["id"])
    else:
        import pymysql

        parameters = {**system.connection.resolved().parameters(), "ssl_disabled": True, "autocommit": True}
        with contextlib.closing(pymysql.connect(**parameters)) as driver, driver.cursor() as cursor:
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
            )
            for (number,) in cursor.fetchall():
                with contextlib.suppress(pymysql.Error):
                    cursor.execute(f"KILL {number}")


@pytest.mark.timing
async def test_a_watch_that_fails_and_recovers(
    streams: Project, system: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare(fields=NUMBER)
    await publish(0)
    live = weft.subscribe("orders")
    if system.kind == "sqlite":

        def fail(seen: object, timeout: float) -> object:
            raise sqlite3.OperationalError("unable to open database file")

        with waiting(live) as task:
            with monkeypatch.context() as patch:
                patch.setattr(log_of("orders").store, "changed", fail)
                await asyncio.to_thread(
                    wait_until, lambda: "watching for new events failed" in caplog.text, "a warning"
                )
            assert not task.done()
            run = start('declare(fields={"n": "int64"}); weft.publish_sync("orders", {"n": 1})')
            assert (await soon(task))["n"] == 1
    else:
        task = asyncio.ensure_future(anext(live))
        await until_it_waits()
        for _ in range(5):
            await asyncio.to_thread(cut_connections, system)
            await asyncio.sleep(0.02)
        run = start('declare(fields={"n": "int64"}); weft.publish_sync("orders", {"n": 1})')
        while True:
            try:
                assert (await soon(task))["n"] == 1
                break
            except ConnectionFailedError:  # the reader's own connection was cut too
                task = asyncio.ensure_future(anext(live))
    await asyncio.to_thread(run.answer)
    await publish(2)
    assert await some(live, 1) == [2]


async def test_a_beginning_that_failed_misses_nothing(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database fails while a loop does not wait for it any more; what was published meanwhile comes."""
    fails = threading.Event()

    def fail() -> None:
        fails.wait(60)
        raise ConnectionFailedError("The connection is lost.")

    declare(fields=NUMBER)
    await publish(0)
    next_millisecond()
    with monkeypatch.context() as patch:
        patch.setattr(log_of("orders"), "head", fail)
        live = weft.subscribe("orders")
        fails.set()
        with pytest.raises(ConnectionFailedError):
            await soon(asyncio.wrap_future(live.begun))
    await publish(1, 2)
    seen = await some(live, 2)
    if seen == [0, 1]:  # it begins earlier by as long as the database took to say its time
        seen = [1, *await some(live, 1)]
    assert seen == [1, 2]


async def test_an_error_while_reading_is_raised_and_nothing_is_skipped(
    streams: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionFailedError("The connection is lost.")

    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    await publish(0, 1)
    assert await some(live, 1) == [0]
    await publish(2)
    with monkeypatch.context() as patch:
        patch.setattr(log_of("orders"), "read", fail)
        seen = await some(live, 1)  # of the page that it has
        assert seen == [1]
        with pytest.raises(ConnectionFailedError):
            await soon(anext(live))
    assert await some(live, 1) == [2]
