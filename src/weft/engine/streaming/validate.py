"""Whether a streaming pipeline can run: asked of its sources and targets, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa

from weft.engine import inputs, session
from weft.engine.frames import from_memory
from weft.engine.readers import opened_tables, stored_columns
from weft.engine.streaming import functions
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.engine.streaming.sources import open_source, refuse_unreachable
from weft.engine.streaming.targets import topic_target
from weft.engine.streaming.transform import together
from weft.engine.validate import ValidationResult, open_connection, run_check
from weft.errors import DeclarationError, WeftError, did_you_mean
from weft.pipelines.streaming.endpoints import delivery_to
from weft.pipelines.streaming.spec import DeadLetters, Lookup, Source, StreamingPipeline, Target
from weft.project import current
from weft.spark_support import outcome
from weft.spark_support.sessions import quoted_names
from weft.streams import runtime
from weft.systems.base import system_for
from weft.systems.load import KEYED_MODES


def validate(pipeline: StreamingPipeline) -> Iterator[ValidationResult]:
    """Look at everything that it needs, and go on where something is wrong."""
    name = pipeline.name
    read = [run_check(name, f"source {each.name}", partial(_source, each)) for each in pipeline.sources]
    read += [run_check(name, f"lookup {key}", partial(_lookup, each)) for key, each in pipeline.lookups.items()]
    yield from read
    columns: list[str] = []
    if pipeline.transform_sql is not None:
        # What is wrong with a source or a lookup was reported.
        is_there = all(each.problem is None for each in read)
        yield run_check(name, "sql", partial(_sql, pipeline, pipeline.transform_sql, columns, is_there))
    else:
        with suppress(WeftError):  # what is wrong with a source was reported
            known = [open_source(each).declared_schema() for each in pipeline.sources]
            columns += [each for schema in known if schema is not None and None not in known for each in schema.names]
    for target in pipeline.targets:
        delivery = delivery_to(pipeline, target)
        yield run_check(name, f"target {target.name}", partial(_target, target, columns), delivery)
    if pipeline.dead_letters is not None:
        yield run_check(name, "dead letters", partial(_letters, pipeline, pipeline.dead_letters))


def _source(source: Source) -> str:
    there, opened = open_connection(current().connection(source.connection)), open_source(source)
    refuse_unreachable(opened)
    detail = opened.validate()
    return f"{there}, {detail}" if detail else there


def _lookup(lookup: Lookup) -> str:
    connection = current().connection(lookup.connection)
    there = open_connection(connection)
    if system_for(connection.kind).tables is not None:
        return f"{there}, columns {', '.join(_columns_of(lookup).names)}"
    return there


def _columns_of(lookup: Lookup) -> pa.Schema:
    with opened_tables(current().connection(lookup.connection)) as tables:
        return tables.describe(lookup.query or f"SELECT * FROM {tables.table(lookup.schema, str(lookup.table))}")


def _sql(pipeline: StreamingPipeline, sql: str, columns: list[str], is_there: bool) -> str:
    """Return the columns of the SQL, where its tables are there and their columns are known before rows come. They are
    added to `columns`."""
    spark = session.spark().newSession()
    with outcome.explained(f"understand the SQL of {pipeline.name}"), quoted_names(spark):
        spark._jsparkSession.sessionState().sqlParser().parsePlan(sql)
        if not is_there:
            return "it can be parsed"
        known = [open_source(each).declared_schema() for each in pipeline.sources]
        lookups = {name: current().connection(each.connection) for name, each in pipeline.lookups.items()}
        if None in known or any(system_for(each.kind).tables is None for each in lookups.values()):
            return "it can be parsed; columns are known when rows come"
        functions.register(spark, pipeline.udfs, pipeline.aggregate_udfs)
        for name, lookup in pipeline.lookups.items():
            _empty(spark, _columns_of(lookup)).createOrReplaceTempView(name)
        rows = together([_empty(spark, each) for each in known if each is not None])
        columns += functions.transformed(rows, sql, pipeline.aggregate_udfs).columns
    return f"columns {', '.join(columns)}"


def _empty(spark: Any, schema: pa.Schema) -> Any:
    return from_memory(spark, inputs.Memory(schema, []))


def _target(target: Target, columns: list[str]) -> str:
    connection = current().connection(target.connection)
    there = open_connection(connection)
    if target.stream is not None:
        topic = topic_target(target)
        if topic is not None:
            detail = topic.validate(target.name)
            return f"{there}, {detail}" if detail else there
        runtime.find(target.stream)
        return there
    _refuse_unknown_columns(target, "key", target.primary_key, columns, "the rows")
    _refuse_unknown_columns(target, "deduplicate_by", target.options.get("deduplicate_by", ()), columns, "the rows")
    if since := target.options.get("event_timestamp_column"):
        _refuse_unknown_columns(target, "event_timestamp_column", (since,), columns, "the rows")
    if target.table is None or system_for(connection.kind).tables is None:
        return f"{there}, {_mode(target)}"
    with opened_tables(connection) as tables:
        stored = stored_columns(tables, *target.table)
    if stored is None:
        return f"{there}, {_mode(target)}; creates the table"
    _refuse_unknown_columns(
        target, "key", target.primary_key, [each.name for each in stored], f"the table {target.name}"
    )
    return f"{there}, {_mode(target)}; the table is there"


def _letters(pipeline: StreamingPipeline, letters: DeadLetters) -> str:
    store = DeadLetterBox(pipeline).store
    if letters.path is None or letters.connection is not None:
        return open_connection(current().connection(letters.connection))
    return store.name


def _mode(target: Target) -> str:
    """Return the mode in words: a merge that worked for days would end with the first batch that has a key twice."""
    tells_apart = {"deduplicate_by", "event_timestamp_column"} & target.options.keys()
    is_open = target.mode in KEYED_MODES and not tells_apart
    return f"{target.mode}, where a batch may have each key once (else say deduplicate_by)" if is_open else target.mode


def _refuse_unknown_columns(target: Target, what: str, names: tuple[str, ...], columns: list[str], where: str) -> None:
    if not columns or target.mode not in KEYED_MODES:
        return
    for name in names:
        if name not in columns:
            raise DeclarationError(f"The {what} {name!r} is not a column of {where}.", hint=did_you_mean(name, columns))
