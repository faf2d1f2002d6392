"""The thread that commits: what it takes at once, and what happens where it or another thread cannot be started."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import weft
from marks import on_tables
from servers import wait_until
from weft import SchemaError
from weft.project import Project
from weft.streams import commit
from weft.streams.runtime import open_stream
from weft.systems.log import Appended, Batch
from workers import declare, drain, execute

MEGABYTE = 1024 * 1024


def numbers() -> list[int]:
    return [event["n"] for event in drain("orders", "check")]


@contextmanager
def no_new_threads() -> Iterator[None]:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


class Gate:
    """Holds back every append until it is opened, and notes what each was given."""

    def __init__(self, store: Any, patch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.groups: list[list[str]] = []
        self._append: Callable[[Sequence[Batch]], list[list[Appended]]] = store.append
        patch.setattr(store, "append", self.append)

    def append(self, batches: Sequence[Batch]) -> list[list[Appended]]:
        self.groups.append([publish_id for batch in batches for publish_id, _ in batch.publishes])
        self.entered.set()
        self.opened.wait()
        return self._append(batches)


# -------------------------------------------------------------------------------------------------------------- threads


def test_a_commit_thread_that_cannot_start_is_tried_again(streams: Project) -> None:
    declare(fields={"n": "int64"})
    open_stream("orders")
    with no_new_threads(), pytest.raises(RuntimeError, match="can't start"):
        weft.publish_sync("orders", {"n": 1})
    assert weft.publish_sync("orders", {"n": 2})["status"] == "accepted"
    assert numbers() == [2]


async def test_a_watch_that_cannot_start_is_tried_again(streams: Project) -> None:
    declare(fields={"n": "int64"})
    weft.publish_sync("orders", {"n": 1})
    weft.ack_sync("orders", "c", weft.consume_sync("orders", "c"))
    with no_new_threads(), pytest.raises(RuntimeError, match="can't start"):
        weft.consume_sync("orders", "c", wait=60)
    watch = open_stream("orders").hub.watch
    waiting = asyncio.create_task(watch.wait_async(watch.version, 60))
    await asyncio.to_thread(wait_until, lambda: watch._thread is not None, "the watch")
    assert watch._thread is not None
    assert watch._thread.is_alive()
    watch.bump()
    await waiting


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
def test_a_notifier_that_cannot_start_is_tried_again(streams: Project, caplog: pytest.LogCaptureFixture) -> None:
    """And the publish is acknowledged: its events are stored."""
    declare(fields={"n": "int64"})
    hub: Any = open_stream("orders").hub
    hub.committer._put(_nothing(hub))  # the commit thread itself is running
    with no_new_threads(), caplog.at_level(logging.WARNING, "weft.streams"):
        assert weft.publish_sync("orders", {"n": 1})["status"] == "accepted"
    assert "can't start" in caplog.text
    assert hub.store._notifier._thread is None
    weft.publish_sync("orders", {"n": 2})
    wait_until(lambda: hub.store._notifier._thread is not None, "the notifier")
    assert numbers() == [1, 2]


def _nothing(hub: Any) -> commit.Ticket:
    ticket = commit.Ticket(open_stream("orders"), "nothing", [], lambda _: [])
    ticket.batches = []
    ticket.lock = threading.Lock()
    ticket.lock.acquire()
    return ticket


@pytest.mark.parametrize("broken", ["bump", "appended"])
async def test_stored_is_acknowledged_though_readers_cannot_be_told(
    streams: Project, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare(fields={"n": "int64"})
    hub = open_stream("orders").hub
    monkeypatch.setattr(hub.watch if broken == "bump" else hub.store, broken, lambda: 1 / 0)
    with caplog.at_level(logging.WARNING, "weft.streams"):
        assert weft.publish_sync("orders", {"n": 1})["first_rowid"]
        assert (await weft.publish("orders", {"n": 2}))["first_rowid"]
    assert "division by zero" in caplog.text
    monkeypatch.undo()
    assert numbers() == [1, 2]


# --------------------------------------------------------------------------------------------------------------- groups


def test_a_group_has_a_bounded_size(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large publish goes by itself, so that nobody else waits for it or fails with it. The order is kept."""
    monkeypatch.setattr(commit, "_GROUP_BYTES", MEGABYTE)
    declare(fields={"n": "int64", "text": "string", "more": "json"})
    hub = open_stream("orders").hub
    half, large = "x" * (MEGABYTE * 6 // 10), ["y" * 100_000] * 20
    events: list[Any] = [
        {"n": 0},
        {"n": 1},
        {"n": 2, "text": half},
        {"n": 3, "text": half},
        {"n": 4},
        [{"n": 5, "more": {"deep": large}}, {"n": 6}],
        {"n": 7},
        [{"n": n, "text": "z" * 10_000} for n in range(8, 208)],
        {"n": 208},
    ]
    with monkeypatch.context() as patch:
        gate = Gate(hub.store, patch)
        with ThreadPoolExecutor(len(events)) as pool:
            queue: Any = hub.committer._queue
            published = [pool.submit(weft.publish_sync, "orders", events[0])]
            gate.entered.wait()
            for number, each in enumerate(events[1:]):
                published.append(pool.submit(weft.publish_sync, "orders", each))
                wait_until(lambda number=number: queue.qsize() > number, "the publish to wait")  # type: ignore[misc]
            gate.opened.set()
            names = {each.result()["publish_id"]: number for number, each in enumerate(published)}
    assert [[names[each] for each in group] for group in gate.groups] == [[0], [1, 2], [3, 4], [5], [6], [7], [8]]
    assert numbers() == list(range(209))


@pytest.mark.parametrize(
    ("events", "least", "most"),
    [
        ([{"a": "x" * 1000, "b": b"y" * 500, "c": 1}], 1500, 1600),
        ([{"a": {"b": [{"c": "x" * 1000}]}}], 1000, 1100),
        ([{"a": "x" * 1000}] * 1000, 900_000, 1_100_000),
        ([{"n": 1}] * 1000, 0, 100_000),
    ],
)
def test_the_size_of_a_publish(events: list[dict[str, Any]], least: int, most: int) -> None:
    assert least <= commit._weigh(events) <= most


def test_the_size_of_what_is_nested_without_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert commit._weigh([{"a": loop}]) == 0


# ------------------------------------------------------------------------------------------- long statements, postgres


@pytest.fixture
def short_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.systems.postgres import store

    monkeypatch.setattr(store, "_STATEMENT_CHARACTERS", 1000)
    monkeypatch.setattr(store, "_MAX_STATEMENT_BYTES", 5000)


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
@pytest.mark.usefixtures("short_statements")
async def test_what_is_too_long_for_a_statement_is_stored_by_several(streams: Project) -> None:
    declare(fields={"n": "int64", "text": "string"})
    result = weft.publish_sync("orders", [{"n": n, "text": "é" * 300} for n in range(10)])
    assert result["last_rowid"] - result["first_rowid"] == 9
    many = await asyncio.gather(
        *(weft.publish("orders", [{"n": n, "text": "x" * 300} for n in range(k, k + 4)]) for k in range(10, 50, 4))
    )
    events = drain("orders")
    assert [event["n"] for event in events] == list(range(50))
    of_publish = {each["publish_id"]: each for each in many}
    for event in events[10:]:
        mine = of_publish[event["_weft_publish_id"]]
        assert mine["first_rowid"] <= event["_weft_rowid"] <= mine["last_rowid"]


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
@pytest.mark.usefixtures("short_statements")
def test_several_statements_are_stored_together_or_not_at_all(
    streams: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    declare(fields={"n": "int64", "text": "string"})
    weft.publish_sync("orders", {"n": 0})
    store: Any = open_stream("orders").hub.store
    execute_really, seen = store.execute, []

    def fail_at_the_third(driver: Any, sql: str, parameters: Any) -> Any:
        if "INSERT INTO" in sql:
            seen.append(sql)
            if len(seen) == 3:
                raise psycopg.errors.DiskFull("no space left")
        return execute_really(driver, sql, parameters)

    events = [{"n": n, "text": "x" * 300} for n in range(1, 11)]
    with monkeypatch.context() as patch:
        patch.setattr(store, "execute", fail_at_the_third)
        with pytest.raises(weft.WeftError):
            weft.publish_sync("orders", events)
    assert len(seen) == 3
    assert numbers() == [0]
    weft.publish_sync("orders", events)
    assert numbers() == list(range(1, 11))


@pytest.mark.parametrize("system", ["postgres"], indirect=True)
@pytest.mark.usefixtures("short_statements")
async def test_an_event_too_long_for_a_statement_fails_alone(streams: Project) -> None:
    declare(fields={"n": "int64", "text": "string"})
    await weft.publish("orders", {"n": 0})
    texts = {1: "x", 2: "é" * 3000, 3: "y"}
    results = await asyncio.gather(
        *(weft.publish("orders", {"n": n, "text": text}) for n, text in texts.items()), return_exceptions=True
    )
    assert isinstance(results[1], SchemaError)
    assert "too long" in str(results[1])
    assert numbers() == [0, 1, 3]


# ----------------------------------------------------------------------------------------------------- altered by hand


@on_tables
def test_a_column_that_was_dropped_by_hand_is_made_again(streams: Project, system: Any) -> None:
    declare(max_deliveries=3)
    weft.publish_sync("orders", {"n": 1, "note": "a"})
    table = {"sqlite": '"events.orders"', "postgres": "events.orders", "mysql": "`events.orders`"}[system.kind]
    execute(system, f"ALTER TABLE {table} DROP COLUMN note")
    assert weft.publish_sync("orders", {"n": 2, "note": "b"})["status"] == "accepted"
    assert weft.publish_sync("orders", {"n": 3, "note": "c"})["status"] == "accepted"
    assert [(event["n"], event["note"]) for event in drain("orders")] == [(1, None), (2, "b"), (3, "c")]


@on_tables
async def test_a_column_that_was_dropped_by_hand_beside_others(streams: Project, system: Any) -> None:
    """Who has nothing to do with it shares the commit, and is stored once."""
    declare(on_schema_drift="reject", fields={"n": "int64", "note": "string"})
    await weft.publish("orders", {"n": 0, "note": "a"})
    table = {"sqlite": '"events.orders"', "postgres": "events.orders", "mysql": "`events.orders`"}[system.kind]
    execute(system, f"ALTER TABLE {table} DROP COLUMN note")
    events = [{"n": 1}, {"n": 2, "note": "b"}, {"n": 3}]
    results = await asyncio.gather(*(weft.publish("orders", each) for each in events), return_exceptions=True)
    assert isinstance(results[1], SchemaError)
    assert numbers() == [0, 1, 3]
