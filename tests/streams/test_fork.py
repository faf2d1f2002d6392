"""A process that forks: parent and child go on beside each other, and nothing of either is lost."""

from __future__ import annotations

from typing import Any

import pytest

from weft.project import Project
from workers import declare, drain, start

# The process forks itself: to fork the tests' own would copy their threads and servers' sockets with it. The child says
# what went wrong through its pipe, and ends without the parent's clean-up.
_FORK = """
import contextlib, os, signal, traceback
import weft.streams

class Child:
    def __init__(self, work):
        self.back, there = os.pipe()
        here, self.forth = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(there), os.close(here)
            return
        signal.alarm(50)
        os.close(self.back), os.close(self.forth)
        status = 1
        try:
            def pause():
                os.write(there, b"pause\\n")
                assert os.read(here, 1) == b"!"
            said = work(pause)
            os.write(there, b"answer " + base64.b64encode(pickle.dumps(said)) + b"\\n")
            status = 0
        except BaseException:
            os.write(there, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def paused(self):
        said = os.read(self.back, 100_000)
        assert said == b"pause\\n", said.decode()

    def answer(self):
        with contextlib.suppress(BrokenPipeError):
            os.write(self.forth, b"!")
        said = b""
        while part := os.read(self.back, 100_000):
            said += part
        os.waitpid(self.pid, 0)
        assert said.startswith(b"answer "), said.decode()
        return pickle.loads(base64.b64decode(said[7:]))
"""


def fork(code: str, *args: Any) -> Any:
    """Run code that makes a `Child(function)`; the function's argument waits for the parent's `answer()`."""
    import textwrap

    return start(_FORK + textwrap.dedent(code), *args).answer()


def numbers(stream: str = "orders") -> list[int]:
    return [event["n"] for event in drain(stream, "check")]


def test_child_publishes_and_consumes(streams: Project) -> None:
    declare(fields={"n": "int64"})
    child, parent = fork("""
        stream = declare(fields={"n": "int64"})
        weft.publish_sync(stream, [{"n": n} for n in range(3)])
        mine = weft.consume_sync(stream, "workers", batch_size=1)
        def work(pause):
            own = weft.publish_sync(stream, {"n": 10})
            events = weft.consume_sync(stream, "workers")
            weft.ack_sync(stream, "workers", events)
            return own, events
        own, events = Child(work).answer()
        weft.ack_sync(stream, "workers", mine)
        later = weft.publish_sync(stream, {"n": 11})
        rest = drain(stream, "workers")
        answer(((own, events), (later, mine + rest)))
    """)
    (own, events), (later, mine) = child, parent
    # Two members: neither gets what the other holds.
    assert [event["n"] for event in events] == [1, 2, 10]
    assert [event["n"] for event in mine] == [0, 11]
    assert own["first_rowid"] < later["first_rowid"]
    assert numbers() == [0, 1, 2, 10, 11]


def test_publish_ids_differ(streams: Project) -> None:
    """Ids are made in store; a child must not hand out those that its parent has left."""
    declare(fields={"n": "int64"})
    child, parent = fork("""
        stream = declare(fields={"n": "int64"})
        weft.publish_sync(stream, {"n": 0})
        publish = lambda n: [weft.publish_sync(stream, {"n": n})["publish_id"] for _ in range(5)]
        child = Child(lambda pause: publish(1))
        mine = publish(2)
        answer((child.answer(), mine))
    """)
    assert len({*child, *parent}) == 10
    stored = {event["_weft_publish_id"] for event in drain("orders")}
    assert {*child, *parent} < stored


@pytest.mark.parametrize("closes", ["parent", "child"])
def test_the_other_goes_on_when_one_closes(streams: Project, closes: str) -> None:
    """What one of them acknowledges after the other is gone is stored. (To SQLite the two must not look like one.)"""
    declare(fields={"n": "int64"})
    fork(
        """
        stream = declare(fields={"n": "int64"})
        weft.publish_sync(stream, {"n": 0})
        publish = lambda first: [weft.publish_sync(stream, {"n": n}) for n in range(first, first + 5)]
        if args[0] == "parent":
            def work(pause):
                publish(10)
                pause()
                publish(15)
            child = Child(work)
            child.paused()
            weft.publish_sync(stream, {"n": 1})
            weft.streams.close()
            child.answer()
        else:
            def work(pause):
                publish(10)
                pause()
                weft.streams.close()
            child = Child(work)
            child.paused()
            weft.publish_sync(stream, {"n": 1})
            child.answer()
            publish(15)
        """,
        closes,
    )
    assert numbers() == [0, *range(10, 15), 1, *range(15, 20)]


@pytest.mark.timing
def test_parent_ends_first(streams: Project) -> None:
    """As a daemon starts: the process that opened the stream ends, the child publishes for long after."""
    declare(fields={"n": "int64"})
    run = start(
        _FORK
        + """
stream = declare(fields={"n": "int64"})
weft.publish_sync(stream, {"n": 0})
parent = os.getpid()
def work(pause):
    weft.publish_sync(stream, {"n": 1})
    pause()
    import time
    while os.getppid() == parent:
        time.sleep(0.01)
    for n in range(2, 7):
        weft.publish_sync(stream, {"n": n})
    weft.streams.close()
child = Child(work)
child.paused()
os.write(child.forth, b"!")
"""
    )
    run.answer()  # the pipes end with the last process that has them
    assert numbers() == list(range(7))


@pytest.mark.timing
def test_fork_beside_busy_threads(streams: Project) -> None:
    """Threads that publish, consume and wait while their process forks: no child hangs, no event is lost."""
    declare(fields={"n": "int64"})
    published, consumed = fork("""
        import threading
        stream = declare(fields={"n": "int64"})
        weft.publish_sync(stream, {"n": 0})
        done, published, consumed = threading.Event(), [0], []
        def publisher(number):
            n = number * 10_000
            while not done.is_set():
                weft.publish_sync(stream, {"n": n})
                published.append(n)
                n += 1
        def consumer():
            while not done.is_set():
                events = weft.consume_sync(stream, "workers", wait=0.2)
                weft.ack_sync(stream, "workers", events)
                consumed.extend(event["n"] for event in events)
        threads = [threading.Thread(target=publisher, args=(k,)) for k in (1, 2)] + [threading.Thread(target=consumer)]
        for thread in threads:
            thread.start()
        # The children ask for the consumer, which its thread may not have made yet.
        while not weft.groups_sync(stream):
            done.wait(0.01)
        def work(number):
            for n in range(3):
                weft.publish_sync(stream, {"n": number + n})
            return weft.groups_sync(stream)[0]["consumer"]
        for number in range(100_000, 100_080, 10):
            assert Child(lambda pause: work(number)).answer() == "workers"
            published += [number, number + 1, number + 2]
        done.set()
        for thread in threads:
            thread.join()
        consumed += [event["n"] for event in drain(stream, "workers")]
        answer((published, consumed))
    """)
    assert sorted(published) == sorted(numbers())
    assert sorted(consumed) == sorted(published)


@pytest.mark.timing
def test_waiting_reader_of_the_parent_still_wakes(streams: Project) -> None:
    """A subscriber that waits while its process forks sees what the child publishes, and what others publish later."""
    declare(fields={"n": "int64"})
    seen = fork("""
        import asyncio
        stream = declare(fields={"n": "int64"})
        weft.publish_sync(stream, {"n": 0})
        async def main():
            live = weft.subscribe(stream)
            waiting = asyncio.ensure_future(anext(live))
            await asyncio.sleep(0.05)
            child = Child(lambda pause: weft.publish_sync(stream, {"n": 1}) and None)
            first = await asyncio.wait_for(waiting, 30)
            child.answer()
            waiting = asyncio.ensure_future(anext(live))
            await asyncio.sleep(0.05)
            Child(lambda pause: weft.publish_sync(stream, {"n": 2}) and None).answer()
            return [first["n"], (await asyncio.wait_for(waiting, 30))["n"]]
        answer(asyncio.run(main()))
    """)
    assert seen == [1, 2]


def test_arrow_on_both_sides(streams: Project) -> None:
    """The connections behind range reads are not shared either."""
    declare(fields={"n": "int64"})
    parent, child = fork("""
        import gc
        from workers import log_of
        stream = declare(fields={"n": "int64"})
        weft.publish_sync(stream, [{"n": n} for n in range(5)])
        def read():
            return [n for batch in log_of(stream).read_arrow(0, 2**62, ["n"]) for n in batch.column(0).to_pylist()]
        first = read()
        def work(pause):
            gc.collect()
            return read()
        theirs = Child(work).answer()
        answer(((first, read(), read()), theirs))
    """)
    assert parent == (list(range(5)),) * 3
    assert child == list(range(5))


def test_fork_inside_another_project(streams: Project) -> None:
    """A child that leaves the block of its test goes on with the project outside, whose threads it does not have."""
    declare(fields={"n": "int64"})
    child = fork("""
        import weft.testing
        stream = declare(fields={"n": "int64"})
        weft.publish_sync(stream, {"n": 0})
        inside = weft.testing.project()
        inside.__enter__()
        weft.publish_sync(stream, {"n": 100})
        def work(pause):
            weft.publish_sync(stream, {"n": 101})
            inside.__exit__(None, None, None)
            return weft.publish_sync(stream, {"n": 1})["status"]
        said = Child(work).answer()
        weft.publish_sync(stream, {"n": 102})
        assert [event["n"] for event in drain(stream, "check")] == [100, 102]
        inside.__exit__(None, None, None)
        weft.publish_sync(stream, {"n": 2})
        answer(said)
    """)
    assert child == "accepted"
    assert numbers() == [0, 1, 2]
