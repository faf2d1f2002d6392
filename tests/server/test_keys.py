"""Keys of the service: scopes, streams, ends, and what they close."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from served import apikey, create_key
from servers import wait_until
from weft.errors import NotFoundError, SettingsError, StorageError
from weft.project import Project
from weft.server import keys
from weft.server.access import open_streams
from weft.server.keys import key_table, verified
from weft.server.rates import Rate
from weft.streams.runtime import open_hub

STREAMS = """
@weft.stream(fields={"n": "int64"}, on_schema_drift="quarantine", max_deliveries=2, dead_letter="failed")
def orders(): ...

@weft.stream
def clicks(): ...

@weft.stream(auth={"type": "bearer", "token": "its own"})
def partners(): ...
"""
STREAM = "/api/v1/streams"
# What is known of keys is soon too old.
SOON = {"weft.server.keys.CACHED_SECONDS": 2.0, "weft.server.keys._REFRESH_SECONDS": 0.5}
everywhere = pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql", "redis"], indirect=True)
READ: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("POST", "/consume", {"consumer": "c"}),
    ("POST", "/ack", {"consumer": "c", "events": []}),
    ("POST", "/nack", {"consumer": "c", "events": []}),
    ("GET", "/groups", None),
    ("GET", "/events", None),
    ("POST", "/ticket", None),
    ("GET", "/subscribe", None),
]
WRITE: list[tuple[str, str, Any]] = [("POST", "", {"n": 1})]
ADMIN: list[tuple[str, str, Any]] = [("POST", "/reset", {"consumer": "c"})]


def ask(served: Any, stream: str, endpoint: tuple[str, str, Any], headers: Any = None) -> int:
    method, path, body = endpoint
    with served.client.stream(method, f"{STREAM}/{stream}{path}", json=body, headers=headers) as answer:
        return int(answer.status_code)


def get(served: Any, stream: str, headers: Any = None) -> int:
    """Ask on a connection of its own: any worker may answer."""
    with served.new_client() as client:
        return int(client.get(f"{STREAM}/{stream}", headers=headers).status_code)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project in which keys can be made before it is served."""
    made = tmp_path / "keyed"
    made.mkdir()
    (made / "served_streams.py").write_text("import weft\n" + STREAMS)
    return made


@everywhere
def test_the_table(streams: Project) -> None:
    with key_table() as table:
        assert table.all() == {}
        end = datetime(2099, 1, 31, 12, 30, 15, 123456, tzinfo=UTC)
        first, token = table.create(
            name="for “tests”", scopes=["write", "read"], streams=["b", "a"], expires_at=end, rate=Rate(2.5, 7)
        )
        second, _ = table.create(name=None, scopes=["admin"])
        assert first.scopes == ("read", "write")
        assert (first.expires_at, first.rate, first.streams) == (end, Rate(2.5, 7), ("b", "a"))
        stored = table.all()
        assert stored == {first.id: first, second.id: second}
        assert verified(token, stored) == first
        assert table.revoke(first.id).ended == "revoked"
        # It was revoked when it was: doing so again changes nothing.
        assert table.revoke(token) == table.all()[first.id]
        assert table.all()[second.id].ended is None
        with pytest.raises(NotFoundError, match=f"There is no key '{second.id[:-1]}'") as caught:
            table.revoke(second.id[:-1])
        assert second.id in str(caught.value.hint)
        assert token[-64:] not in repr(stored)
        assert all(token[-64:] not in str(row) for row in table._rows.read())


@everywhere
def test_only_the_whole_token_is_the_key(streams: Project) -> None:
    with key_table() as table:
        key, token = table.create(name=None, scopes=["read"])
        _, other = table.create(name=None, scopes=["read"])
        keys = table.all()
    secret = token.rpartition("_")[2]
    wrong = [token[:-1], token + "0", token.upper(), f"weft_{key.id}_", f"weft_{key.id}", "weft_", "weft__", secret]
    wrong += [f"weft_{key.id}_{other.rpartition('_')[2]}", f"weft_{key.id}_{key.secret_hash}", f"weft__{secret}"]
    for each in wrong:
        assert verified(each, keys) is None, each
    assert verified(token, keys) == key


@everywhere
async def test_they_are_read_again_while_those_who_ask_go_on(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_REFRESH_SECONDS", 0.0)
    known = keys.KnownKeys()
    assert await known.get() == {}
    with key_table() as table:
        key, _ = table.create(name=None, scopes=["read"])
        assert at_once(known.get()) == {}
        assert known._refreshing is not None
        await known._refreshing
        assert at_once(known.get()) == {key.id: key}
    known.close()


def at_once(asked: Coroutine[Any, Any, Any]) -> Any:
    """What is answered without waiting for anything."""
    with pytest.raises(StopIteration) as answered:
        asked.send(None)
    return answered.value.value


@everywhere
def test_to_look_for_keys_writes_nothing(streams: Project, system: Any) -> None:
    """Also where a process that writes to the database holds its lock."""
    with key_table() as table:
        assert table.all() == {}
    store = open_hub(streams.connection()).store
    assert store.names() == []
    if system.kind == "sqlite":
        assert not Path(system.url.removeprefix("sqlite:///")).exists()
    with pytest.raises(NotFoundError), key_table() as table:
        table.revoke("none")


@everywhere
def test_keys_that_vanished_close_the_service(streams: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never removed: the database was flushed, or is another one."""
    monkeypatch.setattr(keys, "CACHED_SECONDS", 0.0)
    known = keys.KnownKeys()
    with key_table() as table:
        key, _ = table.create(name=None, scopes=["read"])
    known._keys = {key.id: key}
    monkeypatch.setattr(keys, "_TABLE", "none")
    monkeypatch.setattr("weft.systems.redis.key_rows._KEYS", "none")
    with pytest.raises(StorageError, match="gone"):
        known._read_all()
    known.close()


def test_where_they_cannot_be_kept(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DSN", "duckdb:///keys.duckdb")
    with pytest.raises(SettingsError, match="Keys cannot be kept in a") as refused, key_table():
        pass
    assert refused.value.hint is not None
    assert "sqlite, postgres, mysql, redis. Name" in refused.value.hint


@everywhere
def test_expired(streams: Project) -> None:
    with key_table() as table:
        key, _ = table.create(name=None, scopes=["read"], expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert key.ended == "expired"


@everywhere
def test_what_is_open(streams: Project) -> None:
    import weft

    @weft.stream
    def anybody() -> None: ...

    @weft.stream(auth={"type": "bearer", "token": "${UNSET}"}, max_deliveries=1, dead_letter="late")
    def somebody() -> None: ...

    @weft.stream
    def late() -> None: ...

    assert open_streams() == ["anybody"]
    with key_table() as table:
        key, _ = table.create(name=None, scopes=["read"])
        assert open_streams() == []
        table.revoke(key.id)
    assert open_streams() == []


def test_each_scope_opens_its_endpoints(server: Callable[..., Any], folder: Path) -> None:
    keys = {scope: create_key(folder, "--scope", scope) for scope in ("read", "write", "admin")}
    served = server(STREAMS, folder=folder)
    opens = {"read": READ, "write": WRITE, "admin": [*READ, *WRITE, *ADMIN]}
    for stream in ("orders", "partners"):
        for endpoint in (*READ, *WRITE, *ADMIN):
            assert ask(served, stream, endpoint) == 401, endpoint
            for scope, headers in keys.items():
                passes = ask(served, stream, endpoint, headers) in (200, 201, 202)
                assert passes == (endpoint in opens[scope]), (stream, endpoint, scope)
    refused = served.client.post(f"{STREAM}/orders", json={"n": 1}, headers=keys["read"])
    assert refused.status_code == 403
    assert refused.json()["detail"].endswith("has the scope read; this needs write of 'orders'.")
    # The stream's own credential goes on.
    assert ask(served, "partners", ADMIN[0], {"Authorization": "Bearer its own"}) == 200
    assert ask(served, "orders", READ[0], {"Authorization": "Bearer its own"}) == 401
    for headers in keys.values():
        assert headers["Authorization"][-64:] not in served.log_file.read_text()


def test_the_list_and_names_need_a_key(server: Callable[..., Any], folder: Path) -> None:
    read, write = create_key(folder, "--scope", "read"), create_key(folder, "--scope", "write")
    orders = create_key(folder, "--scope", "read", "--stream", "orders", "--module", "served_streams")
    served = server(STREAMS, folder=folder)

    def listed(headers: Any = None) -> Any:
        answer = served.client.get(STREAM, headers=headers)
        found = answer.json()
        return [each["name"] for each in found["streams"]] if answer.status_code == 200 else answer.status_code

    assert listed() == 401
    assert listed(read) == ["clicks", "orders", "partners"]
    assert listed(write) == 403
    assert listed(orders) == ["orders"]
    assert listed({"Authorization": "Bearer its own"}) == ["partners"]
    assert listed({"Authorization": "Bearer nothing"}) == 401
    # Nor does a mistyped name tell of others.
    missing = served.client.get(f"{STREAM}/order")
    assert (missing.status_code, "orders" in missing.text) == (401, False)
    assert "orders" in served.client.get(f"{STREAM}/order", headers=read).json()["hint"]
    assert "clicks" not in served.client.get(f"{STREAM}/click", headers=orders).text
    # Unknown ids and wrong secrets are answered alike.
    right = read["Authorization"]
    answers = [
        served.client.get(f"{STREAM}/clicks", headers={"Authorization": each}).json() | {"request_id": ""}
        for each in (right[:-1] + "x", right[:-1], "Bearer weft_000000000000_" + right[-64:], "Bearer weft_x")
    ]
    assert answers == [answers[0]] * 4
    assert answers[0]["status"] == 401


def test_a_key_for_one_stream(server: Callable[..., Any], folder: Path) -> None:
    key = create_key(folder, "--scope", "admin", "--stream", "orders", "--module", "served_streams")
    served = server(STREAMS, folder=folder)
    for endpoint in (*READ, *WRITE, *ADMIN):
        assert ask(served, "orders", endpoint, key) in (200, 201, 202), endpoint
        assert ask(served, "clicks", endpoint, key) == 403, endpoint
        assert ask(served, "partners", endpoint, key) == 403, endpoint
    # What it rejected belongs to it.
    assert ask(served, "orders__quarantine", ("GET", "/events", None), key) == 200
    assert ask(served, "failed", ("GET", "/events", None), key) == 200
    assert ask(served, "failed", ("GET", "/events", None)) == 401


@pytest.mark.timing
def test_the_first_key_closes_a_running_service_and_the_last_does_not_open_it(
    server: Callable[..., Any], folder: Path
) -> None:
    served = server(STREAMS, "--workers", "2", folder=folder, constants=SOON)

    def codes(headers: Any = None) -> set[int]:
        return {get(served, "clicks", headers) for _ in range(8)}

    assert codes() == {200}
    key = create_key(folder, "--scope", "read")
    wait_until(lambda: codes() == {401}, "both workers to know of the key")
    assert codes(key) == {200}
    apikey(folder, "revoke", key["Authorization"].split("_")[1])
    wait_until(lambda: codes(key) == {401}, "both workers to know that it was revoked")
    assert "revoked" in served.client.get(f"{STREAM}/clicks", headers=key).json()["detail"]
    assert codes() == {401}


@pytest.mark.timing
def test_a_key_has_a_rate_of_its_own(server: Callable[..., Any], folder: Path) -> None:
    slow = create_key(folder, "--scope", "admin", "--rate", "0.01", "--burst", "4")
    other = create_key(folder, "--scope", "admin")
    served = server(STREAMS, "--workers", "2", folder=folder)
    codes = [get(served, name, slow) for name in ("orders", "clicks") * 4]
    assert sorted(codes) == [200] * 4 + [429] * 4
    refused = served.client.get(STREAM, headers=slow)
    assert refused.status_code == 429
    assert 0 < refused.json()["retry_after"] <= 100
    assert ask(served, "orders", READ[0], other) == 200


def test_keys_in_another_database(server: Callable[..., Any], folder: Path) -> None:
    toml = f'[server]\nkeys = "safe"\n[connections.safe]\nurl = "sqlite:///{folder}/safe.db"\n'
    (folder / "weft.toml").write_text(toml)
    key = create_key(folder, "--scope", "read")
    served = server(STREAMS, folder=folder, toml=toml)
    assert ask(served, "clicks", READ[0]) == 401
    assert ask(served, "clicks", READ[0], key) == 200
    assert "api_keys" in (folder / "safe.db").read_bytes().decode("latin-1")


def test_without_its_keys_the_service_is_closed(server: Callable[..., Any], folder: Path) -> None:
    """Nobody knows whether there are any."""
    toml = '[server]\nkeys = "safe"\n[connections.safe]\nurl = "${SAFE}"\nkind = "postgres"\n'
    away = {"SAFE": "postgres://me:hunter2@127.0.0.1:1/keys"}
    served = server(STREAMS, "--insecure", folder=folder, toml=toml, env=away)
    for endpoint in (*READ, *WRITE, *ADMIN):
        assert ask(served, "clicks", endpoint) == 503, endpoint
    assert served.client.get(STREAM).status_code == 503
    # Whoever has the stream's own credential needs no key.
    assert ask(served, "partners", READ[0], {"Authorization": "Bearer its own"}) == 200
    assert "hunter2" not in served.log_file.read_text()


@pytest.mark.timing
def test_keys_that_cannot_be_read_any_more_close_the_service(
    server: Callable[..., Any], folder: Path, shared_server: Callable[[str], Any]
) -> None:
    """A while after somebody locked their table; a worker that starts then is closed too."""
    database = shared_server("postgres")
    with database.database() as url:
        toml = f'[server]\nkeys = "safe"\n[connections.safe]\nurl = "{url}"\n'
        (folder / "weft.toml").write_text(toml)
        create_key(folder, "--scope", "read")
        with contextlib.closing(database.connect(url.rpartition("/")[2])) as other:
            other.execute("DELETE FROM weft.api_keys")
            served = server(STREAMS, "--insecure", folder=folder, toml=toml, constants=SOON)

            def code() -> int:
                return get(served, "clicks")

            assert code() == 200
            other.execute("BEGIN")
            other.execute("LOCK TABLE weft.api_keys")
            assert code() == 200
            wait_until(lambda: code() == 503, "what was known to be too old")
            (worker,) = served.workers()
            os.kill(worker, signal.SIGKILL)
            served.client.close()
            assert code() == 503
            other.execute("ROLLBACK")
        wait_until(lambda: code() == 200, "the keys to be read")


@pytest.mark.timing
def test_a_database_of_keys_that_hangs_holds_up_nobody_who_needs_none(server: Callable[..., Any], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        toml = '[server]\nkeys = "safe"\n[connections.safe]\nurl = "${SAFE}"\nkind = "postgres"\n'
        away = {"SAFE": f"postgres://me:hunter2@127.0.0.1:{silent.getsockname()[1]}/keys"}
        served = server(STREAMS, "--insecure", folder=folder, toml=toml, env=away, constants=SOON)
        with ThreadPoolExecutor(20) as threads:
            waiting = [threads.submit(ask, served, "clicks", READ[0]) for _ in range(20)]
            assert ask(served, "partners", READ[0], {"Authorization": "Bearer its own"}) == 200
            assert {each.result() for each in waiting} == {503}
