"""`${VAR}` stands for a value of the environment, and is read when it is used."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from weft.errors import SettingsError
from weft.settings import has_references, interpolate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${HOST}", "db.example"),
        ("postgres://${USER_AND_HOST}/x", "postgres://me@db.example/x"),
        ("${HOST}:${PORT}", "db.example:5432"),
        ("$${HOST}", "${HOST}"),
        ("$$${HOST}", "$${HOST}"),
        ("$HOST $ {HOST} {HOST}", "$HOST $ {HOST} {HOST}"),
        ("${EMPTY}", ""),
        ("", ""),
    ],
)
def test_value_takes_the_place_of_the_reference(text: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "db.example")
    monkeypatch.setenv("PORT", "5432")
    monkeypatch.setenv("USER_AND_HOST", "me@db.example")
    monkeypatch.setenv("EMPTY", "")
    assert interpolate(text, "a test") == value


def test_value_is_not_searched_for_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "${HOME}$${x}")
    assert interpolate("${PASSWORD}", "a test") == "${HOME}$${x}"


@pytest.mark.parametrize("password", ["s3cr@t/pw", "a%40b", "a:b", "a b+c?#[é&=", ""])
@pytest.mark.parametrize(
    ("template", "is_encoded"),
    [
        ("mariadb://app:${PASSWORD}@host/db", True),
        ("mariadb://app:x${PASSWORD}@host:3306", True),
        ("mariadb://app:${PASSWORD}@${HOST}/db", True),
        ("postgres://${PASSWORD}", False),
        ("postgres://app@${PASSWORD}/db", False),
        ("postgres://host/${PASSWORD}@db", False),
        ("postgres://app@host/db?options=${PASSWORD}", False),
        ("app:${PASSWORD}@host", False),
    ],
)
def test_user_and_password_of_a_url_may_be_any(
    template: str, is_encoded: bool, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD", password)
    monkeypatch.setenv("HOST", "h:1")
    expected = quote(password, safe="") if is_encoded else password
    assert interpolate(template, "a test") == template.replace("${PASSWORD}", expected).replace("${HOST}", "h:1")


def test_user_and_password_may_come_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGIN", "me:p@w")
    assert interpolate("mysql://${LOGIN}@host/db", "a test") == "mysql://me:p%40w@host/db"


def test_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(SettingsError, match=r"NOT_THERE is not set, and the url of 'x' needs it"):
        interpolate("postgres://me:${NOT_THERE}@host", "the url of 'x'")


@pytest.mark.parametrize("text", ["${}", "${A B}", "${1A}", "${A:-hunter2}", "hunter2${A", "${"])
def test_malformed_reference_is_refused_without_quoting_the_text(text: str) -> None:
    with pytest.raises(SettingsError, match="malformed in a test") as caught:
        interpolate(text, "a test")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("text", "expected"), [("a${B}", True), ("a${", True), ("a$${B}", False), ("a$B", False)])
def test_escaped_reference_is_none(text: str, expected: bool) -> None:
    assert has_references(text) is expected
