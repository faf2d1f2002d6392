"""What a streaming pipeline is: its sources, targets and lookups, the same from Python and from a TOML file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, Unpack, get_args

from weft.errors import DeclarationError
from weft.options import Option, column_names, count, errors_at, one_of, options_of, refuse_unknown, text_option
from weft.pipelines.options import connection_option
from weft.pipelines.streaming.cdc import CDC
from weft.pipelines.streaming.joins import Join
from weft.pipelines.streaming.windows import StateStore, Watermark, Window
from weft.pipelines.table import AnyTable, Table, table_of
from weft.streams.declare import MAX_NEW_COLUMNS, Stream
from weft.systems.base import AnyConnection, Connection, Settings, system_for
from weft.systems.endpoint import endpoint_of, endpoint_options, endpoints, is_start
from weft.systems.file_options import FileKeywords
from weft.systems.load import KEYED_MODES, Columns, KeyedOptions, full_name, refuse_own
from weft.systems.log import EVENT_TIME, RESERVED_PREFIX
from weft.types import FieldType

OnError = Literal["fail", "drop", "dlq"]
Drift = Literal["evolve", "ignore", "fail"]
Delivery = Literal["exactly_once", "at_least_once"]
Profile = Literal["throughput", "low_latency"]
Mode = Literal["append", "merge", "scd2"]
MODES: tuple[str, ...] = get_args(Mode)

LOAD_OPTIONS = options_of(KeyedOptions)
"""What the load of a batch into a table takes. The others of `weft.load` are about rows that a batch does not have."""


class SourceKeywords(FileKeywords, total=False):
    """What a source takes by name besides its own options. Systems of other packages take theirs in `options`."""


class TargetKeywords(FileKeywords, KeyedOptions, total=False):
    """What a target takes by name besides its own options. Systems of other packages take theirs in `options`."""


@dataclass(frozen=True, kw_only=True, init=False)
class Source:
    """Where rows come from: a topic, a prefix, a table or a stream of a connection.

    `Source(connection=kafka, query="orders")`. A declared stream needs no connection. How files are read is said by
    name: `Source(connection=lake, query="raw/", csv_read_options={"delimiter": ";"})`.
    """

    connection: str | Connection | None = None
    query: str | Stream
    start: str = "earliest"
    max_rows: int | None = None
    max_files: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        *,
        connection: Annotated[
            AnyConnection | None, Option("A connection or its name.", default="that of the stream, or `default`")
        ] = None,
        query: Annotated[
            str | Stream,
            Option("What is read: a topic, a prefix, a table of Delta, a stream, declared or by its name."),
        ],
        start: Annotated[
            str | int,
            Option(
                "Where a new checkpoint begins: `earliest`, `latest` (not of files), an offset of a stream or a topic "
                '(`"0:120,1:95"` for the partitions of one), on Redis also the id of an entry (`"1526919030474-55"`), '
                "a sequence number or a time of a stream with shards, a version of Delta."
            ),
        ] = "earliest",
        max_rows: Annotated[
            int | None, Option("The rows of one batch, for streams and topics.", default="the engine's")
        ] = None,
        max_files: Annotated[
            int | None, Option("The files of one batch, for files and Delta.", default="the engine's")
        ] = None,
        columns: Annotated[
            Mapping[str, str] | None,
            Option(
                "The types of columns, by name, of messages and files: see [types of columns](#types-of-columns).",
                default="those of the values",
                kinds=("types",),
            ),
        ] = None,
        options: Mapping[str, Any] | None = None,
        **more: Unpack[SourceKeywords],
    ) -> None:
        where = f"Source {query.name if isinstance(query, Stream) else query!r}"
        refuse_unknown(more, (*endpoint_options(), *SOURCE_OPTIONS, "options"), where)
        if isinstance(query, Stream):
            connection = query.connection if connection is None else connection
        elif not isinstance(query, str) or not query:
            raise DeclarationError(
                f"{where}: query is a topic, a prefix, a table, a stream's name or a declared stream.",
            )
        if isinstance(start, bool) or not is_start(str(start)):
            raise DeclarationError(
                f"{where}: start is {start!r}.",
                hint="It can be 'earliest', 'latest', an offset of a stream or topic ('0:120,1:95' for its "
                "partitions), a sequence number or a time of a stream with shards, or a version of Delta.",
            )
        _set(
            self,
            connection=connection_option(connection, "connection", where),
            query=query,
            start=str(start),
            max_rows=None if max_rows is None else count(max_rows, "max_rows", where),
            max_files=None if max_files is None else count(max_files, "max_files", where),
            columns=_columns(columns, where),
            options=_kept(options, more, tuple(endpoint_options()), where),
        )
        if isinstance(self.connection, Connection):
            self._check_connection(self.connection)

    @property
    def name(self) -> str:
        """How metrics, errors and dead letters call it."""
        return self.query if isinstance(self.query, str) else self.query.name

    def _check_connection(self, connection: Connection) -> None:
        """Refuse what cannot be read from a connection, or not so."""
        where = f"Source {self.name!r}"
        endpoint = endpoint_of(connection)
        with errors_at(where):
            _set(self, options=endpoint.check_options(connection, self.options))
        if not endpoint.is_source:
            raise DeclarationError(
                f"{where}: {connection.any_such} cannot be the source of a streaming pipeline.",
                hint=f"These can: {', '.join(kind for kind, each in endpoints().items() if each.is_source)}.",
            )
        if isinstance(self.query, Stream) and "stream" not in endpoint.places:
            raise DeclarationError(f"{where}: {connection.any_such} holds no streams.")
        for limit in {"max_rows", "max_files"} - {endpoint.limit}:
            if getattr(self, limit) is not None:
                raise DeclarationError(
                    f"{where}: {limit} is not a limit of {connection.kind}.", hint=f"Use {endpoint.limit}."
                )
        if self.columns and (why := endpoint.why_no_columns(self.connection_with_options(connection))) is not None:
            raise DeclarationError(f"{where}: columns are declared, and {why}.", hint="Leave columns out.")
        with errors_at(where):
            _set(self, start=endpoint.parse_start(self.start, connection, self.name))

    def connection_with_options(self, connection: Connection) -> Any:
        """Return the connection with the options of this source in the place of its own."""
        return endpoint_of(connection).with_options(connection, self.options) if self.options else connection


@dataclass(frozen=True, kw_only=True, init=False)
class Target:
    """Where rows go, and how: `Target(connection=warehouse, table=("public", "events"))`.

    `table` is for databases and Delta (a class under `@weft.table` too), `prefix` for files, `stream` for a topic, a
    Redis stream or one of ours. How files are written is said by name: `Target(connection=lake, prefix="events/raw",
    parquet_compression="zstd")`.
    """

    connection: str | Connection | None = None
    table: tuple[str | None, str] | None = None
    prefix: str | None = None
    stream: str | Stream | None = None
    mode: str = "append"
    primary_key: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the load of a batch takes besides these; for files how they are written, such as `parquet_compression`."""
    declared: Table | None = None
    """The class under `@weft.table`, where `table` was one."""
    has_mode: bool = field(default=True, repr=False, compare=False)
    """Whether it says its mode itself: else the pipeline's stands for it."""

    def __init__(
        self,
        *,
        connection: Annotated[
            AnyConnection | None,
            Option("A connection or its name.", default="that of the table or stream, or `default`"),
        ] = None,
        table: Annotated[
            AnyTable | None,
            Option(
                'The table, of a database or Delta: `("schema", "table")`, `"schema.table"`, a class under '
                "`@weft.table`.",
                kinds=("text", "table", "tables"),
                inside="table",
            ),
        ] = None,
        prefix: Annotated[
            str | None, Option("The folder of the files in an object store; with Delta the table of that path.")
        ] = None,
        stream: Annotated[
            str | Stream | None, Option("A topic, a stream of Redis, or a stream of Weft, declared or by its name.")
        ] = None,
        mode: Annotated[
            Mode | None, Option("How rows are written; `merge` and `scd2` are for tables.", default="the pipeline's")
        ] = None,
        primary_key: Annotated[
            Columns,
            Option(
                "The keys of a merge or scd2, or of messages.",
                default="the pipeline's `keys`, those of the declared table",
            ),
        ] = (),
        options: Mapping[str, Any] | None = None,
        declared: Table | None = None,
        has_mode: bool | None = None,
        **more: Unpack[TargetKeywords],
    ) -> None:
        where = "Target"
        refuse_unknown(more, (*endpoint_options(), *LOAD_OPTIONS, *TARGET_OPTIONS, "options"), where)
        specification = table_of(table)
        if specification is not None:
            declared, table = specification, (specification.schema, specification.name)
        if declared is not None and connection is None:
            connection = declared.connection
        if isinstance(stream, Stream) and connection is None:
            connection = stream.connection
        if sum(each is not None for each in (table, prefix, stream)) > 1:
            raise DeclarationError(f"{where} takes one of table, prefix and stream.")
        if (stream is not None and not isinstance(stream, Stream | str)) or stream == "":
            raise DeclarationError(f"{where}: stream must be a declared stream or a name, not {stream!r}.")
        _set(
            self,
            connection=connection_option(connection, "connection", where),
            table=None if table is None else table_name(table, "table", where),
            prefix=_prefix(prefix, where),
            stream=stream,
            mode=check_mode("append" if mode is None else mode, "mode", where),
            primary_key=column_names(primary_key, "primary_key", where),
            options=_kept(options, more, (*endpoint_options(), *LOAD_OPTIONS), where),
            declared=declared,
            has_mode=mode is not None if has_mode is None else has_mode,
        )
        if isinstance(self.connection, Connection):
            self._check_connection(self.connection)
        elif self.place is None:
            raise DeclarationError(f"{where} names no place.", hint=f"One of these: {' '.join(_EXAMPLES.values())}")

    @property
    def place(self) -> str | None:
        """Which of table, prefix and stream it names."""
        return next((each for each in ("table", "prefix", "stream") if getattr(self, each) is not None), None)

    @property
    def name(self) -> str:
        """How metrics, errors and the ledger call it."""
        if self.table is not None:
            return full_name(*self.table)
        if self.stream is not None:
            return self.stream if isinstance(self.stream, str) else self.stream.name
        return self.prefix or ""

    def _check_connection(self, connection: Connection) -> None:
        """Refuse what a connection cannot hold. A prefix of Delta is the table of that path."""
        endpoint = endpoint_of(connection)
        if endpoint.prefix_is_table and self.prefix is not None:
            _set(self, table=(None, self.prefix), prefix=None)
        where = f"Target {self.name}" if self.name else "Target"
        if self.place not in endpoint.places:
            named = f"names a {self.place}" if self.place else "names no place"
            ways = " or ".join(endpoint.places)
            written = f"is written by {ways}" if ways else "cannot be written by a streaming pipeline"
            raise DeclarationError(
                f"{where} {named}, and {connection.any_such} {written}.",
                hint=" Or ".join(_EXAMPLES[each] for each in endpoint.places) or None,
            )
        if self.table is not None and system_for(connection.kind).tables is not None:
            refuse_own(*self.table, where="Target: ")
        if self.mode in KEYED_MODES and self.place != "table":
            raise DeclarationError(
                f"{where}: the mode {self.mode!r} is for tables; a {self.place} is only added to.",
                hint=f"A Delta table (delta_local, delta_s3) takes {self.mode}." if self.place == "prefix" else None,
            )
        if self.load_options and self.place != "table":
            name = next(iter(self.load_options))
            raise DeclarationError(f"{where}: {name} is an option of tables, and this is a {self.place}.")
        with errors_at(where):
            own = endpoint.check_options(connection, self._endpoint_options)
        _set(self, options=Settings({**self.load_options, **own}))

    @property
    def load_options(self) -> dict[str, Any]:
        """The options of the load of a batch into a table."""
        return {name: value for name, value in self.options.items() if name in LOAD_OPTIONS}

    @property
    def _endpoint_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name not in LOAD_OPTIONS}

    def connection_with_options(self, connection: Connection) -> Any:
        """Return the connection with the options of this target in the place of its own."""
        return endpoint_of(connection).with_options(connection, self._endpoint_options)


_EXAMPLES = {
    "table": 'target_table=("public", "events"), or weft.Target(connection=…, table=("public", "events")).',
    "prefix": 'weft.Target(connection=…, prefix="events/raw").',
    "stream": 'weft.Target(connection=…, stream="events").',
}


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A table that `transform_sql` can join, read with the first batch of a run and again after each interval."""

    connection: Annotated[
        AnyConnection | None, Option("A connection or its name.", default="`default`", check=connection_option)
    ] = None
    table: Annotated[str | None, Option("The table.")] = None
    schema: Annotated[str | None, Option("The table's schema.")] = None
    query: Annotated[str | None, Option("SQL instead of a table.")] = None
    refresh_interval_ms: Annotated[
        int | None,
        Option(
            "After how long it is read again, while batches run; a batch after a pause of that length waits for it.",
            default="once",
        ),
    ] = None

    def __new__(cls, **options: Any) -> Self:
        # Before __init__, which would answer an unknown option with a bare TypeError.
        refuse_unknown(options, tuple(LOOKUP_OPTIONS), "Lookup")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        where = f"Lookup {self.table}" if isinstance(self.table, str) else "Lookup"
        for name, option in LOOKUP_OPTIONS.items():
            _set(self, **{name: option.checked(getattr(self, name), where)})
        if (self.table is None) == (self.query is None):
            raise DeclarationError(f"{where} needs a table or a query, not {'both' if self.table else 'neither'}.")
        if self.schema is not None and self.table is None:
            raise DeclarationError(f"{where}: schema is that of a table, and there is a query.")


# Else `help` would show that of `__new__`.
_lookup = inspect.signature(Lookup.__init__)
Lookup.__signature__ = _lookup.replace(parameters=list(_lookup.parameters.values())[1:])  # type: ignore[attr-defined]
SOURCE_OPTIONS, TARGET_OPTIONS, LOOKUP_OPTIONS = map(options_of, (Source, Target, Lookup))


@dataclass(frozen=True, kw_only=True)
class DeadLetters:
    """Where rows go that cannot be parsed, transformed or stored: one of these."""

    topic: str | None = None
    stream: str | Stream | None = None
    table: tuple[str | None, str] | None = None
    path: str | None = None
    connection: str | Connection | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamingPipeline:
    """Sources, SQL over each micro-batch, targets."""

    name: str
    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    transform_sql: str | None = None
    transform_on_error: OnError = "fail"
    lookups: Mapping[str, Lookup] = field(default_factory=dict)
    udfs: tuple[Any, ...] = ()
    aggregate_udfs: tuple[Any, ...] = ()
    window: Window | None = None
    join: Join | None = None
    cdc: CDC | None = None
    watermark: Watermark | None = None
    state_store: StateStore | None = None
    dead_letters: DeadLetters | None = None
    on_drift: Drift = "evolve"
    max_new_columns: int = MAX_NEW_COLUMNS
    every_seconds: float | None = None
    """Between the beginnings of two batches; one after the other where `None`."""
    idle_pause_seconds: float = 0.1
    """How long a source without news is left alone."""
    checkpoint: str | None = None
    """A folder or a URL that Spark can read; `.weft/checkpoints/<name>` where `None`."""
    expect_within: float | None = None
    """Seconds in which rows are expected."""
    delivery: Delivery = "exactly_once"
    profile: Profile | None = None
    description: str | None = None
    declared_at: str = ""
    """File and line, for errors."""
    origin: str = ""

    @property
    def step(self) -> Window | Join | None:
        """What keeps rows between batches."""
        return self.window or self.join

    @property
    def is_routed(self) -> bool:
        """Whether changes of several tables go to a table each."""
        return self.cdc is not None and self.cdc.route is not None

    @property
    def unites_sources(self) -> bool:
        """Whether rows of all sources become one table, in which columns of one name are one column."""
        is_apart = self.join is not None or (self.window is not None and self.transform_sql is not None)
        return not (self.is_routed or is_apart)


def table_name(value: Any, option: str, where: str) -> tuple[str | None, str]:
    """Return a table as `("schema", "table")`, of what a user wrote."""
    if isinstance(value, str):
        schema, dot, table = value.partition(".")
        value = (schema, table) if dot else (None, value)
    if isinstance(value, tuple | list) and len(value) == 2:
        schema, table = value
        if isinstance(table, str) and table and (schema is None or (isinstance(schema, str) and schema)):
            return schema, table
    raise DeclarationError(f'{where}: {option} is ("schema", "table") or "schema.table", not {value!r}.')


def check_mode(mode: Any, option: str, where: str) -> str:
    """Return a mode of streaming pipelines."""
    if mode not in MODES and isinstance(mode, str):
        raise DeclarationError(
            f"{where}: a streaming pipeline has no mode {mode!r}.",
            hint="'append' adds every row, 'merge' matches rows by their keys (scd1 in other words), 'scd2' keeps "
            "their history.",
        )
    checked: str = one_of(mode, MODES, option, where)
    return checked


def _columns(value: Any, where: str) -> Settings:
    """Return the declared types of columns, by name."""
    if value is not None and not isinstance(value, Mapping):
        raise DeclarationError(f"{where}: columns must be a dict of names to types.", hint='columns={"id": "int64"}')
    types: dict[str, str] = {}
    for name, kind in (value or {}).items():
        if not isinstance(name, str) or not name or name.startswith(RESERVED_PREFIX) or name.lower() == EVENT_TIME:
            raise DeclarationError(f"{where}: a column cannot be called {name!r}.")
        if name.lower() in map(str.lower, types):
            raise DeclarationError(f"{where}: two columns are called {name!r}; to SQL upper and lower case are one.")
        with errors_at(where):
            types[name] = str(FieldType.parse(kind, field=name))
    return Settings(types)


def _prefix(value: Any, where: str) -> str | None:
    prefix = text_option(value, "prefix", where)
    if prefix is not None and not prefix.strip("/"):
        raise DeclarationError(f"{where}: prefix must name a folder.", hint='prefix="events/raw"')
    return prefix and prefix.strip("/")


def _kept(options: Mapping[str, Any] | None, more: Mapping[str, Any], known: tuple[str, ...], where: str) -> Settings:
    """Return options said in a dict or by name, checked as far as the connection does not matter."""
    if options is not None and not isinstance(options, Mapping):
        raise DeclarationError(f"{where}: options must be a dict, not {type(options).__name__}.")
    refuse_unknown(options or {}, known, where)
    kept = Settings({name: each for name, each in {**(options or {}), **more}.items() if each is not None})
    for name, value in kept.items():
        if name in LOAD_OPTIONS:
            kept[name] = LOAD_OPTIONS[name].checked(value, where)
        elif isinstance(value, Mapping):
            # A copy: the caller may change its own later.
            kept[name] = Settings(value)
    return kept


def _set(part: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(part, name, value)
