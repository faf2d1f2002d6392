"""A consumer killed before, in and after its ack: no event is lost, and only what was in flight comes again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest

from faults.actors import actor, declared, last_words, said
from marks import on_logs
from weft.project import connect
from weft.streams import ack_sync, consume_sync, groups_sync, publish_sync

pytestmark = pytest.mark.timing

STREAM = "killed"
GROUP = "workers"


def consume_until_killed(pipe: Pipe, url: str, member: str, batch_size: int, lease: float) -> None:
    """Consume and ack, for as long as each step is asked for, and say what was got and what was acknowledged."""
    stream, connection = declared(STREAM), connect(url=url)
    while True:
        pipe.send(("consumes", []))
        events = consume_sync(stream, GROUP, batch_size, connection, member, lease=lease, wait=60)
        rowids = [event["_weft_rowid"] for event in events]
        pipe.send(("got", rowids))
        pipe.recv()
        # A part of the batch first, to cut the lease in two.
        for part in (events[: len(events) // 2], events[len(events) // 2 :]):
            rowids = [event["_weft_rowid"] for event in part]
            pipe.send(("acks", rowids))
            ack_sync(stream, GROUP, part, connection=connection)
            pipe.send(("acked", rowids))


class Ledger:
    """What every life of the consumer said."""

    def __init__(self) -> None:
        self.delivered: dict[int, int] = {}
        self.acked: set[int] = set()
        self.in_doubt: set[int] = set()
        """An ack of these was under way when the consumer died: it counts or not, nobody knows."""
        self.in_flight: set[int] = set()

    def hear(self, message: tuple[str, list[int]]) -> None:
        what, rowids = message
        if what == "got":
            assert len(set(rowids)) == len(rowids)
            assert not self.acked.intersection(rowids), "an acknowledged event came again"
            for rowid in rowids:
                again = rowid in self.delivered
                assert not again or rowid in self.in_flight, "an event came again that was not in flight"
                self.delivered[rowid] = self.delivered.get(rowid, 0) + 1
            self.in_flight.update(rowids)
        elif what == "acks":
            self.in_doubt.update(rowids)
        elif what == "acked":
            self.in_doubt.difference_update(rowids)
            self.in_flight.difference_update(rowids)
            self.acked.update(rowids)


@on_logs
def test_only_what_was_in_flight_comes_again(system: Any, count: Callable[..., int]) -> None:
    choose = random.Random(5)
    stream, connection = declared(STREAM), system.connection
    ledger = Ledger()
    published: list[int] = []
    deaths = {"before the ack": 0, "in the ack": 0, "after the ack": 0, "in consume": 0}
    for life in range(count(100, 5)):
        size = choose.randint(2, 12)
        result = publish_sync(stream, [{"writer": "w", "n": n} for n in range(size)], connection=connection)
        published += range(result["first_rowid"], result["last_rowid"] + 1)
        # One that comes back under its own name has its events at once; another has to wait for the lease to end.
        member, lease = choose.choice([("steady", 60.0), (f"member {life}", 0.1)])
        death = choose.choice(list(deaths))
        deaths[death] += 1
        with actor(consume_until_killed, system.url, member, choose.randint(1, 8), lease) as (process, pipe):
            said(pipe)
            if death == "in consume":
                time.sleep(choose.uniform(0, 0.03))
            else:
                ledger.hear(said(pipe))
            if death in ("in the ack", "after the ack"):
                pipe.send("go on")
                ledger.hear(said(pipe))
                if death == "after the ack":
                    ledger.hear(said(pipe))
                else:
                    time.sleep(choose.uniform(0, 0.002))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            for message in last_words(pipe):
                ledger.hear(message)

    # Somebody else takes what is left: at once what is new, the rest when the leases end.
    while groups_sync(stream, connection=connection)[0]["pending"] or not ledger.delivered.keys() >= set(published):
        events = consume_sync(stream, GROUP, 1000, connection, "steady", lease=60, wait=60)
        rowids = [event["_weft_rowid"] for event in events]
        ledger.hear(("got", rowids))
        assert ack_sync(stream, GROUP, events, connection=connection) == len(events) > 0
        ledger.hear(("acked", rowids))
    assert sorted(ledger.delivered) == published
    assert set(published) - ledger.acked <= ledger.in_doubt, "neither acknowledged nor delivered again"
    (group,) = groups_sync(stream, connection=connection)
    assert (group["position"], group["lag"], group["pending"], group["lost"]) == (published[-1], 0, 0, 0)
    again = sum(times > 1 for times in ledger.delivered.values())
    print(f"{deaths}: {len(published)} events, {again} delivered again, {len(ledger.in_doubt)} acks in doubt")
