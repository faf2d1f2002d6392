"""`publish`: validate, encode, and wait for a commit that many share."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from weft import hooks, tracing
from weft.errors import SettingsError, StorageError
from weft.project import current
from weft.streams import retention
from weft.streams.commit import Ticket
from weft.streams.declare import Stream
from weft.streams.encode import Encoded, as_events, encode, keys_of, to_batch
from weft.streams.runtime import OpenedStream, open_stream, open_stream_async, opened
from weft.systems.base import Connection
from weft.systems.log import Batch, Log


async def publish(
    stream: str | Stream,
    events: Any,
    *,
    connection: str | Connection | None = None,
    idempotency_key: str | None = None,
) -> dict[str, Any]:
    """Append one event (a dict) or a list of events to a stream, and return once they are durable.

    All or nothing: one event that does not fit raises `SchemaError` and nothing is stored. The result names the
    `publish_id`, the first and last `_weft_rowid`, and how many events were received, deduplicated and quarantined.
    `idempotency_key` names this publish: the same events under the same key again are duplicates, and other events
    under it raise `SettingsError`.
    """
    ready = opened(stream, connection) or await open_stream_async(stream, connection)
    return await publish_to(ready, events, idempotency_key)


async def publish_to(
    ready: OpenedStream, events: Any, idempotency_key: str | None = None, *, has_looked: bool = False
) -> dict[str, Any]:
    """Publish to a stream that is open. `has_looked`: the caller has just read the columns of its table again."""
    ticket = _ticket(ready, events, idempotency_key)
    ticket.has_looked = has_looked
    if ticket.events or ticket.key:  # a key names its events, also if there are none
        with tracing.publishing(ticket):
            if not _can_wait(ticket):
                ticket.batches = await ready.hub.in_thread(_encode, ticket)
            try:
                await ready.hub.committer.publish_async(ticket)
            except StorageError:  # the disk is full, and this makes room for the next
                retention.enforce_soon(ready)
                raise
        retention.enforce_soon(ready)
    return _result(ticket)


def publish_sync(
    stream: str | Stream,
    events: Any,
    *,
    connection: str | Connection | None = None,
    idempotency_key: str | None = None,
) -> dict[str, Any]:
    """`publish` for code without an event loop."""
    ready = opened(stream, connection) or open_stream(stream, connection)
    return _publish(_ticket(ready, events, idempotency_key))


def publish_batch(ready: OpenedStream, events: list[dict[str, Any]], key: str | None) -> dict[str, Any]:
    """Publish the events of a batch. Under its key again they are duplicates, also if they differ: a query that runs
    again may give another time, or another order."""
    ticket = _ticket(ready, events, key)
    ticket.is_recomputed = True
    return _publish(ticket)


def _publish(ticket: Ticket) -> dict[str, Any]:
    ready = ticket.ready
    if ticket.events or ticket.key:  # a key names its events, also if there are none
        with tracing.publishing(ticket):
            if not _can_wait(ticket):
                ticket.batches = _encode(ticket)
            try:
                ready.hub.committer.publish(ticket)
            except StorageError:
                retention.enforce_soon(ready)
                raise
        retention.enforce_soon(ready)
    return _result(ticket)


def _can_wait(ticket: Ticket) -> bool:
    """Return whether a publish can be checked with others: it has no idempotency key, and all fields are columns."""
    if ticket.key is not None:
        return False
    ticket.keys = keys_of(ticket.events)
    return ticket.keys <= ticket.ready.log.fields().keys()


def _ticket(ready: OpenedStream, events: Any, key: str | None = None) -> Ticket:
    if key is not None and (not isinstance(key, str) or not 1 <= len(key) <= KEY_CHARACTERS):
        raise SettingsError(f"idempotency_key must be a text of 1 to {KEY_CHARACTERS} characters.")
    ready.keyed = ready.keyed or key is not None
    return Ticket(ready, _new_id(), as_events(events, ready.stream), _encode, key)


KEY_CHARACTERS = 255


_spare_ids: list[str] = []


def _new_id() -> str:
    """Return a random UUID. Made 256 at a time: one call of the kernel for each would take longer than the publish."""
    try:
        return _spare_ids.pop()
    except IndexError:
        digits = os.urandom(256 * 16).hex()
        _spare_ids.extend(
            f"{d[:8]}-{d[8:12]}-4{d[13:16]}-{'89ab'[int(d[16], 16) & 3]}{d[17:20]}-{d[20:]}"
            for d in (digits[at : at + 32] for at in range(0, len(digits), 32))
        )
        return _spare_ids.pop()


# A forked child must not use the ids that its parent has in store.
os.register_at_fork(after_in_child=_spare_ids.clear)


def _encode(ticket: Ticket) -> list[Batch]:
    """Encode a publish by itself: its stream's batch, then the quarantine's. They are stored together or not at all."""
    stream, log = ticket.ready.stream, ticket.ready.log
    encoded = encode(stream, log, ticket.events, fresh=not ticket.has_looked)
    # Also without an event, for the key of the publish.
    published = None if ticket.is_recomputed else ticket.events
    batches = [_batch(ticket, stream, log, encoded, published=published)] if encoded.events or ticket.key else []
    if encoded.quarantined:
        place = open_stream(stream.quarantine, ticket.ready.hub.connection)
        # The quarantine's keys must expire too, and only this function publishes to it.
        place.keyed = place.keyed or ticket.key is not None
        retention.enforce_soon(place)
        records = encode(place.stream, place.log, encoded.quarantined)
        batches.append(_batch(ticket, place.stream, place.log, records))
    return batches


def _batch(ticket: Ticket, stream: Stream, log: Log, encoded: Encoded, **keys: Any) -> Batch:
    publishes = [(ticket.publish_id, len(encoded.events))]
    return to_batch(stream, log, publishes, encoded, publish_key=ticket.key, **keys)


def publish_once(stream: Stream, connection: Connection | None, records: list[dict[str, Any]], key_field: str) -> None:
    """Store records by their own key, so that a retry after a crash stores nothing twice.

    The rules of the stream do not apply: a record that it refused would be tried again indefinitely."""
    ready = open_stream(stream, connection)
    ticket = _ticket(ready, records)
    lenient = replace(ready.stream, validate_schema=False, on_schema_drift="evolve")
    encoded = encode(lenient, ready.log, ticket.events)
    ticket.batches = [_batch(ticket, lenient, ready.log, encoded, key_fields=(key_field,))]
    ready.hub.committer.publish(ticket)
    retention.enforce_soon(ready)


def _triggered(ready: OpenedStream) -> tuple[str, ...]:
    if ready.triggered is None:
        # Models are pipelines: without one nothing more is imported.
        has_some = current().pipelines or current().lists_models()
        ready.triggered = hooks.triggered_models(ready.stream) if has_some else ()
    return ready.triggered


def _result(ticket: Ticket) -> dict[str, Any]:
    own = ticket.appended
    return {
        "status": "accepted",
        "stream": ticket.ready.stream.name,
        "rows_received": len(ticket.events),
        "publish_id": ticket.publish_id,
        "triggered_models": list(_triggered(ticket.ready)),
        "first_rowid": own.first if own else None,
        "last_rowid": own.last if own else None,
        "rows_deduplicated": own.deduplicated if own else 0,
        "rows_quarantined": len(ticket.events) - (own.stored + own.deduplicated if own else 0),
    }
