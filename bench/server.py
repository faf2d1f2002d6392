"""The service: what HTTP costs beside the database, how soon a subscriber is told, and what a thousand of them take.

Clients are processes of their own: wrk for requests, and for subscribers one that reads what the sockets have.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import weft
from bench.harness import Case, SkippedError
from bench.processes import in_processes
from bench.streams_sqlite import event, fresh_stream

Job = Callable[[], int]
CONNECTIONS = 64
BATCH = 100
BATCH_CONNECTIONS = 8
SUBSCRIBERS, RATE = 10, 100
MANY_SUBSCRIBERS, MANY_RATE = 1000, 20
_folder = tempfile.TemporaryDirectory(prefix="weft-bench-", ignore_cleanup_errors=True)
_serving: list[subprocess.Popen[str]] = []


def _serve() -> tuple[int, int]:
    """A service with an empty stream; its port and its process id."""
    _end_serving()
    folder = tempfile.mkdtemp(dir=_folder.name)
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.server_process", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    _serving.append(process)
    assert process.stdout
    return int(process.stdout.readline()), process.pid


@atexit.register
def _end_serving() -> None:
    while _serving:
        _serving.pop().communicate()


def _wrk(port: int, path: str, body: str, connections: int, seconds: int, events: int) -> Job:
    if shutil.which("wrk") is None:
        raise SkippedError("wrk is not installed (sudo apt-get install --no-install-recommends wrk)")
    script = Path(tempfile.mkdtemp(dir=_folder.name)) / "post.lua"
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = {json.dumps(body)}\nwrk.headers['Content-Type'] = 'application/json'\n"
    )
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}", "-s", str(script), f"http://127.0.0.1:{port}{path}"]

    def job() -> int:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if "Non-2xx" in printed or "Socket errors" in printed:
            raise RuntimeError(printed)
        found = re.search(r"(\d+) requests in", printed)
        assert found, printed
        return int(found[1]) * events

    return job


def _seconds(scale: float) -> int:
    return max(2, round(8 * scale))


def _single(scale: float) -> tuple[Job, Job]:
    port, _ = _serve()
    body = json.dumps(event(1))
    paths = ("/api/v1/streams/orders", "/plain")
    ours, plain = (_wrk(port, path, body, CONNECTIONS, _seconds(scale), 1) for path in paths)
    return ours, plain


def in_process(seconds: float) -> Job:
    """Tasks that publish batches for so long."""
    stream = fresh_stream()
    batch = [event(i) for i in range(BATCH)]

    async def publisher(until: float) -> int:
        published = 0
        while time.perf_counter() < until:
            await weft.publish(stream, batch)
            published += BATCH
        return published

    async def all_of_them() -> int:
        until = time.perf_counter() + seconds
        return sum(await asyncio.gather(*(publisher(until) for _ in range(BATCH_CONNECTIONS))))

    return lambda: asyncio.run(all_of_them())


def _batches(scale: float) -> tuple[Job, Job]:
    port, _ = _serve()
    seconds = _seconds(scale)
    body = json.dumps([event(i) for i in range(BATCH)])
    ours = _wrk(port, "/api/v1/streams/orders", body, BATCH_CONNECTIONS, seconds, BATCH)
    return ours, in_processes("bench.server:in_process", [(seconds,)])


class Followers:
    """Subscribers in one process, and a publisher at a steady rate; each event carries when it was sent."""

    def __init__(self, port: int, count: int) -> None:
        self.port = port
        self.count = count
        self.received = 0
        self.delays: list[float] = []

    async def run(self, events: int, rate: float) -> None:
        """Publish so many; done when each subscriber has all of them."""
        ready = asyncio.Semaphore(0)
        following = [asyncio.create_task(self._follow(ready, events)) for _ in range(self.count)]
        for _ in following:
            await ready.acquire()
        await self._publish(events, rate)
        async with asyncio.timeout(60):
            await asyncio.gather(*following)

    async def _follow(self, ready: asyncio.Semaphore, events: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /api/v1/streams/orders/subscribe HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b": subscribed\n")
        ready.release()
        left = events
        while left:
            line = await reader.readline()
            if not line:
                raise RuntimeError("a subscriber was cut off")
            if line.startswith(b"data: "):
                sent = float(line.partition(b'"amount":')[2].partition(b",")[0])
                self.delays.append(time.time() - sent)
                self.received += 1
                left -= 1
        writer.close()

    async def _publish(self, events: int, rate: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        due = time.perf_counter()
        for n in range(events):
            body = json.dumps({**event(n), "amount": time.time()}).encode()
            head = "POST /api/v1/streams/orders HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 202"):
                raise RuntimeError(answer.decode())
            length = re.search(rb"content-length: (\d+)", answer)
            assert length
            await reader.readexactly(int(length[1]))
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        writer.close()


def follow(port: int, events: int, percentile: int) -> Job:
    """A run of a few subscribers: as many as there are such delays in the time that it takes."""

    def job() -> int:
        started = time.perf_counter()
        followers = Followers(port, SUBSCRIBERS)
        asyncio.run(followers.run(events, RATE))
        assert followers.received == SUBSCRIBERS * events
        delay = statistics.quantiles(followers.delays, n=100)[percentile - 1]
        return round((time.perf_counter() - started) / delay)

    return job


def _delay(percentile: int, wanted: float) -> Callable[[float], tuple[Job, Job]]:
    """Time a delivery against a pause of that length."""

    def prepare(scale: float) -> tuple[Job, Job]:
        port, _ = _serve()
        ours = in_processes("bench.server:follow", [(port, max(100, round(1000 * scale)), percentile)])

        def pause() -> int:
            time.sleep(wanted)
            return 1

        return ours, pause

    return prepare


def follow_many(port: int, server: int, seconds: int) -> Job:
    """A run of many subscribers; fails unless each gets everything. Gives the peak of the server's memory, in KiB."""

    def job() -> int:
        followers = Followers(port, MANY_SUBSCRIBERS)
        asyncio.run(followers.run(seconds * MANY_RATE, MANY_RATE))
        assert followers.received == MANY_SUBSCRIBERS * seconds * MANY_RATE
        return resident(server)

    return job


def resident(process: int) -> int:
    """The most memory that a process had, in KiB; to be read again it is set back."""
    status = Path(f"/proc/{process}/status").read_text()
    Path(f"/proc/{process}/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found
    return int(found[1])


def _many(scale: float) -> tuple[Job, Job]:
    """The peak of memory in a long run against that in a short one."""
    port, process = _serve()
    seconds = max(10, round(60 * scale))
    short, long = (
        in_processes("bench.server:follow_many", [(port, process, each)]) for each in (seconds // 6, seconds)
    )
    return _timed_as(long), _timed_as(short)


def _timed_as(job: Job) -> Job:
    """A job whose time an event is what another gives."""

    def timed() -> int:
        started = time.perf_counter()
        given = job()
        return round((time.perf_counter() - started) * 1e9 / given)

    return timed


CASES = [
    Case(
        f"durable publish over HTTP, one event a request, {CONNECTIONS} connections",
        "the same server answering 202 without storing",
        0.5,
        _single,
    ),
    Case(
        f"durable publish over HTTP, {BATCH} events a request, {BATCH_CONNECTIONS} connections",
        f"publish of the same batches in a process, {BATCH_CONNECTIONS} tasks",
        0.5,
        _batches,
    ),
    Case(
        f"publish to delivery, {RATE} events/s, {SUBSCRIBERS} subscribers, median (time)",
        "a pause of 10 ms",
        1.0,
        _delay(50, 0.010),
        at_most=True,
        rounds=3,
    ),
    Case(
        f"publish to delivery, {RATE} events/s, {SUBSCRIBERS} subscribers, 99th percentile (time)",
        "a pause of 50 ms",
        1.0,
        _delay(99, 0.050),
        at_most=True,
        rounds=3,
    ),
    Case(
        f"{MANY_SUBSCRIBERS:,} subscribers at {MANY_RATE} events/s for 60 s, all delivered: peak memory",
        "the same for 10 s",
        1.1,
        _many,
        at_most=True,
        rounds=1,
    ),
]
