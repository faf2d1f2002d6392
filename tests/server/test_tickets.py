"""Tickets: how a browser's EventSource, which sends no headers, subscribes to a stream that is not open."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft.server import Limits, access, tickets
from weft.server.problems import Problem
from weft.server.rates import Rate
from weft.server.tickets import Tickets
from weft.streams import Stream

STREAMS = """
@weft.stream(auth={"type": "bearer", "token": "a secret"})
def closed(): ...

@weft.stream(auth={"type": "bearer", "token": "another secret"})
def other(): ...
"""
TOKEN = {"Authorization": "Bearer a secret"}
URL = "/api/v1/streams/closed"


def issue(served: Any) -> str:
    answer = served.client.post(f"{URL}/ticket", headers=TOKEN)
    assert answer.status_code == 201, answer.text
    body = answer.json()
    assert (body["stream"], body["expires_in"]) == ("closed", 30)
    return str(body["ticket"])


def subscribe(url: str, ticket: str) -> int:
    with httpx.stream("GET", f"{url}/subscribe", params={"ticket": ticket}, timeout=60, verify=False) as answer:
        return answer.status_code


def test_a_ticket_opens_one_subscription(server: Callable[..., Any]) -> None:
    served = server(STREAMS)
    ticket = issue(served)
    with served.client.stream("GET", f"{URL}/subscribe?ticket={ticket}&since=start") as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) == ": subscribed"
        served.publish("closed", {"n": 1}, **TOKEN)
        assert any('"n":1' in line for line in lines)
    assert subscribe(served.url + URL, ticket) == 401
    # It opens nothing else, and is not used up by trying.
    ticket = issue(served)
    assert served.client.get(f"{URL}/events", params={"ticket": ticket}).status_code == 401
    assert subscribe(f"{served.url}/api/v1/streams/other", ticket) == 401
    assert subscribe(served.url + URL, ticket) == 200
    for wrong in ("", "x", "../" * 10 + "etc/passwd", "\0", "ü" * 1000):
        assert subscribe(served.url + URL, wrong) == 401, wrong
    log = served.log_file.read_text()
    assert ticket not in log


@pytest.mark.timing
def test_a_ticket_of_one_worker_is_redeemed_once_by_all(server: Callable[..., Any]) -> None:
    served = server(STREAMS, "--workers", "2")
    for _ in range(2):
        ticket = issue(served)
        with ThreadPoolExecutor(8) as threads:
            codes = list(threads.map(lambda _, ticket=ticket: subscribe(served.url + URL, ticket), range(8)))
        assert codes.count(200) == 1, codes
        assert set(codes) == {200, 401}


def test_a_ticket_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = Tickets(tmp_path / "tickets")
    ticket = issued.issue("closed", "its own key")
    assert issued.redeem(ticket, "other") is None
    assert issued.redeem(ticket, "closed") == "its own key"
    assert issued.redeem(ticket, "closed") is None
    monkeypatch.setattr(tickets, "SECONDS", -1)
    assert issued.redeem(issued.issue("closed", "a key"), "closed") is None


def test_tickets_that_nobody_used_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tickets"
    good = Tickets(folder).issue("closed", "a key")
    monkeypatch.setattr(tickets, "SECONDS", -1)
    issued = Tickets(folder)
    for _ in range(10):
        issued.issue("closed", "a key")
    # Of a worker that was killed while it wrote.
    (folder / "half").touch()
    monkeypatch.setattr(tickets, "SECONDS", 30)
    assert Tickets(folder).redeem(good, "closed")
    Tickets(folder).issue("closed", "a key")
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_tickets_come_to_an_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a file for a while."""
    monkeypatch.setattr(access, "_TICKETS", Rate(0.001, 3))
    made = access.Access(tmp_path, Limits())
    stream = Stream(name="closed")
    for _ in range(3):
        await made.issue_ticket(stream, "a key")
    with pytest.raises(Problem) as caught:
        await made.issue_ticket(stream, "a key")
    assert caught.value.status == 429
    assert await made.issue_ticket(Stream(name="other"), "a key")
    made.close()
