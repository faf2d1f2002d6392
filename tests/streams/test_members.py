"""Members of one consumer share its events: no event is held by two of them at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

import weft
from weft.project import Project
from workers import declare, drain, rowids, start, started


def publish(many: int) -> None:
    weft.publish_sync("orders", [{"n": n} for n in range(many)])


def test_two_names_never_hold_the_same_event(streams: Project) -> None:
    declare()
    publish(10)
    a = weft.consume_sync("orders", "worker", batch_size=4, member="a")
    b = weft.consume_sync("orders", "worker", batch_size=4, member="b")
    c = weft.consume_sync("orders", "worker", batch_size=4, member="c")
    assert rowids(a) + rowids(b) + rowids(c) == rowids(drain("orders", "all"))


@pytest.mark.timing
def test_threads(streams: Project) -> None:
    """Each thread is a member of its own without a name."""
    declare()
    publish(200)
    at_once = threading.Barrier(8)

    def work(_: int) -> list[int]:
        at_once.wait()
        mine = []
        while events := weft.consume_sync("orders", "worker", batch_size=7):
            mine += [event["n"] for event in events]
            assert weft.ack_sync("orders", "worker", events) == len(events)
        return mine

    with ThreadPoolExecutor(8) as pool:
        found = [n for mine in pool.map(work, range(8)) for n in mine]
    assert sorted(found) == list(range(200))


@pytest.mark.timing
def test_threads_that_do_not_ack(streams: Project) -> None:
    declare()
    publish(50)
    at_once, all_took = threading.Barrier(10), threading.Barrier(10)

    def work(_: int) -> list[int]:
        at_once.wait()
        first = weft.consume_sync("orders", "worker", batch_size=5)
        all_took.wait()
        again = weft.consume_sync("orders", "worker", batch_size=5)
        assert rowids(again) == rowids(first)
        return [event["n"] for event in first]

    with ThreadPoolExecutor(10) as pool:
        found = [n for mine in pool.map(work, range(10)) for n in mine]
    assert sorted(found) == list(range(50))


@pytest.mark.timing
async def test_tasks(streams: Project) -> None:
    """Each task too, also when all of them run in one thread."""
    declare()
    await asyncio.to_thread(publish, 200)

    async def work() -> list[int]:
        mine = []
        while events := await weft.consume("orders", "worker", batch_size=7):
            mine += [event["n"] for event in events]
            assert await weft.ack("orders", "worker", events) == len(events)
        return mine

    found = [n for mine in await asyncio.gather(*(work() for _ in range(8))) for n in mine]
    assert sorted(found) == list(range(200))


@pytest.mark.timing
async def test_tasks_hold_different_events(streams: Project) -> None:
    declare()
    await asyncio.to_thread(publish, 20)

    async def work() -> list[int]:
        first = await weft.consume("orders", "worker", batch_size=5)
        again = await weft.consume("orders", "worker", batch_size=5)
        assert rowids(first) == rowids(again)
        return [event["n"] for event in first]

    found = [n for mine in await asyncio.gather(*(work() for _ in range(4))) for n in mine]
    assert sorted(found) == list(range(20))


@pytest.mark.timing
def test_processes(streams: Project) -> None:
    declare()
    publish(300)
    code = """
        declare()
        line()
        mine = []
        while events := weft.consume_sync("orders", "worker", batch_size=9):
            mine += [event["n"] for event in events]
            weft.ack_sync("orders", "worker", events)
        answer(mine)
    """
    with started(3, code) as runs:
        for run in runs:
            run.ready()
        for run in runs:
            run.tell()
        found = [n for run in runs for n in run.answer()]
    assert sorted(found) == list(range(300))


@pytest.mark.timing
def test_a_restart_under_the_same_name_gets_its_events_back_at_once(streams: Project) -> None:
    declare()
    publish(5)
    code = 'declare(); answer(rowids(weft.consume_sync("orders", "worker", batch_size=3, member=args[0]))); line()'
    run = start(code, "m")
    held = weft.consume_sync("orders", "worker", batch_size=1, member="other")
    assert len(held) == 1
    run.kill()
    again = start(
        """
        declare()
        events = weft.consume_sync("orders", "worker", batch_size=3, member="m")
        answer((rowids(events), weft.ack_sync("orders", "worker", events)))
        """
    )
    got, acked = again.answer()
    assert acked == len(got) == 3
    assert not set(got) & set(rowids(held))


def test_a_restart_without_a_name_is_another_member(streams: Project) -> None:
    """It might be a second process: the events wait for the end of the lease."""
    declare()
    publish(3)
    code = 'declare(); answer(len(weft.consume_sync("orders", "worker")))'
    assert start(code).answer() == 3
    assert start(code).answer() == 0
    (group,) = weft.groups_sync("orders")
    assert group["pending"] == 3
    assert len(group["members"]) == 1


def test_default_names_are_never_used_twice(streams: Project) -> None:
    """Threads come and go, and their numbers are used again: a member's name is not."""
    declare()
    publish(20)

    def take() -> None:
        assert len(weft.consume_sync("orders", "worker", batch_size=1)) == 1

    for _ in range(10):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    for _ in range(10):
        asyncio.run(weft.consume("orders", "worker", batch_size=1))
    (group,) = weft.groups_sync("orders")
    assert len(group["members"]) == 20
    assert Counter(member["pending"] for member in group["members"]) == {1: 20}


def test_the_same_name_in_two_threads_is_one_member(streams: Project) -> None:
    declare()
    publish(3)
    first = weft.consume_sync("orders", "worker", member="m")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(weft.consume_sync, "orders", "worker", member="m").result()
    assert rowids(first) == rowids(second)


def test_a_members_name_belongs_to_its_consumer(streams: Project) -> None:
    declare()
    publish(3)
    assert len(weft.consume_sync("orders", "one", member="m")) == 3
    assert len(weft.consume_sync("orders", "two", member="m")) == 3
