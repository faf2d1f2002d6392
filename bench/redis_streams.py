"""Publishing to a stream on Redis, against redis-py's XADD in pipelines of the same size."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.harness import Case
from bench.processes import in_processes

Job = Callable[[], int]
BATCH = 1000


def _events(batches: int) -> list[list[dict[str, object]]]:
    return [
        [{"user_id": f"u_{n % 1000}", "action": "click", "amount": n * 1.37} for n in range(at, at + BATCH)]
        for at in range(0, batches * BATCH, BATCH)
    ]


def _in_threads(threads: int, work: Callable[[list[list[dict[str, object]]]], object], batches: int) -> Job:
    """Have threads share the batches, each one after the other."""
    given = _events(batches)
    shares = [given[number::threads] for number in range(threads)]

    def job() -> int:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, shares))
        return batches * BATCH

    return job


def ours(url: str, batches: int, threads: int) -> Job:
    """Publish."""
    import weft
    from weft.streams.runtime import open_stream

    fields = {"user_id": "string", "action": "string", "amount": "float64"}
    stream = weft.stream(name=f"s{uuid.uuid4().hex}", connection=weft.connect(url=url), fields=fields)(lambda: None)
    open_stream(stream)

    def work(given: list[list[dict[str, object]]]) -> None:
        for batch in given:
            weft.publish_sync(stream, batch)

    return _in_threads(threads, work, batches)


def theirs(url: str, batches: int, threads: int) -> Job:
    """A pipeline for each batch."""
    import redis

    client, key = redis.Redis.from_url(url), uuid.uuid4().hex

    def work(given: list[list[dict[str, object]]]) -> None:
        for batch in given:
            pipeline = client.pipeline(transaction=False)
            for event in batch:
                pipeline.xadd(key, event)  # type: ignore[arg-type]
            pipeline.execute()

    return _in_threads(threads, work, batches)


def _prepare(scale: float, threads: int = 1) -> tuple[Job, Job]:
    from redis_server import RedisServer

    # Not the shared one: this one keeps nothing on disk, so that the clients are measured and not the disk.
    server = RedisServer()
    server.start()
    url, batches = server.url(), max(1, int(200 * scale))
    client = server.connect()
    client.config_set("appendonly", "no")
    client.close()
    return (
        in_processes("bench.redis_streams:ours", [(url, batches, threads)]),
        in_processes("bench.redis_streams:theirs", [(url, batches, threads)]),
    )


CASES = [
    Case(
        "publish 1,000-event batches (Redis)",
        "redis-py, pipelines of 1,000 XADD",
        3,
        _prepare,
        needs="redis",
    ),
    Case(
        "publish 1,000-event batches, two threads (Redis)",
        "redis-py, pipelines of 1,000 XADD, two threads",
        3,
        partial(_prepare, threads=2),
        needs="redis",
    ),
]
