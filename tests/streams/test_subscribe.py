"""`subscribe`: live events from where the stream ended at the call, at the reader's own pace."""

from __future__ import annotations

import asyncio
from datetime import date, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import weft
from streams.subscribers import NUMBER, publish, some, soon, until_it_waits, waiting
from weft import EventsLostError, SettingsError
from weft.project import Project
from workers import declare, next_millisecond, plain, start

# ---------------------------------------------------------------------------------------------------- where it begins


async def test_begins_at_the_call(streams: Project) -> None:
    """Not at the first iteration: what is published in between is seen. What was there before is not."""
    declare(fields=NUMBER)
    await publish(1, 2)
    live = weft.subscribe("orders")
    await publish(3)
    assert await some(live, 1) == [3]
    await publish(4)
    assert await some(live, 1) == [4]


async def test_an_empty_stream(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    await publish(1)
    assert await some(live, 1) == [1]


async def test_by_function_and_on_another_connection(streams: Project, tmp_path: Path) -> None:
    made = declare(fields=NUMBER)
    other = weft.connect(url=f"sqlite:///{tmp_path / 'other.db'}")
    here, there = weft.subscribe(made), weft.subscribe(made, connection=other)
    await weft.publish(made, {"n": 1})
    await weft.publish(made, {"n": 2}, connection=other)
    assert await some(here, 1) == [1]
    assert await some(there, 1) == [2]


async def test_events_are_as_consumed(streams: Project) -> None:
    declare(fields={"n": "int64", "price": "decimal(10,2)", "at": "timestamp", "doc": "json"})
    live = weft.subscribe("orders")
    event = {"n": 1, "price": "1.5", "at": "2026-01-31T12:00:00Z", "doc": {"a": [1]}, "more": {"x": None}, "n?": 5}
    await weft.publish("orders", event)
    seen = await soon(anext(live))
    (consumed,) = await weft.consume("orders", "c")
    assert seen == consumed
    assert seen["n?"] == 5


async def test_since_an_offset(streams: Project) -> None:
    """After it: the last `_weft_rowid` that was seen."""
    declare(fields=NUMBER)
    rowids = [(await publish(n))["last_rowid"] for n in range(5)]
    assert await some(weft.subscribe("orders", since=rowids[1]), 3) == [2, 3, 4]
    assert await some(weft.subscribe("orders", since=0), 5) == [0, 1, 2, 3, 4]
    live = weft.subscribe("orders", since=rowids[4])
    await publish(5)
    assert await some(live, 1) == [5]


async def test_since_an_offset_that_is_not_there_any_more(streams: Project) -> None:
    """As after the restore of a backup: it is said once, and later events come."""
    declare(fields=NUMBER)
    last = (await weft.publish("orders", [{"n": 0}, {"n": 1}]))["last_rowid"]
    live = weft.subscribe("orders", since=last + 7)
    with pytest.raises(weft.EventsLostError, match=f"ends at offset {last}, before {last + 7}") as told:
        await soon(anext(live))
    assert told.value.lost == 0
    assert live.position == last
    await publish(2)
    assert await some(live, 1) == [2]


async def test_since_the_start(streams: Project) -> None:
    declare(fields=NUMBER)
    await publish(0, 1, 2)
    assert await some(weft.subscribe("orders", since="start"), 3) == [0, 1, 2]
    weft.trim_sync("orders", max_rows=1)
    live = weft.subscribe("orders", since="start")
    await publish(3)
    assert await some(live, 2) == [2, 3]


async def test_since_a_moment(streams: Project) -> None:
    declare(fields=NUMBER)
    await publish(0, 1)
    first = weft.consume_sync("orders", "c")[0]["_weft_published_at"]
    assert await some(weft.subscribe("orders", since=first), 2) == [0, 1]
    assert await some(weft.subscribe("orders", since=first.replace(tzinfo=None)), 2) == [0, 1]
    live = weft.subscribe("orders", since=first + timedelta(days=1))
    await publish(2)
    assert await some(live, 1) == [2]


async def test_since_a_moment_between_events(streams: Project) -> None:
    declare(fields=NUMBER)
    for n in range(4):
        await publish(n)
        next_millisecond()
    moment = weft.consume_sync("orders", "c")[1]["_weft_published_at"]
    elsewhere = moment.astimezone(timezone(timedelta(hours=-7)))
    for since in (moment, elsewhere, moment.replace(tzinfo=None)):
        assert await some(weft.subscribe("orders", since=since), 3) == [1, 2, 3]
    assert await some(weft.subscribe("orders", since=moment + timedelta(microseconds=1)), 2) == [2, 3]


def test_malformed_options(streams: Project) -> None:
    """Refused at the call, not at the first iteration."""
    declare(fields=NUMBER)
    wrong: list[tuple[str, Any]] = [
        *(("since", value) for value in ("end", "2026-01-01", -1, 1.5, True, date(2026, 1, 1), [1])),
        *(("batch_size", value) for value in (0, -1, 2.0, True, None, "5")),
        *(("timeout", value) for value in (-1, "1", float("nan"), True)),
        ("filter_fn", 5),
    ]
    for option, value in wrong:
        with pytest.raises(SettingsError, match=option):
            weft.subscribe("orders", **{option: value})


# --------------------------------------------------------------------------------------------------------- who wakes it


async def test_a_waiting_reader_wakes(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    with waiting(live) as task:
        await until_it_waits()
        await publish(1)
        assert (await soon(task))["n"] == 1


async def test_another_process(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    with waiting(live) as task:
        await until_it_waits()
        run = start("""
            declare(fields={"n": "int64"})
            for n in range(20):
                weft.publish_sync("orders", {"n": n})
        """)
        assert [(await soon(task))["n"], *await some(live, 19)] == list(range(20))
    await asyncio.to_thread(run.answer)


async def test_another_loop_and_thread(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    with waiting(live) as task:
        await until_it_waits()
        await asyncio.to_thread(weft.publish_sync, "orders", {"n": 1})
        await asyncio.to_thread(asyncio.run, publish(2))
        assert [(await soon(task))["n"], *await some(live, 1)] == [1, 2]


@pytest.mark.timing
async def test_every_event_while_publishing(streams: Project) -> None:
    """Complete and in order, whatever the reader's timing."""
    declare(fields=NUMBER)
    live = weft.subscribe("orders")

    async def publisher() -> None:
        for n in range(60):
            await publish(n * 2, n * 2 + 1)

    task = asyncio.create_task(publisher())
    assert await some(live, 120) == list(range(120))
    await task


# -------------------------------------------------------------------------------------------------------------- batches


async def test_full_batches(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders", batch_size=3)
    await publish(*range(7))
    assert [event["n"] for event in await soon(anext(live))] == [0, 1, 2]
    assert [event["n"] for event in await soon(anext(live))] == [3, 4, 5]
    with waiting(live) as task:
        await publish(7)
        await until_it_waits()
        assert not task.done()
        await publish(8, 9)
        assert [event["n"] for event in await soon(task)] == [6, 7, 8]


@pytest.mark.timing
async def test_batches_across_pages(streams: Project) -> None:
    declare(fields=NUMBER)
    await publish(*range(2500))
    live = weft.subscribe("orders", batch_size=700, timeout=0.05, since="start")
    batches = [[event["n"] for event in await soon(anext(live))] for _ in range(4)]
    assert [len(batch) for batch in batches] == [700, 700, 700, 400]
    assert [n for batch in batches for n in batch] == list(range(2500))


@pytest.mark.timing
@pytest.mark.parametrize("timeout", [0, 0.1])
async def test_a_short_batch_after_the_timeout(streams: Project, timeout: float) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders", batch_size=10, timeout=timeout)
    await publish(1, 2)
    assert [event["n"] for event in await soon(anext(live))] == [1, 2]
    await publish(3)
    assert [event["n"] for event in await soon(anext(live))] == [3]


@pytest.mark.timing
async def test_no_empty_batch_after_the_timeout(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders", batch_size=10, timeout=0.01)
    with waiting(live) as task:
        await until_it_waits()
        await asyncio.wait([task], timeout=0.1)
        assert not task.done()
        await publish(1)
        assert [event["n"] for event in await soon(task)] == [1]


async def test_a_batch_of_one_is_an_event(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders", timeout=0.01)
    await publish(1, 2)
    assert plain(await soon(anext(live))) == {"n": 1}
    assert plain(await soon(anext(live))) == {"n": 2}


# --------------------------------------------------------------------------------------------------------------- filter


@pytest.mark.timing
async def test_filter(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders", filter_fn=lambda event: event["n"] % 2)
    await publish(*range(1200))
    assert await some(live, 600) == list(range(1, 1200, 2))
    batches = weft.subscribe("orders", batch_size=4, timeout=0.05, since="start", filter_fn=lambda e: e["n"] % 300 == 0)
    assert [event["n"] for event in await soon(anext(batches))] == [0, 300, 600, 900]
    await publish(1200, 1201)
    assert [event["n"] for event in await soon(anext(batches))] == [1200]


async def test_a_filter_that_fails(streams: Project) -> None:
    """Its error reaches the reader; the event is in nobody's way afterwards."""
    declare(fields=NUMBER)
    live = weft.subscribe("orders", filter_fn=lambda event: 1 / event["n"])
    await publish(1, 0, 2)
    assert await some(live, 1) == [1]
    with pytest.raises(ZeroDivisionError):
        await soon(anext(live))
    assert await some(live, 1) == [2]


# ------------------------------------------------------------------------------------------------------ several readers


async def test_two_readers_are_independent(streams: Project) -> None:
    declare(fields=NUMBER)
    fast, slow = weft.subscribe("orders"), weft.subscribe("orders")
    await publish(*range(10))
    assert await some(fast, 10) == list(range(10))
    assert await some(slow, 2) == [0, 1]
    await publish(10)
    assert await some(fast, 1) == [10]
    assert await some(slow, 9) == list(range(2, 11))
    assert await weft.groups("orders") == []


async def test_tasks_that_share_one(streams: Project) -> None:
    """Each event goes to one of them."""
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    tasks = [asyncio.ensure_future(some(live, 20)) for _ in range(4)]
    await until_it_waits()
    await publish(*range(50))
    await publish(*range(50, 80))
    assert sorted(n for each in await soon(asyncio.gather(*tasks)) for n in each) == list(range(80))


async def test_many_readers(streams: Project) -> None:
    declare(fields=NUMBER)
    readers = [weft.subscribe("orders") for _ in range(30)]
    tasks = [asyncio.ensure_future(some(live, 5)) for live in readers]
    await until_it_waits()
    for n in range(5):
        await publish(n)
    assert await soon(asyncio.gather(*tasks)) == [list(range(5))] * 30


# ------------------------------------------------------------------------------------------------------------ retention


async def test_a_slow_reader_holds_little(streams: Project, system: Any) -> None:
    """The backlog waits in the log: once it is removed there, hardly more than a page is left with the reader."""
    declare(fields=NUMBER)
    await publish(*range(4000))
    live = weft.subscribe("orders", since="start")
    assert await some(live, 1) == [0]
    weft.trim_sync("orders", max_rows=1)
    seen = [0]
    with pytest.raises(EventsLostError) as caught:
        while True:
            seen += await some(live, 1)
    assert seen == list(range(len(seen)))
    assert len(seen) <= 1000
    if system.kind == "redis":  # which does not know how many of those that it removed at once the reader had seen
        assert 3999 - len(seen) <= caught.value.lost <= 3999
    else:
        assert caught.value.lost == 3999 - len(seen)
    assert await some(live, 1) == [3999]


async def test_loss_is_told_once(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    await publish(*range(10))
    weft.trim_sync("orders", max_rows=3)
    with pytest.raises(EventsLostError, match="'orders' lost up to 7 events") as caught:
        await soon(anext(live))
    assert caught.value.lost == 7
    assert await some(live, 3) == [7, 8, 9]
    await publish(10, 11)
    assert await some(live, 1) == [10]
    weft.trim_sync("orders", max_rows=0)
    assert await some(live, 1) == [11]  # it had that one
    await publish(12)
    assert await some(live, 1) == [12]


async def test_loss_of_everything(streams: Project) -> None:
    """Also where nothing is left to read after it."""
    declare(fields=NUMBER)
    live = weft.subscribe("orders")
    await publish(*range(10))
    weft.trim_sync("orders", max_rows=0)
    with pytest.raises(EventsLostError):
        await soon(anext(live))
    await publish(10)
    assert await some(live, 1) == [10]


@pytest.mark.timing
async def test_loss_is_told_to_a_reader_that_was_cancelled_meanwhile(streams: Project) -> None:
    """A task that is cancelled while it reads must not take the news with it."""
    declare(fields=NUMBER)
    for spin in range(20):
        live = weft.subscribe("orders")
        await publish(*range(5))
        weft.trim_sync("orders", max_rows=0)
        task = asyncio.ensure_future(anext(live))
        for _ in range(spin % 4):
            await asyncio.sleep(0)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, asyncio.CancelledError):
            with pytest.raises(EventsLostError):
                await soon(anext(live))
        else:
            assert isinstance(result, EventsLostError)


@pytest.mark.timing
async def test_a_partial_batch_survives_a_loss(streams: Project) -> None:
    declare(fields=NUMBER)
    live = weft.subscribe("orders", batch_size=3)
    await publish(0, 1)
    with waiting(live):
        await until_it_waits()
    await publish(2, 3, 4, 5)
    weft.trim_sync("orders", max_rows=2)
    try:
        first = [event["n"] for event in await soon(anext(live))]
    except EventsLostError:
        first = [event["n"] for event in await soon(anext(live))]
    assert first in ([0, 1, 4], [0, 1, 2])
