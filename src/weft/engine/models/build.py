"""One build of a model: its function is called with its inputs, and the result is loaded with what was read of them."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import msgspec
import pyarrow as pa

from weft import tracing
from weft.columns import canonical_schema, hinted
from weft.engine import inputs, relations, run
from weft.engine.inputs import Input
from weft.engine.load import Job
from weft.engine.models import frame_kinds, replacing, state, unseen_values
from weft.engine.models.inputs import ModelSource, Observer, Span
from weft.engine.models.lake import Lake
from weft.engine.models.state import LeftOuts, State, StoredModel
from weft.engine.readers import SqlReader, StreamReader, read_all
from weft.errors import DeclarationError, LoadRefusedError, WeftError
from weft.pipelines.execution import Loaded, Step
from weft.pipelines.models import THIS, Model, ModelInput
from weft.pipelines.shared_tables import refuse_shared_tables
from weft.project import current
from weft.systems.load import SCD2_COLUMNS, UNNAMED, Counts, Declared
from weft.systems.sql import tokens
from weft.systems.sql.tables import SqlTables, subquery

_log = logging.getLogger("weft.engine")
_WITH = re.compile(r"\s*(?:--[^\n]*\n\s*|/\*.*?\*/\s*)*with\s+(?!recursive\b)", re.IGNORECASE | re.DOTALL)


class ModelRun:
    """One build under a key: the same key again does only what is not done yet."""

    def __init__(
        self,
        model: Model,
        key: str,
        moment: datetime,
        *,
        keep: Callable[[], None] = lambda: None,
        full: bool = False,
        span: Span | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.model, self.key, self.moment, self.keep, self.full = model, key, moment, keep, full
        self.span = span
        self.loaded: list[Loaded] = []
        self.steps: list[Step] = []
        self._observer = observer
        self._left_out: LeftOuts = {}

    def execute(self) -> None:
        """Build the model, if anything is new for it."""
        started = time.perf_counter()
        observer = self._observer or Observer()
        name = self.model.target.name
        try:
            with tracing.span(f"load {name}", "client", {"weft.target": name, "weft.commit_key": self.key}):
                with self._in_words_of_models():
                    counts, engine = self._build(observer)
                tracing.note({"weft.engine": engine, "weft.replayed": counts.replayed})
        finally:
            if self._observer is None:
                observer.close()
        self.loaded.append(Loaded(name, counts, engine, time.perf_counter() - started))

    @contextmanager
    def _in_words_of_models(self) -> Iterator[None]:
        """Change what an error advises where a model cannot do it: it puts no rows aside."""
        try:
            yield
        except LoadRefusedError as error:
            if not error.can_quarantine:
                raise
            hint = "Change what the model makes of them"
            if self.model.is_incremental and not self.full:  # the others get a new table where their columns change
                hint += f", or let a new table take what it returns: weft run {self.model.name} --full"
            raise LoadRefusedError(error.what, hint=f"{hint}.") from error.__cause__

    def _build(self, observer: Observer) -> tuple[Counts, str]:
        model = self.model
        lake = observer.lake(model)
        if lake is not None:
            lake.finish(model)
        ready = self._counted(observer, self.prepare(observer))
        stored, tables, new = ready.stored, ready.tables, ready.state
        if lake is not None:
            return self._build_in(lake, ready)
        assert tables is not None
        if stored.state is not None and stored.state.build == self.key:
            return Counts(replayed=True), "none"
        dropped = replacing.views_over(model) if ready.is_full else []
        views = [each for each in dropped if observer.stored(each).state is not None]
        if model.materialise == "view":
            query = ready.result.query(all_rows=True)
            self.keep()
            replacing.create_view(tables, model, query, stored, new, again=self.full)
            self._create_views(observer, views)
            return self._advised(Counts(), ready), "pushdown"
        if ready.is_idle:
            assert stored.state is not None
            # The same build, so that models which read it need not be built.
            state.write(tables, model, stored.following(msgspec.structs.replace(stored.state, inputs=new.inputs)))
            return self._advised(Counts(), ready), "none"
        data = self._with_columns(ready.result.data(), stored)
        self.keep()
        job = self.job(ready)
        if isinstance(data, inputs.Readable):
            job.load = replace(job.load, events_after=ready.result.events_after())
        if ready.is_full:
            counts, engine = replacing.replace_all(job, data, tables, stored, model)
        else:
            counts, engine = job.run(data, tables)
        self._create_views(observer, views)
        return self._advised(counts, ready), engine

    def _build_in(self, lake: Lake, ready: PreparedBuild) -> tuple[Counts, str]:
        """Build the model in a Delta table or in files."""
        last, new = ready.stored.state, ready.state
        if last is not None and last.build == self.key:
            return Counts(replayed=True), "none"
        if ready.is_idle:
            assert last is not None
            if last.inputs != new.inputs:
                # The same build, so that models which read it need not be built.
                same = msgspec.structs.replace(last, inputs=new.inputs)
                lake.note(self.job(replace(ready, state=same)), ready.stored)
            return self._advised(Counts(), ready), "none"
        data = self._with_columns(ready.result.data(), ready.stored)
        self.keep()
        counts, engine = lake.load(self.job(ready), data, ready.stored, is_full=ready.is_full)
        return self._advised(counts, ready), engine

    def _counted(self, observer: Observer, ready: PreparedBuild) -> PreparedBuild:
        """Return a build that knows which values of its events the model does not see."""
        if ready.is_idle:
            return ready
        self._left_out = unseen_values.count(observer, ready.result.sources)
        last = ready.stored.state
        known = self._left_out
        if last is not None and self.span is not None:
            known = last.left_out  # a range that is built again was counted
        elif last is not None and not ready.is_full:
            known = unseen_values.merged(last.left_out, known)
        return replace(ready, state=msgspec.structs.replace(ready.state, left_out=known))

    def _advised(self, counts: Counts, ready: PreparedBuild) -> Counts:
        warnings = list(counts.warnings)
        if ready.state.rows_of:
            warnings.append(f"the code has changed, and some rows are of other code: weft run {self.model.name} --full")
        if self._left_out and not counts.replayed:
            lines = unseen_values.described(self._left_out)
            warnings += lines
            # A table reads all events again each time: the log has what is new.
            if ready.stored.state is None or ready.stored.state.left_out != ready.state.left_out:
                for line in lines:
                    _log.warning("%s: %s", self.model.name, line, extra={"pipeline": self.model.name})
        return replace(counts, warnings=tuple(warnings))

    def prepare(self, observer: Observer) -> PreparedBuild:
        """Find out what the build reads; nothing is changed."""
        model, lake = self.model, observer.lake(self.model)
        refuse_shared_tables(model)
        if lake is not None:
            lake.refuse(model)
        stored = observer.stored(model)
        last = stored.state
        is_full = self.full or not model.is_incremental or last is None or last.materialise != model.materialise
        if self.span is not None:
            last, sources = self.backfilled(observer, self.span)
        else:
            sources = observer.sources(model, None if is_full or last is None else last.inputs)
        key = tuple(model.target.options.get("keys") or ())
        if last is not None and not is_full and last.key is not None and last.key != key:
            raise DeclarationError(
                f"The key of {model.name} was {', '.join(last.key)}, and is {', '.join(key)} now.",
                hint=f"Build it again: weft run {model.name} --full",
            )
        new = State(
            build=self.key,
            key=key,
            fingerprint=model.fingerprint,
            materialise=model.materialise,
            inputs={each.input.name: each.mark for each in sources},
            rows_of="" if is_full or last is None else last.rows_not_of(model.fingerprint),
        )
        if self.span is not None and last is not None:
            # A backfill reads some input again, which does not change how far the model has read.
            new = msgspec.structs.replace(new, inputs=last.inputs)
        tables = observer.tables(model.target.connection) if lake is None else None
        if not self.full:
            observer.refuse_foreign(model, stored)
        is_read_in_parts = model.is_incremental and any(each.is_read_in_parts for each in sources)
        if model.materialise == "incremental" and not is_read_in_parts:
            raise DeclarationError(
                f"Model {model.name!r} is incremental, and none of its inputs can be read in parts: each build would "
                "append all rows again.",
                hint='Read a stream, name a cursor of the table, or use materialise="table" or "merge".',
            )
        is_idle = not is_full and is_read_in_parts and not any(each.has_new for each in sources)
        result = BuildResult(model, sources, tables, replace(stored, state=None) if is_full else stored)
        return PreparedBuild(stored, new, tables, result, is_full, is_idle)

    def _with_columns(self, data: Input, stored: StoredModel) -> Input:
        """Return the rows with the columns that the table has, where there are no rows that could say them."""
        if not isinstance(data, inputs.Memory) or data.schema.names:
            return data
        if stored.columns is None:
            raise DeclarationError(
                f"Model {self.model.name!r} returned no rows, so its first build knows no columns.",
                hint="Return a frame, which has columns without rows too.",
            )
        own = SCD2_COLUMNS if self.model.materialise == "scd2" else ()
        return inputs.Memory(pa.schema([each.field for each in stored.columns if each.name not in own]), [])

    def job(self, ready: PreparedBuild) -> Job:
        """Return the load of the result."""
        model = self.model
        load = run.plan_load(model, model.target, self.key, self.moment)
        load = replace(
            load,
            declared=Declared(on_drift="evolve"),
            watermark=ready.stored.following(ready.state),
            # A model may be built each second: the ledger forgets such loads after some days.
            checkpoint_id=f"{UNNAMED}{load.checkpoint_id}",
        )
        return Job(load, current().connection(model.target.connection))

    def _create_views(self, observer: Observer, views: list[Model]) -> None:
        """Create the views over the table again that had to be dropped with it."""
        for view in views:
            if observer.stored(view).columns is None:
                try:
                    ModelRun(view, self.key, self.moment, observer=observer).execute()
                except WeftError as error:
                    _log.warning("The view %s cannot be created: %s", view.name, error.what)

    def backfilled(self, observer: Observer, span: Span) -> tuple[State, list[ModelSource]]:
        """Return the last state, and the inputs with the events of a range of time that is built again."""
        last = self._backfilled(observer.stored(self.model))
        return last, observer.spanned(self.model, last.inputs, span)

    def _backfilled(self, stored: StoredModel) -> State:
        """Return the state of a model of which a range of time can be built again; raise for all others."""
        model = self.model
        if model.materialise != "merge":
            whole = {"table": "is built of all rows", "view": "has no rows of its own"}
            doubled = {"incremental": "appends rows, so those of the range would be doubled"}
            reason = {**whole, **doubled, "scd2": "keeps a history, to which the past would be added as if it came now"}
            hint = f"weft run {model.name}" + (" --full" if model.materialise == "incremental" else "")
            raise DeclarationError(
                f"The model {model.name} {reason[model.materialise]}: it has no backfill.", hint=hint
            )
        if model.takes_this:
            raise DeclarationError(
                f"The model {model.name} reads its last result, in which the range counts already: it has no backfill.",
                hint=f"weft run {model.name} --full",
            )
        if stored.state is None or stored.state.materialise != "merge":
            raise DeclarationError(
                f"The model {model.name} was never built: its first build reads everything.",
                hint=f"weft run {model.name}",
            )
        return stored.state


@dataclass(frozen=True)
class PreparedBuild:
    """What a build will do."""

    stored: StoredModel
    state: State
    """The state that is stored with its rows."""
    tables: SqlTables | None
    """The database of the model; `None` for Delta tables and files."""
    result: BuildResult
    is_full: bool
    is_idle: bool
    """Whether nothing is new for it."""


# -------------------------------------------------------------------------------------------------- function and result


@dataclass(frozen=True)
class Compiled:
    """The query of a model."""

    engine: Literal["pushdown", "spark"]
    dialect: str
    sql: str
    """Over the names of the parameters."""
    runs: str
    """The SQL that runs."""
    schema: pa.Schema | None = None
    """The columns of the result; `None` where only Spark knows them."""


@dataclass
class BuildResult:
    """What the function of a model returns for some inputs, and where the query that it is can run."""

    model: Model
    sources: list[ModelSource]
    tables: SqlTables | None
    """The database of the model; `None` for Delta tables and files, into which Spark writes."""
    stored: StoredModel
    is_watched: bool = False
    """Whether somebody looks again and again: then no table is created, no function called that may do its work at
    once because it has no inputs, and no Spark started."""
    _why_spark: str | None = field(default=None, init=False)
    """Why the database that has all inputs does not run the query."""

    def data(self) -> Input:
        """Call the function; return its result as the input of a load."""
        value = self._value()
        if value is None:
            raise DeclarationError(
                f"Model {self.model.name!r} returned nothing.", hint="Return an Ibis expression, SQL or a frame."
            )
        compiled = self._compiled(value)
        if compiled is None:
            try:
                return inputs.understand(value, has_source=False)
            except DeclarationError as error:
                raise DeclarationError(
                    f"Model {self.model.name!r} returned what cannot be loaded: {error.what}",
                    hint=error.hint,
                ) from None
        if compiled.engine == "spark":
            return inputs.Frame(self._by_spark(compiled))
        assert compiled.schema is not None
        return inputs.Readable(SqlReader(self._database, compiled.runs, compiled.schema))

    def events_after(self) -> tuple[tuple[str, int], ...]:
        """Return of which streams the query reads on, and after which offset."""
        readers = (each.reader for each in self.sources if each.follows)
        return tuple(
            (f"{each.stream_schema}.{each.stream}", each.after) for each in readers if isinstance(each, StreamReader)
        )

    def query(self, *, all_rows: bool = False) -> str:
        """Return the query in the SQL of the database; raise where it cannot run there."""
        value = self._value()
        if frame_kinds.is_ibis(value) and self.tables is not None:
            from weft.engine.models import pushdown

            value = pushdown.typed(value, self.tables)
        compiled = self._compiled(value)
        if compiled is None or compiled.engine == "spark":
            reason = self._why_spark or "a view is a query over tables of its own database"
            raise DeclarationError(f"Model {self.model.name!r} cannot be a view: {reason}.", hint='materialise="table"')
        return self._bound(compiled.sql, all_rows=all_rows, by_letters=frame_kinds.is_ibis(value))

    def compiled(self) -> Compiled | None:
        """Return the query that the model is, without its rows being read; `None` where its function makes a frame."""
        if any(frame_kinds.form_of(each.input.annotation) != "ibis" for each in self.sources if each.input.parameter):
            return None
        if self.is_watched and self.model.sql is None and not self._named:
            return None
        return self._compiled(self._value())

    def _compiled(self, value: Any) -> Compiled | None:
        if frame_kinds.is_ibis(value):
            from weft.engine.models import pushdown

            value = pushdown.cleared(value)
            sql = self._sql_of_ibis(value)
            if sql is None:
                sql = pushdown.to_spark_sql(value)
                return Compiled("spark", "spark", sql, sql, self._schema(value))
            bound = self._bound(sql, by_letters=True)
            return Compiled("pushdown", self._database.dialect, sql, bound, self._schema(value))
        if not isinstance(value, str):
            return None
        if not _is_query(value):
            raise DeclarationError(
                f"Model {self.model.name!r} returned a text that is not a query: {value[:80]!r}.",
                hint="Return SQL that begins with SELECT or WITH, an Ibis expression or a frame.",
            )
        if not self._runs_sql_here():
            return Compiled("spark", "spark", value, value)
        bound = self._bound(value)
        return Compiled("pushdown", self._database.dialect, value, bound, self._database.describe(bound))

    # ----------------------------------------------------------------------------------------------------- arguments

    def _value(self) -> Any:
        if self.model.sql is not None:
            return self.model.sql
        arguments = {str(each.input.parameter): self._argument(each) for each in self._named}
        if self.model.takes_this:
            arguments.setdefault(THIS, None)
        value: Any = run.call(self.model.function, **arguments)
        if isinstance(value, str):
            return tokens.without_end(value)
        # A number or a column of Ibis is a table of one row or column.
        return value.as_table() if frame_kinds.is_ibis(value) else value

    def _argument(self, source: ModelSource) -> Any:
        """An input in the form that its parameter asks for."""
        form = frame_kinds.form_of(source.input.annotation)
        assert source.input.parameter is not None
        if form == "ibis":
            return frame_kinds.ibis_table(source.schema(), source.input.parameter)
        if form == "spark":
            return self._frame(source)
        if source.reader is None:
            table = self._frame(source).toArrow()
        else:
            table = pa.Table.from_batches(list(read_all(source.reader)), source.reader.schema)
        return frame_kinds.as_frame(table, form)

    @cached_property
    def _this(self) -> ModelSource | None:
        """The last result; `None` in the first build, and in one that starts again."""
        if not self.model.takes_this or self.stored.state is None or self.stored.columns is None:
            return None
        table = self.model.target.table
        reader = None
        if self.tables is not None:
            reader = self._reader(f"SELECT * FROM {self.tables.qualified(table.schema, table.name)}")
        relation = relations.find(self.model.target.name, self.model.target.connection)
        return ModelSource(ModelInput(THIS, THIS, self.model.this_annotation), relation, reader=reader)

    @property
    def _named(self) -> list[ModelSource]:
        """The inputs that have a name in the query."""
        last = [] if self._this is None else [self._this]
        return [*(each for each in self.sources if each.input.parameter is not None), *last]

    # ------------------------------------------------------------------------------------------------- in a database

    @property
    def _database(self) -> SqlTables:
        assert self.tables is not None
        return self.tables

    def _runs_sql_here(self) -> bool:
        """Whether the target's database runs a query in SQL."""
        if not self._is_here():
            return False
        if not self._database.native_decimals and self.model.engine is None:
            named = [field.name for each in self._named for field in each.schema() if pa.types.is_decimal(field.type)]
            if named:
                # Their sum would be a floating-point number, and texts are compared by letters.
                self._why_spark = f"{self._database.connection.label} keeps decimals ({', '.join(named)}) as texts"
                return False
        return True

    def _is_here(self) -> bool:
        """Whether the target's database has all inputs, and may run the query."""
        here = current().connection(self.model.target.connection)
        read = [each.relation for each in self.sources if each.input.parameter is not None]
        is_here = self.tables is not None and all(
            each.table is not None and each.connection.resolved() == self._database.connection for each in read
        )
        if self.model.engine == "pushdown" and not is_here:
            raise DeclarationError(
                f"Model {self.model.name!r} cannot be pushed down: not all of its inputs are in {here.label}.",
                hint="Leave engine out.",
            )
        return is_here and self.model.engine != "spark"

    def _sql_of_ibis(self, expression: Any) -> str | None:
        """The SQL of an Ibis expression for the target's database; `None` where Spark must run it."""
        if not self._is_here():
            return None
        from weft.engine.models import pushdown

        schemas = {str(each.input.parameter): each.schema() for each in self._named}
        self._why_spark = pushdown.why_not(expression, self._database, schemas)
        if self._why_spark is None:
            return pushdown.to_sql(expression, self._database)
        if self.model.engine == "pushdown":
            raise DeclarationError(
                f"Model {self.model.name!r} cannot be pushed down: {self._why_spark}.", hint="Leave engine out."
            )
        return None

    def _bound(self, sql: str, *, all_rows: bool = False, by_letters: bool = False) -> str:
        """Return a query with its inputs as common table expressions."""
        tables = self._database
        options = {"all_rows": all_rows, "by_letters": by_letters, "creates": not self.is_watched}
        named = {str(each.input.parameter): each.select(tables, **options) for each in self._named}
        return _with_tables(
            sql, {tables.quote(name): query for name, query in (named | self._first(sql, tables.dialect)).items()}
        )

    def _first(self, sql: str, dialect: str) -> dict[str, str]:
        """The last result where there is none: a file of SQL cannot ask for it, so it reads no rows."""
        if self.model.sql is None or not self.model.takes_this or self._this is not None:
            return {}
        from weft.engine.models import lineage

        return {THIS: lineage.nothing(sql, dialect, {each.input.parameter: each.schema() for each in self.sources})}

    def _schema(self, expression: Any) -> pa.Schema:
        """Return the columns as Ibis has them, because SQLite does not know the types of what it computes; but what an
        input has as more than a text, a UUID or JSON, stays so where nothing changes it."""
        from weft.engine.models import pushdown

        schema = canonical_schema(expression.schema().to_pyarrow())
        if self.tables is None:  # Delta tables and files have neither
            return schema
        hints = pushdown.hints(expression, {str(each.input.parameter): each.schema() for each in self._named})
        return pa.schema([hinted(each.name, hints[each.name]) if each.name in hints else each for each in schema])

    def _reader(self, sql: str) -> SqlReader:
        return SqlReader(self._database, sql, self._database.describe(sql))

    # ------------------------------------------------------------------------------------------------------- in Spark

    def _frame(self, source: ModelSource) -> Any:
        """An input as a frame of Spark."""
        from weft.engine import reader_frames, session

        if source.reader is None:
            return relations.frame_of(session.spark(), source.relation)
        session.refuse_one_host(source.reader.one_host, f"The input {source.input.name} of {self.model.name}")
        return reader_frames.from_reader(session.spark(), source.reader, with_hints=self._has_hints)

    @property
    def _has_hints(self) -> bool:
        """Whether the result's columns may be UUIDs and JSON: Delta tables and files have neither."""
        return self.tables is not None

    def _by_spark(self, query: Compiled) -> Any:
        """The result of Spark SQL over the inputs: of an Ibis expression with its types, which it has in a database."""
        from weft.engine import frame_projection, queries

        tables = {str(each.input.parameter): each.reader or each.relation for each in self._named}
        text = _with_tables(query.sql, self._first(query.sql, "spark"))
        frame = queries.frame_over(tables, text, with_hints=self._has_hints)
        if query.schema is None:
            return frame
        return frame_projection.cast_to(frame, query.schema, with_hints=self._has_hints)


def _with_tables(sql: str, queries: Mapping[str, str]) -> str:
    """Return a query over common table expressions."""
    if not queries:
        return sql
    listed = ", ".join(f"{name} AS ({query})" for name, query in queries.items())
    begun = _WITH.match(sql)
    if begun is not None:
        # One list for both: in a subquery, MariaDB does not see those of the query around it.
        return f"WITH {listed}, {sql[begun.end() :]}"
    return f"WITH {listed} SELECT * FROM {subquery(sql)} AS q"


def _is_query(text: str) -> bool:
    return isinstance(inputs.understand(text, has_source=True), inputs.SourceSql)
