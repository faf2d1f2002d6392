"""Writers that commit late, out of order, roll back or die: a reader by offset gets each event once, in order.

Eight processes write to one stream, one of them mortal: it is killed in the middle of its work. A plain reader goes
from head to head, and a consumer beside it from lease to lease.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

import pytest

from faults.actors import actor, last_words, opened, said
from weft.systems.log import ROWID, Batch

pytestmark = pytest.mark.timing

WRITERS = 7
TRANSACTIONS = 5


class RollBackError(Exception):
    pass


def write(pipe: Pipe, url: str, name: str, writer: str, seed: str, dies: bool = False) -> None:
    """Transactions of one writer. It says which events each of them has before it begins, and that it is committed."""
    choose = random.Random(f"{seed} {writer}")
    ready = opened(url, name)
    store: Any = ready.hub.store
    death = choose.randrange(TRANSACTIONS)
    n = 0
    for number in range(TRANSACTIONS):
        sizes = choose.choices([1, 2, 5], k=choose.choice([1, 1, 2]))
        rolls_back = choose.random() < 0.2
        waits = choose.choices([0, 0.0005, 0.002, 0.01], [4, 2, 2, 1], k=2)
        events = list(range(n, n + sum(sizes)))
        n += len(events)
        pipe.send(("begins", writer, events))
        if dies and number == death:
            # At some moment before, in or after the commit.
            after = choose.uniform(0, 2 * sum(waits) + 0.005)
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with contextlib.suppress(RollBackError), store.session("publish") as session:
            at = 0
            for size in sizes:
                values: list[list[Any]] = [[writer] * size, events[at : at + size]]
                store.append_in(session, [Batch(ready.log, [(f"{writer}/{number}", size)], ("writer", "n"), values)])
                at += size
                time.sleep(waits[0])
            if rolls_back:
                raise RollBackError
            time.sleep(waits[1])
        if not rolls_back:
            pipe.send(("committed", writer, events))
    pipe.send(("ends", writer, []))
    if dies:
        signal.pause()


def write_again_and_again(pipe: Pipe, url: str) -> None:
    """A writer for many seeds."""
    while True:
        name, writer, seed = pipe.recv()
        write(pipe, url, name, writer, seed)


class Reader:
    """Reads by offset: to the head, and on from there."""

    def __init__(self, log: Any) -> None:
        self.log = log
        self.position = 0
        self.seen: list[tuple[int, str, int]] = []
        self.consumed: list[int] = []

    def look(self) -> None:
        head = self.log.head()
        assert head >= self.position, "the head went back"
        page = self.log.read(self.position, head, 1000)
        rows = dict(zip(page.names, page.columns, strict=True))
        self.seen += zip(rows[ROWID], rows["writer"], rows["n"], strict=True)
        self.position = head

    def take(self) -> None:
        leased = self.log.lease("reader", "one", 1000, 60)
        for span in leased.spans:
            page = self.log.read(span.first - 1, span.last, 1000)
            rowids = dict(zip(page.names, page.columns, strict=True))[ROWID]
            assert len(rowids) == span.events
            self.consumed += rowids
            assert self.log.settle("reader", rowids, token=leased.token, member="one") == len(rowids)


@pytest.mark.brief("postgres")
def test_no_event_is_skipped(system: Any, count: Callable[..., int]) -> None:
    with contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(actor(write_again_and_again, system.url))[1] for _ in range(WRITERS)]
        for seed in range(count(200, 5)):
            one_seed(system.url, f"seed{seed}", pipes)


def one_seed(url: str, name: str, pipes: list[Pipe]) -> None:
    reader = Reader(opened(url, name).log)
    begun: dict[str, list[list[int]]] = {}
    committed: dict[str, list[list[int]]] = {}

    def hear(message: tuple[str, str, list[int]]) -> bool:
        what, writer, events = message
        if what != "ends":
            {"begins": begun, "committed": committed}[what].setdefault(writer, []).append(events)
        return what == "ends"

    for number, pipe in enumerate(pipes):
        pipe.send((name, f"w{number}", name))
    with actor(write, url, name, "mortal", name, True) as (process, mortal):
        writing = [*pipes, mortal]
        while writing:
            for pipe in wait(writing, 0):
                try:
                    ended = hear(said(pipe))
                except EOFError:
                    ended = True
                if ended:
                    writing.remove(pipe)
            reader.look()
            reader.take()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        for message in last_words(mortal):
            hear(message)
    reader.look()
    reader.take()

    rowids = [rowid for rowid, _, _ in reader.seen]
    assert rowids == sorted(set(rowids)), "out of order, or twice"
    page = reader.log.read(0, reader.log.head(), 100_000)
    assert rowids == list(dict(zip(page.names, page.columns, strict=True))[ROWID]), "skipped"
    assert reader.consumed == rowids, "the consumer got something else than the reader"
    for writer in begun:
        expected = [n for events in committed.get(writer, []) for n in events]
        found = [n for _, who, n in reader.seen if who == writer]
        unknown = begun[writer][-1] if writer == "mortal" and found[len(expected) :] else []
        assert found in (expected, expected + unknown), "a publish is lost, partly there, or was rolled back"
