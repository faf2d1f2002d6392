"""A table that a model builds is written by nothing else: each would undo what the other has written."""

from __future__ import annotations

from typing import Any

from weft.errors import DeclarationError, NotFoundError
from weft.pipelines.models import Model
from weft.project import current
from weft.systems.base import Connection, system_for

Place = tuple[str | None, str]


def refuse_shared_tables(of: Any) -> None:
    """Raise where a declared model writes a table of this pipeline, or a declared pipeline or stream has that of this
    model."""
    project = current()
    for known in (project.pipelines, project.streaming_pipelines):
        others: list[Any] = list(known.values())
        for other in others:
            is_itself = other.name == of.name and type(other) is type(of)
            if is_itself or not (isinstance(of, Model) or isinstance(other, Model)):
                continue
            for own in of.targets:
                for theirs in other.targets:
                    if _is_one_table(own, table_of(theirs), theirs.connection):
                        raise DeclarationError(
                            f"{_called(of)} and {_called(other)} write one table, {own.name}.",
                            hint="Nothing else writes the table of a model: give one of them another table.",
                        )

    for stream in project.streams.values() if isinstance(of, Model) else ():
        if _is_one_table(of.target, (stream.schema, stream.name), stream.connection):
            raise DeclarationError(
                f"The model {of.name!r} would write the table of the stream {stream.name!r}.",
                hint="Give one of them another name or schema.",
            )


def _called(declared: Any) -> str:
    return f"the {'model' if isinstance(declared, Model) else 'pipeline'} {declared.name!r}"


def _is_one_table(one: Any, second: Place | None, other: Connection | str | None) -> bool:
    first = table_of(one)
    # The names first: a connection of a pipeline that is not run here need not be usable.
    if first is None or second is None or first[1].lower() != second[1].lower():
        return False
    project = current()
    try:
        connection, another = project.connection(one.connection), project.connection(other)
    except NotFoundError:
        return False
    if connection != another and not connection.is_same_place(another):
        return False
    return _stored(first, connection) == _stored(second, connection)


def table_of(target: Any) -> Place | None:
    """Return the schema and name of the table of a target of any pipeline or model, if it has one."""
    table = target.table
    return table if isinstance(table, tuple | None) else (table.schema, table.name)


def _stored(place: Place, connection: Connection) -> Place:
    """Return the schema and name under which the connection has a table."""
    system = system_for(connection.kind)
    if system.tables is None:
        return place
    tables = system.load_tables()
    schema, name = place[0] or tables.default_schema, place[1]
    return (schema and schema.lower(), name.lower()) if tables.folds_tables else (schema, name)
