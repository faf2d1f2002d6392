"""Publishers that publish at the same time share commits, and one that fails does not hurt the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import weft
from marks import on_tables
from servers import wait_until
from weft import SchemaError, WeftError
from weft.project import Project
from weft.streams.runtime import open_stream
from workers import declare, drain, execute, log_of

MANY = 64


def commits(stream: str) -> int:
    """The events of one commit share their time of publication."""
    return len({event["_weft_published_at"] for event in drain(stream, "commits")})


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`gather("orders")`: the next commit waits until `MANY` publishes are in it or queued behind it."""

    def hold(stream: str, count: int = MANY) -> None:
        hub = open_stream(stream).hub
        append = hub.store.append

        def held(batches):
            monkeypatch.setattr(hub.store, "append", append)
            taken = sum(len(batch.publishes) for batch in batches)
            wait_until(lambda: taken + hub.committer._queue.qsize() >= count, "the others to be queued")
            return append(batches)

        monkeypatch.setattr(hub.store, "append", held)

    return hold


async def test_many_tasks(streams: Project, gather: Callable[..., None]) -> None:
    declare(fields={"n": "int64"})
    await weft.publish("orders", {"n": -1})
    gather("orders")
    results = await asyncio.gather(*(weft.publish("orders", {"n": n}) for n in range(MANY)))
    events = drain("orders")
    assert sorted(event["n"] for event in events) == list(range(-1, MANY))
    assert sorted(result["first_rowid"] for result in results) == [event["_weft_rowid"] for event in events[1:]]
    of_publish = {event["_weft_publish_id"]: event["n"] for event in events}
    assert [of_publish[result["publish_id"]] for result in results] == list(range(MANY))
    assert commits("orders") <= 3


def test_many_threads(streams: Project, gather: Callable[..., None]) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": -1})
    gather("orders")
    with ThreadPoolExecutor(MANY) as pool:
        results = list(pool.map(lambda n: weft.publish_sync("orders", {"n": n}), range(MANY)))
    events = drain("orders")
    by_rowid = {event["_weft_rowid"]: event["n"] for event in events}
    assert len(events) == MANY + 1
    assert [by_rowid[result["first_rowid"]] for result in results] == list(range(MANY))
    assert commits("orders") <= 3


async def test_order_of_one_publisher(streams: Project, gather: Callable[..., None]) -> None:
    """Publishes that one task starts one after another keep their order, also when they share a commit."""
    declare(fields={"n": "int64"})
    await weft.publish("orders", {"n": -1})
    gather("orders")
    tasks = [asyncio.create_task(weft.publish("orders", {"n": n})) for n in range(MANY)]
    await asyncio.gather(*tasks)
    assert [event["n"] for event in drain("orders")] == list(range(-1, MANY))


async def test_streams_share_a_commit(streams: Project, gather: Callable[..., None]) -> None:
    names = [f"orders_{n}" for n in range(4)]
    for name in names:
        declare(name, fields={"n": "int64"})
        await weft.publish(name, {"n": -1})
    gather(names[0])
    await asyncio.gather(*(weft.publish(names[n % 4], [{"n": n}] * (n % 3 + 1)) for n in range(MANY)))
    for number, name in enumerate(names):
        expected = [n for n in range(number, MANY, 4) for _ in range(n % 3 + 1)]
        assert sorted(event["n"] for event in drain(name)) == sorted([-1, *expected])


async def test_different_columns_share_a_commit(streams: Project, gather: Callable[..., None]) -> None:
    declare()
    await weft.publish("orders", {"a": 0, "b": 0, "c": 0})
    gather("orders")
    await asyncio.gather(*(weft.publish("orders", {"abc"[n % 3]: n, f"key {n}!": n}) for n in range(MANY)))
    events = drain("orders")[1:]
    assert sorted(event["abc"[n % 3]] for event in events for n in [event["a"] or event["b"] or event["c"] or 0]) == [
        *range(MANY)
    ]
    assert all(event[f"key {n}!"] == n for event in events for n in [event["a"] or event["b"] or event["c"] or 0])


async def test_one_that_does_not_fit(streams: Project, gather: Callable[..., None]) -> None:
    declare(fields={"n": "int64"}, validate_schema=True)
    await weft.publish("orders", {"n": -1})
    gather("orders", MANY // 2)  # without those that are refused before
    results = await asyncio.gather(
        *(weft.publish("orders", {"n": n if n % 4 else "bad"}) for n in range(MANY)), return_exceptions=True
    )
    assert [isinstance(result, SchemaError) for result in results] == [n % 4 == 0 for n in range(MANY)]
    assert [event["n"] for event in drain("orders")] == [-1, *(n for n in range(MANY) if n % 4)]


@on_tables
async def test_one_that_the_database_refuses(streams: Project, system, gather: Callable[..., None]) -> None:
    """A rule of the user's own in the database: only the publish that breaks it fails."""
    declare(fields={"n": "int64"})
    await weft.publish("orders", {"n": -1})
    table = log_of("orders").table
    if system.kind == "sqlite":
        execute(
            system,
            f"CREATE TRIGGER no13 BEFORE INSERT ON {table} WHEN NEW.n = 13 BEGIN SELECT RAISE(ABORT, 'unlucky'); END",
        )
    else:
        execute(system, f"ALTER TABLE {table} ADD CONSTRAINT unlucky CHECK (n <> 13)")
    gather("orders")
    results = await asyncio.gather(*(weft.publish("orders", {"n": n}) for n in range(MANY)), return_exceptions=True)
    assert [n for n, result in enumerate(results) if isinstance(result, BaseException)] == [13]
    assert isinstance(results[13], WeftError)
    assert "unlucky" in str(results[13])
    assert sorted(event["n"] for event in drain("orders")) == [n for n in range(-1, MANY) if n != 13]
    await weft.publish("orders", {"n": 99})


@pytest.mark.timing
async def test_cancelled(streams: Project) -> None:
    """A caller that no longer waits is in nobody's way."""
    declare(fields={"n": "int64"})
    await weft.publish("orders", {"n": -1})
    tasks = [asyncio.create_task(weft.publish("orders", {"n": n})) for n in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    found = {event["n"] for event in drain("orders")}
    assert (
        found >= {n for n, result in enumerate(results) if not isinstance(result, BaseException)} >= {*range(1, 20, 2)}
    )


@pytest.mark.timing
def test_a_closed_loop(streams: Project) -> None:
    """An event loop that ends before its publish does not stop the publishes of others."""
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": -1})

    async def leave() -> None:
        asyncio.create_task(weft.publish("orders", {"n": 1}))  # noqa: RUF006
        await asyncio.sleep(0)

    for _ in range(5):
        asyncio.run(leave())
        weft.publish_sync("orders", {"n": 2})
    assert [event["n"] for event in drain("orders")].count(2) == 5


@pytest.mark.timing
def test_threads_and_tasks_together(streams: Project) -> None:
    declare(fields={"n": "int64"})

    async def tasks(base: int) -> None:
        await asyncio.gather(*(weft.publish("orders", {"n": base + n}) for n in range(20)))

    def thread(base: int) -> None:
        for n in range(5):
            weft.publish_sync("orders", {"n": base + n})

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(asyncio.run, tasks(1000 * k)) for k in range(1, 4)]
        jobs += [pool.submit(thread, 10_000 * k) for k in range(1, 4)]
        for job in jobs:
            job.result()
    events = [event["n"] for event in drain("orders")]
    assert len(events) == len(set(events)) == 75
    for k in range(1, 4):
        own = [n for n in events if n // 10_000 == k]
        assert own == sorted(own)


@pytest.mark.parametrize("many", [1, 2_500])
async def test_a_long_list_does_not_hold_up_the_loop_for_others(streams: Project, many: int) -> None:
    declare()
    sizes = await asyncio.gather(*(weft.publish("orders", [{"n": n}] * many) for n in range(4)))
    assert [size["rows_received"] for size in sizes] == [many] * 4
    events = [event["n"] for event in drain("orders", batch_size=10_000)]
    # Each publish is together: no other publish lies inside it.
    assert [events[i * many] for i in range(4)] == [*dict.fromkeys(events)]
