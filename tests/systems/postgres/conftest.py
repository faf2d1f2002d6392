"""A store on an empty PostgreSQL database, and more of them on the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

import servers
import weft
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
