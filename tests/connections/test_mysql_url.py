"""A MySQL URL is taken apart into what the driver needs."""

from __future__ import annotations

import pytest

from weft import MySQLConnection, SettingsError

DEFAULTS = {"host": "localhost", "port": 3306, "charset": "utf8mb4"}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mysql://", {}),
        ("mariadb://me@host", {"host": "host", "user": "me", "password": ""}),
        (
            "mysql://me:pw@host:3307/db",
            {"host": "host", "port": 3307, "user": "me", "password": "pw", "database": "db"},
        ),
        ("mysql://m%40e:p%2Fw%3A%25@h/d%20b", {"host": "h", "user": "m@e", "password": "p/w:%", "database": "d b"}),
        ("mysql://me:a+b@h", {"host": "h", "user": "me", "password": "a+b"}),
        ("mysql://me:p@w@h", {"host": "h", "user": "me", "password": "p@w"}),
        ("mysql://[::1]:3307/db", {"host": "::1", "port": 3307, "database": "db"}),
        ("mysql:///db?unix_socket=/run/my%20sql.sock", {"unix_socket": "/run/my sql.sock", "database": "db"}),
        ("mysql://h/db?charset=latin1&", {"host": "h", "database": "db", "charset": "latin1"}),
        (
            "mysql://h?ssl_ca=/ca.pem&ssl_verify_cert=true&ssl_disabled=0&connect_timeout=2.5",
            {"host": "h", "ssl_ca": "/ca.pem", "ssl_verify_cert": True, "ssl_disabled": False, "connect_timeout": 2.5},
        ),
    ],
)
def test_parameters(url: str, expected: dict[str, object]) -> None:
    assert MySQLConnection(url).parameters() == DEFAULTS | expected


@pytest.mark.parametrize("password", ["s3cr@t/pw", "a%40b", "?#:"])
def test_password_of_the_environment_is_taken_as_it_is(password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", password)
    found = MySQLConnection("mariadb://app:${SHOP_PASSWORD}@host/db").parameters()
    assert (found["user"], found["password"], found["host"], found["database"]) == ("app", password, "host", "db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://h?ssl_caa=x", r"unknown parameter 'ssl_caa'[\s\S]*Did you mean 'ssl_ca'\?"),
        ("mysql://h?connect_timeout=soon", "invalid value of 'connect_timeout'"),
        ("mysql://h?ssl_disabled=perhaps", "invalid value of 'ssl_disabled'"),
        ("mysql://me:hunter2/x@h/db", "cannot be read"),
        ("mysql://me:hunter2@h:port/db", "cannot be read"),
        ("mysql://me:hunter2@[h/db", "cannot be read"),
        ("mysql://me:hunter2%ff@h/db", "cannot be read"),
        ("mysql://me:hunter2@h/a/b", "more than a database"),
        ("mysql://h/a#b", "more than a database"),
        ("mysql://app:ab@cd?hunter2@127.0.0.1:3306/shop", "unknown parameter[\\s\\S]*%3F"),
        ("mysql://app:ab@cd?hunter2=x@127.0.0.1:3306/shop", "unknown parameter[\\s\\S]*%3F"),
        ("mysql://me:hunter2@h:port/db", "^The URL of the connection 'x' cannot be read[.]"),
    ],
)
def test_mistake_is_said_without_the_password(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        MySQLConnection(url, name="x").resolved()
    assert "hunter2" not in str(caught.value)
