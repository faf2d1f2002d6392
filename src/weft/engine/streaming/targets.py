"""The targets of a streaming pipeline: each batch is committed under its key, and what is rejected becomes letters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pyarrow as pa

from weft import tracing
from weft.columns import hinted, is_nested
from weft.engine import inputs, session, spark_io
from weft.engine.frame_projection import schema_of
from weft.engine.inputs import Input
from weft.engine.load import Job
from weft.engine.readers import open_tables, stored_columns
from weft.engine.streaming import dead_letters, new_columns, object_keys
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.cdc.applying import ChangeBatch
from weft.engine.streaming.cdc.json_rows import StoredTable
from weft.engine.streaming.cdc.routing import Routed
from weft.engine.streaming.checkpoint_files import Written
from weft.engine.streaming.dead_letters import NO_STORE
from weft.engine.streaming.log_source import LogSource
from weft.engine.streaming.sources import open_source
from weft.engine.streaming.target_columns import DeclaredColumns, TargetColumns
from weft.engine.streaming.target_streams import published, rejecting
from weft.engine.streaming.trace_spans import commit_span, note_counts
from weft.engine.streaming.transform import WithOrigins
from weft.errors import LoadRefusedError, WeftError
from weft.pipelines.streaming.cdc import SchemaEvolution
from weft.pipelines.streaming.endpoints import check_targets, delivery_to, label_of
from weft.pipelines.streaming.spec import Drift, StreamingPipeline, Target
from weft.pipelines.streaming.windows import SESSION_ID, Window
from weft.project import current
from weft.spark_support.sessions import quoted
from weft.streams.declare import MAX_NEW_COLUMNS
from weft.systems.base import Connection, system_for
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.load import KEY_LENGTH, KEYED_MODES, SCD2_COLUMNS, Counts, Load
from weft.systems.sql import commit as sql_commit
from weft.systems.sql import ledger, quarantine
from weft.systems.sql.driver import MissingTableError
from weft.systems.sql.tables import Column, SqlTables

_log = logging.getLogger("weft.engine")
NOTHING = inputs.Memory(pa.schema([]), [])
_OBJECTS, _DOCUMENTS = pa.field("", pa.struct([("key", pa.string())])), hinted("", "json")
_DRIFT_OF: dict[SchemaEvolution, Drift] = {"skip": "ignore", "fail": "fail", "evolve": "evolve"}


@dataclass(frozen=True)
class _Ready:
    """The load of a batch into a target, before its transaction."""

    target: Target
    job: Job
    fitted: new_columns.Fitted
    place: str
    before: Collection[str] | None
    """The columns that the target had when the batch was first tried."""


def _committed(loads: Sequence[_Ready], tables: SqlTables) -> list[Counts]:
    """Carry out loads of one database: in one transaction, unless a table has columns that Spark has to make."""
    rows = [each.fitted.rows for each in loads]
    if not all(each.job.can_project(tables) for each in loads):
        return [each.job.run(own, tables)[0] for each, own in zip(loads, rows, strict=True)]
    prepared = [each.job.prepared(own, tables) for each, own in zip(loads, rows, strict=True)]  # type: ignore[arg-type]
    return sql_commit.commit_together(tables, prepared)


class Targets:
    """Writes the batches of a pipeline to its targets, each once."""

    def __init__(self, pipeline: StreamingPipeline, box: dead_letters.DeadLetterBox, written: Written) -> None:
        check_targets(pipeline, f"Streaming pipeline {pipeline.name!r}")
        self._pipeline, self._box, self._written = pipeline, box, written
        self._tables: dict[Connection, SqlTables] = {}
        """What stays open: to sign in again for each batch takes longer than to write a few rows."""
        self._source_names = ", ".join(each.name for each in pipeline.sources)
        # SQL that names its columns has those that its author wants.
        is_open = (
            pipeline.window is None
            and pipeline.cdc is None
            and (pipeline.transform_sql is None or "*" in pipeline.transform_sql)
        )
        # Then any row may bring columns of its own, which its table may get.
        self._takes_keys = is_open and any(open_source(each).brings_keys for each in pipeline.sources)
        self._left_out: set[tuple[str, str]] = set()
        """Tables and the columns that they do not get, of which a warning was written."""
        self._said_of_keys: set[tuple[str, str]] = set()
        self.dropped: list[Collection[str]] = []
        """The columns of the current batch that each of its tables does not get."""

    @functools.cached_property
    def _reads_json(self) -> bool:
        """Whether a source sends objects of JSON, whose types nobody has written down, as nobody has of changes."""
        has_changes, opened = self._pipeline.cdc is not None, map(open_source, self._pipeline.sources)
        return any(each.sends_json or (has_changes and isinstance(each, LogSource)) for each in opened)

    def close(self) -> None:
        for tables in self._tables.values():
            tables.close()

    def load(
        self,
        target: Target,
        rows: Input,
        batch: BatchId,
        with_origins: WithOrigins,
        removed: Sequence[Mapping[str, Any]] = (),
        changes: ChangeBatch | None = None,
    ) -> Counts:
        """Load rows into a target, once under the id of their batch, and remove those with the keys `removed`. Of those
        that it rejects `with_origins` names the origins. `changes`: what the rows say of the rows of the target."""
        with tracing.span(*commit_span(self._pipeline, [target], batch)):
            counts = self._loaded(target, rows, batch, with_origins, removed, changes)
            note_counts([counts])
            return counts

    def _loaded(
        self,
        target: Target,
        rows: Input,
        batch: BatchId,
        with_origins: WithOrigins,
        removed: Sequence[Mapping[str, Any]],
        changes: ChangeBatch | None,
    ) -> Counts:
        put = None
        if self._pipeline.dead_letters is not None:
            put = functools.partial(self._put_letters, target=target, batch=batch, with_origins=with_origins)
        if target.stream is not None:
            if changes is not None:
                if not len(changes.opened.op):
                    return Counts()
                rows = changes.clean(session.spark())
            return published(self._pipeline, target, rows, batch, put)
        connection, load = self._planned(target, batch)
        load = replace(load, deleted_keys=_removed(target, removed, self._pipeline.window))
        with self._explained([target], batch), self._opened(connection) as tables:
            ready = self._ready(target, connection, load, rows, batch, tables, changes)
            if ready is None:
                return Counts()
            ready.job.reject = None if put is None else rejecting(put)
            fitted = ready.fitted
            is_decided = bool(fitted.aside or fitted.added)
            if is_decided and self.has(target, batch):
                counts = Counts(replayed=True)
            else:
                if is_decided:
                    self._written.note_try(ready.place, batch, ready.before)
                self._put_aside(fitted.aside, load, target, batch, with_origins)
                if fitted.is_nothing:
                    return Counts(quarantined=len(fitted.aside))
                counts, _ = ready.job.run(fitted.rows, tables)
                counts = replace(counts, quarantined=counts.quarantined + len(fitted.aside))
        self._finish_load(ready, counts, batch, with_origins)
        return counts

    def load_routed(
        self, targets: Sequence[Target], changes: Routed, batch: BatchId, with_origins: WithOrigins
    ) -> Iterator[tuple[Target, Counts]]:
        """Apply the changes of those tables that have some: of one database in one transaction."""
        for connection, together in self._by_connection(targets).items():
            # In one order in all pipelines, which else could wait for each other's locks.
            changed = sorted((each for each in together if each.name in changes.by_table), key=lambda each: each.name)
            if system_for(connection.kind).tables is None:
                for target in changed:
                    own = changes.by_table[target.name]
                    yield target, self.load(target, NOTHING, batch, with_origins, changes=own)
                continue
            span = tracing.span(*commit_span(self._pipeline, changed, batch))
            with span, self._explained(changed, batch), self._opened(connection) as tables:
                assert tables is not None
                ready: list[_Ready] = []
                for target in changed:
                    own, load = changes.by_table[target.name], self._planned(target, batch)[1]
                    one = self._ready(target, connection, load, NOTHING, batch, tables, own)
                    if one is not None:
                        ready.append(one)
                counts = dict(zip((each.target.name for each in ready), _committed(ready, tables), strict=True))
                note_counts(counts.values())
            for each in ready:
                self._finish_load(each, counts[each.target.name], batch, with_origins)
            yield from ((each, counts.get(each.name, Counts())) for each in changed)

    def stored(self, table: str | None = None) -> list[StoredTable]:
        """Return the tables of the targets with the columns that they have now, or one of them; none where a stream is
        a target too, which gets the changes as they are. Of columns with normalizers any value may be one."""
        stored: list[StoredTable] = []
        if any(each.stream is not None for each in self._pipeline.targets):
            return stored
        for target in self._pipeline.targets:
            connection, load = self._planned(target, BatchId("", 0))
            if table not in (None, target.name):
                continue
            with self._opened(connection) as tables:
                is_lake = tables is None
                makes_documents = tables is not None and tables.sql_type(_OBJECTS) == tables.sql_type(_DOCUMENTS)
                if connection.is_missing():
                    stored.append(StoredTable({}, makes_documents=makes_documents))
                    continue
                columns = _typed_columns(connection, load) if is_lake else _columns(connection, tables, load)
            declared = target.declared.columns if target.declared is not None else ()
            any_value = {each.name.lower() for each in declared if each.normalizers}
            fields = {name: each.field for name, each in (columns or {}).items() if each is not None}
            known = {name: each for name, each in fields.items() if name not in any_value}
            stored.append(StoredTable(known, refuses_rows=not is_lake, makes_documents=makes_documents))
        return stored

    @property
    def are_in_databases(self) -> bool:
        """Whether all are tables of databases, none of Spark's, and none a stream."""
        return all(
            each.stream is None and system_for(current().connection(each.connection).kind).tables is not None
            for each in self._pipeline.targets
        )

    def documents(self, names: Collection[str]) -> set[str]:
        """Return those of these columns of objects and lists that every target keeps as JSON or as texts."""
        if not self.are_in_databases:
            return set()
        stored = self.stored()

        def keeps(table: StoredTable, name: str) -> bool:
            column = table.columns.get(name.lower())
            return table.makes_documents if column is None else not is_nested(column.type)

        return {name for name in names if stored and all(keeps(table, name) for table in stored)}

    def _by_connection(self, targets: Sequence[Target]) -> dict[Connection, list[Target]]:
        by_connection: dict[Connection, list[Target]] = {}
        for each in targets:
            connection = each.connection_with_options(current().connection(each.connection))
            by_connection.setdefault(connection, []).append(each)
        return by_connection

    @contextmanager
    def _explained(self, targets: Sequence[Target], batch: BatchId) -> Iterator[None]:
        """Add to an error which targets and which batch it is about."""
        try:
            yield
        except WeftError as error:
            if isinstance(error, LoadRefusedError) and error.can_quarantine:
                error = LoadRefusedError(error.what, hint=NO_STORE)
            named = f"target{'' if len(targets) == 1 else 's'} {', '.join(each.name for each in targets)}"
            error.add_note(f"{named} of {self._pipeline.name}, batch {batch.number}")
            raise error from error.__cause__

    def _ready(
        self,
        target: Target,
        connection: Connection,
        load: Load,
        rows: Input,
        batch: BatchId,
        tables: SqlTables | None,
        changes: ChangeBatch | None,
    ) -> _Ready | None:
        """Return the load of a batch into a target with the columns that it gets; `None` where nothing changes."""
        on_drift = self._pipeline.on_drift if changes is None else _DRIFT_OF[changes.cdc.schema_evolution]
        present = _columns(connection, tables, load)
        if changes is not None:
            if changes.is_empty or (present is None and not changes.set.rows.num_rows):
                return None
            stored = present if tables is not None else _typed_columns(connection, load)
            rows, load = changes.planned(load, stored, batch.checkpoint)
        place = place_of(target, connection)
        if target.table is not None and present is None:
            self._refuse_gone(target, connection)
        if self._reads_json and tables is not None:
            object_keys.warn(rows, load, connection, tables, present, self._said_of_keys)
        # A batch that is tried again puts the same rows aside, whatever columns the table has got meanwhile.
        before = self._written.at_first(place, batch, present)
        columns: TargetColumns | DeclaredColumns
        if target.declared is not None and target.declared.columns:
            columns = DeclaredColumns.of(target.declared, on_drift)
        else:
            columns = TargetColumns(None if before is None else frozenset(before), on_drift)
        selected = _selected(rows, columns, load)
        if changes is not None:
            _warn_of_columns(load, new_columns.names_of(rows), new_columns.names_of(selected))
        fitted = self._fitted(selected, columns, place, load, connection, tables, present, before)
        self.dropped.append(fitted.dropped)
        return _Ready(target, Job(load, connection, projection=columns), fitted, place, before)

    def _finish_load(self, ready: _Ready, counts: Counts, batch: BatchId, with_origins: WithOrigins) -> None:
        """Note that a target has a batch, and store what it rejected as letters."""
        if ready.target.table is not None or ready.fitted.added:
            # Delta tables and files have the ledger in them: who makes such a table again makes it without.
            is_beside = ready.job.load.is_recorded and system_for(ready.job.connection.kind).tables is not None
            ledger_of = self._pipeline.name if is_beside else None
            self._written.note(ready.place, batch, ready.fitted.added, ledger_of)
        if counts.quarantined or counts.replayed:
            self._store_rejected(ready.target, batch, with_origins)

    def _fitted(
        self,
        rows: Input,
        columns: TargetColumns | DeclaredColumns,
        place: str,
        load: Load,
        connection: Connection,
        tables: SqlTables | None,
        present: Mapping[str, Column | None] | None,
        before: Collection[str] | None,
    ) -> new_columns.Fitted:
        """Return the rows with the new columns that a target may get, where these are keys of messages. `before`: the
        columns that it had when the batch was first tried."""
        if not self._takes_keys:
            return new_columns.Fitted(rows, [], 0, [])
        names = new_columns.names_of(rows)
        new = columns.new(load, names, before or ())
        fields = functools.cache(lambda: {each.name: each for each in inputs.schema_of(rows)})
        if tables is None:
            refused = spark_io.refused_columns(connection, load, [fields()[name] for name in new]) if new else {}
        else:
            refused = {name: why for name in new if (why := tables.refuses_name(name)) is not None}
        for name in names:
            column = (present or {}).get(name.lower())
            if load.mode == "scd2" and name.lower() in SCD2_COLUMNS:
                refused[name] = "scd2 keeps this column itself"
            elif column is not None and column.generated:
                refused[name] = "the database generates this column"
        stored = [each.field for each in (present or {}).values() if each is not None]

        def can_hold(more: Collection[str]) -> bool:
            added = (fields()[name] for name in more if name.lower() not in (present or ()))
            return tables is None or tables.can_hold([*stored, *added])

        most = self._pipeline.max_new_columns
        room = max(most - self._written.added(place), 0)
        is_made = before is None and isinstance(columns, TargetColumns)
        got = (present or {}).keys() - (before or ())
        limits = new_columns.ColumnLimits(refused, room, max(most, MAX_NEW_COLUMNS), is_made, can_hold, got)
        fitted = new_columns.fitted(rows, new, limits)
        unnamed = [name for name in fitted.left_out if (place, name) not in self._left_out]
        if unnamed:
            self._left_out.update((place, name) for name in unnamed)
            _log.warning(
                "The table %s has got as many columns as max_new_columns=%s of %s allows, or as it can have. These are "
                "left out: %s%s",
                load.name,
                most,
                self._pipeline.name,
                ", ".join(map(repr, unnamed[:20])),
                " …" if len(unnamed) > 20 else "",
            )
        return fitted

    def _put_aside(
        self,
        rows: Sequence[tuple[dict[str, Any], str]],
        load: Load,
        target: Target,
        batch: BatchId,
        with_origins: WithOrigins,
    ) -> None:
        """Store rows as letters whose columns the target cannot have; an error where there is no place for them."""
        if not rows:
            return
        if self._pipeline.dead_letters is None:
            raise LoadRefusedError(
                f"{len(rows):,} rows of the source of {load.name} cannot be stored. The first: {rows[0][1]}",
                hint=f"{NO_STORE} Or leave the columns out by transform_sql.",
            )
        self._put_letters(rows, target, batch, with_origins)

    def _put_letters(
        self, rows: Sequence[tuple[dict[str, Any], str]], target: Target, batch: BatchId, with_origins: WithOrigins
    ) -> None:
        """Store rows as letters that a target cannot take, each with the reason."""
        label = label_of(self._pipeline, target)
        letters = [
            DeadLetter("store", why, self._source_names, quarantine.payload(row), target=label) for row, why in rows
        ]
        self._box.put(dead_letters.name_origins(letters, with_origins), batch, f"store {label}")

    def _refuse_gone(self, target: Target, connection: Connection) -> None:
        """Refuse to make a table that earlier batches were written to: it would have the rows from now on alone."""
        if self._written.has(place_of(target, connection)):
            raise LoadRefusedError(
                f"The table {target.name} of {connection.label} is gone. Earlier batches of {self._pipeline.name} were "
                "written to it, and a new one would not have their rows.",
                hint="Create it again, and the pipeline goes on with it. Or have it made and filled with everything "
                f"that the sources still have: weft checkpoints reset {self._pipeline.name}",
            )

    def has(self, target: Target, batch: BatchId, *, unknown: bool = False) -> bool:
        """Return whether a target's ledger has a batch; `unknown` where that cannot be known, as of streams and topics,
        which keep none, and of tables that get rows at least once."""
        if target.stream is not None:
            return unknown
        connection, load = self._planned(target, batch)
        if not load.is_recorded:
            return unknown
        if connection.is_missing():
            return False
        try:
            with self._opened(connection) as tables:
                return spark_io.has(connection, load) if tables is None else ledger.is_committed(tables, load)
        except MissingTableError:  # no load has made the ledger
            return False
        except WeftError:  # it cannot be read
            return unknown

    def last_batch(self, target: Target, batch: BatchId) -> tuple[int, str | None] | None:
        """Return the last batch of this checkpoint that a target's ledger has, -1 if it has none, and its positions;
        `None` where there is no ledger."""
        if target.stream is not None:
            return None
        connection, load = self._planned(target, batch._replace(number=0))
        if not load.is_recorded or connection.is_missing():
            return None
        with self._explained([target], batch), self._opened(connection) as tables:
            if tables is not None:
                ledger.create(tables)
                return ledger.last_batch(tables, load) or (-1, None)
            kept = spark_io.last_load(connection, load)
        return (-1, None) if kept is None else (kept.batch_id, kept.positions)

    def finish(self, targets: Sequence[Target], batch: BatchId) -> bool:
        """Finish a batch that all of these targets have, without its rows; `False` where one does not have it."""
        if not self.is_done(targets, batch):
            return False
        for each in targets:
            self._store_rejected(each, batch, lambda: pa.table({}))
        return True

    def is_done(self, targets: Sequence[Target], batch: BatchId) -> bool:
        """Return whether the ledgers of all of these targets have a batch."""
        if not self._pipeline.is_routed:
            return all(self.has(each, batch) for each in targets)
        # A table without changes has no entry. In one transaction each of the others has one, or none has.
        for connection, together in self._by_connection(targets).items():
            system = system_for(connection.kind)
            is_one = system.tables is not None and system.load_tables().savepoints and self._are_projected(together)
            if not (any if is_one else all)(self.has(each, batch) for each in together):
                return False
        return True

    def _are_projected(self, targets: Sequence[Target]) -> bool:
        """Return whether the database of these targets makes the columns of all of them, as `_committed` asks."""
        dialect = system_for(current().connection(targets[0].connection).kind).load_tables().dialect
        declared = [each.declared for each in targets if each.declared is not None and each.declared.columns]
        return all(DeclaredColumns.of(each, self._pipeline.on_drift).runs_in(dialect) for each in declared)

    def _planned(self, target: Target, batch: BatchId) -> tuple[Connection, Load]:
        """Return what the load of a batch into a target is, before its rows are known."""
        connection: Connection = target.connection_with_options(current().connection(target.connection))
        options = target.load_options
        if self._pipeline.dead_letters is not None and system_for(connection.kind).tables is not None:
            options["on_bad_rows"] = "quarantine"
        load = Load.declare(
            target=target.table or (None, target.name),
            mode=target.mode,
            keys=target.primary_key if target.mode in KEYED_MODES else (),
            pipeline=self._pipeline.name,
            commit_key=commit_key(batch.query_id, target.name),
            batch_id=batch.number,
            moment=datetime.now(UTC),
            **options,
        )
        is_recorded = delivery_to(self._pipeline, target) == "exactly_once"
        # A key that a message does not have is null where another message of the batch has it.
        return connection, replace(load, is_recorded=is_recorded, null_is_default=True, positions=batch.positions)

    def _store_rejected(self, target: Target, batch: BatchId, with_origins: WithOrigins) -> None:
        """Store what a target rejected of a batch as letters."""
        connection, load = self._planned(target, batch)
        if self._pipeline.dead_letters is None or load.on_bad_rows != "quarantine":
            return
        # First into the box, then out of the target's quarantine: after a crash between, the box has them already.
        label = label_of(self._pipeline, target)
        with dead_letters.rejected(connection, load, self._source_names, label) as letters:
            named = dead_letters.name_origins(letters, with_origins) if letters else []
            self._box.put(named, batch, f"store {label}")

    @contextmanager
    def _opened(self, connection: Connection) -> Iterator[SqlTables | None]:
        """Yield the tables of a target; `None` for a target that Spark writes. A file is closed at the end, so that it
        is not kept from others."""
        if system_for(connection.kind).tables is None:
            yield None
            return
        if connection not in self._tables:
            self._tables[connection] = open_tables(connection)
        tables = self._tables[connection]
        try:
            yield tables
        finally:
            if tables.one_host:
                tables.close()


def _removed(
    target: Target, keys: Sequence[Mapping[str, Any]], window: Window | None
) -> tuple[Mapping[str, int | str], ...]:
    """Return what a load says of sessions to remove. Their ids identify them: other keys are for an index of the table,
    and left out where the table may have them in another form."""
    names = [SESSION_ID]
    if target.declared is None and (window is None or window.emit_sql is None):
        names += [
            name
            for name in (keys[0] if keys else ())
            if all(type(each[name]) in (int, str) and "\0" not in str(each[name]) for each in keys)
        ]
    return tuple({name: each[name] for name in names} for each in keys)


def _warn_of_columns(load: Load, names: Sequence[str], written: Collection[str]) -> None:
    """Warn of each column that changes have and the table does not get."""
    for name in names:
        if name not in written:
            _log.warning(
                "The table %s has no column %r, which changes of its source have: it is left out. "
                "schema_evolution='evolve' adds such columns.",
                load.name,
                name,
            )


def place_of(target: Target, connection: Connection) -> str:
    """Return which table a target is, without secrets."""
    return f"{connection.kind} {connection.target} {target.name}"


def commit_key(query_id: str, target: str) -> str:
    """Return the key of a query's batches in the ledger of a target, no longer than a ledger takes."""
    key = f"{query_id} {target}"
    return key if len(key) <= KEY_LENGTH else f"{query_id} {sha256(target.encode()).hexdigest()}"


def _selected(rows: Input, columns: TargetColumns | DeclaredColumns, load: Load) -> Input:
    """Return the rows with the columns that their target gets."""
    if isinstance(rows, inputs.Memory):
        names = rows.schema.names
        wanted = columns.wanted(load, names)
        if len(wanted) == len(names):
            return rows
        schema = pa.schema([rows.schema.field(name) for name in wanted])
        return inputs.Memory(schema, [batch.select(wanted) for batch in rows.batches])
    if isinstance(rows, inputs.Readable):
        return inputs.Readable(rows.reader.selecting(columns.wanted(load, rows.reader.schema.names)))
    assert isinstance(rows, inputs.Frame)
    names, packed = rows.frame.columns, rows.packed
    wanted = columns.wanted(load, names)
    if len(wanted) == len(names):
        return rows
    if packed is not None:
        packed = replace(packed, schema=pa.schema([packed.schema.field(name) for name in wanted]))
    return inputs.Frame(rows.frame.select(*map(quoted, wanted)), packed)


def _typed_columns(connection: Connection, load: Load) -> dict[str, Column | None] | None:
    """Return the columns of a table that Spark writes, with their types."""
    frame = spark_io.stored(session.spark(), connection, load)
    return None if frame is None else {each.name.lower(): Column(each.name, each, "") for each in schema_of(frame)}


def _columns(connection: Connection, tables: SqlTables | None, load: Load) -> dict[str, Column | None] | None:
    """Return the columns that a target has now, by their names in small letters; `None` where it is not there."""
    if tables is None:
        names = spark_io.columns(session.spark(), connection, load)
        return None if names is None else dict.fromkeys(map(str.lower, names))
    columns = None if connection.is_missing() else stored_columns(tables, load.schema, load.table)
    return None if columns is None else {each.name.lower(): each for each in columns}
