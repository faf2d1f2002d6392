"""`/healthz` and `/readyz`."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

STREAMS = """
@weft.stream
def near(): ...

@weft.stream(connection="far")
def far(): ...
"""


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of something that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        yield listening.getsockname()[1]


def test_ready_when_every_database_answers(server: Callable[..., Any], tmp_path: Path) -> None:
    client = server(STREAMS, env={"WEFT_DSN_FAR": f"sqlite:///{tmp_path}/far.db"}).client
    assert client.get("/healthz").json() == {"status": "ok"}
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ready", "databases": {"default": "ok", "far": "ok"}, "failed_modules": []}


def test_a_database_that_refuses_is_named_without_its_address(server: Callable[..., Any]) -> None:
    served = server(STREAMS, env={"WEFT_DSN_FAR": "postgresql://me:s3cret@127.0.0.1:1/none"})
    answer = served.client.get("/readyz")
    assert answer.status_code == 503
    databases = {"default": "ok", "far": "failed"}
    assert answer.json() == {"status": "not ready", "databases": databases, "failed_modules": []}
    assert served.client.get("/healthz").status_code == 200
    assert "s3cret" not in served.log_file.read_text()


def test_a_module_that_fails_is_named(server: Callable[..., Any], tmp_path: Path) -> None:
    """And what is wrong with it is in the log alone."""
    (tmp_path / "served0").mkdir()
    (tmp_path / "served0" / "broken.py").write_text("raise RuntimeError('s3cret')\n")
    served = server("@weft.stream\ndef near(): ...", "--module", "broken")
    answer = served.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not ready", "databases": {"default": "ok"}, "failed_modules": ["broken"]}
    assert "s3cret" in served.log_file.read_text()
    served.publish("near", {"a": 1})


@pytest.mark.timing
def test_a_database_that_hangs_holds_up_nobody(server: Callable[..., Any], silent: int) -> None:
    soon = {"weft.server.health._ANSWER_SECONDS": 1.0}
    served = server(STREAMS, env={"WEFT_DSN_FAR": f"postgresql://me@127.0.0.1:{silent}/none"}, constants=soon)
    for _ in range(3):
        answer = served.client.get("/readyz")
        assert (answer.status_code, answer.json()["databases"]) == (503, {"default": "ok", "far": "no answer"})
    found = {each["name"]: each for each in served.client.get("/api/v1/overview").json()["streams"]}
    assert found["near"]["problem"] is None
    assert found["far"]["problem"] == "Its database does not answer."
    served.publish("near", {"a": 1})


@pytest.mark.timing
def test_a_locked_database_stores_nothing_and_says_so(server: Callable[..., Any]) -> None:
    served = server(STREAMS, constants={"weft.systems.sqlite.sessions.LOCK_SECONDS": 0.2})
    served.publish("near", {"a": 1})
    with closing(sqlite3.connect(served.folder / ".weft/weft.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        answer = served.client.post("/api/v1/streams/near", json={"a": 2})
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:weft:problem:busy")
    assert answer.json()["detail"] == (
        "The database of 'near' is locked by somebody else. Nothing was stored. Send it again."
    )
    assert served.client.get("/api/v1/streams/near").json()["row_count"] == 1


@pytest.mark.timing
def test_a_stream_that_cannot_be_looked_at_leaves_the_others(server: Callable[..., Any]) -> None:
    served = server(STREAMS, env={"WEFT_DSN_FAR": "postgresql://me:s3cret@127.0.0.1:1/none"})
    for _ in range(3):
        found = {each["name"]: each for each in served.client.get("/api/v1/overview").json()["streams"]}
        assert found["near"]["problem"] is None
        assert "failed" in found["far"]["problem"] or "not answer" in found["far"]["problem"]
    assert "s3cret" not in served.log_file.read_text()
