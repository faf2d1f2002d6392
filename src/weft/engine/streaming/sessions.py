"""Session windows: rows of a group with no longer pause between them than the gap.

A batch makes short sessions of its rows. Those of groups of which one may have ended are read and put together with
them: what has ended is stored as such, for this batch to emit, and the rest as it is now, in one transaction. Other
groups are only added to.

A session that lasts longer than its limit is cut at multiples of the limit since 1970, whatever the order in which its
rows come: so short sessions never cross such a time.

Sessions that can be written again stay in the state, with the time under which the targets have them. A row that comes
between two of them makes one of both: it is written, and the row of the other is removed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.engine.streaming.stateful import MILLISECOND, REASON, Reduced, moving
from weft.engine.streaming.windows import NEWEST, OLDEST, Windows, bounded, frame_of
from weft.pipelines.streaming.execution import WindowReport
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.pipelines.streaming.windows import SESSION_ID, WINDOW_END, WINDOW_START
from weft.spark_support import outcome
from weft.spark_support.sessions import quoted
from weft.systems.state_store import BATCH, CLOSED, END, KEY, TIME, Selection, StateBatch, StateStore

_CELL, _LONG, _FIRST, _LAST = "_weft_cell", "_weft_long", "_weft_first", "_weft_last"
_SESSION, _PREVIOUS = "_weft_session", "_weft_previous"
_START, _CHANGED, _SHOWN, _HIDDEN = "_weft_start", "_weft_changed", "_weft_shown", "_weft_hidden"
_WRITTEN = "_weft_written"
"""The start of the session as the targets have it, in µs since 1970. Of what a batch emits: of one that it removes."""
# Marks what is no longer kept, besides what batches emit.
_GONE = CLOSED - 1
# The most groups that a query names one by one; for more groups it reads everything.
_NAMED_KEYS = 10_000


class Sessions(Windows):
    """The session windows of a pipeline under one checkpoint."""

    def __init__(self, pipeline: StreamingPipeline, store: StateStore) -> None:
        window = pipeline.window
        assert window is not None and window.gap_ms is not None and window.max_session_duration_ms is not None
        self._gap = window.gap_ms * MILLISECOND
        self._limit = window.max_session_duration_ms * MILLISECOND
        super().__init__(pipeline, store)
        self._waiting = sum(store.counts().values())
        """How many rows are stored of sessions that go on."""
        self._emission: pa.Table | None = None
        """What the last batch emits and removes, where this process carried it out."""
        self._is_updated = window.emit == "update"

    def _counted(self) -> dict[int, int]:
        return {}  # every session has an end of its own

    # ------------------------------------------------------------------------------------------------- rows of a batch

    def _start_of_rows(self) -> None:
        return None

    def _window_columns(self) -> list[Any]:
        from pyspark.sql import functions as F

        # A row without a time is counted, not in a session.
        moment = F.timestamp_micros(F.when(F.col(REASON).isNull(), F.col(TIME)).otherwise(F.lit(0)))
        session = F.session_window(moment, f"{self._gap} microseconds")
        return [session.alias(_SESSION), self._cell(F.col(TIME)).alias(_CELL)]

    def _cell(self, moment: Any) -> Any:
        from pyspark.sql import functions as F

        return F.when(F.col(REASON).isNull(), moment - F.pmod(moment, F.lit(self._limit)))

    def _is_late(self, watermark: int) -> str:
        return f"{TIME} + {self._gap} < {moving(self._gone())}"

    def _keyed(self, reduced: Any) -> Any:
        from pyspark.sql import functions as F

        return reduced.withColumn(KEY, F.md5(F.to_json(F.struct(*map(quoted, self.window.group_by)))))

    def _fragments(self, table: pa.Table) -> pa.Table:
        rows = bounded(table.drop_columns([_SESSION]), table[OLDEST], pc.add(table[NEWEST], self._gap))
        rows = rows.append_column(_LONG, pa.repeat(False, len(rows)))
        return rows.append_column(_WRITTEN, pa.nulls(len(rows), pa.int64()))

    # -------------------------------------------------------------------------------------------------------- the state

    def _remove_closed(self) -> None:
        assert self.last is not None
        if self._emission is None or len(self._emission):
            self.store.remove(CLOSED + self.last.number)
        self._emission = None

    def _decide(self, number: int, reduced: Reduced) -> StateBatch:
        batch = super()._decide(number, reduced)
        # A batch removes what its own watermark lets go.
        upto = None if batch.watermark is None else max(batch.watermark - self._allowed, self._gone())
        return replace(batch, removed=upto)

    def add(self, number: int, reduced: Reduced, spark: Any) -> None:
        batch = self._decide(number, reduced)
        if reduced.fragments is None:
            return
        rows = self._fitted(reduced.fragments.append_column(BATCH, pa.repeat(number, len(reduced.fragments))))
        # Local until the state is stored: a batch that fails here is retried by the same object.
        emission, waiting, wanted = rows.slice(0, 0), self._waiting, None
        opened = 0 if self.last is None else self.last.open_sessions
        watermark = CLOSED // 2 + 2 if batch.watermark is None and self._is_updated else batch.watermark
        if watermark is not None:
            named = pc.unique(rows.filter(self._may_change(rows, watermark, batch.previous))[KEY])
            wanted = self._touched(named, watermark)
            stored = self.store.read(wanted) if self.last is not None else rows.slice(0, 0)
            keys = pa.array([*stored[KEY].unique().to_pylist(), *named.to_pylist()], pa.string())
            is_touched = pc.is_in(rows[KEY], keys)
            both = pa.concat_tables([stored, rows.filter(is_touched)])
            if len(both):
                with outcome.explained(f"run the batch of {self.pipeline.name}"):
                    whole = self._put_together(frame_of(spark, both), number, watermark).toArrow()
                whole = self._fitted(whole, rows.schema)
                emission = whole.filter(pc.equal(whole[END], CLOSED + number))
                absorbed = _absorbed(stored, whole, CLOSED + number)
                whole = pa.concat_tables([whole.filter(pc.not_equal(whole[END], _GONE)), absorbed])
                emission = pa.concat_tables([emission, absorbed])
                rows = pa.concat_tables([whole, rows.filter(pc.invert(is_touched))])
            waiting, opened = waiting - len(stored), opened - _open(stored)
            wanted = wanted if len(stored) else None
        self._check_sessions(rows, waiting, wanted)
        batch = replace(batch, open_sessions=opened + _open(rows))
        self.store.append(rows, batch, wanted)
        self._emission, self._waiting = emission, waiting + len(rows) - len(emission)
        self.last = batch

    def _may_change(self, rows: pa.Table, watermark: int, previous: int | None) -> Any:
        """Return which rows of a batch are of groups of which something is emitted."""
        if self._is_updated:
            return pa.chunked_array([pa.repeat(True, len(rows))])
        ended = pc.less(rows[END], watermark)
        if not self._allowed or previous is None:
            return ended
        # A row that begins before the previous watermark may reach a session that has ended.
        return pc.or_(ended, pc.less(rows[WINDOW_START].cast(pa.int64()), previous))

    def _check_sessions(self, rows: pa.Table, waiting: int, replaced: Selection | None) -> None:
        """Raise where more groups have sessions than may; nothing of the batch is stored then. `waiting`: the rows that
        stay in the state besides, without those that are `replaced`."""
        most = self.window.max_groups_per_window
        if most is None or waiting + len(rows) <= most:
            return
        open_rows = rows.filter(pc.greater(rows[END], CLOSED // 2))  # others end with this batch
        keys = {*open_rows[KEY].unique().to_pylist()}
        if self.last is not None:
            keys |= {*self.store.read(Selection(after=CLOSED // 2))[KEY].unique().to_pylist()}
            if replaced is not None:
                keys -= {*self.store.read(replaced)[KEY].unique().to_pylist()} - {*open_rows[KEY].unique().to_pylist()}
        groups = len(keys)
        if groups > most:
            raise self._too_many(groups)

    def report(self, emitted: int) -> WindowReport | None:
        report = super().report(emitted)
        if report is None or self.last is None:
            return None
        return replace(report, open=self.last.open_sessions, groups=self._waiting)

    def _touched(self, ended: Any, watermark: int) -> Selection:
        """Return the stored rows of the groups of which a session may have ended."""
        if len(ended) > _NAMED_KEYS:
            return Selection(after=CLOSED // 2)
        return Selection(after=CLOSED // 2, upto=watermark - 1, whole_keys=True, keys=tuple(ended.to_pylist()))

    def closed(self, spark: Any) -> pa.Table | None:
        rows = self._emitted_rows()
        rows = None if rows is None else rows.filter(pc.is_null(rows[_WRITTEN]))
        if rows is None or not len(rows):
            return None
        groups = map(quoted, self.window.group_by)
        frame = frame_of(spark, rows)
        identity = self._identity(WINDOW_START)
        written = frame.select(WINDOW_START, WINDOW_END, identity, *groups, *self._results(frame))
        return written.toArrow()

    def removed(self, spark: Any) -> list[dict[str, Any]]:
        rows = self._emitted_rows() if self.window.changes_rows else None
        rows = None if rows is None else rows.filter(pc.is_valid(rows[_WRITTEN]))
        if rows is None or not len(rows):
            return []
        from pyspark.sql import functions as F

        frame = frame_of(spark, rows).withColumn(WINDOW_START, F.timestamp_micros(_WRITTEN))
        keys = frame.select(*map(quoted, self.window.group_by), self._identity(WINDOW_START))
        with outcome.explained(f"close windows of {self.pipeline.name}"):
            removed: list[dict[str, Any]] = keys.toArrow().to_pylist()
        return removed

    def _emitted_rows(self) -> pa.Table | None:
        """Return what the last batch emits and removes."""
        if self.last is None or self._emission is not None:
            return self._emission
        closed = CLOSED + self.last.number
        return self.store.read(Selection(after=closed - 1, upto=closed))

    def _identity(self, start: str) -> Any:
        from pyspark.sql import functions as F

        return F.xxhash64(*map(quoted, self.window.group_by), F.unix_micros(start)).alias(SESSION_ID)

    def _put_together(self, frame: Any, number: int, watermark: int) -> Any:
        """Return short sessions as those that they are parts of. `END` says when to look at them again, which of them
        the batch emits, and which are no longer kept."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        groups = [F.col(quoted(name)) for name in (KEY, *self.window.group_by)]
        frame = frame.withColumns(
            {_FIRST: F.unix_micros(WINDOW_START), _LAST: F.unix_micros(WINDOW_END) - F.lit(self._gap)}
        )
        in_order = Window.partitionBy(*groups).orderBy(_FIRST, _LAST)
        before = F.max(_LAST).over(in_order.rowsBetween(Window.unboundedPreceding, -1))
        frame = frame.withColumn(_PREVIOUS, before)
        is_first = (F.col(_PREVIOUS).isNull() | (F.col(_FIRST) > F.col(_PREVIOUS) + self._gap)).cast("int")
        frame = frame.withColumn(_SESSION, F.sum(is_first).over(in_order))
        # One row for each session and cell.
        frame = self._merged(frame, [*groups, F.col(_SESSION), F.col(_CELL)])
        whole = Window.partitionBy(*groups, _SESSION)
        first, last = F.min(_FIRST).over(whole), F.max(_LAST).over(whole)
        frame = frame.withColumns(
            {
                _PREVIOUS: last,
                _LONG: F.max(_LONG).over(whole) | (last - first > self._limit),
                _START: first,
                _CHANGED: F.max(BATCH).over(whole) == number,
                _SHOWN: F.max(_WRITTEN).over(whole).isNotNull(),
                _HIDDEN: F.max(F.col(_WRITTEN).isNull()).over(whole),
            }
        )
        # Of a long session each cell is one that ends with the cell, but for the last.
        is_last = F.col(_LAST) == F.col(_PREVIOUS)
        ends = F.when(F.col(_LONG) & ~is_last, F.col(_CELL) + self._limit).otherwise(F.col(_PREVIOUS)) + self._gap

        def of_piece(alone: Any, together: str) -> Any:
            return F.when(F.col(_LONG), alone).otherwise(F.col(together))

        is_closed = ends < watermark
        was_written = of_piece(F.col(_WRITTEN).isNotNull(), _SHOWN)
        # Targets keep what they have: a session that goes on after it was written is written again as it is now.
        is_shown = is_closed | was_written | F.lit(self._is_updated)
        is_new = F.col(_CHANGED) | of_piece(F.col(_WRITTEN).isNull(), _HIDDEN)
        again = ends if self._is_updated else F.when(was_written, F.lit(watermark - 1)).otherwise(ends)
        kept = F.when(ends + self._allowed < watermark, F.lit(_GONE)).when(is_closed, ends + self._allowed)
        frame = frame.withColumns(
            {
                END: kept.otherwise(again),
                _WRITTEN: F.when(is_shown, of_piece(F.col(_FIRST), _START)),
                _SHOWN: is_shown & is_new,
            }
        ).drop(_CHANGED, _HIDDEN, _START, _PREVIOUS)
        done = frame.where(F.col(_SHOWN)).withColumn(_CELL, F.when(F.col(_LONG), F.col(_CELL)))
        done = self._merged(done, [*groups, F.col(_SESSION), F.col(_CELL)])
        done = done.withColumns({END: F.lit(CLOSED + number), _WRITTEN: F.lit(None).cast("bigint")})
        rest = frame.drop(_SHOWN)
        # Which sessions the targets have is asked where they are removed.
        rest = rest if self.window.changes_rows else rest.where(F.col(END) != _GONE)
        return self._bounds(done).unionByName(self._bounds(rest))

    def _merged(self, frame: Any, keys: list[Any]) -> Any:
        from pyspark.sql import functions as F

        return frame.groupBy(*keys).agg(
            *self._merged_columns(frame),
            F.min(_FIRST).alias(_FIRST),
            F.max(_LAST).alias(_LAST),
            F.max(_LONG).alias(_LONG),
            F.max(BATCH).alias(BATCH),
            F.max(_WRITTEN).alias(_WRITTEN),
        )

    def _bounds(self, frame: Any) -> Any:
        from pyspark.sql import functions as F

        start, end = F.timestamp_micros(_FIRST), F.timestamp_micros(F.col(_LAST) + self._gap)
        return frame.withColumns({WINDOW_START: start, WINDOW_END: end})


def _open(rows: pa.Table) -> int:
    """Return how many rows are of sessions that have not ended: one that is kept is looked at after its end."""
    ends = rows[END]
    is_open = pc.and_(pc.greater(ends, CLOSED // 2), pc.less_equal(ends, rows[WINDOW_END].cast(pa.int64())))
    return int(pc.sum(is_open, min_count=0).as_py())


def _absorbed(before: pa.Table, after: pa.Table, end: int) -> pa.Table:
    """Return rows of the sessions that the targets have and that are now parts of others, with this end."""

    def written(rows: pa.Table) -> list[tuple[Any, Any]]:
        return list(zip(rows[KEY].to_pylist(), rows[_WRITTEN].to_pylist(), strict=True))

    before = before.filter(pc.is_valid(before[_WRITTEN]))
    if not len(before):
        return before
    known = set(written(after))
    gone = {each: number for number, each in enumerate(written(before)) if each not in known}
    rows = before.take(pa.array(gone.values(), pa.int64()))
    ends = pa.repeat(pa.scalar(end, pa.int64()), len(rows))
    return rows.set_column(rows.schema.get_field_index(END), rows.schema.field(END), ends)
