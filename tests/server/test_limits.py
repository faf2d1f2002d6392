"""What one client, and what all of them together, may take of a service: more are refused, the others are served."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from served import PREFIX, Served, read_all
from servers import wait_until

STREAMS = """
@weft.stream
def orders(): ...

@weft.stream(connection="other")
def elsewhere(): ...
"""
MEGABYTE = 1024 * 1024
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def publish(body: bytes, length: int | None = None) -> bytes:
    """A request with that body, or with the beginning of one of `length` bytes. No other follows it."""
    head = (
        f"POST {PREFIX}/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def problem(answer: bytes) -> dict[str, Any]:
    """Of a refusal that says when to come again."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 "), answer
    assert b"\r\ncontent-type: application/problem+json" in head
    assert b"\r\nretry-after: 1" in head
    told: dict[str, Any] = json.loads(body)
    assert told["retry_after"] > 0
    assert told["request_id"]
    return told


def first_answered(connections: list[socket.socket]) -> socket.socket:
    readable, _, _ = select.select(connections, [], [], 60)
    return readable[0]


# -------------------------------------------------------------------------------------------------------- connections


def test_connections(server: Callable[..., Any]) -> None:
    served = server(STREAMS, toml="[server]\nconnections = 3\n")

    def is_served(connection: socket.socket) -> bool:
        connection.sendall(HEALTH)
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        return answer.startswith(b"HTTP/1.1 200 ")

    def is_there_a_place() -> bool:
        with served.connect() as another:
            return is_served(another)

    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(served.connect()) for _ in range(3)]
        assert all(is_served(each) for each in first)
        for request in (HEALTH, publish(b'{"n": 1}'), b"nonsense"):
            assert problem(served.raw(request))["type"] == "urn:weft:problem:connections"
        with served.connect() as silent:
            assert read_all(silent) == b""
        # Those who were there go on, and the place of one who leaves is another's.
        assert all(is_served(each) for each in first)
        first[0].close()
        wait_until(is_there_a_place, "a place")
    assert {line["status"] for line in served.log if "too many connections" in line["message"]} == {503}


# ------------------------------------------------------------------------------------------------------ arriving bodies


@pytest.mark.timing
def test_bodies_that_arrive_together_have_a_budget(server: Callable[..., Any]) -> None:
    """A hundred clients that send a large body each, and keep its end."""
    served = server(STREAMS, toml=f"[server]\narriving_bytes = {8 * MEGABYTE}\nbody_seconds = 300\n")
    served.publish("orders", {"text": "x" * 3 * MEGABYTE})  # what the first takes is taken once
    before = memory(served, "VmRSS")
    body = json.dumps({"text": "x" * 4 * MEGABYTE}).encode()
    kept = len(body) - MEGABYTE // 2
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(100):
            # Not all at first: one that says nothing for a while is closed.
            each = stack.enter_context(served.connect())
            clients.append(each)
            with contextlib.suppress(ConnectionError):  # refused before it has sent everything
                each.sendall(publish(body[:kept], len(body)))
            assert served.client.post(f"{PREFIX}/orders", json={"n": 1}).status_code == 202
        peak = memory(served, "VmHWM")
        refused = stored = 0
        for each in clients:
            with contextlib.suppress(ConnectionError):
                each.sendall(body[kept:])
            answer = read_all(each)
            if answer.startswith(b"HTTP/1.1 202 "):
                stored += 1
            else:
                assert problem(answer)["type"] == "urn:weft:problem:overloaded"
                refused += 1
    assert peak - before < 100 * MEGABYTE  # and not 350
    assert stored >= 1
    assert refused >= 80
    # Whatever was taken was given back.
    for _ in range(5):
        assert served.raw(publish(body)).startswith(b"HTTP/1.1 202 ")


def memory(served: Served, which: str) -> int:
    (worker,) = served.workers()
    lines = Path(f"/proc/{worker}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


@pytest.mark.timing
def test_slow_bodies(server: Callable[..., Any]) -> None:
    """Each has a second, whoever else is slow at the same time."""
    served = server(STREAMS, toml="[server]\nbody_seconds = 1\n")
    for _ in range(2):  # also after a while in which none was slow
        with contextlib.ExitStack() as stack:
            slow = [stack.enter_context(served.connect()) for _ in range(5)]
            for each in slow:
                each.sendall(publish(b'{"n"', 100))
                served.publish("orders", {"n": 1})
            for each in slow:
                assert b" 408 " in read_all(each).partition(b"\r\n")[0]
    with served.connect() as dripping:
        dripping.sendall(publish(b"[", 100_000))
        while not select.select([dripping], [], [], 0.1)[0]:
            dripping.sendall(b" ")
        assert b" 408 " in read_all(dripping).partition(b"\r\n")[0]
    with served.connect() as late:
        late.sendall(publish(b'{"n"', 8))
        served.publish("orders", {"n": 1})
        late.sendall(b": 2}")
        assert read_all(late).startswith(b"HTTP/1.1 202 ")


# ----------------------------------------------------------------------------------------------- waiting for a database


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """A SQLite database that somebody else writes to, and does not commit."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def serve(server: Callable[..., Any], tmp_path: Path, limit: str) -> Served:
    toml = f"""
        [connections.default]
        url = "sqlite:///{tmp_path}/locked.db"
        [connections.other]
        url = "sqlite:///{tmp_path}/other.db"
        [server]
        {limit}
    """
    served: Served = server(STREAMS, toml=toml)
    for stream in ("orders", "elsewhere"):
        served.publish(stream, {"n": 0})
    return served


@pytest.mark.timing
def test_requests_that_wait_for_a_database(server: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(server, tmp_path, "waiting_requests = 3")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(served.connect()) for _ in range(4)]
        with locked(tmp_path / "locked.db"):
            for n, each in enumerate(clients, 1):
                each.sendall(publish(b'{"n": %d}' % n))
            refused = first_answered(clients)
            assert "'orders' cannot keep up: 3 requests" in problem(read_all(refused))["detail"]
            for n in range(20):
                served.publish("elsewhere", {"n": n})
            assert problem(served.raw(publish(b"{}")))["type"] == "urn:weft:problem:overloaded"
        clients.remove(refused)
        assert all(read_all(each).startswith(b"HTTP/1.1 202 ") for each in clients)
    assert len(served.events("orders")) == 4


@pytest.mark.timing
def test_bytes_that_wait_for_a_database(server: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(server, tmp_path, "waiting_bytes = 10_000")
    large = json.dumps({"text": "x" * 6000}).encode()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(served.connect()) for _ in range(2)]
        small = stack.enter_context(served.connect())
        with locked(tmp_path / "locked.db"):
            for each in clients:
                each.sendall(publish(large))
            refused = first_answered(clients)
            assert problem(read_all(refused))["type"] == "urn:weft:problem:overloaded"
            small.sendall(publish(b'{"n": 1}'))
            served.publish("elsewhere", {"n": 1})
        clients.remove(refused)
        assert all(read_all(each).startswith(b"HTTP/1.1 202 ") for each in (*clients, small))
    # One that is larger than all of them may be is not refused for ever: it waits alone.
    assert served.raw(publish(json.dumps({"text": "x" * 20_000}).encode())).startswith(b"HTTP/1.1 202 ")
