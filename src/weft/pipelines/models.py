"""`@model`: a function of streams and tables whose result is a table, checked where it is declared.

A model is a pipeline that reads its own inputs: it runs under the same run log, and its result is loaded in the same
transaction as any other load.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_args, overload

from weft.errors import DeclarationError, NotFoundError, did_you_mean, unknown
from weft.options import Option, column_names, look_like, one_of, options_of, refuse_unknown, text_option
from weft.pipelines import graph
from weft.pipelines.declare import Pipeline, PipelineTarget
from weft.pipelines.options import connection_option, declared_at, refuse_twice, within
from weft.pipelines.retry import Retry
from weft.pipelines.schedule import Schedule
from weft.pipelines.table import NAME_BYTES, Table, table_of
from weft.project import DEFAULT, Project, current
from weft.streams.declare import Stream
from weft.systems.base import AnyConnection, Connection
from weft.systems.expectation import REACTIONS, Expectation, Reaction
from weft.systems.load import Columns

Materialise = Literal["table", "view", "incremental", "merge", "scd2"]
Trigger = Literal["auto", "manual"]
AnyDependency = str | Stream | Pipeline | type[Any]
"""A stream, a model, a declared table, or the name of one of these or of a table elsewhere."""

THIS = "this"
"""The parameter that gets the model's own last result."""
MODES: Mapping[str, str] = {
    "table": "truncate",
    "view": "truncate",
    "incremental": "append",
    "merge": "merge",
    "scd2": "scd2",
}
"""How the result is loaded."""
LEAST_SECONDS = 1.0
"""The time between the starts of two builds without a debounce: a burst of publishes becomes few builds."""
_RETRY = Retry(max_attempts=1_000_000, base=2.0, cap=60.0)
"""Without `retry` a model is tried until it succeeds: nobody publishes again only because a build failed."""


def _dependencies(value: object, option: str, where: str) -> dict[str, str]:
    """Return the names of the inputs, by the parameters that get them."""
    if isinstance(value, Mapping):
        return {str(parameter): _name(each, where) for parameter, each in value.items()}
    names = [_name(each, where) for each in (value if isinstance(value, list | tuple) else [value])]
    named = {each.rpartition(".")[2]: each for each in names}
    if len(named) < len(set(names)):
        raise DeclarationError(
            f"{where}: two of its dependencies have the same last part, which names the parameter.",
            hint='Name the parameters: dependencies={"orders": "shop.orders", "old": "archive.orders"}',
        )
    return named


def _name(dependency: object, where: str) -> str:
    if isinstance(dependency, Stream):
        return f"{dependency.schema}.{dependency.name}"
    table = table_of(dependency)
    name = table.full_name if table is not None else getattr(dependency, "name", dependency)
    if not isinstance(name, str) or not name:
        raise DeclarationError(
            f"{where}: dependencies takes streams, models, tables and their names, not {dependency!r}.",
            hint='dependencies=["orders", "warehouse.public.customers"]',
        )
    return name


def _seconds(value: object, option: str, where: str) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise DeclarationError(f"{where}: {option} must be a number of seconds, not {value!r}.")
    return float(seconds)


def _tags(value: object, option: str, where: str) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise DeclarationError(f"{where}: tags must be a list of texts.")
    return tuple(listed)


class ModelOptions(TypedDict, total=False):
    """What `@weft.model` takes."""

    name: Annotated[
        str | None,
        Option("The name of the model, and of its table.", default="the name of the function", check=text_option),
    ]
    materialise: Annotated[
        Materialise,
        Option(
            "`table`: built as a whole. `view`: a view of the database. `incremental`: new rows are appended. `merge`: "
            "rows are merged by `key`. `scd2`: the history of each `key`.",
            default="table",
        ),
    ]
    dependencies: Annotated[
        AnyDependency | Sequence[AnyDependency] | Mapping[str, AnyDependency] | None,
        Option(
            "The inputs. A parameter of the function gets the one whose name ends like its own, or the one that a dict "
            "gives it; the others only trigger the model.",
            default="the parameters of the function",
            check=_dependencies,
        ),
    ]
    connection: Annotated[
        AnyConnection | None, Option("Where the table is.", default="`default`", check=connection_option)
    ]
    schema: Annotated[
        str | None, Option("The schema of the table.", default="that of the connection", check=text_option)
    ]
    key: Annotated[
        Columns | None, Option("The columns that identify a row, for `merge` and `scd2`.", check=column_names)
    ]
    deduplicate_by: Annotated[
        Columns | None,
        Option("Of rows with the same `key`, a build keeps the greatest in these columns.", check=column_names),
    ]
    cursor: Annotated[
        str | None,
        Option(
            "A column of the tables among the inputs, whose values only grow: an incremental model reads what is above "
            "the greatest one that it has read. Rows with a null there, and rows that come late, are neither read nor "
            "reported. Streams need none: they are read by their offsets.",
            check=text_option,
        ),
    ]
    trigger: Annotated[
        Trigger, Option("`auto`: built when an input changes. `manual`: by `weft run` or its schedule.", default="auto")
    ]
    debounce: Annotated[
        float | timedelta | None,
        Option(
            "Seconds without a change of the inputs before the model is built.",
            default="built at once, but no more than once a second",
            check=_seconds,
        ),
    ]
    max_staleness: Annotated[
        float | timedelta | None,
        Option(
            "With `debounce`: the most seconds from a change to the build, however many changes follow.",
            default="ten times `debounce`",
            check=_seconds,
        ),
    ]
    schedule: Annotated[str | None, Option("A cron expression: `weft run-due` builds the model then, changed or not.")]
    timezone: Annotated[str, Option("That of the schedule.", default="UTC")]
    retry: Annotated[
        Mapping[str, Any] | Retry | None,
        Option("How often a failed build is tried again.", default="until it succeeds, after 2 to 60 seconds"),
    ]
    expectations: Annotated[Sequence[Expectation] | None, Option("What must hold for the rows.")]
    on_quality_failure: Annotated[
        Reaction | None, Option("What to do where an expectation does not hold.", default="fail")
    ]
    expect_within: Annotated[
        str | timedelta | None,
        Option(
            'A build is expected to succeed at least this often: `"30m"`, `"2h"`, `"1d"`, a `timedelta`. Else there is '
            "an [alert](running.md#freshness).",
            default="no alert",
            check=within,
        ),
    ]
    engine: Annotated[
        Literal["spark", "pushdown"] | None,
        Option(
            "Where the query runs.",
            default="the database, where it has all inputs and means the same; else Spark",
        ),
    ]
    description: Annotated[str | None, Option("For people.", default="the docstring")]
    tags: Annotated[str | Sequence[str], Option("For people.", check=_tags)]
    owner: Annotated[str | None, Option("For people.")]


OPTIONS = options_of(ModelOptions)


@dataclass(frozen=True)
class ModelInput:
    name: str
    """The name in the declaration: `orders`, `events.orders`, `warehouse.public.customers`."""
    parameter: str | None = None
    """The parameter that gets it; `None` where it only triggers the model."""
    annotation: Any = None


@dataclass(frozen=True)
class ModelQuery:
    """The query of a model that is a file."""

    sql: str
    """Calls each input by its `parameter`."""
    inputs: tuple[ModelInput, ...]
    takes_this: bool
    declared_at: str
    origin: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Model(Pipeline):
    """A declared model. Calling it calls its function."""

    materialise: Materialise = "table"
    inputs: tuple[ModelInput, ...] = ()
    takes_this: bool = False
    this_annotation: Any = None
    cursor: str | None = None
    trigger: Trigger = "auto"
    debounce: float | None = None
    max_staleness: float | None = None
    sql: str | None = None
    """The query, of a model that is a file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What was written."""

    @property
    def target(self) -> PipelineTarget:
        """The table that the model builds."""
        return self.targets[0]

    @property
    def is_incremental(self) -> bool:
        """Whether a build reads only what is new in its streams."""
        return self.materialise in ("incremental", "merge", "scd2")

    @property
    def fingerprint(self) -> str:
        """Changes with what the model computes: its code or SQL, its inputs, how its rows are stored."""
        key = self.target.options.get("keys") or ()
        parts = [self.materialise, self.code, *(each.name for each in self.inputs), *key, self.cursor or ""]
        return blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()

    @property
    def code(self) -> str:
        """The query, or the body of the function without comments and layout."""
        if self.sql is not None:
            from sqlglot import tokenize
            from sqlglot.errors import TokenError

            try:
                return " ".join(f"{each.token_type.name} {each.text}" for each in tokenize(self.sql, "spark"))
            except TokenError:  # of another dialect
                return " ".join(self.sql.split())
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self.function)))
        except (OSError, SyntaxError, TypeError):  # made at run time, or a part of an expression
            return getattr(self.function, "__qualname__", self.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.decorator_list = []
        return ast.dump(tree)


@overload
def model(function: Callable[..., Any], /) -> Model: ...
@overload
def model(**options: Unpack[ModelOptions]) -> Callable[[Callable[..., Any]], Model]: ...
def model(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Declare a model: a function of streams and tables whose result is a table.

        @weft.model(dependencies=["orders"])
        def daily_revenue(orders):
            return orders.group_by("day").aggregate(revenue=orders.total.sum())

    Each parameter names an input and gets it as an Ibis table; annotated as a frame of Spark, polars, pandas or Arrow,
    as such. `this` gets the last result. The function returns an Ibis expression, a frame, or SQL over the names of its
    parameters. docs/models.md lists the options.
    """

    def declare(function: Callable[..., Any]) -> Model:
        if not callable(function):
            raise DeclarationError(f"@model decorates a function, not a {type(function).__name__}.")
        declared = make(function, options)
        look_like(declared, function)
        register(declared)
        return declared

    return declare if function is None else declare(function)


def make(function: Callable[..., Any], options: Mapping[str, Any], query: ModelQuery | None = None) -> Model:
    """Return a model from what a user wrote, or raise `DeclarationError`."""
    name = str(options.get("name") or getattr(function, "__name__", ""))
    where = f"Model {name!r}"
    refuse_unknown(options, OPTIONS, where)
    if not name or len(name.encode()) > NAME_BYTES or not name.isprintable() or set(name) & set('."`'):
        raise DeclarationError(
            f"{where}: the name of a model is that of its table: 1 to {NAME_BYTES} bytes of text, no dots or quotes."
        )
    values = {
        key: OPTIONS[key].checked(value, where)
        for key, value in options.items()
        if key not in ("schedule", "timezone", "retry", "expectations", "description", "owner")
    }
    materialise: Materialise = values.get("materialise") or "table"
    this_annotation = None
    if query is None:
        inputs, takes_this, this_annotation = _inputs(function, values.get("dependencies"), where)
    else:
        inputs, takes_this = query.inputs, query.takes_this
    keys = values.get("key") or ()
    if bool(keys) != (materialise in ("merge", "scd2")):
        needed = f"materialise={materialise!r} needs key" if not keys else "key is an option of merge and scd2"
        raise DeclarationError(f"{where}: {needed}.", hint='key="order_id", materialise="merge"')
    if takes_this and materialise == "view":
        raise DeclarationError(f"{where}: a view has no last result, so it takes no parameter {THIS!r}.")
    if values.get("max_staleness") is not None and values.get("debounce") is None:
        raise DeclarationError(f"{where}: max_staleness limits debounce, and there is none.")
    if values.get("cursor") is not None and materialise not in ("incremental", "merge", "scd2"):
        raise DeclarationError(
            f"{where}: a {materialise} is built of all rows, so it has no cursor.", hint='materialise="incremental"'
        )
    cron = options.get("schedule")
    if cron is None and options.get("timezone") is not None:
        raise DeclarationError(f"{where}: timezone is that of a schedule, and there is none.")
    expectations = tuple(options.get("expectations") or ())
    for each in expectations:
        if not isinstance(each, Expectation):
            raise DeclarationError(f"{where}: {each!r} is not an expectation.", hint="See weft.expectations.")
    if expectations and materialise == "view":
        raise DeclarationError(f"{where}: the rows of a view are not stored, so nothing checks them.")
    load: dict[str, Any] = {"mode": MODES[materialise]}
    if values.get("deduplicate_by"):
        if not keys:
            raise DeclarationError(f"{where}: deduplicate_by chooses one row of each key, and there is no key.")
        load["deduplicate_by"] = list(values["deduplicate_by"])
    if keys:
        load["keys"] = list(keys)
    else:
        load["allow_empty"] = True
    target = PipelineTarget(
        table=Table(name=name, schema=values.get("schema"), connection=values.get("connection")),
        connection=values.get("connection"),
        options=MappingProxyType(load),
        expectations=expectations,
        on_quality_failure=one_of(options.get("on_quality_failure") or "fail", REACTIONS, "on_quality_failure", where),
    )
    target.plan(pipeline=name, commit_key="declared")
    return Model(
        name=name,
        function=function,
        targets=(target,),
        schedule=None if cron is None else Schedule(cron, options.get("timezone") or "UTC"),
        retry=_RETRY if options.get("retry") is None else Retry.declare(options["retry"]),
        expect_within=values.get("expect_within"),
        engine=values.get("engine"),
        description=options.get("description") or inspect.getdoc(function),
        tags=values.get("tags") or (),
        owner=options.get("owner"),
        waits_for_upstream=False,
        origin=query.origin if query else f"{function.__module__}.{getattr(function, '__qualname__', name)}",
        declared_at=query.declared_at if query else declared_at(function),
        materialise=materialise,
        inputs=inputs,
        takes_this=takes_this,
        this_annotation=this_annotation,
        cursor=values.get("cursor"),
        trigger=values.get("trigger") or "auto",
        debounce=values.get("debounce"),
        max_staleness=values.get("max_staleness"),
        sql=query.sql if query else None,
        options=MappingProxyType(dict(options)),
    )


def _inputs(
    function: Callable[..., Any], dependencies: Mapping[str, str] | None, where: str
) -> tuple[tuple[ModelInput, ...], bool, Any]:
    """Return the inputs that the parameters of a function name, then those that only trigger it."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except Exception:  # an annotation that cannot be read now
        parameters = inspect.signature(function).parameters.values()
    takes_this, this_annotation, inputs = False, None, []
    for each in parameters:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise DeclarationError(f"{where}: each parameter must name an input, and {each} does not.")
        annotation = None if each.annotation is each.empty else each.annotation
        if each.name == THIS:
            takes_this, this_annotation = True, annotation
        elif dependencies is None:
            if each.default is each.empty:
                inputs.append(ModelInput(each.name, each.name, annotation))
        elif each.name in dependencies:
            inputs.append(ModelInput(dependencies[each.name], each.name, annotation))
        elif each.default is each.empty:
            raise DeclarationError(
                f"{where}: its parameter {each.name!r} is not among its dependencies.",
                hint=did_you_mean(each.name, dependencies, f"They are for: {', '.join(dependencies) or 'none'}."),
            )
    covered = {each.parameter for each in inputs}
    more = [ModelInput(name) for parameter, name in (dependencies or {}).items() if parameter not in covered]
    return (*inputs, *more), takes_this, this_annotation


# ------------------------------------------------------------------------------------------------------------- registry


def register(model: Model) -> None:
    """Make a model known to the project."""
    project = current()
    refuse_twice("Model", model, project.pipelines, model.function)
    if model.name in project.streams:
        raise DeclarationError(
            f"Model {model.name!r} ({model.declared_at}): a stream has this name.",
            hint="Give one of them another name.",
        )
    known = {**project.pipelines, model.name: model}
    _link(known)
    try:
        graph.refuse_cycles(known)
    except DeclarationError:
        _link(project.pipelines)
        raise
    project.pipelines[model.name] = model
    project.declarations += 1


def _link(pipelines: Mapping[str, Pipeline]) -> None:
    """Let each model know the models that it reads: an input may be declared later than what reads it."""
    known = {name: each for name, each in pipelines.items() if isinstance(each, Model)}
    names = by_names(known)
    for each in known.values():
        reads = dict.fromkeys(names[one.name].name for one in each.inputs if one.name in names)
        object.__setattr__(each, "depends_on", tuple(reads))


def by_names(known: Mapping[str, Model]) -> dict[str, Model]:
    """Return models by each name that an input can call them: `daily`, `mart.daily`, `warehouse.mart.daily`."""
    names: dict[str, Model] = {}
    for each in known.values():
        connection = each.target.connection
        called = connection.name if isinstance(connection, Connection) else connection or DEFAULT
        names |= dict.fromkeys((each.name, each.target.name, f"{called}.{each.target.name}"), each)
    return names


def models(project: Project | None = None) -> dict[str, Model]:
    """Return the declared models by name."""
    pipelines = (project or current()).pipelines
    return {name: each for name, each in pipelines.items() if isinstance(each, Model)}


def find(name: str) -> Model:
    """Return a declared model by its name."""
    known = models()
    if name not in known:
        if name in current().pipelines:
            raise NotFoundError(f"{name!r} is a pipeline, not a model.", hint=f"Run it with: weft run {name}")
        raise unknown("model", name, known, otherwise="Declare it in a module of weft.toml, or give --module M.")
    return known[name]


def triggered_by(stream: Stream) -> tuple[str, ...]:
    """Return the models that a publish to a stream has built again, in the order in which they are built."""
    following = {name: each for name, each in models().items() if each.trigger == "auto"}
    connection = stream.connection.name if isinstance(stream.connection, Connection) else stream.connection
    full = f"{stream.schema}.{stream.name}"
    names = dependents((stream.name, full, f"{connection or DEFAULT}.{full}"), following)
    # The rows of a view are always those of its inputs.
    return tuple(name for name in names if following[name].materialise != "view")


def dependents(names: Sequence[str], known: Mapping[str, Model]) -> list[str]:
    """Return the models that read one of these streams, tables or models, and the models that read those, in the
    order in which they are built."""
    wanted, dependent = set(names), []
    for each in graph.in_order(known):
        assert isinstance(each, Model)
        if not wanted.isdisjoint([*each.depends_on, *(one.name for one in each.inputs)]):
            wanted |= {each.name, each.target.name}
            dependent.append(each.name)
    return dependent


assert set(MODES) == set(get_args(Materialise))
