"""The catalogue and a stream's table: made once whoever comes first, with no more rights than it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from weft import DeclarationError, WeftError
from weft.systems.log import Batch
from weft.systems.postgres.store import PostgresStore
from weft.types import FieldType

FIELDS = {"n": FieldType("int64")}
Connect = Callable[..., psycopg.Connection[Any]]


def publish(store: PostgresStore, *numbers: int, name: str = "t") -> tuple[int | None, int | None]:
    log = store.open("events", name, FIELDS)
    ((stored,),) = store.append([Batch(log, [("p", len(numbers))], ("n",), [list(numbers)])])
    return stored.first, stored.last


@pytest.mark.timing
def test_eight_at_once(make_store: Callable[..., PostgresStore]) -> None:
    barrier = threading.Barrier(8)

    def create(i: int) -> int:
        own = make_store()
        barrier.wait()
        publish(own, i)
        publish(own, i, name=f"t{i}")
        return own.open("events", "t", FIELDS).number

    with ThreadPoolExecutor(8) as pool:
        numbers = set(pool.map(create, range(8)))
    assert len(numbers) == 1
    store = make_store()
    assert store.names() == [("events", "t"), *(("events", f"t{i}") for i in range(8))]
    assert store.open("events", "t", FIELDS).count() == 8


@pytest.mark.timing
def test_eight_add_the_same_column(make_store: Callable[..., PostgresStore]) -> None:
    publish(make_store(), 1)
    barrier = threading.Barrier(8)

    def add(_: int) -> None:
        own = make_store()
        log = own.open("events", "t", FIELDS)
        barrier.wait()
        log.add_fields({"more": FieldType("string")})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert list(make_store().open("events", "t", FIELDS).fields()) == ["n", "more"]


@pytest.mark.timing
def test_column_is_added_without_holding_publishers_up(
    store: PostgresStore, make_store: Callable[..., PostgresStore], connect: Connect
) -> None:
    publish(store, 1)
    reader = connect()
    reader.execute("SELECT * FROM events.t")  # holds its lock until its transaction ends
    log = make_store().open("events", "t", FIELDS)
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(log.add_fields, {"more": FieldType("string")})
        for n in range(50):
            publish(store, n)  # each waits for a tenth of a second at most
        assert not adding.done()
        reader.rollback()
        adding.result()
    assert "more" in log.fields()


def test_reader_goes_on_when_another_process_adds_a_column(
    store: PostgresStore, make_store: Callable[..., PostgresStore]
) -> None:
    publish(store, 1)
    log = store.open("events", "t", FIELDS)
    for _ in range(20):  # more often than it takes psycopg to prepare a statement
        assert log.read(0, 1, 10).names[0] == "n"
        publish(store, 2)
    make_store().open("events", "t", {**FIELDS, "more": FieldType("float32")})
    assert "more" in log.read(0, 1, 10).names
    publish(store, 3)


def test_names(store: PostgresStore, connect: Connect) -> None:
    odd = 'Größe "100%" of: it?'
    log = store.open("events", odd, {odd: FieldType("string")})
    store.append([Batch(log, [("p", 1)], (odd,), [["x"]])])
    assert log.read(0, 1, 1).columns[0] == ("x",)
    assert [batch.to_pylist()[0][odd] for batch in log.read_arrow(0, 1)] == ["x"]
    store.open("events", "a" * 63, FIELDS)
    with pytest.raises(DeclarationError, match="63 bytes"):
        store.open("events", "a" * 64, FIELDS)


def test_table_that_is_no_stream(store: PostgresStore, connect: Connect) -> None:
    connection = connect(autocommit=True)
    connection.execute("CREATE SCHEMA events")
    connection.execute("CREATE TABLE events.t (n int)")
    with pytest.raises(DeclarationError, match="not a stream"):
        store.open("events", "t", FIELDS)
    assert store.names() == []
    connection.execute("DROP TABLE events.t")
    assert publish(store, 1) == (1, 1)


def test_stream_restored_without_its_catalogue_goes_on_after_its_last_offset(
    make_store: Callable[..., PostgresStore], connect: Connect
) -> None:
    publish(make_store(), 1, 2, 3)
    connect(autocommit=True).execute("DROP SCHEMA weft CASCADE")
    assert publish(make_store(), 4) == (4, 4)


@pytest.fixture
def limited(url: str, connect: Connect) -> Any:
    """The url of a role that may create nothing outside the schemas `weft` and `events`."""
    connection = connect(autocommit=True)
    connection.execute("DROP ROLE IF EXISTS limited")
    connection.execute("CREATE ROLE limited LOGIN")
    yield url.replace("weft@", "limited@")
    connection.execute("DROP OWNED BY limited")
    connection.execute("DROP ROLE limited")


def test_role_that_may_create_no_schema(
    limited: str, make_store: Callable[..., PostgresStore], connect: Connect
) -> None:
    with pytest.raises(WeftError, match="permission denied") as caught:
        publish(make_store(limited), 1)
    assert "GRANT" in (caught.value.hint or "")
    connection = connect(autocommit=True)
    for schema in ("weft", "events"):
        connection.execute(f"CREATE SCHEMA {schema}")
        connection.execute(f"GRANT CREATE, USAGE ON SCHEMA {schema} TO limited")
    assert publish(make_store(limited), 1) == (1, 1)


def test_role_that_may_only_use_what_is_there(
    limited: str, make_store: Callable[..., PostgresStore], connect: Connect
) -> None:
    publish(make_store(), 1)
    connection = connect(autocommit=True)
    for schema in ("weft", "events"):
        connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO limited")
        connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO limited")
        connection.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO limited")
    store = make_store(limited)
    assert publish(store, 2) == (2, 2)
    assert store.open("events", "t", FIELDS).lease("c", "m", 10, 60).spans[0].events == 2
