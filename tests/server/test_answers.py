"""Answers have an end in bytes, and those that nobody takes do not stay."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from served import PREFIX, read_all
from servers import wait_until

STREAMS = """
@weft.stream(fields={"text": "string"})
def large(): ...
"""
ASK = f"GET {PREFIX}/large/events?limit=10000 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


# Of a page that sockets do not hold: some kernels take more than 4 MB of it.
LARGE = 12_000_000


@pytest.fixture
def served(request: pytest.FixtureRequest, server: Callable[..., Any]) -> Any:
    """With 60 events of 100 kB, one of 3 MB, and 60 more."""
    limits = {"page_bytes": 1_000_000, "send_seconds": 1, "answering_bytes": 40_000_000}
    limits |= getattr(request, "param", {})
    served = server(STREAMS, toml="[server]\n" + "".join(f"{name} = {value}\n" for name, value in limits.items()))
    for size, count in ((100_000, 60), (3_000_000, 1), (100_000, 60)):
        served.publish("large", [{"text": "x" * size} for _ in range(count)])
    return served


def test_a_page_ends_by_its_bytes(served: Any) -> None:
    pages: list[list[int]] = []
    after = 0
    while True:
        page = served.client.get(f"{PREFIX}/large/events", params={"limit": 10_000, "after": after}).json()
        assert page["count"] == len(page["events"])
        if not page["events"]:
            break
        pages.append([event["_weft_rowid"] for event in page["events"]])
        after = page["next"]
    assert [rowid for page in pages for rowid in page] == list(range(1, 122))
    assert [len(page) for page in pages] == [9] * 6 + [6, 1] + [9] * 6 + [6]


def test_a_batch_ends_by_its_bytes_and_leases_what_it_has(served: Any) -> None:
    def consume(**more: Any) -> Any:
        answer = served.client.post(f"{PREFIX}/large/consume", json={"consumer": "c", "batch_size": 10_000, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def rowids(batch: Any) -> list[int]:
        return [event["_weft_rowid"] for event in batch["events"]]

    first, second = consume(), consume()
    assert (rowids(first), rowids(second)) == (list(range(1, 10)), list(range(10, 19)))
    group = served.client.get(f"{PREFIX}/large/groups").json()["groups"][0]
    # What was read and had no room waits to be delivered, and was not delivered yet.
    held = {member["member"]: (member["pending"], member["deliveries"]) for member in group["members"]}
    assert sorted(held.values()) == [(9, 1), (9, 1)]
    assert all(re.fullmatch("http:[0-9a-f]{16}", member) for member in held)  # not where the service runs
    got = rowids(second)
    for batch in (first, second):
        events = [{"_weft_rowid": rowid} for rowid in rowids(batch)]
        done = served.client.post(
            f"{PREFIX}/large/ack", json={"consumer": "c", "token": batch["token"], "events": events}
        )
        assert done.json()["acknowledged"] == 9
    while True:
        batch = consume()
        if not batch["events"]:
            break
        got += rowids(batch)
        events = [{"_weft_rowid": rowid} for rowid in rowids(batch)]
        assert served.client.post(f"{PREFIX}/large/ack", json={"consumer": "c", "events": events}).status_code == 200
    assert got == list(range(10, 122))


def test_an_offset_beyond_the_end_is_refused(served: Any) -> None:
    answer = served.client.get(f"{PREFIX}/large/events", params={"after": 122})
    assert (answer.status_code, answer.json()["field"]) == (422, "after")
    assert "after=121" in answer.json()["hint"]
    assert served.client.get(f"{PREFIX}/large/events", params={"after": 121}).json()["events"] == []


@pytest.mark.timing
@pytest.mark.parametrize("served", [{"page_bytes": LARGE}], indirect=True)
def test_an_answer_that_nobody_takes_is_dropped(served: Any) -> None:
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", served.port))
        silent.sendall(ASK)
        wait_until(lambda: "did not receive" in served.log_file.read_text(), "it to be cut off")
        silent.settimeout(60)
        assert len(read_all(silent)) < 11_000_000
    # One that takes its time, but takes something, gets everything.
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", served.port))
        slow.sendall(ASK)
        got = bytearray()
        while len(got) < 11_000_000 or not got.endswith(b"}"):
            got += slow.recv(65536)
        assert got.startswith(b"HTTP/1.1 200")


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize("served", [{"page_bytes": LARGE, "send_seconds": 60}], indirect=True)
def test_answers_that_are_not_taken_have_an_end_together(served: Any) -> None:
    sockets = []
    try:
        for _ in range(60):
            each = socket.socket()
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.connect(("127.0.0.1", served.port))
            each.sendall(ASK)
            sockets.append(each)

        def is_refused() -> bool:
            nonlocal answer
            answer = served.client.get(f"{PREFIX}/large/events", params={"limit": 1})
            return bool(answer.status_code == 503)

        answer: Any = None
        wait_until(is_refused, "what nobody takes to fill the room")
        assert answer.json()["type"] == "urn:weft:problem:overloaded"
        assert answer.headers["retry-after"] == "1"
        # Publishing needs none of it.
        served.publish("large", {"text": "y"})
    finally:
        for each in sockets:
            each.close()
    wait_until(lambda: served.client.get(f"{PREFIX}/large/events").status_code == 200, "room again")


@pytest.mark.timing
def test_those_who_wait_for_events_take_no_place(server: Callable[..., Any]) -> None:
    """Neither from each other, nor from those who publish: without them no event would come."""
    served = server(STREAMS, toml="[server]\nwaiting_requests = 2\n")
    names = [f"c{number}" for number in range(8)]

    def wait_for_one(name: str) -> list[str]:
        with served.new_client() as client:
            # There is no room while two others ask, which they do once a second; if they kept it, never.
            while True:
                answer = client.post(f"{PREFIX}/large/consume", json={"consumer": name, "wait": 60})
                if answer.status_code != 503:
                    break
                time.sleep(0.01)
        assert answer.status_code == 200, answer.text
        return [event["text"] for event in answer.json()["events"]]

    def known() -> set[str]:
        answer = served.client.get(f"{PREFIX}/large/groups")
        return {group["consumer"] for group in answer.json().get("groups", ())}

    with ThreadPoolExecutor(len(names)) as threads:
        waiting = []
        for name in names:
            waiting.append(threads.submit(wait_for_one, name))
            wait_until(lambda name=name: name in known(), "it to wait")
        served.publish("large", {"text": "at last"})
        assert [each.result() for each in waiting] == [["at last"]] * len(names)
