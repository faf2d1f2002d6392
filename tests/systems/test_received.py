"""The log of received messages, on each system that can keep it: a new reader loses nothing, one that is given up holds
up nobody, and keys are kept for as long as it is declared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any

import pytest

import weft
from servers import wait_until
from weft.systems.received import SCHEMA, Received, ReceivedOffsets, store

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
