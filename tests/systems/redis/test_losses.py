"""A server that lost something: all of it, a key that Weft keeps its books in, or its last moments."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

import weft
from servers import wait_until
from weft.project import Project
from weft.types import FieldType
from workers import declare, log_of

FIELDS = {"n": "int64", "price": "decimal(10,2)"}


# ---------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize("drift", ["quarantine", "evolve", "reject"])
@pytest.mark.parametrize("lost", ["everything", "fields"])
def test_types_outlive_the_server_that_kept_them(streams: Project, client: Any, drift: str, lost: str) -> None:
    stream = declare(fields=FIELDS, on_schema_drift=drift)
    weft.publish_sync(stream, {"n": 1, "price": "1.50"})
    log = log_of(stream)
    client.flushdb() if lost == "everything" else client.delete(log.keys.fields)
    weft.publish_sync(stream, {"n": 2, "price": "2.50"})
    client.xadd("orders", {"n": "3", "price": "3.5", "other": "x"})
    events = [event for event in weft.consume_sync(stream, "worker") if event["n"] != 1]
    assert [(event["n"], event["price"]) for event in events] == [(2, Decimal("2.50")), (3, Decimal("3.50"))]
    weft.publish_sync(stream, {"n": 4, "price": "4.50"})
    stored = type(log)(log.store, log.schema, log.name).fields()
    assert stored == {name: FieldType.parse(kind) for name, kind in FIELDS.items()}
    assert ("events", "orders") in log.store.names()


def test_fields_that_events_brought_outlive_a_flush(streams: Project, client: Any) -> None:
    """Also where nobody else has them: the first publish after it gives them back."""
    stream = declare(on_schema_drift="evolve")
    weft.publish_sync(stream, {"n": 1, "name": "a"})
    log = log_of(stream)
    known = log.fields()
    client.flushdb()
    weft.publish_sync(stream, {"n": 2})
    assert type(log)(log.store, log.schema, log.name).fields() == known
    assert ("events", "orders") in log.store.names()


# ---------------------------------------------------------------------------------------------------------------- books


@pytest.mark.timing
@pytest.mark.brief("redis-held")
@pytest.mark.parametrize("lost", ["held", "leases", "ends", "returned", "reasons"])
def test_no_event_is_lost_with_a_key_of_the_books(streams: Project, client: Any, lost: str) -> None:
    """Evicted, or deleted by hand: the group's pending entries are in Redis itself."""
    stream = declare(fields={"n": "int64"})
    weft.publish_sync(stream, [{"n": n} for n in range(6)])
    events = weft.consume_sync(stream, "worker", 4, member="a", lease=1)
    weft.nack_sync(stream, "worker", events[:2], reason="no")
    client.delete(f"weft:{{orders}}:{lost}:worker")
    found: set[int] = set()
    while len(found) < 6:
        found |= {event["n"] for event in weft.consume_sync(stream, "worker", member="b", lease=0.02, wait=1)}
    assert found == set(range(6))
    weft.ack_sync(stream, "worker", weft.consume_sync(stream, "worker", member="b"))
    assert client.xpending("orders", "worker")["pending"] == 0
    assert weft.consume_sync(stream, "worker", member="b") == []
    assert client.keys("weft:{orders}:*:worker") == []


# -------------------------------------------------------------------------------------------------------------- offsets


def publish_ahead(client: Any, stream: Any) -> int:
    """An event whose offset is ahead of the clock, as those of a server are whose clock is."""
    client.xadd("orders", {"n": 0}, id=f"{int(datetime.now(UTC).timestamp() * 1000) + 3_600_000}-0")
    found: int = weft.publish_sync(stream, {"n": 1})["last_rowid"]
    return found


def test_offsets_of_a_deleted_stream_are_not_given_again(streams: Project, client: Any) -> None:
    stream = declare(fields={"n": "int64"})
    before = publish_ahead(client, stream)
    log = log_of(stream)
    client.delete("orders")
    assert log.head() == before
    log.highest = 0  # as another process
    assert weft.publish_sync(stream, [{"n": 2}, {"n": 3}])["first_rowid"] > before
    assert [event["n"] for event in weft.consume_sync(stream, "worker")] == [2, 3]


def test_readers_of_a_stream_that_others_made_again_with_lower_ids(streams: Project, client: Any, caplog: Any) -> None:
    """They are told, and go on with what is added to it."""
    stream = declare(fields={"n": "int64"})
    weft.publish_sync(stream, {"n": 0})
    connection = weft.get_connection("default")

    async def listen() -> list[int]:
        async with connection.xconsumer(streams=[stream], timeout=60_000) as consumer, weft.subscribe(stream) as live:
            with weft.iter_stream("default", stream, start_id="$") as batches:
                client.delete("orders")
                client.xadd("orders", {"n": 1}, id="5-1")
                with pytest.raises(weft.EventsLostError, match="was created again"):
                    await consumer.get_entry()
                with pytest.raises(weft.EventsLostError, match="was created again"):
                    await anext(live)
                batch = asyncio.create_task(asyncio.to_thread(next, batches))
                await asyncio.to_thread(wait_until, lambda: "are not read" in caplog.text, "the warning", 120)
                client.xadd("orders", {"n": 2}, id="5-2")
                found = [(await consumer.get_entry())[1].field_values["n"], (await anext(live))["n"]]
                return [*found, *(await batch)["n"]]

    assert asyncio.run(asyncio.wait_for(listen(), 300)) == [2, 2, 2]


def test_a_server_that_went_back(streams: Project, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Subscribers go on with the next publish: its offsets are after those they saw."""
    stream = declare(fields={"n": "int64"})

    async def listen() -> list[int]:
        async with weft.subscribe(stream) as live:
            before = await asyncio.to_thread(publish_ahead, client, stream)
            found = [(await anext(live))["n"], (await anext(live))["n"]]
            await asyncio.to_thread(client.flushdb)
            assert await asyncio.to_thread(log_of(stream).head) < before
            result = await weft.publish(stream, {"n": 2})
            assert result["first_rowid"] > before
            return [*found, (await asyncio.wait_for(anext(live), 20))["n"]]

    assert asyncio.run(listen()) == [0, 1, 2]
    assert "The server lost its last events" in caplog.text


def test_to_delete_a_stream_is_no_loss(streams: Project, caplog: pytest.LogCaptureFixture) -> None:
    stream = declare(fields={"n": "int64"})
    weft.publish_sync(stream, {"n": 1})
    weft.delete_stream_sync(stream)
    assert weft.consume_sync(stream, "worker") == []
    weft.publish_sync(stream, {"n": 2})
    assert [event["n"] for event in weft.consume_sync(stream, "worker")] == [2]
    assert log_of(stream).head() > 0
    assert "lost its last events" not in caplog.text


def test_a_group_that_is_removed_while_groups_are_listed(
    streams: Project, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = declare(fields={"n": "int64"})
    weft.publish_sync(stream, {"n": 1})
    weft.consume_sync(stream, "worker")
    store = log_of(stream).store
    script = store.script

    def removing(name: str, *arguments: Any) -> Any:
        if name == "holders":
            client.xgroup_destroy("orders", "worker")
        return script(name, *arguments)

    monkeypatch.setattr(store, "script", removing)
    assert [(group["consumer"], group["members"]) for group in weft.groups_sync(stream)] == [("worker", [])]
    assert weft.groups_sync(stream) == []
