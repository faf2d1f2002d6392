"""`@streaming_pipeline`: sources, SQL and targets, checked where they are declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Unpack, overload

from weft.errors import DeclarationError, NotFoundError, WeftError, did_you_mean, unknown
from weft.options import errors_at, look_like, refuse_unknown, text_option
from weft.pipelines.options import connection_option, declared_at, refuse_twice
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.endpoints import (
    address,
    addresses,
    check_targets,
    checked,
    connection_of,
    delivery_to,
    identity,
)
from weft.pipelines.streaming.joins import Join
from weft.pipelines.streaming.options import FIELD_OPTIONS, OPTIONS, StreamingOptions
from weft.pipelines.streaming.spec import DeadLetters, Source, StreamingPipeline, Target
from weft.pipelines.streaming.windows import Window, aggregate_in
from weft.pipelines.table import table_of
from weft.project import build_connection, current
from weft.streams.declare import Stream
from weft.systems.base import Connection, system_for
from weft.systems.endpoint import endpoint_of
from weft.systems.load import KEYED_MODES, MODES_OF, refuse_own

DEAD_LETTERS = ("topic", "stream", "table", "path")
Declare = Callable[[Callable[..., Any]], StreamingPipeline]


@overload
def streaming_pipeline(**options: Unpack[StreamingOptions]) -> Declare: ...
@overload
def streaming_pipeline(*, source_kind: str, **options: Any) -> Declare:
    """The fields of a connection stand next to the options."""


def streaming_pipeline(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Declare a streaming pipeline. Its function is never called; it gives the pipeline its name.

        @weft.streaming_pipeline(source=kafka_prod, source_query="events", target=warehouse, target_table="events")
        def events_to_pg():
            pass

    docs/streaming.md lists the options.
    """
    if function is not None:
        raise DeclarationError(
            "@streaming_pipeline needs a source and a target.",
            hint='@weft.streaming_pipeline(source=orders, target=warehouse, target_table=("public", "orders"))',
        )

    def declare(function: Callable[..., Any]) -> StreamingPipeline:
        if not callable(function):
            raise DeclarationError(f"@streaming_pipeline decorates a function, not a {type(function).__name__}.")
        pipeline = make(**{"name": getattr(function, "__name__", ""), **options})
        pipeline = replace(
            pipeline,
            description=pipeline.description or inspect.getdoc(function),
            declared_at=declared_at(function),
            origin=f"{function.__module__}.{getattr(function, '__qualname__', pipeline.name)}",
        )
        look_like(pipeline, function)
        _register(pipeline, function)
        return pipeline

    return declare


def make(other_options: Sequence[str] = (), /, **options: Any) -> StreamingPipeline:
    """Return a streaming pipeline of loose options, each checked; nothing is registered.

    An error about an unknown option knows the caller's `other_options` too.
    """
    return assemble(options, f"Streaming pipeline {options.get('name', '')!r}", other_options=other_options)


def assemble(
    options: Mapping[str, Any],
    where: str,
    words: Mapping[str, str] = MappingProxyType({}),
    *,
    other_options: Sequence[str] = (),
) -> StreamingPipeline:
    """Return a streaming pipeline of options. An error begins with `where`, and calls an option as `words` has it."""

    def word(option: str) -> str:
        return words.get(option, option)

    of_kind = () if options.get("source_kind") is None else connection_fields(options["source_kind"], where)
    refuse_unknown(options, (*OPTIONS, *of_kind, *other_options), where)
    inline = {name: value for name, value in options.items() if name not in OPTIONS}
    said = {name: value for name, value in options.items() if value is not None}
    values: dict[str, Any] = {"name": OPTIONS["name"].checked(said.pop("name", ""), where, word("name"))}
    parts: dict[str, Any] = {"sources": _sources(said, inline, where), "targets": _targets(said, where, word)}
    for name, value in said.items():
        if name in FIELD_OPTIONS:
            values[FIELD_OPTIONS[name].field] = FIELD_OPTIONS[name].checked(value, where, word(name))
    pipeline = StreamingPipeline(**values, **parts)
    pipeline = replace(pipeline, dead_letters=_dead_letters(said, pipeline, where))
    _check(pipeline, said, where, word)
    return pipeline


def find(name: str) -> StreamingPipeline:
    """Return a declared streaming pipeline by its name."""
    known = current().streaming_pipelines
    if name not in known:
        if name in current().pipelines:
            raise NotFoundError(f"{name!r} is not a streaming pipeline.", hint=f"Run it with: weft run {name}")
        raise unknown(
            "streaming pipeline", name, known, otherwise="Declare it in a module of weft.toml, or give --module M."
        )
    return known[name]


def connection_fields(kind: Any, where: str) -> tuple[str, ...]:
    """Return the names of the fields of a connection of this kind."""
    if not isinstance(kind, str):
        raise DeclarationError(f"{where}: a kind is a text, not {kind!r}.")
    try:
        return tuple(each.name for each in fields(system_for(kind).load_connection()))
    except WeftError as error:
        raise DeclarationError(f"{where}: {error.what}", hint=error.hint) from None


# -------------------------------------------------------------------------------------------------- sources and targets


def _sources(options: Mapping[str, Any], inline: Mapping[str, Any], where: str) -> tuple[Source, ...]:
    ways = [each for each in ("source", "sources", "source_kind") if each in options]
    if len(ways) != 1:
        raise DeclarationError(
            f"{where} needs source, sources or source_kind, not {' and '.join(ways) or 'none of them'}.",
            hint='source=orders for a declared stream, or source=kafka_prod, source_query="orders".',
        )
    query = text_option(options.get("source_query"), "source_query", where)
    if "source_kind" in options:
        listed: list[Any] = [build_connection(None, {"kind": options["source_kind"], **inline}, where)]
    else:
        option = options[ways[0]]
        listed = list(option) if isinstance(option, list | tuple) else [option]
        if ways[0] == "sources" and not isinstance(option, list | tuple):
            raise DeclarationError(f"{where}: sources must be a list.", hint='sources=[weft.Source(query="orders"), …]')
    sources = tuple(_source(each, query, where) for each in listed)
    if not sources:
        raise DeclarationError(f"{where}: {ways[0]} is empty.")
    if query is not None and not any(isinstance(each, str | Connection) for each in listed):
        raise DeclarationError(
            f"{where}: source_query is that of a connection, and this is a source of its own.",
            hint="Leave source_query out.",
        )
    names = [each.name for each in sources]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DeclarationError(
            f"{where}: two sources are called {repeated[0]!r}.",
            hint="Metrics, errors and dead letters know them by their names.",
        )
    with errors_at(where):
        return tuple(map(checked, sources))


def _source(part: Any, query: str | None, where: str) -> Source:
    if isinstance(part, Source):
        return part
    if isinstance(part, Stream):
        return Source(query=part)
    connection = connection_option(part, "source", where)
    if connection is None:
        raise DeclarationError(f"{where}: a source is None.")
    if query is None and (handle := connection_of(connection)) is not None:
        query = endpoint_of(handle).default_query(handle)
    if query is None:
        hint = 'The topic, prefix, table or stream to read: source_query="orders".'
        if isinstance(part, str) and part in current().streams:
            hint = f"There is a stream {part!r}: pass the stream itself, not its name."
        raise DeclarationError(f"{where}: its source is a connection, so it needs source_query.", hint=hint)
    with errors_at(where):
        return Source(connection=connection, query=query)


def _targets(options: Mapping[str, Any], where: str, word: Callable[[str], str]) -> tuple[Target, ...]:
    if ("target" in options) == ("targets" in options):
        raise DeclarationError(
            f"{where} needs target or targets, not {'both' if 'target' in options else 'neither'}.",
            hint='target=warehouse, target_table=("public", "events"), or targets=[weft.Target(…), weft.Target(…)].',
        )
    if "target" in options:
        listed = [options["target"]]
    elif isinstance(options["targets"], list | tuple) and options["targets"]:
        listed = list(options["targets"])
    else:
        raise DeclarationError(f"{where}: targets must be a list of at least one target.")
    for option in ("target_table", "target_primary_key"):
        if option in options and ("targets" in options or isinstance(listed[0], Target)):
            raise DeclarationError(
                f"{where}: {option} goes with a connection in target.", hint=f"Say it in weft.Target({option[7:]}=…)."
            )
    cdc = OPTIONS["cdc"].checked(options.get("cdc"), where)
    mode = OPTIONS["mode"].checked(options.get("mode", "append" if cdc is None else "merge"), where)
    keys = OPTIONS["keys"].checked(options.get("keys", ()), where)
    if keys and options.get("target_primary_key"):
        raise DeclarationError(f"{where}: keys and target_primary_key say the same.", hint="Leave one of them out.")
    order = OPTIONS["deduplicate_by"].checked(options.get("deduplicate_by", ()), where)
    targets = []
    for each in listed:
        owns = [each] if isinstance(each, Target) else _targets_of(each, options, cdc, where)
        with errors_at(where):
            targets += [_complete(own, mode, keys, order, cdc) for own in owns]
    if keys and not any(each.mode in KEYED_MODES or each.place == "stream" for each in targets):
        raise DeclarationError(f"{where}: the mode 'append' takes no keys.", hint='mode="merge" does.')
    if order and not any(each.mode in KEYED_MODES for each in targets):
        raise DeclarationError(f"{where}: the mode 'append' takes no deduplicate_by.", hint='mode="merge" does.')
    for each in targets:
        # The table may have a key that nobody has said: it is looked up when the pipeline starts.
        is_found = cdc is not None and cdc.route is not None
        if each.mode in KEYED_MODES and not each.primary_key and not is_found:
            raise DeclarationError(
                f"{where}, target {each.name}: the mode {each.mode!r} needs keys.",
                hint=f'For example {word("keys")}=["id"], or {word("target_primary_key")}=["id"].',
            )
        for option in each.load_options:
            modes = MODES_OF.get(option, KEYED_MODES)
            if each.mode not in modes:
                named = " and ".join(map(repr, modes))
                raise DeclarationError(
                    f"{where}, target {each.name}: {option} is an option of the mode {named}, not of {each.mode!r}."
                )
    written = [address(each) for each in targets]
    if repeated := [each.name for each in targets if written.count(address(each)) > 1]:
        raise DeclarationError(f"{where}: the target {repeated[0]} is listed twice.")
    return tuple(targets)


def _targets_of(part: Any, options: Mapping[str, Any], cdc: CDC | None, where: str) -> list[Target]:
    """Return the target that `part` stands for, or one for each table that changes are led to."""
    is_named = options.get("target_table") is not None or isinstance(part, Stream | type) or table_of(part) is not None
    if cdc is None or cdc.route is None or is_named:
        return [_target(part, options, where)]
    return [_target(part, {**options, "target_table": table}, where) for table in cdc.route.values()]


def _target(part: Any, options: Mapping[str, Any], where: str) -> Target:
    """Return the target that a connection or its name, a declared table or a declared stream stands for."""
    table, key = options.get("target_table"), options.get("target_primary_key", ())
    if isinstance(part, Stream) or table_of(part) is not None:
        if table is not None:
            raise DeclarationError(f"{where}: target_table is that of a connection; this target has a name.")
        place = {"stream": part} if isinstance(part, Stream) else {"table": part}
        with errors_at(where):
            return Target(**place, primary_key=key)
    if isinstance(part, type):
        raise DeclarationError(f"{where}: the class {part.__name__} is not a table.", hint="Put @weft.table above it.")
    connection = connection_option(part, "target", where)
    with errors_at(where):
        return Target(connection=connection, table=table, primary_key=key)


def _complete(target: Target, mode: str, keys: tuple[str, ...], order: tuple[str, ...], cdc: CDC | None) -> Target:
    """Return a target with what the pipeline says of all of them, checked against its connection where it is known."""
    if cdc is not None:
        target = checked(target)  # a prefix of Delta is a table
    mode = target.mode if target.has_mode else "append" if cdc is not None and target.place != "table" else mode
    declared = target.declared
    if mode in KEYED_MODES or target.place == "stream":
        own = target.primary_key or keys or (declared.keys if declared else ())
        if not own and cdc is not None:
            own = ("key",) if target.place == "stream" else _changed_keys(cdc, target)
    else:
        own = target.primary_key or (declared.primary_key if declared else ())
    options = {"deduplicate_by": order, **target.options} if mode in KEYED_MODES and order else target.options
    return checked(replace(target, mode=mode, has_mode=True, primary_key=own, options=options))


def _changed_keys(cdc: CDC, target: Target) -> tuple[str, ...]:
    """Return the key of the rows whose changes a table gets; nothing where that is not said."""
    if cdc.route is None:
        return cdc.keys
    source = cdc.source_of(target.name)
    return () if source is None else cdc.keys_of(source)


def sql_name(function: Any) -> str:
    """Return what SQL calls a function."""
    return str(getattr(function, "sql_name", None) or getattr(function, "__name__", type(function).__name__))


# --------------------------------------------------------------------------------------------------------- dead letters


def _dead_letters(options: Mapping[str, Any], pipeline: StreamingPipeline, where: str) -> DeadLetters | None:
    chosen = [each for each in DEAD_LETTERS if f"dead_letter_{each}" in options]
    connection = connection_option(options.get("dead_letter_connection"), "dead_letter_connection", where)
    if not chosen:
        if connection is not None:
            raise DeclarationError(
                f"{where}: dead_letter_connection needs dead_letter_topic, dead_letter_stream or dead_letter_table."
            )
        return None
    if len(chosen) > 1:
        raise DeclarationError(
            f"{where}: dead letters go to one place: {' or '.join(f'dead_letter_{e}' for e in chosen)}."
        )
    place = chosen[0]
    value = OPTIONS[f"dead_letter_{place}"].checked(options[f"dead_letter_{place}"], where)
    if connection is None:
        connection = _letter_connection(place, value, pipeline, where)
    letters = DeadLetters(connection=connection, **{place: value})
    _check_dead_letters(letters, place, pipeline, where)
    return letters


def _letter_connection(place: str, value: Any, pipeline: StreamingPipeline, where: str) -> str | Connection | None:
    """Return the connection of dead letters where none is named."""
    if place == "topic":
        return _broker_of(pipeline, where)
    if place == "table":
        return next((each.connection for each in pipeline.targets if each.place == "table"), None)
    return value.connection if isinstance(value, Stream) else None


def _check_dead_letters(letters: DeadLetters, place: str, pipeline: StreamingPipeline, where: str) -> None:
    connection = connection_of(letters.connection)
    is_here = place == "path" and letters.connection is None
    if connection is not None and not is_here and place not in endpoint_of(connection).dead_letters:
        raise DeclarationError(f"{where}: {connection.any_such} holds no dead_letter_{place}.")
    if place == "path":
        return
    if letters.table is not None and connection is not None and system_for(connection.kind).tables is not None:
        refuse_own(*letters.table, where=f"{where}: dead_letter_table: ")
    target = Target(table=letters.table, stream=letters.topic or letters.stream, connection=letters.connection)
    parts: tuple[Source | Target, ...] = (*pipeline.sources, *pipeline.targets)
    for part in parts:
        if address(target) in addresses(part):
            doing = "writes" if isinstance(part, Target) else "reads"
            raise DeclarationError(f"{where}: dead letters cannot go to {target.name}, which it {doing}.")


def _broker_of(pipeline: StreamingPipeline, where: str) -> str | Connection | None:
    """Return the one connection of the sources that has topics: a topic is there where no connection is named."""
    brokers = {
        identity(each.connection): each.connection
        for each in pipeline.sources
        if (connection := connection_of(each.connection)) is None or "topic" in endpoint_of(connection).dead_letters
    }
    if len(brokers) == 1:
        return next(iter(brokers.values()))
    raise DeclarationError(
        f"{where}: dead_letter_topic is a topic of the source's broker, and "
        + ("the sources have several." if brokers else "no source has topics."),
        hint="Name one by dead_letter_connection, or use dead_letter_stream, dead_letter_table or dead_letter_path.",
    )


def _check(pipeline: StreamingPipeline, options: Mapping[str, Any], where: str, word: Callable[[str], str]) -> None:
    """Check options against each other."""
    if pipeline.transform_sql is None:
        for option in ("lookups", "udfs", "aggregate_udfs", "transform_on_error"):
            in_window = option == "udfs" and pipeline.window is not None and pipeline.window.emit_sql is not None
            of_changes = pipeline.cdc is not None and (
                option == "transform_on_error" or pipeline.cdc.row_sql is not None
            )
            if options.get(option) and not in_window and not of_changes:
                raise DeclarationError(f"{where}: {word(option)} is for {word('transform_sql')}, and there is none.")
    if pipeline.transform_on_error == "dlq" and pipeline.dead_letters is None:
        raise DeclarationError(
            f"{where}: {word('transform_on_error')} is 'dlq', and there is no place for dead letters.",
            hint='For example dead_letter_stream="events_failed" (or dead_letter_topic, dead_letter_table, '
            "dead_letter_path).",
        )
    seen: set[str] = set()
    for each in (*pipeline.udfs, *pipeline.aggregate_udfs):
        if (name := sql_name(each).lower()) in seen:
            raise DeclarationError(
                f"{where}: two UDFs are called {sql_name(each)!r} in SQL.",
                hint='Give one another name: @udf(name="…").',
            )
        seen.add(name)
    if options.get("delivery") == "exactly_once":
        for target in pipeline.targets:
            if delivery_to(pipeline, target) != "exactly_once":
                raise DeclarationError(
                    f"{where}: what is sent to the stream or topic {target.name} may come twice, "
                    "so delivery cannot be 'exactly_once'.",
                    hint="Leave delivery out: then tables and files get every row once, streams and topics at least "
                    "once.",
                )
    _check_step(pipeline, where, word)
    if pipeline.cdc is not None:
        _check_cdc(pipeline.cdc, pipeline, where, word)
    check_targets(pipeline, where)


def _check_step(pipeline: StreamingPipeline, where: str, word: Callable[[str], str]) -> None:
    """Check a window or a join against the rest of its pipeline."""
    step = pipeline.step
    if step is None:
        for option in ("watermark", "state_store"):
            if getattr(pipeline, option) is not None:
                raise DeclarationError(
                    f"{where}: {word(option)} is for {word('window')} or {word('join')}, and there is neither."
                )
        return
    if pipeline.window is not None and pipeline.join is not None:
        raise DeclarationError(
            f"{where}: {word('window')} and {word('join')} are mutually exclusive.",
            hint="Let one pipeline join into a stream or table, and another one aggregate that.",
        )
    if step.late_data == "dlq" and pipeline.dead_letters is None:
        raise DeclarationError(
            f"{where}: late_data is 'dlq', and there is no place for dead letters.",
            hint='For example dead_letter_stream="events_late" (or dead_letter_topic, dead_letter_table, '
            "dead_letter_path).",
        )
    if pipeline.transform_sql is not None:
        names = [sql_name(each) for each in pipeline.aggregate_udfs]
        if (name := aggregate_in(pipeline.transform_sql, names, pipeline.lookups)) is not None:
            raise DeclarationError(
                f"{where}: {word('transform_sql')} depends on several rows ({name}), and it sees one batch at a time. "
                "Rows that belong together may be in several.",
                hint="Let it choose and convert columns, and aggregate in weft.Window(aggregations=[…]).",
            )
    if pipeline.window is not None:
        _check_window_targets(pipeline.window, pipeline, where)
    if pipeline.join is not None:
        _check_join_sources(pipeline.join, pipeline, where, word)


def _check_cdc(cdc: CDC, pipeline: StreamingPipeline, where: str, word: Callable[[str], str]) -> None:
    """Check change data capture against the rest of its pipeline."""
    reasons = {
        "window": "Rows of a window are no changes. Aggregate the mirror, or its own stream, in another pipeline.",
        "join": "A join takes rows, not changes. Join the mirrors, or let transform_sql of another pipeline do it.",
        "transform_sql": "SQL over messages would lose what happened to a row. CDC(row_sql=…) is SQL over the rows.",
    }
    for option, hint in reasons.items():
        if getattr(pipeline, option) is not None:
            raise DeclarationError(f"{where}: {word('cdc')} and {word(option)} are mutually exclusive.", hint=hint)
    _check_route(cdc, pipeline, where, word)
    for target in pipeline.targets:
        at = f"{where}, target {target.name}"
        if target.place == "prefix":
            raise DeclarationError(
                f"{at}: files cannot be changed, so they cannot follow the changes of a table.",
                hint="Use a Delta table (delta_local, delta_s3) on the same storage, or leave cdc out: then the "
                "changes themselves are written.",
            )
        if target.place == "table" and target.mode == "append":
            raise DeclarationError(
                f"{at}: {word('cdc')} changes the rows of a table, and the mode is 'append'.",
                hint="Leave mode out, or say mode='scd2' for all versions of a row.",
            )
        keys = _changed_keys(cdc, target)
        if target.place == "table" and set(target.primary_key) != set(keys) and (keys or cdc.route is None):
            raise DeclarationError(
                f"{at}: its primary key is {', '.join(target.primary_key)}, and key_field names {', '.join(keys)}.",
                hint="Name the same columns: the last part of each path in key_field is a column.",
            )
        if target.mode == "scd2" and cdc.delete_mode == "soft":
            raise DeclarationError(
                f"{at}: delete_mode = 'soft' marks the rows of a mirror, and the mode is 'scd2'.",
                hint="Leave delete_mode out: a history keeps the versions of deleted rows.",
            )
        if cdc.snapshot == "copy":
            has_columns = target.declared is not None and target.declared.columns
            if target.place == "stream" or target.mode == "scd2" or has_columns:
                what = "a stream or topic" if target.place == "stream" else "a table with declared columns"
                raise DeclarationError(
                    f"{at}: snapshot = 'copy' fills a mirror, and this is "
                    f"{'a history' if target.mode == 'scd2' else what}.",
                    hint="Leave snapshot out: the messages of Debezium's own snapshot go everywhere.",
                )
        for option in target.load_options:
            raise DeclarationError(f"{at}: {option} is not an option of {word('cdc')}.")


def _check_route(cdc: CDC, pipeline: StreamingPipeline, where: str, word: Callable[[str], str]) -> None:
    """Check that routes and targets name the same tables."""
    if cdc.route is None:
        return
    for target in pipeline.targets:
        at = f"{where}, target {target.name}"
        if target.place == "stream":
            raise DeclarationError(
                f"{at}: a stream or topic gets the changes of one table, and route names several.",
                hint="Let another pipeline write the changes of one of the tables there.",
            )
        if cdc.source_of(target.name) is None:
            hint = did_you_mean(target.name, list(cdc.route.values()), f"It leads to {', '.join(cdc.route.values())}.")
            raise DeclarationError(f"{at}: route leads no table there.", hint=hint)
    names = [each.name for each in pipeline.targets]
    for source, table in cdc.route.items():
        if table not in names:
            raise DeclarationError(
                f"{where}: route leads {source} to {table}, which is no target.",
                hint=f"Add a target with that table, or name the connection alone as {word('target')}: then each "
                "table of route is a target.",
            )
        keys = {each.primary_key for each in pipeline.targets if each.name == table and each.primary_key}
        if len(set(map(frozenset, keys))) > 1:
            raise DeclarationError(f"{where}: two targets have the table {table} with different keys.")


def _check_join_sources(join: Join, pipeline: StreamingPipeline, where: str, word: Callable[[str], str]) -> None:
    """Check that each side of a join is one of the sources."""
    names = [each.name for each in pipeline.sources]
    if len(names) != 2:
        raise DeclarationError(
            f"{where}: {word('join')} requires two sources, and there "
            f"{'is one' if len(names) == 1 else f'are {len(names)}'}.",
            hint="sources=[weft.Source(…), weft.Source(…)]; in a file [[sources]] twice.",
        )
    for side, (source, *_) in zip(("left_source", "right_source"), join.sides, strict=True):
        if source not in names:
            hint = did_you_mean(source, names, f"Its sources are {' and '.join(names)}.")
            raise DeclarationError(f"{where}: {side} is {source!r}, which is no source of the pipeline.", hint=hint)


def _check_window_targets(window: Window, pipeline: StreamingPipeline, where: str) -> None:
    """Check that targets can take a window that is written again."""
    for target in pipeline.targets:
        if window.changes_rows and target.mode != "merge":
            option = f"emit = {window.emit!r}" if window.emit == "update" else f"late_data = {window.late_data!r}"
            raise DeclarationError(
                f"{where}, target {target.name}: {option} writes a window again, so that its target must merge.",
                hint=f'mode="merge", keys={list(window.keys)!r}',
            )
        if window.changes_rows and set(target.primary_key) != set(window.keys):
            raise DeclarationError(
                f"{where}, target {target.name}: the keys of a window that is written again are {list(window.keys)!r}, "
                f"not {list(target.primary_key)!r}.",
            )


def _register(pipeline: StreamingPipeline, function: Callable[..., Any]) -> None:
    known = current().streaming_pipelines
    refuse_twice("Streaming pipeline", pipeline, known, function)
    for other in known.values():
        if pipeline.checkpoint is not None and other.name != pipeline.name and other.checkpoint == pipeline.checkpoint:
            raise DeclarationError(
                f"Streaming pipelines {other.name!r} and {pipeline.name!r} have one checkpoint, {pipeline.checkpoint}: "
                f"{other.declared_at} and {pipeline.declared_at}.",
                hint="Give each its own: what one has read, the other would pass over.",
            )
    known[pipeline.name] = pipeline
    current().declarations += 1
