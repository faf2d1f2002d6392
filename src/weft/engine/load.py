"""`weft.load`: read anything, write it exactly once.

The rows go the shortest way: inside the database where it has them already, from this process where it has them, else
by a Spark task that reads and writes, or a Spark query whose result a task writes. The transaction is the same each
time (`weft.systems.sql.commit`).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, Unpack

import pyarrow as pa

from weft.columns import canonical_schema
from weft.engine import inputs
from weft.engine.inputs import Input
from weft.engine.readers import Reader, SqlReader, open_tables, reader_for
from weft.errors import DeclarationError
from weft.project import current
from weft.spark_support import outcome
from weft.systems.base import Connection, system_for
from weft.systems.load import AnyMode, Columns, Counts, Load, LoadOptions, refuse_own
from weft.systems.sql import commit as sql_commit
from weft.systems.sql import ledger, staging
from weft.systems.sql.commit import Batches, Query, StagedRows
from weft.systems.sql.tables import SqlTables

if TYPE_CHECKING:
    from weft.engine import tasks

Engine = Literal["spark", "pushdown"]
P = ParamSpec("P")
R = TypeVar("R")


class Fit(Protocol):
    """Adapts a load to the columns of its source."""

    def __call__(self, load: Load, source: pa.Schema, dialect: str, quote: Callable[[str], str]) -> Load:
        """The load, with what is to be made of the columns in a dialect's words."""

    def runs_in(self, dialect: str) -> bool:
        """Whether a dialect has all the words."""


@dataclass(frozen=True)
class LoadResult:
    """What a load did. `engine`: `"spark"`, or `"pushdown"` where no Spark was needed."""

    rows_read: int
    inserted: int
    updated: int
    unchanged: int
    deleted: int
    quarantined: int
    seconds: float
    bytes: int
    engine: str
    replayed: bool = False
    """Whether a load with this `commit_key` was there already, so that nothing was done."""
    warnings: tuple[str, ...] = ()


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
    job = Job(planned, current().connection(connection), source, engine, transform_sql)
    counts, used = job.run(inputs.understand(data, has_source=source is not None))
    return LoadResult(**asdict(counts), seconds=time.perf_counter() - started, engine=used)


def _in_thread(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return the same function for coroutines."""

    @functools.wraps(function)
    async def run(*arguments: P.args, **options: P.kwargs) -> R:
        return await asyncio.to_thread(function, *arguments, **options)

    run.__name__ = run.__qualname__ = f"{function.__name__}_async"
    return run


load_async = _in_thread(load)


class Job:
    """A load that knows where its rows come from and where they go. `fit` adapts it to the columns of the source,
    `put_aside` takes the rows without a key from one into a Delta table, where they are not refused."""

    def __init__(
        self,
        planned: Load,
        connection: Connection,
        source: str | Connection | None,
        engine: Engine | None,
        transform_sql: str | None,
        fit: Fit | None = None,
        put_aside: Callable[[pa.Table], None] | None = None,
    ) -> None:
        self.load, self.engine, self.fit, self.put_aside = planned, engine, fit, put_aside
        self.connection, self.source = connection, source
        self.transform_sql = transform_sql

    def run(self, given: Input, opened: SqlTables | None = None) -> tuple[Counts, str]:
        """Load what was given; what it did, and where it ran. `opened` are the target's tables, which stay open."""
        if system_for(self.connection.kind).tables is None:
            return self._into_files(given)
        refuse_own(self.load.schema, self.load.table)
        tables = opened or open_tables(self.connection)
        reader = None
        try:
            reader = reader_for(given, self.source, self.connection, target=tables)
            return self._into_tables(given, reader, tables)
        finally:
            if opened is None:
                tables.close()
            if isinstance(reader, SqlReader):
                reader.tables.close()

    # ------------------------------------------------------------------------------------------------- SQL databases

    def fitted(self, source: pa.Schema, tables: SqlTables) -> Load:
        """The load, adapted to the columns of its source."""
        return self.load if self.fit is None else self.fit(self.load, source, tables.dialect, tables.quote)

    def engine_for(self, given: Input, reader: Reader | None, tables: SqlTables) -> str:
        """Where the rows go from their source to the target."""
        if self.transform_sql is None and self.engine != "spark" and self.fits_in(tables):
            if isinstance(reader, SqlReader) and _is_same(reader.tables, tables):
                return "pushdown"
            if isinstance(given, inputs.Memory):
                return "pushdown"
        if self.engine == "pushdown":
            raise DeclarationError(
                f"This load into {self.load.name} cannot be pushed down: its rows are not in {self.connection.label}.",
                hint="Leave engine= out, or read from the target's own connection.",
            )
        return "spark"

    def fits_in(self, tables: SqlTables) -> bool:
        """Whether the target's database can make the rows fit itself."""
        return self.fit is None or self.fit.runs_in(tables.dialect)

    def _prepare(self, tables: SqlTables, source: pa.Schema) -> None:
        self.load = self.fitted(source, tables)
        sql_commit.prepare(tables, self.load, source)

    def _into_tables(self, given: Input, reader: Reader | None, tables: SqlTables) -> tuple[Counts, str]:
        engine = self.engine_for(given, reader, tables)
        if engine == "spark":
            return self._by_spark(given, reader, tables), engine
        if isinstance(given, inputs.Memory):
            return self._from_here(given, tables), engine
        assert isinstance(reader, SqlReader)
        return self._pushed_down(reader, tables), engine

    def _pushed_down(self, reader: SqlReader, tables: SqlTables) -> Counts:
        self._prepare(tables, reader.schema)
        return sql_commit.commit(tables, self.load, Query(reader.sql, reader.schema))

    def _from_here(self, given: inputs.Memory, tables: SqlTables) -> Counts:
        schema, batches = given.schema, given.batches
        if not schema.names:
            found = _target_schema(tables, self.load)
            if found is None:
                return Counts()
            # No rows, no columns: there is nothing to fit.
            schema, batches, self.fit = found, [], None
        self._prepare(tables, schema)
        return sql_commit.commit(tables, self.load, Batches(schema, batches))

    def _by_spark(self, given: Input, reader: Reader | None, tables: SqlTables) -> Counts:
        from weft.engine import frames

        if reader is not None and self.transform_sql is None and self.fits_in(tables):
            frames.refuse_one_host(reader.one_host, "source")
            frames.refuse_one_host(tables.one_host, "target")
            self._prepare(tables, reader.schema)
            return self._copied(reader, tables)
        packed = given.packed if isinstance(given, inputs.Frame) else None
        if packed is not None and self.transform_sql is None and self.fits_in(tables):
            frames.refuse_one_host(tables.one_host, "target")
            schema = canonical_schema(packed.schema)
            self._prepare(tables, schema)
            return self._written(packed.frame, schema, tables, functools.partial(packed.unpack, packed.schema))
        frame, schema = self.framed(given, reader, tables)
        self._prepare(tables, schema)
        return self._written(frame, schema, tables)

    def framed(self, given: Input, reader: Reader | None, tables: SqlTables) -> tuple[Any, pa.Schema]:
        """The rows as a DataFrame; where the database cannot make them fit, Spark has."""
        from weft.engine import frame_projection, frames

        frames.refuse_one_host(tables.one_host, "target")
        frame = frames.of(given, reader, self.source, self.transform_sql)
        if self.fit is not None and not self.fits_in(tables):
            made = self.fit(self.load, frame_projection.schema_of(frame), "spark", frame_projection.quote)
            frame = frame_projection.projected(frame, made)
            self.load, self.fit = replace(made, projection=None), None
        return frame, frame_projection.schema_of(frame)

    def _copied(self, reader: Reader, tables: SqlTables) -> Counts:
        """One task that reads and writes: no row crosses the JVM."""
        from weft.engine import session, tasks
        from weft.engine.progress import progress

        if ledger.is_committed(tables, self.load):
            return Counts(replayed=True)
        tables.close()
        parts, held = reader.parts(1)
        try:
            with progress(f"loading {self.load.name}") as counter, outcome.explained(f"load {self.load.name}"):
                job = functools.partial(tasks.copy, reader, tables, self.load, counter)
                (found,) = session.spark().sparkContext.parallelize(parts, 1).map(job).collect()
        finally:
            if held is not None:
                held.close()
        return outcome.unpack(found)  # type: ignore[no-any-return]

    def _written(self, frame: Any, schema: pa.Schema, tables: SqlTables, unpack: tasks.Unpack | None = None) -> Counts:
        """A query of Spark's, whose rows become one transaction of the target's."""
        from weft.engine import session, tasks
        from weft.engine.progress import progress

        if ledger.is_committed(tables, self.load):
            return Counts(replayed=True)
        with progress(f"loading {self.load.name}") as counter, outcome.explained(f"load {self.load.name}"):
            if not session.is_local() and not tables.one_writer:
                return self._staged(frame, schema, tables, unpack)
            tables.close()
            # On one machine a single writer is faster than several and a move: measured in docs/benchmarks.md.
            write = tasks.unpacking(unpack, tasks.write(tables, self.load, schema, counter))
            written = frame.coalesce(1).mapInArrow(write, tasks.RESULT).collect()
        if not written:
            # Spark calls no task for a query without partitions.
            return sql_commit.commit(tables, self.load, Batches(schema, []))
        return outcome.unpack(bytes(written[0][0]))  # type: ignore[no-any-return]

    def _staged(self, frame: Any, schema: pa.Schema, tables: SqlTables, unpack: tasks.Unpack | None = None) -> Counts:
        """Each task writes its rows into a staging table; the driver moves those of the attempts that count."""
        from weft.engine import tasks

        with staging.staging_table(tables, schema) as table:
            stage = tasks.unpacking(unpack, tasks.stage(tables, table, schema))
            written = frame.mapInArrow(stage, tasks.RESULT).collect()
            found = [outcome.unpack(bytes(each)) for (each,) in written]
            rows = StagedRows(
                table, schema, tuple(attempt for attempt, _, _ in found), sum(sent for _, _, sent in found)
            )
            return sql_commit.commit(tables, self.load, rows)

    # ------------------------------------------------------------------------------------------------ files and Delta

    def _into_files(self, given: Input) -> tuple[Counts, str]:
        from weft.engine import files

        files.refuse(self.connection, self.load)
        if self.engine == "pushdown":
            raise DeclarationError(f"A load into {self.connection.label} runs on Spark.", hint="Leave engine= out.")
        reader = reader_for(given, self.source, self.connection)
        try:
            return (self._written_files if self.fit is None else self._fitted_files)(given, reader), "spark"
        finally:
            if isinstance(reader, SqlReader):
                reader.tables.close()

    def _written_files(self, given: Input, reader: Reader | None) -> Counts:
        from weft.engine import arrow_copy, files, frames

        rows = arrow_copy.rows_of(given, reader) if self.transform_sql is None else None
        if rows is not None:
            frames.refuse_one_host(reader is not None and reader.one_host, "source")
            counts = files.copy(rows, self.connection, self.load)
            if counts is not None:
                return counts
        return files.write(frames.of(given, reader, self.source, self.transform_sql), self.connection, self.load)

    def _fitted_files(self, given: Input, reader: Reader | None) -> Counts:
        """Rows for a declared table: as they are where they fit, else as Spark makes them fit."""
        from weft.engine import arrow_copy, files, frame_projection, frames

        assert self.fit is not None
        rows = arrow_copy.rows_of(given, reader)
        frame = None
        if rows is None:
            frame = frames.of(given, reader, self.source)
            schema = frame_projection.schema_of(frame)
        else:
            frames.refuse_one_host(reader is not None and reader.one_host, "source")
            schema = rows.schema
        self.load = self.fit(self.load, schema, "spark", frame_projection.quote)
        if rows is not None and self.load.projection is None and not self.load.checks:
            counts = files.copy(rows, self.connection, self.load)
            if counts is not None:
                return counts
        frame = frames.of(given, reader, self.source) if frame is None else frame
        with frame_projection.expected(frame_projection.projected(frame, self.load), self.load) as (ready, warnings):
            return replace(files.write(ready, self.connection, self.load, self.put_aside), warnings=warnings)


def _is_same(one: SqlTables, other: SqlTables) -> bool:
    return one is other or (one.dialect == other.dialect and one.identity() == other.identity())


def _target_schema(tables: SqlTables, planned: Load) -> pa.Schema | None:
    from weft.systems.load import SCD2_COLUMNS

    with tables.driver.session("read") as session:
        columns = tables.columns(session, planned.schema, planned.table)
    if columns is None:
        return None
    own = SCD2_COLUMNS if planned.mode == "scd2" else ()
    return pa.schema([each.field for each in columns if not each.generated and each.name not in own])
