"""`read_stream`, `ack_entries`: what a stream holds, as one frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pyarrow as pa

from weft.dataframes.feed import Feed
from weft.dataframes.frames import To, check_to, frame_of
from weft.dataframes.layout import OnError, join
from weft.dataframes.opening import (
    find_connection,
    find_redis,
    is_declared,
    layout_of,
    open_feed,
    stream_key,
    wait_of,
    whole_number,
)
from weft.errors import SettingsError
from weft.streams.declare import Stream
from weft.systems.base import Connection


def read_stream(
    url: str | Connection,
    stream: str | bytes | Stream,
    *,
    schema: Mapping[str, Any] | None = None,
    start_id: str = "-",
    end_id: str = "+",
    count: int | None = None,
    block_ms: int | None = None,
    group: str | None = None,
    consumer: str | None = None,
    auto_ack: bool = False,
    create_group: bool = True,
    include_id: bool = True,
    id_column: str = "_id",
    include_timestamp: bool = True,
    timestamp_column: str = "_ts",
    include_sequence: bool = False,
    sequence_column: str = "_seq",
    to: To = "polars",
    on_error: OnError = "null",
    claim_idle: int | None = None,
    include_delivery: bool = False,
) -> Any:
    """The entries of a stream as a frame: those between two ids, or with a group those that a consumer is given.

    `schema` names the columns and their types: the frame has exactly these, whatever the entries have. Without one it
    has every field of any entry, as texts, or as bytes where one is no UTF-8. `on_error` says what becomes of a value
    that does not fit: it is null, or an error, or its entry goes to the stream `<stream>__quarantine`.

    With `block_ms` the call waits so long for the first entry (0 is for ever). With `auto_ack` entries are acknowledged
    once the frame is made. `claim_idle` takes over entries that a member of the group has had for so many milliseconds
    without acknowledging them, before new ones; `include_delivery` adds how often each was delivered. A group that is
    not there is created, so that `start_id` is the first it is given.
    """
    check_to(to)
    if count is not None:
        whole_number("count", count)
    layout = layout_of(
        schema,
        include_id=include_id,
        id_column=id_column,
        include_timestamp=include_timestamp,
        timestamp_column=timestamp_column,
        include_sequence=include_sequence,
        sequence_column=sequence_column,
        include_delivery=include_delivery,
        on_error=on_error,
    )
    wait_seconds = wait_of(block_ms)
    feed = open_feed(
        url,
        stream,
        layout,
        start_id=start_id,
        end_id=end_id,
        group=group,
        consumer=consumer,
        auto_ack=auto_ack,
        create_group=create_group,
        claim_idle=claim_idle,
    )
    with closing(feed):
        frame = frame_of(join(list(batches_of(feed, count, wait_seconds)), layout), to, layout)
        # Not before: what cannot be made into a frame must be delivered again.
        if auto_ack:
            feed.confirm()
            feed.settle()
    return frame


def batches_of(feed: Feed, count: int | None = None, wait_seconds: float | None = 0) -> Iterator[pa.RecordBatch]:
    """What is there, up to so many rows."""
    left = count
    feed.begin()
    while left is None or left > 0:
        limit = feed.page_size if left is None else min(feed.page_size, left)
        batch = feed.fetch(limit, wait_seconds, left is None or left > limit)
        if batch is None:
            return
        left = None if left is None else left - len(batch)
        wait_seconds = 0
        yield batch
        if feed.drained:
            return


def ack_entries(
    url: str | Connection, stream: str | bytes | Stream, group: str, entry_ids: Iterable[str | bytes]
) -> int:
    """Acknowledge entries by their ids, as a frame's `_id` has them; how many were not acknowledged yet."""
    if isinstance(entry_ids, str | bytes):
        raise SettingsError(f"entry_ids is a list of ids, not {entry_ids!r}.", hint=f"[{entry_ids!r}]")
    listed = entry_ids.to_pylist() if hasattr(entry_ids, "to_pylist") else entry_ids
    ids = [each.decode() if isinstance(each, bytes) else str(each) for each in listed]
    connection = find_connection(url)
    if is_declared(stream, connection):
        from weft.dataframes import log_feed

        return log_feed.acknowledge(connection, stream, group, ids)
    from weft.dataframes import redis_feed

    return redis_feed.acknowledge(find_redis(connection, "ack_entries"), stream_key(stream), group, ids)
