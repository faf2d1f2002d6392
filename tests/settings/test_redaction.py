"""No secret is in what a person is shown, and what is not secret stays readable."""

from __future__ import annotations

from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.settings import redact, redact_url, url_secrets

MARK = "S3CR3T"
odd_text = st.text(st.sampled_from("@:/?#[]%&= +;$'\"\\{}aé"), max_size=8)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://me:pw@host:5432/db", "postgres://me:***@host:5432/db"),
        ("postgres://me@host/db", "postgres://me@host/db"),
        ("postgres://host:5432/db", "postgres://host:5432/db"),
        ("postgres:///db?host=/run/postgresql", "postgres:///db?host=/run/postgresql"),
        ("redis://:pw@host", "redis://:***@host"),
        ("mysql://me:p%40w@[::1]:3306/db", "mysql://me:***@[::1]:3306/db"),
        ("postgres://h/db?user=me&password=pw&sslmode=require", "postgres://h/db?user=me&password=***&sslmode=require"),
        ("mysql://h/db?ssl_key=/a.pem&ssl_key_password=pw", "mysql://h/db?ssl_key=/a.pem&ssl_key_password=***"),
        ("https://h/?API_KEY=k&x=1", "https://h/?API_KEY=***&x=1"),
        ("sqlite:////tmp/a:b@c.db", "sqlite:////tmp/a:b@c.db"),
        ("host=localhost user=me password='p w' dbname=x", "host=localhost user=me password=*** dbname=x"),
        ("me:pw@host/db", "me:***@host/db"),
        ("warehouse", "warehouse"),
        ("", ""),
    ],
)
def test_secrets_of_a_url_are_hidden(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("${DSN}", "${DSN}"),
        ("postgres://${DSN}", "postgres://${DSN}"),
        ("postgres://me:${PW}@host", "postgres://me:${PW}@host"),
        ("postgres://me:x${PW}@host", "postgres://me:***@host"),
        ("postgres://me:$${PW}@host", "postgres://me:***@host"),
    ],
)
def test_reference_stays_because_it_tells_nothing(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize("form", ["postgres://me:{}@host:5432/db?sslmode=require", "me:{}@host", "redis://:{}@host"])
@given(before=odd_text, after=odd_text)
def test_password_is_hidden_however_badly_it_is_escaped(form: str, before: str, after: str) -> None:
    url = form.format(f"{MARK}{before}{MARK}{after}{MARK}")
    assert MARK not in redact_url(url)
    assert MARK not in redact(f"cannot parse {url!r}, {url}", url_secrets(url))


@given(between=odd_text.filter(lambda text: "&" not in text))
def test_secret_parameter_is_hidden_however_badly_it_is_escaped(between: str) -> None:
    secret = f"{MARK}{between}{MARK}"
    assert MARK not in redact_url(f"postgres://host:5432/db?user=me&password={secret}&sslmode=require")


@pytest.mark.parametrize("quoted", [str, repr, quote, quote_plus, lambda text: quote(text, safe="")])
def test_driver_text_is_scrubbed_in_every_spelling(quoted) -> None:
    secret = "p@ss/w ö'rd\\"
    text = redact(f"login failed for me ({quoted(secret)})", [secret])
    assert "ss" not in text
    assert text.startswith("login failed for me (")


def test_secret_within_a_secret_leaves_no_remainder() -> None:
    assert redact("abc abcdef", ["abc", "abcdef"]) == "*** ***"


def test_part_of_an_unescaped_password_is_scrubbed() -> None:
    # libpq takes the first @ as the end of the password, and quotes the rest as the name of a host.
    secrets = url_secrets("postgres://me:front@back@host/db")
    assert redact('could not translate host name "back@host"', secrets) == 'could not translate host name "***"'


@pytest.mark.parametrize(
    ("password", "said"),
    [
        ("ab@2x", "failed to resolve host '2x@127.0.0.1'"),
        ("ab@cd@2x", "failed to resolve host 'cd@2x@127.0.0.1'"),
        ("ab@2x:y", "failed to resolve host '2x'"),
        ("ab@2x:y", 'invalid integer value "y@127.0.0.1" for connection option "port"'),
        ("ab@2x,y", "failed to resolve host 'y@127.0.0.1'"),
    ],
)
def test_short_part_of_an_unescaped_password_is_scrubbed(password: str, said: str) -> None:
    text = redact(said, url_secrets(f"postgres://me:{password}@127.0.0.1:5432/db"))
    assert not {"2x", "cd", "y@", "'y"} & {text[at : at + 2] for at in range(len(text))}
    assert "***" in text


def test_short_password_leaves_the_text_readable() -> None:
    assert redact("login of me failed: 28000", url_secrets("postgres://me:me@host/db")) == "login of *** failed: 28000"


def test_a_short_password_hides_no_words() -> None:
    secrets = url_secrets("postgres://me:a@host/db")
    said = 'a table of postgres://me:a@host/db: password "a" refused, password=a'
    assert redact(said, secrets) == "a table of postgres://me:***@host/db: password *** refused, password=***"
    assert redact("something of me", ["me"]) == "something of ***"


def test_empty_secret_changes_nothing() -> None:
    assert redact("text", ["", ""]) == "text"
