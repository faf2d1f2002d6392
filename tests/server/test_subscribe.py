"""Live subscription: nothing missed, nothing twice, whoever publishes and however slowly somebody reads."""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

import warm_python
from served import PREFIX, frames, subscribe
from servers import wait_until

STREAMS = """
    @weft.stream(fields={"n": "int64", "kind": "string?"})
    def orders(): ...

    @weft.stream(fields={"n": "int64"})
    def resumed(): ...

    @weft.stream(fields={"n": "int64"})
    def shared(): ...

    @weft.stream(fields={"text": "string"})
    def large(): ...

    @weft.stream(
        fields={"t": "timestamp?", "f": "float64?", "yes": "bool?", "j": "json?", "d": "date?", "m": "decimal(9,2)?"}
    )
    def kinds(): ...

    @weft.stream(fields={"n": "int64"})
    def trimmed(): ...
"""
ARGUMENTS = ("--workers", "2")


def rewound(to: int) -> dict[str, Any]:
    return {"stream": "orders", "resumed_after": to, "resumed_after_text": str(to)}


def test_frames(service):
    """As the seed has them, with an id."""
    with service.client.stream("GET", f"{PREFIX}/orders/subscribe") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        lines = answer.iter_lines()
        assert next(lines) == ": subscribed"
        done = service.publish("orders", {"n": 1})
        # Where it begins: a browser that is cut off before its first event comes back with it.
        assert next(lines) == f"id: {done['first_rowid'] - 1}"
        assert next(lines) == ""
        assert next(lines) == f"id: {done['first_rowid']}"
        assert next(lines) == "event: stream.event"
        data = json.loads(next(lines).removeprefix("data: "))
        assert next(lines) == ""
    assert data["stream"] == "orders"
    assert (data["event"]["n"], data["event"]["_weft_rowid"]) == (1, done["first_rowid"])


def test_separators_of_lines_in_a_text(service):
    """At which clients split what they get, as httpx does."""
    text = "a\x85b\u2028c\u2029d\u0085\\u2028 é"
    with service.subscribe("large") as found:
        assert next(found) == (":", "subscribed")
        service.publish("large", {"text": text})
        assert next(data for kind, data in found if kind == "stream.event")["event"]["text"] == text


def test_filter(service):
    with service.subscribe("orders", where="kind=b") as found:
        next(found)
        service.publish("orders", [{"n": n, "kind": "ab"[n % 2]} for n in range(10)])
        assert [next(found)[1]["event"]["n"] for _ in range(5)] == [1, 3, 5, 7, 9]
    with service.subscribe("orders", where=["kind=b", "n=3"], since="start") as found:
        next(found)
        assert next(found)[1]["event"]["n"] == 3


def test_filter_by_what_is_shown(service):
    """Whatever the type of a field: a value is written as its readers see it."""
    event = {"t": "2026-01-31T12:00:00Z", "f": 1.0, "yes": True, "j": {"a": [1, None]}, "d": "2026-01-31", "m": "1.50"}
    service.publish("kinds", [event, {}])
    shown = service.events("kinds")[0]
    with service.new_client() as client:
        for name, value in shown.items():
            where = f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
            with subscribe(client, f"{PREFIX}/kinds/subscribe", where=where, since="start") as found:
                next(found)
                assert next(found)[1]["event"] == shown, where


def test_since(service):
    first = service.publish("orders", [{"n": 100}, {"n": 101}])["first_rowid"]
    with service.subscribe("orders", since=first) as found:
        next(found)
        assert next(found)[1]["event"]["n"] == 101
    # What a browser sends when it comes back wins over the address that it began with.
    with service.subscribe("orders", since="start", headers={"last-event-id": str(first)}) as found:
        next(found)
        assert next(found)[1]["event"]["n"] == 101


def test_events_of_other_processes(service):
    with service.subscribe("orders") as found:
        next(found)
        code = "import weft, served_streams; weft.publish_sync('orders', {'n': 77})"
        warm_python.run([sys.executable, "-c", code], cwd=service.folder, check=True)
        assert next(found)[1]["event"]["n"] == 77


@pytest.mark.timing
def test_resumes_without_a_gap(service):
    """While two publish, a subscriber is cut off again and again and comes back with the last id that it got."""
    total = 600
    failures: list[BaseException] = []

    def publish(numbers: range) -> None:
        try:
            with service.new_client() as client:
                for n in numbers:
                    assert client.post(f"{PREFIX}/resumed", json={"n": n}).status_code == 202
        except BaseException as error:
            failures.append(error)

    publishers = [threading.Thread(target=publish, args=(range(at, total, 2),)) for at in (0, 1)]
    seen: list[dict[str, Any]] = []
    last = 0
    for each in publishers:
        each.start()
    while len(seen) < total and not failures:
        # A connection of its own: any worker may answer.
        with (
            service.new_client() as client,
            subscribe(client, f"{PREFIX}/resumed/subscribe", headers={"last-event-id": str(last)}) as found,
        ):
            for kind, data in found:
                if kind == "stream.event":
                    seen.append(data["event"])
                    last = data["id"]
                    if len(seen) % 37 == 0 or len(seen) == total:
                        break
    for each in publishers:
        each.join()
    assert not failures
    assert [event["_weft_rowid"] for event in seen] == sorted({event["_weft_rowid"] for event in seen})
    assert sorted(event["n"] for event in seen) == list(range(total))


@pytest.mark.timing
def test_every_subscriber_gets_everything(service):
    """Of both workers, from the moment that it is told that it is subscribed."""
    found: list[list[int]] = []
    ready = threading.Barrier(9)

    def follow() -> None:
        with (
            service.new_client() as client,
            subscribe(client, f"{PREFIX}/shared/subscribe") as events,
        ):
            next(events)
            ready.wait(60)
            got: list[int] = []
            for kind, data in events:
                if kind == "stream.event":
                    got.append(data["event"]["n"])
                if len(got) == 200:
                    break
            found.append(got)

    followers = [threading.Thread(target=follow) for _ in range(8)]
    for each in followers:
        each.start()
    ready.wait(60)
    for n in range(0, 200, 4):
        service.publish("shared", [{"n": n + k} for k in range(4)])
    for each in followers:
        each.join(60)
    assert found == [list(range(200))] * 8


@pytest.mark.full
@pytest.mark.timing
def test_a_subscriber_that_does_not_read_takes_no_memory(service):
    """It is served from the log when it reads again, and misses nothing."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", service.port))
        slow.sendall(f"GET {PREFIX}/large/subscribe HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b": subscribed" in _until(slow, b": subscribed")
        batch = [{"text": "x" * 50_000} for _ in range(40)]
        for _ in range(15):  # what the first take is taken once: by caches, and by what is kept of the newest
            service.publish("large", batch)
        before = _memory(service)
        for _ in range(40):
            service.publish("large", batch)  # 80 MB in all
        assert _memory(service) - before < 40 * 1024 * 1024
        events = frames(line.rstrip("\r\n") for line in slow.makefile() if not _is_chunk_size(line))
        ids = [next(events)[1]["id"] for _ in range(2200)]
    assert ids == list(range(ids[0], ids[0] + 2200))


@pytest.mark.full
def test_many_that_do_not_read_take_little_memory(server):
    """Each of them far behind: what they have not taken stays in the log."""
    served = server(STREAMS, toml="[server]\nsend_seconds = 600\n")
    for _ in range(15):
        served.publish("large", [{"text": "x" * 50_000} for _ in range(40)])  # 30 MB in all
    with ExitStack() as stack:
        for number in range(150):
            if number == 50:  # what the first take is taken once, by caches
                before = _memory(served)
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(60)
            slow.connect(("127.0.0.1", served.port))
            slow.sendall(f"GET {PREFIX}/large/subscribe?since=start HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            _until(slow, b"stream.event")
        with served.subscribe("large", since="start") as found:  # others get theirs meanwhile
            assert [next(found)[0] for _ in range(601)] == [":"] + ["stream.event"] * 600
        assert _memory(served) - before < 60 * 1024 * 1024


def _is_chunk_size(line: str) -> bool:
    """Chunks are framed by lines of their own; of their sizes none looks like a line of an event."""
    return all(each in "0123456789abcdef\r\n" for each in line) and line.strip() != ""


def _until(connection: socket.socket, wanted: bytes) -> bytes:
    got = b""
    while wanted not in got:
        got += connection.recv(65536)
    return got


def _memory(service) -> int:
    total = 0
    for worker in service.workers():
        with open(f"/proc/{worker}/statm") as file:
            total += int(file.read().split()[1]) * 4096
    return total


def test_is_told_of_what_retention_removed(service):
    for n in range(10):
        service.publish("trimmed", {"n": n})
    code = "import weft, served_streams; print(weft.trim_sync('trimmed', before=6))"
    warm_python.run([sys.executable, "-c", code], cwd=service.folder, check=True)
    with service.subscribe("trimmed", since=2) as found:
        next(found)
        kind, data = next(found)
        assert (kind, data["lost"], data["resumed_after"], data["id"]) == ("stream.lost", 3, 5, 5)
        assert [next(found)[1]["event"]["n"] for _ in range(5)] == [5, 6, 7, 8, 9]


def test_an_offset_beyond_the_end_is_not_waited_for(service):
    """Who was told of it knows a stream that is no more."""
    head = service.publish("orders", {"n": 500})["last_rowid"]
    for query in ({"since": head + 1000}, {"headers": {"last-event-id": str(head + 1000)}}):
        with service.subscribe("orders", **query) as found:
            next(found)
            assert next(found) == ("stream.rewound", {**rewound(head), "id": head})
            head = service.publish("orders", {"n": 501})["last_rowid"]
            assert next(found)[1]["id"] == head


def test_follows_a_stream_that_was_set_back(server):
    """As a restored database does."""
    served = server(STREAMS)
    served.publish("orders", [{"n": n} for n in range(10)])
    with served.subscribe("orders") as found:
        next(found)
        with sqlite3.connect(served.folder / ".weft" / "weft.db") as database:
            database.execute('DELETE FROM "events.orders" WHERE _weft_rowid > 4')
            database.execute("UPDATE sqlite_sequence SET seq = 4 WHERE name = 'events.orders'")
        database.close()
        assert next(found) == ("stream.rewound", {**rewound(4), "id": 4})
        served.publish("orders", {"n": 500})
        kind, data = next(found)
        assert (kind, data["id"], data["event"]["n"]) == ("stream.event", 5, 500)


@pytest.mark.timing
def test_a_filter_that_lets_nothing_pass_is_no_silence(server):
    """A proxy would cut the connection, and the browser come back to read everything again."""
    served = server(STREAMS, toml="[server]\nkeep_alive_seconds = 0.3\n")
    enough = threading.Event()

    def publish() -> None:
        with served.new_client() as client:
            while not enough.is_set():
                assert client.post(f"{PREFIX}/orders", json={"n": 1}).status_code == 202

    with ThreadPoolExecutor(1) as threads, served.new_client() as client:
        publishing = threads.submit(publish)
        try:
            with client.stream("GET", f"{PREFIX}/orders/subscribe?where=n=2") as answer:
                told: list[int] = []
                for line in _ids(answer.iter_lines()):
                    told.append(int(line[4:]))
                    if len({*told}) == 4:  # two may be the same: nothing was published between them
                        break
        finally:
            enough.set()
        publishing.result()
    assert len({*told}) == 4 and told == sorted(told)


def _ids(lines: Iterator[str]) -> Iterator[str]:
    return (line for line in lines if line.startswith("id: "))


@pytest.mark.timing
def test_a_subscriber_that_never_reads_is_cut_off(server):
    served = server(STREAMS, toml="[server]\nsend_seconds = 1\nkeep_alive_seconds = 0.2\n")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", served.port))
        slow.sendall(f"GET {PREFIX}/large/subscribe HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        slow.settimeout(60)
        _until(slow, b": keep-alive")
        (worker,) = served.workers()
        for _ in range(10):
            served.publish("large", [{"text": "x" * 50_000} for _ in range(40)])
        # Its line in the log comes when it ends.
        wait_until(
            lambda: any(line.get("path") == f"{PREFIX}/large/subscribe" for line in served.log), "it to be cut off"
        )
    assert served.workers() == [worker]
