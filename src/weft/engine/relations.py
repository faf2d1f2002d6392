"""The tables that a query or a model names: streams, tables of databases, Delta tables and files, each by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.engine import inputs
from weft.engine.missing_tables import creation_hint
from weft.engine.readers import SqlReader, StreamReader, open_tables, stream_reader
from weft.errors import DeclarationError, NotFoundError, SchemaError, nearest, unknown
from weft.project import current
from weft.streams.declare import Stream
from weft.streams.runtime import derived_streams
from weft.systems import files_by_path
from weft.systems.base import Connection, System, system_for, systems
from weft.systems.load import full_name
from weft.systems.sql.tables import SqlTables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PART = re.compile(r'\s*(?:"((?:[^"]|"")*)"|`((?:[^`]|``)*)`|([^."`]+?))\s*(\.|$)')


@dataclass(frozen=True)
class Relation:
    """A table that a query or a model names: a stream, a table of a database, a Delta table or files."""

    name: str
    """The name in the query."""
    connection: Connection
    data: inputs.Events | inputs.SourceSql | inputs.Files
    """What `weft.read` would take, with `connection` as its source."""
    table: tuple[str | None, str] | None
    """Schema and name in a SQL database, as `SqlTables.table` takes them, also of a stream stored in one; `None`
    for all others."""
    stream: Stream | None = None


def find(name: str, default: str | Connection | None = None) -> Relation:
    """Return what a name stands for: `orders`, `events.orders`, `warehouse.public.orders`, `lake."2024/*.parquet"`.

    The first of these that there is: a declared stream, a declared table that a pipeline writes, `connection.table` or
    `connection.schema.table`, a path of this machine, a table of the connection `default`. No database is asked:
    whether it has the table, `schema_of` says.
    """
    return find_parts(parts_of(name), default)


def find_parts(parts: Sequence[str], default: str | Connection | None = None) -> Relation:
    """Return what a name stands for, of which the parts are known."""
    name, project = ".".join(map(quoted_part, parts)), current()
    if not 1 <= len(parts) <= 3:
        raise DeclarationError(
            f"The name {name} has {len(parts)} parts.",
            hint='A table is named table, schema.table, connection.table or connection.schema.table; a path is in "…".',
        )
    if len(parts) < 3:
        for stream in _streams():
            if tuple(parts) in ((stream.name,), (stream.schema, stream.name)):
                return _of_stream(name, stream)
        for table, connection in _declared_tables():
            if tuple(parts) in ((table[1],), table):
                return find_on(project.connection(connection), table, name)
    if len(parts) > 1 and (len(parts) == 3 or project.has_connection(parts[0])):
        return find_on(project.connection(parts[0]), parts[1:], name)
    elsewhere = project.connection(default)
    by_path = files_by_path.connection_for(parts[0]) if len(parts) == 1 else None
    if by_path is not None and not system_for(elsewhere.kind).takes_loads:
        return find_on(by_path[0], by_path[1:], name)
    return find_on(elsewhere, parts, name)


def find_on(connection: Connection, parts: Sequence[str | None], name: str | None = None) -> Relation:
    """Return a table of a connection, by its name or by its schema and name; of files, by a path or a glob too."""
    *schemas, table = parts
    schema = schemas[0] if schemas else None
    assert table is not None
    name = name or ".".join(quoted_part(each) for each in parts if each)
    # A stream stores more than its table shows: a publisher may have sent fields that have no column yet.
    for stream in _streams():
        is_named = stream.name == table and schema in (stream.schema, None)
        # Without a schema a table of a database is one of its default schema.
        if is_named and (schema is not None or not system_for(connection.kind).tables) and _is_on(stream, connection):
            return _of_stream(name, stream)
    system = system_for(connection.kind)
    if system.tables is not None:
        with closing(open_tables(connection)) as tables:
            return Relation(
                name, connection, inputs.SourceSql(f"SELECT * FROM {tables.table(schema, table)}"), (schema, table)
            )
    if system.takes_loads:
        path = f"{schema}/{table}" if schema else table
        return Relation(name, connection, inputs.Files(path), None)
    if system.log is not None:
        known = [full_name(each.schema, each.name) for each in _streams() if _is_on(each, connection)]
        raise unknown(f"stream on {connection.label}", full_name(schema, table), known)
    able = ", ".join(each.kind for each in systems().values() if _is_read(each))
    raise DeclarationError(
        f"{name} cannot be read: {connection.label} ({connection.kind}) has no tables.", hint=f"These have: {able}."
    )


def schema_of(relation: Relation) -> pa.Schema:
    """Return the canonical columns. Only for files Spark is needed."""
    if isinstance(relation.data, inputs.Files):
        from weft.engine import frame_projection, session

        return frame_projection.schema_of(frame_of(session.spark(), relation))
    with closing(reader_of(relation)) as reader:
        return reader.schema


def frame_of(spark: Any, relation: Relation, columns: Sequence[str] | None = None) -> DataFrame:
    """Return a DataFrame of the rows, which reads these columns alone; filters on it reach the database."""
    from weft.engine import reader_frames, session, spark_io
    from weft.spark_support import outcome

    if isinstance(relation.data, inputs.Files):
        try:
            with outcome.explained(f"read {relation.name}"):
                frame = spark_io.read(spark, relation.data.path, relation.connection)
        except NotFoundError as error:
            creation = creation_hint(relation.data.path.strip("/").replace("/", "."), relation.connection)
            raise NotFoundError(error.what, hint=creation or error.hint) from None
    else:
        reader = reader_of(relation, columns)
        session.refuse_one_host(reader.one_host, relation.name)
        frame = reader_frames.from_reader(spark, reader)
    chosen: DataFrame = frame if columns is None else frame.select(*map(_column, columns))
    return chosen


def reader_of(
    relation: Relation, columns: Sequence[str] | None = None, opened: SqlTables | None = None
) -> SqlReader | StreamReader:
    """Return a reader of a table of a database or of a stream; an error with the nearest name where there is none.
    `opened`: the database, where it is open already."""
    reader: SqlReader | StreamReader
    if relation.stream is not None:
        reader = stream_reader(relation.stream, relation.connection)
    else:
        assert isinstance(relation.data, inputs.SourceSql)
        tables = opened or open_tables(relation.connection)
        try:
            refuse_unknown_table(tables, relation)
            schema, unreadable = _described(tables, relation, relation.data.text)
            reader = SqlReader(tables, relation.data.text, schema, unreadable=unreadable)
        except BaseException:
            if opened is None:
                tables.close()
            raise
    return reader if columns is None else reader.selecting(columns)


def _described(tables: SqlTables, relation: Relation, sql: str) -> tuple[pa.Schema, tuple[tuple[str, str], ...]]:
    """Return the columns of a table that can be read, and the unreadable ones, each with what is wrong: a query may not
    need those."""
    assert relation.table is not None
    try:
        return tables.describe(sql), ()
    except SchemaError as error:
        problem = error
    with tables.driver.session("read") as session:
        names = [each.name for each in tables.columns(session, *relation.table) or ()]
    unreadable: dict[str, str] = {}
    while problem.field in names and len(names) > 1:
        names.remove(problem.field)
        unreadable[problem.field] = problem.what
        try:
            rest = f"SELECT {tables.listed(names)} FROM {tables.table(*relation.table)}"
            return tables.describe(rest), tuple(unreadable.items())
        except SchemaError as error:
            problem = error
    raise problem


def refuse_unknown_table(tables: SqlTables, relation: Relation) -> None:
    """Raise an error with the nearest name where a database has no such table."""
    assert relation.table is not None
    if tables.connection.is_missing() and _nearest(relation, ()) is not None:
        raise _no_table(relation, ())
    tables.connection.refuse_missing()
    with tables.driver.session("read") as session:
        if tables.columns(session, *relation.table) is None:
            raise _no_table(relation, tables.names(session, relation.table[0]))


def declared_names() -> dict[str, str]:
    """Return the names of declared streams and tables, each with what it is."""
    names = {full_name(*table): "table" for table, _ in _declared_tables()}
    return names | {full_name(each.schema, each.name): "stream" for each in _streams()}


def names_on(connection: Connection) -> list[str]:
    """Return the names of the tables in a database, or in Delta or files, as a query has them behind that of its
    connection."""
    system = system_for(connection.kind)
    if system.tables is None and system.takes_loads:
        names = system.load("target")(connection).tables()
        return sorted(".".join(quoted_part(part) for part in each if part) for each in names)
    if system.tables is None or connection.is_missing():
        return []
    streams = {full_name(each.schema, each.name) for each in _streams() if _is_on(each, connection)}
    with closing(open_tables(connection)) as tables, tables.driver.session("read") as session:
        names = tables.all_names(session)
    named = {full_name(*each): ".".join(quoted_part(part) for part in each if part) for each in names}
    return sorted(named[each] for each in named.keys() - streams if not each.startswith("weft."))


def parts_of(name: str) -> tuple[str, ...]:
    """Return the parts of a name, which are separated by dots and may be in quotation marks."""
    parts: list[str] = []
    place = 0
    while place < len(name) or not parts or name[place - 1] == ".":
        part = _PART.match(name, place)
        if part is None:
            raise DeclarationError(
                f"{name!r} is not the name of a table.",
                hint='For example orders, public.orders, warehouse.public.orders, lake."2024/*.parquet".',
            )
        quoted, marked, bare, _ = part.groups()
        parts.append(bare or (marked or "").replace("``", "`") or (quoted or "").replace('""', '"'))
        place = part.end()
    return tuple(parts)


# ---------------------------------------------------------------------------------------------------------------- parts


def _streams() -> Iterator[Stream]:
    for stream in list(current().streams.values()):
        yield stream
        yield from derived_streams(stream)


def _declared_tables() -> Iterator[tuple[tuple[str | None, str], str | Connection | None]]:
    """Yield schema, name and connection of the tables that pipelines write."""
    project = current()
    for pipeline in project.pipelines.values():
        for target in pipeline.targets:
            yield (target.table.schema, target.table.name), target.connection
    for streaming in project.streaming_pipelines.values():
        for written in streaming.targets:
            if written.table is not None:
                yield written.table, written.connection


def _of_stream(name: str, stream: Stream) -> Relation:
    connection = current().connection(stream.connection)
    table: tuple[str | None, str] | None = None
    if system_for(connection.kind).tables is not None:
        with closing(open_tables(connection)) as tables:
            table = (stream.schema, stream.name)
            if tables.table(*table) != connection.stream_table(stream):
                table = (None, full_name(*table))  # MySQL has schemas for loads, and none for streams
    return Relation(name, connection, inputs.Events(stream), table, stream)


def _is_on(stream: Stream, connection: Connection) -> bool:
    try:
        return current().connection(stream.connection).is_same_place(connection)
    except NotFoundError:  # its connection is not defined here
        return False


def _is_read(system: System) -> bool:
    return bool(system.tables or system.log or system.takes_loads)


def _no_table(relation: Relation, names: Sequence[str]) -> NotFoundError:
    """Return the error of a name that leads to no table, with the nearest of those that there are."""
    assert relation.table is not None
    hint = creation_hint(full_name(*relation.table), relation.connection)
    if hint is None:
        names = [each for each in names if not each.startswith("weft.")]
        near, listed = _nearest(relation, names), ", ".join(sorted(names)[:20]) or "none"
        hint = f"Did you mean {near}?" if near else f"Tables there: {listed}{' …' if len(names) > 20 else ''}."
    what = f"There is no table {relation.name} in {relation.connection.label} ({relation.connection.target})."
    return NotFoundError(what, hint=hint)


def _nearest(relation: Relation, names: Sequence[str]) -> str | None:
    """Return the name that looks most like one that leads to no table: of another table there, of one that is declared,
    or of one with the same name on another connection."""
    parts, project = parts_of(relation.name), current()
    alike = nearest(parts[-1], names)
    if alike is not None:
        return ".".join(map(quoted_part, (*parts[:-1], alike)))
    named = [*((each.schema, each.name) for each in _streams()), *(table for table, _ in _declared_tables())]
    declared = [table if len(parts) == 1 else full_name(schema, table) for schema, table in named]
    alike = nearest(relation.name, declared)
    if alike is None and len(parts) > 1 and not project.has_connection(parts[0]):
        connection = nearest(parts[0], project.connection_names())
        alike = connection and ".".join(map(quoted_part, (connection, *parts[1:])))
    return alike


def quoted_part(part: str) -> str:
    """Return a part of a name as SQL has it: in quotes where it needs them."""
    return part if re.fullmatch(r"\w+", part) else '"' + part.replace('"', '""') + '"'


def _column(name: str) -> str:
    from weft.spark_support.sessions import quoted

    return quoted(name)
