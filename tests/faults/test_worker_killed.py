"""A worker of the service killed with -9 under load, again and again: what was answered with 202 is in the log, once.

A client that got no answer does not know. With an Idempotency-Key it sends the same again until it is answered.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from served import PREFIX, Served, start
from servers import wait_until

pytestmark = pytest.mark.timing

STREAMS = """
    @weft.stream(fields={"who": "string", "n": "int64"})
    def orders(): ...
"""
PUBLISHERS = 4


class Publisher(threading.Thread):
    """Publishes one event after the other. `keyed`: each until it is acknowledged."""

    def __init__(self, served: Served, who: str, keyed: bool) -> None:
        super().__init__()
        self.served = served
        self.who = who
        self.keyed = keyed
        self.sent = 0
        self.acknowledged: list[int] = []
        self.stopping = False
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self.served.new_client() as client:
                while not self.stopping:
                    self.sent += 1
                    self._publish(client, self.sent)
        except BaseException as error:
            self.failure = error

    def _publish(self, client: httpx.Client, n: int) -> None:
        headers = {"idempotency-key": f"{self.who}-{n}"} if self.keyed else {}
        while True:
            try:
                answer = client.post(f"{PREFIX}/orders", json={"who": self.who, "n": n}, headers=headers)
            except httpx.TransportError:  # cut in the middle: it may be stored or not
                if self.keyed:
                    continue
                return
            if answer.status_code == 503:  # a new worker that finds its database locked: as good as no answer
                if self.keyed:
                    continue
                return
            assert answer.status_code == 202, answer.text
            self.acknowledged.append(n)
            return


@pytest.mark.full
def test_worker_killed(tmp_path: Path, count: Callable[..., int]) -> None:
    served = start(tmp_path / "served", STREAMS, "--workers", "2")
    publishers = [Publisher(served, f"p{number}", keyed=number % 2 == 0) for number in range(PUBLISHERS)]
    try:
        assert served.url
        for each in publishers:
            each.start()
        for _ in range(count(100, 5)):
            _progress(publishers)
            killed = random.choice(served.workers())
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: len({*served.workers()} - {killed}) == 2, "a new worker")  # noqa: B023
        _progress(publishers)
        for each in publishers:
            each.stopping = True
        for each in publishers:
            each.join(120)
        assert [each.failure for each in publishers] == [None] * PUBLISHERS
        stored = Counter((event["who"], event["n"]) for event in served.events("orders"))
    finally:
        for each in publishers:
            each.stopping = True
        code = served.stop()
    assert code == 0
    assert set(stored.values()) == {1}
    for each in publishers:
        found = {n for who, n in stored if who == each.who}
        assert found >= set(each.acknowledged)
        if each.keyed:
            assert found == set(each.acknowledged) == set(range(1, each.sent + 1))


def _progress(publishers: list[Publisher]) -> None:
    """Until each has been answered again."""
    before = [len(each.acknowledged) for each in publishers]

    def went_on() -> bool:
        assert [each.failure for each in publishers] == [None] * PUBLISHERS
        return all(len(each.acknowledged) > had for each, had in zip(publishers, before, strict=True))

    wait_until(went_on, "every publisher to be answered")
