"""`/metrics`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import servers
from collector import attributes, collector
from served import start
from servers import wait_until
from weft.errors import SettingsError
from weft.server.serve import _of_builder

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


@pytest.mark.timing
def test_a_collector_gets_them_too(server: Callable[..., Any]) -> None:
    """One of the workers sends what all of them have counted."""

    def sent() -> dict[str, Any]:
        for _, request in collected.received[-1:]:
            return {each.name: each for each in request.resource_metrics[0].scope_metrics[0].metrics}
        return {}

    def published() -> float:
        points = sent()["weft_events_published"].sum.data_points if "weft_events_published" in sent() else ()
        return sum(each.as_double for each in points)

    def head() -> list[int]:
        return [each.as_int for each in sent()["weft_stream_head"].gauge.data_points]

    with collector() as collected:
        often = {"OTEL_METRIC_EXPORT_INTERVAL": "200"}
        served = server(CLICKS, "--workers", "2", "--metrics", collected.url, env=often)
        for number in range(20):  # whichever worker answers
            with served.new_client() as client:
                assert client.post("/api/v1/streams/clicks", json={"n": number}).status_code == 202
        # The state of streams is read every few seconds at most.
        wait_until(lambda: published() == 20 and head() == [20], "all events", 120)
        assert served.stop() == 0
        found = sent()
    assert {path for path, _ in collected.received} == {"/v1/metrics"}
    seconds = [
        each
        for each in found["weft_http_request_seconds"].histogram.data_points
        if attributes(each) == {"route": PUBLISH, "method": "POST"}
    ]
    assert [each.count for each in seconds] == [20]


def test_another_port(server: Callable[..., Any]) -> None:
    port = servers.free_port()
    served = server(CLICKS, "--metrics", f"prometheus://127.0.0.1:{port}")
    served.publish("clicks", [{"n": 1}, {"n": 2}])
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert 'weft_events_published_total{stream="clicks"} 2.0' in text
    assert 'weft_stream_head{stream="clicks"} 2.0' in text


def test_a_wrong_sink_ends_the_command(tmp_path: Path) -> None:
    served = start(tmp_path / "served", CLICKS, "--metrics", "otpl://collector")
    assert served.process.wait(120) == 1
    text = served.log_file.read_text()
    assert "There is no metrics sink otpl://" in text and "Did you mean 'otlp'" in text


def test_the_process_that_builds_models_has_the_next_port() -> None:
    assert _of_builder(None) == {}
    assert _of_builder("null://") == {"WEFT_METRICS": "null://"}
    assert _of_builder("prometheus://[::1]:9100") == {"WEFT_METRICS": "prometheus://[::1]:9101"}
    with pytest.raises(SettingsError, match="none after 65535"):
        _of_builder("prometheus://:65535")
