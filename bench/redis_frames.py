"""Streams of Redis as frames: against draining the socket, against the polars-redis package, against redis-py."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness import Case, SkippedError
from bench.processes import in_processes

Job = Callable[[], int]
STREAM = "entries"
SCHEMA = {"user_id": "string", "action": "string", "amount": "float64"}
FIRST_MS = 1704067200000
PAGE = 20_000
BATCH = 1000
# Of this one only the part in Python is measured; the rest of it would have to be compiled for an hour.
POLARS_REDIS = "polars-redis==0.1.6"
NEEDED = ("polars==2.1.0", "redis==8.1.0", "hiredis==3.5.0")


@functools.cache
def _filled(entries: int) -> str:
    """The URL of a server that keeps nothing on disk and holds this many entries of three fields."""
    import redis

    from redis_server import RedisServer

    server = RedisServer()
    server.start()
    with redis.Redis.from_url(server.url()) as client:
        client.config_set("appendonly", "no")
        for first in range(0, entries, 10_000):
            pipeline = client.pipeline(transaction=False)
            for number in range(first, min(first + 10_000, entries)):
                fields: Any = {"user_id": f"u_{number % 1000}", "action": "click", "amount": number * 1.37}
                pipeline.xadd(STREAM, fields, id=f"{FIRST_MS + number}-0")
            pipeline.execute()
    return server.url()


def read(url: str, entries: int) -> Job:
    """All entries as Arrow, with types."""
    import weft

    def job() -> int:
        table = weft.read_stream(url, STREAM, schema=SCHEMA, to="arrow")
        assert len(table) == entries
        return entries

    return job


def drain(url: str, entries: int) -> Job:
    """The same pages over a plain socket, thrown away. Where each begins is known beforehand."""
    host, port = url.removeprefix("redis://").partition("/")[0].split(":")
    end = b"$3\r\nEND\r\n"

    def job() -> int:
        buffer = bytearray(1 << 20)
        with socket.create_connection((host, int(port))) as link, memoryview(buffer) as view:
            for first in range(FIRST_MS, FIRST_MS + entries, PAGE):
                command = f"XRANGE {STREAM} {first}-0 + COUNT {PAGE}\r\nECHO END\r\n"
                link.sendall(command.encode())
                tail = b""
                while not tail.endswith(end):
                    received = link.recv_into(view)
                    tail = (tail + bytes(view[max(0, received - len(end)) : received]))[-len(end) :]
        return entries

    return job


def their_read(url: str, folder: str, entries: int) -> Job:
    """polars-redis reads so many. Runs where its packages are, and Weft is not."""
    sys.path.insert(0, folder)
    import _streams  # type: ignore[import-not-found]
    import polars as pl

    schema = {"user_id": pl.Utf8, "action": pl.Utf8, "amount": pl.Float64}

    def job() -> int:
        assert len(_streams.read_stream(url, STREAM, schema=schema, count=entries)) == entries
        return entries

    return job


def iterate(url: str, entries: int) -> Job:
    """Batches for a member of a group, acknowledged."""
    import weft

    def job() -> int:
        group, done = uuid.uuid4().hex, 0
        batches = weft.iter_stream(
            url, STREAM, batch_size=BATCH, group=group, consumer="a", auto_ack=True, count=entries, schema=SCHEMA
        )
        for frame in batches:
            done += len(frame)
        _forget(url, group)
        return done

    return job


def by_redis_py(url: str, entries: int) -> Job:
    """The same by redis-py into dicts."""
    import redis

    def job() -> int:
        group, done = uuid.uuid4().hex, 0
        with redis.Redis.from_url(url) as client:
            client.xgroup_create(STREAM, group, "0")
            while done < entries:
                found: Any = client.xreadgroup(group, "a", {STREAM: ">"}, count=BATCH)
                rows = found[0][1]
                client.xack(STREAM, group, *(each for each, _ in rows))
                done += len(rows)
        _forget(url, group)
        return done

    return job


def _forget(url: str, group: str) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        assert client.xpending(STREAM, group)["pending"] == 0
        client.xgroup_destroy(STREAM, group)


@functools.cache
def _their_folder() -> str:
    """Where the modules of polars-redis are."""
    folder = tempfile.mkdtemp(prefix="weft-bench-")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "polars-redis"]
    done = subprocess.run([*download, "--dest", folder, POLARS_REDIS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SkippedError(f"cannot get {POLARS_REDIS}: {done.stderr[-300:]}")
    (source,) = Path(folder).glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (module,) = Path(folder).glob("*/python/polars_redis/_streams.py")
    return str(module.parent)


def _against_the_socket(scale: float) -> tuple[Job, Job]:
    entries = int(1_000_000 * scale)
    url = _filled(entries)
    return read(url, entries), drain(url, entries)


def _against_polars_redis(scale: float) -> tuple[Job, Job]:
    from bench.references import python_with

    entries = int(1_000_000 * scale)
    url, python = _filled(entries), python_with(*NEEDED)
    # It gives no rows at all of 200,000 entries and more.
    theirs = in_processes("bench.redis_frames:their_read", [(url, _their_folder(), entries // 10)], python=python)
    return read(url, entries), theirs


def _against_redis_py(scale: float) -> tuple[Job, Job]:
    entries = int(1_000_000 * scale)
    url = _filled(entries)
    return iterate(url, entries // 4), by_redis_py(url, entries // 4)


CASES = [
    Case("read_stream to Arrow (Redis)", "draining the raw socket", 0.6, _against_the_socket, needs="redis"),
    Case("read_stream to Arrow (Redis)", "polars-redis read_stream", 8, _against_polars_redis, needs="redis"),
    Case(
        "iter_stream in batches of 1,000, a group, acks (Redis)",
        "redis-py xreadgroup and xack into dicts",
        1.3,
        _against_redis_py,
        needs="redis",
    ),
]
