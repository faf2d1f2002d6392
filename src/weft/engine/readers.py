"""What a load reads: a picklable description of rows elsewhere, which a Spark task opens and reads as Arrow."""

from __future__ import annotations

import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import hinted
from weft.engine import inputs
from weft.engine.inputs import Input
from weft.engine.missing_tables import described
from weft.errors import EventsLostError
from weft.project import current
from weft.streams import runtime
from weft.streams.declare import Stream
from weft.systems.awaited_log import open_to_read
from weft.systems.base import Connection, system_for
from weft.systems.log import META_TYPES, PUBLISHED_AT, ROWID, Log
from weft.systems.sql.prefetch import prefetch
from weft.systems.sql.tables import Column, Slice, SqlTables, subquery
from weft.systems.sql.tokens import replaced
from weft.types import FieldType

Comparison = tuple[tuple[str, ...], str, Any]
"""The path of a column, an operator of SQL and a value."""
# Enough to be worth a task of its own.
_EVENTS_A_PART = 100_000


class RowReader(Protocol):
    """Rows that any process can read, whole or in parts."""

    @property
    def schema(self) -> pa.Schema:
        """The canonical columns."""

    @property
    def one_host(self) -> bool:
        """Whether only this machine can read it."""

    def parts(self, wanted: int) -> tuple[list[Any], Any]:
        """Return up to `wanted` parts, of one moment, and what must stay open (it has `close`) while they are read."""

    def read(self, part: Any, conditions: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part that meet the conditions, in the source's own words; in batches of the schema."""

    def close(self) -> None:
        """Close what this process opened to describe the rows. Tasks open their own."""


@dataclass(frozen=True)
class SqlReader:
    """The rows of a query."""

    tables: SqlTables
    sql: str
    schema: pa.Schema
    partition_by: str | None = None
    unreadable: tuple[tuple[str, str], ...] = ()
    """Columns of the query that no other system holds, each with what is wrong: only its database can use them."""

    @property
    def one_host(self) -> bool:
        return self.tables.one_host

    def parts(self, wanted: int) -> tuple[list[Any], Any]:
        """Return ranges of the `partition_by` column in one snapshot, where the database has them."""
        if wanted > 1 and self.partition_by is not None:
            return self.tables.slices(self.sql, wanted, self.partition_by)
        return [Slice(self.sql)], None

    def read(self, part: Any, conditions: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        if conditions:
            wanted = " AND ".join(f"({each})" for each in conditions)
            part = replace(part, sql=f"SELECT * FROM {subquery(part.sql)} AS q WHERE {wanted}")
        return self.tables.read(part, self.schema, self.schema.names if self.unreadable else None)

    def close(self) -> None:
        self.tables.close()

    def selecting(self, columns: Sequence[str]) -> SqlReader:
        """Return a reader of these columns alone."""
        listed = ", ".join(self.tables.quote(name) for name in columns)
        schema = pa.schema([self.schema.field(name) for name in columns])
        return SqlReader(self.tables, f"SELECT {listed} FROM {subquery(self.sql)} AS q", schema, self.partition_by)


@dataclass(frozen=True)
class StreamReader:
    """The events of a stream in a range of offsets: it never changes, unless retention removes some of them meanwhile,
    which is an error."""

    connection: Connection
    stream_schema: str
    stream: str
    types: tuple[tuple[str, FieldType], ...]
    after: int
    upto: int
    advice: str = "Run this again to read what is left. Keep events for longer, or load more often."
    """What to do where some were removed."""
    time_column: str = PUBLISHED_AT
    """The name under which the time of publication is read."""
    columns: tuple[str, ...] | None = None
    """The columns that are read; `None` for all."""
    without: tuple[int, ...] = ()
    """The offsets of events that are left out."""
    late: tuple[tuple[int, str, Any], ...] = ()
    """Offset, field and value of what came before its column did, by offset."""

    @property
    def one_host(self) -> bool:
        return self.connection.one_host

    @property
    def schema(self) -> pa.Schema:
        """The stored columns: the fields, then what Weft adds."""
        fields = (_field(self.time_column if name == PUBLISHED_AT else name, kind) for name, kind in self.types)
        return pa.schema([each for each in fields if self.columns is None or each.name in self.columns])

    def selecting(self, columns: Sequence[str]) -> StreamReader:
        """Return a reader of these columns alone."""
        return replace(self, columns=tuple(columns))

    def parts(self, wanted: int) -> tuple[list[Any], Any]:
        """Return ranges of about the same length."""
        length = max(_EVENTS_A_PART, -(-(self.upto - self.after) // max(wanted, 1)))
        starts = range(self.after, max(self.upto, self.after + 1), length)
        return [(start, min(start + length, self.upto)) for start in starts], None

    def within(self, parts: Sequence[tuple[int, int]], comparisons: Sequence[Comparison]) -> list[tuple[int, int]]:
        """Return what is left of parts without events that cannot meet all comparisons, by offset or by time."""
        after, upto = self.after, self.upto
        for path, operator, value in comparisons:
            if path == (ROWID,):
                after = max(after, value - (operator != ">")) if operator in ("=", ">", ">=") else after
                upto = min(upto, value - (operator == "<")) if operator in ("=", "<", "<=") else upto
            elif path == (self.time_column,) and operator in ("=", ">", ">="):
                # Times need not ascend: what comes before the first one that is late enough is all too early.
                with self._opened() as log:
                    after = max(after, log.first_since(value) - 1)
        bounded = ((max(first, after), min(last, upto)) for first, last in parts)
        return [(first, last) for first, last in bounded if first < last]

    def read(self, part: Any, conditions: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """Yield the events of a range, all that it held when the range was made."""
        assert not conditions, "a log takes no conditions"
        return prefetch(lambda: self._read(*part))

    def close(self) -> None:
        """Nothing is open: the stream stays open for the process."""

    def _read(self, reached: int, upto: int) -> Iterator[pa.RecordBatch]:
        with self._opened() as log:
            yield from self.read_from(log, reached, upto)

    @contextmanager
    def _opened(self) -> Iterator[Log]:
        store = system_for(self.connection.kind).load_log()(self.connection)
        try:
            fields = {name: kind for name, kind in self.types if name not in META_TYPES}
            yield open_to_read(store, self.stream_schema, self.stream, fields)
        finally:
            store.close()

    def read_from(self, log: Log, reached: int, upto: int) -> Iterator[pa.RecordBatch]:
        """Yield the events of a range, of a stream that is open."""
        schema = self.schema
        stored = [PUBLISHED_AT if name == self.time_column else name for name in schema.names]
        # The offsets show whether some are missing.
        asked = [name for name, _ in self.types if name == ROWID or name in stored]
        # A declared field has no column before the next publisher comes: readers add none.
        known = {**log.fields(), **META_TYPES}
        for batch in log.read_arrow(reached, upto, [name for name in asked if name in known]):
            offsets = batch.column(ROWID)
            self._check_gap(log, reached, offsets[0].as_py())
            reached = offsets[-1].as_py()
            rows = pa.RecordBatch.from_arrays(
                [
                    batch.column(name) if name in known else pa.nulls(len(batch), field.type)
                    for name, field in zip(stored, schema, strict=True)
                ],
                schema=schema,
            )
            yield self.mended(rows, offsets)
        self._check_gap(log, reached, upto + 1)

    def mended(self, rows: pa.RecordBatch, offsets: pa.Array) -> pa.RecordBatch:
        """Return rows of ascending offsets, without those that are left out, and with what came before its column."""
        rows = self._completed(rows, offsets)
        return rows.filter(pc.invert(pc.is_in(offsets, pa.array(self.without)))) if self.without else rows

    def _completed(self, rows: pa.RecordBatch, offsets: pa.Array) -> pa.RecordBatch:
        if not self.late or not len(rows):
            return rows
        first = bisect_left(self.late, offsets[0].as_py(), key=itemgetter(0))
        end = bisect_right(self.late, offsets[-1].as_py(), key=itemgetter(0))
        numbers = {offset: number for number, offset in enumerate(offsets.to_pylist())} if first < end else {}
        values: dict[str, list[Any]] = {}
        for offset, name, value in self.late[first:end]:
            if offset in numbers and name in rows.schema.names:
                values.setdefault(name, rows.column(name).to_pylist())[numbers[offset]] = value
        for name, column in values.items():
            field = rows.schema.field(name)
            rows = rows.set_column(rows.schema.get_field_index(name), field, pa.array(column, field.type))
        return rows

    def _check_gap(self, log: Log, reached: int, following: int) -> None:
        """Refuse a gap that retention made. A publish that was undone may leave one as well."""
        if following > reached + 1 and (floor := log.floor()) > reached:
            lost = min(floor, following - 1) - reached
            raise EventsLostError(
                f"The stream {self.stream!r} lost up to {lost:,} events before they were read: retention removed them.",
                lost=lost,
                hint=self.advice,
            )


def _field(name: str, kind: FieldType) -> pa.Field:
    return hinted(name, kind.base) if kind.base in ("json", "uuid") else pa.field(name, kind.arrow)


# ----------------------------------------------------------------------------------------------------------- from users


_AFTER_FROM = r"\b(?:[fF][rR][oO][mM]|[jJ][oO][iI][nN])\s+[A-Za-z_]\w*\s*\.\s*[A-Za-z_]\w*\b(?!\s*[.(])"


def naming_declared(sql: str, tables: SqlTables) -> str:
    """Return a query that names declared streams and targets as this database does: without schemas
    `events.page_views` is one word."""
    if tables.driver.has_schemas:
        return sql
    project = current()
    known: dict[str, tuple[str | Connection | None, str]] = {}
    for target in (target for pipeline in project.pipelines.values() for target in pipeline.targets):
        table = target.table
        known[table.full_name.lower()] = target.connection, tables.table(table.schema, table.name)
    for stream in project.streams.values():
        name = tables.connection.stream_table(stream)
        known[f"{stream.schema}.{stream.name}".lower()] = stream.connection, name

    def named(token: str) -> str:
        word, name = token.split(maxsplit=1)
        connection, quoted = known.get("".join(name.split()).lower(), (None, ""))
        is_here = quoted and project.connection(connection).resolved() == tables.connection
        return f"{word} {quoted}" if is_here else token

    return replaced(sql, _AFTER_FROM, named, tables.dialect) if known else sql


def reader_for(
    data: Input,
    source: str | Connection | None,
    default: Connection | None,
    partition_by: str | None = None,
    target: SqlTables | None = None,
) -> RowReader | None:
    """Return the reader of SQL or a stream; `None` for what Spark or this process has itself."""
    if isinstance(data, inputs.SourceSql):
        connection = current().connection(source) if source is not None or default is None else default
        # One connection to one database: it answers sooner than two, and is known to be the same database.
        same = target is not None and connection.resolved() == target.connection
        tables = target if target is not None and same else open_tables(connection)
        if tables is not target:
            # A target's file is made by its first load; one that is only read must be there.
            tables.connection.refuse_missing()
        sql = naming_declared(data.text, tables)
        return SqlReader(tables, sql, described(tables, sql), partition_by)
    if isinstance(data, inputs.Events):
        return stream_reader(data.stream, source)
    if isinstance(data, inputs.Readable):
        reader: RowReader = data.reader
        return reader
    return None


@contextmanager
def opened_reader(
    data: Input, source: str | Connection | None, default: Connection, target: SqlTables | None = None
) -> Iterator[RowReader | None]:
    """Yield what `reader_for` returns, and close it at the end."""
    reader = reader_for(data, source, default, target=target)
    with nullcontext() if reader is None else closing(reader):
        yield reader


@contextmanager
def opened_parts(reader: RowReader, wanted: int) -> Iterator[list[Any]]:
    """Yield the parts of a reader, with what they are read from open until the end."""
    parts, held = reader.parts(wanted)
    with nullcontext() if held is None else closing(held):
        yield parts


def read_all(reader: RowReader) -> Iterator[pa.RecordBatch]:
    """Yield all rows, read by this process."""
    with opened_parts(reader, 1) as parts:
        for part in parts:
            yield from reader.read(part)


def read_first(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read all batches before this returns; a file keeps them until they are used.

    A SQLite or DuckDB file has one writer. A load that held it while it waits for a slow source would keep every
    publisher out: so the rows come first, and the transaction lasts as long as writing takes."""
    spooled = _spooled(schema, batches)
    next(spooled)  # a generator that has begun closes its file, also when nobody reads it
    return spooled


def _spooled(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
    with tempfile.TemporaryFile(prefix="weft-spool-") as file:
        with pa.ipc.new_stream(file, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.seek(0)
        with pa.ipc.open_stream(file) as reader:
            yield None
            yield from reader


def open_tables(connection: Connection) -> SqlTables:
    """Return the tables of a connection; a clear error where it has none."""
    connection = current().for_tables(connection)
    tables: SqlTables = system_for(connection.kind).load_tables()(connection)
    return tables


def opened_tables(connection: Connection) -> closing[SqlTables]:
    """Open the tables of a connection for a block, and close them at its end."""
    return closing(open_tables(connection))


def stored_columns(tables: SqlTables, schema: str | None, table: str) -> list[Column] | None:
    """Return the columns that a table has now; `None` where there is no such table."""
    with tables.driver.session("read") as session:
        return tables.columns(session, schema, table)


def stream_reader(stream: str | Stream, connection: str | Connection | None = None, reached: int = 0) -> StreamReader:
    """Return a reader of what a stream holds now. `reached`: the offset up to which it was read before."""
    opened = runtime.open_stream(stream, connection, to_read=True)
    log, declared = opened.log, opened.stream
    types = {**log.fields(fresh=True)}
    types |= {name: kind for name, kind in declared.fields.items() if name not in types} | META_TYPES
    return StreamReader(
        opened.hub.connection.resolved(),
        declared.schema,
        declared.name,
        tuple(types.items()),
        log.floor(),
        log.head(reached),
    )
