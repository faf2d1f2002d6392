"""What goes wrong outside comes out as one of Weft's errors, and the store goes on when the server is back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest

import servers
from weft.errors import BusyError, ConnectionFailedError, SchemaError, StorageError, WeftError
from weft.systems.log import Batch
from weft.systems.mysql import store as module
from weft.systems.mysql.store import MySQLStore
from weft.types import FieldType

FIELDS = {"n": FieldType("int64")}


def publish(store: MySQLStore) -> None:
    log = store.open("events", "t", FIELDS)
    store.append([Batch(log, [("p", 1)], ("n",), [[1]])])


@pytest.fixture
def root(shared_server: Callable[[str], servers.Server]) -> Iterator[Any]:
    with contextlib.closing(shared_server("mysql").connect()) as connection, connection.cursor() as cursor:
        yield cursor


def test_no_server(make_store: Callable[..., MySQLStore]) -> None:
    store = make_store(f"mysql://me:hunter2@127.0.0.1:{servers.free_port()}/db")
    with pytest.raises(ConnectionFailedError) as caught:
        publish(store)
    assert "127.0.0.1" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert store.changed(7, 0.05) == 7  # the watcher goes on


def test_wrong_password_and_no_database(url: str, root: Any, make_store: Callable[..., MySQLStore]) -> None:
    with pytest.raises(ConnectionFailedError) as caught:
        publish(make_store(url.replace("root@", "root:hunter2@")))
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConnectionFailedError, match="Unknown database"):
        publish(make_store(url + "_not_there"))
    with pytest.raises(ConnectionFailedError, match="Name a database"):
        publish(make_store(url.rpartition("/")[0]))


def hang_up(url: str, root: Any) -> None:
    database = url.rpartition("/")[2]

    def none_left() -> bool:
        root.execute("SELECT id FROM information_schema.processlist WHERE db = %s", (database,))
        found = root.fetchall()
        for (number,) in found:
            with contextlib.suppress(pymysql.OperationalError):  # it has ended meanwhile
                root.execute(f"KILL {number}")
        return not found

    servers.wait_until(none_left, "the connections to end")


@pytest.mark.timing
def test_hung_up_on_while_idle(store: MySQLStore, url: str, root: Any) -> None:
    """As a restart does: what rests in the pools is dropped, not handed to the next one who needs it."""
    for count in (1, 2, 3):
        publish(store)
        log = store.open("events", "t", FIELDS)
        assert len(log.lease("c", f"m{count}", 10, 60).spans) == 1
        assert log.count() == count
        assert sum(batch.num_rows for batch in log.read_arrow(0, log.head())) == count
        hang_up(url, root)


@pytest.mark.timing
def test_killed_by_an_administrator(store: MySQLStore, url: str, root: Any) -> None:
    publish(store)
    state = store.changed(None, 1)
    with pytest.raises(ConnectionFailedError) as caught, store.session("publish") as session:
        session.run("SELECT 1")
        hang_up(url, root)
        session.run("SELECT 1")
    assert "may or may not" in (caught.value.hint or "")
    publish(store)
    assert store.open("events", "t", FIELDS).count() == 2
    deadline = time.monotonic() + 10
    while store.changed(state, 0.1) == state:
        assert time.monotonic() < deadline


def test_user_who_may_not_create(url: str, root: Any, make_store: Callable[..., MySQLStore]) -> None:
    database = url.rpartition("/")[2]
    root.execute("CREATE USER weft_reader@'127.0.0.1' IDENTIFIED BY 'hunter2'")
    limited = url.replace("root@", "weft_reader:hunter2@")
    try:
        with pytest.raises(ConnectionFailedError, match="Access denied") as caught:
            publish(make_store(limited))
        assert not caught.value.is_transient
        root.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.* TO weft_reader@'127.0.0.1'")
        with pytest.raises(WeftError, match="Grant the user"):
            publish(make_store(limited))
        publish(make_store())
        # What is there needs no CREATE.
        publish(make_store(limited))
    finally:
        root.execute("DROP USER weft_reader@'127.0.0.1'")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (pymysql.OperationalError(2006, "MySQL server has gone away"), ConnectionFailedError),
        (pymysql.OperationalError(2013, "Lost connection"), ConnectionFailedError),
        (pymysql.OperationalError(2055, "Lost connection"), ConnectionFailedError),
        (pymysql.OperationalError(1053, "Server shutdown in progress"), ConnectionFailedError),
        (pymysql.OperationalError(1927, "Connection was killed"), ConnectionFailedError),
        (pymysql.InterfaceError(0, ""), ConnectionFailedError),
        (pymysql.OperationalError(1205, "Lock wait timeout exceeded"), BusyError),
        (pymysql.OperationalError(1213, "Deadlock found"), BusyError),
        (pymysql.InternalError(1021, "Disk full"), StorageError),
        (pymysql.OperationalError(1114, "The table is full"), StorageError),
        (pymysql.OperationalError(1290, "running with the --read-only option"), StorageError),
        (pymysql.DataError(1406, "Data too long"), SchemaError),
        (pymysql.DataError(1264, "Out of range value"), SchemaError),
        (pymysql.OperationalError(1366, "Incorrect string value"), SchemaError),
        (pymysql.OperationalError(1153, "Got a packet bigger than max_allowed_packet"), SchemaError),
    ],
)
def test_error_numbers(make_store: Callable[..., MySQLStore], error: Exception, expected: type[Exception]) -> None:
    explained = make_store().explain(error)
    assert type(explained) is expected
    assert str(error.args[1]) in str(explained)


@pytest.mark.timing
def test_waiting_wakes_soon(store: MySQLStore, make_store: Callable[..., MySQLStore]) -> None:
    publish(store)
    state = store.changed(None, 1)
    begin = time.monotonic()
    assert store.changed(state, 0.05) == state
    assert time.monotonic() - begin >= 0.05
    publish(make_store())
    assert store.changed(state, 1) != state


def test_keys(store: MySQLStore) -> None:
    log = store.open("events", "t", FIELDS)

    def publish(keys: list[bytes | None], horizon: float = 60.0) -> int:
        count = len(keys)
        batch = Batch(log, [("p", count)], ("n",), [list(range(count))], keys=keys, key_horizon=horizon)
        return store.append([batch])[0][0].stored

    many: list[bytes | None] = [number.to_bytes(20, "big") for number in range(module._KEYS * 2 + 1)]
    assert publish([b"a\x00", None, b"a\x00", None, b"a"]) == 4
    assert publish([b"a\x00", b"a", b"A"]) == 1
    assert publish(many) == len(many)
    assert publish(many) == 0
    assert publish(many[:5], 0.0) == 5  # renewed
    log.trim_keys(store.now() + 60)
    assert publish(many) == len(many)
