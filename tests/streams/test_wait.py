"""`consume(wait=…)`: a call that finds nothing waits for the first event, whoever brings it and however."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import weft
from weft import EventsLostError
from weft.project import Project
from workers import declare, drain, rowids, start

NUMBER = {"n": "int64"}
LONG = 60
Waiting = Callable[..., "Future[list[dict[str, Any]]]"]


BOTH = pytest.mark.parametrize("waiting", ["sync", "async"], indirect=True)


@pytest.fixture
def waiting(request: pytest.FixtureRequest) -> Iterator[Waiting]:
    """`waiting(consumer, …)` begins to wait, in a thread or in an event loop of its own; its `result()` comes later."""
    is_async = getattr(request, "param", "sync") == "async"
    with ThreadPoolExecutor(8) as pool:

        def begin(consumer: str = "c", **options: Any) -> Future[list[dict[str, Any]]]:
            options = {"wait": LONG, **options}
            begun = threading.Event()

            def wait() -> list[dict[str, Any]]:
                begun.set()
                return weft.consume_sync("orders", consumer, **options)

            async def wait_async() -> list[dict[str, Any]]:
                begun.set()
                return await weft.consume("orders", consumer, **options)

            future = pool.submit(lambda: asyncio.run(wait_async())) if is_async else pool.submit(wait)
            begun.wait()
            return future

        yield begin


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["n"] for event in events]


@BOTH
def test_a_publish_of_this_process(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    for n in range(3):
        call = waiting()
        weft.publish_sync("orders", {"n": n})
        events = call.result(LONG)
        assert numbers(events) == [n]
        weft.ack_sync("orders", "c", events)


@BOTH
def test_a_publish_of_another_process(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    run = start("""
        declare(fields={"n": "int64"})
        line()
        weft.publish_sync("orders", {"n": 1})
    """)
    run.ready()
    call = waiting()
    assert not call.done()
    run.tell()
    assert numbers(call.result(LONG)) == [1]
    run.answer()


@pytest.mark.brief("sqlite-sync", "postgres-async", "mysql-sync", "redis-async")
@pytest.mark.timing
@BOTH
def test_nothing_comes(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    assert waiting(wait=0.05).result(LONG) == []
    weft.publish_sync("orders", {"n": 1})
    drain("orders", "c")
    assert waiting(wait=0.05).result(LONG) == []
    assert waiting(wait=0).result(LONG) == []


def test_no_wait_for_a_full_batch(streams: Project, waiting: Waiting) -> None:
    """The first event ends the wait."""
    declare(fields=NUMBER)
    weft.publish_sync("orders", [{"n": 1}, {"n": 2}])
    assert numbers(waiting(batch_size=100).result(LONG)) == [1, 2]


@pytest.mark.brief("sqlite-sync", "postgres-async", "mysql-sync", "redis-async")
@pytest.mark.timing
@BOTH
def test_a_lease_that_runs_out(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    weft.publish_sync("orders", [{"n": 1}, {"n": 2}])
    held = weft.consume_sync("orders", "c", member="dies", lease=0.4)
    taken = waiting(member="lives").result(LONG)
    assert rowids(taken) == rowids(held)
    with pytest.raises(weft.LeaseLostError):
        weft.ack_sync("orders", "c", held)
    assert weft.ack_sync("orders", "c", taken) == 2


@pytest.mark.brief("sqlite-sync", "postgres-async", "mysql-sync", "redis-async")
@pytest.mark.timing
@BOTH
def test_a_delay_that_ends(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    weft.publish_sync("orders", [{"n": 1}, {"n": 2}])
    held = weft.consume_sync("orders", "c")
    weft.ack_sync("orders", "c", held[:1])
    weft.nack_sync("orders", "c", held[1:], delay=0.4)
    assert numbers(waiting().result(LONG)) == [2]


def test_a_nack_of_another_member(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    weft.publish_sync("orders", {"n": 1})
    held = weft.consume_sync("orders", "c", member="a")
    call = waiting(member="b")
    assert not call.done()
    weft.nack_sync("orders", "c", held)
    assert numbers(call.result(LONG)) == [1]


def test_a_reset(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    weft.publish_sync("orders", {"n": 1})
    drain("orders", "c")
    call = waiting()
    weft.reset_sync("orders", "c", to="start")
    assert numbers(call.result(LONG)) == [1]


@pytest.mark.timing
def test_members_that_wait_share(streams: Project, waiting: Waiting) -> None:
    """One event goes to one of them; the others wait on."""
    declare(fields=NUMBER)
    calls = [waiting(member=f"m{n}", batch_size=1) for n in range(3)]
    for n in range(3):
        weft.publish_sync("orders", {"n": n})
    assert sorted(numbers([event for call in calls for event in call.result(LONG)])) == [0, 1, 2]


def test_consumers_that_wait_do_not(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    calls = [waiting(f"c{n}") for n in range(4)]
    weft.publish_sync("orders", {"n": 5})
    assert [numbers(call.result(LONG)) for call in calls] == [[5]] * 4


@BOTH
def test_loss_ends_the_wait(streams: Project, waiting: Waiting) -> None:
    declare(fields=NUMBER)
    weft.publish_sync("orders", {"n": 0})
    drain("orders", "c")
    weft.publish_sync("orders", [{"n": 1}, {"n": 2}])
    weft.trim_sync("orders", max_rows=0)
    with pytest.raises(EventsLostError) as caught:
        waiting().result(LONG)
    assert caught.value.lost == 2
    call = waiting()
    weft.publish_sync("orders", {"n": 3})
    assert numbers(call.result(LONG)) == [3]


@pytest.mark.timing
async def test_cancelled_while_waiting(streams: Project) -> None:
    """It does not hold the next event for good: at worst it was about to take it, and its lease ends."""
    declare(fields=NUMBER)
    for n in range(5):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(weft.consume("orders", "c", wait=LONG, lease=0.5), 0.1)
        await weft.publish("orders", {"n": n})
        events = await weft.consume("orders", "c", member="other", wait=LONG)
        assert numbers(events) == [n]
        await weft.ack("orders", "c", events)


async def test_many_wait_in_one_loop(streams: Project) -> None:
    """More than there are threads: waiting takes none."""
    declare(fields=NUMBER)
    await weft.publish("orders", {"n": 0})
    calls = [asyncio.ensure_future(weft.consume("orders", f"c{n}", wait=LONG)) for n in range(60)]
    for n, call in enumerate(calls):
        await weft.ack("orders", f"c{n}", await call)
    calls = [asyncio.ensure_future(weft.consume("orders", f"c{n}", wait=LONG)) for n in range(60)]
    await weft.publish("orders", {"n": 1})
    assert [numbers(await asyncio.wait_for(call, LONG)) for call in calls] == [[1]] * 60
