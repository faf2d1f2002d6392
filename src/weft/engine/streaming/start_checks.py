"""What fails every batch of a streaming pipeline, whatever rows come: found when it starts, and by `weft validate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from weft.engine import inputs, session, spark_io
from weft.engine.frames import from_memory, transformed
from weft.engine.readers import opened_tables, stored_columns
from weft.engine.streaming import fan_in, functions, lookups
from weft.engine.streaming.dead_letters import open_store
from weft.engine.streaming.target_columns import is_own
from weft.engine.streaming.target_streams import topic_target
from weft.errors import ConnectionFailedError, DeclarationError, WeftError, did_you_mean, nearest
from weft.pipelines.shared_tables import refuse_shared_tables
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.joins import Join
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.pipelines.streaming.windows import SESSION_ID, WINDOW_END, WINDOW_START, WINDOWS, Window
from weft.project import current
from weft.spark_support import outcome
from weft.spark_support.sessions import active, quoted, union_of
from weft.systems.base import system_for
from weft.systems.load import KEYED_MODES, Load
from weft.systems.log import RESERVED_PREFIX
from weft.systems.stream_source import EVENT_TIME, StreamSource

# What Spark finds wrong with SQL whatever columns its tables have.
_CERTAIN = ("PARSE_SYNTAX_ERROR", "TABLE_OR_VIEW_NOT_FOUND", "UNRESOLVED_ROUTINE")
_NO_COLUMNS = pa.schema([(EVENT_TIME, pa.timestamp("us", "UTC"))])


def check_start(pipeline: StreamingPipeline, sources: Sequence[StreamSource], spark: Any) -> None:
    """Raise for what would fail every batch. A database that is away now is left to the batches."""
    refuse_shared_tables(pipeline)
    schemas = [known_schema(each) for each in sources]
    check_united(pipeline, sources, schemas)
    columns = columns_of_rows(schemas)
    if pipeline.transform_sql is not None:
        joined: dict[str, pa.Schema] = {}
        for name, lookup in pipeline.lookups.items():
            try:
                joined[name] = lookups.columns_of(name, lookup)
            except ConnectionFailedError:
                if current().connection(lookup.connection).is_missing():
                    raise
        are_known = len(joined) == len(pipeline.lookups)
        columns = sql_columns(
            pipeline, pipeline.transform_sql, schemas, joined if are_known else None, spark, strict=False
        )
    # A stream may get a column with its next event: then only what looks like a typo is refused.
    grows = any(each.may_grow for each in sources)
    if pipeline.join is None:
        columns = window_columns(pipeline, columns, spark, grows=grows)
    else:
        columns = join_columns(pipeline, pipeline.join, schemas, columns, grows=grows)
    for target in (each for each in pipeline.targets if each.primary_key):
        with suppress(ConnectionFailedError):
            if pipeline.cdc is not None:
                check_mirror(target, pipeline.cdc)
                continue
            # A window has a fixed set of columns.
            check_columns(target, columns, stored_names(target), grows=grows and pipeline.window is None)
    with suppress(ConnectionFailedError):
        check_letters(pipeline)


def check_letters(pipeline: StreamingPipeline) -> None:
    """Raise where the place of the dead letters is missing, and is not made with the first one."""
    check = getattr(open_store(pipeline), "check", None)
    if check is not None:
        check()


def known_schema(source: StreamSource) -> pa.Schema | None:
    """Return the columns of a source as far as they are declared or stored; `None` where rows bring them."""
    schema = source.stored_schema()
    return None if schema is None or all(map(is_own, schema.names)) else schema


def check_united(
    pipeline: StreamingPipeline, sources: Sequence[StreamSource], schemas: Sequence[pa.Schema | None]
) -> None:
    """Raise for a column of several sources whose declared or stored types cannot be one."""
    if not pipeline.unites_sources or len(sources) == 1:
        return  # each is read by itself, or has its own SQL
    from pyspark.sql.pandas.types import from_arrow_schema

    types = []
    for source, schema in zip(sources, schemas, strict=True):
        names = source.declared_columns()
        if names is not None and schema is not None and fan_in.sets_aside(pipeline):
            # A column that an event added decides about rows, which can be put aside.
            schema = pa.schema([each for each in schema if each.name in names])
        declared = [(name, kind.arrow) for name, kind in source.settings.columns.items()]
        fields = pa.schema([*(schema or ()), *declared])
        types.append((source.name, fan_in.types_of(from_arrow_schema(fields, prefer_timestamp_ntz=True))))
    fan_in.refuse_clashes(types, fan_in.columns_read(pipeline))


def columns_of_rows(schemas: Sequence[pa.Schema | None]) -> list[str] | None:
    """Return the columns of all sources; `None` where rows bring some."""
    known = [each for each in schemas if each is not None]
    return [name for each in known for name in each.names] if len(known) == len(schemas) else None


# ---------------------------------------------------------------------------------------------------------------- SQL


def sql_columns(
    pipeline: StreamingPipeline,
    sql: str,
    schemas: Sequence[pa.Schema | None],
    joined: Mapping[str, pa.Schema] | None,
    spark: Any,
    *,
    strict: bool,
) -> list[str] | None:
    """Return the columns that `transform_sql` makes; `None` where that depends on rows. `joined`: those of the lookups.

    Raises for calls, tables and functions that cannot be; where all columns are known and it is `strict`, for columns
    too. (Streams may get more.)
    """
    functions.check_calls(sql, pipeline.udfs, pipeline.aggregate_udfs)
    if joined is None:
        return _named_columns(sql)
    functions.register(spark, pipeline.udfs, pipeline.aggregate_udfs)
    is_known = None not in schemas
    try:
        with outcome.explained("understand transform_sql"), active(spark):
            for name, schema in joined.items():
                _empty(spark, schema).createOrReplaceTempView(name)
            empty = [_empty(spark, _NO_COLUMNS if each is None else each) for each in schemas]
            if pipeline.step is None:
                named = [(each.name, rows) for each, rows in zip(pipeline.sources, empty, strict=True)]
                rows = fan_in.rows_of_all(named, fan_in.read_by(sql), first_decides=fan_in.sets_aside(pipeline))
            else:  # each source by itself
                rows = union_of(empty)
            columns: list[str] = functions.transformed(rows, sql, pipeline.aggregate_udfs).columns
    except WeftError as error:
        # A `WeftError` was raised while Spark's own was handled, which has the condition.
        condition = getattr(error.__context__, "getCondition", lambda: None)()
        if (strict and is_known) or condition in _CERTAIN:
            raise
        is_known = False
    return columns if is_known else _named_columns(sql)


def _empty(spark: Any, schema: pa.Schema) -> Any:
    return from_memory(spark, inputs.Memory(schema, []))


def _named_columns(sql: str) -> list[str] | None:
    """Return the columns to which SQL gives a name; `None` where it has others: `*`, or a function without a name."""
    from sqlglot import exp, parse_one
    from sqlglot.errors import SqlglotError

    try:
        tree = parse_one(sql, read="spark")
    except SqlglotError:
        return None
    if not isinstance(tree, exp.Query):
        return None
    has_names = all(each.output_name or isinstance(each, exp.Aliases) for each in tree.selects)
    names = tree.named_selects
    return names if names and has_names and "*" not in names else None


def window_columns(
    pipeline: StreamingPipeline, columns: list[str] | None, spark: Any, *, grows: bool = False
) -> list[str] | None:
    """Return the columns that targets get; those of the window, where there is one. Raise for columns that it names and
    its rows cannot have, and for `emit_sql` that cannot be."""
    window = pipeline.window
    if window is None:
        return columns
    more = "" if pipeline.transform_sql is None else " Have transform_sql select each column that the window names."
    _refuse_unknown("event_time_column of the window", (window.event_time_column,), columns, "the rows", grows, more)
    _refuse_unknown("group_by of the window", window.group_by, columns, "the rows", grows, more)
    aggregated = [name for each in window.aggregations for name in each.columns]
    _refuse_unknown("aggregated column", aggregated, columns, "the rows", grows, more)
    return window.columns if window.emit_sql is None else _emitted_columns(pipeline, window, window.emit_sql, spark)


def _emitted_columns(pipeline: StreamingPipeline, window: Window, sql: str, spark: Any) -> list[str] | None:
    """Return the columns that `emit_sql` makes; `None` where that depends on types, which rows bring."""
    functions.check_calls(sql, pipeline.udfs, ())
    functions.register(spark, pipeline.udfs, ())
    kinds = {WINDOW_START: "timestamp", WINDOW_END: "timestamp", SESSION_ID: "bigint"}
    named = ", ".join(f"CAST(NULL AS {kinds.get(name, 'void')}) AS {quoted(name)}" for name in window.columns)
    try:
        with outcome.explained("understand emit_sql"), active(spark):
            columns: list[str] = transformed(spark.sql(f"SELECT {named}"), sql, WINDOWS, "emit_sql").columns
    except WeftError as error:
        condition = str(getattr(error.__context__, "getCondition", lambda: None)())
        if isinstance(error, DeclarationError) or condition in _CERTAIN or condition.startswith("UNRESOLVED_COLUMN"):
            raise
        return _named_columns(sql)
    return columns


def join_columns(
    pipeline: StreamingPipeline,
    join: Join,
    schemas: Sequence[pa.Schema | None],
    columns: list[str] | None,
    *,
    grows: bool = False,
) -> list[str] | None:
    """Return the columns that targets get of a join; `None` where rows bring some. Raise for columns that it names and
    a side cannot have. `columns` are those of `transform_sql`, which sees the rows of both sides."""
    by_source = dict(zip((each.name for each in pipeline.sources), schemas, strict=True))
    joined: list[str] | None = []
    for word, (source, keys, event_time, prefix) in zip(("left", "right"), join.sides, strict=True):
        schema = by_source[source]
        own = columns if pipeline.transform_sql is not None else None if schema is None else list(schema.names)
        _refuse_unknown(f"{word}_event_time_column of the join", (event_time,), own, f"the rows of {source}", grows)
        _refuse_unknown(f"{word}_keys of the join:", keys, own, f"the rows of {source}", grows)
        names = None if own is None else [f"{prefix}{name}" for name in own if not name.startswith(RESERVED_PREFIX)]
        joined = None if joined is None or names is None else joined + names
    return joined


# ------------------------------------------------------------------------------------------------------------ targets


def stored_names(target: Target) -> list[str] | None:
    """Return the columns of a target's table as it is now; `None` where there is none."""
    connection = current().connection(target.connection)
    if target.table is None or connection.is_missing():
        return None
    if system_for(connection.kind).tables is None:
        if not target.primary_key:
            return None  # nothing is asked of it, and to look takes Spark
        return spark_io.columns(session.spark(), connection, Load.declare(target=target.table))
    with opened_tables(connection) as tables:
        columns = stored_columns(tables, *target.table)
    return None if columns is None else [each.name for each in columns]


def check_mirror(target: Target, cdc: CDC) -> None:
    """Raise for keys and other columns that a mirror needs and its table does not have."""
    connection = current().connection(target.connection)
    stored = None if target.stream is not None else stored_names(target)
    if stored is None or target.table is None:
        return
    where = f"the table {target.name}"
    _refuse_unknown("key", target.primary_key, stored, where)
    _refuse_unknown("soft_delete_column", (cdc.soft_delete_column,) if cdc.soft_delete_column else (), stored, where)
    if system_for(connection.kind).tables is None or target.mode == "scd2":
        return
    with opened_tables(connection) as tables, tables.driver.session("read") as reading:
        primary = tables.primary_key(reading, *target.table)
    if primary and set(primary) != set(target.primary_key):
        raise DeclarationError(
            f"The primary key of {where} is {', '.join(primary)}, and key_field names {', '.join(target.primary_key)}.",
            hint="Name the path of each of its columns, or create the table with the key of the source.",
        )


def check_columns(
    target: Target, columns: Sequence[str] | None, stored: Sequence[str] | None, *, grows: bool = False
) -> None:
    """Raise for keys and other named columns of a target that are missing from its rows or its table."""
    if target.stream is not None and topic_target(target) is None:
        return  # events have no keys
    if columns is not None and target.declared is not None:
        columns = [*columns, *target.declared.names]  # some may be derived
    if target.mode not in KEYED_MODES and columns is not None and stored is not None:
        columns, stored = [*columns, *stored], None
    _refuse_unknown("key", target.primary_key, columns, "the rows", grows)
    _refuse_unknown("key", target.primary_key, stored, f"the table {target.name}")
    _refuse_unknown("deduplicate_by", target.options.get("deduplicate_by", ()), columns, "the rows", grows)
    since = target.options.get("event_timestamp_column")
    _refuse_unknown("event_timestamp_column", (since,) if since else (), columns, "the rows", grows)


def _refuse_unknown(
    what: str, names: Sequence[str], columns: Sequence[str] | None, where: str, grows: bool = False, more: str = ""
) -> None:
    for name in names:
        if columns is not None and name not in columns and not (grows and nearest(name, columns) is None):
            hint = did_you_mean(name, columns, f"Columns: {', '.join(columns[:30])}.")
            raise DeclarationError(f"The {what} {name!r} is not a column of {where}.", hint=f"{hint}{more}")
