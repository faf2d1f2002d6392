"""The options of a streaming pipeline: name, type, default, check and sentence of each, once.

The decorator, the function, the TOML file with its JSON Schema and the table in docs/streaming.md are made of them. A
new option is a line here, a field of `StreamingPipeline` that keeps its value, and a row of the table of TOML keys in
docs/streaming.md; `make docs` writes the rest. A type that no other option has needs `kinds`: what a file has for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Annotated, Any, TypedDict

from weft.errors import DeclarationError
from weft.options import Option, column_names, count, options_of, text_option
from weft.pipelines.options import connection_option, interval, show_interval, within
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.endpoints import connection_of
from weft.pipelines.streaming.joins import Join
from weft.pipelines.streaming.spec import (
    Delivery,
    Drift,
    Lookup,
    Mode,
    OnError,
    Profile,
    Source,
    StreamingPipeline,
    Target,
    check_mode,
    table_name,
)
from weft.pipelines.streaming.windows import StateStore, Watermark, Window
from weft.pipelines.table import AnyTable
from weft.streams.declare import Stream
from weft.systems.base import AnyConnection, Connection, system_for
from weft.systems.endpoint import endpoint_of
from weft.systems.load import Columns

RESERVED_TABLE = "source"
"""What `transform_sql` calls the rows of a batch."""
# The beginning of a statement that returns rows, after parentheses and comments.
_QUERY = re.compile(r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(?:select|with|from|values|table)\b", re.IGNORECASE | re.DOTALL)
_MOST_NEW_COLUMNS = 1000

# --------------------------------------------------------------------------------------------------------------- checks


def _name(value: Any, option: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 200 or not value.isprintable():
        raise DeclarationError(f"{where}: {option} has 1 to 200 printable characters, not blanks alone.")
    if re.search(r"[/\\]", value) or value.startswith("."):
        raise DeclarationError(
            f"{where}: {option} cannot hold a slash or begin with a dot.",
            hint="The folder of its checkpoint is called so.",
        )
    return value


def _sql(value: Any, option: str, where: str) -> str:
    sql = text_option(value, option, where) or ""
    if not sql.strip():
        raise DeclarationError(f"{where}: {option} is empty.")
    if _QUERY.match(sql) is None:
        # Spark would carry out any other statement at once, and return no rows.
        raise DeclarationError(f"{where}: {option} is not a SELECT.", hint="It begins with SELECT or WITH.")
    return sql


def _lookups(value: Any, option: str, where: str) -> Mapping[str, Lookup]:
    if not isinstance(value, Mapping):
        raise DeclarationError(f"{where}: lookups must be a dict of names to weft.Lookup(…).")
    seen: set[str] = set()
    for name, lookup in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise DeclarationError(f"{where}: a lookup cannot be called {name!r}: it is the name of a table in SQL.")
        if name.lower() == RESERVED_TABLE:
            raise DeclarationError(
                f"{where}: a lookup cannot be called {name!r}: so SQL calls the rows of the source.",
                hint="Give it another name.",
            )
        if name.lower() in seen:
            raise DeclarationError(f"{where}: two lookups are called {name!r}; to SQL upper and lower case are one.")
        seen.add(name.lower())
        if not isinstance(lookup, Lookup):
            raise DeclarationError(
                f"{where}: the lookup {name!r} is a {type(lookup).__name__}.",
                hint=f'lookups={{"{name}": weft.Lookup(connection=…, table="{name}")}}',
            )
        if (connection := connection_of(lookup.connection)) is not None:
            _check_lookup(name, lookup, connection, where)
    return dict(value)


def _check_lookup(name: str, lookup: Lookup, connection: Connection, where: str) -> None:
    if endpoint_of(connection).places == ("stream",):
        raise DeclarationError(f"{where}: the lookup {name!r} is on {connection.any_such}, which holds no tables.")
    if lookup.query is not None and system_for(connection.kind).tables is None:
        raise DeclarationError(
            f"{where}: the lookup {name!r} has a query, and {connection.any_such} has no SQL of its own.",
            hint="Name its table, and let transform_sql choose what it needs of it.",
        )


def _functions(value: Any, option: str, where: str) -> tuple[Any, ...]:
    functions = value if isinstance(value, list | tuple) else [value]
    for each in functions:
        if not callable(each):
            raise DeclarationError(f"{where}: {option} takes functions, not {each!r}.")
    return tuple(functions)


def _new_columns(value: Any, option: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_NEW_COLUMNS:
        raise DeclarationError(
            f"{where}: {option} must be a whole number from 1 to {_MOST_NEW_COLUMNS:,}, not {value!r}.",
            hint="on_drift='ignore' adds none.",
        )
    return value


def _pause(value: Any, option: str, where: str) -> float:
    return count(value, option, where) / 1000


def _path(value: Any, option: str, where: str) -> str | None:
    return text_option(os.fspath(value) if isinstance(value, os.PathLike) else value, option, where)


def _folder(value: Any, option: str, where: str) -> str | None:
    path = _path(value, option, where)
    if path is not None and "://" in path:
        raise DeclarationError(
            f"{where}: {option} is a folder of this machine, not a URL.",
            hint="For a bucket, name the folder in it, and the bucket by dead_letter_connection. Other places are "
            "dead_letter_stream, dead_letter_table and dead_letter_topic.",
        )
    return path


def _instance(cls: type) -> Callable[[Any, str, str], Any]:
    """Return the check of an option that is a structure."""

    def check(value: Any, option: str, where: str) -> Any:
        if not isinstance(value, cls):
            raise DeclarationError(
                f"{where}: {option} is a {type(value).__name__}.", hint=f"{option}=weft.{cls.__name__}(…)"
            )
        return value

    return check


def _stream(value: Any, option: str, where: str) -> Any:
    return value if isinstance(value, Stream) else text_option(value, option, where)


# -------------------------------------------------------------------------------------------------------------- options


class StreamingOptions(TypedDict, total=False):
    """What `@weft.streaming_pipeline` and `weft.run_streaming_pipeline` take, in the order of the docs."""

    name: Annotated[
        str | None,
        Option(
            "Its name in metrics, errors and the folder of the checkpoint: no slash, and no dot first.",
            default="the function's name",
            key="pipeline_name",
            check=_name,
        ),
    ]
    source: Annotated[
        AnyConnection | Stream | Source | Sequence[AnyConnection | Stream | Source] | None,
        Option(
            "Where rows come from: a declared stream, a connection or its name with `source_query`, a `weft.Source`, "
            "or a list of these.",
            kinds=("table",),
            inside="source",
        ),
    ]
    sources: Annotated[
        Sequence[Source | Stream] | None,
        Option(
            "Several sources, whose rows become one batch: a list of `weft.Source(…)` and declared streams.",
            kinds=("tables",),
            inside="source",
        ),
    ]
    source_query: Annotated[
        str | None,
        Option("What is read from the connection: a topic, a prefix, a table of Delta, a stream's name."),
    ]
    source_kind: Annotated[
        str | None,
        Option(
            'The kind of a connection whose fields are options too: `source_kind="kafka", bootstrap_servers="…"`.',
            key="source.kind",
        ),
    ]
    target: Annotated[
        AnyConnection | Stream | Target | None,
        Option(
            "Where rows go: a connection or its name with `target_table`, a class under `@weft.table`, a declared "
            "stream, or a `weft.Target`.",
            kinds=("table",),
            inside="target",
        ),
    ]
    target_table: Annotated[
        AnyTable | None, Option('The table: `("schema", "table")` or `"schema.table"`.', key="target.table")
    ]
    target_primary_key: Annotated[
        Columns | None,
        Option(
            "The columns that identify a row.",
            default="those of the declared table",
            key="target.table.primary_key",
        ),
    ]
    targets: Annotated[
        Sequence[Target] | None,
        Option(
            "Several targets: a list of `weft.Target(…)`, each of which gets every row.",
            kinds=("tables",),
            inside="target",
        ),
    ]
    mode: Annotated[
        Mode | None,
        Option(
            "How rows are written: `append` adds every row, `merge` matches rows by their keys, `scd2` keeps the "
            "history of each key; a target may have a mode of its own.",
            default="`append`",
            check=check_mode,
        ),
    ]
    keys: Annotated[
        Columns | None,
        Option(
            "The keys of a merge or scd2, for every target that has none of its own.",
            default="those of the declared table",
            check=column_names,
        ),
    ]
    deduplicate_by: Annotated[
        Columns | None,
        Option(
            "Of rows with the same key in a batch, a merge keeps the one with the greatest value in these columns; a "
            'target can name its own. Of a stream, `"_weft_rowid"`, which becomes a column of the table: `"_event_ts"` '
            "is the same for all events of one publish, so it cannot order them.",
            default="a key twice in a batch is an error",
            check=column_names,
        ),
    ]
    transform_sql: Annotated[
        str | None,
        Option(
            "A SELECT over the table `source`, all rows of a batch: see [SQL](#sql-lookups-udfs).",
            default="rows as they come",
            key="transform.sql",
            check=_sql,
        ),
    ]
    transform_on_error: Annotated[
        OnError | None,
        Option(
            "What happens to rows for which the SQL fails: `fail`, `drop`, or `dlq` (dead letters).",
            key="transform.on_error",
        ),
    ]
    lookups: Annotated[
        Mapping[str, Lookup] | None,
        Option('Tables that the SQL can join, by name: `{"users": weft.Lookup(…)}`.', check=_lookups),
    ]
    udfs: Annotated[
        Callable[..., Any] | Sequence[Callable[..., Any]] | None,
        Option("Functions that the SQL can call.", key=None, check=_functions),
    ]
    aggregate_udfs: Annotated[
        Callable[..., Any] | Sequence[Callable[..., Any]] | None,
        Option("Classes that aggregate in the SQL.", key=None, check=_functions),
    ]
    window: Annotated[
        Window | None,
        Option("Aggregates by time: see [windows](windows.md).", key="transform.window", check=_instance(Window)),
    ]
    join: Annotated[
        Join | None,
        Option(
            "Rows of two sources that belong together: see [joins](joins.md).",
            key="transform.join",
            check=_instance(Join),
        ),
    ]
    cdc: Annotated[
        CDC | None,
        Option(
            "Changes of a table, applied to a mirror of it: see [change data capture](cdc.md).",
            key="transform.cdc",
            check=_instance(CDC),
        ),
    ]
    watermark: Annotated[
        Watermark | None,
        Option(
            "When a window closes, or a row has no partner: see [the watermark](windows.md#the-watermark).",
            check=_instance(Watermark),
        ),
    ]
    state_store: Annotated[
        StateStore | None,
        Option(
            "Where waiting rows are kept: see [state](windows.md#state).",
            default="the database of the first target that has tables",
            check=_instance(StateStore),
        ),
    ]
    dead_letter_topic: Annotated[
        str | None, Option("The topic that takes bad rows: see [dead letters](#dead-letters).")
    ]
    dead_letter_stream: Annotated[
        str | Stream | None, Option("The stream that takes bad rows, declared or by its name.", check=_stream)
    ]
    dead_letter_table: Annotated[
        str | tuple[str | None, str] | None,
        Option(
            'The table that takes bad rows: `("schema", "table")` or `"schema.table"`.',
            check=table_name,
            kinds=("text", "table"),
            inside="dead_letter_table",
        ),
    ]
    dead_letter_path: Annotated[
        str | os.PathLike[str] | None,
        Option("The folder that takes bad rows, of this machine or of `dead_letter_connection`.", check=_folder),
    ]
    dead_letter_connection: Annotated[
        AnyConnection | None,
        Option(
            "Where the topic, stream, table or path of dead letters is.",
            default="see [dead letters](#dead-letters)",
            check=connection_option,
            kinds=("text", "table"),
            inside="dead_letter_connection",
        ),
    ]
    on_drift: Annotated[Drift | None, Option("What happens to new columns: `evolve`, `ignore` or `fail`.")]
    max_new_columns: Annotated[
        int | None,
        Option(
            "How many columns `evolve` may add to a table, 1 to 1,000: see [new columns](#new-columns).",
            check=_new_columns,
        ),
    ]
    every: Annotated[
        str | timedelta | None,
        Option(
            'The time between the beginnings of two batches: `"500ms"`, `"10s"`, `"1m"`, `"1h"`, a `timedelta`. Spark '
            "counts it by the machine's clock: if that is set back by an hour, the next batch comes an hour later, or "
            "when the pipeline is started again.",
            default="one after the other",
            check=interval,
            field="every_seconds",
            show=show_interval,
        ),
    ]
    idle_pause_ms: Annotated[
        int | None,
        Option(
            "How long to wait until a source without new rows is asked again.",
            check=_pause,
            field="idle_pause_seconds",
            show=lambda seconds: round(seconds * 1000),
        ),
    ]
    checkpoint: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "A folder, or a URL that Spark can read, of this pipeline alone; `${VAR}` in it is the environment's.",
            default="`.weft/checkpoints/<name>`",
            check=_path,
        ),
    ]
    expect_within: Annotated[
        str | timedelta | None,
        Option(
            'Rows are expected at least this often: `"10m"`, `"2h"`, `"1d"`, a `timedelta`. Without one there is an '
            "[alert](running.md#freshness).",
            default="no alert",
            check=within,
            show=show_interval,
        ),
    ]
    delivery: Annotated[
        Delivery | None,
        Option(
            "How often a row may reach a target, `exactly_once` or `at_least_once`: see [delivery](#delivery).",
            default="`exactly_once` where it can be",
        ),
    ]
    profile: Annotated[
        Profile | None,
        Option(
            "What it is tuned for: `low_latency` does not compile the plans of batches; `throughput` does, as does a "
            "pipeline without a profile. The JVM has [its own profile](engine.md).",
            default="neither",
        ),
    ]
    description: Annotated[str | None, Option("What it is for, shown to people.", default="the docstring")]


OPTIONS = options_of(StreamingOptions)
_FIELDS = {each.name for each in fields(StreamingPipeline)} - {"sources", "targets"}
FIELD_OPTIONS = {name: option for name, option in OPTIONS.items() if option.field in _FIELDS}
"""The options whose checked values are fields of a pipeline; the others make its sources, targets and dead letters."""
