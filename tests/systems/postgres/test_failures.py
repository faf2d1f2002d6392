"""What goes wrong outside comes out as one of Weft's errors, and the store goes on when the server is back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

import servers
import weft
from weft import BusyError, ConnectionFailedError, SchemaError, StorageError
from weft.systems.log import Batch
from weft.systems.postgres import sessions
from weft.systems.postgres.store import PostgresStore
from weft.types import FieldType

FIELDS = {"n": FieldType("int64")}
Connect = Callable[..., psycopg.Connection[Any]]


def publish(store: PostgresStore) -> None:
    log = store.open("events", "t", FIELDS)
    store.append([Batch(log, [("p", 1)], ("n",), [[1]])])


def test_no_server(make_store: Callable[..., PostgresStore]) -> None:
    store = make_store(f"postgres://me:hunter2@127.0.0.1:{servers.free_port()}/db")
    with pytest.raises(ConnectionFailedError) as caught:
        publish(store)
    assert "127.0.0.1" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    state = store.changed(None, 0.05)
    assert state is not None  # the watcher goes on
    store.appended()


def hang_up(connect: Connect) -> None:
    connect().execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE application_name = 'weft' AND datname = current_database()"
    )


@pytest.mark.timing
def test_hung_up_on_while_idle(store: PostgresStore, connect: Connect) -> None:
    """As a restart does: what rests in the pools is dropped, not handed to the next one who needs it."""
    for count in (1, 2, 3):
        publish(store)
        log = store.open("events", "t", FIELDS)
        assert len(log.lease("c", f"m{count}", 10, 60).spans) == 1
        assert log.count() == count
        assert sum(batch.num_rows for batch in log.read_arrow(0, log.head())) == count
        assert store.arrow_idle
        hang_up(connect)


def test_a_message_that_waits_is_no_reason_to_hang_up(store: PostgresStore, connect: Connect) -> None:
    publish(store)
    ((_, driver),) = store._idle["publish"]
    driver.execute("LISTEN something")
    driver.commit()
    notifier = connect(autocommit=True)
    notifier.execute("NOTIFY something")
    servers.wait_until(lambda: store.has_input(driver), "the message")
    with store.session("publish") as session:
        assert session.driver is driver


@pytest.mark.timing
def test_ended_by_an_administrator(store: PostgresStore, connect: Connect) -> None:
    publish(store)
    with pytest.raises(ConnectionFailedError) as caught, store.session("publish") as session:
        session.run("SELECT 1")
        hang_up(connect)
        session.run("SELECT 1")
    assert "may or may not" in (caught.value.hint or "")
    publish(store)
    assert store.open("events", "t", FIELDS).count() == 2


@pytest.mark.timing
def test_lock_that_is_not_given_up(
    make_store: Callable[..., PostgresStore], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LOCK_SECONDS", 1)
    store = make_store()
    publish(store)
    other = connect()
    other.execute("LOCK TABLE events.t")
    with pytest.raises(BusyError):
        publish(store)
    with pytest.raises(BusyError):
        store.open("events", "t", {"more": FieldType("string")})
    other.rollback()
    publish(store)


def test_server_that_cannot_be_written(
    store: PostgresStore, make_store: Callable[..., PostgresStore], url: str
) -> None:
    publish(store)
    with pytest.raises(StorageError):
        publish(make_store(f"{url}?options=-c%20default_transaction_read_only%3Don"))


def test_value_that_the_server_refuses(store: PostgresStore) -> None:
    log = store.open("events", "t", {"s": FieldType("string")})
    for value in ("\x00", "a\x00b"):
        with pytest.raises(SchemaError):
            store.append([Batch(log, [("p", 1)], ("s",), [[value]])])
    assert log.count() == 0


def test_range_read_of_a_table_that_went(store: PostgresStore, connect: Connect) -> None:
    publish(store)
    batches = store.arrow_batches(store.open("events", "t", FIELDS), 0, 1, FIELDS)
    connect(autocommit=True).execute("DROP TABLE events.t")
    with pytest.raises(weft.WeftError, match="does not exist"):
        list(batches)


@pytest.mark.parametrize(("server_says", "expected"), [("off", "on"), ("on", "on"), ("remote_apply", "remote_apply")])
def test_durability(make_store: Callable[..., PostgresStore], url: str, server_says: str, expected: str) -> None:
    store = make_store(f"{url}?options=-c%20synchronous_commit%3D{server_says}")
    for role, setting in (("publish", expected), ("read", expected), ("keep", "off")):
        with store.session(role) as session:  # type: ignore[arg-type]
            assert session.row("SELECT current_setting('synchronous_commit')") == (setting,)


def test_acks_that_wait_for_the_disk(url: str) -> None:
    with closing(PostgresStore(weft.connect(url=url, durable_acks=True))) as store, store.session("keep") as session:
        assert session.row("SELECT current_setting('synchronous_commit')") == ("on",)


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("own_server", ["postgres"], indirect=True)
def test_store_survives_a_server_that_crashes(own_server: servers.Server, clock: Any) -> None:
    url = own_server.create_database("crash")
    store, reader = PostgresStore(weft.connect(url=url)), PostgresStore(weft.connect(url=url))
    publish(store)
    seen = reader.changed(None, 1)
    own_server.kill()
    assert reader.changed(seen, 0.1) is not None
    with pytest.raises(ConnectionFailedError):
        publish(store)
    own_server.start()
    publish(store)
    log = store.open("events", "t", FIELDS)
    # A crash skips some offsets of the sequence; the head is the offset of an event, not the last one given out.
    assert log.count() == 2
    assert log.head() == log.nth_last(1)
    # Who listens again looks at once, for what was announced to nobody; then, on a clock that stands, only when told.
    servers.wait_until(lambda: reader.changed(seen, 1) != seen, "the reader to listen again")
    seen = reader.changed(None, 0.01)
    assert reader.changed(seen, 0.01) == seen
    store.appended()
    servers.wait_until(lambda: reader.changed(seen, 1) != seen, "the announcement")
    for each in (store, reader):
        each.close()
