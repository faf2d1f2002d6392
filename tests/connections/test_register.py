"""Connections that are made in code are registered under their name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import weft
from weft import DeclarationError, PostgresConnection, SQLiteConnection, connect, register_connection


def test_seed_example() -> None:
    src = PostgresConnection(name="src", url="postgres://alice:secret@localhost/db")
    assert register_connection(src) is src
    assert weft.get_connection("src") is src


def test_equal_one_again_changes_nothing_and_another_needs_replace() -> None:
    first = register_connection(SQLiteConnection("a.db", name="x"))
    register_connection(SQLiteConnection("a.db", name="x"))
    other = SQLiteConnection("b.db", name="x")
    with pytest.raises(DeclarationError, match=r"registered as 'x' already[\s\S]*replace=True"):
        register_connection(other)
    assert weft.registered_connections() == {"x": first}
    register_connection(other, replace=True)
    assert weft.registered_connections() == {"x": other}


def test_error_shows_no_secret() -> None:
    register_connection(PostgresConnection("postgres://me:hunter2@h", name="x"))
    with pytest.raises(DeclarationError) as caught:
        register_connection(PostgresConnection("postgres://me:hunter3@h", name="x"))
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SQLiteConnection("a.db"), "has no name"),
        (SQLiteConnection("a.db", name=""), "cannot be the name of a connection"),
        (SQLiteConnection("a.db", name="a b"), "cannot be the name of a connection"),
        ("postgres://h", "A connection is needed, not a str"),
    ],
)
def test_what_cannot_be_registered(given, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        register_connection(given)


def test_listing_is_a_copy() -> None:
    weft.registered_connections()["x"] = SQLiteConnection("a.db")
    assert weft.registered_connections() == {}


def test_connect_registers_what_has_a_name() -> None:
    assert connect("sqlite:///a.db") == SQLiteConnection(url="sqlite:///a.db")
    assert weft.registered_connections() == {}
    named = connect(url="postgres://h/db", name="x")
    assert weft.get_connection("x") is named
    assert connect(kind="sqlite", path="a.db", name="y") == SQLiteConnection("a.db", name="y")


@pytest.mark.parametrize("arguments", [{}, {"name": "x"}, {"url": "postgres://h", "hots": 1}, {"kind": "sqlite"}])
def test_connect_refuses_what_is_incomplete_or_unknown(arguments: dict[str, object]) -> None:
    with pytest.raises(DeclarationError, match=r"connect\(…\)"):
        connect(**arguments)  # type: ignore[arg-type]


@pytest.mark.timing
def test_threads_agree_on_one() -> None:
    def register(number: int) -> bool:
        try:
            register_connection(SQLiteConnection(f"{number}.db", name="x"))
        except DeclarationError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(register, range(200))) == 1
