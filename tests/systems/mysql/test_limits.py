"""Packets, names and tables: what MySQL limits, pads, folds or creates twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import servers
import weft
from weft.errors import SchemaError
from weft.systems.log import Batch, Refused
from weft.systems.mysql.driver import Driver, connect
from weft.systems.mysql.store import MySQLStore
from weft.types import MAX_VALUE_BYTES, FieldType

FIELDS = {"text": FieldType("string")}
PACKET = 1024 * 1024


@pytest.fixture
def small_packets(shared_server: Callable[[str], servers.Server], store: MySQLStore) -> Iterator[None]:
    with contextlib.closing(shared_server("mysql").connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT @@max_allowed_packet")
        (before,) = cursor.fetchone()
        cursor.execute(f"SET GLOBAL max_allowed_packet = {PACKET}")
        yield
        cursor.execute(f"SET GLOBAL max_allowed_packet = {before}")


@pytest.mark.usefixtures("small_packets")
def test_batch_larger_than_a_packet(store: MySQLStore) -> None:
    log = store.open("events", "t", FIELDS)
    texts = [letter * (PACKET * 2 // 5) for letter in "abcdefghij"] + ["k"]
    ((stored,),) = store.append([Batch(log, [("p", len(texts))], ("text",), [texts])])
    assert (stored.first, stored.last) == (1, len(texts))
    assert list(log.read(0, 100, 100).columns[0]) == texts
    assert [text for batch in log.read_arrow(0, 100) for text in batch.column("text").to_pylist()] == texts


@pytest.mark.usefixtures("small_packets")
def test_event_larger_than_a_packet(store: MySQLStore) -> None:
    log = store.open("events", "t", FIELDS)
    with pytest.raises(SchemaError, match="at a time"):
        store.append([Batch(log, [("p", 2)], ("text",), [["fits", "x" * PACKET]])])
    assert (log.head(), log.count()) == (0, 0)
    # To the byte: what we let pass, the server takes.
    stored = 0
    for length in range(PACKET - 120, PACKET):
        with contextlib.suppress(SchemaError):
            store.append([Batch(log, [("p", 1)], ("text",), [["x" * length]])])
            stored += 1
    assert 20 < stored == log.count() < 100


def test_arrow_chunks_that_the_server_cannot_join(store: MySQLStore) -> None:
    log = store.open("events", "t", FIELDS)
    texts = ["x" * MAX_VALUE_BYTES, '"' * (MAX_VALUE_BYTES // 2), "y" * MAX_VALUE_BYTES, "z"]
    store.append([Batch(log, [("p", len(texts))], ("text",), [texts])])
    assert [text for batch in log.read_arrow(0, 100) for text in batch.column("text").to_pylist()] == texts


def test_names_that_other_collations_take_for_the_same(store: MySQLStore) -> None:
    log = store.open("events", "t", FIELDS)
    store.append([Batch(log, [("p", 2)], ("text",), [["a", "b"]])])
    names = ["mail", "mail ", "Mail", "mäil", "mail\t", "✉" * 255]
    for name in names:
        assert log.lease(name, f"{name[:10]} ", 10, 60).spans[0].events == 2
    assert sorted(group.consumer for group in log.groups()) == sorted(names)
    for group in log.groups():
        assert [member.member for member in group.members] == [f"{group.consumer[:10]} "]
        assert isinstance(log.settle(group.consumer, [1, 2], member=group.consumer[:10]), Refused)
        assert log.settle(group.consumer, [1, 2], member=f"{group.consumer[:10]} ") == 2


def test_names_with_quotes(store: MySQLStore) -> None:
    log = store.open("events", "odd`name", {"a`b%s?": FieldType("int64")})
    store.append([Batch(log, [("p", 1)], ("a`b%s?",), [[1]])])
    assert log.read(0, 1, 1).columns[0] == (1,)
    assert store.names() == [("events", "odd`name")]


@pytest.mark.timing
def test_created_by_eight_at_once(make_store: Callable[..., MySQLStore]) -> None:
    for round_ in range(5):
        barrier = threading.Barrier(8)

        def create(number: int, name: str = f"t{round_}", barrier: threading.Barrier = barrier) -> int:
            store = make_store()
            barrier.wait()
            # One field is everybody's, one the creator's own, which the others must add.
            log = store.open("events", name, {"all": FieldType("int64"), f"of_{number % 3}": FieldType("string")})
            store.append([Batch(log, [("p", 1)], ("all",), [[number]])])
            return log.number

        with ThreadPoolExecutor(8) as threads:
            assert len(set(threads.map(create, range(8)))) == 1
        log = make_store().open("events", f"t{round_}", {})
        assert set(log.fields()) == {"all", "of_0", "of_1", "of_2"}
        assert log.count() == 8


@pytest.mark.timing
def test_columns_added_while_others_publish(make_store: Callable[..., MySQLStore]) -> None:
    stop = threading.Event()
    make_store().open("events", "t", FIELDS)

    def publish() -> int:
        store = make_store()
        log, stored = store.open("events", "t", FIELDS), 0
        while not stop.is_set():
            store.append([Batch(log, [("p", 1)], ("text",), [["x"]])])
            stored += 1
        return stored

    def add(number: int) -> None:
        log = make_store().open("events", "t", FIELDS)
        for column in range(5):
            log.add_fields({f"f{column}": FieldType("int64"), f"f{column}_{number}": FieldType("string")})

    with ThreadPoolExecutor(8) as threads:
        publishers = [threads.submit(publish) for _ in range(4)]
        list(threads.map(add, range(3)))
        stop.set()
        stored = sum(publisher.result() for publisher in publishers)
    log = make_store().open("events", "t", FIELDS)
    assert len(log.fields()) == 1 + 5 + 15
    assert log.count() == stored > 0


def test_table_left_without_its_catalogue(url: str, make_store: Callable[..., MySQLStore]) -> None:
    store = make_store()
    log = store.open("events", "t", FIELDS)
    store.append([Batch(log, [("p", 2)], ("text",), [["a", "b"]])])
    with contextlib.closing(connect(weft.connect(url=url).resolved().parameters(), autocommit=True)) as driver:
        driver.query("DELETE FROM `weft.streams`")
    other = make_store()
    again = other.open("events", "t", FIELDS)
    other.append([Batch(again, [("p", 1)], ("text",), [["c"]])])
    assert list(again.read(0, 10, 10).columns[0]) == ["a", "b", "c"]


def test_sql_mode_of_the_url_does_not_change_values(url: str, make_store: Callable[..., MySQLStore]) -> None:
    store = make_store(f"{url}?sql_mode=ANSI_QUOTES,NO_BACKSLASH_ESCAPES&charset=latin1")
    log = store.open("events", "t", FIELDS)
    store.append([Batch(log, [("p", 1)], ("text",), [['\\"€']])])
    assert list(log.read(0, 1, 1).columns[0]) == ['\\"€']


def test_connecting_reads_no_certificates(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = weft.connect(url=url).resolved().parameters()
    monkeypatch.setattr("ssl.create_default_context", lambda **_: pytest.fail("it does"))
    connect(parameters, autocommit=True).close()


def test_identity_is_verified_where_it_is_asked_for() -> None:
    # Nobody is connected to: what is to be verified is settled before.
    asked = {"host": "db.example", "defer_connect": True}
    assert Driver(**asked, ssl_verify_identity=True).ctx.check_hostname
    assert not Driver(**asked, ssl_verify_cert=True).ctx.check_hostname
