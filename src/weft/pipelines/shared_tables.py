"""A table that a model builds is written by nothing else: each would undo what the other has written."""

from __future__ import annotations

from typing import Any

from weft.errors import DeclarationError, NotFoundError
from weft.pipelines.models import Model
from weft.project import current
from weft.systems.base import Connection, system_for

Place = tuple[str | None, str]


def refuse_shared_tables(of: Any) -> None:
    """Raise where a declared model writes a table of this pipeline, or a declared pipeline that of this model."""
    project = current()
    for known in (project.pipelines, project.streaming_pipelines):
        others: list[Any] = list(known.values())
        for other in others:
            is_itself = other.name == of.name and type(other) is type(of)
            if is_itself or not (isinstance(of, Model) or isinstance(other, Model)):
                continue
            for own in of.targets:
                for theirs in other.targets:
                    if _is_one_table(own, theirs):
                        raise DeclarationError(
                            f"{_called(of)} and {_called(other)} write one table, {own.name}.",
                            hint="Nothing else writes the table of a model: give one of them another table.",
                        )


def _called(declared: Any) -> str:
    return f"the {'model' if isinstance(declared, Model) else 'pipeline'} {declared.name!r}"


def _is_one_table(one: Any, other: Any) -> bool:
    first, second = table_of(one), table_of(other)
    # The names first: a connection of a pipeline that is not run here need not be usable.
    if first is None or second is None or first[1] != second[1]:
        return False
    project = current()
    try:
        connection, another = project.connection(one.connection), project.connection(other.connection)
    except NotFoundError:
        return False
    if connection != another and not connection.is_same_place(another):
        return False
    return _schema(first, connection) == _schema(second, connection)


def table_of(target: Any) -> Place | None:
    """Return the schema and name of the table of a target of any pipeline or model, if it has one."""
    table = target.table
    return table if isinstance(table, tuple | None) else (table.schema, table.name)


def _schema(place: Place, connection: Connection) -> str | None:
    system = system_for(connection.kind)
    if place[0] is not None or system.tables is None:
        return place[0]
    default: str | None = system.load_tables().default_schema
    return default
