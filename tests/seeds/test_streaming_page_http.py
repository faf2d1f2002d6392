"""The HTTP chapters of the streaming page that Weft's surface follows: its curl commands as written there, with our
name in place of theirs and the port of the test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from served import Served, start

STREAMS = """
    from weft import stream

    @stream(name="user_events", schema="events", fields={"user_id": "string", "action": "string"})
    def user_events():
        pass

    @stream(
        name="webhooks",
        auth={"type": "bearer", "token": "sk_live_abc123"},
    )
    def webhooks():
        pass

    @stream(
        name="partner_events",
        auth={"type": "api_key", "header": "X-API-Key", "key": "partner_key_abc"},
    )
    def partner_events():
        pass

    @stream(
        name="high_volume",
        rate_limit={"requests_per_second": 1},
    )
    def high_volume():
        pass

    @stream(
        name="typed_events",
        fields={"user_id": "string", "amount": "float64", "currency": "string"},
        validate_schema=True,
    )
    def typed_events():
        pass
"""


@pytest.fixture
def served(tmp_path: Any) -> Iterator[Served]:
    served = start(tmp_path / "served", STREAMS)
    try:
        assert served.url
        yield served
    finally:
        code = served.stop()
    assert code == 0


def shell(served: Served, command: str) -> tuple[int, Any]:
    """What a command prints, and the status code."""
    command = command.replace("http://localhost:8080", served.url).replace("curl ", "curl -sS -w '\n%{http_code}' ", 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    body, _, code = done.stdout.rpartition("\n")
    return int(code), json.loads(body)


def test_http_endpoints(served: Served) -> None:
    # Publish: a single event
    code, done = shell(
        served,
        """curl -X POST http://localhost:8080/api/v1/streams/user_events \
  -H "Content-Type: application/json" \
  -d '{"user_id": "u_123", "action": "click"}'""",
    )
    assert (code, done["status"], done["stream"], done["rows_received"]) == (202, "accepted", "user_events", 1)

    # Subscribe
    subscriber = subprocess.Popen(
        ["curl", "-sN", f"{served.url}/api/v1/streams/user_events/subscribe"], stdout=subprocess.PIPE, text=True
    )
    assert subscriber.stdout
    assert subscriber.stdout.readline() == ": subscribed\n"

    # Batch
    code, done = shell(
        served,
        """curl -X POST http://localhost:8080/api/v1/streams/user_events \
  -H "Content-Type: application/json" \
  -d '[{"user_id": "u_123", "action": "click"}, {"user_id": "u_124", "action": "signup"}]'""",
    )
    assert (code, done["rows_received"]) == (202, 2)

    lines = [subscriber.stdout.readline().strip() for _ in range(5)]
    subscriber.terminate()
    subscriber.communicate()
    assert lines[3] == "event: stream.event"
    data = json.loads(lines[4].removeprefix("data: "))
    assert data["stream"] == "user_events"
    assert data["event"].items() >= {"user_id": "u_123", "action": "click"}.items()

    # Consume a batch
    consume = """curl -X POST http://localhost:8080/api/v1/streams/user_events/consume \
  -H "Content-Type: application/json" \
  -d '{"consumer": "analytics_worker", "batch_size": 100}'"""
    code, batch = shell(served, consume)
    assert code == 200
    assert (batch["stream"], batch["consumer"], batch["count"]) == ("user_events", "analytics_worker", 3)
    assert batch["events"][0].items() >= {"user_id": "u_123", "action": "click", "_weft_rowid": 1}.items()

    # Acknowledge
    code, done = shell(
        served,
        """curl -X POST http://localhost:8080/api/v1/streams/user_events/ack \
  -H "Content-Type: application/json" \
  -d '{"consumer": "analytics_worker", "events": [{"_weft_rowid": 1}]}'""",
    )
    assert (code, done["acknowledged"]) == (200, 1)

    # Endpoint summary
    code, listed = shell(served, "curl http://localhost:8080/api/v1/streams")
    assert code == 200
    # A stream with credentials of its own is shown to those who have them.
    assert "user_events" in [each["name"] for each in listed["streams"]]
    code, details = shell(served, "curl http://localhost:8080/api/v1/streams/user_events")
    assert (code, details["name"], details["schema"], details["row_count"]) == (200, "user_events", "events", 3)


def test_authentication(served: Served) -> None:
    post = """curl -X POST http://localhost:8080/api/v1/streams/{} \
  -H "Content-Type: application/json" -d '{{"n": 1}}' {}"""
    assert shell(served, post.format("webhooks", ""))[0] == 401
    assert shell(served, post.format("webhooks", '-H "Authorization: Bearer wrong"'))[0] == 401
    assert shell(served, post.format("webhooks", '-H "Authorization: Bearer sk_live_abc123"'))[0] == 202
    assert shell(served, post.format("partner_events", ""))[0] == 401
    assert shell(served, post.format("partner_events", '-H "X-API-Key: partner_key_abc"'))[0] == 202


@pytest.mark.timing
def test_rate_limiting(served: Served) -> None:
    post = 'curl -X POST http://localhost:8080/api/v1/streams/high_volume -H "Content-Type: application/json" -d {}'
    answers = [shell(served, post) for _ in range(2)]
    while answers[-1][0] == 202 and len(answers) < 200:  # a slow machine may take as long as the limit allows
        answers.append(served_at_once(served))
    code, problem = answers[-1]
    assert code == 429
    assert problem["retry_after"] > 0


def served_at_once(served: Served) -> tuple[int, Any]:
    answer = served.client.post("/api/v1/streams/high_volume", json={})
    return answer.status_code, answer.json()


def test_schema_validation(served: Served) -> None:
    post = (
        """curl -X POST http://localhost:8080/api/v1/streams/typed_events -H "Content-Type: application/json" -d '{}'"""
    )
    assert shell(served, post.format('{"user_id": "u_1", "amount": 9.99, "currency": "GBP"}'))[0] == 202
    code, problem = shell(served, post.format('{"user_id": "u_1", "amount": 9.99}'))
    assert (code, problem["field"]) == (422, "currency")
