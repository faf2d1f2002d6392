"""`iter_stream` and `iter_stream_async`: every entry once, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

import servers
import weft
from servers import wait_until
from weft.errors import SchemaError, SettingsError
from weft.systems.redis.wire import Wire

Add = Callable[..., list[str]]
Later = Callable[..., None]


def connections(client: Any) -> int:
    """How many there are to this test's database: the server may still see some of the tests before it."""
    own = str(client.connection_pool.connection_kwargs["db"])
    return [each["db"] for each in client.client_list()].count(own)


def test_batches_up_to_an_end(url: str, add: Add) -> None:
    ids = add("events", *({"n": i} for i in range(250)))
    frames = list(weft.iter_stream(url, "events", batch_size=100, end_id=ids[-1], schema={"n": pl.Int64}))
    assert [len(each) for each in frames] == [100, 100, 50]
    assert pl.concat(frames)["_id"].to_list() == ids


def test_a_count_ends_it(url: str, add: Add) -> None:
    ids = add("events", *({"n": i} for i in range(250)))
    frames = list(weft.iter_stream(url, "events", batch_size=100, count=150))
    assert [len(each) for each in frames] == [100, 50]
    assert pl.concat(frames)["_id"].to_list() == ids[:150]
    assert list(weft.iter_stream(url, "events", count=0)) == []


@pytest.mark.parametrize("group", [None, "analytics"])
def test_what_comes_later(url: str, add: Add, client: Any, later: Later, group: str | None) -> None:
    add("events", {"n": 1})
    member = {"group": group, "consumer": "c", "auto_ack": True} if group else {}
    seen: list[str] = []
    for frame in weft.iter_stream(url, "events", block_ms=10, **member):
        seen += frame["_id"].to_list()
        if len(seen) == 3:
            break
        later(add, "events", {"n": 2})
    assert seen == [found.decode() for found, _ in client.xrange("events")]


@pytest.mark.parametrize("start", ["-", "$"])
def test_a_stream_that_began_anew(url: str, client: Any, start: str) -> None:
    """With ids below those that were read, as when they are not made of the time."""
    add_one = functools.partial(client.xadd, "events", {"n": 1}, id="9-0")
    add_one() if start == "-" else client.xadd("events", {"n": 0}, id="8-0")
    with weft.iter_stream(url, "events", start_id=start, yield_on_idle=True, block_ms=100) as batches:
        if start == "$":
            next(batches)
            add_one()
        assert next(batches)["n"].to_list() == ["1"]
        client.delete("events")
        client.xadd("events", {"n": 2}, id="1-0")
        assert next(batch for batch in batches if len(batch))["n"].to_list() == ["2"]


@pytest.mark.timing
@pytest.mark.parametrize("end", ["{}", "({}", "{}-5"])
def test_an_end_that_is_still_to_come(url: str, add: Add, client: Any, later: Later, end: str) -> None:
    """Nothing more can come once the stream has passed it."""
    client.xadd("events", {"n": 0}, id="5-0")

    def grow() -> None:
        for n, identifier in enumerate(("6-0", "9-0", "10-4", "10-6"), 1):
            client.xadd("events", {"n": n}, id=identifier)
        client.xadd("events", {"n": "beyond"}, id="11-0")

    later(grow, when_blocked=True)
    frames = list(weft.iter_stream(url, "events", end_id=end.format(10)))
    assert [n for frame in frames for n in frame["n"]] == [*"0123", *([] if end == "{}-5" else ["4"])]


def test_the_end_is_that_of_the_call(url: str, add: Add) -> None:
    """Also of a new group."""
    add("events", {"n": 0})
    for group in ({}, {"group": "g", "consumer": "c"}):
        batches = weft.iter_stream(url, "events", start_id="$", **group)
        ids = add("events", {"n": 1})
        assert next(batches)["_id"].to_list() == ids
        batches.close()


async def test_the_end_is_that_of_entering(url: str, add: Add) -> None:
    async with weft.iter_stream_async(url, "events", start_id="$") as batches:
        ids = add("events", {"n": 1})
        assert (await anext(batches))["_id"].to_list() == ids


@pytest.mark.timing
def test_entries_that_are_removed_before_they_are_read(
    url: str, add: Add, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with weft.iter_stream(url, "events", start_id="$", block_ms=100, yield_on_idle=True) as batches:
        add("events", *({"n": i} for i in range(5)))
        client.xtrim("events", maxlen=2, approximate=False)
        assert next(batches)["n"].to_list() == ["3", "4"]
        assert len(next(batches)) == 0
    assert "3 entries of 'events' were removed before they were read" in caplog.text


@pytest.mark.parametrize("left", [1, 0])
def test_entries_that_are_removed_while_the_stored_ones_are_read(
    url: str, add: Add, client: Any, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    """Also if the last one is. Those that were gone before are not counted."""
    ids = add("events", *({"n": i} for i in range(10)))
    client.xdel("events", ids[0], ids[5])
    with weft.iter_stream(url, "events", batch_size=3, block_ms=100, yield_on_idle=True) as batches:
        assert next(batches)["n"].to_list() == ["1", "2", "3"]
        assert caplog.text == ""
        client.xtrim("events", maxlen=left, approximate=False)
        read = sum(map(len, itertools.islice(batches, 3)))
    assert f"{5 - read} entries of 'events' were removed before they were read" in caplog.text


def test_only_what_is_new(url: str, add: Add) -> None:
    add("events", {"n": "old"})
    with weft.iter_stream(url, "events", start_id="$", block_ms=20, yield_on_idle=True) as batches:
        assert len(next(batches)) == 0
        add("events", {"n": "new"})
        assert next(batches)["n"].to_list() == ["new"]


def test_a_server_that_does_not_count_entries(url: str, add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis before 7 answers XINFO without entries-added."""
    run = Wire.run

    def as_before(wire: Wire, *command: Any) -> Any:
        answer = run(wire, *command)
        if command[0] == "XINFO":
            at = answer.index(b"entries-added")
            del answer[at : at + 2]
        return answer

    monkeypatch.setattr(Wire, "run", as_before)
    add("events", {"n": "old"})
    with weft.iter_stream(url, "events", start_id="$", block_ms=20, yield_on_idle=True) as batches:
        assert len(next(batches)) == 0
        add("events", {"n": "new"})
        assert next(batches)["n"].to_list() == ["new"]


def test_idle_frames_have_types(url: str) -> None:
    schema = {"n": pl.Int64}
    for frame in weft.iter_stream(url, "events", block_ms=10, yield_on_idle=True, schema=schema):
        assert frame.schema == {"_id": pl.String, "_ts": pl.Int64, "n": pl.Int64}
        break


@pytest.mark.timing
def test_stopped_by_an_event(url: str, add: Add, later: Later) -> None:
    add("events", {"n": 1})
    event = threading.Event()
    later(event.set)
    assert len(list(weft.iter_stream(url, "events", block_ms=0, stop=event))) == 1


def test_stopped_by_a_function(url: str, add: Add) -> None:
    add("events", *({"n": i} for i in range(10)))
    seen: list[Any] = []
    for frame in weft.iter_stream(url, "events", batch_size=1, stop=lambda: len(seen) == 4):
        seen.append(frame)
    assert len(seen) == 4


@pytest.mark.timing
@pytest.mark.parametrize("stop", [signal.SIGUSR1, (signal.SIGTERM, signal.SIGUSR1)])
def test_stopped_by_a_signal(url: str, later: Later, stop: Any) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    later(os.kill, os.getpid(), signal.SIGUSR1)
    assert list(weft.iter_stream(url, "events", block_ms=0, stop=stop)) == []
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.timing
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_signal_stops_all_iterations(url: str, order: tuple[int, int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    both = [weft.iter_stream(url, "events", block_ms=0, stop=signal.SIGUSR1) for _ in range(2)]
    os.kill(os.getpid(), signal.SIGUSR1)
    for number in order:
        assert list(both[number]) == []
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.timing
def test_the_signal_is_caught_while_the_other_iterates(url: str, add: Add) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    try:
        one, other = (weft.iter_stream(url, "events", block_ms=0, stop=signal.SIGUSR1) for _ in range(2))
        one.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert list(other) == []
        assert caught == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert caught == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.timing
def test_an_iteration_that_ends_in_another_thread(url: str) -> None:
    """Only the main thread can put a handler back. Until it does, the signal reaches it all the same."""
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    try:
        batches = weft.iter_stream(url, "events", stop=signal.SIGUSR1)
        thread = threading.Thread(target=batches.close)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert caught == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.timing
async def test_one_signal_stops_all_tasks(url: str) -> None:
    async def iterate() -> list[Any]:
        return [frame async for frame in weft.iter_stream_async(url, "events", stop=signal.SIGUSR1)]

    tasks = [asyncio.create_task(iterate()) for _ in range(2)]
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert await asyncio.gather(*tasks) == [[], []]


@pytest.mark.parametrize("stop", [5, "SIGTERM", [], signal.SIGKILL])
def test_what_cannot_stop(url: str, stop: Any) -> None:
    with pytest.raises(SettingsError, match="stop"):
        weft.iter_stream(url, "events", stop=stop)


def test_leaving_the_context_lets_go(url: str, add: Add, client: Any) -> None:
    add("events", {"n": 1})
    wait_until(lambda: connections(client) == 1, "the test's own to be the only one")
    with weft.iter_stream(url, "events") as batches:
        next(batches)
        wait_until(lambda: connections(client) == 2, "that of the iterator")
    assert list(batches) == []
    gc.disable()  # what it holds is let go of at once
    try:
        for _ in weft.iter_stream(url, "events"):
            break
    finally:
        gc.enable()
    wait_until(lambda: connections(client) == 1, "the iterators to let go")


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"block_ms": -1}, {"block_ms": None}, {"count": -1}, {"to": "nothing"}]
)
def test_options_that_cannot_be(url: str, options: Any) -> None:
    with pytest.raises(SettingsError):
        weft.iter_stream(url, "events", **options)


def test_auto_ack_acknowledges_what_was_handed_over(url: str, add: Add, client: Any) -> None:
    add("events", *({"n": i} for i in range(30)))
    member = {"group": "analytics", "consumer": "c"}
    with weft.iter_stream(url, "events", batch_size=10, auto_ack=True, **member) as batches:
        next(batches)
        next(batches)
    found = client.xinfo_groups("events")[0]
    assert (found["pending"], found["lag"]) == (0, 10)


def test_a_batch_that_cannot_be_made_is_not_acknowledged(url: str, add: Add, client: Any) -> None:
    add("events", {"n": 1}, {"n": 2}, {"n": "three"})
    options: dict[str, Any] = {"schema": {"n": pl.Int64}, "on_error": "raise", "auto_ack": True}
    batches = weft.iter_stream(url, "events", batch_size=2, group="analytics", consumer="c", **options)
    assert next(batches)["n"].to_list() == [1, 2]
    with pytest.raises(SchemaError, match="three"):
        next(batches)
    assert list(batches) == []
    assert client.xpending("events", "analytics")["pending"] == 1


@pytest.mark.timing
def test_entries_of_a_member_that_is_gone_come_while_it_iterates(url: str, add: Add) -> None:
    ids = add("events", {"n": 1}, {"n": 2})
    weft.read_stream(url, "events", group="analytics", consumer="gone")
    batches = weft.iter_stream(url, "events", group="analytics", consumer="c", claim_idle=300, block_ms=10)
    with batches:
        assert next(batches)["_id"].to_list() == ids


@pytest.mark.timing
def test_members_at_once_share_all_entries(url: str, add: Add, client: Any) -> None:
    ids = add("events", *({"n": i} for i in range(20_000)))
    seen: dict[str, list[str]] = {"a": [], "b": []}

    def work(consumer: str) -> None:
        options: dict[str, Any] = {"batch_size": 100, "block_ms": 50, "yield_on_idle": True, "auto_ack": True}
        for frame in weft.iter_stream(url, "events", group="g", consumer=consumer, **options):
            if len(frame) == 0:
                break
            seen[consumer] += frame["_id"].to_list()

    threads = [threading.Thread(target=work, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen["a"] + seen["b"]) == sorted(ids)
    assert client.xpending("events", "g")["pending"] == 0


async def test_async(url: str, add: Add, client: Any, later: Later) -> None:
    add("events", *({"n": i} for i in range(250)))
    later(add, "events", {"n": 250})
    seen: list[str] = []
    async for frame in weft.iter_stream_async(url, "events", batch_size=100, batch_timeout_ms=1000):
        seen += frame["_id"].to_list()
        if len(seen) == 251:
            break
    assert seen == [found.decode() for found, _ in client.xrange("events")]
    with pytest.raises(SettingsError, match="two names"):
        weft.iter_stream_async(url, "events", block_ms=5, batch_timeout_ms=6)


async def test_async_stops(url: str, add: Add) -> None:
    add("events", {"n": 1})
    event = asyncio.Event()
    frames = []
    async for frame in weft.iter_stream_async(url, "events", stop=event):
        frames.append(frame)
        event.set()
    assert len(frames) == 1
    async with weft.iter_stream_async(url, "events", block_ms=0) as batches:
        assert len(await anext(batches)) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


@pytest.mark.timing
async def test_a_cancelled_wait_loses_nothing(url: str, add: Add, client: Any) -> None:
    options: dict[str, Any] = {"group": "g", "consumer": "c", "auto_ack": True, "block_ms": 0}
    async with weft.iter_stream_async(url, "events", **options) as batches:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(batches), 0.3)
        ids = add("events", {"n": 1})
        assert (await anext(batches))["_id"].to_list() == ids
    assert client.xpending("events", "g")["pending"] == 0


@pytest.mark.timing
async def test_what_came_for_a_cancelled_wait_is_given_back(url: str, add: Add, client: Any) -> None:
    """It is in no frame. Who reads next has it, whatever its name."""
    options: dict[str, Any] = {"group": "g", "consumer": "c", "auto_ack": True}
    async with weft.iter_stream_async(url, "events", block_ms=0, **options) as batches:
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        ids = add("events", {"n": 1})
        servers.wait_until(lambda: client.xpending("events", "g")["pending"] == 1, "the entry to be delivered")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(batches)
    frame = weft.read_stream(url, "events", include_delivery=True, **{**options, "consumer": "another"})
    assert frame["_id"].to_list() == ids
    assert frame["_deliveries"].to_list() == [1]
    assert client.xpending("events", "g")["pending"] == 0


@pytest.mark.timing
async def test_nothing_is_fetched_after_a_cancelled_wait(url: str, add: Add, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would get it."""
    batches = weft.iter_stream_async(url, "events", group="g", consumer="c", auto_ack=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(batches), 0.3)
    wait_until(lambda: batches._taking.done(), "the thread to end")  # type: ignore[union-attr]
    ids = add("events", {"n": 1})
    another = weft.read_stream(url, "events", group="g", consumer="another", auto_ack=True)
    assert another["_id"].to_list() == ids
    ids = add("events", {"n": 2})
    assert (await anext(batches))["_id"].to_list() == ids
    await batches.aclose()
    gc.collect()
    assert caplog.text == ""  # asyncio would log an error that nobody handled


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("run", ["asyncio.run(read())", "asyncio.new_event_loop().run_until_complete(read())"])
def test_ctrl_c_ends_an_asynchronous_iteration(url: str, client: Any, run: str) -> None:
    """It left a thread that waited for entries, and with it the process."""
    # Python itself: what matters is how it ends.
    command = [sys.executable, "-c", ITERATE.format(url=url, run=run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"reads\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) != 0
        finally:
            process.kill()


ITERATE = """
import asyncio, signal, weft
signal.signal(signal.SIGINT, signal.default_int_handler)
async def read():
    batches = weft.iter_stream_async("{url}", "events", group="g", consumer="c", block_ms=50, yield_on_idle=True)
    async for frame in batches:
        print("reads", flush=True)
{run}
"""


@pytest.mark.timing
async def test_tasks_that_share_an_iteration(url: str, client: Any) -> None:
    """Each batch goes to one of them."""
    batches = weft.iter_stream_async(url, "events", batch_size=1, schema={"n": "int64"}, count=4)

    async def numbers() -> list[int]:
        return [number async for batch in batches for number in batch["n"]]

    tasks = [asyncio.create_task(numbers()) for _ in range(3)]
    await asyncio.sleep(0.2)  # all wait
    for number in range(4):
        client.xadd("events", {"n": number})
    found = await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert sorted(itertools.chain(*found)) == [0, 1, 2, 3]


@pytest.mark.timing
async def test_closed_while_somebody_waits(url: str, add: Add, client: Any) -> None:
    options: dict[str, Any] = {"group": "g", "consumer": "c", "auto_ack": True}
    batches = weft.iter_stream_async(url, "events", block_ms=0, **options)
    waiting = asyncio.create_task(anext(batches))
    await asyncio.sleep(0)
    servers.wait_until(lambda: client.exists("events"), "the group to be there")
    closing = asyncio.create_task(batches.aclose())
    ids = add("events", {"n": 1})
    seen: list[str] = []
    with contextlib.suppress(StopAsyncIteration):
        seen += (await waiting)["_id"].to_list()
    await closing
    seen += weft.read_stream(url, "events", **options)["_id"].to_list()
    assert seen == ids
    assert client.xpending("events", "g")["pending"] == 0


@pytest.mark.parametrize("group", [None, "analytics"])
def test_a_batch_that_was_all_put_aside(url: str, add: Add, group: str | None) -> None:
    add("events", *({"n": "bad"} for _ in range(5)), {"n": 6})
    member: dict[str, Any] = {"group": group, "consumer": "c"} if group else {}
    options: dict[str, Any] = {"schema": {"n": pl.Int64}, "on_error": "quarantine", "batch_size": 2, **member}
    with weft.iter_stream(url, "events", **options) as batches:
        assert next(batches)["n"].to_list() == [6]


async def test_async_refuses_unknown_options(url: str) -> None:
    with pytest.raises(TypeError, match="batchsize"):
        weft.iter_stream_async(url, "events", batchsize=5)
