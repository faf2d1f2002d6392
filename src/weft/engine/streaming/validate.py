"""Whether a streaming pipeline can run: asked of its sources and targets, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pyarrow as pa

from weft.engine import session
from weft.engine.streaming import lookups, start_checks
from weft.engine.streaming.cdc.copying import tables_to_copy
from weft.engine.streaming.cdc.routes import resolved
from weft.engine.streaming.dead_letters import DeadLetterBox
from weft.engine.streaming.sources import open_source, refuse_unreachable
from weft.engine.streaming.target_streams import topic_target
from weft.engine.validate import ValidationResult, open_connection, run_check
from weft.pipelines.shared_tables import refuse_shared_tables
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.endpoints import delivery_to
from weft.pipelines.streaming.joins import Join
from weft.pipelines.streaming.spec import DeadLetters, Lookup, Source, StreamingPipeline, Target
from weft.project import current
from weft.spark_support import outcome
from weft.spark_support.sessions import quoted_names
from weft.streams import runtime
from weft.systems.base import system_for
from weft.systems.load import KEYED_MODES
from weft.systems.stream_source import StreamSource


def validate(pipeline: StreamingPipeline) -> Iterator[ValidationResult]:
    """Look at everything that it needs, and go on where something is wrong."""
    name = pipeline.name
    schemas: list[pa.Schema | None] = []
    joined: dict[str, pa.Schema] = {}
    opened: list[StreamSource] = []
    read = [
        run_check(name, f"source {each.name}", partial(_source, each, schemas, opened)) for each in pipeline.sources
    ]
    if all(each.problem is None for each in read):
        united = run_check(name, "sources", partial(_united, pipeline, opened, schemas))
        read += [united] if united.problem is not None else []
    for key, lookup in pipeline.lookups.items():
        read.append(run_check(name, f"lookup {key}", partial(_lookup, key, lookup, joined)))
    yield from read
    written = run_check(name, "targets", partial(_written_alone, pipeline))
    if written.problem is not None:
        yield written
    # Problems of sources and lookups are reported above.
    is_there = all(each.problem is None for each in read)
    columns = start_checks.columns_of_rows(schemas) if is_there else None
    if (sql := pipeline.transform_sql) is not None:
        joined_names: list[str] = []
        yield run_check(name, "sql", partial(_sql, pipeline, sql, schemas, joined if is_there else None, joined_names))
        columns = joined_names or None
    if pipeline.window is not None:
        emitted: list[str] = []
        yield run_check(name, "window", partial(_window, pipeline, columns, emitted))
        columns = emitted or None
    if pipeline.join is not None:
        known = schemas if is_there else [None for _ in pipeline.sources]
        joined_columns: list[str] = []
        yield run_check(name, "join", partial(_join, pipeline, pipeline.join, known, columns, joined_columns))
        columns = joined_columns or None
    if pipeline.state_store is not None and pipeline.state_store.place is None:
        store = current().connection(pipeline.state_store.connection)
        yield run_check(name, "state store", partial(open_connection, store))
    if pipeline.cdc is not None:
        keyed: list[StreamingPipeline] = []
        yield run_check(name, "cdc", partial(_cdc, pipeline, pipeline.cdc, keyed))
        pipeline = keyed[0] if keyed else pipeline
    for target in pipeline.targets:
        delivery = delivery_to(pipeline, target)
        yield run_check(name, f"target {target.name}", partial(_target, target, columns, pipeline.cdc), delivery)
    if pipeline.dead_letters is not None:
        yield run_check(name, "dead letters", partial(_letters, pipeline, pipeline.dead_letters))


def _written_alone(pipeline: StreamingPipeline) -> str:
    refuse_shared_tables(pipeline)
    return ""


def _source(source: Source, schemas: list[pa.Schema | None], sources: list[StreamSource]) -> str:
    there, opened = open_connection(current().connection(source.connection)), open_source(source)
    refuse_unreachable(opened)
    detail = opened.validate()
    schemas.append(start_checks.known_schema(opened))
    sources.append(opened)
    return f"{there}, {detail}" if detail else there


def _united(pipeline: StreamingPipeline, sources: list[StreamSource], schemas: list[pa.Schema | None]) -> str:
    start_checks.check_united(pipeline, sources, schemas)
    return ""


def _lookup(name: str, lookup: Lookup, joined: dict[str, pa.Schema]) -> str:
    there = open_connection(current().connection(lookup.connection))
    joined[name] = lookups.columns_of(name, lookup)
    return f"{there}, columns {', '.join(joined[name].names)}"


def _sql(
    pipeline: StreamingPipeline,
    sql: str,
    schemas: list[pa.Schema | None],
    joined: dict[str, pa.Schema] | None,
    columns: list[str],
) -> str:
    """Return the columns of the SQL, where they are known before rows come. They are added to `columns`."""
    spark = session.spark().newSession()
    with outcome.explained(f"understand the SQL of {pipeline.name}"), quoted_names(spark):
        spark._jsparkSession.sessionState().sqlParser().parsePlan(sql)
        columns += start_checks.sql_columns(pipeline, sql, schemas, joined, spark, strict=True) or ()
    if joined is None:
        return "it can be parsed"
    return f"columns {', '.join(columns)}" if columns else "it can be parsed; columns are known when rows come"


def _window(pipeline: StreamingPipeline, columns: list[str] | None, emitted: list[str]) -> str:
    """Return the columns that targets get, where they are known before rows come. They are added to `emitted`."""
    has_sql = pipeline.window is not None and pipeline.window.emit_sql is not None
    spark = session.spark().newSession() if has_sql else None
    emitted += start_checks.window_columns(pipeline, columns, spark) or ()
    return f"columns {', '.join(emitted)}" if emitted else "columns are known when rows come"


def _join(
    pipeline: StreamingPipeline,
    join: Join,
    schemas: list[pa.Schema | None],
    columns: list[str] | None,
    known: list[str],
) -> str:
    """Return the columns of a join, where they are known before rows come. They are added to `known`."""
    known += start_checks.join_columns(pipeline, join, schemas, columns) or ()
    return f"columns {', '.join(known)}" if known else "columns are known when rows come"


def _cdc(pipeline: StreamingPipeline, cdc: CDC, keyed: list[StreamingPipeline]) -> str:
    """Return what orders the changes, and what it means where messages do not say it. The pipeline with the keys of its
    tables is added to `keyed`."""
    keyed.append(resolved(pipeline))
    copies = "".join(f"{each} is copied first, " for each in tables_to_copy(keyed[0]))
    positions = " or ".join(", ".join(each) for each in cdc.paths.positions)
    order = f"{positions}, then {cdc.paths.ts[0]}" if positions else cdc.paths.ts[0]
    routes = "".join(f"{source} to {table}, " for source, table in (cdc.route or {}).items())
    return (
        f"{copies}{routes}changes are ordered by {order}; where messages have neither, they are applied in the order "
        "in which they are read, and one that comes late or again is applied again"
    )


def _target(target: Target, columns: list[str] | None, cdc: CDC | None) -> str:
    connection = current().connection(target.connection)
    there = open_connection(connection)
    stored = start_checks.stored_names(target)
    if cdc is None:
        start_checks.check_columns(target, columns, stored)
    else:
        start_checks.check_mirror(target, cdc)
    if target.stream is not None:
        topic = topic_target(target)
        if topic is not None:
            detail = topic.validate(target.name)
            return f"{there}, {detail}" if detail else there
        runtime.find(target.stream)
        return there
    if target.table is None or system_for(connection.kind).tables is None:
        return f"{there}, {_mode(target)}"
    mode = _mode(target) if cdc is None else "history of changes" if target.mode == "scd2" else "mirror"
    return f"{there}, {mode}; {'creates the table' if stored is None else 'the table is there'}"


def _letters(pipeline: StreamingPipeline, letters: DeadLetters) -> str:
    store = DeadLetterBox(pipeline).store
    if letters.path is None or letters.connection is not None:
        there = open_connection(current().connection(letters.connection))
        start_checks.check_letters(pipeline)
        return there
    return store.name


def _mode(target: Target) -> str:
    """Return the mode in words: a merge that worked for days would end with the first batch that has a key twice."""
    tells_apart = {"deduplicate_by", "event_timestamp_column"} & target.options.keys()
    is_open = target.mode in KEYED_MODES and not tells_apart
    return f"{target.mode}, where a batch may have each key once (else say deduplicate_by)" if is_open else target.mode
