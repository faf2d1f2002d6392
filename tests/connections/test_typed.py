"""A typed connection is a frozen value whose mistakes are said when it is made."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

import weft
from weft import DeclarationError, MySQLConnection, PostgresConnection, SQLiteConnection

ONE_OF_EACH = [
    SQLiteConnection("events.db", name="a"),
    SQLiteConnection(url="sqlite:///events.db", name="a"),
    PostgresConnection("postgres://me:hunter2@host/db", name="a"),
    PostgresConnection(url="postgresql://host/db", name="a"),
    MySQLConnection("mysql://me:hunter2@host/db", name="a"),
    MySQLConnection("mariadb://host", name="a"),
]
each_kind = pytest.mark.parametrize("connection", ONE_OF_EACH, ids=repr)


@each_kind
def test_is_a_value(connection: weft.systems.Connection) -> None:
    twin = copy.copy(connection)
    assert (twin, hash(twin)) == (connection, hash(connection))
    assert pickle.loads(pickle.dumps(connection)) == connection
    assert dataclasses.replace(connection, name="b") != connection
    with pytest.raises(dataclasses.FrozenInstanceError):
        connection.name = "b"  # type: ignore[misc]


@each_kind
def test_repr_shows_no_password(connection: weft.systems.Connection) -> None:
    for text in (repr(connection), str(connection), f"{connection}", repr([connection]), repr(connection.resolved())):
        assert "hunter2" not in text
        assert type(connection).__name__ in text


def test_path_may_be_a_path() -> None:
    assert SQLiteConnection(Path("a") / "b.db") == SQLiteConnection("a/b.db")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PostgresConnection(ulr="postgres://h"), r"no field 'ulr'[\s\S]*Did you mean 'url'\?"),
        (lambda: MySQLConnection("mysql://h", zzzz=1), r"no field 'zzzz'[\s\S]*Its fields: name, url"),
        (lambda: PostgresConnection(5432), "url must be str, not int"),
        (lambda: PostgresConnection(None), "url must be str, not NoneType"),
        (lambda: SQLiteConnection(True), "path must be str, not bool"),
        (lambda: SQLiteConnection("a", name=1), "name must be str, not int"),
        (lambda: SQLiteConnection(), "Either path or url"),
        (lambda: SQLiteConnection("a.db", url="sqlite:///a.db"), "Either path or url"),
        (lambda: PostgresConnection("mysql://h"), "begins with mysql://; a postgres connection needs postgres:// or"),
        (lambda: PostgresConnection("hunter2"), "is not a URL"),
        (lambda: PostgresConnection("mysql://${DSN}"), "begins with mysql://"),
    ],
)
def test_mistake_is_said_at_declaration(make, message: str) -> None:
    with pytest.raises(DeclarationError, match=message) as caught:
        make()
    assert "hunter2" not in str(caught.value)


def test_repr_of_a_third_party_class_is_safe_too() -> None:
    @dataclasses.dataclass(frozen=True)
    class Other(weft.systems.Connection):
        kind = "other"
        token: str = dataclasses.field(metadata={"secret": True})
        region: str = "here"

    assert repr(Other("hunter2")) == "Other(token='***', region='here')"
    assert repr(Other("${TOKEN}")) == "Other(token='${TOKEN}', region='here')"
    assert Other("hunter2").target == "token=*** region=here"
    assert Other("hunter2").secrets() == {"hunter2"}
