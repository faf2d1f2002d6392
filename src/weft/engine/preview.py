"""What a run of a pipeline would do, found out without doing it: a trial load is rolled back, nothing is created."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from weft.engine import given as kinds
from weft.engine import run
from weft.engine.given import Given
from weft.engine.load import Job
from weft.engine.readers import SqlReader, open_tables, reader_for
from weft.errors import LoadRefusedError, WeftError
from weft.pipelines.declare import Pipeline, Target
from weft.systems.base import system_for
from weft.systems.load import Counts, Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql.commit import Batches, Query
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
    given: Given | None = None,
    rows: int = 5,
    trial: bool = True,
) -> Preview:
    """Find out what a run would do to one target; with what its function gave, where that was called already."""
    load = run.planned(pipeline, target, f"preview {moment.isoformat()}", moment)
    given = run.understand(pipeline, run.produce(pipeline)) if given is None else given
    with run.prepared(pipeline, target, load, given) as ready:
        found = Preview(target.name, load.mode, "", late=ready.late)
        mark = ready.job.load.watermark
        found.watermark = None if mark is None else f"{mark.column} up to {mark.text}"
        if system_for(ready.job.connection.kind).tables is None:
            found.engine = "spark"
            _of_files(found, ready.job, ready.given, rows)
            return found
        tables = open_tables(ready.job.connection)
        reader = None
        try:
            reader = reader_for(ready.given, ready.job.source, ready.job.connection, target=tables)
            found.engine = ready.job.engine_for(ready.given, reader, tables)
            _of_tables(found, ready.job, ready.given, reader, tables, rows, trial)
        finally:
            tables.close()
            if isinstance(reader, SqlReader):
                reader.tables.close()
    return found


def _of_tables(found: Preview, job: Job, given: Given, reader: Any, tables: SqlTables, rows: int, trial: bool) -> None:
    if isinstance(reader, SqlReader):
        found.sql = reader.sql
        found.plan = explain(reader.tables, reader.sql)
        limited = Slice(f"SELECT * FROM {subquery(reader.sql)} AS q LIMIT {rows}")
        found.sample = pa.Table.from_batches(reader.tables.read(limited, reader.schema), reader.schema)
        schema = reader.schema
    elif isinstance(given, kinds.Memory):
        given = kinds.Memory(given.schema, list(given.batches))
        found.sample = pa.Table.from_batches(given.batches, given.schema).slice(0, rows)
        schema = given.schema
    else:
        _of_files(found, job, given, rows)
        return
    load = job.fitted(schema, tables)
    _compare(found, load, schema, tables)
    if trial and found.refused is None:
        _try(found, load, schema, given, reader, tables)


def _compare(found: Preview, load: Load, schema: pa.Schema, tables: SqlTables) -> None:
    with tables.driver.session("read") as session:
        columns = tables.columns(session, load.schema, load.table)
    if columns is None:
        found.creates = create_statement(tables, load, load.written(schema))
        return
    present = {column.name for column in columns}
    found.adds = [name for name in load.written(schema).names if name not in present]
    if found.adds and (load.declared is None or load.declared.on_drift != "evolve"):
        found.refused = LoadRefusedError(f"The table {load.name} has no column {found.adds[0]!r}.")
        found.adds = []


def _try(found: Preview, load: Load, schema: pa.Schema, given: Given, reader: Any, tables: SqlTables) -> None:
    rows: Query | Batches
    if isinstance(reader, SqlReader) and found.engine == "pushdown":
        rows = Query(reader.sql, schema)
    elif isinstance(reader, SqlReader):
        rows = Batches(schema, reader.read(Slice(reader.sql)))
    else:
        assert isinstance(given, kinds.Memory)
        rows = Batches(schema, given.batches)
    if found.creates is not None or found.adds:
        # There is nothing yet that the rows could be compared with.
        count = rows_of(rows, tables)
        found.counts = Counts(rows_read=count, inserted=count) if found.creates is not None else Counts(rows_read=count)
        return
    try:
        found.counts = sql_commit.attempt(tables, replace(load, on_bad_rows="fail"), rows)
    except WeftError as error:
        found.refused = error


def rows_of(rows: Query | Batches, tables: SqlTables) -> int:
    """How many rows there are."""
    if isinstance(rows, Batches):
        return sum(batch.num_rows for batch in rows.batches)
    with tables.driver.session("read") as session:
        row = session.row(f"SELECT count(*) FROM {subquery(rows.sql)} AS q")
    assert row is not None
    return int(row[0])


def explain(tables: SqlTables, sql: str) -> list[str]:
    """The plan of a query, as its database tells it; an error of the query is raised."""
    word = "EXPLAIN QUERY PLAN" if tables.dialect == "sqlite" else "EXPLAIN"
    with tables.driver.session("read") as session:
        found = session.rows(f"{word} {sql}")
    return [" ".join(str(value) for value in row if value is not None) for row in found]


def _of_files(found: Preview, job: Job, given: Given, rows: int) -> None:
    from weft.engine import frames

    frame = frames.of(given, reader_for(given, job.source, job.connection), job.source)
    found.sample = frame.limit(rows).toArrow()
    found.plan = frame._jdf.queryExecution().simpleString().splitlines()
