"""A store on an empty MariaDB database, and more of them on the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import servers
import weft
from weft.systems.mysql.store import MySQLStore


@pytest.fixture
def url(shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    with shared_server("mysql").database() as url:
        yield url


@pytest.fixture
def make_store(url: str) -> Iterator[Callable[..., MySQLStore]]:
    """`make_store()` is another store on the test's database, as another process would have it."""
    made = []

    def make(url: str = url) -> MySQLStore:
        made.append(MySQLStore(weft.connect(url=url)))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: Callable[..., MySQLStore]) -> MySQLStore:
    return make_store()
