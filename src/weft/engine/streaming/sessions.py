"""Session windows: rows of a group with no longer pause between them than the gap.

A batch makes short sessions of its rows. Those of groups of which one may have ended are read and put together with
them: what has ended is stored as such, for this batch to emit, and the rest as it is now, in one transaction. Other
groups are only added to.

A session that lasts longer than its limit is cut at multiples of the limit since 1970, whatever the order in which its
rows come: so short sessions never cross such a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.engine.streaming.stateful import MILLISECOND, REASON, TIME, Reduced
from weft.engine.streaming.windows import NEWEST, OLDEST, Windows, bounded
from weft.pipelines.streaming.execution import WindowReport
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.pipelines.streaming.windows import SESSION_ID, WINDOW_END, WINDOW_START
from weft.spark_support import outcome
from weft.spark_support.sessions import quoted
from weft.systems.state_store import BATCH, CLOSED, END, KEY, Selection, StateBatch, StateStore

_CELL, _LONG, _FIRST, _LAST = "_weft_cell", "_weft_long", "_weft_first", "_weft_last"
_SESSION, _PREVIOUS = "_weft_session", "_weft_previous"
# So many groups are named one by one; of more, everything is read.
_NAMED_KEYS = 1000


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
        """What the last batch closed, where this process carried it out."""

    def _counted(self) -> dict[int, int]:
        return {}  # every session has an end of its own

    # ------------------------------------------------------------------------------------------------- rows of a batch

    def _windowed(self, frame: Any) -> Any:
        return frame

    def _window_columns(self) -> list[Any]:
        from pyspark.sql import functions as F

        # A row without a time is counted, not in a session.
        moment = F.timestamp_micros(F.when(F.col(REASON).isNull(), F.col(TIME)).otherwise(F.lit(0)))
        session = F.session_window(moment, f"{self._gap} microseconds")
        return [session.alias(_SESSION), self._cell(F.col(TIME)).alias(_CELL)]

    def _cell(self, moment: Any) -> Any:
        from pyspark.sql import functions as F

        return F.when(F.col(REASON).isNull(), moment - F.pmod(moment, F.lit(self._limit)))

    def _is_late(self, watermark: int) -> Any:
        from pyspark.sql import functions as F

        return F.col(TIME) + self._gap < watermark

    def _keyed(self, reduced: Any) -> Any:
        from pyspark.sql import functions as F

        return reduced.withColumn(KEY, F.md5(F.to_json(F.struct(*map(quoted, self.window.group_by)))))

    def _fragments(self, table: pa.Table) -> pa.Table:
        rows = bounded(table.drop_columns([_SESSION]), table[OLDEST], pc.add(table[NEWEST], self._gap))
        return rows.append_column(_LONG, pa.repeat(False, len(rows)))

    # -------------------------------------------------------------------------------------------------------- the state

    def _remove_closed(self) -> None:
        assert self.last is not None
        if self._emission is None or len(self._emission):
            self.store.remove(CLOSED + self.last.number)
        self._emission = None

    def add(self, number: int, reduced: Reduced, spark: Any) -> None:
        batch = self._decide(number, reduced)
        if reduced.fragments is None:
            return
        rows = self._fitted(reduced.fragments.append_column(BATCH, pa.repeat(number, len(reduced.fragments))))
        # Of the next state until it is stored: a batch that fails here is tried again by the same object.
        emission, waiting, wanted = rows.slice(0, 0), self._waiting, None
        if batch.watermark is not None:
            ended = pc.unique(rows.filter(pc.less(rows[END], batch.watermark))[KEY])
            wanted = self._touched(ended, batch.watermark)
            stored = self.store.read(wanted) if self.last is not None else rows.slice(0, 0)
            keys = pa.array([*stored[KEY].unique().to_pylist(), *ended.to_pylist()], pa.string())
            is_touched = pc.is_in(rows[KEY], keys)
            both = pa.concat_tables([stored, rows.filter(is_touched)])
            if len(both):
                with outcome.explained(f"run the batch of {self.pipeline.name}"):
                    whole = self._put_together(spark.createDataFrame(both), batch).toArrow()
                whole = self._fitted(whole, rows.schema)
                emission = whole.filter(pc.equal(whole[END], CLOSED + number))
                rows = pa.concat_tables([whole, rows.filter(pc.invert(is_touched))])
            waiting -= len(stored)
            wanted = wanted if len(stored) else None
        self._check_sessions(rows, waiting)
        self.store.append(rows, batch, wanted)
        self._emission, self._waiting = emission, waiting + len(rows) - len(emission)
        self.last = batch

    def _check_sessions(self, rows: pa.Table, waiting: int) -> None:
        """Raise where more groups have sessions than may; nothing of the batch is stored then. `waiting`: the rows that
        stay in the state besides."""
        most = self.window.max_groups_per_window
        if most is None or waiting + len(rows) <= most:
            return
        stored = self.store.read(Selection(after=CLOSED // 2)) if self.last is not None else rows.slice(0, 0)
        groups = len({*stored[KEY].unique().to_pylist(), *rows[KEY].unique().to_pylist()})
        if groups > most:
            raise self._too_many(groups)

    def report(self, emitted: int) -> WindowReport | None:
        report = super().report(emitted)
        return None if report is None else replace(report, open=self._waiting, groups=self._waiting)

    def _touched(self, ended: Any, watermark: int) -> Selection:
        """Return the stored rows of the groups of which a session may have ended."""
        if len(ended) > _NAMED_KEYS:
            return Selection(after=CLOSED // 2)
        return Selection(after=CLOSED // 2, upto=watermark - 1, whole_keys=True, keys=tuple(ended.to_pylist()))

    def closed(self, spark: Any) -> Any | None:
        last = self.last
        if last is None:
            return None
        rows = self._emission
        if rows is None:
            closed = CLOSED + last.number
            rows = self.store.read(Selection(after=closed - 1, upto=closed))
        if not len(rows):
            return None
        from pyspark.sql import functions as F

        identity = F.xxhash64(*map(quoted, self.window.group_by), F.unix_micros(WINDOW_START)).alias(SESSION_ID)
        groups = map(quoted, self.window.group_by)
        return spark.createDataFrame(rows).select(WINDOW_START, WINDOW_END, identity, *groups, *self._results())

    def _put_together(self, frame: Any, batch: StateBatch) -> Any:
        """Return short sessions as those that they are parts of; `END` says which of them the batch closes."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        assert batch.watermark is not None
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
            }
        )
        # Of a long session each cell is one that ends with the cell, but for the last.
        is_last = F.col(_LAST) == F.col(_PREVIOUS)
        ends = F.when(F.col(_LONG) & ~is_last, F.col(_CELL) + self._limit).otherwise(F.col(_PREVIOUS)) + self._gap
        frame = frame.withColumn(END, F.when(ends < batch.watermark, F.lit(CLOSED + batch.number)).otherwise(ends))
        is_closed = F.col(END) == CLOSED + batch.number
        done = frame.where(is_closed)
        piece = F.when(F.col(_LONG), F.col(_CELL))
        done = self._merged(done.withColumn(_CELL, piece), [*groups, F.col(_SESSION), F.col(_CELL)])
        done = done.withColumn(END, F.lit(CLOSED + batch.number))
        return self._bounds(done).unionByName(self._bounds(frame.where(~is_closed).drop(_PREVIOUS)))

    def _merged(self, frame: Any, keys: list[Any]) -> Any:
        from pyspark.sql import functions as F

        return frame.groupBy(*keys).agg(
            *self._merged_columns(frame),
            F.min(_FIRST).alias(_FIRST),
            F.max(_LAST).alias(_LAST),
            F.max(_LONG).alias(_LONG),
            F.max(BATCH).alias(BATCH),
        )

    def _bounds(self, frame: Any) -> Any:
        from pyspark.sql import functions as F

        start, end = F.timestamp_micros(_FIRST), F.timestamp_micros(F.col(_LAST) + self._gap)
        return frame.withColumns({WINDOW_START: start, WINDOW_END: end})
