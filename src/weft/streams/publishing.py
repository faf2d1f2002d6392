"""`publish`: validate, encode, and wait for a commit that many share."""

from __future__ import annotations

import os
from typing import Any

from weft.streams import retention
from weft.streams.declare import Stream
from weft.streams.encode import Encoded, as_events, encode, encode_quickly
from weft.streams.runtime import Opened, in_thread, open_stream, opened
from weft.systems.base import Connection
from weft.systems.log import Appended, Batch
from weft.systems.sql.store import key_of

# A longer list is encoded beside the event loop, so as not to hold it up for more than a few milliseconds.
_INLINE_EVENTS = 2_000


async def publish(stream: str | Stream, events: Any, *, connection: str | Connection | None = None) -> dict[str, Any]:
    """Append one event (a dict) or a list of events to a stream, and return once they are durable.

    All or nothing: one event that does not fit raises `SchemaError` and nothing is stored. The result names the
    `publish_id`, the first and
    last `_weft_rowid`, and how many events were received, deduplicated and quarantined.
    """
    ready = opened(stream, connection)
    if ready is None:
        ready = await in_thread(open_stream, stream, connection)
    found = as_events(events, ready.stream)
    encoded = None
    if found and len(found) <= _INLINE_EVENTS:
        encoded = encode_quickly(ready.stream, ready.log, found)
    if encoded is None:
        encoded = await in_thread(_encode, ready, found)
    publish_id = _new_id()
    batches = _batches(ready, found, encoded, publish_id)
    results = await ready.hub.committer(ready.stream).publish_async(batches) if batches else []
    if retention.due(ready):
        ready.hub.in_background(retention.enforce_quietly, ready)
    return _result(ready.stream, len(found), encoded, publish_id, results)


def publish_sync(stream: str | Stream, events: Any, *, connection: str | Connection | None = None) -> dict[str, Any]:
    """`publish` for code without an event loop."""
    ready = opened(stream, connection) or open_stream(stream, connection)
    found = as_events(events, ready.stream)
    encoded = _encode(ready, found)
    publish_id = _new_id()
    batches = _batches(ready, found, encoded, publish_id)
    results = ready.hub.committer(ready.stream).publish(batches) if batches else []
    if retention.due(ready):
        ready.hub.in_background(retention.enforce_quietly, ready)
    return _result(ready.stream, len(found), encoded, publish_id, results)


def _encode(ready: Opened, events: list[dict[str, Any]]) -> Encoded:
    quick = encode_quickly(ready.stream, ready.log, events) if events else None
    return quick or encode(ready.stream, ready.log, events)


def _new_id() -> str:
    """A random UUID, made without the cost of `uuid.UUID`."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _batches(ready: Opened, events: list[dict[str, Any]], encoded: Encoded, publish_id: str) -> list[Batch]:
    """The stream's own batch, and the quarantine's: they are stored together or not at all."""
    stream = ready.stream
    batches = []
    if encoded.count:
        batch = Batch(ready.log, publish_id, encoded.columns, encoded.values, encoded.count, encoded.extra)
        if stream.key_fields:
            batch.keys = _keys(stream.key_fields, encoded, encoded.kept if encoded.kept is not None else events)
            batch.key_horizon = stream.key_horizon_days * 86_400
        batches.append(batch)
    if encoded.quarantined:
        place = open_stream(stream.quarantine, ready.hub.connection)
        record = encode(place.stream, place.log, encoded.quarantined)
        batches.append(Batch(place.log, publish_id, record.columns, record.values, record.count))
    return batches


def publish_once(stream: Stream, connection: Connection, records: list[dict[str, Any]], key_field: str) -> None:
    """Store records under a key of their own, so that doing it again after a crash stores nothing twice."""
    ready = open_stream(stream, connection)
    encoded = _encode(ready, records)
    batches = _batches(ready, records, encoded, _new_id())
    for batch in batches[: 1 if encoded.count else 0]:
        batch.keys = _keys((key_field,), encoded, encoded.kept if encoded.kept is not None else records)
        batch.key_horizon = ready.stream.key_horizon_days * 86_400
    ready.hub.committer(ready.stream).publish(batches)


def _keys(names: tuple[str, ...], encoded: Encoded, events: list[dict[str, Any]]) -> list[bytes | None]:
    """An event with a null among its key fields has no key: it is never a duplicate."""
    columns = [
        encoded.values[encoded.columns.index(name)]
        if name in encoded.columns
        else [event.get(name) for event in events]
        for name in names
    ]
    return [None if None in values else key_of(values) for values in zip(*columns, strict=True)]


def _result(
    stream: Stream, received: int, encoded: Encoded, publish_id: str, results: list[Appended]
) -> dict[str, Any]:
    stored = results[0] if encoded.count and results else None
    return {
        "status": "accepted",
        "stream": stream.name,
        "rows_received": received,
        "publish_id": publish_id,
        "triggered_models": [],
        "first_rowid": stored.first if stored else None,
        "last_rowid": stored.last if stored else None,
        "rows_deduplicated": stored.deduplicated if stored else 0,
        "rows_quarantined": len(encoded.quarantined),
    }
