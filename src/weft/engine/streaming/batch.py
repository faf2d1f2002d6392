"""One micro-batch: take the rows of all sources, split off the bad ones, transform the rest, commit to each target."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from weft import tracing
from weft.engine import inputs
from weft.engine.passed_columns import passed_columns
from weft.engine.streaming import functions
from weft.engine.streaming.batch_id import BatchId
from weft.engine.streaming.batch_reader import BatchReader
from weft.engine.streaming.cdc.applying import ChangeBatch, changes_of, tombstones
from weft.engine.streaming.cdc.routing import Routed, routed, well_formed
from weft.engine.streaming.cdc.row_sql import RunSql
from weft.engine.streaming.checkpoint_files import Columns, StatePlace, Written
from weft.engine.streaming.dead_letters import NO_STORE, DeadLetterBox
from weft.engine.streaming.joins import Joins
from weft.engine.streaming.log_source import EventRows
from weft.engine.streaming.progress import OpenedSource
from weft.engine.streaming.restored import refuse_restored
from weft.engine.streaming.sessions import Sessions
from weft.engine.streaming.sources import open_source
from weft.engine.streaming.state import is_in_memory, open_state
from weft.engine.streaming.stateful import Stateful
from weft.engine.streaming.targets import Targets
from weft.engine.streaming.trace_spans import note_read, process_span
from weft.engine.streaming.transform import (
    Reduction,
    Transform,
    Transformed,
    TypedRows,
    WithOrigins,
    memory_of,
)
from weft.engine.streaming.windows import Windows
from weft.errors import ConnectionFailedError, DeclarationError, LoadRefusedError, WeftError
from weft.pipelines.streaming.endpoints import label_of
from weft.pipelines.streaming.execution import CdcReport, WindowReport
from weft.pipelines.streaming.spec import StreamingPipeline, Target
from weft.project import current
from weft.spark_support import outcome
from weft.spark_support.sessions import union_of
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.load import Counts
from weft.systems.log import EXTRA
from weft.systems.message_source import MessageSource
from weft.systems.sql.quarantine import payload
from weft.systems.state_store import StateStore
from weft.systems.stream_source import BatchRows, Documents, FrameRows, UntypedRows

# Tests stop a process at each of these steps, by a handler on this logger.
_steps = logging.getLogger("weft.streaming")


@dataclass(frozen=True)
class BatchResult:
    """What a micro-batch did."""

    batch_id: int
    counts: dict[str, Counts] = field(default_factory=dict)
    """What each target did, by its label."""
    rows_read: int | None = None
    """How many rows the SQL was given, where the sources do not know."""
    dead_letters: int = 0
    """The rejected rows: put aside, or dropped where the pipeline says so."""
    windows: WindowReport | None = None
    cdc: CdcReport | None = None


class Batches:
    """Carries out micro-batches, each exactly once under the name of its checkpoint."""

    def __init__(
        self,
        pipeline: StreamingPipeline,
        sources: Sequence[OpenedSource],
        columns: Columns,
        box: DeadLetterBox | None = None,
    ) -> None:
        self.pipeline, self.sources, self._columns = pipeline, sources, columns
        self._box = box or DeadLetterBox(pipeline)
        self._written = Written(columns.home)
        self.transform, self.targets = Transform(pipeline, columns), Targets(pipeline, self._box, self._written)
        self._reader = BatchReader(pipeline, columns)
        self._stateful: Stateful | None = None
        self._is_emitted = False
        """Whether each target has what the last batch emits."""
        self._owes_tick = False
        """Whether targets may not have what a tick emits, which the state has decided."""
        self._is_resumed = False
        """Whether the targets were asked if they are of the same time as the checkpoint."""

    def close(self) -> None:
        """Release what batches share."""
        self.transform.close()
        self.targets.close()
        if self._stateful is not None:
            self._stateful.close()

    def run(self, frame: Any, batch: BatchId) -> BatchResult:
        """Carry out the batch that Spark made of all sources."""
        with tracing.span(*process_span(self.pipeline, self.sources, batch)), outcome.calling(self._called):
            return self._carried_out(frame, batch)

    @cached_property
    def _called(self) -> list[str]:
        return functions.called_by(self.pipeline)

    def _carried_out(self, frame: Any, batch: BatchId) -> BatchResult:
        _steps.debug("begun")
        if not self._is_resumed:
            # Once: from here on each batch follows the one before.
            refuse_restored(self.pipeline, self.targets, self._written, batch, self._columns.home.path)
            self._is_resumed = True
        try:
            result = self._attempted(frame, batch)
        except WeftError as error:
            if isinstance(error, ConnectionFailedError):
                raise
            # After a crash its sources may no longer have its rows, which the targets have.
            if not self.targets.finish(self.pipeline.targets, batch):
                self._note_stored(error, batch)
                raise
            result = BatchResult(batch.number)
        if self.pipeline.dead_letters is not None:
            self._box.remove(self._written.superseded(batch))
        _steps.debug("done")
        return result

    def check_state(self, query_id: str | None) -> None:
        """Raise for a window or a join that is another one than that of its state, before rows come. A database that is
        away now is left to the batches."""
        if query_id is not None:
            with suppress(ConnectionFailedError):
                self._opened_step(query_id).store.release()

    def _note_stored(self, error: WeftError, batch: BatchId) -> None:
        """Add to an error which targets have the batch: after a reset they would get its rows a second time."""
        having = [
            f"{each.name} of {current().connection(each.connection).label}"
            for each in self.pipeline.targets
            if self.targets.has(each, batch)
        ]
        if having:
            error.add_note(f"stored already in {', '.join(having)}: after a reset its rows would be there twice")

    def _attempted(self, frame: Any, batch: BatchId) -> BatchResult:
        parts: list[BatchRows] = []
        opened: list[BatchRows] = []
        is_split = False
        self._box.put_ids.clear()
        self._box.withdrawn = self._written.withdrawn(batch)
        self._box.note = partial(self._written.note_letters, batch)
        try:
            self._supersede_letters(batch)
            for source, part in zip(self.sources, split(frame, self.sources), strict=True):
                parts.append(source.take(part))
            try:
                return self._run(parts, frame.sparkSession, batch)
            except WeftError as error:
                failure = first = error
            agreed = self._columns.agreed()
            # Spark does not report which row of a file cannot be parsed, nor which number, or key of an object, made
            # its column wider than the SQL or a target takes. So the rows are read again: first with those apart that
            # cannot be parsed, then also with those that make a column wider. Types of columns may clash the first time
            # that did not clash before. A target that has the batch already has its rows as they were.
            for widens, grows in ((self._reader.widens, True), (False, False)):
                is_refused = isinstance(failure, LoadRefusedError) and grows
                is_unread = isinstance(failure, ConnectionFailedError) or isinstance(first, DeclarationError)
                if is_unread or is_refused or self._is_stored(batch):
                    continue
                # `_run` cleared the types on which the sources agreed, and rows that are split do not settle them.
                self._columns.agree_only(agreed)
                again = self._reader.split(parts, batch.query_id, widens, grows)
                opened += again
                if again == parts:
                    continue
                before, is_split = set(self._box.put_ids), True
                self._box.put_ids.clear()
                # Rows that failed by the types of before will be in the targets.
                self._written.supersede(batch, self._written.superseded(batch) | before)
                try:
                    return self._run(again, frame.sparkSession, batch)
                except WeftError as error:
                    failure = error
                    self._box.put_ids |= before
                    self._written.supersede(batch, self._written.superseded(batch) - before)
            # A load that could not be reached may have been committed.
            if is_split and not isinstance(failure, ConnectionFailedError):
                self._withdraw_letters(batch)
            if failure is not first:
                # The rows that were put apart may be those that a target refused.
                failure.add_note(f"at first: {first}")
            raise failure
        finally:
            self._box.note = None
            if tracing.tracer is not None:
                note_read(self.sources)  # now messages are counted
            for each in {id(each): each for each in (*parts, *opened)}.values():
                each.close()

    @cached_property
    def documents(self) -> Documents | None:
        """Chooses, of the columns that the SQL passes on unchanged, those that every target stores as JSON: they are
        read as texts, so that objects keep their own keys. Only messages can be read so."""
        pipeline = self.pipeline
        is_plain = pipeline.cdc is None and pipeline.step is None
        if is_plain and len(pipeline.sources) > 1:
            opened = map(open_source, pipeline.sources)
            is_plain = all(isinstance(each, MessageSource) and each.sends_json for each in opened)
        return self._documents if is_plain else None

    def _documents(self, names: Collection[str]) -> Collection[str]:
        passed = passed_columns(self.pipeline.transform_sql, names)
        kept = self.targets.documents(passed.values()) if passed else ()
        return {name for name, output in passed.items() if output in kept}

    def _supersede_letters(self, batch: BatchId) -> None:
        """Note which letters are of attempts of which nothing is stored. If this attempt succeeds and does not put one
        of them again, it has loaded that row: the SQL may have been changed. They are removed then, or after a crash by
        the next attempt, which finds the batch stored."""
        letters = self._written.letters(batch)
        if not letters or self.pipeline.dead_letters is None:
            return
        if self.pipeline.step is not None:
            self._opened_step(batch.query_id)
        if not self._is_stored(batch, unknown=True):
            # An attempt that drops rows puts no letters of them, and has not loaded them either.
            step = self.pipeline.step
            drops = self.pipeline.transform_on_error == "drop" or getattr(step, "late_data", None) == "drop"
            self._written.supersede(batch, () if drops else letters)

    def _is_done(self, batch: BatchId) -> bool:
        """Return whether every target has a batch."""
        return self.targets.is_done(self.pipeline.targets, batch)

    def _is_stored(self, batch: BatchId, *, unknown: bool = False) -> bool:
        """Return whether the state or a target has rows of a batch; `unknown` where that cannot be known."""
        last = None if self._stateful is None else self._stateful.last
        is_in_state = last is not None and last.number == batch.number
        return is_in_state or any(self.targets.has(each, batch, unknown=unknown) for each in self.pipeline.targets)

    def _withdraw_letters(self, batch: BatchId) -> None:
        """Remove the letters of attempts of which nothing is stored: the batch may pass as a whole later."""
        if self._box.put_ids and not self._is_stored(batch, unknown=True):
            self._written.note_withdrawn(batch)
            self._box.remove(self._box.put_ids)

    def _run(self, parts: Sequence[BatchRows], spark: Any, batch: BatchId) -> BatchResult:
        """Carry out the steps of a batch: split off what cannot be parsed, transform the rest, commit it."""
        self.targets.dropped.clear()
        if self.pipeline.step is not None:
            return self._run_step(parts, spark, batch)
        counts: dict[str, Counts] = {}
        rows_read = None
        for each in parts:
            if isinstance(each, UntypedRows):
                each.documents = self.documents
        typed, filled = self._typed(parts, batch)
        rejected = sum(len(each.bad) for each in typed)
        cdc = self.pipeline.cdc
        changes: ChangeBatch | Routed | None = None
        # Sources of changes that are routed to several tables are not united: columns of one name may differ in type.
        groups = [[each] for each in filled] if self.pipeline.is_routed else [filled] if filled else []
        by_group = [self.transform.run(each, spark, batch.query_id) for each in groups]
        transformed = by_group[0] if by_group else None
        try:
            if transformed is not None and cdc is not None:
                if self.pipeline.is_routed:
                    changes = routed(list(zip(by_group, filled, strict=True)), cdc, self.targets.stored)
                    transformed = transformed._replace(with_origins=partial(_origins, by_group))
                else:
                    changes = changes_of(transformed, filled, cdc, self._run_sql(spark), self.targets.stored)
                self._check_malformed(changes)
                transformed = transformed._replace(rejected=changes.rejected)
            # Not before the SQL was understood: the batch may be read again under other types.
            for each in typed:
                # A stream may have got another type of field since a batch was stored with all its events.
                if not isinstance(each, EventRows) or not each.bad or not self._is_done(batch):
                    self._box.put(each.bad, batch, f"read {each.source}")
            if transformed is not None:
                rows, letters, with_origins = transformed
                if letters and self._is_done(batch):
                    # Rows that failed then are letters; rows that fail only now, by other SQL, are in the targets.
                    self._box.origins.update((each.source, each.offset) for each in letters)
                    letters = []
                self._put_failed(letters, batch)
                rejected += len(letters)
                for target, loaded in self.load(self.pipeline.targets, rows, batch, with_origins, changes):
                    counts[label_of(self.pipeline, target)] = loaded
                    _steps.debug("loaded")
                if not all(each.replayed for each in counts.values()):
                    with suppress(Exception):  # the batch is done, and goes uncounted
                        rows_read = self.transform.rows_read()
        finally:
            for group in by_group:
                if isinstance(group.rows, inputs.Frame):
                    group.rows.frame.unpersist()
        if not counts:
            self._written.note_without_rows(batch)
        self._keep_columns(typed, batch.query_id)
        rejected += sum(each.quarantined for each in counts.values())
        report = None
        if cdc is not None and not (counts and all(each.replayed for each in counts.values())):
            rows_read = sum(each.size or 0 for each in filled)
            dropped = tombstones(typed) + (rejected if self.pipeline.dead_letters is None else 0)
            report = self._cdc_report(changes, counts, dropped)
        return BatchResult(batch.number, counts, rows_read, rejected, cdc=report)

    def _typed(self, parts: Sequence[BatchRows], batch: BatchId) -> tuple[list[TypedRows], list[TypedRows]]:
        """Return the rows of all sources under their types, and those of the sources that have any."""
        self._columns.begin()
        self._box.origins.clear()
        typed = list(self._reader.read(parts, batch.query_id))
        for each in typed:
            self._check_unparsed(each)
        return typed, [each for each in typed if each.size != 0]

    def _cdc_report(
        self, changes: ChangeBatch | Routed | None, counts: dict[str, Counts], dropped: int
    ) -> CdcReport | None:
        """Return what became of the changes of a batch, of which so many `dropped` messages were none."""
        if changes is None:
            return CdcReport(0, 0, 0, dropped, 0, None) if dropped else None
        if not isinstance(changes, Routed):
            return changes.report(counts.values(), dropped)
        names = {label_of(self.pipeline, each): each.name for each in self.pipeline.targets}
        by_table: dict[str, list[Counts]] = {}
        for label, counted in counts.items():
            by_table.setdefault(names[label], []).append(counted)
        return changes.report(by_table, dropped)

    def load(
        self,
        targets: Sequence[Target],
        rows: inputs.Input,
        batch: BatchId,
        with_origins: WithOrigins,
        changes: ChangeBatch | Routed | None = None,
    ) -> Iterator[tuple[Target, Counts]]:
        """Load the rows of a batch into each target; yield what was done to it."""
        if isinstance(changes, Routed):
            yield from self.targets.load_routed(targets, changes, batch, with_origins)
            return
        for target in targets:
            yield target, self.targets.load(target, rows, batch, with_origins, changes=changes)

    def _run_step(self, parts: Sequence[BatchRows], spark: Any, batch: BatchId) -> BatchResult:
        """Carry out the steps of a batch with windows or a join: add its rows to the state, commit what it emits."""
        step, rejected = self._opened_step(batch.query_id), 0
        if self._owes_tick:
            self._emit_tick(step, spark, batch.query_id)
        self._is_emitted = False
        try:
            is_stored = step.begin(batch.number, *self._noted_by_spark(batch))
            if is_stored and step.last is not None and step.last.is_tick:
                self._is_emitted = True
                return BatchResult(batch.number)  # there was a tick after it, when each target had it
            if not is_stored:
                rejected = self._add_to_state(step, parts, spark, batch)
                _steps.debug("stored")
        finally:
            step.store.release()
        result = self._emit(step, spark, batch)
        self._is_emitted = True
        # A batch that was carried out to its end was counted then.
        if is_stored and result.windows is not None and all(each.replayed for each in result.counts.values()):
            result = replace(result, windows=replace(result.windows, late=0), rows_read=0)
        return replace(result, dead_letters=result.dead_letters + rejected)

    def _opened_step(self, query_id: str) -> Stateful:
        """Return the windows or the join of the pipeline, over its state."""
        if self._stateful is None:
            step = _stateful(self.pipeline, open_state(self.pipeline, query_id, self._columns.home))
            try:
                self._check_begun(step, query_id)
            except BaseException:
                step.close()
                raise
            self._stateful = step
            self._owes_tick = step.last is not None and step.last.is_tick
        return self._stateful

    def _check_begun(self, step: Stateful, query_id: str) -> None:
        if not is_in_memory(self.pipeline):
            is_there = step.last is not None
            StatePlace(self._columns.home).check_begun(self.pipeline.name, query_id, is_there=is_there)

    def tick(self, spark: Any, query_id: str) -> BatchResult | None:
        """Emit what an idle source held up; `None` where there is nothing."""
        step = self._opened_step(query_id)
        if not self._owes_tick:
            # After a tick the state no longer has the rows that a batch emits: each target must have them first.
            if not self._is_emitted:
                return None
            try:
                self._owes_tick = step.tick(spark)
            finally:
                step.store.release()
            if not self._owes_tick:
                return None
            _steps.debug("ticked")
        return self._emit_tick(step, spark, query_id)

    def _emit_tick(self, step: Stateful, spark: Any, query_id: str) -> BatchResult:
        assert step.last is not None
        # The letters of a tick are none of the current batch, which may fail and be tried again.
        note, self._box.note = self._box.note, None
        put_ids, self._box.put_ids = self._box.put_ids, set()
        try:
            result = self._emit(step, spark, BatchId(f"{query_id} tick {step.last.number}", step.last.ticks))
        finally:
            self._box.note, self._box.put_ids = note, put_ids
        self._owes_tick = False
        return replace(result, batch_id=step.last.number)

    def _emit(self, step: Stateful, spark: Any, batch: BatchId) -> BatchResult:
        """Commit to each target what the last decision emits."""
        counts: dict[str, Counts] = {}
        try:
            emission, removed = step.emission(spark), step.removed(spark)
        finally:
            step.store.release()
        rejected = self._put_unfit(step.unfit(), batch)
        # Rows that `emit_sql` leaves out are not written.
        if emission is not None and (len(emission) or removed):
            rows = memory_of(emission)
            for target in self.pipeline.targets:
                loaded = self.targets.load(target, rows, batch, lambda: pa.table({}), removed)
                counts[label_of(self.pipeline, target)] = loaded
                _steps.debug("loaded")
        rejected += sum(each.quarantined for each in counts.values())
        emitted = max((each.rows_read for each in counts.values()), default=0)
        # Before the first rows there is no state.
        rows_read = 0 if step.last is None else step.last.rows
        return BatchResult(batch.number, counts, rows_read, rejected, step.report(emitted))

    def _put_unfit(self, letters: Sequence[DeadLetter], batch: BatchId, part: str = "window") -> int:
        """Store rows that no column holds as letters; an error where there is no place for them."""
        if letters and self.pipeline.dead_letters is None:
            raise LoadRefusedError(
                f"{len(letters):,} rows of {self.pipeline.name} cannot be stored. {letters[0].error} "
                f"The first: {letters[0].payload[:500]}",
                hint=NO_STORE,
            )
        self._box.put(letters, batch, part)
        return len(letters)

    def _noted_by_spark(self, batch: BatchId) -> tuple[str, int | None]:
        """Return a digest of what Spark has noted that a batch is to read, and when it was begun."""
        noted = self._columns.home.at(f"offsets/{batch.number}").read()
        if noted is None:
            return "", None
        begun = json.loads(noted.splitlines()[1]).get("batchTimestampMs")
        return hashlib.sha256(noted.encode()).hexdigest(), begun or None

    def _add_to_state(self, step: Stateful, parts: Sequence[BatchRows], spark: Any, batch: BatchId) -> int:
        """Add the rows of a batch to the state; return how many were rejected."""
        typed, filled = self._typed(parts, batch)
        reduction = Reduction(step.nothing(), [], [])
        if filled:
            has_place = self.pipeline.dead_letters is not None or self.pipeline.transform_on_error == "drop"
            probe = step.probe if has_place else None
            reduction = self.transform.reduced(filled, spark, batch.query_id, step.reduce, probe)
        reduced, letters = step.by_partition(reduction.result, filled), reduction.rejected
        for each in typed:
            self._box.put(each.bad, batch, f"read {each.source}")
        self._put_failed(letters, batch)
        self._box.put(reduction.unreduced, batch, "aggregate")
        rejected = sum(len(each.bad) for each in typed) + len(letters) + len(reduction.unreduced)
        rejected += step.dropped(reduced)
        if step.rejects(reduced):
            for source, rows in reduction.named:
                outside = step.rejected(source, rows())
                self._box.put(outside, batch, f"window {source}")
                rejected += len(outside)
        sources = ", ".join(each.name for each in self.pipeline.sources)
        unheld = [DeadLetter("transform", why, sources, payload(row)) for row, why in reduced.aside]
        rejected += self._put_unfit(unheld, batch, "state")
        # Before the state has the batch: then it is not read again.
        self._keep_columns(typed, batch.query_id)
        read = None
        with suppress(Exception):  # its rows go uncounted
            read = self.transform.rows_read() if filled else 0
        is_first = step.last is None
        step.add(batch.number, replace(reduced, rows=read or 0), spark)
        if is_first and step.last is not None:
            self._check_begun(step, batch.query_id)
        return rejected

    def _put_failed(self, letters: Sequence[DeadLetter], batch: BatchId) -> None:
        """Store the rows that the SQL failed for, unless the pipeline drops them."""
        if self.pipeline.transform_on_error == "dlq" or self.pipeline.cdc is not None:
            self._box.put(letters, batch, "transform")
        else:
            self._box.origins.update((each.source, each.offset) for each in letters)

    def _keep_columns(self, rows: Sequence[TypedRows], query_id: str) -> None:
        """Keep the columns of a batch for those that follow. Rows that the SQL or a target rejected decide nothing."""
        rejected = self._box.origins
        for each in rows if rejected else ():
            if isinstance(each, FrameRows) and self._columns.has_news(each.source):
                offsets = [offset for source, offset in rejected if source == each.source and offset is not None]
                columns = None
                if all(offset is not None for _, offset in rejected):
                    with suppress(WeftError):  # the targets have the batch
                        columns = each.found_without(offsets)
                if columns is not None:
                    self._columns.note_again(columns, each.source, query_id, self.pipeline.transform_sql)
                else:
                    self._columns.forget_changes(each.source)
        if len(self.targets.dropped) == len(self.pipeline.targets):
            # Later batches would carry these columns as nulls, and check each of them.
            dropped = set[str](self.targets.dropped[0]).intersection(*self.targets.dropped)
            self._columns.forget_new(dropped, self.pipeline.transform_sql)
        self._columns.keep()

    def _check_unparsed(self, rows: TypedRows) -> None:
        """Raise for rows that could not be parsed, if there is no place for them."""
        if rows.bad and self.pipeline.transform_on_error == "fail" and self.pipeline.dead_letters is None:
            first = rows.bad[0]
            what, otherwise = "messages or lines", "declare the types of its columns: weft.Source(…, columns={…})"
            if isinstance(rows, EventRows):
                what, otherwise = "events", f"take their values from {EXTRA} in transform_sql"
            raise WeftError(
                f"{len(rows.bad):,} {what} of {rows.source} cannot be parsed, the first at {first.offset}: "
                f"{first.error} {first.payload[:200]}",
                hint=f"{NO_STORE} Or {otherwise}.",
            )

    def changes_in(self, messages: pa.Table, spark: Any) -> ChangeBatch | Routed | None:
        """Return the changes of messages that are well formed; `None` where the pipeline has rows."""
        if self.pipeline.cdc is None:
            return None
        if self.pipeline.cdc.route is not None:
            return well_formed(messages, self.pipeline.cdc, self.targets.stored)
        as_they_are = Transformed(memory_of(messages), [], lambda: messages)
        return changes_of(as_they_are, (), self.pipeline.cdc, self._run_sql(spark), self.targets.stored)

    def _run_sql(self, spark: Any) -> RunSql:
        return lambda sql, rows: self.transform.over(sql, spark).attempt(rows)

    def _check_malformed(self, changes: ChangeBatch | Routed) -> None:
        """Raise for messages that are no changes, if there is no place for them."""
        if changes.rejected and self.pipeline.transform_on_error == "fail" and self.pipeline.dead_letters is None:
            first = changes.rejected[0]
            raise WeftError(
                f"{len(changes.rejected):,} messages of {first.source} are no changes in the form of "
                f"{changes.cdc.envelope}, the first at {first.offset}: {first.error} {first.payload[:200]}",
                hint=f"{NO_STORE} Or leave them out: transform_on_error='drop'.",
            )


def _stateful(pipeline: StreamingPipeline, store: StateStore) -> Stateful:
    if pipeline.join is not None:
        return Joins(pipeline, store)
    assert pipeline.window is not None
    return Sessions(pipeline, store) if pipeline.window.kind == "session" else Windows(pipeline, store)


def _origins(parts: Sequence[Transformed]) -> pa.Table:
    """Return the messages of all sources, each with its origin."""
    return pa.concat_tables([each.with_origins() for each in parts], promote_options="permissive")


def split(frame: Any, sources: Sequence[OpenedSource]) -> list[Any]:
    """Return the parts of a batch, one a source, as `joined` put them together."""
    if len(sources) == 1:
        return [frame]
    return [frame.where(f"source = {number}").select(f"s{number}.*") for number in range(len(sources))]


def joined(streams: Sequence[Any]) -> Any:
    """Return one streaming DataFrame of several, each of which may have columns of its own."""
    if len(streams) == 1:
        return streams[0]
    from pyspark.sql import functions as F

    packed = [
        each.select(F.lit(number).alias("source"), F.struct("*").alias(f"s{number}"))
        for number, each in enumerate(streams)
    ]
    return union_of(packed)
