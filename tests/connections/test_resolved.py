"""`${VAR}` in a connection is read at use, and its value is never shown."""

from __future__ import annotations

import pytest

from weft import MySQLConnection, PostgresConnection, SettingsError, SQLiteConnection, connect


def test_value_is_read_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = PostgresConnection("postgres://me:${PASSWORD}@host/db")
    for password in ("one", "two"):
        monkeypatch.setenv("PASSWORD", password)
        assert connection.resolved().url == f"postgres://me:{password}@host/db"
    assert connection.url == "postgres://me:${PASSWORD}@host/db"


def test_reference_may_be_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect("${DSN}", kind="mysql")
    monkeypatch.setenv("DSN", "mysql://me:hunter2@host/db")
    assert connection.resolved().url == "mysql://me:hunter2@host/db"
    assert repr(connection) == "MySQLConnection(url='${DSN}')"
    assert repr(connection.resolved()) == "MySQLConnection(url='mysql://me:***@host/db')"


def test_seed_form_with_everything_after_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAREHOUSE_DSN", "me:hunter2@host:5432/db")
    connection = PostgresConnection("postgres://${WAREHOUSE_DSN}")
    assert connection.resolved().url == "postgres://me:hunter2@host:5432/db"
    assert "hunter2" in connection.secrets()
    assert "hunter2" not in repr(connection) + repr(connection.resolved())


def test_missing_variable_names_itself_the_connection_and_the_field() -> None:
    with pytest.raises(SettingsError, match=r"NOT_SET is not set, and the url of the connection 'warehouse' needs it"):
        PostgresConnection("${NOT_SET}", name="warehouse").resolved()


def test_value_with_the_wrong_scheme_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSN", "me:hunter2@host")
    with pytest.raises(ValueError, match="is not a URL") as caught:
        PostgresConnection("${DSN}").resolved()
    assert "hunter2" not in str(caught.value)


def test_value_is_not_resolved_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "${HOME}")
    once = PostgresConnection("postgres://me:${PASSWORD}@host").resolved()
    assert once.resolved() is once
    assert once.url == "postgres://me:%24%7BHOME%7D@host"
    assert repr(once) == "PostgresConnection(url='postgres://me:***@host')"


def test_escape_gives_the_characters_themselves() -> None:
    assert MySQLConnection("mysql://me:$${X}@host").parameters()["password"] == "${X}"


def test_path_is_resolved_too(project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "events")
    assert SQLiteConnection("data/${NAME}.db").resolved().path == str(project / "data/events.db")
