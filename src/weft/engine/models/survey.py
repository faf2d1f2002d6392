"""The status of models: when each was built, what is new, its columns and where they come from. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import pyarrow as pa

from weft.engine.models import freshness, lineage, state, unseen_values
from weft.engine.models.build import BuildResult, Compiled
from weft.engine.models.inputs import ModelSource, Observer
from weft.engine.models.lake import lake_of
from weft.engine.models.lake import sql_type as lake_type
from weft.engine.models.state import Recorded, StoredModel, load_of
from weft.engine.readers import SqlReader
from weft.errors import DeclarationError, WeftError
from weft.pipelines.models import THIS, Model, ModelInput, by_names, models
from weft.project import current
from weft.settings import USER_FILE
from weft.systems.base import Connection, system_for
from weft.systems.load import SCD2_COLUMNS, full_name

_MOMENT = pa.timestamp("us", "UTC")
_SCD2 = tuple(
    pa.field(name, kind) for name, kind in zip(SCD2_COLUMNS, (_MOMENT, _MOMENT, pa.bool_(), pa.string()), strict=True)
)
Lineage = dict[str, list[str]]
"""By column, the fields and columns that it comes from: `events.orders.total`."""


class NotBuiltError(WeftError):
    """Raised for a query over a model whose columns only its build can find."""


@dataclass(frozen=True)
class InputStatus:
    """An input of a model."""

    name: str
    kind: str
    """`stream`, `model`, `table` or `files`."""
    read: Any = None
    """What the last build had read of it."""
    now: Any = None
    new: str | None = None
    """What is new, in words; `None` where nothing is."""
    is_known: bool = True
    """Whether it is known when it changes."""


@dataclass(frozen=True)
class ModelStatus:
    """The status of a model."""

    model: Model
    stored: StoredModel = field(default_factory=StoredModel)
    built_at: datetime | None = None
    rows: int | None = None
    inputs: tuple[InputStatus, ...] = ()
    problem: str | None = None
    """Why nothing more is known of it."""
    reasons: tuple[str, ...] = ()
    """Why it is stale; empty where it is fresh."""

    @property
    def is_built(self) -> bool:
        return self.stored.state is not None

    @property
    def left_out(self) -> list[str]:
        """What its rows leave out of the events that were read for them, in words."""
        return [] if self.stored.state is None else unseen_values.described(self.stored.state.left_out)

    @property
    def is_changed(self) -> bool:
        """Whether its code or options have changed since rows were built."""
        last = self.stored.state
        return last is not None and (
            last.built_by != self.model.fingerprint or last.materialise != self.model.materialise
        )

    @property
    def state(self) -> str:
        """`fresh`, `stale`, or `unknown` where it cannot be read or it is not known whether an input has changed."""
        if self.problem is not None:
            return "unknown"
        if self.reasons:
            return "stale"
        is_known = self.model.materialise == "view" or all(each.is_known for each in self.inputs)
        return "fresh" if is_known else "unknown"

    @property
    def why(self) -> str:
        """Why it is stale, or not known to be fresh."""
        if self.problem is not None:
            return self.problem
        silent = [each.name for each in self.inputs if not each.is_known]
        if self.reasons or not silent or self.model.materialise == "view":
            return "; ".join(self.reasons)
        return f"it is not known when {', '.join(silent)} changes"


class Survey:
    """Looks at the models of the project, and remembers what it found. `is_watched`: for a page that looks again and
    again, see `BuildResult`."""

    def __init__(self, observer: Observer, *, is_watched: bool = False) -> None:
        self.observer = observer
        self._is_watched = is_watched
        self.known = models()
        self._by_name = by_names(self.known)
        self.blind: set[str] = set()
        """Models whose query has no rows yet, because another database or Spark builds what they read first."""
        self._statuses: dict[str, ModelStatus] = {}
        self._compiled: dict[str, Compiled | None] = {}
        self._lineages: dict[str, Lineage | None] = {}

    def upstream(self, each: ModelInput) -> Model | None:
        """Return the model that an input is."""
        return self._by_name.get(each.name)

    # -------------------------------------------------------------------------------------------------------- freshness

    def status(self, model: Model) -> ModelStatus:
        """Return the status of a model; a problem with its database is a part of it."""
        if model.name not in self._statuses:
            try:
                status = self._status(model)
            except WeftError as error:
                status = ModelStatus(model, problem=error.what)
            self._statuses[model.name] = status
        return self._statuses[model.name]

    def _status(self, model: Model) -> ModelStatus:
        stored, recorded = self.observer.stored(model), self.observer.recorded(model)
        built_at = None if recorded is None or stored.columns is None else recorded.built_at
        rows = stored.rows
        if rows is None and stored.columns is not None and model.materialise != "view":
            load = load_of(model)
            rows = self.rows(current().connection(model.target.connection), load.schema, load.table)
        inputs = tuple(self._input(model, each, stored) for each in model.inputs)
        status = ModelStatus(model, stored, built_at, rows, inputs)
        last = None if recorded is None else recorded.state
        why = freshness.rebuild(model, last, has_table=stored.columns is not None)
        if why is None and status.is_changed:
            why = "its code has changed"  # that of rows which an incremental build has left
        if why is not None or model.materialise == "view":
            return replace(status, reasons=() if why is None else (why,))
        upstream = {each.name: each for each in map(self.upstream, model.inputs) if each is not None}
        stale = (name for name, each in upstream.items() if each is not model and self.status(each).state == "stale")
        new = (each.new for each in inputs if each.new is not None)
        return replace(status, reasons=(*new, *(f"{name} is stale" for name in stale)))

    def _input(self, model: Model, each: ModelInput, stored: StoredModel) -> InputStatus:
        relation = self.observer.relation(model, each)
        upstream = self.upstream(each)
        kind = "stream" if relation.stream is not None else "model" if upstream is not None else "table"
        if relation.table is None and relation.stream is None:
            kind = "files"
        now = self.observer.mark(relation)
        read = None if stored.state is None else stored.state.inputs.get(each.name)
        is_known = now is not None or upstream is not None
        new = None if stored.state is None else freshness.news(each.name, now, read)
        return InputStatus(each.name, kind, read, now, new, is_known)

    # ---------------------------------------------------------------------------------------------------------- queries

    def compiled(self, model: Model) -> Compiled | None:
        """Return the query of a model, for its next build as a whole; `None` where its function makes a frame. Inputs
        that are models have the columns that they will have."""
        if model.name not in self._compiled:
            self._compiled[model.name] = self._compile(model)
        return self._compiled[model.name]

    def _compile(self, model: Model) -> Compiled | None:
        result = self.result(model)
        try:
            return result.compiled()
        except WeftError:
            raise
        except Exception as error:  # of the user's function: those who look see it as a problem of this model
            what = f"Model {model.name!r} cannot be understood: {type(error).__name__}: {error}"
            raise DeclarationError(what, hint=f"Look at {model.declared_at}.") from error

    def result(self, model: Model) -> BuildResult:
        """Return what a build as a whole makes of the inputs."""
        is_in_database = self.observer.lake(model) is None
        tables = self.observer.tables(model.target.connection) if is_in_database else None
        return BuildResult(model, self.sources(model), tables, StoredModel(), self._is_watched)

    def sources(self, model: Model) -> list[ModelSource]:
        """Return the inputs with all of their rows."""
        return [self._source(model, each) for each in model.inputs]

    def _source(self, model: Model, each: ModelInput) -> ModelSource:
        if self._is_watched:
            relation = self.observer.relation(model, each)
            if relation.stream is None and relation.table is None:
                raise NotBuiltError(
                    f"{model.name} reads {each.name}, whose columns only Spark knows: weft models show {model.name}"
                )
        upstream = self.upstream(each)
        if upstream is not None and upstream is not model:
            columns = self.columns(upstream)
            status = self.status(upstream)
            is_changed = not status.is_built or status.is_changed
            is_in_lake = self.observer.lake(upstream) is not None
            if (columns is None and not status.is_built) or (is_changed and is_in_lake):
                raise NotBuiltError(
                    f"Only the build of {upstream.name} shows its columns, which {model.name} reads.",
                    hint=f"weft run {upstream.name}",
                )
            if columns is not None and is_changed:
                # It will be built first: its query stands for its table, where the same database runs it.
                tables, query = self.observer.tables(upstream.target.connection), self.compiled(upstream)
                is_here = query is not None and query.engine == "pushdown" and upstream.materialise != "scd2"
                if not is_here or upstream.name in self.blind:
                    self.blind.add(model.name)
                sql = query.runs if query is not None and is_here else lineage.empty(columns, tables.dialect)
                return ModelSource(each, self.observer.relation(model, each), reader=SqlReader(tables, sql, columns))
        return self.observer.source(model, each)

    def columns(self, model: Model) -> pa.Schema | None:
        """Return the columns that the next build gives; `None` where only the build can find them."""
        with suppress(WeftError):
            compiled = self.compiled(model)
            if compiled is not None and compiled.schema is not None and model.materialise == "scd2":
                return pa.schema([*compiled.schema, *_SCD2])
            return None if compiled is None else compiled.schema
        return None

    def sql_type(self, model: Model, field: pa.Field) -> str:
        """Return what the system of a model's table calls the type of a column."""
        if self.observer.lake(model) is not None:
            return lake_type(field)
        return self.observer.tables(model.target.connection).sql_type(field)

    # ---------------------------------------------------------------------------------------------------------- lineage

    def lineage(self, model: Model) -> Lineage | None:
        """Return the fields of streams and columns of tables that each column comes from, through other models; `None`
        where its function makes a frame."""
        if model.name not in self._lineages:
            self._lineages[model.name] = self._lineage(model)
        return self._lineages[model.name]

    def _lineage(self, model: Model) -> Lineage | None:
        compiled = self.compiled(model)
        if compiled is None:
            return None
        called = {each.parameter: each for each in model.inputs}
        schemas = {each.input.parameter: each.schema() for each in self.sources(model)}
        columns: Lineage = {}
        for column, origins in lineage.fields(compiled.sql, compiled.dialect, schemas).items():
            names: dict[str, None] = {}
            for table, name in origins:
                if table != THIS and table in called:
                    names |= dict.fromkeys(self._origins(model, called[table], name))
            columns[column] = list(names)
        return columns

    def _origins(self, model: Model, each: ModelInput, column: str) -> list[str]:
        upstream = self.upstream(each)
        if upstream is not None and upstream is not model:
            further = self.lineage(upstream)
            if further is not None and column in further:
                return further[column]
            return [f"{upstream.name}.{column}"]
        relation = self.observer.relation(model, each)
        stream = relation.stream
        return [f"{stream.schema}.{stream.name}.{column}" if stream is not None else f"{relation.name}.{column}"]

    def described(self, model: Model) -> dict[str, Any]:
        """Return the query of a model, its columns and where each comes from, or why they are not known."""
        shown: dict[str, Any] = {"engine": None, "sql": None, "columns": [], "problem": self.status(model).problem}
        columns: dict[str, str | None] = {each.name: each.sql for each in self.status(model).stored.columns or ()}
        try:
            compiled = self.compiled(model)
            shown["engine"] = "python" if compiled is None else compiled.engine
            shown["sql"] = None if compiled is None else compiled.runs
            origins = self.lineage(model)
            if compiled is not None and compiled.schema is not None:
                columns = {each.name: columns.get(each.name) or self.sql_type(model, each) for each in compiled.schema}
            elif origins is not None:
                columns = {each: columns.get(each) for each in origins}
        except WeftError as error:
            origins, shown["problem"] = None, " ".join(filter(None, (error.what, error.hint)))
        shown["columns"] = [
            {"column": each, "type": kind, "comes_from": None if origins is None else origins.get(each, [])}
            for each, kind in columns.items()
        ]
        return shown

    # ---------------------------------------------------------------------------------------------------------- removed

    def removed(self) -> Iterator[tuple[Connection, Recorded]]:
        """Yield the builds of models that are not declared any more: in the databases that models and streams use, and
        in the Delta tables and files of the project's own connections. A table that another declared pipeline writes
        by now is that one's."""
        declared = {(each.name, target.name) for each in current().pipelines.values() for target in each.targets}
        written = list(self._written())
        places = set[str]()
        for connection, table in written:
            with suppress(WeftError):  # a prefix of files that no table can have
                if (lake := lake_of(connection)) is not None:
                    places.add(lake.place(*table))
        for connection in self._connections():
            lake = lake_of(connection)
            if lake is None:
                recorded: Iterable[Recorded] = state.recorded(self.observer.tables(connection))
            else:
                recorded = lake.all_recorded(places)
            orphans = [each for each in recorded if (each.model, each.target) not in declared]
            if orphans and lake is None:
                orphans = self._without(orphans, connection, written)
            for each in orphans:
                yield connection, each

    def _written(self) -> Iterator[tuple[Connection, tuple[str | None, str]]]:
        """Yield the tables that declared pipelines write, streaming ones too; a prefix of files is the name of one."""
        project = current()
        pipelines: list[Any] = [*project.pipelines.values(), *project.streaming_pipelines.values()]
        for target in (each for pipeline in pipelines for each in pipeline.targets):
            table = target.table
            if table is None and target.prefix is not None:
                table = (None, target.prefix.strip("/"))
            elif table is not None and not isinstance(table, tuple):
                table = (table.schema, table.name)
            with suppress(WeftError):  # not defined here
                if table is not None:
                    yield project.connection(target.connection), table

    def _without(
        self, orphans: list[Recorded], connection: Connection, written: Iterable[tuple[Connection, Any]]
    ) -> list[Recorded]:
        """Return the builds in a database but for those in tables that pipelines write."""
        tables = self.observer.tables(connection)
        default = ""
        if tables.driver.has_schemas:
            with tables.driver.session("read") as session:
                default = f"{session.value(f'SELECT {tables.current_schema}')}."
        names = set[str]()
        for other, table in written:
            with suppress(WeftError):
                if other.is_same_place(connection):
                    names.add(full_name(*table).removeprefix(default))
        return [each for each in orphans if each.target.removeprefix(default) not in names]

    def _connections(self) -> list[Connection]:
        project = current()
        named: list[Any] = [each.target.connection for each in self.known.values()]
        named += [None, *(each.connection for each in project.streams.values())]
        connections: dict[Connection, None] = {}
        for each in named:
            with suppress(WeftError):  # not defined here
                connection = project.connection(each)
                if system_for(connection.kind).tables is not None:
                    connections[connection] = None
        # The last model of a lake may be gone, and then nothing names it. What a user has for all projects is not ours.
        for name in project.connection_names():
            with suppress(WeftError):
                connection = project.connection(name)
                if lake_of(connection) is not None and project.where(name).source != USER_FILE:
                    connections[connection] = None
        return list(connections)

    def rows(self, connection: Connection, schema: str | None, table: str) -> int | None:
        """Return how many rows a table has; `None` where that takes reading it."""
        lake = lake_of(connection)
        if lake is not None:
            return lake.rows(schema, table)
        tables = self.observer.tables(connection)
        with tables.driver.session("read") as session:
            return int(session.value(f"SELECT count(*) FROM {tables.table(schema, table)}"))
