"""The database server killed and started again under load, again and again.

Every publish that was acknowledged is there once, every consumer and subscriber gets everything, and all of them go on
by themselves: a caller who meets an error tries again, and nothing has to be opened anew.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import faulthandler
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import servers
from faults.actors import declared
from servers import wait_until
from weft.errors import ConnectionFailedError, LeaseLostError
from weft.project import Project, connect, use
from weft.streams import ack_sync, consume_sync, groups_sync, publish_sync, subscribe
from weft.streams.declare import Stream
from weft.streams.events import to_dicts
from weft.streams.runtime import close, open_stream
from weft.systems.log import Batch

pytestmark = pytest.mark.timing

PUBLISHERS = 3
CONSUMERS = 2


@pytest.fixture(params=["postgres", "mysql", "redis"])
def server(request: pytest.FixtureRequest, need_server: Callable[[str], None]) -> Iterator[servers.Server]:
    """A server for this test alone."""
    need_server(request.param)
    server = servers.KINDS[request.param]()
    server.start()
    yield server
    server.kill()


class Load:
    """Publishers, consumers and a subscriber, each in a thread, and a ledger of what they were told."""

    def __init__(self, url: str) -> None:
        self.connection = connect(url=url)
        self.plain = declared("plain")
        self.keyed = declared("keyed", idempotency_key=["writer", "n"])
        self.stopping = threading.Event()
        self.quiet = threading.Event()  # set when the publishers have ended: the readers end when they have everything
        self.attempted: dict[tuple[str, str, int], int] = {}
        self.acknowledged: dict[tuple[str, str, int], int] = {}
        self.consumed: collections.Counter[int] = collections.Counter()
        self.acked: collections.Counter[int] = collections.Counter()
        self.subscribed: list[int] = []
        self.errors: collections.Counter[str] = collections.Counter()
        self.progress: collections.Counter[str] = collections.Counter()
        self.broken: list[BaseException] = []
        self.threads = [
            *(self._thread(self._publish, f"publisher {n}", n) for n in range(PUBLISHERS)),
            *(self._thread(self._consume, f"consumer {n}", n) for n in range(CONSUMERS)),
            self._thread(self._subscribe, "subscriber"),
        ]

    def _thread(self, function: Callable[..., None], name: str, *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                function(name, *arguments)
            except BaseException as error:
                self.broken.append(error)

        return threading.Thread(target=run, name=name)

    def _failed(self, what: str) -> None:
        self.errors[what] += 1
        time.sleep(0.01)

    def _publish(self, name: str, number: int) -> None:
        """To the plain stream each attempt is an event of its own; to the keyed one it is the same event again."""
        choose = random.Random(name)
        n = attempt = 0
        while not self.stopping.is_set():
            size = choose.choice([1, 1, 2, 50])
            for stream in (self.plain, self.keyed):
                n += 1
                while True:
                    attempt += 1
                    this = (stream.name, name, n if stream is self.keyed else -attempt)
                    events = [{"writer": name, "n": this[2] * 100 + i} for i in range(size)]
                    self.attempted[this] = size
                    try:
                        publish_sync(stream, events, connection=self.connection)
                    except ConnectionFailedError:
                        self._failed("publish")
                        continue
                    self.acknowledged[this] = size
                    self.progress[name] += 1
                    break

    def _consume(self, name: str, number: int) -> None:
        while not (self.quiet.is_set() and self._nothing_left()):
            try:
                events = consume_sync(self.plain, "group", 200, self.connection, name, lease=30, wait=0.05)
            except ConnectionFailedError:
                self._failed("consume")
                continue
            self.consumed.update(event["_weft_rowid"] for event in events)
            while events:
                try:
                    ack_sync(self.plain, "group", events, connection=self.connection)
                except ConnectionFailedError:
                    self._failed("ack")
                except LeaseLostError:
                    # A server that forgets the last moments of bookkeeping, or an ack that arrived though it failed.
                    self.errors["refused"] += 1
                    break
                else:
                    self.acked.update(event["_weft_rowid"] for event in events)
                    break
            if events:
                self.progress[name] += 1

    def _nothing_left(self) -> bool:
        for group in groups_sync(self.plain, connection=self.connection):
            return not group["lag"] and not group["pending"]
        return False

    def _subscribe(self, name: str) -> None:
        async def follow() -> None:
            subscription = subscribe(self.plain, since="start", connection=self.connection)
            while True:
                try:
                    async for event in subscription:
                        self.subscribed.append(event["_weft_rowid"])
                        self.progress[name] += 1
                    return
                except ConnectionFailedError:
                    self.errors["subscribe"] += 1
                    await asyncio.sleep(0.01)

        async def until_quiet() -> None:
            following = asyncio.ensure_future(follow())
            while not following.done():
                await asyncio.sleep(0.01)
                if self.quiet.is_set() and self.subscribed and self.subscribed[-1] >= self.head:
                    break
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

        asyncio.run(until_quiet())

    @property
    def head(self) -> int:
        return open_stream(self.plain, self.connection).log.head()

    def went_on(self, since: collections.Counter[str]) -> bool:
        """Whether every thread has done something since."""
        if self.broken:
            raise self.broken[0]
        return all(self.progress[thread.name] > since[thread.name] for thread in self.threads)

    def wait_for_all(self, since: collections.Counter[str]) -> None:
        """Wait until every thread has done something since. If one has not: which, where it is, and what it met."""
        try:
            wait_until(lambda: self.went_on(since), "every thread to go on", 120)
        except TimeoutError as error:
            faulthandler.dump_traceback()
            idle = [thread.name for thread in self.threads if self.progress[thread.name] <= since[thread.name]]
            raise AssertionError(f"{idle} did not go on; errors so far: {dict(self.errors)}") from error

    def wait_for_readers(self, seconds: float = 120) -> None:
        """Wait for all threads, for as long as they get anywhere: how much is left to read depends on the machine. Show
        where one hangs."""
        before, deadline = self.progress.total(), time.monotonic() + seconds
        while any(thread.is_alive() for thread in self.threads):
            time.sleep(0.05)
            if self.progress.total() != before:
                before, deadline = self.progress.total(), time.monotonic() + seconds
            if time.monotonic() > deadline:
                faulthandler.dump_traceback()
                return

    def check(self, stream: Stream) -> None:
        log = open_stream(stream, self.connection).log
        stored = to_dicts(log.read(0, log.head(), 100_000_000))
        found = collections.Counter((event["writer"], event["n"]) for event in stored)
        assert found.total() == len(found), "an event is there twice"
        for (name, writer, n), size in self.attempted.items():
            if name == stream.name:
                there = sum(found.pop((writer, n * 100 + i), 0) for i in range(size))
                if (name, writer, n) in self.acknowledged:
                    assert there == size, f"{there} of {size} acknowledged events are there"
                else:
                    assert there in (0, size), "a publish is there in part"
        assert not found, "events that nobody published"


@pytest.mark.full
def test_load_goes_on_after_a_crash(server: servers.Server, count: Callable[[int], int]) -> None:
    choose = random.Random(server.name)
    kills = count(30)
    with use(Project()) as project:
        load = Load(server.create_database("load"))
        for stream in (load.plain, load.keyed):
            open_stream(stream, load.connection)
        for thread in load.threads:
            thread.start()
        try:
            load.wait_for_all(collections.Counter())
            for _ in range(kills):
                time.sleep(choose.uniform(0, 0.3))
                server.kill()
                before = load.progress.copy()
                time.sleep(choose.choice([0, 0, 0.1]))
                server.start()
                load.wait_for_all(before)
        finally:
            load.stopping.set()
            for thread in load.threads[:PUBLISHERS]:
                thread.join()
            load.quiet.set()
            load.wait_for_readers()
        assert not load.broken
        assert not any(thread.is_alive() for thread in load.threads)
        for stream in (load.plain, load.keyed):
            load.check(stream)
        log = open_stream(load.plain, load.connection).log
        stored = [event["_weft_rowid"] for event in to_dicts(log.read(0, log.head(), 100_000_000))]
        assert load.subscribed == stored, "the subscriber missed something, or got it twice"
        assert sorted(load.consumed) == stored, "a consumer missed something"
        print(
            f"{server.name}, {kills} kills: {len(load.acknowledged)} publishes acknowledged of {len(load.attempted)}, "
            f"{sum(times > 1 for times in load.consumed.values())} of {len(stored)} events consumed again, "
            f"errors {dict(load.errors)}"
        )
        close(project)


@pytest.mark.full
@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_a_restart_while_nothing_is_going_on_is_not_noticed(server: servers.Server, ending: str) -> None:
    """Connections that the server has closed are not used again: nobody meets an error, nor a publish in doubt."""
    with use(Project()) as project:
        connection = connect(url=server.create_database("idle"))
        stream = declared("idle")
        for n in range(3):
            assert publish_sync(stream, {"writer": "w", "n": n}, connection=connection)["rows_received"] == 1
            events = consume_sync(stream, "group", 10, connection, "member")
            assert events[-1]["n"] == n  # and before it what a killed server forgot to be acknowledged
            assert ack_sync(stream, "group", events, connection=connection) == len(events)
            assert [group["lag"] for group in groups_sync(stream, connection=connection)] == [0]
            getattr(server, ending)()
            server.start()
        close(project)


@pytest.mark.parametrize("server", ["postgres", "mysql"], indirect=True)
def test_offsets_of_readers_stay_valid(server: servers.Server) -> None:
    """A server that crashes forgets the offsets that rolled back publishes took, and gives them out again.

    No reader may have been told to go on after one of those.
    """
    with use(Project()) as project:
        connection = connect(url=server.create_database("forgets"))
        stream = declared("forgets")
        log = open_stream(stream, connection).log
        store: Any = open_stream(stream, connection).hub.store
        last = publish_sync(stream, {"writer": "w", "n": 1}, connection=connection)["last_rowid"]
        # More than the 32 offsets for which PostgreSQL writes to its log at once.
        with contextlib.suppress(ZeroDivisionError), store.session("publish") as session:
            store.append_in(session, [Batch(log, [("rolled back", 100)], ("n",), [list(range(100))])])
            raise ZeroDivisionError
        head = log.head()
        server.kill()
        server.start()
        first = retried(lambda: publish_sync(stream, {"writer": "w", "n": 2}, connection=connection))["first_rowid"]
        assert last <= head < first, "a reader that went on from the head would not see this event"
        close(project)


def retried(call: Callable[[], Any]) -> Any:
    """As a caller does: once more after the error that says that the connection is gone."""
    try:
        return call()
    except ConnectionFailedError:
        return call()
