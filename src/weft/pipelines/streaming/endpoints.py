"""Which connections the sources and targets of a streaming pipeline have, and which of them are the same rows."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from weft.errors import DeclarationError, WeftError
from weft.options import errors_at
from weft.pipelines.streaming.spec import Delivery, Source, StreamingPipeline, Target
from weft.project import current
from weft.systems.base import AnyConnection, Connection, system_for
from weft.systems.endpoint import endpoint_of


def connection_of(connection: AnyConnection | None) -> Connection | None:
    """Return the connection that a name leads to, or `None` where it is registered or set later, before a run."""
    with suppress(WeftError):
        return current().connection(connection)
    return None


Part = TypeVar("Part", Source, Target)


def checked(part: Part) -> Part:
    """Return a source or target checked against its connection, where that is known: its start and options as kept."""
    connection = connection_of(part.connection)
    if connection is None:
        return part
    return replace(replace(part, connection=connection), connection=part.connection)


def identity(connection: str | Connection | None) -> object:
    """Return a value that is equal for two ways to name one connection."""
    return (connection.name or connection) if isinstance(connection, Connection) else connection or "default"


def address(part: Source | Target) -> tuple[object, ...]:
    """Return where rows are read or written: equal for two parts that mean the same rows."""
    if isinstance(part, Target):
        place = part.place
    else:
        connection = connection_of(part.connection)
        places = endpoint_of(connection).places if connection else ()
        place = "stream" if "stream" in places or not places else places[0]
    return identity(part.connection), place, part.name.strip("/")


def addresses(part: Source | Target) -> set[tuple[object, ...]]:
    """Return the address of a part, and of a stream that is read also that of the table in which SQL sees it."""
    same_rows = {address(part)}
    if isinstance(part, Source):
        stream = current().streams.get(part.query) if isinstance(part.query, str) else part.query
        if stream is not None:
            same_rows.add((identity(part.connection), "table", f"{stream.schema}.{stream.name}"))
    return same_rows


def label_of(pipeline: StreamingPipeline, target: Target) -> str:
    """Return what counts and dead letters call a target: its name, and if others have that too, its connection's."""
    if [each.name for each in pipeline.targets].count(target.name) == 1:
        return target.name
    connection = current().connection(target.connection)
    return f"{target.name} ({connection.name or f'{connection.kind} {connection.target}'})"


def delivery_to(pipeline: StreamingPipeline, target: Target) -> Delivery:
    """Return how often a row may reach a target. A stream does not record batches; every other place must."""
    return "at_least_once" if target.place == "stream" else pipeline.delivery


def check_targets(pipeline: StreamingPipeline, where: str) -> None:
    """Refuse targets that their connections cannot hold, or that are also sources, as far as connections are known."""
    read = set[object]().union(*map(addresses, pipeline.sources))
    for target in pipeline.targets:
        with errors_at(where):
            checked(target)
        if address(target) in read:
            raise DeclarationError(f"{where}: it would read what it writes to {target.name}, without end.")
        window, connection = pipeline.window, connection_of(target.connection)
        if window is None or window.kind != "session" or not window.changes_rows or connection is None:
            continue
        system = system_for(connection.kind)
        if system.tables is None and not getattr(system.load("target"), "removes_rows", False):
            raise DeclarationError(
                f"{where}, target {target.name}: a session may become a part of another one, and "
                f"{connection.any_such} removes no rows.",
                hint='Use a SQL database or Delta, or late_data="drop" and emit="close".',
            )
