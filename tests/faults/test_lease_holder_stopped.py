"""A consumer that stands still (SIGSTOP) for longer than its lease: when it goes on, its ack is refused."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest

from faults.actors import actor, declared, said
from marks import on_logs
from weft.errors import LeaseLostError
from weft.project import connect
from weft.streams import ack_sync, consume_sync, groups_sync, nack_sync, publish_sync

pytestmark = pytest.mark.timing

STREAM = "stopped"
GROUP = "workers"
LEASE = 0.1


def consume_and_ack_when_told(pipe: Pipe, url: str) -> None:
    """Consume, wait for a word, ack."""
    stream, connection = declared(STREAM), connect(url=url)
    while True:
        size, lease, settle = pipe.recv()
        events = consume_sync(stream, GROUP, size, connection, "stopped", lease=lease, wait=60)
        pipe.send([event["_weft_rowid"] for event in events])
        pipe.recv()
        try:
            pipe.send((ack_sync if settle == "ack" else nack_sync)(stream, GROUP, events, connection=connection))
        except LeaseLostError as error:
            pipe.send(("refused", list(error.rowids), error.what))


@pytest.mark.brief(
    "taken over-sqlite",
    "taken over-postgres",
    "taken over and acknowledged-mysql",
    "taken over and acknowledged-redis",
    "taken over by nobody-sqlite",
    "taken over by nobody-redis",
)
@on_logs
@pytest.mark.parametrize("taken_over", ["taken over", "taken over and acknowledged", "taken over by nobody"])
def test_its_ack_is_refused(system: Any, count: Callable[[int], int], taken_over: str) -> None:
    choose = random.Random(taken_over)
    stream, connection = declared(STREAM), system.connection

    def consume() -> list[dict[str, Any]]:
        return consume_sync(stream, GROUP, 100, connection, "other", lease=60, wait=60)

    with actor(consume_and_ack_when_told, system.url) as (process, pipe):
        assert process.pid is not None
        # One that is in time is not refused.
        publish_sync(stream, {"writer": "w", "n": 0}, connection=connection)
        for message in ((1, 60, "ack"), "go on"):
            pipe.send(message)
            answer = said(pipe)
        assert answer == 1

        for _ in range(count(20)):
            size = choose.randint(1, 9)
            publish_sync(stream, [{"writer": "w", "n": n} for n in range(size)], connection=connection)
            settle = choose.choice(["ack", "ack", "nack"])
            pipe.send((size, LEASE, settle))
            held = said(pipe)
            assert len(held) == size
            os.kill(process.pid, signal.SIGSTOP)
            pipe.send("go on")
            taken: list[dict[str, Any]] = []
            if taken_over == "taken over by nobody":
                time.sleep(LEASE)  # by every clock the lease has ended when this returns: it began earlier
            else:
                taken = consume()
                assert [event["_weft_rowid"] for event in taken] == held
                if taken_over == "taken over and acknowledged":
                    assert ack_sync(stream, GROUP, taken, connection=connection) == size
            os.kill(process.pid, signal.SIGCONT)

            refused, rowids, why = said(pipe)
            assert (refused, rowids) == ("refused", held)
            assert settle in why
            assert {
                "taken over": "'other' holds them now",
                "taken over and acknowledged": "another member acknowledged them",
                "taken over by nobody": "their lease ran out",
            }[taken_over] in why

            if taken_over == "taken over by nobody":
                taken = consume()
                assert [event["_weft_rowid"] for event in taken] == held
            if taken_over != "taken over and acknowledged":
                assert ack_sync(stream, GROUP, taken, connection=connection) == size
            (group,) = groups_sync(stream, connection=connection)
            assert (group["lag"], group["pending"], group["position"]) == (0, 0, held[-1])
