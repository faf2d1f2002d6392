"""Windows of a streaming pipeline: what is aggregated, when a window closes, and where it is kept until then."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from weft.errors import DeclarationError, listed
from weft.options import Option, column_names, errors_at, one_of, options_of, refuse_unknown
from weft.pipelines.options import connection_option
from weft.project import build_connection
from weft.systems.base import AnyConnection, Connection, systems
from weft.systems.load import Columns
from weft.systems.log import EVENT_TIME, RESERVED_PREFIX
from weft.udfs import Udaf, declared_udaf

WindowKind = Literal["tumbling", "hopping", "session"]
LateData = Literal["drop", "reopen", "dlq"]
Emit = Literal["close", "update"]
Agg = Literal[
    "count", "sum", "min", "max", "avg", "first", "last", "count_distinct", "stddev", "approx_percentile", "collect"
]
AGGREGATES: tuple[str, ...] = get_args(Agg)
WINDOW_START, WINDOW_END, SESSION_ID = "window_start", "window_end", "session_id"
WINDOWS = "windows"
"""The table that `emit_sql` reads."""
IN_MEMORY, IN_FILES = "in_memory", "files"
NO_CONNECTION = (IN_FILES, IN_MEMORY)
"""The kinds of state stores that are no connections."""
_DAY_MS = 86_400_000
LONGEST_MS = 366 * _DAY_MS
_CENTURY_MS = 36_525 * _DAY_MS


def _from_zero(value: Any, option: str, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _CENTURY_MS:
        raise DeclarationError(
            f"{where}: {option} must be a whole number of milliseconds from 0 to {_CENTURY_MS:,}, not {value!r}."
        )
    return value


def _length(value: Any, option: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= LONGEST_MS:
        raise DeclarationError(
            f"{where}: {option} must be a whole number of milliseconds from 1 to {LONGEST_MS:,}, not {value!r}."
        )
    return value


def milliseconds(sentence: str) -> Option:
    """Return an option that is a time, from 0."""
    return Option(sentence, check=_from_zero, kinds=("number",))


def _agg(value: Any, option: str, where: str) -> Any:
    if isinstance(value, type):
        with errors_at(where):
            declared_udaf(value)
        return value
    return one_of(value, AGGREGATES, option, where)


def _aggregated(value: Any, option: str, where: str) -> Any:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str) and each for each in names):
        raise DeclarationError(f"{where}: {option} must be the name of a column, or a list of names, not {value!r}.")
    return value if isinstance(value, str) else tuple(names)


def _percentage(value: Any, option: str, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise DeclarationError(f"{where}: {option} must be a number from 0 to 1, not {value!r}.")
    return float(value)


class Structure:
    """A part of a pipeline whose options are its fields, each checked when it is made."""

    def __new__(cls, *unnamed: Any, **options: Any) -> Self:
        # Before __init__, which would answer an unknown option with a bare TypeError.
        if unnamed:
            example = f"{next(iter(options_of(cls)))}={unnamed[0]!r}"
            raise DeclarationError(f"{cls.__name__} takes its options by name.", hint=f"{cls.__name__}({example}, …)")
        refuse_unknown(options, tuple(options_of(cls)), cls.__name__)
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if name != "self" and parameter.default is parameter.empty and name not in options:
                raise DeclarationError(f"{cls.__name__}: {name} is missing.", hint=options_of(cls)[name].description)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, option in options_of(type(self)).items():
            object.__setattr__(self, name, option.checked(getattr(self, name), type(self).__name__))
        self.check()

    def check(self) -> None:
        """Raise for options that do not go together."""

    def _refuse(self, what: str, hint: str | None = None) -> None:
        raise DeclarationError(f"{type(self).__name__}: {what}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class Aggregation(Structure):
    """One aggregate of a window: `Aggregation(agg="sum", column="amount", as_="amount_sum")`."""

    agg: Annotated[
        Agg | type[Any],
        Option(
            "The aggregate: `count`, `sum`, `min`, `max`, `avg`, `first`, `last`, `count_distinct`, `stddev`, "
            "`approx_percentile` or `collect`; or a class with `@weft.udaf`.",
            check=_agg,
        ),
    ]
    column: Annotated[
        str | Sequence[str] | None,
        Option(
            "What is aggregated. Nulls do not count. A class with several arguments has a list.",
            default="for `count` alone: all rows",
            check=_aggregated,
            kinds=("text",),
        ),
    ] = None
    as_: Annotated[
        str | None, Option("The column of the result.", default="`sum_amount` for a sum of `amount`", key="as")
    ] = None
    mode: Annotated[
        Literal["approximate", "exact"] | None,
        Option("How `count_distinct` counts: by a sketch (HyperLogLog), or exactly.", default="`approximate`"),
    ] = None
    max_distinct_values_per_group: Annotated[
        int | None, Option("How many values an exact `count_distinct` may keep of a group; more are an error.")
    ] = None

    percentage: Annotated[
        float | None,
        Option("Which percentile `approx_percentile` is: 0.5 for the median.", check=_percentage, kinds=("fraction",)),
    ] = None
    max_values_per_group: Annotated[
        int | None, Option("How many values `collect` keeps of a group: the first ones by time.")
    ] = None

    def check(self) -> None:
        name = self.agg if isinstance(self.agg, str) else declared_udaf(self.agg).sql_name
        if self.column is None and name != "count":
            self._refuse(f"{name} needs a column.", f'Aggregation(agg="{name}", column="amount")')
        wanted = 1 if self.udaf is None else len(self.udaf.args)
        if self.column is not None and len(self.columns) != wanted:
            self._refuse(f"{name} takes {wanted} column{'' if wanted == 1 else 's'}, not {len(self.columns)}.")
        if self.as_ is None:
            object.__setattr__(self, "as_", "_".join((name, *self.columns)))
        if self.name.startswith(RESERVED_PREFIX) or self.name in (WINDOW_START, WINDOW_END):
            self._refuse(f"a column of the result cannot be called {self.name!r}.")
        if self.agg != "count_distinct" and (self.mode or self.max_distinct_values_per_group):
            self._refuse(f"mode and max_distinct_values_per_group are for count_distinct, not for {name}.")
        for agg, option in (("approx_percentile", "percentage"), ("collect", "max_values_per_group")):
            if self.agg == agg and getattr(self, option) is None:
                self._refuse(f"{agg} requires {option}.")
            if self.agg != agg and getattr(self, option) is not None:
                self._refuse(f"{option} is for {agg}, not for {name}.")
        if self.mode == "exact" and self.max_distinct_values_per_group is None:
            self._refuse(
                'mode = "exact" requires max_distinct_values_per_group.',
                "It keeps the values themselves: say how many a group may have.",
            )
        if self.mode != "exact" and self.max_distinct_values_per_group is not None:
            self._refuse('max_distinct_values_per_group is for mode = "exact".')

    @property
    def columns(self) -> tuple[str, ...]:
        """What is aggregated."""
        return () if self.column is None else (self.column,) if isinstance(self.column, str) else tuple(self.column)

    @property
    def udaf(self) -> Udaf | None:
        """The declaration of the class that aggregates."""
        return None if isinstance(self.agg, str) else declared_udaf(self.agg)

    @property
    def name(self) -> str:
        """The column of the result."""
        assert self.as_ is not None
        return self.as_


@dataclass(frozen=True, kw_only=True)
class Window(Structure):
    """Groups of rows by time, of which each is aggregated when it is complete:
    `Window(kind="tumbling", duration_ms=60_000, group_by=("user_id",), aggregations=[Aggregation(agg="count")])`."""

    kind: Annotated[
        WindowKind,
        Option(
            "`tumbling`: one window after the other. `hopping`: one begins every `hop_ms`, so that they overlap. "
            "`session`: one ends when a group has no rows for `gap_ms`."
        ),
    ]
    duration_ms: Annotated[
        int | None, Option("How long a tumbling or hopping window is.", check=_length, kinds=("number",))
    ] = None
    hop_ms: Annotated[
        int | None, Option("The time between the beginnings of two hopping windows.", check=_length, kinds=("number",))
    ] = None
    gap_ms: Annotated[int | None, Option("The pause that ends a session.", check=_length, kinds=("number",))] = None
    max_session_duration_ms: Annotated[
        int | None,
        Option(
            "How long a session may last. A longer one is cut at multiples of this time since 1970.",
            check=_length,
            kinds=("number",),
        ),
    ] = None
    group_by: Annotated[Columns, Option("The columns of a group.", default="one group", check=column_names)] = ()
    aggregations: Annotated[Sequence[Aggregation], Option("What is computed of each group.", check=lambda v, *_: v)]
    max_groups_per_window: Annotated[
        int | None, Option("How many groups a window may have. A batch with more fails, and nothing of it is stored.")
    ] = None
    late_data: Annotated[
        LateData,
        Option(
            "What happens to a row whose windows have closed: `drop`, `dlq` (a dead letter), or `reopen`: for "
            "`allowed_lateness_ms` its window is computed again, and merged into the target."
        ),
    ] = "drop"
    allowed_lateness_ms: Annotated[int | None, milliseconds("How long after its end a window can be reopened.")] = None
    event_time_column: Annotated[str, Option("The column with the time of a row.")] = EVENT_TIME
    emit: Annotated[
        Emit,
        Option(
            "When a window is written: at its `close`, or by an `update` with each batch that changes it, which its "
            "target merges."
        ),
    ] = "close"
    emit_sql: Annotated[
        str | None,
        Option(
            "A SELECT over the table `windows`, the rows that a batch emits: what is written of them.",
            default="all rows as they are",
        ),
    ] = None

    def check(self) -> None:
        if self.kind == "session":
            self._check_session()
        else:
            if self.duration_ms is None:
                self._refuse(f'kind = "{self.kind}" requires duration_ms.', "For example duration_ms=60_000.")
            if self.gap_ms is not None or self.max_session_duration_ms is not None:
                self._refuse('gap_ms and max_session_duration_ms are for kind = "session".')
        if self.kind == "hopping" and self.hop_ms is None:
            self._refuse('kind = "hopping" requires hop_ms.', "For example hop_ms=60_000.")
        if self.kind != "hopping" and self.hop_ms is not None:
            self._refuse('hop_ms is for kind = "hopping".')
        if self.hop_ms is not None and self.duration_ms is not None and self.hop_ms > self.duration_ms:
            self._refuse("hop_ms is longer than duration_ms: rows between two windows would be in none.")
        if self.hop_ms is not None and (self.duration_ms or 0) / self.hop_ms > 1000:
            self._refuse("a row would be in more than 1,000 windows.", "Make hop_ms longer.")
        if self.late_data == "reopen" and self.allowed_lateness_ms is None:
            self._refuse(
                'late_data = "reopen" requires allowed_lateness_ms.', "For example allowed_lateness_ms=30_000."
            )
        if self.late_data != "reopen" and self.allowed_lateness_ms is not None:
            self._refuse(
                'allowed_lateness_ms is for late_data = "reopen".', "To close windows later, use weft.Watermark(…)."
            )
        aggregations = self.aggregations
        if not isinstance(aggregations, list | tuple) or not all(isinstance(e, Aggregation) for e in aggregations):
            self._refuse("aggregations must be a list of weft.Aggregation(…).")
        if not aggregations:
            self._refuse("aggregations is empty.", 'aggregations=[weft.Aggregation(agg="count", as_="n")]')
        object.__setattr__(self, "aggregations", tuple(aggregations))
        if self.emit_sql is not None:
            self._check_emit_sql(self.emit_sql)
        own = next((name for name in self.group_by if name.lower().startswith(RESERVED_PREFIX)), None)
        if own is not None:  # a target leaves such columns out: nothing would distinguish the groups
            hint = f"Name it in transform_sql: SELECT *, {own} AS {own[len(RESERVED_PREFIX) :]} FROM source"
            self._refuse(
                f"group_by has the column {own!r}: names that begin with {RESERVED_PREFIX} belong to Weft.", hint
            )
        names = [name.lower() for name in self.columns]
        if repeated := [name for name in names if names.count(name) > 1]:
            hint = "Name an aggregate by as_=…, and a column of group_by by transform_sql."
            self._refuse(f"two columns of the result are called {repeated[0]!r}.", hint)

    def _check_session(self) -> None:
        for option in ("gap_ms", "max_session_duration_ms", "group_by"):
            if not getattr(self, option):
                self._refuse(f'kind = "session" requires {option}.')
        if self.duration_ms is not None:
            self._refuse("duration_ms is that of other windows; a session has max_session_duration_ms.")

    def _check_emit_sql(self, sql: str) -> None:
        if (name := aggregate_in(sql)) is not None:
            self._refuse(
                f"emit_sql depends on several rows ({name}), and it sees those of one batch.",
                "Let it choose, convert and filter rows.",
            )
        if self.changes_rows and (name := filter_in(sql)) is not None:
            self._refuse(
                f"emit_sql leaves rows out ({name}), and a window that was written may be left out when it is written "
                "again: its target would keep what it was.",
                "Filter where the target is read.",
            )

    @property
    def outputs(self) -> list[str]:
        """The columns of the aggregates."""
        return [each.name for each in self.aggregations]

    @property
    def columns(self) -> list[str]:
        """The columns of the result."""
        of_session = [SESSION_ID] if self.kind == "session" else []
        return [WINDOW_START, WINDOW_END, *of_session, *self.group_by, *self.outputs]

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that identify a row of the result."""
        return (*self.group_by, SESSION_ID if self.kind == "session" else WINDOW_START)

    @property
    def changes_rows(self) -> bool:
        """Whether a row of the result may be written more than once."""
        return self.late_data == "reopen" or self.emit == "update"


@dataclass(frozen=True, kw_only=True)
class Watermark(Structure):
    """How far the time of the rows has come: `Watermark(lateness_ms=5_000, source_idleness_ms=120_000)`."""

    lateness_ms: Annotated[int, milliseconds("How much later than others a row may come, and be on time.")] = 0
    source_idleness_ms: Annotated[
        int, milliseconds("After how long a source without rows no longer holds the watermark of the others.")
    ] = 60_000
    max_future_ms: Annotated[
        int,
        milliseconds(
            "How far after the clock's time a row may be; one with a later time is rejected, so that it cannot close "
            "every window. The clock is that of the driver's machine when the batch began first: choose more than "
            "clocks may differ, since one that is slow by more rejects the rows of now."
        ),
    ] = _DAY_MS


@dataclass(frozen=True, kw_only=True, init=False)
class StateStore:
    """Where windows are kept until they close: `StateStore(kind="postgres", url="postgres://…")`, or a connection.

    `kind="files"` keeps it in files of the checkpoint. `kind="in_memory"` is for tests: a restart loses what it has.
    """

    connection: str | Connection | None = None
    place: str | None = None
    """`files` or `in_memory`, where it is no connection."""

    def __init__(
        self,
        *,
        connection: Annotated[
            AnyConnection | None, Option("A connection or its name.", default="that of the first target with tables")
        ] = None,
        kind: Annotated[
            str | None,
            Option(
                "The kind of a connection whose fields are options too; or `files`, which are in the checkpoint; or "
                "`in_memory`, which a restart loses."
            ),
        ] = None,
        **fields: Any,
    ) -> None:
        where = "StateStore"
        if kind is not None and connection is not None:
            raise DeclarationError(f"{where}: connection names one that is known, kind describes one.")
        if fields and kind in (None, *NO_CONNECTION):
            refuse_unknown(fields, ("connection", "kind"), where)
        if kind is None and connection is None:
            raise DeclarationError(
                f"{where} needs a connection or a kind.", hint='StateStore(kind="postgres", url="…")'
            )
        able = [*(each.kind for each in systems().values() if each.tables is not None), *NO_CONNECTION]
        if kind is not None and kind not in able:
            hint = listed(str(kind), able, f"It can be {', '.join(able)}.")
            raise DeclarationError(f"{where}: kind is {kind!r}.", hint=hint)
        if kind is not None and kind not in NO_CONNECTION:
            connection = build_connection(None, {"kind": kind, **fields}, where)
        checked = connection_option(connection, "connection", where)
        if isinstance(checked, Connection) and checked.kind not in able:
            raise DeclarationError(
                f"{where}: {checked.any_such} holds no tables.", hint=f"These do: {', '.join(able)}."
            )
        object.__setattr__(self, "connection", checked)
        object.__setattr__(self, "place", kind if kind in NO_CONNECTION else None)


def keeps_column(sql: str | None, column: str) -> bool:
    """Return whether SQL selects a column of `source` as it is."""
    from sqlglot import exp, parse_one
    from sqlglot.errors import SqlglotError

    if sql is None:
        return True
    try:
        query = parse_one(sql, read="spark")
    except SqlglotError:
        return False
    from_ = query.args.get("from_") or query.args.get("from")
    # Not of a subquery, which may make a column of that name.
    if not isinstance(query, exp.Select) or query.ctes or from_ is None or not isinstance(from_.this, exp.Table):
        return False
    named = [each for each in query.expressions if each.alias_or_name.lower() == column]
    if named:
        return len(named) == 1 and isinstance(named[0], exp.Column)
    return any(isinstance(each, exp.Star) or each.is_star for each in query.expressions)


# Aggregates of Spark's that sqlglot does not know as such.
_MORE_AGGREGATES = {
    *("try_sum", "try_avg", "mean", "std", "some", "every", "bool_and", "bool_or", "listagg", "string_agg", "mode"),
    *("histogram_numeric", "count_min_sketch", "bitmap_or_agg", "bitmap_and_agg", "measure"),
    *("hll_sketch_agg", "hll_union_agg", "theta_sketch_agg", "theta_union_agg", "theta_intersection_agg"),
    *(f"kll_{step}_agg_{kind}" for step in ("sketch", "merge") for kind in ("bigint", "float", "double")),
    *(f"tuple_{step}_agg_{kind}" for step in ("sketch", "union", "intersection") for kind in ("double", "integer")),
}


def aggregate_in(sql: str, aggregate_udfs: Iterable[str] = (), lookups: Iterable[str] = ()) -> str | None:
    """Return what makes SQL depend on more than one row of the source: an aggregate, GROUP BY or DISTINCT; `None` where
    nothing does. Of lookups a subquery may aggregate."""
    from sqlglot import exp, parse_one
    from sqlglot.errors import SqlglotError

    try:
        query = parse_one(sql, read="spark")
    except SqlglotError:  # Spark itself says what is wrong
        return None
    of_many_rows: dict[Any, str] = {
        exp.Group: "GROUP BY",
        exp.Limit: "LIMIT",
        exp.Offset: "OFFSET",
        exp.Except: "EXCEPT",
        exp.Intersect: "INTERSECT",
        exp.Window: "OVER",
        exp.TableSample: "TABLESAMPLE",
    }
    known = {*_MORE_AGGREGATES, *map(str.lower, aggregate_udfs)}
    tables = set(map(str.lower, lookups))
    for node in query.walk():
        select = node.find_ancestor(exp.Select)
        read = {each.name.lower() for each in select.find_all(exp.Table)} if select is not None else set()
        if read and read <= tables:
            continue
        for kind, words in of_many_rows.items():
            if isinstance(node, kind):
                return words
        if isinstance(node, exp.Union) and node.args.get("distinct"):
            return "UNION, which is not UNION ALL"
        if isinstance(node, exp.Distinct) and isinstance(node.parent, exp.Select):
            return "DISTINCT"
        # `any(x)`, and not `x LIKE ANY (…)`.
        if isinstance(node, exp.Any) and not isinstance(node.parent, exp.Like | exp.ILike):
            return "any"
        if isinstance(node, exp.AggFunc) or (isinstance(node, exp.Anonymous) and node.name.lower() in known):
            return node.name if isinstance(node, exp.Anonymous) else node.sql_name().lower()
    return None


def filter_in(sql: str) -> str | None:
    """Return what makes SQL leave rows out; `None` where nothing does."""
    from sqlglot import exp, parse_one
    from sqlglot.errors import SqlglotError

    try:
        query = parse_one(sql, read="spark")
    except SqlglotError:  # Spark itself says what is wrong
        return None
    words: dict[Any, str] = {exp.Where: "WHERE", exp.Having: "HAVING", exp.Qualify: "QUALIFY", exp.Join: "JOIN"}
    words |= {exp.Lateral: "LATERAL VIEW", exp.Explode: "explode"}
    return next((word for kind, word in words.items() if query.find(kind) is not None), None)
