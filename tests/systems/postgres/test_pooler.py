"""Behind a pooler each transaction may be in another session of the server, which nobody has set up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, get_args

import psycopg
import pytest

import pgbouncer_server  # noqa: F401 - a kind of server
from weft.systems.log import Batch, Log
from weft.systems.postgres.store import PostgresStore
from weft.systems.sql.driver import Role
from weft.types import FieldType

FIELDS = {"n": FieldType("int64")}
Connect = Callable[..., psycopg.Connection[Any]]


def one(log: Log, n: int) -> list[Batch]:
    return [Batch(log, [(f"p{n}", 1)], ("n",), [[n]])]


def test_each_transaction_says_how_it_is_isolated(store: PostgresStore) -> None:
    with store.session("keep") as session:
        session.run("SET default_transaction_isolation = 'repeatable read'")
    with store.session("keep") as session:
        assert session.value("SHOW transaction_isolation") == "read committed"


@pytest.fixture
def pooled(
    url: str, connect: Connect, shared_server: Callable[[str], Any], make_store: Callable[..., PostgresStore]
) -> Iterator[PostgresStore]:
    """A store whose server has other defaults than ours, and a session in which nobody has changed them."""
    database = url.rpartition("/")[2]
    pooler = shared_server("pgbouncer").url(database)
    with connect(autocommit=True) as connection:
        for name, value in (("default_transaction_isolation", "repeatable read"), ("synchronous_commit", "off")):
            connection.execute(f"ALTER DATABASE {database} SET {name} = '{value}'")
    store = make_store(pooler)
    store.open("events", "numbers", FIELDS)
    for role in get_args(Role):  # the next transaction of each opens no connection, which would set a session up
        with store.session(role):
            pass
    with psycopg.connect(pooler, prepare_threshold=None) as other:
        other.execute("SELECT 1")  # keeps the session that was set up
        yield store
    store.close()


@pytest.mark.full
def test_a_consumer_skips_nothing(
    pooled: PostgresStore, make_store: Callable[..., PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, fence = make_store(), pooled.fence
    log = publisher.open("events", "numbers", FIELDS)
    with ExitStack() as late, monkeypatch.context() as patch:
        publisher.append_in(late.enter_context(publisher.session("publish")), one(log, 1))
        publisher.append(one(log, 2))

        def commit_first(*arguments: Any) -> int:
            late.close()
            return fence(*arguments)

        patch.setattr(pooled, "fence", commit_first)
        (span,) = pooled.open("events", "numbers", FIELDS).lease("c", "m", 10, 60).spans
    assert span.events == 2


@pytest.mark.full
def test_a_publish_waits_for_the_disk(pooled: PostgresStore, connect: Connect) -> None:
    with connect(autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION check_wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF current_setting('synchronous_commit') = 'off' THEN RAISE 'no wait'; END IF; RETURN NEW; END $$"
        )
        connection.execute(
            "CREATE TRIGGER check_wait BEFORE INSERT ON events.numbers FOR EACH ROW EXECUTE FUNCTION check_wait()"
        )
    log = pooled.open("events", "numbers", FIELDS)
    pooled.append(one(log, 1))
    assert log.count() == 1
