"""The preview of a run: a trial load is rolled back, and nothing is created."""

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
from weft.engine.models import replacing
from weft.engine.models.build import ModelRun
from weft.engine.models.inputs import Observer
from weft.engine.readers import (
    RowReader,
    SqlReader,
    opened_reader,
    opened_tables,
    read_all,
    read_first,
    reader_for,
    stored_columns,
)
from weft.errors import WeftError
from weft.pipelines.declare import Pipeline, PipelineTarget
from weft.pipelines.models import Model
from weft.project import current
from weft.spark_support import outcome
from weft.systems.base import Connection, system_for
from weft.systems.load import Counts, Load
from weft.systems.sql.checks import refuse_unknown_columns
from weft.systems.sql.commit import BatchedRows, QueriedRows
from weft.systems.sql.tables import Slice, SqlTables, subquery
from weft.systems.sql.target import create_statement
from weft.systems.sql.trial import attempt, attempt_unmade


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
    target: PipelineTarget,
    moment: datetime,
    *,
    data: Input | None = None,
    rows: int = 5,
    trial: bool = True,
) -> Preview:
    """Find out what a run would do to one target; with what its function returned, where that was called already."""
    if isinstance(pipeline, Model):
        with Observer() as observer:
            return _preview_model(pipeline, moment, observer, rows, trial)
    load = run.plan_load(pipeline, target, f"preview {moment.isoformat()}", moment)
    data = run.understand(pipeline, run.produce(pipeline)) if data is None else data
    ready = run.prepare_load(pipeline, target, load, data)
    result = Preview(target.name, load.mode, "spark", late=ready.late)
    if isinstance(data, inputs.SparkSql):
        result.sql = data.text
    mark = ready.job.load.watermark
    result.watermark = None if mark is None else f"{mark.column} up to {mark.text}"
    if ready.is_idle:
        result.engine, result.counts = "none", Counts(warnings=ready.warnings)
        return result
    if system_for(ready.job.connection.kind).tables is None:
        _preview_files(result, ready.job, ready.data, rows, trial)
        return result
    with _into_empty_file(ready.job) as job:
        try:
            with (
                opened_tables(job.connection) as tables,
                opened_reader(ready.data, job.source, job.connection, tables) as reader,
            ):
                _preview_tables(result, job, ready.data, reader, tables, rows, trial)
        except WeftError as error:
            _name_real_file(error, job.connection, ready.job.connection)
            raise
        if result.refused is not None:
            _name_real_file(result.refused, job.connection, ready.job.connection)
    if result.counts is not None:
        result.counts = replace(result.counts, warnings=(*ready.warnings, *result.counts.warnings))
    return result


def _preview_model(model: Model, moment: datetime, observer: Observer, rows: int, trial: bool) -> Preview:
    """Find out what the next build would do."""
    build = ModelRun(model, f"preview {moment.isoformat()}", moment, observer=observer)
    ready = build.prepare(observer)
    tables, stored = ready.tables, ready.stored
    result = Preview(model.target.name, model.materialise, "pushdown")
    if model.materialise == "view" and tables is not None:
        result.sql = ready.result.query(all_rows=True)
        result.plan = explain(tables, result.sql)
        result.sample = _first(SqlReader(tables, result.sql, tables.describe(result.sql)), rows)
        result.creates = None if stored.state is not None else f"CREATE VIEW {model.target.name}"
        return result
    if ready.is_idle:
        result.engine, result.counts = "none", Counts()
        return result
    data = ready.result.data()
    job = build.job(ready)
    if tables is None:
        job.load = replace(job.load, replaces_all=ready.is_full)
        result.engine = "spark"
        _preview_files(result, job, data, rows, trial)
        return result
    if ready.is_full and stored.columns is not None:
        if replacing.has_same_columns(tables, job.load, stored, inputs.schema_of(data)):
            job.load = replace(job.load, replaces_all=True)
        else:  # in a new table
            job.load = replace(job.load, table=f"{job.load.table}{replacing.NEW}", watermark=None)
    reader = data.reader if isinstance(data, inputs.Readable) else None
    _preview_tables(result, job, data, reader, tables, rows, trial)
    return result


def _name_real_file(error: WeftError, empty: Connection, real: Connection) -> None:
    """Let an error about the empty file name the one that is not there yet."""
    if empty is not real:
        error.what = error.what.replace(empty.target, real.resolved().target)
        error.args = (str(error).replace(empty.target, real.resolved().target),)


@contextmanager
def _into_empty_file(job: Job) -> Iterator[Job]:
    """Yield a load into a file that is not there as one into an empty file elsewhere: only a run makes the file."""
    if not job.connection.is_missing():
        yield job
        return
    with TemporaryDirectory(prefix="weft-preview-") as folder:
        empty = replace(job.connection, path=os.path.join(folder, "empty"), url=None, name=None)  # type: ignore[call-arg]
        with opened_tables(empty) as tables, tables.driver.session("publish"):
            pass
        is_same = current().connection(job.source).resolved() == job.connection.resolved()
        yield replace(job, connection=empty, source=empty if is_same else job.source)


def _preview_tables(
    result: Preview, job: Job, data: Input, reader: RowReader | None, tables: SqlTables, rows: int, trial: bool
) -> None:
    if isinstance(data, inputs.Memory):
        data = job.with_documents(data, tables)
    result.engine = job.engine_for(data, reader, tables)
    if isinstance(reader, SqlReader):
        result.sql = reader.sql
        result.plan = explain(reader.tables, reader.sql)
    frame: Any = None
    source: QueriedRows | BatchedRows | None = None
    if isinstance(data, inputs.Memory):
        data = inputs.Memory(data.schema, list(data.batches))
        if not data.schema.names:  # no rows at all
            result.counts = Counts()
            return
    if job.can_project(tables) and reader is not None:
        schema = reader.schema
        result.sample = _first(reader, rows)
        if result.engine == "pushdown":
            assert isinstance(reader, SqlReader)
            source = QueriedRows(reader.sql, schema)
        else:
            batches = read_all(reader)
            # Read the source first, as a run does: the transaction of the one writer must not wait for it.
            source = BatchedRows(schema, read_first(schema, batches) if trial and tables.one_writer else batches)
    elif job.can_project(tables) and isinstance(data, inputs.Memory):
        schema = data.schema
        result.sample = pa.Table.from_batches(data.batches, schema).slice(0, rows)
        source = BatchedRows(schema, data.batches)
    else:
        from weft.engine import session

        session.refuse_one_host(tables.one_host, "The target of this load")
        frame, schema = job.frame_of(data, reader, tables)
        _show_frame(result, frame, rows)
    load = job.projected(schema, tables)
    _compare(result, load, schema, tables)
    if trial and result.refused is None:
        # Without its columns there is nothing yet that the rows could be compared with.
        carry_out = attempt_unmade if result.creates is not None or result.adds else attempt
        try:
            if source is None:  # rows that only Spark has: where a run would write them, in a task
                from weft.engine import tasks

                with outcome.explained(f"try the load of {load.name}"):
                    counts = tasks.write_frame(frame, tables, load, schema, carry_out=carry_out)
            else:
                counts = carry_out(tables, load, source)
        except WeftError as error:
            result.refused = error
            return
        # The preview compares no rows of a table that gets new columns first.
        result.counts = replace(counts, inserted=0, unchanged=0, deleted=0) if result.adds else counts


def _first(reader: RowReader, rows: int) -> pa.Table:
    if not rows:
        return reader.schema.empty_table()
    if isinstance(reader, SqlReader):
        limited = Slice(f"SELECT * FROM {subquery(reader.sql)} AS q LIMIT {rows}")
        return pa.Table.from_batches(reader.tables.read(limited, reader.schema), reader.schema)
    first = itertools.islice(read_all(reader), 1)
    return pa.Table.from_batches(first, reader.schema).slice(0, rows)


def _compare(result: Preview, load: Load, schema: pa.Schema, tables: SqlTables) -> None:
    written = load.written(schema)
    load.check_source(written.names, folds=tables.folds_columns)
    refuse_unknown_columns(load.checks, written.names, load.name)
    columns = stored_columns(tables, load.schema, load.table)
    if columns is None:
        result.creates = create_statement(tables, load, written)
        return
    present = [column.name for column in columns]
    result.adds = [name for name in written.names if name not in present]
    if result.adds and (load.declared is None or load.declared.on_drift != "evolve"):
        result.refused = load.no_column(result.adds[0], present)
        result.adds = []


def explain(tables: SqlTables, sql: str) -> list[str]:
    """Return the plan of a query, as its database has it; an error of the query is raised."""
    with tables.driver.session("read") as session:
        plan = session.rows(f"{tables.explain} {sql}")
    return [" ".join(str(value) for value in row if value is not None) for row in plan]


def _preview_files(result: Preview, job: Job, data: Input, rows: int, trial: bool) -> None:
    from weft.engine import frame_projection, frames
    from weft.engine.spark_io import DryRun

    reader = reader_for(data, job.source, job.connection)
    if isinstance(reader, SqlReader):
        result.sql = reader.sql
    frame = frames.of(data, reader, job.source)
    load = job.load
    if job.projection is not None:
        load = job.projection(load, frame_projection.schema_of(frame), None)
        frame = frame_projection.projected(frame, load)
    _show_frame(result, frame, rows)
    try:
        dry_run = DryRun(frame, job.connection, load)
        result.creates = dry_run.creates
        result.counts = dry_run.run() if trial else None
    except WeftError as error:
        result.refused = error


def _show_frame(result: Preview, frame: Any, rows: int) -> None:
    result.sample = frame.limit(rows).toArrow()
    if not result.plan:
        result.plan = frame._jdf.queryExecution().simpleString().splitlines()
