"""`/metrics`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from servers import wait_until

CLICKS = """
@weft.stream
def clicks(): ...
"""
CLOSED = """
@weft.stream(auth={"type": "bearer", "token": "s3cret"})
def closed(): ...
"""
PUBLISH = "/api/v1/streams/{name}"


def samples(served: Any, **headers: str) -> dict[tuple[str, ...], float]:
    """Name and values of the labels of each sample, and its value."""
    answer = served.client.get("/metrics", headers=headers)
    assert answer.status_code == 200
    return {
        (each.name, *each.labels.values()): each.value
        for family in text_string_to_metric_families(answer.text)
        for each in family.samples
    }


@pytest.mark.brief("sqlite", "postgres")
@pytest.mark.parametrize("system", ["sqlite", "postgres", "mysql"], indirect=True)
def test_requests_and_events_are_counted(server: Callable[..., Any], system: Any) -> None:
    served = server(CLICKS, env={"WEFT_DSN": system.url})
    url = "/api/v1/streams/clicks"
    served.publish("clicks", [{"n": 1}, {"n": 2}])
    for _ in range(2):
        served.client.post(url, json={"n": 3}, headers={"idempotency-key": "k"})
    served.client.post(url, content=b"{", headers={"content-type": "application/json"})
    served.client.post(url + "/consume", json={"consumer": "slow", "batch_size": 1})
    found = samples(served)
    assert found["weft_http_requests_total", "POST", PUBLISH, "202"] == 3
    assert found["weft_http_requests_total", "POST", PUBLISH, "400"] == 1
    assert found["weft_http_request_seconds_count", "POST", PUBLISH] == 4
    assert found["weft_events_published_total", "clicks"] == 3
    assert found["weft_published_bytes_total", "clicks"] == len('[{"n":1},{"n":2}]') + 2 * len('{"n":3}')
    assert found["weft_stream_head", "clicks"] == 3
    assert found["weft_stream_rows", "clicks"] == 3
    assert found["weft_stream_lag", "clicks"] == 2
    assert found["weft_stream_up", "clicks"] == 1


def test_a_client_chooses_no_label(server: Callable[..., Any]) -> None:
    client = server(CLICKS).client
    client.get("/evil-path")
    client.post("/api/v1/streams/evil-stream", json={})
    client.request("PROPFIND", "/healthz")
    client.post("/api/v1/streams/clicks/consume", json={"consumer": "evil-consumer"})
    text = client.get("/metrics").text
    assert "evil" not in text and "PROPFIND" not in text
    assert 'weft_http_requests_total{method="GET",route="none",status="404"} 1.0' in text
    assert 'weft_http_requests_total{method="other",route="/healthz",status="405"} 1.0' in text


def test_they_are_for_those_who_may_read_every_stream(server: Callable[..., Any]) -> None:
    served = server(CLICKS + CLOSED)
    assert served.client.get("/metrics").status_code == 403
    assert ("weft_stream_head", "closed") in samples(served, authorization="Bearer s3cret")


@pytest.mark.timing
def test_workers_are_added_up_and_the_dead_have_no_subscribers(server: Callable[..., Any]) -> None:
    served = server(CLICKS, "--workers", "2")
    for _ in range(20):
        served.publish("clicks", {"n": 1})
    assert samples(served)["weft_events_published_total", "clicks"] == 20
    with served.client.stream("GET", "/api/v1/streams/clicks/subscribe") as subscribed:
        lines = subscribed.iter_lines()
        assert next(lines) == ": subscribed"
        assert samples(served)["weft_subscribers", "clicks"] == 1
        killed = served.workers()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
    served.client.close()
    served.__dict__.pop("client")
    wait_until(lambda: not set(killed) & set(served.workers()), "the workers to be replaced")
    found = samples(served)
    assert found.get(("weft_subscribers", "clicks"), 0) == 0
    assert found["weft_events_published_total", "clicks"] == 20
