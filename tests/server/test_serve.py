"""`weft serve` as a process: how it starts, answers, loses a worker, and ends."""

from __future__ import annotations

import os
import signal

ORDERS = """
    @weft.stream(fields={"n": "int64"})
    def orders(): ...
"""


def test_publishes_and_reads(server):
    served = server(ORDERS)
    done = served.publish("orders", {"n": 1})
    assert done["status"] == "accepted"
    assert [event["n"] for event in served.events("orders")] == [1]


def test_stops_on_a_signal(server):
    served = server(ORDERS, "--workers", "2")
    served.publish("orders", {"n": 1})
    assert len(served.workers()) == 2
    assert served.stop() == 0
    assert served.log[-1]["message"] == "the service has stopped"


def test_starts_a_killed_worker_again(server):
    served = server(ORDERS)
    for n in range(3):
        served.publish("orders", {"n": n})
        (worker,) = served.workers()
        os.kill(worker, signal.SIGKILL)
        # On one socket for all of them: what connects meanwhile waits, and is not refused.
        served.client.close()
        del served.client
        assert served.client.get("/healthz").status_code == 200
    assert [event["n"] for event in served.events("orders")] == [0, 1, 2]
