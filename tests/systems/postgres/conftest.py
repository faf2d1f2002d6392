"""A store on an empty PostgreSQL database, and more of them on the same one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

import servers
import weft
from weft.systems.postgres import notify
from weft.systems.postgres.store import PostgresStore


@pytest.fixture
def url(shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    with shared_server("postgres").database() as url:
        yield url


@pytest.fixture
def make_store(url: str) -> Iterator[Callable[..., PostgresStore]]:
    """`make_store()` is another store on the test's database, as another process would have it."""
    made = []

    def make(url: str = url) -> PostgresStore:
        made.append(PostgresStore(weft.connect(url=url)))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: Callable[..., PostgresStore]) -> PostgresStore:
    return make_store()


@pytest.fixture
def connect(url: str) -> Iterator[Callable[..., psycopg.Connection[Any]]]:
    """Plain connections, closed at the end."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(psycopg.connect(url, **options))


@pytest.fixture
def lock_waits(connect: Callable[..., psycopg.Connection[Any]]) -> Callable[[], int]:
    """How many transactions wait for a lock of another one now."""
    connection = connect(autocommit=True)

    def waits() -> int:
        found = connection.execute(
            "SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid) "
            "WHERE NOT granted AND datname = current_database()"
        ).fetchone()
        assert found
        return int(found[0])

    return waits


class Clock:
    """The time that listeners go by."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still until it is moved: what wakes a reader then is an announcement."""
    clock = Clock()
    monkeypatch.setattr(notify, "time", clock)
    return clock
