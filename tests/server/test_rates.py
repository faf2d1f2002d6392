"""Rate limits: token buckets that all workers of a service share."""

from __future__ import annotations

import math
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import warm_python
from weft.server.rates import Buckets, Rate

# A second of a busy machine must not refill a bucket.
SLOW = Rate(0.001, 3)


@pytest.fixture
def buckets(tmp_path: Path) -> Buckets:
    return Buckets(tmp_path / "buckets")


def test_a_burst_then_a_wait(buckets: Buckets) -> None:
    assert [buckets.take("a", SLOW) for _ in range(3)] == [0, 0, 0]
    wait = buckets.take("a", SLOW)
    assert 900 < wait <= 1000
    assert 900 < buckets.wait("a", SLOW) <= wait


def test_what_is_refused_takes_nothing(buckets: Buckets) -> None:
    for _ in range(100):
        last = buckets.take("a", SLOW)
    assert last <= 1000


@pytest.mark.timing
def test_it_refills(buckets: Buckets) -> None:
    fast = Rate(50, 2)
    assert [buckets.take("a", fast) for _ in range(2)] == [0, 0]
    while wait := buckets.take("a", fast):
        assert wait <= 1 / 50
        time.sleep(wait)
    assert buckets.wait("b", fast) == 0


def test_names_have_buckets_of_their_own(buckets: Buckets) -> None:
    # More than there are rows: some share one.
    for number in range(3000):
        assert buckets.take(f"stream {number}", Rate(0.001, 1)) == 0
    refused = sum(buckets.take(f"stream {number}", Rate(0.001, 1)) > 0 for number in range(3000))
    assert refused >= 2990


def test_a_crowd_of_names_only_pushes_out_the_fullest(buckets: Buckets) -> None:
    for _ in range(3):
        buckets.take("a", SLOW)
    for number in range(30_000):
        buckets.take(f"crowd {number}", Rate(1000, 10))
    assert buckets.take("a", SLOW) > 0


@pytest.mark.parametrize("ahead", [1e6, 1e300, math.inf, -1e6])
def test_a_time_of_another_clock_closes_no_bucket_for_long(buckets: Buckets, tmp_path: Path, ahead: float) -> None:
    buckets.take("a", SLOW)
    stored = (tmp_path / "buckets").read_bytes()
    at = next(at for at in range(16, len(stored), 24) if struct.unpack_from("=d", stored, at)[0])
    with open(tmp_path / "buckets", "r+b") as file:
        file.seek(at)
        file.write(struct.pack("=d", time.clock_gettime(time.CLOCK_MONOTONIC) + ahead))
    # A thousand seconds, as far as sums of floating-point numbers say it.
    assert buckets.take("a", SLOW) < 1000.001


TAKE = """
import sys
from pathlib import Path
from weft.server.rates import Buckets, Rate
buckets = Buckets(Path(sys.argv[1]))
print(sum(not buckets.take("a", Rate(0.001, 100)) for _ in range(2000)))
"""


@pytest.mark.timing
def test_processes_share_a_bucket(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKE, str(tmp_path / "buckets")]
    running = [warm_python.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sum(int(each.communicate()[0]) for each in running) == 100


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.timing
def test_a_process_that_holds_a_bucket_holds_up_nobody(buckets: Buckets, tmp_path: Path) -> None:
    """One that was stopped at the wrong moment. Its lock ends with it."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "buckets")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "held\n"
        holding.send_signal(signal.SIGSTOP)
        assert [buckets.take("a", SLOW) > 0 for _ in range(100)] == [False] * 3 + [True] * 97
        holding.send_signal(signal.SIGKILL)
    taken = [buckets._lock(0), buckets.take("b", SLOW)]
    assert taken == [True, 0]


STREAMS = """
@weft.stream(rate_limit={"requests_per_second": 0.01, "burst": 5})
def few(): ...

@weft.stream
def many(): ...
"""


@pytest.mark.timing
def test_two_workers_have_one_limit(server: Callable[..., Any]) -> None:
    served = server(STREAMS, "--workers", "2")

    def publish(number: int) -> Any:
        with served.new_client() as client:  # a connection each, so that both workers are asked
            return client.post("/api/v1/streams/few", json={"n": number})

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(publish, range(40)))
    assert [each.status_code for each in answers].count(202) == 5
    refused = next(each for each in answers if each.status_code == 429)
    body = refused.json()
    assert body["type"] == "urn:weft:problem:rate-limited"
    assert 0 < body["retry_after"] <= 100
    assert int(refused.headers["retry-after"]) == math.ceil(body["retry_after"])
    assert refused.headers["content-type"] == "application/problem+json"
    # Readers are not refused because of those who publish, nor is another stream.
    assert len(served.events("few")) == 5
    served.publish("many", {"n": 1})


def test_readers_have_a_limit_too(server: Callable[..., Any]) -> None:
    served = server(STREAMS)
    codes = [served.client.get("/api/v1/streams/few").status_code for _ in range(7)]
    assert codes == [200] * 5 + [429] * 2
    served.publish("few", {"n": 1})
