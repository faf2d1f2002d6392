"""One run of a pipeline: its function is called, and what it gives is loaded into each target exactly once."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from typing import Any

from weft import tracing
from weft.engine import incremental, inputs
from weft.engine.inputs import Input
from weft.engine.load import Job
from weft.engine.projection import TableProjection
from weft.engine.readers import naming_declared, opened_tables, reader_for, stored_columns
from weft.errors import DeclarationError, WeftError
from weft.pipelines.declare import Pipeline, PipelineTarget, refuse_with_watermark
from weft.pipelines.execution import Loaded, Step
from weft.pipelines.shared_tables import refuse_shared_tables
from weft.pipelines.transforms import FilterWhere, Limit, Sample
from weft.project import current
from weft.spark_support.sessions import quoted_names
from weft.systems.base import Connection, system_for
from weft.systems.load import Counts, Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql import watermarks
from weft.systems.sql.tables import SqlTables, subquery
from weft.systems.watermark import UNKNOWN, LoadWatermark

# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.run")


class PipelineRun:
    """One run, under a key: the same key again does only what is not done yet. `keep` is called before each change of
    data, and raises where another process has the run by now: what was read long ago must not replace newer rows."""

    def __init__(
        self,
        pipeline: Pipeline,
        key: str,
        moment: datetime,
        *,
        data: object = None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        self.pipeline, self.key, self.moment, self.data, self.keep = pipeline, key, moment, data, keep
        self.loaded: list[Loaded] = []
        self.steps: list[Step] = []

    def execute(self) -> None:
        """Load every target, then run what comes after. `loaded` says how far it came, also where this raises."""
        refuse_shared_tables(self.pipeline)
        data = self._understood(produce(self.pipeline) if self.data is None else self.data)
        _steps.debug("produced")
        failures: list[Exception] = []
        for target in self.pipeline.targets:
            self.keep()
            try:
                self.loaded.append(self._load(target, data))
            except Exception as error:
                if not self.pipeline.continue_on_failure:
                    raise
                error.add_note(f"target {target.name}")
                failures.append(error)
            _steps.debug("loaded")
        if len(failures) > 1:
            lines = "".join(f"\n    {'; '.join(each.__notes__)}: {each}" for each in failures)
            raise WeftError(f"{len(failures)} targets of {self.pipeline.name} failed:{lines}") from failures[0]
        if failures:
            raise failures[0]
        for number, step in enumerate(self.pipeline.transforms_post):
            self.keep()
            self._after(number, step)
            _steps.debug("followed")

    def _understood(self, data: object) -> Input:
        # Each target reads it; an iterator could be read once.
        return understand(self.pipeline, data, is_read_again=len(self.pipeline.targets) > 1)

    def _load(self, target: PipelineTarget, data: Input) -> Loaded:
        started = time.perf_counter()
        with tracing.span(f"load {target.name}", "client", {"weft.target": target.name, "weft.commit_key": self.key}):
            ready = prepare_load(self.pipeline, target, plan_load(self.pipeline, target, self.key, self.moment), data)
            counts, engine = (Counts(), "none") if ready.is_idle else ready.job.run(ready.data)
            tracing.note({"weft.engine": engine, "weft.replayed": counts.replayed})
        counts = replace(counts, warnings=(*ready.warnings, *counts.warnings))
        return Loaded(target.name, counts, engine, time.perf_counter() - started, ready.late, ready.without_value)

    def _after(self, number: int, step: str | Callable[..., Any]) -> None:
        started = time.perf_counter()
        connection = current().connection(self.pipeline.targets[0].connection)
        replayed = False
        if isinstance(step, str):
            with opened_tables(connection) as tables:
                # With what it says: another one in its place is not done yet.
                key = f"{self.key} after {number} {blake2b(step.encode(), digest_size=8).hexdigest()}"
                after = Load.declare(target="after", pipeline=self.pipeline.name, commit_key=key, moment=self.moment)
                replayed = not sql_commit.run_once(tables, after, naming_declared(step, tables))
        else:
            call(step, *[connection][: _wants(step)])
        text = step if isinstance(step, str) else getattr(step, "__name__", repr(step))
        self.steps.append(Step(text, time.perf_counter() - started, replayed))


def plan_load(pipeline: Pipeline, target: PipelineTarget, key: str, moment: datetime) -> Load:
    """Return the load of one target in one run."""
    load = target.plan(pipeline=pipeline.name, commit_key=f"{key} {target.name}", moment=moment)
    checks = []
    for each in target.expectations:
        reaction = each.reaction or target.on_quality_failure
        checks.append(replace(each, reaction=reaction if each.is_about_rows or reaction == "warn" else "fail"))
    return replace(load, checks=tuple(checks))


@dataclass
class PreparedLoad:
    """A load with everything that it needs but its rows."""

    job: Job
    data: Input
    late: int = 0
    without_value: int = 0
    warnings: tuple[str, ...] = ()
    is_idle: bool = False
    """Whether nothing is new and the target, files or a Delta table, stays as it is: then nothing is committed."""


def prepare_load(pipeline: Pipeline, target: PipelineTarget, load: Load, data: Input) -> PreparedLoad:
    """Bound what is read, and return how it is loaded."""
    connection = current().connection(target.connection)
    source = source_of(pipeline, target)
    late = without_value = 0
    warnings: tuple[str, ...] = ()
    is_idle = False
    if isinstance(data, inputs.SourceSql):
        with opened_tables(current().connection(source)) as tables:
            text, column = naming_declared(data.text, tables), pipeline.incremental_column
            text = _transformed(text, pipeline, tables)
            if column is None and incremental.has_watermark(data.text, tables.dialect):
                column = incremental.watermark_column(data.text, tables.dialect)
            if "'$watermark'" in text and not incremental.has_watermark(data.text, tables.dialect):
                raise DeclarationError(
                    f"Pipeline {pipeline.name!r}: in quotation marks '$watermark' is a text, not the watermark.",
                    hint="Leave them out: WHERE updated_at > $watermark",
                )
            if column is None and pipeline.lookback is not None:
                raise DeclarationError(
                    f"Pipeline {pipeline.name!r} has a lookback, and no watermark that it looks back from.",
                    hint='Add incremental_column="updated_at", or compare a column with $watermark in the query.',
                )
            if column is not None:
                refuse_with_watermark(pipeline, target)
                incremental.refuse_limit(data.text, column, tables.dialect)
                last, warnings = _last_watermark(connection, load, target, column)
                if last is not None and last.column != column and load.mode == "append":
                    raise DeclarationError(
                        f"{load.name} has a watermark by {last.column!r}; by {column!r} all rows would come again.",
                        hint=f"Keep the column, use the mode merge, or delete the row of {pipeline.name!r} from "
                        "weft.watermarks where that is meant.",
                    )
                new = incremental.of_query(
                    tables, text, column, last, pipeline.lookback, count_late=pipeline.count_late
                )
                text, late, without_value = new.sql, new.late, new.without_value
                load = replace(load, watermark=new.watermark)
                # Tables keep the watermark of a run that found nothing. Time may close versions, and checks may fail.
                keeps_none = system_for(connection.kind).tables is None
                is_idle = keeps_none and new.is_empty and last is not None and not load.ttl_seconds and not load.checks
            data = inputs.SourceSql(text)
    elif isinstance(data, inputs.SparkSql) and (pipeline.incremental_column is not None or "$watermark" in data.text):
        raise DeclarationError(
            f"Pipeline {pipeline.name!r}: {data.connection.label} ({data.connection.kind}) has no watermarks.",
            hint="incremental_column and $watermark are for the SQL of a database. Filter in the query, or merge.",
        )
    elif pipeline.incremental_column is not None or pipeline.transforms_pre:
        data = _frame(pipeline, data, source)
    job = Job(load, connection, source, pipeline.engine, projection=TableProjection(target))
    return PreparedLoad(job, data, late, without_value, warnings, is_idle)


def _last_watermark(
    connection: Connection, load: Load, target: PipelineTarget, column: str
) -> tuple[LoadWatermark | None, tuple[str, ...]]:
    """Return the watermark of a target, stored with its rows or, in files, read from them; and warnings about it."""
    if system_for(connection.kind).tables is None:
        return _watermark_of_files(connection, load, target, column), ()
    if connection.is_missing():
        return None, ()
    with opened_tables(connection) as tables:
        last = watermarks.read(tables, load)
        if last is None or stored_columns(tables, load.schema, load.table) is not None:
            return last, ()
    return None, (f"The table {load.name} is gone: it is created again, with everything that the source has.",)


def _watermark_of_files(
    connection: Connection, load: Load, target: PipelineTarget, column: str
) -> LoadWatermark | None:
    from weft.engine import spark_io

    filled = [new for new, old in target.column_map.items() if old == column]
    stored = filled[0] if filled else column
    if any(each.name == stored and each.normalizers for each in target.table.columns):
        raise DeclarationError(
            f"{load.name} keeps {stored!r} normalized, so it cannot say how far the source was read.",
            hint="Leave the normalizers of the incremental column out, or use a SQL database.",
        )
    last = spark_io.last_watermark(connection, load, stored)
    # Where each row that was read has become one, those that the source has more of were never read.
    is_one_each = load.mode == "append" and not load.deduplicate_by
    return last and replace(last, column=column, seen=last.seen if is_one_each else UNKNOWN)


def source_of(pipeline: Pipeline, target: PipelineTarget) -> str | Connection | None:
    """Return where the SQL of a pipeline runs: on its source, or where it has none on the target itself."""
    return pipeline.source_connection if pipeline.source_connection is not None else target.connection


# ------------------------------------------------------------------------------------------------------- what is loaded


def produce(pipeline: Pipeline) -> object:
    """Call a pipeline's function with the connections that it takes, the source first."""
    target = pipeline.targets[0]
    connections = [current().connection(source_of(pipeline, target)), current().connection(target.connection)]
    return call(pipeline.function, *connections[: pipeline.parameters])


def understand(pipeline: Pipeline, data: object, *, is_read_again: bool = False) -> Input:
    """Return what the function of a pipeline returned as the input of a load."""
    if data is None:
        if pipeline.source_table is None:
            raise DeclarationError(
                f"Pipeline {pipeline.name!r} gave nothing to load.",
                hint="Return SQL, a frame, rows, a path or a stream, or name a source_table.",
            )
        source = current().connection(source_of(pipeline, pipeline.targets[0]))
        if system_for(source.kind).tables is None:
            return inputs.Files(pipeline.source_table)
        with opened_tables(source) as tables:
            schema, dot, name = pipeline.source_table.rpartition(".")
            return inputs.SourceSql(f"SELECT * FROM {tables.table(schema if dot else None, name)}")
    if pipeline.source_table is not None:
        raise DeclarationError(
            f"Pipeline {pipeline.name!r} has a source_table, and its function gave something to load as well.",
            hint="Let the function return nothing, or leave source_table out.",
        )
    understood = inputs.understand(data, has_source=pipeline.source_connection is not None, is_read_again=is_read_again)
    return inputs.for_connection(understood, current().connection(source_of(pipeline, pipeline.targets[0])))


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> object:
    """Call a function of the user's, which may be a coroutine."""
    result = function(*arguments, **named)
    return _await(result) if inspect.iscoroutine(result) else result


def _await(coroutine: Any) -> object:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # A loop runs in this thread already, and cannot run another: a thread of its own does, while this one waits.
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(asyncio.run, coroutine).result()
    finally:
        pool.shutdown(wait=False)


def _wants(function: Callable[..., Any]) -> int:
    """Return how many connections a step takes: one where it has a parameter for it."""
    places = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return min(1, sum(each.kind in places for each in inspect.signature(function).parameters.values()))


# ----------------------------------------------------------------------------------------------------------- transforms


def _transformed(sql: str, pipeline: Pipeline, tables: SqlTables) -> str:
    """Return the query with what `transforms_pre` asks for around it, in their order."""
    for each in pipeline.transforms_pre:
        if isinstance(each, FilterWhere):
            sql = f"SELECT * FROM {subquery(sql)} AS q WHERE ({each.condition}\n)"
        elif isinstance(each, Limit):
            sql = f"SELECT * FROM {subquery(sql)} AS q LIMIT {each.rows}"
        elif isinstance(each, Sample):
            sql = f"SELECT * FROM {subquery(sql)} AS q WHERE {tables.random} < {each.percent / 100!r}"
    return sql


def _frame(pipeline: Pipeline, data: Input, source: str | Connection | None) -> Input:
    """Return what is not a query as a DataFrame with the transforms on it."""
    from weft.engine import frames

    if pipeline.incremental_column is not None:
        raise DeclarationError(
            f"Pipeline {pipeline.name!r}: incremental_column works on SQL.",
            hint="Return a query, or filter the rows in the function.",
        )
    frame = frames.of(data, reader_for(data, source, None), source)
    for each in pipeline.transforms_pre:
        if isinstance(each, FilterWhere):
            with quoted_names(frame.sparkSession):
                frame = frame.where(each.condition)
        elif isinstance(each, Limit):
            frame = frame.limit(each.rows)
        elif isinstance(each, Sample):
            frame = frame.sample(fraction=each.percent / 100, seed=random.randrange(2**31))
    return inputs.Frame(frame)
