"""The examples of the streaming page that Weft's surface follows, as written there with our name in place of theirs.

HTTP, auth and rate limits are in test_streaming_page_http.py, models in test_streaming_page_models.py.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any

import pytest

import weft
from weft import ack, consume, publish, publish_sync, stream, subscribe
from weft.project import Project, use
from weft.streams import Stream, close
from weft.streams.runtime import open_stream


@pytest.fixture(autouse=True)
def own_project(system: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WEFT_DSN", system.url)
    with use(Project()) as fresh:
        yield
        close(fresh)


@pytest.fixture
def user_events(own_project: None) -> Stream:
    @stream(
        name="user_events",
        schema="events",
        connection="default",
        cursor="rowid",
        fields={"user_id": "string", "action": "string", "timestamp": "timestamp"},
        description="User interaction events",
        tags=["ingestion", "clickstream"],
        owner="data-team",
    )
    def user_events():
        pass

    return user_events


# Defining a Stream


def test_declared(user_events: Stream) -> None:
    assert (user_events.name, user_events.schema, user_events.connection) == ("user_events", "events", "default")
    assert (user_events.description, user_events.owner) == ("User interaction events", "data-team")
    assert list(user_events.tags) == ["ingestion", "clickstream"]
    assert {name: str(kind) for name, kind in user_events.fields.items()} == {
        "user_id": "string",
        "action": "string",
        "timestamp": "timestamp",
    }


def test_defaults() -> None:
    parameters = inspect.signature(stream).parameters
    assert {name: each.default for name, each in parameters.items() if name in _DEFAULTS} == _DEFAULTS
    assert list(parameters["tags"].default) == []

    @stream()
    def clicks():
        pass

    assert (clicks.name, clicks.schema, clicks.cursor) == ("clicks", "events", "rowid")


_DEFAULTS = {
    "name": None,
    "schema": "events",
    "connection": None,
    "cursor": "rowid",
    "fields": None,
    "description": None,
    "owner": None,
    "auth": None,
    "rate_limit": None,
    "validate_schema": False,
    "retention": None,
}


# Publishing Events


async def test_publish_async(user_events: Stream) -> None:
    # Single event
    result = await publish("user_events", {"user_id": "u_123", "action": "click"})
    assert result["rows_received"] == 1

    # Batch of events
    result = await publish(
        "user_events",
        [
            {"user_id": "u_123", "action": "click"},
            {"user_id": "u_124", "action": "signup"},
        ],
    )
    assert result["rows_received"] == 2

    # Using the decorated function reference instead of a string name
    result = await publish(user_events, {"user_id": "u_123", "action": "click"})
    assert result["rows_received"] == 1
    events = await consume("user_events", "reader")
    assert [event["action"] for event in events] == ["click", "click", "signup", "click"]


def test_publish_sync(user_events: Stream) -> None:
    result = publish_sync("user_events", {"user_id": "u_123", "action": "click"})
    assert result["status"] == "accepted"


def test_publish_result(user_events: Stream) -> None:
    result = publish_sync(
        "user_events", [{"user_id": "u_123", "action": "click"}, {"user_id": "u_124", "action": "signup"}]
    )
    publish_id = result.pop("publish_id")
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", publish_id)
    assert result == {
        "status": "accepted",
        "stream": "user_events",
        "rows_received": 2,
        "triggered_models": [],
        # ours besides theirs
        "first_rowid": 1,
        "last_rowid": 2,
        "rows_deduplicated": 0,
        "rows_quarantined": 0,
    }
    event = weft.consume_sync("user_events", "reader")[1]
    assert event["_weft_publish_id"] == publish_id
    assert isinstance(event["_weft_published_at"], datetime)


# Consuming Events


async def _first(subscription: AsyncIterator[Any], number: int) -> list[Any]:
    async def take() -> list[Any]:
        taken = []
        async for item in subscription:
            taken.append(item)
            if len(taken) == number:
                break
        return taken

    return await asyncio.wait_for(take(), 20)


async def test_subscribe_one_event_at_a_time(user_events: Stream) -> None:
    events = subscribe("user_events")
    await publish("user_events", [{"action": "click"}, {"action": "signup"}])
    assert [event["action"] for event in await _first(events, 2)] == ["click", "signup"]


async def test_subscribe_batched(user_events: Stream) -> None:
    batches = subscribe("user_events", batch_size=10, timeout=5.0)
    await publish("user_events", [{"user_id": str(i)} for i in range(20)])
    assert [len(batch) for batch in await _first(batches, 2)] == [10, 10]


@pytest.mark.timing
async def test_subscribe_yields_a_partial_batch_after_the_timeout(user_events: Stream) -> None:
    batches = subscribe("user_events", batch_size=10, timeout=0.1)
    await publish("user_events", [{"user_id": str(i)} for i in range(3)])
    assert [len(batch) for batch in await _first(batches, 1)] == [3]


async def test_subscribe_with_filtering(user_events: Stream) -> None:
    events = subscribe("user_events", filter_fn=lambda e: e.get("action") == "signup")
    await publish("user_events", [{"action": "click"}, {"user_id": "u_124", "action": "signup"}])
    assert [event["user_id"] for event in await _first(events, 1)] == ["u_124"]


def test_subscribe_defaults() -> None:
    parameters = inspect.signature(subscribe).parameters
    assert [(name, parameters[name].default) for name in list(parameters)[1:4]] == [
        ("batch_size", 1),
        ("timeout", None),
        ("filter_fn", None),
    ]


async def test_consume_and_ack(user_events: Stream) -> None:
    await publish("user_events", [{"user_id": "u_123", "action": "click"}, {"user_id": "u_124", "action": "signup"}])
    processed = []

    # Pull a batch of unprocessed events
    events = await consume("user_events", "analytics_worker", batch_size=100)

    for event in events:
        processed.append(event["user_id"])

    # Acknowledge processing to advance the cursor
    await ack("user_events", "analytics_worker", events)

    assert processed == ["u_123", "u_124"]
    assert await consume("user_events", "analytics_worker", batch_size=100) == []
    # "Each consumer tracks its own cursor position"
    assert len(await consume("user_events", "another_worker")) == 2


async def test_ack_takes_offsets_alone(user_events: Stream) -> None:
    await publish("user_events", {"user_id": "u_123", "action": "click"})
    events = await consume("user_events", "analytics_worker")
    assert events[0]["_weft_rowid"] == 1
    await ack("user_events", "analytics_worker", [{"_weft_rowid": 1}])
    assert await consume("user_events", "analytics_worker") == []


async def test_consume_by_the_names_of_the_page(user_events: Stream) -> None:
    await publish("user_events", {"user_id": "u_123", "action": "click"})
    (event,) = await consume(stream_name="user_events", consumer_name="analytics_worker", batch_size=100)
    await ack("user_events", "analytics_worker", event)
    assert weft.consume_sync(stream_name=user_events, consumer_name="analytics_worker") == []
    with pytest.raises(weft.SettingsError, match="consume takes stream, or stream_name in its place: both given"):
        await consume("user_events", "analytics_worker", stream_name="user_events")
    with pytest.raises(weft.SettingsError, match="consume takes consumer, or consumer_name in its place: none given"):
        await consume("user_events")


def test_consume_defaults() -> None:
    parameters = inspect.signature(consume).parameters
    assert list(parameters)[:4] == ["stream", "consumer", "batch_size", "connection"]
    assert parameters["batch_size"].default == 100
    assert parameters["connection"].default is None


# Authentication, rate limiting, retention: declared here, and the last one enforced


def test_declared_with_auth() -> None:
    # Bearer token authentication
    @stream(
        name="webhooks",
        auth={"type": "bearer", "token": "sk_live_abc123"},
    )
    def webhooks():
        pass

    # API key authentication
    @stream(
        name="partner_events",
        auth={"type": "api_key", "header": "X-API-Key", "key": "partner_key_abc"},
    )
    def partner_events():
        pass

    assert webhooks.auth == {"type": "bearer", "token": "sk_live_abc123"}
    assert partner_events.auth == {"type": "api_key", "header": "X-API-Key", "key": "partner_key_abc"}
    assert "abc" not in repr(webhooks) + repr(partner_events)
    # "The programmatic publish() API bypasses it"
    assert publish_sync("webhooks", {"a": 1})["status"] == "accepted"


def test_declared_with_a_rate_limit() -> None:
    @stream(
        name="high_volume",
        rate_limit={"requests_per_second": 100},
    )
    def high_volume():
        pass

    assert high_volume.rate_limit == {"requests_per_second": 100}


def test_declared_with_retention() -> None:
    @stream(
        name="ephemeral_events",
        retention={"max_age_days": 30},
    )
    def ephemeral_events():
        pass

    @stream(
        name="bounded_events",
        retention={"max_rows": 1_000_000},
    )
    def bounded_events():
        pass

    assert ephemeral_events.retention == {"max_age_days": 30}
    assert bounded_events.retention == {"max_rows": 1_000_000}


# Schema Validation


async def test_schema_validation() -> None:
    @stream(
        name="typed_events",
        fields={"user_id": "string", "amount": "float64", "currency": "string"},
        validate_schema=True,
    )
    def typed_events():
        pass

    # This succeeds
    await publish("typed_events", {"user_id": "u_1", "amount": 9.99, "currency": "GBP"})

    # This raises ValueError -- missing "currency"
    with pytest.raises(ValueError, match="currency"):
        await publish("typed_events", {"user_id": "u_1", "amount": 9.99})


async def test_without_validation_any_shape_is_accepted_and_fields_make_the_table(user_events: Stream) -> None:
    await publish("user_events", {"something": {"else": True}})
    assert [*open_stream(user_events).log.fields()][:3] == ["user_id", "action", "timestamp"]
    event = (await consume("user_events", "reader"))[0]
    assert event["something"] == {"else": True}


# Tips


async def test_two_workers_with_the_same_name_compete(user_events: Stream) -> None:
    await publish("user_events", [{"user_id": str(i)} for i in range(10)])
    first = await consume("user_events", "worker", batch_size=5, member="one")
    second = await consume("user_events", "worker", batch_size=100, member="two")
    assert [event["user_id"] for event in first + second] == [str(i) for i in range(10)]
