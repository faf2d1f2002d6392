"""Tokens and passwords are in no representation, error, log or output of streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pprint
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner

import weft
import weft.streams
from servers import Server, free_port, wait_until
from weft import ConnectionFailedError, DeclarationError, WeftError
from weft.project import Project, use
from weft.streams.runtime import open_stream
from workers import declare, log_of

# No part of a secret is in any other text. Some of its characters must be escaped in a URL.
TOKEN = "tok-hunter2/é"
PASSWORD = "pw-hunter2:/@?#%&+é ü"
FIELDS = {"n": "int64"}
SERVERS = pytest.mark.parametrize("system", ["postgres", "mysql"], indirect=True)


def is_clean(text: str) -> bool:
    return bool(text) and "hunter2" not in text


def with_password(url: str, user: str, password: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{quote(password, safe='')}@{rest.partition('@')[2]}"


def weft_command(*arguments: str) -> str:
    """Everything that the command says."""
    from weft.cli import cli

    done = CliRunner().invoke(cli, arguments, prog_name="weft")
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


def calls() -> Iterator[Callable[[], object]]:
    """Every way to use a stream."""
    yield lambda: weft.publish_sync("orders", {"n": 1})
    yield lambda: asyncio.run(weft.publish("orders", [{"n": 1}]))
    yield lambda: weft.consume_sync("orders", "c")
    yield lambda: asyncio.run(weft.consume("orders", "c", wait=0.1))
    yield lambda: weft.ack_sync("orders", "c", {"_weft_rowid": 1})
    yield lambda: weft.nack_sync("orders", "c", {"_weft_rowid": 1})
    yield lambda: weft.groups_sync("orders")
    yield lambda: weft.reset_sync("orders", "c")
    yield lambda: weft.trim_sync("orders", max_rows=1)
    yield lambda: weft.subscribe("orders")
    yield lambda: list(log_of("orders").read_arrow(0, 10))


def every_call_fails_without_a_secret() -> list[ConnectionFailedError]:
    errors = []
    for call in calls():
        with pytest.raises(ConnectionFailedError) as caught:
            call()
        errors.append(caught.value)
        shown = [str(caught.value), repr(caught.value), caught.value.what, caught.value.hint or "-"]
        shown += traceback.format_exception(caught.value)
        assert all(map(is_clean, shown)), shown
    for arguments in (
        ["list"],
        ["show", "orders"],
        ["groups", "orders"],
        ["tail", "orders"],
        ["consume", "orders", "c"],
    ):
        for output in ("table", "json"):
            assert is_clean(weft_command("streams", *arguments, "--format", output))
    return errors


@pytest.fixture
def user(system: Any, shared_server: Callable[[str], Server]) -> Iterator[str]:
    """A user of the server who needs the password."""
    server = shared_server(system.kind)
    name = f"keeper_{system.url.rpartition('/')[2]}"
    with contextlib.closing(server.connect()) as admin:
        if system.kind == "mysql":
            admin.cursor().execute(f"CREATE USER {name}@'%%' IDENTIFIED BY %s", (PASSWORD,))
            admin.cursor().execute(f"GRANT ALL ON *.* TO {name}@'%'")
            yield name
            admin.cursor().execute(f"DROP USER {name}@'%'")
            return
        admin.execute(f"CREATE ROLE {name} SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
        rules = server.data / "pg_hba.conf"
        before = rules.read_text()
        rules.write_text(f"host all {name} 127.0.0.1/32 scram-sha-256\n{before}")
        admin.execute("SELECT pg_reload_conf()")
        try:
            wait_until(lambda: refuses(with_password(system.url, name, "wrong")), "the server to ask for passwords")
            yield name
        finally:
            rules.write_text(before)
            admin.execute("SELECT pg_reload_conf()")


def refuses(url: str) -> bool:
    import psycopg

    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return True
    return False


@pytest.fixture(autouse=True)
def clean_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that any of these tests logs holds a secret."""
    with caplog.at_level(logging.DEBUG):
        yield
    assert "hunter2" not in caplog.text


# ----------------------------------------------------------------------------------------------------------- declared


@pytest.mark.parametrize(
    "auth",
    [{"type": "bearer", "token": TOKEN}, {"type": "api_key", "header": "X-Key", "key": TOKEN}],
    ids=["bearer", "key"],
)
def test_auth(streams: Project, auth: dict[str, str]) -> None:
    made = declare(fields=FIELDS, auth=auth, on_schema_drift="quarantine", max_deliveries=3)
    weft.publish_sync(made, {"n": 1})
    for shown in (repr(made), str(made), f"{made!r:s}", pprint.pformat(made), repr([made]), repr(open_stream(made))):
        assert is_clean(shown)
    assert is_clean(repr(made.quarantine) + repr(made.dead_letters) + repr(vars(open_stream(made).log)))
    for arguments in (["show", "orders"], ["list"], ["groups", "orders"]):
        for output in ("table", "json"):
            assert is_clean(weft_command("streams", *arguments, "--format", output))
    assert dict(made.auth)["type"] == auth["type"]


def test_malformed_auth() -> None:
    """The error says what is wrong without what was given."""
    wrong: list[Any] = [
        TOKEN,
        [TOKEN],
        {"token": TOKEN},
        {"type": TOKEN},
        {"type": "bearer", "tokn": TOKEN},
        {"type": "bearer", "token": [TOKEN]},
        {"type": "bearer", "token": TOKEN.encode()},
        {"type": "bearer", "key": TOKEN},
        {"type": "api_key", "token": TOKEN},
        {"type": "api_key", "key": TOKEN, "header": 5},
    ]
    for auth in wrong:
        with use(Project()), pytest.raises(DeclarationError) as caught:
            declare(auth=auth)
        assert is_clean(str(caught.value)), auth


@SERVERS
def test_a_connection_in_a_stream(streams: Project, system: Any) -> None:
    """As an object, not by its name: its password is in none of the texts of the stream."""
    connection = weft.connect(url=with_password(system.url, "somebody", PASSWORD))
    made = declare(fields=FIELDS, connection=connection)
    for shown in (repr(made), str(made), pprint.pformat(made), repr(connection), str(connection), f"{connection}"):
        assert is_clean(shown)
    with use(Project()):
        declare("Orders", connection=connection)
        with pytest.raises(DeclarationError) as caught:
            declare("orders", connection=connection)
        assert is_clean(str(caught.value))


# ------------------------------------------------------------------------------------------------------------ failures


@SERVERS
def test_the_password_is_right(streams: Project, system: Any, user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works, and what it says of itself is clean."""
    monkeypatch.setenv("WEFT_DSN", with_password(system.url, user, PASSWORD))
    made = declare(fields=FIELDS)
    weft.publish_sync(made, {"n": 1})
    assert len(weft.consume_sync(made, "c")) == 1
    assert len(list(log_of(made).read_arrow(0, 10))) == 1
    for arguments in (["show", "orders"], ["list"]):
        for output in ("table", "json"):
            assert is_clean(weft_command("streams", *arguments, "--format", output))
    assert is_clean(repr(streams.connection()) + repr(open_stream(made)))
    with pytest.raises(WeftError) as caught:
        weft.trim_sync(made, before="no")  # type: ignore[arg-type]
    assert is_clean(str(caught.value))


@SERVERS
def test_the_password_is_wrong(streams: Project, system: Any, user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN", with_password(system.url, user, f"wrong {PASSWORD}"))
    declare(fields=FIELDS)
    for error in every_call_fails_without_a_secret():
        assert not error.is_transient  # so that no reader waits for it to be right


@pytest.mark.timing
@SERVERS
def test_the_password_changes_while_a_reader_waits(
    streams: Project, system: Any, user: str, shared_server: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is opened again fails then: publishers, readers, and those who watch and announce beside them."""
    monkeypatch.setenv("WEFT_DSN", with_password(system.url, user, PASSWORD))
    made = declare(fields=FIELDS, retention={"max_rows": 1})
    weft.publish_sync(made, {"n": 1})
    log = log_of(made)
    list(log.read_arrow(0, 10))

    async def read() -> None:
        live = weft.subscribe(made)
        waiting = asyncio.ensure_future(anext(live))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(lock_out)
        with pytest.raises(ConnectionFailedError) as caught:
            while True:
                await asyncio.wait_for(asyncio.shield(waiting), 30)
        assert is_clean(str(caught.value))
        # By now every connection of the pools is found to be dead, and new ones are refused.
        for call in (
            lambda: log.head(),
            lambda: list(log.read_arrow(0, 10)),
            lambda: weft.publish_sync(made, {"n": 2}),
        ):
            for _ in range(4):
                with pytest.raises(ConnectionFailedError) as caught:
                    call()
                assert is_clean(str(caught.value) + "".join(traceback.format_exception(caught.value)))
            assert not caught.value.is_transient  # the last of these: no reader waits for it

    def lock_out() -> None:
        with contextlib.closing(shared_server(system.kind).connect()) as admin:
            if system.kind == "postgres":
                admin.execute(f"ALTER ROLE {user} PASSWORD 'other'")
                admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (user,))
            else:
                cursor = admin.cursor()
                cursor.execute(f"ALTER USER {user}@'%' IDENTIFIED BY 'other'")
                cursor.execute("SELECT id FROM information_schema.processlist WHERE user = %s", (user,))
                for (number,) in cursor.fetchall():
                    with contextlib.suppress(Exception):
                        cursor.execute(f"KILL {number}")

    asyncio.run(read())


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_the_server_is_away(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN", f"{scheme}://somebody:{quote(PASSWORD, safe='')}@127.0.0.1:{free_port()}/nothing")
    with use(Project()) as project:
        declare(fields=FIELDS)
        every_call_fails_without_a_secret()
        weft.streams.close(project)


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
@pytest.mark.parametrize("place", ["password", "host", "unescaped", "parameter"])
def test_a_malformed_url(scheme: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    url = {
        "password": f"{scheme}://somebody:pw-hunter2%zz@127.0.0.1:{port}/x",
        "host": f"{scheme}://somebody:pw-hunter2@127.0.0.1:notaport/x",
        "unescaped": f"{scheme}://somebody:pw-hunter2#/?@127.0.0.1:{port}/x",
        "parameter": f"{scheme}://somebody@127.0.0.1:{port}/x?password=pw-hunter2&pasword=pw-hunter2",
    }[place]
    monkeypatch.setenv("WEFT_DSN", url)
    with use(Project()) as project:
        made = declare(fields=FIELDS)
        with pytest.raises(WeftError) as caught:
            weft.publish_sync(made, {"n": 1})
        assert is_clean(str(caught.value) + "".join(traceback.format_exception(caught.value))), str(caught.value)
        assert is_clean(weft_command("streams", "list"))
        assert is_clean(weft_command("streams", "show", "orders"))
        weft.streams.close(project)


def test_an_unset_variable(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    """The reference is named, and what stands beside it is not."""
    monkeypatch.setenv("WEFT_DSN", "postgresql://somebody:pw-hunter2@127.0.0.1/${NOWHERE}")
    with use(Project()):
        made = declare(fields=FIELDS)
        with pytest.raises(WeftError, match="NOWHERE") as caught:
            weft.publish_sync(made, {"n": 1})
        assert is_clean(str(caught.value))
