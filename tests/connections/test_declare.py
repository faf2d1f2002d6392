"""`@weft.connection` declares a connection as a class."""

from __future__ import annotations

import pytest

import weft
from weft import DeclarationError, MySQLConnection, NotFoundError, PostgresConnection, SQLiteConnection


def test_seed_example() -> None:
    from weft import weft as namespace

    @namespace.connection
    class warehouse:
        kind = "postgres"
        url = "${WAREHOUSE_DSN}"  # not set: it is needed at use only

    assert warehouse == PostgresConnection("${WAREHOUSE_DSN}", name="warehouse")
    assert weft.get_connection("warehouse") is warehouse
    assert weft.registered_connections() == {"warehouse": warehouse}
    assert repr(warehouse) == "PostgresConnection(name='warehouse', url='${WAREHOUSE_DSN}')"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "postgres", "url": "postgres://h/db"}, PostgresConnection("postgres://h/db", name="it")),
        ({"kind": "mysql", "url": "mysql://h/db"}, MySQLConnection("mysql://h/db", name="it")),
        ({"kind": "sqlite", "path": "a.db"}, SQLiteConnection("a.db", name="it")),
        ({"url": "postgresql://h/db"}, PostgresConnection("postgresql://h/db", name="it")),
        ({"url": "mariadb://h/db"}, MySQLConnection("mariadb://h/db", name="it")),
        ({"url": "sqlite:///a.db"}, SQLiteConnection(url="sqlite:///a.db", name="it")),
    ],
)
def test_every_kind(fields: dict[str, object], expected: weft.systems.Connection) -> None:
    assert weft.connection(type("it", (), {**fields, "__doc__": "text", "_private": 1})) == expected


def test_name_of_the_body_wins_over_the_class() -> None:
    @weft.connection
    class anything:
        name = "ware-house"
        url = "sqlite:///a.db"

    assert weft.get_connection("ware-house") is anything


def test_fields_are_inherited() -> None:
    class Common:
        kind = "postgres"
        url = "postgres://h/db"

    @weft.connection
    class special(Common):
        url = "postgres://h/special"

    assert special == PostgresConnection("postgres://h/special", name="special")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, DeclarationError, "@connection class it: url or kind is missing"),
        ({"kind": "pulsar", "bootstrap_servers": "h:9092"}, NotFoundError, "Known kinds: .*mysql.*postgres.*sqlite"),
        ({"kind": "oracle", "url": "http://h"}, NotFoundError, "Known kinds: .*mysql.*postgres.*sqlite"),
        ({"kind": "postgres", "url": "postgres://h", "prot": 1}, DeclarationError, "no field 'prot'"),
        ({"kind": "postgres"}, DeclarationError, "needs the field 'url'"),
    ],
)
def test_mistake_names_the_class(fields: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        weft.connection(type("it", (), fields))
    assert "class it" in str(caught.value)
    assert weft.registered_connections() == {}


@pytest.mark.parametrize(
    "url",
    ["postgres://${DSN}", "postgres://postgres://me:pw@h/db", "mysql://postgres://h/db", "sqlite:///sqlite:///a.db"],
)
def test_a_second_scheme_is_seen(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a variable holds a whole URL."""
    monkeypatch.setenv("DSN", "postgresql://me:hunter2@h/db")
    with pytest.raises(DeclarationError, match=r"has two schemes: (postgres|mysql|sqlite)://") as caught:
        weft.connect(url=url).resolved()
    assert "write it alone" in str(caught.value)
    assert "hunter2" not in str(caught.value)
