"""The log of received messages, on each system that can keep it: a new reader loses nothing, one that is given up holds
up nobody, and keys are kept for as long as it is declared."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any

import pyarrow as pa
import pytest

import weft
from servers import wait_until
from weft.systems import received
from weft.systems.log import Refused
from weft.systems.received import MESSAGES, SCHEMA, Received, ReceivedOffsets, store

pytestmark = pytest.mark.brief("sqlite", "postgres")


@pytest.fixture(params=["sqlite", "postgres", "mysql", "redis"])
def opened(
    request: pytest.FixtureRequest, open_system: Callable[[str], AbstractContextManager[Any]]
) -> Iterator[Callable[..., ReceivedOffsets]]:
    """`opened("one")` is what a process has that reads the log as `one`."""
    with ExitStack() as held:
        connection = weft.connect(url=held.enter_context(open_system(request.param)).url, name="log").resolved()

        def make(reader: str, **settings: Any) -> ReceivedOffsets:
            made = ReceivedOffsets(connection, SCHEMA, "received_test", consumer=reader, **settings)
            held.enter_context(closing(made.store))
            return made

        yield make


class Queue:
    """A broker and its only receiver."""

    def __init__(self, *names: str) -> None:
        self.names, self._given = list(names), 0

    def receive(self, most: int, seconds: float) -> list[Received]:
        self._given = min(most, len(self.names)) or self._given
        if not most or not self.names:
            time.sleep(seconds)
            return []
        return [Received(each.encode(), identity=each.encode()) for each in self.names[:most]]

    def acknowledge(self) -> None:
        del self.names[: self._given]

    def waiting(self) -> int:
        return len(self.names)

    def is_drained(self) -> bool:
        return not self.names

    def close(self) -> None:
        pass


def run_once(offsets: ReceivedOffsets, after: int) -> int:
    offsets.stop_at_head()
    while (upto := offsets.following(after)) > after:
        after = upto
    offsets.stop()
    return after


def put(offsets: ReceivedOffsets, *names: str) -> None:
    """Store messages, each with its name as its identity, in one commit."""
    store(offsets, offsets.made(), [Received(name.encode(), identity=name.encode()) for name in names])


def test_a_new_reader_keeps_what_it_begins_with(opened: Any) -> None:
    one, two = opened("one"), opened("two")
    put(one, "a", "b", "c")
    log = one.made()
    end = log.head()
    log.reset("one", end)
    # A process has found that all is read up to the end. Before it removes that, another one begins.
    first = two.first()
    assert log.trim(end, keeps_unread=True) == 0 and log.floor() <= first
    assert two.log.count() == 3
    assert [each.consumer for each in log.groups()] == ["one", "two"]
    assert log.forget_consumer("two") and not log.forget_consumer("two")
    assert log.trim(end, keeps_unread=True) == 3 and log.floor() == end
    assert [each.consumer for each in log.groups()] == ["one"]
    assert two.first() == end  # it begins with what is left


def test_a_run_that_ends_gathers_a_batch(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch costs Spark more than a few messages do. As many as a batch, or the log, may have are enough."""
    monkeypatch.setattr(received, "MOST_MESSAGES", 2)
    for each in ("_QUIET_SECONDS", "_GATHER_SECONDS"):
        monkeypatch.setattr(received, each, 1000.0)
    monkeypatch.setattr(received, "_TIDY_SECONDS", 0.0)
    sizes: list[list[int]] = []
    position = 0
    for fields in ({}, {"max_rows": 4}, {"max_unread": 4}):
        offsets = opened("one", open=lambda: Queue(*"abcdefghi"), deduplicate_days=0, **fields)
        offsets.stop_at_head()
        sizes.append([])
        while (upto := offsets.following(position)) > position:
            sizes[-1].append(offsets.log.extent(position, upto, 100))
            position = upto
        offsets.stop()
    assert sizes[0] == [9] and sizes[1] == [4, 4, 1]
    assert sum(sizes[2]) == 9 and max(sizes[2]) == 4


def test_many_messages_of_which_some_are_known(opened: Any) -> None:
    one, two = opened("one"), opened("two")
    log, names = one.made(), [f"message {number}" for number in range(4000)]
    put(one, *names[:1200])
    put(two, *names[600:1800])
    put(two, *names[600:1800])
    assert log.count() == 1800
    # Two receivers are given the same messages at once, as after a connection that broke.
    two.made()
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(put, each, *names[1500:]) for each in (one, two)]:
            done.result(120)
    page = log.read(0, log.head(), 10_000)
    values = page.columns[page.names.index("value")]
    assert sorted(values) == sorted(name.encode() for name in names)


class Endless(Queue):
    """A broker that does not say whether it has more."""

    def waiting(self) -> Any:
        return None

    def is_drained(self) -> bool:
        return False


def test_a_run_that_ends_takes_what_came_before_a_pause(opened: Any) -> None:
    offsets = opened("one", open=lambda: Endless(*"abc"))
    offsets.stop_at_head()
    assert offsets.following(offsets.first()) == offsets.log.head() and offsets.log.count() == 3
    offsets.stop()


def test_a_run_that_ends_takes_what_keeps_coming(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where messages never stop to come, a batch does not wait for the end."""

    class Busy(Endless):
        def acknowledge(self) -> None:
            super().acknowledge()
            self.names.append("again")

    monkeypatch.setattr(received, "_QUIET_SECONDS", 1000.0)
    monkeypatch.setattr(received, "_GATHER_SECONDS", 0.2)
    offsets = opened("one", open=lambda: Busy("first"), deduplicate_days=0)
    offsets.stop_at_head()
    first = offsets.first()
    assert offsets.following(first) > first
    offsets.stop()


def test_readers_begin_while_another_removes(opened: Any) -> None:
    one, log, trims, ended = opened("one"), opened("one").made(), [0], threading.Event()

    def remove() -> None:
        while not ended.is_set():
            put(one, f"message {trims[0]}")
            head = log.head()
            log.reset("one", head)
            log.trim(min(each.position for each in log.groups()), keeps_unread=True)
            trims[0] += 1

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for number in range(10):
            reader = opened(f"reader {number}")
            position, before = reader.first(), trims[0]
            wait_until(lambda before=before: trims[0] >= before + 2 or not thread.is_alive(), "two trims", 120)
            assert thread.is_alive() and log.floor() <= position
            log.forget_consumer(f"reader {number}")
    finally:
        ended.set()
        thread.join()


def test_two_processes_make_the_log_at_once(opened: Any) -> None:
    readers = [opened(f"reader {number}") for number in range(4)]
    failures: list[BaseException] = []
    together = threading.Barrier(len(readers))

    def begin(reader: ReceivedOffsets) -> None:
        try:
            together.wait(120)
            reader.first()
            put(reader, reader.consumer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=begin, args=(each,)) for each in readers]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == []
    assert readers[0].log.count() == 4 and len(readers[0].log.groups()) == 4


def test_how_long_a_message_is_known(opened: Any) -> None:
    offsets, log = opened("one"), opened("one").made()
    for name in ("a", "b", "c"):
        put(offsets, name)
    put(offsets, "a", "c", "c")
    assert log.count() == 3
    log.trim_keys(0.0, 2)  # the newest two
    put(offsets, "a", "b", "c")
    assert log.count() == 4
    log.trim_keys(0.0, 10)
    put(offsets, "a", "b", "c")
    assert log.count() == 4
    for days in (0.0, 1e-9):
        before = log.count()
        put(opened("one", deduplicate_days=days), "a")
        assert log.count() == before + 1
    put(offsets, "d")
    log.trim_keys(0.0, 1, young=offsets.store.now() - 3600)  # however many they are, new ones are known
    before = log.count()
    put(offsets, "a", "b", "c", "d")
    assert log.count() == before


def test_messages_that_are_removed_while_a_batch_reads_them(opened: Any) -> None:
    one, two = opened("one"), opened("two")
    put(one, "a", "b", "c")
    log = one.made()
    end = log.head()
    begun = [one.first(), two.first()]
    numbers = [pa.record_batch([pa.array([0])], ["id"])]

    def read() -> int:
        return sum(each.num_rows for each in received._read(one, "orders", [(begun[0], end)], MESSAGES, numbers))

    assert read() == 3
    log.forget_consumer("one")
    log.reset("two", end)
    assert log.trim(end, keeps_unread=True) == 3
    with pytest.raises(weft.StorageError, match=r"messages of orders that come after .* are gone"):
        read()


def test_a_reader_that_is_forgotten_while_it_runs(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there again, although it has nothing to read."""
    monkeypatch.setattr(received, "_TIDY_SECONDS", 0.0)
    one = opened("one", open=Queue)
    position = one.first()
    assert one.following(position) == position
    try:
        wait_until(lambda: one._pump._noted == position, "its first note", 120)
        one.log.forget_consumer("one")
        wait_until(lambda: [each.consumer for each in one.log.groups()] == ["one"], "the reader", 120)
    finally:
        one.stop()


def test_a_run_that_ends_notes_where(opened: Any) -> None:
    """Else the log keeps what was read, and the next run of another pipeline finds it full."""
    begun = {name: opened(name).first() for name in ("one", "two")}
    queue = Queue(*(f"message {n}" for n in range(9)))
    ended = {name: run_once(opened(name, open=lambda: queue, max_rows=4), at) for name, at in begun.items()}
    log = opened("one").made()
    assert {each.consumer: (each.position, each.lag) for each in log.groups()} == {
        name: (at, 0) for name, at in ended.items()
    }
    assert log.count() == 0 and log.floor() == ended["one"] == ended["two"]


def test_a_full_log_is_reported(opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(received, "_TIDY_SECONDS", 0.0)
    monkeypatch.setattr(received, "PATIENCE", 0.2)
    queue = Queue(*"abcdefgh")
    one = opened("one", open=lambda: queue, max_unread=3)
    one.made().reset("gone away", 0)
    position = one.first()

    def warnings() -> list[str]:
        nonlocal position
        position = one.following(position)
        return [each.getMessage() for each in caplog.records if "is full" in each.getMessage()]

    try:
        with caplog.at_level(logging.WARNING, "weft.engine"):
            wait_until(lambda: len(warnings()) >= 2, "two warnings", 120)
    finally:
        one.stop()
    assert "gone away is 3 messages behind" in warnings()[0]
    assert f"weft streams forget {one.name} 'gone away'" in warnings()[0]


def test_a_token_of_a_consumer_that_was_forgotten(opened: Any) -> None:
    one = opened("one")
    put(one, *"abcde")
    log = one.made()
    for begin_again in (lambda: None, lambda: log.reset("workers", 0)):
        log.reset("workers", 0)
        old = log.lease("workers", "old", 5, 600)
        assert log.forget_consumer("workers")
        begin_again()
        new = log.lease("workers", "new", 5, 600)
        offsets = range(new.spans[0].first, new.spans[-1].last + 1)
        assert log.settle("workers", offsets, token=new.token) == 5
        assert log.settle("workers", offsets, token=new.token, again=True) == 0
        assert isinstance(log.settle("workers", offsets, token=old.token, again=True), Refused)
