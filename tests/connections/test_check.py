"""`check()` opens a connection and says what answered; a failure tells no secret."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from weft import ConnectionFailedError, SQLiteConnection, connect, publish_sync
from weft.streams import Stream
from weft.systems.base import SIGN_IN_HINT

pytestmark = pytest.mark.every_system

SERVER = {"sqlite": "SQLite 3", "postgres": "PostgreSQL ", "mysql": "MariaDB"}


def test_answer(system) -> None:
    if system.kind == "sqlite":
        Path(system.connection.resolved().path).touch()
    report = system.connection.check()
    assert SERVER[system.kind] in report["server"]
    assert report["database"]
    assert 0 <= report["latency_ms"] < 10_000


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "mysql", "mariadb"])
@pytest.mark.parametrize("password", ["hunter2", "hunter2%40x", "hunter2${HIDDEN}", "hunter2@hunter2"])
def test_failure_shows_where_but_no_secret(scheme: str, password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN", "hunter3")
    connection = connect(f"{scheme}://me:{password}@127.0.0.1:{free_port()}/db?connect_timeout=2", name="x")
    with pytest.raises(ConnectionFailedError, match="Cannot open the connection 'x'") as caught:
        connection.check()
    assert "127.0.0.1" in str(caught.value)
    assert caught.value.hint
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "hunter" not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    "url", ["postgres://me:hunter2%zz@h/db", "postgres://me:hunter2@h:port/db", "postgres://h?hunter2"]
)
def test_url_that_the_driver_cannot_read(url: str) -> None:
    with pytest.raises(ConnectionFailedError):
        connect(url, name="x").check()


def test_wrong_password(shared_server) -> None:
    with shared_server("mysql").database() as url:
        scheme, _, rest = url.partition("://")
        address = rest.rpartition("@")[2]
        with pytest.raises(
            ConnectionFailedError, match=r"Access denied for user 'nobody'.*using password: YES"
        ) as caught:
            connect(f"{scheme}://nobody:hunter2@{address}").check()
    assert "hunter2" not in str(caught.value)


def test_check_of_a_sqlite_file_that_is_not_there_makes_none(project: Path) -> None:
    report = SQLiteConnection("deep/down/a.db").check()
    assert report["note"] == "the file is created at first use"
    assert list(project.iterdir()) == []


def test_memory() -> None:
    assert SQLiteConnection(":memory:").check()["latency_ms"] >= 0


def test_file_that_is_no_database(project: Path) -> None:
    (project / "a.db").write_text("not a database " * 100)
    with pytest.raises(ConnectionFailedError, match="file is not a database"):
        SQLiteConnection("a.db").check()


def test_file_in_the_place_of_a_folder(project: Path) -> None:
    (project / "x").write_text("")
    with pytest.raises(ConnectionFailedError, match="cannot be created in"):
        SQLiteConnection("x/a.db").check()


@pytest.mark.parametrize("scheme", ["postgres", "mysql"])
def test_stream_on_a_server_that_is_not_there(scheme: str) -> None:
    url = f"{scheme}://me@127.0.0.1:{free_port()}/db?connect_timeout=2"
    with pytest.raises(ConnectionFailedError) as caught:
        publish_sync(Stream(name="orders", connection=connect(url, name="x")), {"n": 1})
    assert caught.value.hint == "Check that the server runs and takes connections: weft connections check x"
    with pytest.raises(ConnectionFailedError) as caught:
        publish_sync(Stream(name="orders", connection=connect(url)), {"n": 1})
    assert caught.value.hint == "Check that the server runs and takes connections."


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
@pytest.mark.parametrize("wrong", ["user", "database"])
def test_stream_on_a_server_that_does_not_let_us_in(shared_server, kind: str, wrong: str) -> None:
    with shared_server(kind).database() as url:
        scheme, _, rest = url.partition("://")
        address = rest.rpartition("@")[2]
        url = f"{scheme}://nobody:hunter2@{address}" if wrong == "user" else f"{url.rpartition('/')[0]}/nowhere"
        with pytest.raises(ConnectionFailedError) as caught:
            publish_sync(Stream(name="orders", connection=connect(url, name="x")), {"n": 1})
    assert caught.value.hint == f"{SIGN_IN_HINT} Then: weft connections check x"


def test_stream_in_a_file_that_is_no_database(project: Path) -> None:
    (project / "a.db").write_text("not a database " * 100)
    with pytest.raises(ConnectionFailedError, match="file is not a database") as caught:
        publish_sync(Stream(name="orders", connection=SQLiteConnection("a.db", name="x")), {"n": 1})
    assert caught.value.hint == ("Is it a SQLite file that you may read and write? Try: weft connections check x")
