"""What change data capture needs before it starts: which table is whose mirror, the keys of several tables, rows of
each with its own columns, and where the changes begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.engine.readers import opened_tables
from weft.engine.streaming.sources import takes_columns
from weft.errors import DeclarationError
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.spec import Source, StreamingPipeline, Target
from weft.project import current
from weft.systems.base import system_for
from weft.systems.endpoint import endpoint_of

# What Kafka Connect wraps messages in.
_WRAPPED = ("schema", "payload")


def resolved(pipeline: StreamingPipeline) -> StreamingPipeline:
    """Return a pipeline whose routed tables all have a key: what it says itself, or the primary key of the table. With
    a copy its sources begin at their ends. Rows for tables are read as JSON; a stream, and SQL over rows, need columns
    with types."""
    cdc = pipeline.cdc
    if cdc is not None and cdc.snapshot == "copy":
        pipeline = replace(pipeline, sources=tuple(map(_from_its_end, pipeline.sources)))
    if cdc is not None and cdc.row_sql is None and all(each.stream is None for each in pipeline.targets):
        pipeline = replace(pipeline, sources=tuple(_with_rows_as_json(each, cdc) for each in pipeline.sources))
    if cdc is None or cdc.route is None:
        return pipeline
    keys: dict[str, tuple[str, ...]] = {}
    targets = []
    for target in pipeline.targets:
        source = cdc.source_of(target.name)
        assert source is not None
        said = cdc.key_field.get(source) if isinstance(cdc.key_field, Mapping) else cdc.key_field
        if source not in keys:
            keys[source] = tuple(said or target.primary_key or _primary_key(target, source))
        columns = tuple(each.rpartition(".")[2] for each in keys[source])
        targets.append(replace(target, primary_key=target.primary_key or columns))
    return replace(
        pipeline,
        cdc=replace(cdc, key_field=keys),
        targets=tuple(targets),
    )


def source_table(pipeline: StreamingPipeline, mirror: Target) -> tuple[str | None, str]:
    """Return the table of which a target is the mirror: what is said, what `route` leads there, or that for which
    Debezium names a topic, `prefix.schema.table`."""
    cdc = pipeline.cdc
    named = None if cdc is None else cdc.snapshot_table or cdc.source_of(mirror.name)
    names = (named or pipeline.sources[0].name).split(".")
    if named is not None or (len(pipeline.sources) == 1 and len(names) >= 3):
        return (names[-2] if len(names) > 1 else None), names[-1]
    raise DeclarationError(
        f"The source of {pipeline.name} does not say which table it has the changes of.",
        hint="--table SCHEMA.TABLE of the command; CDC(…, snapshot_table=…) for a copy.",
    )


def _from_its_end(source: Source) -> Source:
    """Return a source that begins where it ends now, if it knows that: older changes would set the rows back that were
    copied, until the newer ones come."""
    connection = current().connection(source.connection)
    endpoint = endpoint_of(connection)
    if source.start != "earliest" or endpoint.limit == "max_files":
        return source
    try:
        endpoint.parse_start("latest", connection, source.name)
    except DeclarationError:
        return source
    return replace(source, start="latest")


def _primary_key(target: Target, source: str) -> tuple[str, ...]:
    """Return the primary key of a target's table."""
    connection = current().connection(target.connection)
    primary: tuple[str, ...] = ()
    if system_for(connection.kind).tables is not None and target.table is not None and not connection.is_missing():
        with opened_tables(connection) as tables, tables.driver.session("read") as session:
            if tables.columns(session, *target.table) is not None:
                primary = tuple(tables.primary_key(session, *target.table))
    if not primary:
        raise DeclarationError(
            f"The key of {source} is not known: {target.name} of {connection.label} has no primary key.",
            hint=f'Name it: CDC(…, key_field={{"{source}": "id"}}). Or create the table with the key of the source.',
        )
    return primary


def _with_rows_as_json(source: Source, cdc: CDC) -> Source:
    """Return a source whose rows are JSON until it is known of which table each is: the columns of that decide about
    values, not what most messages of a batch have. Read at once, the rows of several tables would have the columns of
    all, and one type where two of them have a column of one name."""
    if not takes_columns(source):
        return source
    endpoint = endpoint_of(current().connection(source.connection))
    roots = {path.split(".")[0] for path in (cdc.paths.before, cdc.paths.after)}
    names = roots if endpoint.limit == "max_files" else {*roots, *_WRAPPED}
    return replace(source, columns={**dict.fromkeys(sorted(names), "json"), **source.columns})
