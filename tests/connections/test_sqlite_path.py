"""Where a SQLite connection's file is."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft import DeclarationError, SQLiteConnection


@pytest.mark.parametrize(
    ("connection", "path"),
    [
        (SQLiteConnection("a.db"), "{cwd}/a.db"),
        (SQLiteConnection("x/../a.db"), "{cwd}/a.db"),
        (SQLiteConnection("/tmp/a.db"), "/tmp/a.db"),
        (SQLiteConnection("~/a.db"), "{home}/a.db"),
        (SQLiteConnection(":memory:"), ":memory:"),
        (SQLiteConnection(url="sqlite:///a.db"), "{cwd}/a.db"),
        (SQLiteConnection(url="sqlite:////tmp/a.db"), "/tmp/a.db"),
        (SQLiteConnection(url="sqlite:///a%20b%3F.db"), "{cwd}/a b?.db"),
        (SQLiteConnection(url="sqlite:///:memory:"), ":memory:"),
        (SQLiteConnection(url="sqlite://"), ":memory:"),
    ],
    ids=repr,
)
def test_path(connection: SQLiteConnection, path: str) -> None:
    assert connection.resolved().path == path.format(cwd=Path.cwd(), home=Path.home())


def test_relative_path_follows_the_working_directory_at_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = SQLiteConnection("a.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert connection.resolved().path == str(tmp_path / "elsewhere/a.db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://a.db", r"Write sqlite:///a\.db"),
        ("sqlite:///a.db?mode=ro", "takes none"),
        ("sqlite:///", "names no file"),  # as of sqlite:///$DB without the variable
    ],
)
def test_malformed_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        SQLiteConnection(url=url).resolved()
