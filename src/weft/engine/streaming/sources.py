"""The sources of streaming pipelines, opened: those that a system has itself, and Weft streams on any log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from weft.engine import spark_io
from weft.engine.streaming.log_source import LogSource
from weft.errors import DeclarationError, WeftError
from weft.pipelines.streaming.spec import Source
from weft.project import current
from weft.spark_support.folder import Location
from weft.streams.declare import Stream
from weft.systems.base import system_for, systems
from weft.systems.endpoint import endpoint_of
from weft.systems.stream_source import SourceSettings, StreamSource
from weft.types import FieldType


def open_source(source: Source, wait_seconds: float = 0.0) -> StreamSource:
    """Return the opened source of a pipeline. `wait_seconds`: how long it waits for rows, if it waits by itself."""
    columns = {name: FieldType.parse(kind) for name, kind in source.columns.items()}
    limits = source.max_rows, source.max_files
    settings = SourceSettings(source.name, source.start, *limits, columns, wait_seconds)
    if isinstance(source.query, Stream):
        return LogSource(source.connection, settings, source.query)
    connection = source.connection_with_options(current().connection(source.connection))
    system = system_for(connection.kind)
    source_class = system.load("stream_source")
    if source_class is not None:
        opened: StreamSource = source_class(connection, settings)
        return opened
    if system.log is not None:
        return LogSource(source.connection, settings, source.query)
    able = ", ".join(each.kind for each in systems().values() if each.stream_source or each.log)
    raise DeclarationError(
        f"{connection.label} ({connection.kind}) cannot be a source of streaming pipelines.", hint=f"These can: {able}."
    )


def takes_columns(source: Source) -> bool:
    """Return whether a source can declare the types of its columns."""
    connection = current().connection(source.connection)
    own = source.connection_with_options(connection)
    return not isinstance(source.query, Stream) and endpoint_of(connection).why_no_columns(own) is None


def refuse_unreachable(source: StreamSource) -> None:
    """Refuse a source that Spark's workers are to read on other machines, and that only this one can open."""
    if source.read_by_workers:
        spark_io.refuse_one_host(source.opened_by_workers, "source")


def show_position(position: Any, source_log: Location | None = None, source: Source | None = None) -> str:
    """Return a position in words. Where its pipeline is not declared here, its form says which source it is of."""
    if position is None:
        return "nothing yet"
    texts = (each.show(position, source_log) for each in _classes(source))
    return next((text for text in texts if text is not None), str(position))


def _classes(source: Source | None) -> Iterator[type[StreamSource]]:
    if source is not None:
        yield type(open_source(source))
    yield LogSource
    for each in systems().values():
        with suppress(WeftError, ImportError):  # a package that is not installed
            source_class = each.load("stream_source")
            if source_class is not None:
                yield source_class
