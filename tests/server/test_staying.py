"""Whoever stays, as a subscriber or in a long poll, is asked again: a key that ended opens nothing any more."""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import warm_python
from served import PREFIX, apikey, create_key, subscribe
from servers import PostgresServer, wait_until

pytestmark = pytest.mark.timing

STREAMS = """
@weft.stream
def clicks(): ...

@weft.stream(auth={"type": "bearer", "token": "its own"})
def partners(): ...
"""
# Whoever stays is asked again soon.
CONSTANTS = {f"weft.server.live.{name}_SECONDS": 0.2 for name in ("_ASK", "_IDLE", "_PAUSE")}
CONSTANTS["weft.server.keys._REFRESH_SECONDS"] = 0.5
ITS_OWN = {"Authorization": "Bearer its own"}


def id_of(key: dict[str, str]) -> str:
    return key["Authorization"].split("_")[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "keyed"
    made.mkdir()
    (made / "served_streams.py").write_text("import weft\n" + STREAMS)
    return made


@contextmanager
def follow(served: Any, stream: str, headers: Any = None, **query: Any) -> Iterator[Iterator[tuple[str, Any]]]:
    """Subscribe on a connection of its own."""
    with (
        served.new_client() as client,
        subscribe(client, f"{PREFIX}/{stream}/subscribe", headers=headers, **query) as found,
    ):
        assert next(found) == (":", "subscribed")
        yield found


def next_of(found: Iterator[tuple[str, Any]]) -> tuple[str, Any]:
    """The next that is no comment."""
    return next(each for each in found if each[0] != ":")


def ticket(served: Any, key: dict[str, str]) -> str:
    answer = served.client.post(f"{PREFIX}/clicks/ticket", headers=key)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["ticket"])


def test_a_revoked_key_takes_along_what_it_opened(server: Callable[..., Any], folder: Path) -> None:
    revoked, good = create_key(folder, "--scope", "read"), create_key(folder, "--scope", "admin")
    served = server(STREAMS, folder=folder, constants=CONSTANTS)
    poll = {"consumer": "c", "wait": 60}
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        ended = [
            stack.enter_context(follow(served, "clicks", revoked)),
            stack.enter_context(follow(served, "clicks", ticket=ticket(served, revoked))),
            # A key opens a stream that has a credential of its own, too.
            stack.enter_context(follow(served, "partners", revoked)),
        ]
        staying = [
            stack.enter_context(follow(served, "clicks", good)),
            stack.enter_context(follow(served, "clicks", ticket=ticket(served, good))),
        ]
        its_own = stack.enter_context(follow(served, "partners", ITS_OWN))
        waiting = threads.submit(served.client.post, f"{PREFIX}/clicks/consume", json=poll, headers=revoked)
        unused = ticket(served, revoked)
        apikey(folder, "revoke", id_of(revoked))
        for found in ended:
            kind, data = next_of(found)
            assert (kind, data["reason"]) == ("stream.closing", f"The key '{id_of(revoked)}' is revoked.")
            assert next(found, None) is None
        assert waiting.result().status_code == 401
        refused = served.client.get(f"{PREFIX}/clicks/subscribe", params={"ticket": unused})
        assert (refused.status_code, "revoked" in refused.text) == (401, True)
        served.publish("clicks", {"n": 1}, **good)
        served.publish("partners", {"n": 1}, **good)
        assert [next_of(found)[1]["event"]["n"] for found in (*staying, its_own)] == [1, 1, 1]


def test_a_key_that_expires_and_the_first_key(server: Callable[..., Any], folder: Path) -> None:
    served = server(STREAMS, folder=folder, constants=CONSTANTS)
    with follow(served, "clicks") as anonymous:
        short = create_key(folder, "--scope", "read", "--expires", "1d")
        kind, data = next_of(anonymous)
        assert (kind, "needs a key" in data["reason"]) == ("stream.closing", True)
    with follow(served, "clicks", short) as found:
        end = datetime.now(UTC) + timedelta(seconds=1)
        with closing(sqlite3.connect(folder / ".weft" / "weft.db", isolation_level=None)) as database:
            database.execute('UPDATE "weft.api_keys" SET expires_at = ?', [end.isoformat(timespec="microseconds")])
        kind, data = next_of(found)
    assert (kind, data["reason"]) == ("stream.closing", f"The key '{id_of(short)}' is expired.")
    assert datetime.now(UTC) >= end


@pytest.mark.full
def test_while_keys_cannot_be_read_nothing_is_sent(server: Callable[..., Any], folder: Path) -> None:
    """Whether the key is still good nobody knows. A subscriber who may stay goes on when they can be read again."""
    keys = PostgresServer()
    keys.start()
    try:
        url = keys.create_database("keys")
        pause = 0.1
        toml = f'[server]\nkeys = "safe"\nkeep_alive_seconds = {pause}\n[connections.safe]\nurl = "{url}"\n'
        (folder / "weft.toml").write_text(toml)
        key = create_key(folder, "--scope", "read")
        soon = CONSTANTS | {"weft.server.keys.CACHED_SECONDS": 2.0}
        served = server(STREAMS, folder=folder, constants=soon, toml=toml)
        with follow(served, "clicks", key) as found:
            began = time.monotonic()
            keys.stop()
            details = f"{PREFIX}/clicks"
            wait_until(lambda: served.client.get(details, headers=key).status_code == 503, "keys to be away")
            # So many comments take at least a second more: by then it was asked.
            for _ in range(int((time.monotonic() - began + 1) / pause)):
                assert next(found) == (":", "keep-alive")
            code = "import weft, served_streams; weft.publish_sync('clicks', {'n': 1})"
            warm_python.run([sys.executable, "-c", code], cwd=folder, check=True)
            assert [next(found)[0] for _ in range(10)] == [":"] * 10
            keys.start()
            assert next_of(found)[1]["event"]["n"] == 1
    finally:
        keys.stop()
