"""Idempotency keys between publishers that run at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from servers import wait_until
from weft.systems.log import Appended, Batch
from weft.systems.postgres.store import PostgresStore
from weft.systems.sql.log import SqlLog
from weft.types import FieldType

FIELDS = {"n": FieldType("int64")}


@pytest.fixture
def log(store: PostgresStore) -> SqlLog:
    return store.open("events", "t", FIELDS)


def keyed(log: SqlLog, *keys: bytes, horizon: float = 60) -> Batch:
    count = len(keys)
    return Batch(log, [("p", count)], ("n",), [list(range(count))], keys=list(keys), key_horizon=horizon)


class GivenUpError(Exception):
    """Ends a transaction that is not to be."""


@pytest.mark.timing
@pytest.mark.parametrize("gives_up", [False, True])
def test_second_waits_for_the_first(
    store: PostgresStore, log: SqlLog, lock_waits: Callable[[], int], gives_up: bool
) -> None:
    def second() -> Appended:
        return store.append([keyed(log, b"a", b"b")])[0][0]

    with ThreadPoolExecutor(1) as pool:
        try:
            with store.session("publish") as session:
                store.append_in(session, [keyed(log, b"a")])
                waiting = pool.submit(second)
                wait_until(lambda: lock_waits() == 1 or waiting.done(), "the second to wait for the first")
                assert not waiting.done()
                if gives_up:
                    raise GivenUpError
        except GivenUpError:
            pass
        stored = waiting.result()
    assert (stored.stored, stored.deduplicated) == ((2, 0) if gives_up else (1, 1))
    assert log.count() == 2


@pytest.mark.timing
def test_same_keys_from_many_at_once(make_store: Callable[..., PostgresStore], count: Callable[[int], int]) -> None:
    """In any order, with retention beside them: each key is stored once, and nobody ends in a deadlock."""
    barrier = threading.Barrier(8)
    rounds = count(200)

    def publish(i: int) -> int:
        own = make_store()
        log = own.open("events", "t", FIELDS)
        stored = 0
        for n in range(rounds):
            keys = [f"{n}-{k}".encode() for k in range(50)]
            barrier.wait()
            stored += own.append([keyed(log, *(keys if i % 2 else reversed(keys)))])[0][0].stored
            if i == 0:
                log.trim_keys(own.now() - 60)
        return stored

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(publish, range(8))) == rounds * 50


@pytest.mark.timing
def test_horizon(store: PostgresStore, log: SqlLog) -> None:
    assert store.append([keyed(log, b"a", b"a")])[0][0].stored == 1
    assert store.append([keyed(log, b"a")])[0][0].stored == 0
    time.sleep(0.01)
    assert store.append([keyed(log, b"a", horizon=0.001)])[0][0].stored == 1
    log.trim_keys(store.now() - 60)
    assert store.append([keyed(log, b"a")])[0][0].stored == 0
    log.trim_keys(store.now() + 60)
    assert store.append([keyed(log, b"a")])[0][0].stored == 1


def test_keys_in_use_are_not_waited_for(store: PostgresStore, log: SqlLog) -> None:
    store.append([keyed(log, b"a", b"b")])
    with store.session("publish") as session:
        store.append_in(session, [keyed(log, b"a", horizon=0)])
        log.trim_keys(store.now() + 60)
    assert store.append([keyed(log, b"a", b"b")])[0][0].deduplicated == 1
