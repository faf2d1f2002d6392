"""A store on an empty MariaDB database, and more of them on the same one."""

from __future__ import annotations

import contextlib
import time
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


@pytest.fixture
def lock_waits(url: str, shared_server: Callable[[str], servers.Server]) -> Iterator[Callable[[], int]]:
    """How many transactions wait for a row's lock now."""
    database = url.rpartition("/")[2]
    with contextlib.closing(shared_server("mysql").connect()) as connection:

        def waits() -> int:
            time.sleep(0.15)  # who looks more often than every 100 ms is shown the same again
            cursor = connection.cursor()
            cursor.execute(
                "SELECT count(*) FROM information_schema.innodb_trx "
                "JOIN information_schema.processlist ON id = trx_mysql_thread_id "
                "WHERE trx_state = 'LOCK WAIT' AND db = %s",
                (database,),
            )
            return int(cursor.fetchone()[0])

        yield waits
