"""The inputs of a model: what each has now, and what of it a build reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self, TypeVar

import pyarrow as pa

from weft.engine import incremental, inputs, relations
from weft.engine.models import lineage, replacing, state
from weft.engine.models.lake import Lake, lake_of
from weft.engine.models.state import Marks, Recorded, State, StoredModel
from weft.engine.readers import SqlReader, StreamReader, open_tables, stream_reader
from weft.engine.relations import Relation
from weft.errors import DeclarationError, EventsLostError, WeftError, did_you_mean
from weft.pipelines.models import Model, ModelInput
from weft.project import current
from weft.streams import runtime
from weft.systems.base import Connection, system_for
from weft.systems.log import EXTRA, ROWID, Log
from weft.systems.sql import ledger
from weft.systems.sql.tables import SqlTables, subquery
from weft.systems.watermark import UNKNOWN, LoadWatermark

T = TypeVar("T")
Span = tuple[datetime, datetime | None]
"""A range of time: from a moment up to, and without, another one."""


@dataclass(frozen=True)
class ModelSource:
    """An input of a model, and what one build reads of it."""

    input: ModelInput
    relation: Relation
    mark: Any = None
    """What it had when the build began, to see a change later; `None` where no change can be seen."""
    reader: SqlReader | StreamReader | None = None
    """Reads the rows of the build; `None` for files, which Spark reads."""
    is_read_in_parts: bool = False
    """Whether a build can read what is new alone."""
    has_new: bool = True
    """Whether there are rows that the last build has not read."""
    follows: bool = False
    """Whether it reads on where the last build has ended."""

    def schema(self) -> pa.Schema:
        """The canonical columns."""
        return relations.schema_of(self.relation) if self.reader is None else self.reader.schema

    def select(
        self, tables: SqlTables, *, all_rows: bool = False, by_letters: bool = False, creates: bool = True
    ) -> str:
        """Return the query of the rows in the SQL of the database that has them; with `all_rows` of later ones too,
        with `by_letters` so that texts are compared as Spark does, whatever the collations of the columns say. Without
        `creates` a stream that has no table yet gets none."""
        reader = self.reader
        if isinstance(reader, SqlReader):
            if not by_letters or self.relation.table is None:
                return reader.sql
            sql = reader.sql
            if reader.unreadable:  # an Ibis table has them not, and all its columns may be asked for
                sql = f"SELECT {tables.listed(reader.schema.names)} FROM {subquery(sql)} AS readable"
            return tables.selecting_by_letters(sql, *self.relation.table, reader.schema.names)
        assert isinstance(reader, StreamReader) and self.relation.stream is not None
        if creates:  # nobody may have published yet: then this creates its table
            runtime.open_stream(self.relation.stream, self.relation.connection)
        elif runtime.stored_log(self.relation.stream, self.relation.connection) is None:
            return lineage.empty(reader.schema, tables.dialect)
        listed = ", ".join(map(tables.stream_column, reader.schema))
        query = f"SELECT {listed} FROM {tables.connection.stream_table(self.relation.stream)}"
        return query if all_rows else f"{query} WHERE {ROWID} > {reader.after} AND {ROWID} <= {reader.upto}"


class Observer:
    """Sees what streams, tables and models have now, and keeps its connections to them open."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._opened: dict[Connection, SqlTables] = {}
        self._seen: dict[Any, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections; the next use opens them again."""
        self._opened.clear()
        self._stack.close()

    def tables(self, connection: str | Connection | None) -> SqlTables:
        """Return the tables of a connection."""
        resolved = current().connection(connection)
        if system_for(resolved.kind).tables is None:
            raise DeclarationError(
                f"{resolved.label} ({resolved.kind}) keeps no results of models.",
                hint="Name a SQL database, Delta tables or files.",
            )
        if resolved not in self._opened:
            tables = self._opened[resolved] = open_tables(resolved)
            self._stack.callback(tables.close)
        return self._opened[resolved]

    def lake(self, model: Model) -> Lake | None:
        """Return the Delta tables or files that a model is built into; `None` where that is a SQL database."""
        return lake_of(current().connection(model.target.connection))

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Ask for each thing once during the block: many models may have the same inputs."""
        self._seen = {}
        try:
            yield
        finally:
            self._seen = None

    def _once(self, key: Any, ask: Callable[[], T]) -> T:
        if self._seen is None:
            return ask()
        if key not in self._seen:
            self._seen[key] = ask()
        answer: T = self._seen[key]
        return answer

    def stored(self, model: Model) -> StoredModel:
        """Return what the target of a model has."""
        lake = self.lake(model)
        return state.read(self.tables(model.target.connection), model) if lake is None else lake.stored(model)

    def refuse_foreign(self, model: Model, stored: StoredModel) -> None:
        """Raise where the table of a model was not written by it."""
        lake = self.lake(model)
        if lake is None:
            replacing.refuse_foreign(self.tables(model.target.connection), model, stored)
        else:
            lake.refuse_foreign(model, stored)

    def recorded(self, model: Model) -> Recorded | None:
        """Return the last build of a model, with those of all others in its database."""
        lake = self.lake(model)
        if lake is not None:
            return self._once(model.name, lambda: lake.recorded(model))
        tables = self.tables(model.target.connection)

        def known() -> dict[tuple[str, str], Recorded]:
            return {(each.model, each.target): each for each in state.recorded(tables)}

        return self._once(tables.connection, known).get((model.name, model.target.name))

    def state(self, model: Model) -> State | None:
        """Return the state of the last build of a model."""
        last = self.recorded(model)
        return None if last is None else last.state

    def has_table(self, model: Model) -> bool:
        """Return whether the table or view of a model that was built is there."""
        if self.lake(model) is not None:
            return True  # its log says that it was built
        tables, schema = self.tables(model.target.connection), model.target.table.schema

        def names() -> set[str]:
            with tables.driver.session("read") as session:
                return set(tables.names(session, schema))

        return model.target.table.name in self._once((tables.connection, schema), names)

    def marks(self, model: Model) -> Marks:
        """Return what each input of a model has now."""
        return {each.name: self.mark(self.relation(model, each)) for each in model.inputs}

    def relation(self, model: Model, each: ModelInput) -> Relation:
        """Return the table that an input is."""
        try:
            return relations.find(each.name, model.target.connection)
        except WeftError as error:
            raise type(error)(f"Model {model.name!r}: {error.what}", hint=error.hint) from None

    def mark(self, relation: Relation) -> Any:
        """Return what differs once a table has changed: the end of a stream, the last build of a model, the loads into
        a declared table. `None` where nothing does."""
        return self._once((relation.connection, relation.data), lambda: self._mark(relation))

    def _mark(self, relation: Relation) -> Any:
        if relation.stream is not None:
            return _mark_of(runtime.open_stream(relation.stream, relation.connection, to_read=True).log)
        if relation.table is None and not isinstance(relation.data, inputs.Files):
            return None
        writers = []
        pipelines: list[Any] = [*current().pipelines.values(), *current().streaming_pipelines.values()]
        for pipeline in pipelines:
            for target in pipeline.targets:
                if not self._is_table(target, relation):
                    continue
                if isinstance(pipeline, Model):
                    return self._build(pipeline)
                if relation.table is None:
                    break
                if getattr(pipeline, "delivery", "exactly_once") != "exactly_once":
                    return None  # the ledger does not have its loads
                writers.append(pipeline.name)
        if isinstance(relation.data, inputs.Files):
            lake = lake_of(relation.connection)
            return None if lake is None else lake.version(relation.data.path)
        return {"loads": ledger.last_of(self.tables(relation.connection), writers)} if writers else None

    def _build(self, model: Model) -> Any:
        if model.materialise == "view":
            # The rows of a view change with those of its inputs.
            return self.marks(model)
        last = self.state(model)
        return None if last is None else {"build": last.build}

    def _is_table(self, target: Any, relation: Relation) -> bool:
        if target.table is None:  # a stream, or files
            return False
        table = target.table if isinstance(target.table, tuple) else (target.table.schema, target.table.name)
        if isinstance(relation.data, inputs.Files):
            is_same = "/".join(filter(None, table)) == relation.data.path.strip("/")
        else:
            is_same = table == relation.table
        return is_same and current().connection(target.connection) == relation.connection

    # -------------------------------------------------------------------------------------------------- what is read

    def sources(self, model: Model, last: Marks | None) -> list[ModelSource]:
        """Return the inputs as a build reads them; with `last`, without what earlier builds have read of streams."""
        sources = [self.source(model, each, last) for each in model.inputs]
        _check_cursor(model, sources)
        return sources

    def spanned(self, model: Model, last: Marks, span: Span) -> list[ModelSource]:
        """Return the inputs with the events of a range of time that earlier builds have read."""
        sources = [self.source(model, each) for each in model.inputs]
        if not any(isinstance(each.reader, StreamReader) for each in sources):
            raise DeclarationError(
                f"The model {model.name} reads no stream, and only events have a time at which they came.",
                hint=f"weft run {model.name} --full",
            )
        since, until = span
        spans = []
        for each in sources:
            reader = each.reader
            if isinstance(reader, StreamReader):
                assert each.relation.stream is not None
                log = runtime.open_stream(each.relation.stream, each.relation.connection, to_read=True).log
                read = (last.get(each.input.name) or {}).get("upto", 0)
                upto = min(read, log.head(read) if until is None else log.first_since(until, read) - 1)
                after = max(reader.after, log.first_since(since) - 1)
                if after < upto < read and (ordered := model.target.options.get("deduplicate_by")):
                    raise DeclarationError(
                        f"The model {model.name} keeps the greatest row of each key by {', '.join(ordered)}, and has "
                        "read events that came after this range: its rows would replace theirs.",
                        hint="Leave out --until: then all events since then are read again.",
                    )
                each = replace(each, reader=replace(reader, after=min(after, upto), upto=upto), has_new=upto > after)
            spans.append(each)
        return spans

    def source(self, model: Model, each: ModelInput, last: Marks | None = None) -> ModelSource:
        """Return an input as the source of a build."""
        relation = self.relation(model, each)
        # Before the rows are read: what changes meanwhile is seen as a change later.
        mark = self.mark(relation)
        if relation.stream is not None:
            before = _last_of(each, mark, last)
            events = stream_reader(relation.stream, relation.connection, int((before or {}).get("upto", 0)))
            events = events.selecting([name for name in events.schema.names if name != EXTRA])
            mark = {**mark, "upto": events.upto}
            if before is None:
                return ModelSource(each, relation, mark, events, is_read_in_parts=True)
            _refuse_another(before, mark, each, model)
            after = _after(events, int(before["upto"]), each, model)
            events, has_new = replace(events, after=after), events.upto > after
            return ModelSource(each, relation, mark, events, is_read_in_parts=True, has_new=has_new, follows=True)
        if isinstance(relation.data, inputs.Files):
            return ModelSource(each, relation, mark)
        reader = relations.reader_of(relation, opened=self.tables(relation.connection))
        assert isinstance(reader, SqlReader) and relation.table is not None
        # With its schema: a query may call the input by the name of the table itself.
        has_cursor = model.cursor is not None and model.cursor in reader.schema.names
        # What only the database can use: a cursor reads the others.
        unreadable = () if has_cursor else (name for name, _ in reader.unreadable)
        columns = reader.tables.listed([*reader.schema.names, *unreadable])
        reader = replace(reader, sql=f"SELECT {columns} FROM {reader.tables.qualified(*relation.table)}")
        if model.cursor is None or not has_cursor:
            return ModelSource(each, relation, mark, reader)
        said = (last or {}).get(each.name) or {}
        if said.get("column", model.cursor) != model.cursor:
            if model.materialise == "incremental":
                raise DeclarationError(
                    f"Model {model.name!r} has read {each.name} by {said['column']}, and its cursor is "
                    f"{model.cursor} now.",
                    hint=f"Build it again: weft run {model.name} --full",
                )
            said = {}
        before = LoadWatermark(model.cursor, said["kind"], said["cursor"], UNKNOWN) if "cursor" in said else None
        new = incremental.of_query(reader.tables, reader.sql, model.cursor, before, None, count_late=False)
        known = new.watermark or before
        if known is not None:
            mark = {**(mark or {}), "cursor": known.text, "kind": known.kind, "column": model.cursor}
        reader = replace(reader, sql=new.sql)
        return ModelSource(each, relation, mark, reader, is_read_in_parts=True, has_new=not new.is_empty)


def _check_cursor(model: Model, sources: list[ModelSource]) -> None:
    """Raise for a cursor that no input has: all rows of its table would be read each time. Those of files are not known
    here."""
    if model.cursor is None or any(each.reader is None for each in sources):
        return
    columns = [name for each in sources if isinstance(each.reader, SqlReader) for name in each.reader.schema.names]
    if model.cursor in columns:
        return
    if not columns:
        raise DeclarationError(
            f"Model {model.name!r} reads streams alone, which need no cursor: they are read by their offsets.",
            hint=f"Leave cursor={model.cursor!r} out.",
        )
    hint = did_you_mean(model.cursor, columns, f"Columns: {', '.join(columns[:30])}.")
    raise DeclarationError(
        f"The cursor {model.cursor!r} of model {model.name!r} is not a column of its tables.", hint=hint
    )


def _mark_of(log: Log) -> Marks:
    """Return how far a stream goes, and which one it is where its system can say so."""
    identity = log.identity()
    return {"upto": log.head()} | ({} if identity is None else {"stream": identity})


def _last_of(each: ModelInput, mark: Marks, last: Marks | None) -> Any:
    """Return what the last build had read of a stream, also under another name of it."""
    if last is None or last.get(each.name) is not None or "stream" not in mark:
        return (last or {}).get(each.name)
    same = (one for one in last.values() if isinstance(one, dict) and one.get("stream") == mark["stream"])
    return next(same, None)


def _refuse_another(before: Marks, mark: Marks, each: ModelInput, model: Model) -> None:
    if before.get("stream", mark.get("stream")) != mark.get("stream"):
        raise DeclarationError(
            f"The stream {each.name} was deleted and created again since {model.name} read it.",
            hint=f"Build it from what is there: weft run {model.name} --full",
        )


def _after(reader: StreamReader, after: int, each: ModelInput, model: Model) -> int:
    """Return the offset after which a build goes on, or raise where events are missing."""
    rebuild = f"Build it from what is there: weft run {model.name} --full"
    if after > reader.upto:
        raise DeclarationError(
            f"The stream {each.name} ends at offset {reader.upto}, and {model.name} has read it up to {after}: it is "
            "another stream, or was restored from an older copy.",
            hint=rebuild,
        )
    if after < reader.after:
        lost = reader.after - after
        raise EventsLostError(
            f"The stream {each.name} lost up to {lost:,} events before {model.name} read them: retention removed them.",
            lost=lost,
            hint=rebuild,
        )
    return after
