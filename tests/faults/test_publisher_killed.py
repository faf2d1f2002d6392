"""A publisher killed around its commit: what was acknowledged is there once, the rest is there once or not at all."""

from __future__ import annotations

import collections
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest

from faults.actors import actor, declared, last_words, opened, said
from marks import on_logs
from servers import wait_until
from weft.project import connect
from weft.streams import publish_sync
from weft.streams.events import to_dicts

pytestmark = pytest.mark.timing

THREADS = 3
STREAM = "killed"


def publish_until_killed(pipe: Pipe, url: str, life: int) -> None:
    """Three threads publish, each one after the other, in shared commits. Each publish is announced and reported."""
    stream, connection = declared(STREAM), connect(url=url)
    telling = threading.Lock()

    def tell(*message: Any) -> None:
        with telling:
            pipe.send(message)

    def publish(number: int) -> None:
        writer = f"{life}/{number}"
        for n in range(1_000_000):
            size = 1 + n % 3
            tell("publishes", writer, n, size)
            result = publish_sync(stream, [{"writer": writer, "n": n}] * size, connection=connection)
            tell("published", writer, n, result["last_rowid"])

    for number in range(THREADS):
        threading.Thread(target=publish, args=(number,)).start()


@on_logs
def test_acknowledged_events_are_there_once(system: Any, count: Callable[..., int]) -> None:
    choose = random.Random(3)
    begun: dict[tuple[str, int], int] = {}
    acknowledged: dict[tuple[str, int], int] = {}

    def hear(message: tuple[str, str, int, int]) -> None:
        what, writer, n, value = message
        {"publishes": begun, "published": acknowledged}[what][writer, n] = value

    log = opened(system.url, STREAM).log
    kills = count(100, 5)
    for life in range(kills):
        with actor(publish_until_killed, system.url, life) as (process, pipe):
            until = len(acknowledged) + choose.choice([1, 1, 5])
            begin = time.monotonic()
            while len(acknowledged) < until:
                hear(said(pipe))
            # A publish takes so long, more or less: the kill comes at any moment of the next one or two.
            time.sleep(choose.uniform(0, 0.4) * (time.monotonic() - begin))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            for message in last_words(pipe):
                hear(message)

    stored = to_dicts(log.read(0, log.head(), 10_000_000))
    found = collections.Counter((event["writer"], event["n"]) for event in stored)
    last = {(event["writer"], event["n"]): event["_weft_rowid"] for event in stored}
    for publish, rowid in acknowledged.items():
        assert found[publish] == begun[publish], f"{publish} was acknowledged, and is there {found[publish]} times"
        assert last[publish] == rowid
    in_flight = begun.keys() - acknowledged.keys()
    for publish in in_flight:
        assert found[publish] in (0, begun[publish]), f"{publish} is there in part"
    assert found.keys() <= begun.keys()
    assert len({event["_weft_publish_id"] for event in stored}) == len(found)
    stored_in_flight = sum(found[publish] > 0 for publish in in_flight)
    print(f"{kills} kills: {len(acknowledged)} acknowledged; in flight {len(in_flight)}, {stored_in_flight} stored")
    # The kills hit what they were to hit: publishes before their commit, and after it but not acknowledged yet. A few
    # of them may by chance all be of one kind.
    assert len(in_flight) >= kills
    if kills == 100:
        assert 0 < stored_in_flight < len(in_flight)
    # And the stream goes on as if nothing had happened.
    result = publish_sync(declared(STREAM), {"writer": "survivor", "n": 1}, connection=system.connection)
    assert result["last_rowid"] > max(acknowledged.values())
    # The server may need a moment to notice that the last publisher is gone.
    wait_until(lambda: log.head() >= result["last_rowid"], "readers to see the last event")
