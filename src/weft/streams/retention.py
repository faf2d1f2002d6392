"""Retention removes events past a stream's age or number; consumers that had not seen them get `EventsLostError`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from weft.errors import ConnectionFailedError, DeclarationError, SettingsError, StorageError
from weft.streams.declare import Stream
from weft.streams.events import as_offset
from weft.streams.runtime import OpenedStream, find, for_asyncio, forget_opened, hub_of, open_stream
from weft.systems.base import Connection
from weft.systems.log import Log, Store

_log = logging.getLogger("weft.streams")
# A process that publishes or consumes looks at most this often whether something is to be removed.
_INTERVAL_SECONDS = 5.0
# An event further ahead of the store's clock than this has a wrong time.
_CLOCKS_DIFFER = timedelta(minutes=1)
_trimming = threading.Lock()


def enforce_soon(ready: OpenedStream) -> None:
    """Enforce the stream's retention in the background, if it is time for it."""
    if _due(ready):
        ready.hub.in_background(_enforce_quietly, ready)


def _due(ready: OpenedStream) -> bool:
    stream = ready.stream
    if stream.max_rows is None and stream.max_age_days is None and not stream.key_fields and not ready.keyed:
        return False
    # Under a test's own clock nothing happens by itself: what is removed must not depend on how fast a thread is.
    return ready.hub.real_time and time.monotonic() - ready.trimmed_at > _INTERVAL_SECONDS


def _enforce_quietly(ready: OpenedStream) -> None:
    with _trimming:
        if not _due(ready):
            return
        ready.trimmed_at = time.monotonic()
    try:
        with_room(ready.hub.store, partial(enforce, ready))
    except Exception as error:
        # A failure here does not fail the publish, but it is logged.
        _log.warning("retention of stream %s failed, and is tried again later: %s", ready.stream.name, error)


def enforce(ready: OpenedStream) -> int:
    """Remove what the declared policy says; how many events went."""
    stream, log = ready.stream, ready.log
    now = ready.hub.store.now()
    cut = 0
    if stream.max_age_days is not None:
        today = datetime.fromtimestamp(now, UTC)
        cut = log.expired(today - timedelta(days=stream.max_age_days), today + _CLOCKS_DIFFER)
    # Counting from the end takes a walk over all that stays: only where there can be too many.
    if stream.max_rows is not None and log.head() - log.floor() > stream.max_rows:
        cut = max(cut, log.nth_last(stream.max_rows + 1) or 0)
    log.trim_keys(now - stream.key_horizon_days * 86_400)
    return log.trim(cut) if cut > 0 else 0


def trim_sync(
    stream: str | Stream,
    *,
    before: int | str | datetime | None = None,
    max_rows: int | None = None,
    connection: str | Connection | None = None,
) -> int:
    """Remove old events now and return how many: those before an offset or a moment, all but the newest `max_rows`,
    or, with neither, what the stream's own retention says."""
    return with_room(hub_of(stream, connection).store, lambda: _trim(stream, before, max_rows, connection))


def with_room(store: Store, remove: Callable[[], int]) -> int:
    """Call it; on a full disk again, with the space that is kept back for it."""
    try:
        return remove()
    except (StorageError, ConnectionFailedError):
        if not store.make_room():
            raise
        return remove()


def _trim(
    stream: str | Stream, before: int | str | datetime | None, max_rows: int | None, connection: str | Connection | None
) -> int:
    ready = open_stream(stream, connection, to_read=True)  # nothing is made, for which a full disk may have no room
    if before is None and max_rows is None:
        if ready.stream.max_rows is None and ready.stream.max_age_days is None:
            raise DeclarationError(
                f"Stream {ready.stream.name!r} declares no retention, and no limit was given.",
                hint="Pass before=… or max_rows=…, or declare retention={…}.",
            )
        return enforce(ready)
    cut = 0 if before is None else last_before(ready.log, before)
    if max_rows is not None and (type(max_rows) is not int or max_rows < 0):
        raise SettingsError(f"max_rows must be a whole number of at least 0, not {max_rows!r}.")
    if max_rows is not None:
        cut = max(cut, ready.log.nth_last(max_rows + 1) or 0)
    return ready.log.trim(cut) if cut > 0 else 0


def last_before(log: Log, before: int | str | datetime) -> int:
    """Return the last offset before an offset or a moment."""
    if isinstance(before, datetime):
        return log.first_since(aware(before)) - 1
    if (offset := as_offset(before)) is None:
        raise SettingsError(f"before takes an offset or a datetime, not {before!r}.")
    return offset - 1


trim = for_asyncio(trim_sync)


def delete_stream_sync(stream: str | Stream, *, connection: str | Connection | None = None) -> bool:
    """Delete a stream for good: its table with all events, its consumers and its idempotency keys. Returns whether it
    was there. The next publish or consume creates it again."""
    declared, hub = find(stream), hub_of(stream, connection)
    try:
        return hub.store.delete(declared.schema, declared.name)
    finally:
        forget_opened()


delete_stream = for_asyncio(delete_stream_sync)


def aware(moment: datetime) -> datetime:
    """A moment without a zone is UTC, here as in events."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
