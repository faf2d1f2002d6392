"""What a run of a pipeline would do, found out without doing it: a trial load is rolled back, nothing is created."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from weft.engine import inputs, run
from weft.engine.inputs import Input
from weft.engine.load import Job
from weft.engine.readers import Reader, SqlReader, open_tables, reader_for
from weft.engine.spool import read_first
from weft.errors import LoadRefusedError, WeftError
from weft.pipelines.declare import Pipeline, Target
from weft.project import current
from weft.spark_support import outcome
from weft.systems.base import system_for
from weft.systems.load import Counts, Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.checks import refuse_unknown_columns
from weft.systems.sql.commit import Batches, CarryOut, Query
from weft.systems.sql.queries import subquery
from weft.systems.sql.tables import Slice, SqlTables
from weft.systems.sql.target import create_statement


@dataclass
class Preview:
    """What one target of a pipeline would get."""

    target: str
    mode: str
    engine: str
    sql: str | None = None
    plan: list[str] = field(default_factory=list)
    sample: pa.Table | None = None
    creates: str | None = None
    """The statement that would create the table, where there is none."""
    adds: list[str] = field(default_factory=list)
    """Columns that would be added to it."""
    counts: Counts | None = None
    refused: WeftError | None = None
    """Why the load would fail."""
    late: int = 0
    watermark: str | None = None


def preview(
    pipeline: Pipeline,
    target: Target,
    moment: datetime,
    *,
    given: Input | None = None,
    rows: int = 5,
    trial: bool = True,
) -> Preview:
    """Find out what a run would do to one target; with what its function gave, where that was called already."""
    load = run.planned(pipeline, target, f"preview {moment.isoformat()}", moment)
    given = run.understand(pipeline, run.produce(pipeline)) if given is None else given
    with run.prepared(pipeline, target, load, given) as ready:
        found = Preview(target.name, load.mode, "spark", late=ready.late)
        mark = ready.job.load.watermark
        found.watermark = None if mark is None else f"{mark.column} up to {mark.text}"
        if system_for(ready.job.connection.kind).tables is None:
            _of_files(found, ready.job, ready.given, rows, trial)
            return found
        with _made_elsewhere(ready.job) as job:
            tables = open_tables(job.connection)
            reader = None
            try:
                reader = reader_for(ready.given, job.source, job.connection, target=tables)
                _of_tables(found, job, ready.given, reader, tables, rows, trial)
            finally:
                tables.close()
                if isinstance(reader, SqlReader):
                    reader.tables.close()
    if found.counts is not None:
        found.counts = replace(found.counts, warnings=(*ready.warnings, *found.counts.warnings))
    return found


@contextmanager
def _made_elsewhere(job: Job) -> Iterator[Job]:
    """A load into a file that is not there, as one into an empty file elsewhere: the first load makes it, not a
    preview."""
    if not job.connection.is_missing():
        yield job
        return
    with TemporaryDirectory(prefix="weft-preview-") as folder:
        empty = replace(job.connection, path=os.path.join(folder, "empty"), url=None)  # type: ignore[call-arg]
        with run.opened(empty) as tables, tables.driver.session("publish"):
            pass
        is_same = current().connection(job.source).resolved() == job.connection.resolved()
        yield Job(job.load, empty, empty if is_same else job.source, job.engine, job.transform_sql, job.fit)


def _of_tables(
    found: Preview, job: Job, given: Input, reader: Reader | None, tables: SqlTables, rows: int, trial: bool
) -> None:
    found.engine = job.engine_for(given, reader, tables)
    if isinstance(reader, SqlReader):
        found.sql = reader.sql
        found.plan = explain(reader.tables, reader.sql)
    frame: Any = None
    source: Query | Batches | None = None
    if isinstance(given, inputs.Memory):
        given = inputs.Memory(given.schema, list(given.batches))
        if not given.schema.names:  # no rows at all
            found.counts = Counts()
            return
    if job.fits_in(tables) and reader is not None:
        schema = reader.schema
        found.sample = _first(reader, rows)
        if found.engine == "pushdown":
            assert isinstance(reader, SqlReader)
            source = Query(reader.sql, schema)
        else:
            # As in a run: who holds the one writer's place must not wait for a source, which may be the same file.
            source = Batches(schema, read_first(schema, _all(reader)) if trial and tables.one_writer else _all(reader))
    elif job.fits_in(tables) and isinstance(given, inputs.Memory):
        schema = given.schema
        found.sample = pa.Table.from_batches(given.batches, schema).slice(0, rows)
        source = Batches(schema, given.batches)
    else:
        frame, schema = job.framed(given, reader, tables)
        _show_frame(found, frame, rows)
    load = job.fitted(schema, tables)
    _compare(found, load, schema, tables)
    if trial and found.refused is None:
        # Without its columns there is nothing yet that the rows could be compared with.
        carry_out = sql_commit.attempt_unmade if found.creates is not None or found.adds else sql_commit.attempt
        try:
            counts = (
                carry_out(tables, load, source)
                if source is not None
                else _by_task(frame, schema, tables, load, carry_out)
            )
        except WeftError as error:
            found.refused = error
            return
        found.counts = replace(counts, inserted=0) if found.adds else counts


def _first(reader: Reader, rows: int) -> pa.Table:
    if isinstance(reader, SqlReader):
        limited = Slice(f"SELECT * FROM {subquery(reader.sql)} AS q LIMIT {rows}")
        return pa.Table.from_batches(reader.tables.read(limited, reader.schema), reader.schema)
    first = itertools.islice(_all(reader), 1)
    return pa.Table.from_batches(first, reader.schema).slice(0, rows)


def _all(reader: Reader) -> Iterator[pa.RecordBatch]:
    parts, held = reader.parts(1)
    try:
        for part in parts:
            yield from reader.read(part)
    finally:
        if held is not None:
            held.close()


def _by_task(frame: Any, schema: pa.Schema, tables: SqlTables, load: Load, carry_out: CarryOut) -> Counts:
    """A trial of rows that only Spark has: where a run would write them, in a task."""
    from weft.engine import tasks

    tables.close()
    work = tasks.write(tables, load, schema, None, carry_out)
    with outcome.explained(f"try the load of {load.name}"):
        written = frame.coalesce(1).mapInArrow(work, tasks.RESULT).collect()
    if not written:
        # Spark calls no task for a query without partitions.
        return carry_out(tables, load, Batches(schema, []))
    return outcome.unpack(bytes(written[0][0]))  # type: ignore[no-any-return]


def _compare(found: Preview, load: Load, schema: pa.Schema, tables: SqlTables) -> None:
    written = load.written(schema)
    load.check_source(written.names)
    refuse_unknown_columns(load.checks, written.names, load.name)
    with tables.driver.session("read") as session:
        columns = tables.columns(session, load.schema, load.table)
    if columns is None:
        found.creates = create_statement(tables, load, written)
        return
    present = {column.name for column in columns}
    found.adds = [name for name in written.names if name not in present]
    if found.adds and (load.declared is None or load.declared.on_drift != "evolve"):
        found.refused = LoadRefusedError(f"The table {load.name} has no column {found.adds[0]!r}.")
        found.adds = []


def explain(tables: SqlTables, sql: str) -> list[str]:
    """Return the plan of a query, as its database has it; an error of the query is raised."""
    with tables.driver.session("read") as session:
        plan = session.rows(f"{tables.explain} {sql}")
    return [" ".join(str(value) for value in row if value is not None) for row in plan]


def _of_files(found: Preview, job: Job, given: Input, rows: int, trial: bool) -> None:
    from weft.engine import frame_projection, frames
    from weft.engine.dry_run import DryRun

    reader = reader_for(given, job.source, job.connection)
    if isinstance(reader, SqlReader):
        found.sql = reader.sql
    frame = frames.of(given, reader, job.source)
    load = job.load
    if job.fit is not None:
        load = job.fit(load, frame_projection.schema_of(frame), "spark", frame_projection.quote)
        frame = frame_projection.projected(frame, load)
    _show_frame(found, frame, rows)
    try:
        tried = DryRun(frame, job.connection, load)
        found.creates = tried.creates
        found.counts = tried.run() if trial else None
    except WeftError as error:
        found.refused = error


def _show_frame(found: Preview, frame: Any, rows: int) -> None:
    found.sample = frame.limit(rows).toArrow()
    if not found.plan:
        found.plan = frame._jdf.queryExecution().simpleString().splitlines()
