"""A member of a group on Redis killed between read and ack: others claim what it held, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest

import servers
import weft
from faults.actors import actor, last_words, said

pytestmark = pytest.mark.timing

STREAMS = ["one", "two", "three"]
IDLE_MILLISECONDS = 100


def client_of(url: str) -> Any:
    kind = weft.RedisCluster if "cluster" in url else weft.Redis
    return kind.from_url(url.partition("?")[0])


def consume_until_killed(pipe: Pipe, url: str, options: dict[str, Any]) -> None:
    """Consume and ack, for as long as each step is asked for, and say what was got and what was acknowledged."""

    async def work() -> None:
        async with client_of(url) as client, client.xconsumer(streams=STREAMS, group="g", **options) as consumer:
            while True:
                pipe.send(("consumes", []))
                batch = await consumer.get_batch(5)
                pipe.send(("got", names(batch)))
                pipe.recv()
                for part in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                    pipe.send(("acks", names(part)))
                    await consumer.ack(part)
                    pipe.send(("acked", names(part)))

    asyncio.run(work())


def names(batch: Any) -> list[tuple[bytes, bytes]]:
    return [(stream, entry.identifier) for stream, entry in batch]


class Ledger:
    """What every life of the consumer said."""

    def __init__(self) -> None:
        self.delivered: set[tuple[bytes, bytes]] = set()
        self.again = 0
        self.acked: set[tuple[bytes, bytes]] = set()
        self.in_doubt: set[tuple[bytes, bytes]] = set()
        """An ack of these was under way when the consumer died: it counts or not, nobody knows."""

    def hear(self, message: tuple[str, list[Any]]) -> None:
        what, found = message
        if what == "got":
            assert len(set(found)) == len(found)
            assert not self.acked.intersection(found), "an acknowledged entry came again"
            self.again += len(self.delivered.intersection(found))
            self.delivered.update(found)
        elif what == "acks":
            self.in_doubt.update(found)
        elif what == "acked":
            self.in_doubt.difference_update(found)
            self.acked.update(found)


@pytest.fixture(params=["redis", "redis-cluster"])
def url(request: pytest.FixtureRequest, shared_server: Callable[[str], servers.Server]) -> Iterator[str]:
    with shared_server(request.param).database() as found:
        yield found


@pytest.mark.brief("redis")
async def test_others_claim_what_the_dead_held(url: str, count: Callable[..., int]) -> None:
    choose = random.Random(7)
    ledger = Ledger()
    added: set[tuple[bytes, bytes]] = set()
    deaths = {"before the ack": 0, "in the ack": 0, "after the ack": 0, "in the read": 0}
    async with client_of(url) as client:
        for life in range(count(100, 5)):
            for _ in range(choose.randint(3, 15)):
                stream = choose.choice(STREAMS)
                added.add((stream.encode(), await client.xadd(stream, {"life": life})))
            # One that comes back under its own name asks for its backlog; another waits until the dead seem idle.
            options = choose.choice(
                [
                    {"consumer": "steady", "start_from_backlog": True, "claim_idle": IDLE_MILLISECONDS},
                    {"consumer": f"member {life}", "claim_idle": IDLE_MILLISECONDS},
                ]
            )
            options |= {"timeout": 60_000, "buffer_size": choose.choice([0, 3, 100])}
            death = choose.choice(list(deaths))
            deaths[death] += 1
            with actor(consume_until_killed, url, options) as (process, pipe):
                said(pipe)
                if death == "in the read":
                    await asyncio.sleep(choose.uniform(0, 0.03))
                else:
                    ledger.hear(said(pipe))
                if death in ("in the ack", "after the ack"):
                    pipe.send("go on")
                    ledger.hear(said(pipe))
                    if death == "after the ack":
                        ledger.hear(said(pipe))
                    else:
                        await asyncio.sleep(choose.uniform(0, 0.002))
                process.kill()
                process.join()
                assert process.exitcode == -signal.SIGKILL
                for message in last_words(pipe):
                    ledger.hear(message)

        # Somebody else takes what is left: at once what is new, the rest when the dead seem idle.
        async with client.xconsumer(
            streams=STREAMS, group="g", consumer="last", claim_idle=IDLE_MILLISECONDS, timeout=500, buffer_size=10
        ) as consumer:
            while not ledger.delivered >= added or any([(await client.xpending(s, "g")).pending for s in STREAMS]):
                batch = await consumer.get_batch()
                ledger.hear(("got", names(batch)))
                assert await consumer.ack(batch) == len(batch)
                ledger.hear(("acked", names(batch)))
    assert ledger.delivered == added
    assert added - ledger.acked <= ledger.in_doubt, "neither acknowledged nor delivered again"
    print(f"{deaths}: {len(added)} entries, {ledger.again} again, {len(ledger.in_doubt)} acks in doubt")
