"""`scan_stream`, `read_streams`, `scan_streams`: frames that are read when they are needed, and of many streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Unpack

from weft.dataframes.layout import Layout, To, frame_of, join
from weft.dataframes.options import Options, ScanOptions, refuse_unknown_options
from weft.dataframes.reading import batches_of, find_connection, is_declared, open_feed, open_pages, read_frame
from weft.errors import SettingsError
from weft.streams.declare import Stream
from weft.systems.base import Connection
from weft.systems.pages import PageFeed


def scan_stream(
    url: str | Connection,
    stream: str | bytes | Stream,
    *,
    to: Literal["polars", "spark"] = "polars",
    **options: Unpack[ScanOptions],
) -> Any:
    """Return a LazyFrame of what `read_stream` reads, read when it is collected: only the columns that the query needs,
    page by page. Without a schema the first look at its columns reads the whole stream, once.

    With `to="spark"` it is a Spark DataFrame, whose tasks read ranges of ids at the same time; filters of the id and
    the timestamp make less of the stream be read.
    """
    refuse_unknown_options(scan_stream, ScanOptions, options)
    asked = Options(to=to, **options)
    if to == "spark":
        return _scan_with_spark(url, stream, asked)
    return _scan(lambda layout: open_feed(url, stream, asked, layout=layout), asked)


def read_streams(
    url: str | Connection,
    pattern: str = "*",
    *,
    stream_column: str = "_stream",
    to: To = "polars",
    **options: Unpack[ScanOptions],
) -> Any:
    """Return the entries of every stream of Redis whose key matches a pattern (`events:*`), stream by stream in the
    order of their keys, which are in `stream_column`. The other parameters are those of `read_stream`."""
    refuse_unknown_options(read_streams, ScanOptions, options)
    asked = Options(to=to, stream_column=stream_column, **options)
    with closing(_open_many(url, pattern, asked, asked.layout)) as feed:
        return read_frame(feed, asked)


def scan_streams(
    url: str | Connection,
    pattern: str = "*",
    *,
    stream_column: str = "_stream",
    to: Literal["polars"] = "polars",
    **options: Unpack[ScanOptions],
) -> Any:
    """Return a LazyFrame of what `read_streams` reads. The keys are looked for when it is collected."""
    refuse_unknown_options(scan_streams, ScanOptions, options)
    asked = Options(to=to, stream_column=stream_column, **options)
    return _scan(lambda layout: _open_many(url, pattern, asked, layout), asked)


def _scan_with_spark(url: str | Connection, stream: str | bytes | Stream, options: Options) -> Any:
    if options.count is not None or options.start_id == "$":
        raise SettingsError(
            f"A DataFrame of Spark has no {'count' if options.count is not None else 'end to wait at'}.",
            hint="frame.limit(…) takes so many rows; read_stream waits for new ones.",
        )
    from weft.dataframes.spark import PageScan, scan_log, scan_pages

    connection, start, end = find_connection(url), options.start_id, options.end_id
    if is_declared(stream, connection):
        return scan_log(connection, stream, options.layout, start, end)
    # Workers do not have the environment variables of its references.
    return scan_pages(PageScan(open_pages(connection.resolved(), "A key"), stream, options.layout, start, end))


def _open_many(url: str | Connection, pattern: str, options: Options, layout: Layout) -> PageFeed:
    if not isinstance(pattern, str | bytes):
        raise SettingsError(f"A pattern is a text, not {pattern!r}.", hint='"events:*", or "*" for all streams')
    pages = open_pages(find_connection(url), "A pattern of keys")
    return pages.read_matching(pattern, layout.field_names, options.start_id, options.end_id)


def _scan(open_it: Callable[[Layout], PageFeed], options: Options) -> Any:
    if options.to != "polars":
        raise SettingsError(
            f"A scan of this is a LazyFrame of polars, not of {options.to!r}.", hint="A read takes every to=."
        )
    layout, count = options.layout, options.count
    from polars.io.plugins import register_io_source

    @cache
    def whole() -> Any:
        with closing(open_it(layout)) as feed:
            return read_frame(feed, options)

    def frames(columns: list[str] | None, predicate: Any, rows: int | None, batch_size: int | None) -> Iterator[Any]:
        if layout.arrow_schema is None:
            pages: Iterator[Any] = iter([whole() if rows is None else whole().head(rows)])
        else:
            needed = None
            # Which rows there are, and which are put aside, must not depend on the columns of a query.
            if columns is not None and layout.on_error != "quarantine":
                needed = frozenset(columns if predicate is None else [*columns, *predicate.meta.root_names()])
            limits = [limit for limit in (count, rows) if limit is not None]
            pages = _pages(open_it, replace(layout, columns=needed), min(limits, default=None))
        for page in pages:
            matching = page if predicate is None else page.filter(predicate)
            yield matching if columns is None else matching.select(columns)

    def schema() -> Any:
        if layout.arrow_schema is None:
            return whole().schema
        return frame_of(layout.arrow_schema.empty_table(), "polars", layout).schema

    return register_io_source(frames, schema=schema)


def _pages(open_it: Callable[[Layout], PageFeed], layout: Layout, count: int | None) -> Iterator[Any]:
    with closing(open_it(layout)) as feed:
        for batch in batches_of(feed, layout, count):
            yield frame_of(join([batch], layout, feed), "polars", layout)
