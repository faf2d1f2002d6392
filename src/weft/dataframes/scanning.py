"""`scan_stream`, `read_streams`, `scan_streams`: frames that are read when they are needed, and of many streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from weft.dataframes.feed import Feed
from weft.dataframes.frames import To, check_to, frame_of, polars
from weft.dataframes.layout import Layout, OnError, join
from weft.dataframes.opening import (
    find_connection,
    find_redis,
    is_declared,
    layout_of,
    open_feed,
    stream_key,
    whole_number,
)
from weft.dataframes.reading import batches_of
from weft.errors import SettingsError
from weft.streams.declare import Stream
from weft.systems.base import Connection


def scan_stream(
    url: str | Connection,
    stream: str | bytes | Stream,
    *,
    schema: Mapping[str, Any] | None = None,
    start_id: str = "-",
    end_id: str = "+",
    count: int | None = None,
    include_id: bool = True,
    id_column: str = "_id",
    include_timestamp: bool = True,
    timestamp_column: str = "_ts",
    include_sequence: bool = False,
    sequence_column: str = "_seq",
    to: Literal["polars", "spark"] = "polars",
    on_error: OnError = "null",
) -> Any:
    """A LazyFrame of what `read_stream` reads, read when it is collected: only the columns that the query needs, page
    by page. Without a schema the first look at its columns reads the whole stream, once.

    With `to="spark"` it is a Spark DataFrame, whose tasks read ranges of ids at the same time; filters of the id and
    the timestamp make less of the stream be read.
    """
    layout = layout_of(
        schema,
        include_id=include_id,
        id_column=id_column,
        include_timestamp=include_timestamp,
        timestamp_column=timestamp_column,
        include_sequence=include_sequence,
        sequence_column=sequence_column,
        on_error=on_error,
    )

    if to == "spark":
        return _scan_with_spark(url, stream, layout, start_id, end_id, count)

    def open_it(layout: Layout) -> Feed:
        return open_feed(url, stream, layout, start_id=start_id, end_id=end_id)

    return _scan(open_it, layout, count, to)


def read_streams(
    url: str | Connection,
    pattern: str = "*",
    *,
    schema: Mapping[str, Any] | None = None,
    start_id: str = "-",
    end_id: str = "+",
    count: int | None = None,
    include_id: bool = True,
    id_column: str = "_id",
    include_timestamp: bool = True,
    timestamp_column: str = "_ts",
    include_sequence: bool = False,
    sequence_column: str = "_seq",
    stream_column: str = "_stream",
    to: To = "polars",
    on_error: OnError = "null",
) -> Any:
    """The entries of every stream of Redis whose key matches a pattern (`events:*`), stream by stream in the order of
    their keys, which are in `stream_column`. The other parameters are those of `read_stream`."""
    check_to(to)
    layout = layout_of(
        schema,
        include_id=include_id,
        id_column=id_column,
        include_timestamp=include_timestamp,
        timestamp_column=timestamp_column,
        include_sequence=include_sequence,
        sequence_column=sequence_column,
        stream_column=stream_column,
        on_error=on_error,
    )
    if count is not None:
        whole_number("count", count)
    with closing(_open_many(url, pattern, layout, start_id, end_id)) as feed:
        return frame_of(join(list(batches_of(feed, count)), layout), to, layout)


def scan_streams(
    url: str | Connection,
    pattern: str = "*",
    *,
    schema: Mapping[str, Any] | None = None,
    start_id: str = "-",
    end_id: str = "+",
    count: int | None = None,
    include_id: bool = True,
    id_column: str = "_id",
    include_timestamp: bool = True,
    timestamp_column: str = "_ts",
    include_sequence: bool = False,
    sequence_column: str = "_seq",
    stream_column: str = "_stream",
    to: Literal["polars"] = "polars",
    on_error: OnError = "null",
) -> Any:
    """A LazyFrame of what `read_streams` reads. The keys are looked for when it is collected."""
    layout = layout_of(
        schema,
        include_id=include_id,
        id_column=id_column,
        include_timestamp=include_timestamp,
        timestamp_column=timestamp_column,
        include_sequence=include_sequence,
        sequence_column=sequence_column,
        stream_column=stream_column,
        on_error=on_error,
    )
    return _scan(lambda layout: _open_many(url, pattern, layout, start_id, end_id), layout, count, to)


def _scan_with_spark(
    url: str | Connection, stream: str | bytes | Stream, layout: Layout, start_id: str, end_id: str, count: int | None
) -> Any:
    if count is not None or start_id == "$":
        raise SettingsError(
            f"A DataFrame of Spark has no {'count' if count is not None else 'end to wait at'}.",
            hint="frame.limit(…) takes so many rows; read_stream waits for new ones.",
        )
    connection = find_connection(url)
    if is_declared(stream, connection):
        from weft.dataframes.spark_log import scan_log

        return scan_log(connection, stream, layout, start_id, end_id)
    redis = find_redis(connection, "A key").resolved()
    from weft.dataframes.redis_feed import check_range
    from weft.dataframes.spark_keys import KeyScan, scan_keys
    from weft.engine import session

    check_range(start_id, end_id)
    parts = session.spark().sparkContext.defaultParallelism
    return scan_keys(KeyScan(redis, stream_key(stream), layout, start_id, end_id, parts))


def _open_many(url: str | Connection, pattern: str, layout: Layout, start_id: str, end_id: str) -> Feed:
    connection = find_redis(url, "A pattern of keys")
    from weft.dataframes.redis_feed import ManyFeed, find_streams
    from weft.systems.redis.wire import Wire

    streams = find_streams(connection, pattern)
    return ManyFeed(Wire(connection, streams[0] if streams else pattern), streams, layout, start_id, end_id)


def _scan(open_it: Callable[[Layout], Feed], layout: Layout, count: int | None, to: str) -> Any:
    if to != "polars":
        check_to(to)
        raise SettingsError(f"A scan of this is a LazyFrame of polars, not of {to!r}.", hint="A read takes every to=.")
    if count is not None:
        whole_number("count", count)
    polars()
    from polars.io.plugins import register_io_source

    @cache
    def whole() -> Any:
        with closing(open_it(layout)) as feed:
            return frame_of(join(list(batches_of(feed, count)), layout), "polars", layout)

    def frames(columns: list[str] | None, predicate: Any, rows: int | None, batch_size: int | None) -> Iterator[Any]:
        if layout.arrow_schema is None:
            pages: Iterator[Any] = iter([whole() if rows is None else whole().head(rows)])
        else:
            needed = None
            if columns is not None:
                needed = frozenset(columns if predicate is None else [*columns, *predicate.meta.root_names()])
            limits = [limit for limit in (count, rows) if limit is not None]
            pages = _pages(open_it, replace(layout, columns=needed), min(limits, default=None))
        for page in pages:
            found = page if predicate is None else page.filter(predicate)
            yield found if columns is None else found.select(columns)

    def schema() -> Any:
        if layout.arrow_schema is None:
            return whole().schema
        return frame_of(layout.arrow_schema.empty_table(), "polars", layout).schema

    return register_io_source(frames, schema=schema)


def _pages(open_it: Callable[[Layout], Feed], layout: Layout, count: int | None) -> Iterator[Any]:
    with closing(open_it(layout)) as feed:
        for batch in batches_of(feed, count):
            yield frame_of(join([batch], layout), "polars", layout)
