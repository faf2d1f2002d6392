"""Offsets are in the order of commits: a reader that goes from head to head gets each event once, in order."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from servers import wait_until
from weft.systems.log import ROWID, Batch
from weft.systems.mysql.store import MySQLStore
from weft.systems.sql.log import SqlLog
from weft.types import FieldType

FIELDS = {"n": FieldType("int64")}
WRITERS = 8


def batch(log: SqlLog, *numbers: int) -> Batch:
    return Batch(log, [("p", len(numbers))], ("n",), [list(numbers)])


def read(log: SqlLog, after: int, upto: int) -> list[tuple[int, int]]:
    page = log.read(after, upto, 1_000_000)
    return list(zip(page.columns[page.names.index(ROWID)], page.columns[page.names.index("n")], strict=True))


class GivenUpError(Exception):
    """Ends a transaction that is not to be."""


@pytest.mark.timing
def test_what_is_in_flight_holds_up_publishers_not_readers(store: MySQLStore, lock_waits: Callable[[], int]) -> None:
    log = store.open("events", "t", FIELDS)
    store.append([batch(log, 1)])
    with ThreadPoolExecutor() as threads:
        with store.session("publish") as session:
            store.append_in(session, [batch(log, 2)])
            later = threads.submit(store.append, [batch(log, 3)])
            wait_until(lambda: lock_waits() == 1 or later.done(), "the later publisher to wait")
            assert not later.done()
            assert read(log, 0, log.head()) == [(1, 1)]
        later.result()
    assert read(log, 0, log.head()) == [(1, 1), (2, 2), (3, 3)]


def test_other_streams_go_on(store: MySQLStore) -> None:
    one, other = (store.open("events", name, FIELDS) for name in ("one", "other"))
    with store.session("publish") as session:
        store.append_in(session, [batch(one, 1)])
        store.append([batch(other, 1)])
        assert (one.head(), other.head()) == (0, 1)


def test_no_reader_saw_an_offset_that_is_given_again(store: MySQLStore) -> None:
    log = store.open("events", "t", FIELDS)
    with contextlib.suppress(GivenUpError), store.session("publish") as session:
        store.append_in(session, [batch(log, 1, 2)])
        assert log.head() == 0
        raise GivenUpError
    store.append([batch(log, 3)])
    assert read(log, 0, log.head()) == [(1, 3)]


def test_offsets_are_not_used_again_after_a_trim(store: MySQLStore, make_store: Callable[..., MySQLStore]) -> None:
    store.append([batch(store.open("events", "t", FIELDS), 1, 2)])
    log = store.open("events", "t", FIELDS)
    assert log.trim(2) == 2
    other = make_store()
    again = other.open("events", "t", FIELDS)
    other.append([batch(again, 3)])
    assert read(again, 0, again.head()) == [(3, 3)]


@pytest.mark.full
@pytest.mark.timing
def test_eight_writers(make_store: Callable[..., MySQLStore], count: Callable[[int], int]) -> None:
    committed: list[list[int]] = [[] for _ in range(WRITERS)]
    transactions = count(400)
    done = threading.Event()

    def write(writer: int) -> None:
        store, choose = make_store(), random.Random(writer)
        log = store.open("events", "t", FIELDS)
        for number in range(transactions):
            first = (writer * transactions + number) * 10
            numbers = list(range(first, first + choose.randint(1, 10)))
            with contextlib.suppress(GivenUpError):
                with store.session("publish") as session:
                    store.append_in(session, [batch(log, *numbers)])
                    time.sleep(choose.choice([0, 0, 0.001, 0.003]))
                    if choose.random() < 0.15:
                        raise GivenUpError
                committed[writer] += numbers

    def follow() -> list[tuple[int, int]]:
        log = make_store().open("events", "t", FIELDS)
        seen: list[tuple[int, int]] = []
        ending = False
        while not ending:
            ending = done.is_set()
            head = log.head()
            seen += read(log, seen[-1][0] if seen else 0, head)
        return seen

    with ThreadPoolExecutor(WRITERS + 1) as threads:
        reader = threads.submit(follow)
        list(threads.map(write, range(WRITERS)))
        done.set()
        seen = reader.result()
    assert [offset for offset, _ in seen] == list(range(1, len(seen) + 1))
    assert sorted(n for _, n in seen) == sorted(n for numbers in committed for n in numbers)
