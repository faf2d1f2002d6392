"""Where the parts of a streaming pipeline are: what their connections take, and which of them mean one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from weft.errors import DeclarationError, WeftError
from weft.pipelines.streaming.spec import Source, StreamingPipeline, Target, places_of
from weft.project import current
from weft.systems.base import Connection


def located(connection: str | Connection | None) -> Connection | None:
    """The connection that a name leads to, if it does so by now: it may be registered or set before the pipeline is
    run."""
    with suppress(WeftError):
        return current().connection(connection)
    return None


@contextmanager
def told_by(where: str) -> Iterator[None]:
    """An error in the block says whose it is."""
    try:
        yield
    except DeclarationError as error:
        raise DeclarationError(f"{where}: {error.what}", hint=error.hint) from None


def identity(connection: str | Connection | None) -> object:
    """What two ways to name one connection have in common."""
    return (connection.name or connection) if isinstance(connection, Connection) else connection or "default"


def spot(part: Source | Target) -> tuple[object, ...]:
    """Where rows are read or written: equal for two parts that mean the same rows."""
    if isinstance(part, Target):
        place = part.place
    else:
        found = located(part.connection)
        held = places_of(found.kind) if found else ()
        place = "stream" if "stream" in held or not held else held[0]
    return identity(part.connection), place, part.name.strip("/")


def spots(part: Source | Target) -> set[tuple[object, ...]]:
    """That, and of a stream that is read the table that it is to others."""
    found = {spot(part)}
    if isinstance(part, Source):
        stream = current().streams.get(part.query) if isinstance(part.query, str) else part.query
        if stream is not None:
            found.add((identity(part.connection), "table", f"{stream.schema}.{stream.name}"))
    return found


def check_places(made: StreamingPipeline, where: str) -> None:
    """Refuse targets that their connections do not take, or that are read, as far as it is known by now which those
    are."""
    read = set[object]().union(*map(spots, made.sources))
    for target in made.targets:
        if (connection := located(target.connection)) is not None:
            with told_by(where):
                target.at(connection)
        if spot(target) in read:
            raise DeclarationError(f"{where}: it would read what it writes to {target.name}, for ever.")
