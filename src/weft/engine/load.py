"""`weft.load`: read anything, write it exactly once.

The rows go the shortest way: inside the database where it has them already, from this process where it has them, else
by a task that reads and writes, or a Spark query whose result a task writes. The transaction is the same each time
(`weft.systems.sql.commit`). The first kind of task runs in Spark where Spark is warm, else in this process: to start
a JVM would take longer than most such loads, and it would pass the rows to one Python process all the same.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, Unpack

import pyarrow as pa

from weft.columns import canonical_schema, has_objects, hint_of, hinted, is_nested
from weft.engine import inputs
from weft.engine.inputs import Input
from weft.engine.passed_columns import passed_columns
from weft.engine.readers import RowReader, SqlReader, open_tables, opened_parts, opened_reader, stored_columns
from weft.errors import DeclarationError
from weft.project import current
from weft.spark_support import outcome
from weft.systems.base import Connection, system_for
from weft.systems.load import SCD2_COLUMNS, AnyMode, Columns, Counts, Load, LoadOptions, refuse_own
from weft.systems.sql import commit as sql_commit
from weft.systems.sql import ledger, staging
from weft.systems.sql.commit import BatchedRows, QueriedRows, StagedRows
from weft.systems.sql.tables import SqlTables
from weft.systems.target import Reject

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from weft.engine import tasks

_log = logging.getLogger("weft.engine")
Engine = Literal["spark", "pushdown"]
P = ParamSpec("P")
R = TypeVar("R")


class Projection(Protocol):
    """Maps the columns of a source to those of a target."""

    def __call__(self, load: Load, source: pa.Schema, tables: SqlTables | None) -> Load:
        """Return the load with the columns that it writes, in the SQL of these tables; in Spark's where `None`."""

    def written_to(self, name: str) -> tuple[str, pa.Field | None]:
        """Return the column that a source's column is written to, and its declaration where it is written as it is."""

    @property
    def has_normalizers(self) -> bool:
        """Whether a column is made by expressions, which need the types of the source."""

    def runs_in(self, dialect: str) -> bool:
        """Return whether a dialect can express all of it."""


@dataclass(frozen=True)
class LoadResult(Counts):
    """What a load did, how long it took, and its engine: `"spark"`, `"process"` where this process copied the rows of
    another database, or `"pushdown"` where the database or this process had them."""

    seconds: float = 0.0
    engine: str = ""


def load(
    data: object,
    *,
    target: str | tuple[str | None, str],
    connection: str | Connection | None = None,
    source: str | Connection | None = None,
    mode: AnyMode = "append",
    keys: Columns = (),
    commit_key: str | None = None,
    engine: Engine | None = None,
    transform_sql: str | None = None,
    **options: Unpack[LoadOptions],
) -> LoadResult:
    """Load rows into a table, all of them or none.

    `data` is SQL (run by `source`), a Spark DataFrame, an Arrow table, a polars or pandas frame, a list of dicts, an
    iterator of these, a path or a stream. `target` is `("schema", "table")` on `connection`. Modes: `append`,
    `truncate`, `merge` (= `scd1`) and `scd2`; the last two need `keys`. The same `commit_key` twice changes nothing.
    `transform_sql` is Spark SQL over the table `source`. `engine` forces `"spark"` or `"pushdown"`.
    """
    started = time.perf_counter()
    if engine not in (None, "spark", "pushdown"):
        raise DeclarationError(f"There is no engine {engine!r}.", hint="Engines: spark, pushdown.")
    planned = Load.declare(target=target, mode=mode, keys=keys, commit_key=commit_key, **options)
    target_connection = current().connection(connection)
    job = Job(planned, target_connection, source, engine, transform_sql)
    understood = inputs.understand(data, has_source=source is not None)
    counts, used = job.run(
        inputs.for_connection(understood, target_connection if source is None else current().connection(source))
    )
    return LoadResult(**asdict(counts), seconds=time.perf_counter() - started, engine=used)


def _in_thread(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return a coroutine function that runs the function in a thread."""

    @functools.wraps(function)
    async def run(*arguments: P.args, **options: P.kwargs) -> R:
        return await asyncio.to_thread(function, *arguments, **options)

    run.__name__ = run.__qualname__ = f"{function.__name__}_async"
    return run


load_async = _in_thread(load)


@dataclass
class Job:
    """A load that knows where its rows come from and where they go."""

    load: Load
    connection: Connection
    source: str | Connection | None = None
    engine: Engine | None = None
    transform_sql: str | None = None
    projection: Projection | None = None
    reject: Reject | None = None
    """Takes the rows without a key from a load into a Delta table, where they do not fail it."""
    _alters_keys: bool = field(default=False, init=False)
    """Whether SQL gets objects of JSON as one type, with the keys of all."""

    def run(self, data: Input, opened: SqlTables | None = None) -> tuple[Counts, str]:
        """Load the data; what it did, and where it ran. `opened` are the target's tables, which stay open."""
        if system_for(self.connection.kind).tables is None:
            return self._into_files(data), "spark"
        refuse_own(self.load.schema, self.load.table)
        tables = opened or open_tables(self.connection)
        try:
            with opened_reader(data, self.source, self.connection, tables) as reader:
                return self._into_tables(data, reader, tables)
        finally:
            if opened is None:
                tables.close()

    # ------------------------------------------------------------------------------------------------- SQL databases

    def projected(self, source: pa.Schema, tables: SqlTables) -> Load:
        """Return the load with the columns that it writes."""
        return self.load if self.projection is None else self.projection(self.load, source, tables)

    def engine_for(self, data: Input, reader: RowReader | None, tables: SqlTables) -> str:
        """Return where the rows go from their source to the target."""
        if self.transform_sql is None and self.engine != "spark" and self.can_project(tables):
            if isinstance(reader, SqlReader) and _is_same(reader.tables, tables):
                return "pushdown"
            if isinstance(data, inputs.Memory):
                return "pushdown"
        if self.engine == "pushdown":
            raise DeclarationError(
                f"This load into {self.load.name} cannot be pushed down: its rows are not in {self.connection.label}.",
                hint="Leave engine= out, or read from the target's own connection.",
            )
        return "process" if self._is_copied_here(reader, tables) else "spark"

    def _is_copied_here(self, reader: RowReader | None, tables: SqlTables) -> bool:
        """Return whether this process does what a task of Spark would: it would have to start Spark for that."""
        if reader is None or self.engine is not None or self.transform_sql is not None or not self.can_project(tables):
            return False
        from weft.engine import session

        return session.is_cold()

    def can_project(self, tables: SqlTables) -> bool:
        """Return whether the target's database can make its columns itself."""
        return self.projection is None or self.projection.runs_in(tables.dialect)

    def with_documents(self, data: inputs.Memory, tables: SqlTables | None) -> inputs.Memory:
        """Return rows with JSON where the target has no column of objects or lists: so objects keep their own keys."""
        if data.with_documents is None:
            return data
        documents = self._documents(data.schema, tables)
        data = data.with_documents(documents) if documents else data
        if data.why_refused is not None:
            # Before a table is made.
            raise DeclarationError(data.why_refused, hint="A column of JSON or of texts takes them.")
        return data

    def _documents(self, source: pa.Schema, tables: SqlTables | None) -> list[str]:
        """Return the columns of objects and lists that are none in the target, and that SQL passes on as they are."""
        nested = [each for each in source if is_nested(each.type)]
        passed = passed_columns(self.transform_sql, [each.name for each in nested])
        self._alters_keys = any(has_objects(each.type) and each.name not in passed for each in nested)
        kept = self._kept_as_json([(passed[each.name], each) for each in nested if each.name in passed], tables)
        return [each.name for each in kept]

    def _kept_as_json(self, written: Sequence[tuple[str, pa.Field]], tables: SqlTables | None) -> list[pa.Field]:
        """Return those of these columns of objects and lists, each with the name under which it is written, that are
        none in the target."""
        kept = []
        for column, wanted in self._wanted(written, tables):
            if wanted is not None:
                is_document = not is_nested(wanted.type)
            else:
                is_document = tables is not None and tables.sql_type(column) == tables.sql_type(
                    hinted(column.name, "json")
                )
            kept += [column] if is_document else []
        return kept

    def _wanted(
        self, written: Sequence[tuple[str, pa.Field]], tables: SqlTables | None
    ) -> Iterator[tuple[pa.Field, pa.Field | None]]:
        """Yield these columns, each with the one that the target has, or is declared to have, under its name there."""
        columns = None
        if written and tables is not None and not self.connection.is_missing():
            columns = stored_columns(tables, self.load.schema, self.load.table)
        stored = {each.name.lower(): each.field for each in columns or ()}
        for name, column in written:
            name, declared = (name, None) if self.projection is None else self.projection.written_to(name)
            yield column, stored.get(name.lower(), declared)

    def _warn_of_keys(self, result: pa.Schema, tables: SqlTables) -> None:
        """Say which columns of JSON have objects with the keys of others, because SQL needs the type of objects."""
        objects = [(each.name, each) for each in result if has_objects(each.type)] if self._alters_keys else []
        for each in self._kept_as_json(objects, tables):
            _log.warning(
                "%s: each object in the column %r of %s gets the keys of all, with nulls, as transform_sql does more "
                "than pass it on. SQL that only names a column (SELECT id, doc FROM source) leaves its objects as they "
                "are; so do texts of JSON in the place of objects.",
                self.load.name,
                each.name,
                self.connection.label,
            )

    def _chosen(self, columns: StructType, tables: SqlTables | None) -> list[str]:
        from weft.engine import frame_projection

        source = frame_projection.arrow_of(columns)
        return [*self._documents(source, tables), *self._written_numbers(source, tables)]

    def _written_numbers(self, source: pa.Schema, tables: SqlTables | None) -> list[str]:
        """Return the columns of floats that are decimals or texts in the target, and with which nothing is done on the
        way: these keep digits that a float does not have."""
        if tables is None or self.load.checks or (self.projection is not None and self.projection.has_normalizers):
            return []
        floats = {each.name: each for each in source if pa.types.is_floating(each.type)}
        passed = passed_columns(self.transform_sql, floats)
        wanted = self._wanted([(new, floats[name]) for name, new in passed.items()], tables)
        return [column.name for column, kept in wanted if kept is not None and _keeps_digits(kept)]

    def _prepare(self, tables: SqlTables, source: pa.Schema) -> None:
        self.load = self.projected(source, tables)
        sql_commit.prepare(tables, self.load, source)

    def _into_tables(self, data: Input, reader: RowReader | None, tables: SqlTables) -> tuple[Counts, str]:
        if isinstance(data, inputs.Memory):
            data = self.with_documents(data, tables)
        engine = self.engine_for(data, reader, tables)
        if engine == "spark":
            return self._by_spark(data, reader, tables), engine
        if engine == "process":
            assert reader is not None
            return self._copied_here(reader, tables), engine
        if isinstance(data, inputs.Memory):
            return self._from_here(data, tables), engine
        assert isinstance(reader, SqlReader)
        self._prepare(tables, reader.schema)
        return sql_commit.commit(tables, self.load, QueriedRows(reader.sql, reader.schema)), engine

    def _from_here(self, data: inputs.Memory, tables: SqlTables) -> Counts:
        schema, batches = data.schema, data.batches
        if not schema.names:
            stored = _target_schema(tables, self.load)
            if stored is None:
                return Counts()
            # No rows, no columns: there is nothing to project.
            schema, batches, self.projection = stored, [], None
        return sql_commit.commit(tables, *self.prepared(inputs.Memory(schema, batches), tables))

    def prepared(self, data: inputs.Memory, tables: SqlTables) -> tuple[Load, BatchedRows]:
        """Return the load of rows that this process has, ready to be committed."""
        self._prepare(tables, data.schema)
        return self.load, BatchedRows(data.schema, data.batches)

    def _by_spark(self, data: Input, reader: RowReader | None, tables: SqlTables) -> Counts:
        from weft.engine import session

        session.refuse_one_host(reader is not None and reader.one_host, "The source of this load")
        session.refuse_one_host(tables.one_host, "The target of this load")
        if self.transform_sql is None and self.can_project(tables):
            if reader is not None:
                self._prepare(tables, reader.schema)
                return self._copied(reader, tables)
            packed = data.packed if isinstance(data, inputs.Frame) else None
            if packed is not None:
                schema = canonical_schema(packed.schema)
                self._prepare(tables, schema)
                return self._written(packed.frame, schema, tables, functools.partial(packed.unpack, packed.schema))
        frame, schema = self.frame_of(data, reader, tables)
        self._prepare(tables, schema)
        return self._written(frame, schema, tables)

    def frame_of(self, data: Input, reader: RowReader | None, tables: SqlTables) -> tuple[Any, pa.Schema]:
        """Return the rows as a DataFrame, with the target's columns where the database cannot make them."""
        from weft.engine import frame_projection, frames

        chosen = functools.partial(self._chosen, tables=tables)
        frame = frames.of(data, reader, self.source, self.transform_sql, documents=chosen)
        if self.projection is not None and not self.can_project(tables):
            load = self.projection(self.load, frame_projection.schema_of(frame), None)
            frame = frame_projection.projected(frame, load)
            self.load, self.projection = replace(load, projection=None), None
        schema = frame_projection.schema_of(frame)
        self._warn_of_keys(schema, tables)
        return frame, schema

    def _copied_here(self, reader: RowReader, tables: SqlTables) -> Counts:
        """Read and write in this process, as a task would."""
        from weft.engine import tasks, warm
        from weft.engine.progress import progress

        warm.start_at_exit(current().root)
        self._prepare(tables, reader.schema)
        if ledger.is_committed(tables, self.load):
            return Counts(replayed=True)
        with opened_parts(reader, 1) as (part,), progress(f"loading {self.load.name}") as counter:
            return tasks.copied(reader, tables, self.load, counter, part)

    def _copied(self, reader: RowReader, tables: SqlTables) -> Counts:
        """Read and write in one task: no row crosses the JVM."""
        from weft.engine import session, tasks
        from weft.engine.progress import progress

        if ledger.is_committed(tables, self.load):
            return Counts(replayed=True)
        tables.close()
        with (
            opened_parts(reader, 1) as parts,
            progress(f"loading {self.load.name}") as counter,
            outcome.explained(f"load {self.load.name}"),
        ):
            job = functools.partial(tasks.copy, reader, tables, self.load, counter)
            (result,) = session.spark().sparkContext.parallelize(parts, 1).map(job).collect()
        return outcome.unpack(result)  # type: ignore[no-any-return]

    def _written(self, frame: Any, schema: pa.Schema, tables: SqlTables, unpack: tasks.Unpack | None = None) -> Counts:
        """Write the rows of a DataFrame in one transaction of the target."""
        from weft.engine import session, tasks
        from weft.engine.progress import progress

        if ledger.is_committed(tables, self.load):
            return Counts(replayed=True)
        with progress(f"loading {self.load.name}") as counter, outcome.explained(f"load {self.load.name}"):
            if not session.is_local() and not tables.one_writer:
                return self._staged(frame, schema, tables, unpack)
            # On one machine one writer is faster than several that stage their rows to be moved.
            return tasks.write_frame(frame, tables, self.load, schema, counter, unpack)

    def _staged(self, frame: Any, schema: pa.Schema, tables: SqlTables, unpack: tasks.Unpack | None) -> Counts:
        """Let each task write its rows into a staging table, and move the rows of the attempts that count."""
        from weft.engine import tasks

        with staging.staging_table(tables, schema) as table:
            staged = tasks.stage_frame(frame, tables, table, schema, unpack)
            attempts = tuple(attempt for attempt, _, _ in staged)
            rows = StagedRows(table, schema, attempts, sum(sent for _, _, sent in staged))
            return sql_commit.commit(tables, self.load, rows)

    # ------------------------------------------------------------------------------------------------ files and Delta

    def _into_files(self, data: Input) -> Counts:
        """Load rows as they are where they fit, else as Spark makes them fit."""
        from weft.engine import frame_projection, frames, session, spark_io

        spark_io.refuse(self.connection, self.load)
        if self.engine == "pushdown":
            raise DeclarationError(f"A load into {self.connection.label} runs on Spark.", hint="Leave engine= out.")
        if isinstance(data, inputs.Memory):
            data = self.with_documents(data, None)
        with opened_reader(data, self.source, self.connection) as reader:
            session.refuse_one_host(reader is not None and reader.one_host, "The source of this load")
            rows = spark_io.rows_of(data, reader) if self.transform_sql is None else None
            chosen = functools.partial(self._chosen, tables=None)
            frame = None
            if rows is None:
                frame = frames.of(data, reader, self.source, self.transform_sql, documents=chosen)
            if self.projection is not None:
                schema = frame_projection.schema_of(frame) if rows is None else rows.schema
                self.load = self.projection(self.load, schema, None)
            if rows is not None and self.load.projection is None and not self.load.checks:
                counts = spark_io.copy(rows, self.connection, self.load)
                if counts is not None:
                    return counts
            frame = frames.of(data, reader, self.source) if frame is None else frame
            frame = frame_projection.projected(frame, self.load)
            with frame_projection.expected(frame, self.load) as (checked, warnings):
                return replace(spark_io.write(checked, self.connection, self.load, self.reject), warnings=warnings)


def _is_same(one: SqlTables, other: SqlTables) -> bool:
    return one is other or (one.dialect == other.dialect and one.identity() == other.identity())


def _keeps_digits(column: pa.Field) -> bool:
    return pa.types.is_decimal(column.type) or (pa.types.is_string(column.type) and hint_of(column) is None)


def _target_schema(tables: SqlTables, load: Load) -> pa.Schema | None:
    columns = stored_columns(tables, load.schema, load.table)
    if columns is None:
        return None
    own = SCD2_COLUMNS if load.mode == "scd2" else ()
    return pa.schema([each.field for each in columns if not each.generated and each.name not in own])
