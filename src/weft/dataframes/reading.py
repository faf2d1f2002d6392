"""`read_stream`, `ack_entries`: what a stream holds, as one frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, Unpack

import pyarrow as pa

from weft.dataframes.frames import frame_of
from weft.dataframes.layout import Layout, join
from weft.dataframes.opening import find_connection, is_declared, open_feed, open_pages
from weft.dataframes.options import Options, ReadOptions, refuse_unknown, wait_of
from weft.errors import SettingsError
from weft.streams.declare import Stream
from weft.systems.base import Connection
from weft.systems.pages import PageFeed


def read_stream(
    url: str | Connection,
    stream: str | bytes | Stream,
    *,
    block_ms: int | None = None,
    **options: Unpack[ReadOptions],
) -> Any:
    """Return the entries of a stream as a frame: those between two ids, or with a group those that a consumer is given.

    `schema` names the columns and their types: the frame has exactly these. Without it the frame has every field of any
    entry, as texts, or as bytes if a value is not UTF-8. A value that does not fit is handled by `on_error`: it is
    null, or an error, or its entry goes to the stream `<stream>__quarantine`.

    With `block_ms` the call waits so long for the first entry (0 is indefinitely). With `auto_ack` entries are
    acknowledged once the frame is made. `claim_idle` claims entries that a member of the group has held unacknowledged
    for so many milliseconds, before new ones; `include_delivery` adds how often each was delivered. A missing group is
    created, and starts with `start_id`."""
    refuse_unknown(read_stream, ReadOptions, options)
    asked, wait_seconds = Options(**options), wait_of(block_ms)
    with closing(open_feed(url, stream, asked)) as feed:
        frame = read_frame(feed, asked, wait_seconds)
        # Not before: what cannot be made into a frame must be delivered again.
        if asked.auto_ack:
            feed.confirm()
            feed.settle()
    return frame


def read_frame(feed: PageFeed, options: Options, wait_seconds: float | None = 0) -> Any:
    """Read what is there into one frame."""
    layout = options.layout
    return frame_of(join(list(batches_of(feed, layout, options.count, wait_seconds)), layout), options.to, layout)


def batches_of(
    feed: PageFeed, layout: Layout, count: int | None = None, wait_seconds: float | None = 0
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that the feed has now, up to `count`."""
    left = count
    feed.begin()
    while left is None or left > 0:
        limit = feed.page_size if left is None else min(feed.page_size, left)
        batch = fetch(feed, layout, limit, wait_seconds, left is None or left > limit)
        if batch is None:
            return
        left = None if left is None else left - len(batch)
        wait_seconds = 0
        yield batch
        if feed.drained:
            return


def fetch(feed: PageFeed, layout: Layout, limit: int, wait_seconds: float | None, more: bool) -> pa.RecordBatch | None:
    """Fetch the next rows. Entries that do not fit the layout go to the quarantine."""
    page = feed.fetch(limit, wait_seconds, more)
    if page is None:
        return None
    batch, rejected = layout.convert(page, feed.name)
    if rejected:
        feed.reject(rejected)
    return batch


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
    return open_pages(connection, "ack_entries").acknowledge(stream, group, ids)
