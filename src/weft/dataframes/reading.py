"""`read_stream`, `ack_entries`: what a stream holds, as one frame; and how any stream is opened for frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, Literal, TypeGuard, Unpack

import pyarrow as pa

from weft.dataframes.layout import Layout, frame_of, join, prepare_frames
from weft.dataframes.options import Options, ReadOptions, refuse_unknown_options, wait_of, whole_number
from weft.errors import SettingsError
from weft.project import connect, current
from weft.streams.declare import Stream
from weft.streams.runtime import is_declared_on
from weft.systems.base import Connection, System, system_for, systems
from weft.systems.entries import Membership
from weft.systems.pages import PageFeed, Pages


def find_connection(url: str | Connection) -> Connection:
    """Return the connection that a URL, a name or a connection stands for."""
    return connect(url) if isinstance(url, str) and "://" in url else current().connection(url)


def system_with(capability: Literal["pages", "hashes"], connection: Connection, what: str) -> System:
    """Return the connection's system, which must be able to do this."""
    system = system_for(connection.kind)
    if getattr(system, capability) is None:
        able = [each.describes.partition(":")[0] for each in systems().values() if getattr(each, capability)]
        raise SettingsError(f"{what} needs {' or '.join(able)}; {connection.label} is {connection.kind}.")
    return system


def open_pages(connection: Connection, what: str) -> Pages:
    """Return what reads the system's own streams."""
    pages: Pages = system_with("pages", connection, what).load("pages")(connection)
    return pages


def open_feed(
    url: str | Connection,
    stream: str | bytes | Stream,
    options: Options,
    *,
    layout: Layout | None = None,
    iterates: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> PageFeed:
    """Open the stream at the place from which it is to be read. `layout` has fewer columns than that of the options."""
    layout = layout or options.layout
    connection, membership = find_connection(url), _membership(options)
    if is_declared(stream, connection):
        from weft.dataframes.log_feed import LogGroupFeed, LogRangeFeed

        if membership is None:
            return LogRangeFeed(connection, stream, layout, options.start_id, options.end_id, stopped)
        feed: PageFeed = LogGroupFeed(
            connection, stream, layout, membership, iterates=iterates, confirms=options.auto_ack, stopped=stopped
        )
    else:
        pages = open_pages(connection, "A key")
        if membership is None:
            return pages.read_range(stream, layout.field_names, options.start_id, options.end_id, stopped)
        feed = pages.read_group(
            stream, layout.field_names, membership, iterates=iterates, confirms=options.auto_ack, stopped=stopped
        )
    prepare_frames(options.to)
    return feed


def _membership(options: Options) -> Membership | None:
    group, consumer = options.group, options.consumer
    if group is None:
        for name, is_set in (
            ("consumer", consumer),
            ("auto_ack", options.auto_ack),
            ("claim_idle", options.claim_idle is not None),
        ):
            if is_set:
                raise SettingsError(f"{name} needs a group.", hint='group="analytics", consumer="worker-1"')
        if options.include_delivery:
            raise SettingsError("include_delivery needs a group.", hint="Only a group counts deliveries.")
        return None
    if not consumer:
        raise SettingsError(f"The group {group!r} needs a consumer.", hint='consumer="worker-1"')
    for what, name in (("group", group), ("consumer", consumer)):
        if not isinstance(name, str | bytes) or not name:
            raise SettingsError(f"{what} must be a name, not {name!r}.")
    if options.end_id != "+":
        raise SettingsError("A group has no end_id: it is given what no other member has.", hint="Leave one out.")
    if options.claim_idle is not None:
        whole_number("claim_idle", options.claim_idle)
    return Membership(
        group=group,
        consumer=consumer,
        group_start=options.start_id,
        auto_create=options.create_group,
        claim_idle=options.claim_idle,
        create_hint="create_group=True creates it, and starts it at start_id.",
    )


def is_declared(stream: object, connection: Connection) -> TypeGuard[str | Stream]:
    """Return whether this is a declared stream. Other names, or bytes, are those of the system's own streams; so is the
    name of a stream that is declared on another connection."""
    system = system_for(connection.kind)
    has_own = system.pages is not None
    if not has_own and system.log is None:
        system.load_log()  # raises, and says which systems hold streams
    if isinstance(stream, bytes) and not has_own:
        raise SettingsError(f"A declared stream has a name, not {stream!r}.")
    return isinstance(stream, Stream) or not has_own or is_declared_on(stream, connection)


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
    refuse_unknown_options(read_stream, ReadOptions, options)
    asked, wait_seconds = Options(**options), wait_of(block_ms)
    with closing(open_feed(url, stream, asked)) as feed:
        frame = read_frame(feed, asked, wait_seconds)
        # Not before: what cannot be made into a frame must be delivered again.
        if asked.auto_ack:
            feed.confirm()
            feed.settle()
    return frame


def read_frame(feed: PageFeed, options: Options, wait_seconds: float | None = 0) -> Any:
    layout = options.layout
    batches = list(batches_of(feed, layout, options.count, wait_seconds))
    return frame_of(join(batches, layout, feed), options.to, layout)


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
    if not isinstance(entry_ids, Iterable) or hasattr(entry_ids, "columns"):
        raise SettingsError(f"entry_ids is a list of ids, not a {type(entry_ids).__name__}.", hint='frame["_id"]')
    if not isinstance(group, str | bytes) or not group:
        raise SettingsError(f"group must be a name, not {group!r}.")
    listed = entry_ids.to_pylist() if hasattr(entry_ids, "to_pylist") else entry_ids
    ids = [each.decode() if isinstance(each, bytes) else str(each) for each in listed]
    connection = find_connection(url)
    if is_declared(stream, connection):
        from weft.dataframes import log_feed

        return log_feed.acknowledge(connection, stream, group, ids)
    return open_pages(connection, "ack_entries").acknowledge(stream, group, ids)
