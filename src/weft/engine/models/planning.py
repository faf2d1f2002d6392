"""`weft plan` and `weft apply`: what has changed in the declarations since models were built, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from weft.columns import python_rows
from weft.engine import inputs, relations
from weft.engine.models.lake import lake_of
from weft.engine.models.state import Recorded
from weft.engine.models.survey import ModelStatus, NotBuiltError, Survey
from weft.engine.readers import stored_columns
from weft.errors import LoadRefusedError, WeftError
from weft.pipelines import graph
from weft.pipelines.models import Model, dependents
from weft.pipelines.shared_tables import refuse_shared_tables
from weft.project import DEFAULT
from weft.systems.base import Connection
from weft.systems.load import SCD2_COLUMNS
from weft.systems.sql import watermarks
from weft.systems.sql.tables import Slice, SqlTables, subquery

Change = Literal["new", "changed", "dependent", "removed"]


@dataclass
class PlannedStep:
    """What a change of the declarations means for one model."""

    model: str
    table: str
    change: Change
    materialise: str
    rows: int | None = None
    """How many the table has now."""
    full: bool = False
    """Whether an incremental model is built again from the beginning."""
    because: list[str] = field(default_factory=list)
    """The changed models that a dependent reads; the declared models that read a removed one."""
    added: dict[str, str] = field(default_factory=dict)
    """New columns with their types."""
    dropped: list[str] = field(default_factory=list)
    retyped: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Columns with another type: the type now, and the new one."""
    unknown: str | None = None
    """Why the new columns are not known."""
    problem: str | None = None
    """Why it cannot be built."""
    before: list[dict[str, Any]] | None = None
    after: list[dict[str, Any]] | None = None
    connection: Connection | None = None
    """Where the table of a removed model is."""

    @property
    def outcome(self) -> str:
        """What becomes of the table."""
        if self.change == "removed":
            readers = f"; {', '.join(self.because)} reads it" if self.because else ""
            return f"not declared here, its table stays without --drop-removed{readers}"
        if self.change == "dependent":
            return f"built again, because {', '.join(self.because)} changes"
        if self.full:
            return "built again from the beginning"
        return "created" if self.change == "new" else "built again"

    @property
    def question(self) -> str | None:
        """What a person is asked before the step is taken; `None` where it takes nothing away."""
        if self.change == "removed":
            return f"drop {self.table} ({'view' if self.materialise == 'view' else _rows(self.rows)})"
        if not self.full:
            return None
        lost = ", without its history" if self.materialise == "scd2" else ""
        return f"build {self.model} ({self.materialise}, {_rows(self.rows)}) again from the beginning{lost}"


def make_plan(survey: Survey, *, sample: int = 0, with_removed: bool = True) -> list[PlannedStep]:
    """Return what has changed, in the order in which `weft apply` builds it; removed models last, which are looked for
    in all Delta tables and files of the project."""
    ordered = [each for each in graph.in_order(survey.known) if isinstance(each, Model)]
    for model in ordered:
        refuse_shared_tables(model)
    statuses = {each.name: survey.status(each) for each in ordered}
    for each in statuses.values():
        if each.problem is not None:
            raise WeftError(f"Model {each.model.name!r}: {each.problem}")
    changed = [name for name, each in statuses.items() if not each.is_built or each.is_changed]
    touched = dependents(changed, survey.known)
    steps = []
    for model in ordered:
        status = statuses[model.name]
        if model.name in changed or model.name in touched:
            step = _step(survey, status, changed, touched)
            if sample:
                _take_samples(survey, status, step, sample)
            steps.append(step)
    if not with_removed:
        return steps
    # A view before what it reads, which was built earlier.
    removed = sorted(survey.removed(), key=lambda each: (each[1].state.materialise == "view", each[1].built_at))
    return [*steps, *(_removed(survey, connection, each) for connection, each in reversed(removed))]


def _step(survey: Survey, status: ModelStatus, changed: Sequence[str], touched: Sequence[str]) -> PlannedStep:
    model = status.model
    change: Change = "new" if not status.is_built else "changed" if status.is_changed else "dependent"
    step = PlannedStep(model.name, model.target.name, change, model.materialise, status.rows)
    if change == "dependent":
        step.because = [each for each in model.depends_on if each in changed or each in touched]
    step.full = change == "changed" and model.is_incremental
    try:
        lake = survey.observer.lake(model)
        if lake is not None:
            lake.refuse(model)
        if change == "new":
            survey.observer.refuse_foreign(model, status.stored)
        compiled = survey.compiled(model)
    except NotBuiltError as error:
        step.unknown = error.what
        survey.blind.add(model.name)
        return step
    except WeftError as error:
        step.problem = str(error)
        return step
    schema = survey.columns(model)
    if compiled is None or schema is None:
        only = "function makes a frame" if compiled is None else "query runs on Spark"
        step.unknown = f"its {only}: the build shows its columns"
        return step
    _compare(step, status, schema, survey)
    return step


def _compare(step: PlannedStep, status: ModelStatus, schema: pa.Schema, survey: Survey) -> None:
    model = status.model
    tables = survey.observer.tables(model.target.connection) if survey.observer.lake(model) is None else None
    stored = {each.name: each for each in status.stored.columns or () if status.is_built}
    own = SCD2_COLUMNS if status.model.materialise == "scd2" else ()
    wanted = {each.name: each for each in schema if each.name not in own}
    step.added = {name: survey.sql_type(model, each) for name, each in wanted.items() if name not in stored}
    step.dropped = [name for name in stored if name not in wanted and name not in own]
    if status.model.materialise == "view" or (status.stored.state and status.stored.state.materialise == "view"):
        return  # the types of its columns are those of its query
    for name, each in wanted.items():
        if name not in stored:
            continue
        fits = stored[name].field.type == each.type if tables is None else tables.fits(stored[name], each)
        if not fits:
            step.retyped[name] = (stored[name].sql, survey.sql_type(model, each))


# -------------------------------------------------------------------------------------------------------------- samples


def _take_samples(survey: Survey, status: ModelStatus, step: PlannedStep, rows: int) -> None:
    """Read the first rows of the table as it is, and of the new query, which writes nothing."""
    model = status.model
    if survey.observer.lake(model) is not None:
        _take_samples_by_spark(survey, status, step, rows)
        return
    tables = survey.observer.tables(model.target.connection)
    order = ", ".join(map(tables.quote, model.target.options.get("keys") or ()))
    ending = f"{f' ORDER BY {order}' if order else ''} LIMIT {rows}"
    if status.is_built:
        target = model.target.table
        step.before = _read(tables, f"SELECT * FROM {tables.table(target.schema, target.name)}{ending}")
    if step.problem is not None or model.name in survey.blind:
        return
    result = survey.result(model)
    if (compiled := result.compiled()) is None:
        return
    if compiled.engine == "pushdown":
        query = f"SELECT * FROM {subquery(compiled.runs)} AS q{ending}"
        step.after = _read(tables, query, compiled.schema)
        return
    step.after = _first(model, result.data(), rows)


def _take_samples_by_spark(survey: Survey, status: ModelStatus, step: PlannedStep, rows: int) -> None:
    """Take them of a model whose table is Delta or files."""
    from weft.engine import session

    model = status.model
    if status.is_built:
        relation = relations.find(model.target.name, model.target.connection)
        step.before = _first(model, inputs.Frame(relations.frame_of(session.spark(), relation)), rows)
    if step.problem is None and model.name not in survey.blind:
        result = survey.result(model)
        if result.compiled() is not None:
            step.after = _first(model, result.data(), rows)


def _first(model: Model, data: inputs.Input, rows: int) -> list[dict[str, Any]]:
    assert isinstance(data, inputs.Frame)
    keys = model.target.options.get("keys")
    frame = data.frame.orderBy(*keys) if keys else data.frame
    return list(python_rows(frame.limit(rows).toArrow()))


def _read(tables: SqlTables, sql: str, schema: pa.Schema | None = None) -> list[dict[str, Any]]:
    known = tables.describe(sql) if schema is None else schema
    return [row for batch in tables.read(Slice(sql), known) for row in python_rows(batch)]


# -------------------------------------------------------------------------------------------------------------- removed


def _removed(survey: Survey, connection: Connection, recorded: Recorded) -> PlannedStep:
    schema, table = _parts(recorded.target)
    is_there = lake_of(connection) is not None  # its log is
    if not is_there and recorded.state.materialise != "view":
        is_there = stored_columns(survey.observer.tables(connection), schema, table) is not None
    rows = survey.rows(connection, schema, table) if is_there else None
    step = PlannedStep(recorded.model, recorded.target, "removed", recorded.state.materialise, rows)
    names = {recorded.model, recorded.target, f"{connection.name or DEFAULT}.{recorded.target}"}
    readers = survey.known.values()
    step.because = [each.name for each in readers if any(one.name in names for one in each.inputs)]
    step.connection = connection
    return step


def drop(survey: Survey, step: PlannedStep) -> None:
    """Drop the table or view of a removed model, and forget its builds."""
    if step.because:
        raise LoadRefusedError(
            f"The table {step.table} stays: {', '.join(step.because)} reads it.", hint="Change or remove that model."
        )
    assert step.connection is not None
    schema, table = _parts(step.table)
    if (lake := lake_of(step.connection)) is not None:
        lake.drop(schema, table)
        return
    tables = survey.observer.tables(step.connection)
    kind = "VIEW" if step.materialise == "view" else "TABLE"
    with tables.driver.session("publish") as session:
        session.run(f"DROP {kind} IF EXISTS {tables.table(schema, table)}")
        watermarks.remove(tables, session, step.model, step.table)


def _parts(target: str) -> tuple[str | None, str]:
    schema, _, table = target.rpartition(".")
    return schema or None, table


def _rows(rows: int | None) -> str:
    return "rows not counted" if rows is None else f"{rows:,} row{'' if rows == 1 else 's'}"
