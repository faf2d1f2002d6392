"""Readers stay below what is in flight, and below nothing else: no event is skipped, none is read twice."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count as counter
from typing import Any

import psycopg
import pytest

from servers import wait_until
from weft import ConnectionFailedError
from weft.streams.events import read_on
from weft.systems.log import ROWID, Batch
from weft.systems.log_offsets import Offsets
from weft.systems.postgres.store import PostgresStore
from weft.systems.sql import leases
from weft.systems.sql.leases import ConsumerLeases
from weft.systems.sql.log import SqlLog
from weft.types import FieldType

FIELDS = {"n": FieldType("int64")}
Connect = Callable[..., psycopg.Connection[Any]]


def batch(log: SqlLog, *numbers: int) -> Batch:
    return Batch(log, [("p", len(numbers))], ("n",), [list(numbers)])


def read(log: SqlLog, after: int, upto: int) -> list[int]:
    page = log.read(after, upto, 1_000_000)
    return list(page.columns[page.names.index("n")])


class GivenUpError(Exception):
    """Ends a transaction that is not to be."""


@contextlib.contextmanager
def in_flight(store: PostgresStore, *batches: Batch) -> Iterator[int]:
    """Batches that are stored but not committed until the block ends, and the first offset they got."""
    with store.session("publish") as session:
        first = store.append_in(session, batches)[0][0].first
        assert first is not None
        yield first


@pytest.fixture
def log(store: PostgresStore) -> SqlLog:
    return store.open("events", "t", FIELDS)


def test_fresh_stream(store: PostgresStore, log: SqlLog) -> None:
    assert log.head() == 0
    with in_flight(store, batch(log, 1, 2)) as first:
        assert first == 1
        assert log.head() == 0
        store.append([batch(log, 3)])
        assert log.head() == 0
    assert log.head() == 3
    assert read(log, 0, 3) == [1, 2, 3]


def test_late_commit_hides_what_came_after_it_and_nothing_else(store: PostgresStore, log: SqlLog) -> None:
    store.append([batch(log, 1)])
    with in_flight(store, batch(log, 2)):
        store.append([batch(log, 3)])
        with in_flight(store, batch(log, 4)):
            store.append([batch(log, 5)])
            assert log.head() == 1
            assert log.count() == 1
    assert log.head() == 5
    assert read(log, 1, 5) == [2, 3, 4, 5]


def test_rollback_gives_way(store: PostgresStore, log: SqlLog) -> None:
    with pytest.raises(GivenUpError), in_flight(store, batch(log, 1)):
        store.append([batch(log, 2)])
        raise GivenUpError
    assert log.head() == 2
    assert read(log, 0, 2) == [2]


@pytest.fixture
def late_publisher(store: PostgresStore, log: SqlLog, connect: Connect) -> None:
    """Three events, and a publisher that saw only the first when it registered: it had to wait for a processor."""
    store.append([batch(log, 1, 2, 3)])
    connect().execute("SELECT pg_advisory_xact_lock_shared((%s::bigint << 44) | 1)", (log.number,))
    assert log.head() == 1


@pytest.mark.usefixtures("late_publisher")
def test_a_late_publisher_takes_nothing_back(log: SqlLog) -> None:
    """What a reader had reached is no less reached, and what it planned to read is there."""
    assert [log.head(reached) for reached in (0, 2, 3, 4)] == [1, 2, 3, 3]
    assert [row for rows in log.read_arrow(0, 3) for row in rows["n"].to_pylist()] == [1, 2, 3]
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    assert (log.first_since(tomorrow), log.first_since(tomorrow, 3)) == (2, 4)


@pytest.mark.usefixtures("late_publisher")
def test_readers_wait_for_a_late_publisher(store: PostgresStore, log: SqlLog) -> None:
    """They do not take the stream for one that was restored from an older copy."""
    assert read_on(log, 3, 10) == ([], None, 0)
    offsets = Offsets(store.connection, "events", "t", "earliest", 100, wait_seconds=0.01)
    with contextlib.closing(offsets.store):
        assert offsets.following(3) == 3
        offsets.stop_at_head()
        assert (offsets.end, offsets.following(3)) == (1, 3)


@pytest.mark.timing
def test_dead_publisher_gives_way(store: PostgresStore, log: SqlLog, connect: Connect) -> None:
    with pytest.raises(ConnectionFailedError), store.session("publish") as session:
        store.append_in(session, [batch(log, 1)])
        store.append([batch(log, 2)])
        assert log.head() == 0
        connect().execute("SELECT pg_terminate_backend(%s, 10000)", (session.driver.info.backend_pid,))
        assert log.head() == 2
    assert read(log, 0, 2) == [2]


def test_offsets_that_need_more_than_32_bits(store: PostgresStore, log: SqlLog, connect: Connect) -> None:
    start = 2**32 - 1
    connect(autocommit=True).execute(f"SELECT setval('{store.sequence(log.number)}', {start - 1})")
    store.append([batch(log, start)])
    for offset in range(start + 1, start + 4):
        with in_flight(store, batch(log, offset)) as first:
            assert first == offset
            assert log.head() == offset - 1
        assert log.head() == offset


def test_transaction_registers_once_a_stream(store: PostgresStore, log: SqlLog, connect: Connect) -> None:
    other = store.open("events", "other", FIELDS)
    extra = Batch(log, [("p", 1)], (), [], ['{"m":1}'])
    with in_flight(store, batch(log, 1), extra, batch(log, 2), batch(other, 3)):
        found = connect().execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
        assert found == (2,)
        assert log.head() == other.head() == 0
    assert (log.head(), other.head()) == (3, 1)


def test_idle_transaction_of_a_stranger_hides_nothing(store: PostgresStore, log: SqlLog, connect: Connect) -> None:
    stranger = connect()
    stranger.execute("CREATE TABLE public.mine (n int)")
    stranger.commit()
    stranger.execute("INSERT INTO public.mine VALUES (1)")
    stranger.execute("SELECT pg_advisory_xact_lock_shared(1), pg_advisory_xact_lock(7)")
    with in_flight(store, batch(store.open("events", "other", FIELDS), 1)):
        store.append([batch(log, *range(10))])
        assert log.head() == 10
        assert read(log, 0, 10) == list(range(10))
    stranger.rollback()


def test_same_stream_of_another_database_hides_nothing(
    store: PostgresStore,
    log: SqlLog,
    make_store: Callable[..., PostgresStore],
    shared_server: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "randint", lambda first, last: log.number)
    with shared_server("postgres").database() as url:
        other = make_store(url)
        twin = other.open("events", "t", FIELDS)
        assert twin.number == log.number
        with in_flight(other, batch(twin, 1)):
            store.append([batch(log, 1)])
            assert (log.head(), twin.head()) == (1, 0)
        other.close()


def test_lease_stays_below_what_is_in_flight(store: PostgresStore, log: SqlLog) -> None:
    with in_flight(store, batch(log, 1)):
        store.append([batch(log, 2)])
        assert log.lease("c", "m", 10, 60).spans == []
    (span,) = log.lease("c", "m", 10, 60).spans
    assert (span.first, span.last, span.events) == (1, 2, 2)


@pytest.mark.full
@pytest.mark.timing
def test_many_publishers_that_are_late_or_give_up(
    store: PostgresStore, log: SqlLog, make_store: Callable[..., PostgresStore], count: Callable[[int], int]
) -> None:
    """Several stores, as several processes have them. A reader that never rests sees each event once, in order."""
    numbers = counter()
    left = threading.Semaphore(count(5_000))

    def publish(seed: int) -> list[int]:
        chance, committed = random.Random(seed), []
        own = make_store()
        mine = own.open("events", "t", FIELDS)
        while left.acquire(blocking=False):
            values = [next(numbers) for _ in range(chance.randint(2, 6))]
            with contextlib.suppress(GivenUpError):
                with in_flight(own, batch(mine, values[0]), batch(mine, *values[1:])):
                    time.sleep(chance.choice((0, 0, 0.001, 0.01)))
                    if chance.random() < 0.15:
                        raise GivenUpError
                committed += values
        return committed

    seen: list[int] = []
    offsets: list[int] = []
    position = 0
    with ThreadPoolExecutor(8) as pool:
        publishers = [pool.submit(publish, seed) for seed in range(8)]
        while not all(publisher.done() for publisher in publishers) or position < log.head():
            head = log.head(position)
            assert head >= position
            page = log.read(position, head, 1_000_000)
            seen += page.columns[page.names.index("n")]
            offsets += page.columns[page.names.index(ROWID)]
            position = head
    assert sorted(seen) == sorted(value for publisher in publishers for value in publisher.result())
    assert offsets == sorted(set(offsets))


def test_a_consumer_that_is_forgotten_while_it_leases(
    store: PostgresStore, log: SqlLog, lock_waits: Callable[[], int]
) -> None:
    """The lease goes too: no later consumer of this name is held up by it."""
    store.append([batch(log, 1, 2)])
    log.reset("workers", 0)
    with ThreadPoolExecutor(1) as pool:
        with store.session("keep") as session:
            assert ConsumerLeases(session, log, "workers").lease("slow", 2, 600, None).spans
            forgotten = pool.submit(log.forget_consumer, "workers")
            wait_until(lambda: lock_waits() or forgotten.done(), "it waits for the lease", 120)
        assert forgotten.result()
    assert [each.events for each in log.lease("workers", "next", 2, 600).spans] == [2]
    assert log.groups()[0].pending == 2


def test_a_consumer_that_others_create_and_forget_while_it_is_created(
    store: PostgresStore,
    log: SqlLog,
    make_store: Callable[..., PostgresStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.append([batch(log, 1, 2)])
    other = make_store().open("events", "t", FIELDS)
    shut, create = leases._shut, ConsumerLeases.create

    def shut_behind_another(*arguments: Any) -> None:
        patch.setattr(leases, "_shut", shut)
        other.lease("workers", "other", 1, 600)
        shut(*arguments)

    def create_before_another_forgets(consumer: ConsumerLeases, position: int) -> None:
        create(consumer, position)
        if consumer.key[1] == "workers" and consumer.log is log:
            patch.setattr(ConsumerLeases, "create", create)
            assert other.forget_consumer("workers")

    with monkeypatch.context() as patch:
        patch.setattr(leases, "_shut", shut_behind_another)
        patch.setattr(ConsumerLeases, "create", create_before_another_forgets)
        assert [each.events for each in log.lease("workers", "m", 2, 600).spans] == [2]
