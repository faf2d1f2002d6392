"""An append wakes the readers of other processes; where the announcement is lost, they look once a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

from weft.systems.postgres.notify import CHANNEL
from weft.systems.postgres.store import PostgresStore


def settled(store: PostgresStore) -> object:
    """A state right after the look of a second's poll, with nothing else on its way."""
    seen = store.changed(None, 1)
    while (now := store.changed(seen, 1)) == seen:
        pass
    return now


def wait(store: PostgresStore, seen: object) -> float:
    started = time.monotonic()
    while store.changed(seen, 1) == seen:
        assert time.monotonic() - started < 5
    return time.monotonic() - started


def test_append_wakes_another_process(make_store: Callable[..., PostgresStore]) -> None:
    publisher, reader = make_store(), make_store()
    seen = settled(reader)
    publisher.appended()
    assert wait(reader, seen) < 0.8


def test_lost_announcement_costs_a_second(store: PostgresStore) -> None:
    seen = settled(store)
    assert 0.5 < wait(store, seen) < 2


def test_burst_is_announced_a_few_times_and_after_its_end(
    store: PostgresStore, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    connection = connect(autocommit=True)
    connection.execute(f"LISTEN {CHANNEL}")
    started = time.monotonic()
    appended = 0
    while time.monotonic() - started < 0.3:
        store.appended()
        appended += 1
    store.close()  # announces what is left
    announced = len(list(connection.notifies(timeout=0.3)))
    assert 1 <= announced <= 0.3 / 0.005 + 3 < appended


def test_nobody_listens_once_nobody_waits(
    store: PostgresStore, connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    connection = connect(autocommit=True)

    def listening() -> tuple[int]:
        return connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query = %s AND datname = current_database()",
            (f"LISTEN {CHANNEL}",),
        ).fetchone()

    seen = settled(store)
    assert listening() == (1,)
    store.unwatch()
    deadline = time.monotonic() + 10
    while listening() != (0,):
        assert time.monotonic() < deadline
    assert store.changed(seen, 1) != seen  # listens again, and looks for what it missed
    assert listening() == (1,)


def test_close_is_quick(store: PostgresStore) -> None:
    store.changed(None, 1)
    store.appended()
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 0.5
