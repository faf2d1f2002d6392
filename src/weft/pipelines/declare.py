"""`@pipeline` and `target`: a load as a function, checked where it is declared."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Annotated, Any, Literal, Unpack, get_args

from weft.errors import DeclarationError, NotFoundError, did_you_mean, unknown
from weft.options import Option, errors_at, look_like, one_of, options_of, refuse_unknown
from weft.pipelines import graph
from weft.pipelines.options import connection_option, declared_at, refuse_twice, within
from weft.pipelines.retry import Retry
from weft.pipelines.schedule import Schedule
from weft.pipelines.table import AnyTable, Table, table_of
from weft.pipelines.transforms import Deduplicate, Limit, Sample, Transform
from weft.project import Project, current
from weft.systems.base import AnyConnection, Connection
from weft.systems.expectation import REACTIONS, Expectation, Reaction
from weft.systems.load import AnyMode, Columns, Load, TableOptions

Drift = Literal["error", "warn", "evolve", "ignore"]
DRIFTS: tuple[str, ...] = get_args(Drift)
_ALIASES = {"ttl": "ttl_seconds"}


class TargetLoadOptions(TableOptions, total=False):
    """How rows meet those of a target table."""

    mode: AnyMode | None
    keys: Columns | None
    ttl: float | timedelta | None
    """Another name of `ttl_seconds`."""


class TargetOptions(TargetLoadOptions, total=False):
    """What a pipeline says of its target, or of all targets that do not say it themselves."""

    column_map: Mapping[str, str] | None
    on_drift: Drift | None
    expectations: Sequence[Expectation] | None
    on_quality_failure: Reaction | None


class PipelineOptions(TargetOptions, total=False):
    """What `@weft.pipeline` takes; docs/pipelines.md says what each means. Those with an `Option` are fields of it."""

    target: AnyTable | PipelineTarget | None
    targets: Sequence[AnyTable | PipelineTarget] | None
    name: str
    schedule: str | None
    timezone: str
    source_connection: Annotated[AnyConnection | None, Option(check=connection_option)]
    target_connection: AnyConnection | None
    source_table: Annotated[str | None, Option()]
    transforms_pre: Annotated[Transform | Sequence[Transform], Option(check=_transforms)]
    transforms_post: Annotated[
        str | Callable[..., Any] | Sequence[str | Callable[..., Any]], Option(check=_transforms_post)
    ]
    incremental_column: Annotated[str | None, Option()]
    lookback: Annotated[float | timedelta | None, Option(check=_lookback)]
    count_late: Annotated[bool, Option()]
    depends_on: Annotated[str | Pipeline | Sequence[str | Pipeline], Option(check=_depends_on)]
    upstream_freshness_secs: Annotated[float | timedelta | None, Option(check=_seconds)]
    retry: Mapping[str, Any] | Retry | None
    catchup: Annotated[bool, Option()]
    pool: Annotated[str | None, Option()]
    freshness_sla: Annotated[float | timedelta | None, Option(check=_seconds)]
    expect_within: Annotated[str | timedelta | None, Option(check=within)]
    continue_on_failure: Annotated[bool, Option()]
    engine: Annotated[Literal["spark", "pushdown"] | None, Option()]
    description: Annotated[str | None, Option()]
    tags: Annotated[str | Sequence[str], Option(check=_texts)]
    owner: Annotated[str | None, Option()]


_LOAD_OPTIONS = tuple(name for name in TargetLoadOptions.__annotations__ if name not in _ALIASES)
"""The options that a target passes to its load; those of the pipeline are the defaults of its targets."""
_TARGET_OPTIONS = tuple(TargetOptions.__annotations__)
OPTIONS = tuple(PipelineOptions.__annotations__)
_OF_ANY_MODE = ("deduplicate_by", "allow_empty", "on_bad_rows")
_OF_A_MODE = tuple(name for name in TargetLoadOptions.__annotations__ if name not in _OF_ANY_MODE)


@dataclass(frozen=True, eq=False)
class PipelineTarget:
    """Where a pipeline's rows go, and how."""

    table: Table
    connection: str | Connection | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `weft.load` takes: mode, keys, compare_columns …"""
    column_map: Mapping[str, str] = field(default_factory=dict)
    """Columns of the source, by the column of the table that each of them fills."""
    on_drift: Drift = "evolve"
    expectations: tuple[Expectation, ...] = ()
    on_quality_failure: Reaction = "fail"
    own_options: Mapping[str, Any] = field(default_factory=dict)
    """What was said of this target itself: the pipeline's options count for the rest."""

    @property
    def name(self) -> str:
        """How errors and commands call it."""
        return self.table.full_name

    def plan(self, *, pipeline: str, commit_key: str | None, moment: datetime | None = None) -> Load:
        """Return the load into this target, under a run's key."""
        return Load.declare(
            target=(self.table.schema, self.table.name),
            commit_key=commit_key,
            pipeline=pipeline,
            moment=moment,
            **self.options,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Pipeline:
    """A declared pipeline. Calling it calls its function."""

    name: str
    function: Callable[..., Any]
    targets: tuple[PipelineTarget, ...]
    schedule: Schedule | None = None
    source_connection: str | Connection | None = None
    source_table: str | None = None
    transforms_pre: tuple[Transform, ...] = ()
    transforms_post: tuple[str | Callable[..., Any], ...] = ()
    incremental_column: str | None = None
    lookback: Any = None
    count_late: bool = True
    """Whether rows that came too late are counted, for which all of the source is looked at."""
    depends_on: tuple[str, ...] = ()
    upstream_freshness_secs: float | None = None
    waits_for_upstream: bool = True
    """Whether its schedule waits for a success of each pipeline that it depends on."""
    retry: Retry
    catchup: bool = False
    """Whether slots that were missed are run after all, the oldest first."""
    pool: str | None = None
    """A scheduler runs at most so many pipelines of a pool at once as `[pools]` of the project says."""
    freshness_sla: float | None = None
    expect_within: float | None = None
    """Seconds in which a run is expected to succeed: else there is an alert."""
    continue_on_failure: bool = False
    engine: Literal["spark", "pushdown"] | None = None
    description: str | None = None
    tags: tuple[str, ...] = ()
    owner: str | None = None
    parameters: int = 0
    """How many connections its function takes: none, the source, or the source and the target."""
    origin: str = ""
    declared_at: str = ""
    """File and line, for errors."""

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def target(
    table: AnyTable,
    *,
    connection: AnyConnection | None = None,
    **options: Unpack[TargetOptions],
) -> PipelineTarget:
    """One of a pipeline's targets: `targets=[weft.target(Events, mode="append"), weft.target(Archive)]`.

    What is left out is as the pipeline says it. Takes the options of `weft.load` (`mode`, `keys`, …).
    """
    said = {"connection": connection, **options}
    _refuse_both(options, "target")
    return _make_target(table, {name: value for name, value in said.items() if value is not None}, "target")


def _refuse_both(said: Mapping[str, Any], where: str) -> None:
    """Raise where an option is said under both of its names: one of them would count for nothing."""
    for short, name in _ALIASES.items():
        if said.get(short) is not None and said.get(name) is not None:
            raise DeclarationError(f"{where} has both {short} and {name}, which mean the same.", hint="Keep one.")


def _make_target(named: Any, said: Mapping[str, Any], where: str) -> PipelineTarget:
    refuse_unknown(said, ("connection", *_TARGET_OPTIONS), where)
    table = _table(named, where)
    options = {
        _ALIASES.get(name, name): value for name, value in said.items() if _ALIASES.get(name, name) in _LOAD_OPTIONS
    }
    if "keys" not in options and options.get("mode") in ("merge", "scd1", "scd2") and table.keys:
        options["keys"] = list(table.keys)
    column_map = said.get("column_map") or {}
    if not isinstance(column_map, Mapping) or not all(
        isinstance(each, str) for pair in column_map.items() for each in pair
    ):
        raise DeclarationError(f"{where}: column_map maps columns of the table to columns of the source, by name.")
    for name in column_map:
        if table.columns and name not in table.names:
            raise DeclarationError(
                f"{where}: column_map fills {name!r}, which is not a column of {table.full_name}.",
                hint=did_you_mean(name, table.names, f"Columns: {', '.join(table.names)}."),
            )
    if not table.columns and len(set(column_map.values())) < len(column_map):
        raise DeclarationError(f"{where}: column_map takes one column of the source twice.")
    expectations = tuple(said.get("expectations") or ())
    for each in expectations:
        if not isinstance(each, Expectation):
            raise DeclarationError(
                f"{where}: {each!r} is not an expectation.",
                hint="weft.expectations has not_null, unique, accepted, range, sql, row_count and freshness.",
            )
    return PipelineTarget(
        table=table,
        connection=connection_option(said.get("connection"), "connection", where) or table.connection,
        options=MappingProxyType(options),
        column_map=MappingProxyType(dict(column_map)),
        on_drift=one_of(said.get("on_drift", "evolve"), DRIFTS, "on_drift", where),
        expectations=expectations,
        on_quality_failure=one_of(said.get("on_quality_failure", "fail"), REACTIONS, "on_quality_failure", where),
        own_options=MappingProxyType(dict(said)),
    )


def pipeline(function: None = None, /, **options: Unpack[PipelineOptions]) -> Callable[[Callable[..., Any]], Pipeline]:
    """Declare a pipeline. Its function gives what is loaded: SQL, a frame, rows, a path, a stream.

        @weft.pipeline(target=Events, schedule="*/5 * * * *", mode="append")
        def ingest_events(conn):
            return "SELECT event_id, name, received_at FROM raw.events"

    The function takes nothing, the source's connection, or those of source and target, and may be a coroutine. It may
    give `None` where `source_table` names the table to load. docs/pipelines.md lists the options.
    """
    decorated: Any = function  # what `@weft.pipeline` without options hands over
    if decorated is not None and not options:
        raise DeclarationError("@pipeline needs a target.", hint="@weft.pipeline(target=Events)")

    def declare(function: Callable[..., Any]) -> Pipeline:
        if not callable(function):
            raise DeclarationError(f"@pipeline decorates a function, not a {type(function).__name__}.")
        pipeline = _make(function, options)
        look_like(pipeline, function)
        _register(pipeline)
        return pipeline

    return declare


def _make(function: Callable[..., Any], options: Mapping[str, Any]) -> Pipeline:
    name = options.get("name", getattr(function, "__name__", ""))
    where = f"Pipeline {name!r}"
    refuse_unknown(options, OPTIONS, where)
    if not isinstance(name, str) or not name.strip() or len(name) > 200 or not name.isprintable():
        raise DeclarationError(f"{where}: a pipeline's name has 1 to 200 printable characters.")
    _refuse_both(options, where)
    values = {name: each.checked(options[name], where) for name, each in _KEPT.items() if name in options}
    shared = {key: value for key, value in options.items() if key in _TARGET_OPTIONS and value is not None}
    for each in values.get("transforms_pre", ()):
        if isinstance(each, Deduplicate):
            shared.setdefault("deduplicate_by", list(each.columns))
    cron = options.get("schedule")
    if cron is None and "timezone" in options:
        raise DeclarationError(f"{where}: timezone is that of a schedule, and there is none.")
    with errors_at(where):
        schedule = None if cron is None else Schedule(cron, options.get("timezone", "UTC"))
        retry = Retry.declare(options.get("retry"))
    if cron is None and options.get("retry") is not None:
        raise DeclarationError(
            f"{where}: retry is how often run-due tries a slot of the schedule again, and there is no schedule.",
            hint="Add one, or leave retry out: weft run tries once, and goes on with what failed when called again.",
        )

    pipeline = Pipeline(
        name=name,
        function=function,
        targets=_targets(options, shared, where),
        schedule=schedule,
        retry=retry,
        parameters=_parameters(function, where),
        origin=f"{function.__module__}.{getattr(function, '__qualname__', name)}",
        declared_at=declared_at(function),
        **{**values, "description": values.get("description") or inspect.getdoc(function)},
    )
    _check(pipeline, where)
    return pipeline


def _targets(options: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> tuple[PipelineTarget, ...]:
    one, several = options.get("target"), options.get("targets")
    if (one is None) == (several is None):
        raise DeclarationError(
            f"{where} needs target or targets, not {'both' if one is not None else 'neither'}.",
            hint="target=Events, or targets=[weft.target(Events), weft.target(Archive)].",
        )
    listed = [one] if one is not None else list(several or ())
    if not listed:
        raise DeclarationError(f"{where}: targets is empty.")
    fallback = connection_option(options.get("target_connection"), "target_connection", where)
    targets = []
    for each in listed:
        said = dict(shared)
        table = each.table if isinstance(each, PipelineTarget) else _table(each, where)
        if isinstance(each, PipelineTarget):
            if each.options.get("mode", shared.get("mode")) != shared.get("mode"):
                # Options of one mode mean nothing to another mode.
                said = {key: value for key, value in shared.items() if key not in _OF_A_MODE}
            said = {**said, **each.own_options}
        targets.append(_make_target(table, {"connection": fallback or table.connection, **said}, where))
    names = [(each.connection, each.name) for each in targets]
    repeated = [name for _, name in names if names.count((_, name)) > 1]
    if repeated:
        raise DeclarationError(f"{where}: the target {repeated[0]} is listed twice.")
    return tuple(targets)


def _check(pipeline: Pipeline, where: str) -> None:
    for each in pipeline.targets:
        try:
            load = each.plan(pipeline=pipeline.name, commit_key="declared")
            if each.table.columns:
                load.check_source(each.table.names)
        except DeclarationError as error:
            hint = error.hint
            if load_mode(each) in ("merge", "scd2") and not each.options.get("keys"):
                hint = 'Mark the key: Annotated[BigInt, pk()], or say keys=["id"].'
            raise DeclarationError(f"{where}, target {each.name}: {error.what}", hint=hint) from None
        if pipeline.lookback is not None and load_mode(each) == "append":
            raise DeclarationError(
                f"{where}: with a lookback the mode append would store the same rows again.", hint="Use merge or scd2."
            )
        if each.options.get("handle_deletes") and _leaves_rows_out(pipeline):
            raise DeclarationError(
                f"{where}: of the rows that limit or sample_pct leaves out, handle_deletes would think they are gone.",
                hint="Leave one of them out.",
            )
    if pipeline.incremental_column is not None:
        for each in pipeline.targets:
            refuse_with_watermark(pipeline, each)
    elif pipeline.lookback is not None and pipeline.source_table is not None:
        raise DeclarationError(f"{where}: lookback needs incremental_column.")
    for each in pipeline.targets:
        _refuse_key_checks(each, where)
    connections = {each.connection for each in pipeline.targets}
    if len(connections) > 1 and pipeline.source_connection is None:
        raise DeclarationError(
            f"{where}: its targets are on several connections, so its source must be named.",
            hint='source_connection="raw_db"',
        )
    if pipeline.upstream_freshness_secs is not None and not pipeline.depends_on:
        raise DeclarationError(f"{where}: upstream_freshness_secs needs depends_on.")


def _leaves_rows_out(pipeline: Pipeline) -> bool:
    return any(isinstance(step, Limit | Sample) for step in pipeline.transforms_pre)


def _refuse_key_checks(target: PipelineTarget, where: str) -> None:
    """Keys are checked for all rows, before any is put aside."""
    if load_mode(target) not in ("merge", "scd2"):
        return
    keys = set(target.options.get("keys") or ())
    for check in target.expectations:
        is_quarantined = (check.reaction or target.on_quality_failure) == "quarantine"
        if check.kind in ("not_null", "unique") and is_quarantined and set(check.columns) <= keys:
            raise DeclarationError(
                f"{where}: {check} is about the key, which must be right for all rows.",
                hint="Filter such rows out in the source, or use deduplicate_by.",
            )


def refuse_with_watermark(pipeline: Pipeline, target: PipelineTarget) -> None:
    """Raise for what a pipeline that reads only what is new cannot do."""
    where = f"Pipeline {pipeline.name!r}"
    if load_mode(target) == "truncate" or target.options.get("handle_deletes"):
        raise DeclarationError(
            f"{where}: with a watermark only new rows are read, so the rest would be deleted.",
            hint="Leave out incremental_column (or $watermark), or the mode truncate and handle_deletes.",
        )
    if _leaves_rows_out(pipeline):
        raise DeclarationError(
            f"{where}: the watermark would move past the rows that limit or sample_pct leaves out.",
            hint="Leave one of them out.",
        )


def find(name: str, project: Project | None = None) -> Pipeline:
    """Return a declared pipeline by its name."""
    project = project or current()
    known = project.pipelines
    if name not in known:
        if name in project.streaming_pipelines:
            raise NotFoundError(f"{name!r} is a streaming pipeline.", hint=f"Run it with: weft consume {name}")
        raise unknown("pipeline", name, known, otherwise="Declare it in a module of weft.toml, or give --module M.")
    return known[name]


def load_mode(target: PipelineTarget) -> str:
    """Return how a target is written: `scd1` is `merge`."""
    mode = str(target.options.get("mode", "append"))
    return "merge" if mode == "scd1" else mode


def _register(pipeline: Pipeline) -> None:
    known = current().pipelines
    refuse_twice("Pipeline", pipeline, known, pipeline.function)
    # In a cycle each waits for another one: most pipelines do not, and a thousand are declared at once.
    if pipeline.depends_on and any(pipeline.name in each.depends_on for each in (pipeline, *known.values())):
        graph.refuse_cycles({**known, pipeline.name: pipeline})
    known[pipeline.name] = pipeline
    current().declarations += 1


# ------------------------------------------------------------------------------------------------------ single options


def _table(value: Any, where: str) -> Table:
    table = table_of(value)
    if table is not None:
        return table
    if isinstance(value, type):
        raise DeclarationError(f"{where}: the class {value.__name__} is not a table.", hint="Put @weft.table above it.")
    if isinstance(value, str):
        schema, dot, name = value.partition(".")
        return Table(name=name if dot else value, schema=schema if dot else None)
    if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], str):
        return Table(name=value[1], schema=value[0])
    raise DeclarationError(
        f'{where}: a target is a class under @weft.table, ("schema", "table") or "schema.table", not {value!r}.'
    )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _transforms(value: object, option: str, where: str) -> tuple[Transform, ...]:
    for each in _listed(value):
        if not isinstance(each, Transform):
            raise DeclarationError(
                f"{where}: transforms_pre takes filter_where, deduplicate_by, limit and sample_pct, not {each!r}.",
                hint='from weft.transforms import filter_where; transforms_pre=[filter_where("amount > 0")]',
            )
    return tuple(_listed(value))


def _transforms_post(value: object, option: str, where: str) -> tuple[str | Callable[..., Any], ...]:
    for each in _listed(value):
        if not (isinstance(each, str) and each.strip()) and not callable(each):
            raise DeclarationError(f"{where}: transforms_post takes SQL and functions, not {each!r}.")
    return tuple(_listed(value))


def _lookback(value: object, option: str, where: str) -> float | timedelta:
    if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
        raise DeclarationError(f"{where}: lookback is a timedelta, or a number for a column of numbers.")
    if not (value >= timedelta(0) if isinstance(value, timedelta) else 0 <= value < math.inf):
        # The rows between the watermark and a later time would never be read.
        raise DeclarationError(f"{where}: lookback says how far back a run reads, so {value!r} cannot be.")
    return value


def _depends_on(value: object, option: str, where: str) -> tuple[str, ...]:
    names = [each.name if isinstance(each, Pipeline) else each for each in _listed(value)]
    return _texts(names, option, where)


def _texts(value: object, option: str, where: str) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple | set | frozenset) or not all(isinstance(each, str) for each in listed):
        raise DeclarationError(f"{where}: {option} must be a list of texts.")
    return tuple(listed)


def _seconds(value: object, option: str, where: str) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise DeclarationError(f"{where}: {option} must be a number of seconds above 0, not {value!r}.")
    return float(seconds)


def _parameters(function: Callable[..., Any], where: str) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    needed = [each for each in required if each.kind in kinds]
    if len(needed) > 2 or any(each.kind is each.KEYWORD_ONLY for each in required):
        raise DeclarationError(
            f"{where}: its function must take nothing, the source's connection, or those of source and target.",
            hint="def load(): …, def load(conn): … or def load(source, target): …",
        )
    return len(needed)


_KEPT = {name: each for name, each in options_of(PipelineOptions).items() if name not in _TARGET_OPTIONS}
"""The options whose checked values are fields of a pipeline; the others make its targets, schedule and retry."""
