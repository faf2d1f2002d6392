"""Publishing to a stream on Redis, against redis-py's XADD in pipelines of the same size."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from bench.harness import Case
from bench.processes import in_processes

Job = Callable[[], int]
BATCH = 1000


def _events(batches: int) -> list[list[dict[str, object]]]:
    return [
        [{"user_id": f"u_{n % 1000}", "action": "click", "amount": n * 1.37} for n in range(at, at + BATCH)]
        for at in range(0, batches * BATCH, BATCH)
    ]


def ours(url: str, batches: int) -> Job:
    """Publish, one batch after the other."""
    import weft
    from weft.streams.runtime import open_stream

    fields = {"user_id": "string", "action": "string", "amount": "float64"}
    stream = weft.stream(name=f"s{uuid.uuid4().hex}", connection=weft.connect(url=url), fields=fields)(lambda: None)
    open_stream(stream)
    given = _events(batches)

    def job() -> int:
        for batch in given:
            weft.publish_sync(stream, batch)
        return batches * BATCH

    return job


def theirs(url: str, batches: int) -> Job:
    """A pipeline for each batch."""
    import redis

    client, key, given = redis.Redis.from_url(url), uuid.uuid4().hex, _events(batches)

    def job() -> int:
        for batch in given:
            pipeline = client.pipeline(transaction=False)
            for event in batch:
                pipeline.xadd(key, event)  # type: ignore[arg-type]
            pipeline.execute()
        return batches * BATCH

    return job


def _prepare(scale: float) -> tuple[Job, Job]:
    from redis_server import RedisServer

    # Not the shared one: this one keeps nothing on disk, so that the clients are measured and not the disk.
    server = RedisServer()
    server.start()
    url, batches = server.url(), max(1, int(200 * scale))
    client = server.connect()
    client.config_set("appendonly", "no")
    client.close()
    return (
        in_processes("bench.redis_streams:ours", [(url, batches)]),
        in_processes("bench.redis_streams:theirs", [(url, batches)]),
    )


CASES = [
    Case(
        "publish 1,000-event batches (Redis)",
        "redis-py, pipelines of 1,000 XADD",
        3,
        _prepare,
        needs="redis",
    )
]
