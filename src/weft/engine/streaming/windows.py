"""Windows of a streaming pipeline, batch by batch.

A batch reduces its rows to one row for each window and group (a fragment), and adds them to the state. The windows that
the watermark of the batch closes are read from there, folded and written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from weft.columns import is_utf8, python_rows, without_voids
from weft.engine import frames
from weft.engine.streaming import fan_in, functions
from weft.engine.streaming.aggregates import OF_NUMBERS, OF_VALUES, Steps, lost, plain, steps
from weft.engine.streaming.failing_rows import FailingRows
from weft.engine.streaming.stateful import (
    LATE,
    MILLISECOND,
    NESTED,
    NEVER,
    REASON,
    Reduced,
    Stateful,
    is_void,
    moving,
    stored_field,
    wider_type,
)
from weft.errors import DeclarationError, LoadRefusedError
from weft.pipelines.streaming.execution import WindowReport
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.pipelines.streaming.windows import WINDOW_END, WINDOW_START, WINDOWS, Aggregation
from weft.spark_support import outcome
from weft.spark_support.sessions import quoted
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.sql.quarantine import payload
from weft.systems.state_in_memory import mask
from weft.systems.state_store import BATCH, END, KEY, TIME, Selection, StateBatch, StateStore

_ROWS, _SOURCE = "_weft_rows", "_weft_source"
_LOST = "_weft_lost"
# Changes with the columns that are stored of an aggregate.
_FORM, _FORMS = 4, {"sum": 3, "udaf": 4}
"""The form of states, and since which one those of an aggregate are as they are now. Others are since form 2."""
OLDEST, NEWEST, _START = "_weft_oldest", "_weft_newest", "_weft_start"
# Fewer stored rows are not worth a job that folds them.
_COMPACT_ROWS, _COMPACT_RATIO = 20_000, 4
# The most rows, and the most windows, that are folded at once: the process holds them in memory.
_COMPACT_MOST, _COMPACT_ENDS = 1_000_000, 1000


class Windows(Stateful):
    """The windows of a pipeline under one checkpoint."""

    WORD, LATE_SINCE = "window", "its window has closed"
    _CHANGES = "its duration, event time, groups or aggregations"

    def __init__(self, pipeline: StreamingPipeline, store: StateStore) -> None:
        assert pipeline.window is not None
        window = self.window = pipeline.window
        self._length = (window.duration_ms or 0) * MILLISECOND
        self._hop = (window.hop_ms or 0) * MILLISECOND or self._length
        self._numbers = self._aggregated(OF_NUMBERS)
        self._kept = list(dict.fromkeys([*window.group_by, *self._aggregated(OF_VALUES)]))
        made = [name for e in window.aggregations if _is_json(e) or e.udaf is not None for name in e.columns]
        self._read_as_texts = list(dict.fromkeys([*self._kept, *made]))
        times = {each.name: window.event_time_column for each in pipeline.sources}
        super().__init__(pipeline, store, window.late_data, window.allowed_lateness_ms, times)
        self._stored = self._counted()
        """How many rows are stored, by the end of their window."""
        self._groups: dict[int, int] = {}
        """By the end of a window, about how many groups it has: the most rows of a batch, or all when it was folded."""
        self._uncounted = {*self._stored}
        """The windows that were there before this process."""
        self._unfit: list[DeadLetter] = []
        self._made: tuple[Any, list[Any], list[Any]] | None = None
        """The columns of the last batch, for rows of the same types."""
        self._merging: tuple[list[Any], list[Steps]] | None = None
        """The steps over stored rows, and the types that these have."""
        if any(each.udaf is not None for each in window.aggregations):
            self.probe = lambda source, frame: self._grouped([(source, frame)])
        self._is_registered = False
        """Whether the session knows the functions that `emit_sql` may call."""

    def _aggregated(self, aggs: Collection[str]) -> list[str]:
        """Return the columns of which there are such aggregates."""
        return list(dict.fromkeys(name for e in self.window.aggregations if e.agg in aggs for name in e.columns))

    # -------------------------------------------------------------------------------------------------------- one batch

    def reduce(self, rows: Sequence[tuple[str, Any]]) -> Reduced:
        """Return what the windows get of rows, which are a DataFrame for each source."""
        self._texts = ()
        table = self._table(rows)
        if self._has_bytes(table):
            # Only now: to look at each text takes time, and almost all are UTF-8.
            texts = {name for _, frame in rows for name, kind in frame.dtypes if kind.startswith("string")}
            self._texts = [name for name in self._read_as_texts if name in texts]
            table = self._table(rows)
        return self._split(table, rows)

    def _table(self, rows: Sequence[tuple[str, Any]]) -> pa.Table:
        with outcome.explained(f"run the batch of {self.pipeline.name}"):
            return self._keyed(self._grouped(rows)).toArrow()

    def _has_bytes(self, table: pa.Table) -> bool:
        """Return whether bytes that are not UTF-8 have come into what a batch makes of its rows."""
        # Spark puts this character in their place where it makes JSON.
        texts = (table[each.name] for each in self.window.aggregations if _is_json(each))
        return not is_utf8(table) or any(pc.any(pc.match_substring(text, "\ufffd")).as_py() for text in texts)

    def _grouped(self, rows: Sequence[tuple[str, Any]]) -> Any:
        frame, is_one = self._timed(rows), len(rows) == 1
        keys, stored = self._columns(frame.schema)
        return frame.groupBy(REASON, *([] if is_one else [_SOURCE]), *keys).agg(*stored)

    def _columns(self, schema: Any) -> tuple[list[Any], list[Any]]:
        """Return the columns by which a batch groups rows of these types, and what it stores of each group."""
        from pyspark.sql import functions as F

        if self._made is None or self._made[0] != schema:
            # All rows that are left out for one reason form one group.
            is_kept = F.col(REASON).isNull()
            groups = [F.when(is_kept, F.col(quoted(name))).alias(name) for name in self.window.group_by]
            stored = {_ROWS: F.count(F.lit(1)), OLDEST: F.min(TIME), NEWEST: F.max(TIME)}
            for each in self.window.aggregations:
                stored |= steps(each, schema, F.col(TIME), is_kept, self.window.group_by).stored
            named = [column.alias(name) for name, column in stored.items()]
            self._made = schema, [*self._window_columns(), *groups], named
        return self._made[1:]

    def add(self, number: int, reduced: Reduced, spark: Any) -> None:
        """Store what a batch made of its rows, and the watermark that follows from them."""
        batch = self._decide(number, reduced)
        if reduced.fragments is None:
            return
        rows = self._fitted(reduced.fragments.append_column(BATCH, pa.repeat(number, len(reduced.fragments))))
        self._check_groups(rows)
        replaced, long = None, self._long(rows, batch.watermark)
        if long:
            replaced = Selection(ends=long)
            rows = self._compacted(rows, replaced, spark)
        self.store.append(rows, batch, replaced)
        self.last = batch
        for end in long:
            self._stored.pop(end, None)
            self._groups.pop(end, None)
        for end, count in _counted(rows).items():
            self._stored[end] = self._stored.get(end, 0) + count
            self._groups[end] = max(self._groups.get(end, 0), count)

    def emission(self, spark: Any) -> pa.Table | None:
        self._unfit = []
        with outcome.explained(f"close windows of {self.pipeline.name}"):
            rows = self.closed(spark)
        if rows is None:
            return None
        is_lost = pc.not_equal(rows[_LOST], "")
        self._unfit = list(map(self._unfit_letter, python_rows(rows.filter(is_lost))))
        # Where a target may have the window, a null replaces what was its sum before.
        rows = rows if self.window.changes_rows else rows.filter(pc.invert(is_lost))
        rows = self._untyped(rows.drop_columns([_LOST]))
        if self.window.emit_sql is None or not len(rows):
            return without_voids(rows)
        sql = FailingRows(
            f"run the emit_sql of {self.pipeline.name}", lambda some: frame_of(spark, some), self._selected
        )
        if self.pipeline.dead_letters is None:
            return without_voids(sql.attempt(rows))
        selected, failed = sql.split(rows)
        for row, why in zip(python_rows(rows.take(pa.array(failed, pa.int64()))), failed.values(), strict=True):
            kept = " What the targets had of this window stays." if self.window.changes_rows else ""
            self._unfit.append(self._letter(row, f"The window is left out: {why}{kept}"))
        return without_voids(selected)

    def _untyped(self, rows: pa.Table) -> pa.Table:
        """Return emitted rows, in which an aggregate that has had no value yet has no type either."""
        schema = self.store.schema()
        for each in self.window.aggregations:
            if schema is not None and is_void(schema.field(each.name)):
                rows = rows.set_column(rows.column_names.index(each.name), each.name, pa.nulls(len(rows)))
        return rows

    def unfit(self) -> list[DeadLetter]:
        return self._unfit

    def _unfit_letter(self, row: dict[str, Any]) -> DeadLetter:
        what = "has a null in its place" if self.window.changes_rows else "is left out"
        return self._letter(row, f"The window {what}: {row.pop(_LOST).rstrip('.')}.")

    def _letter(self, row: dict[str, Any], why: str) -> DeadLetter:
        sources = ", ".join(each.name for each in self.pipeline.sources)
        return DeadLetter("transform", why, sources, payload(row))

    def _selected(self, frame: Any) -> Any:
        """Return what is written of the rows that a batch emits."""
        assert self.window.emit_sql is not None
        if not self._is_registered:
            functions.register(frame.sparkSession, self.pipeline.udfs, ())
            self._is_registered = True
        return frames.transformed(frame, self.window.emit_sql, WINDOWS, "emit_sql")

    def closed(self, spark: Any) -> pa.Table | None:
        """Return the rows that the last batch in the state emits; `None` where there are none."""
        last = self.last
        wanted = None if last is None else self._emitted(last)
        if last is None or wanted is None:
            return None
        stored = self.store.read(wanted)
        if not len(stored):
            return None
        is_alone = self._is_alone(stored)
        alone, several = stored.filter(is_alone), stored.filter(pc.invert(is_alone))
        if not len(several):
            return self._finished(alone, last)
        from pyspark.sql import functions as F

        folded = self._folded(frame_of(spark, several))
        if self.window.changes_rows:
            is_new = F.col(BATCH) == last.added
            if self.window.emit == "close":
                is_new |= F.col(END) > _before(last)
            folded = folded.where(is_new)
        groups = map(quoted, self.window.group_by)
        rows = folded.select(WINDOW_START, WINDOW_END, *groups, *self._results(folded)).toArrow()
        return pa.concat_tables([rows, self._finished(alone, last).cast(rows.schema)]) if len(alone) else rows

    def _is_alone(self, stored: pa.Table) -> pa.Array:
        """Return which stored rows are the only one of their window and group, and so its result without Spark."""
        is_alone = np.zeros(len(stored), bool)
        if all(plain(each, stored) is not None for each in self.window.aggregations):
            keys = [END, *self.window.group_by]
            numbered = stored.select(keys).append_column(_ROWS, pa.array(np.arange(len(stored))))
            groups = numbered.group_by(keys).aggregate([(_ROWS, "count"), (_ROWS, "min")])
            single = groups.filter(pc.equal(groups[f"{_ROWS}_count"], 1))
            is_alone[single[f"{_ROWS}_min"].to_numpy()] = True
            for each in self.window.aggregations:
                if (is_lost := lost(each, stored)) is not None:
                    is_alone &= ~is_lost.to_numpy()
        return pa.array(is_alone)

    def _finished(self, alone: pa.Table, last: StateBatch) -> pa.Table:
        """Return the results of rows that are alone in their window and group, as Spark would."""
        if self.window.changes_rows:
            is_new = pc.equal(alone[BATCH], last.added)
            if self.window.emit == "close":
                is_new = pc.or_(is_new, pc.greater(alone[END], _before(last)))
            alone = alone.filter(is_new)
        columns = {name: alone[name] for name in (WINDOW_START, WINDOW_END, *self.window.group_by)}
        columns |= {each.name: plain(each, alone) for each in self.window.aggregations}
        return pa.table({**columns, _LOST: pa.repeat("", len(alone))})

    def _results(self, frame: Any) -> list[Any]:
        """Return the columns of the result, over merged ones, and which of them are lost."""
        from pyspark.sql import functions as F

        results, reasons = [], []
        for one, each in zip(self.window.aggregations, self._merges(frame), strict=True):
            result = each.result
            if each.lost is not None:
                result = F.when(each.lost.isNull(), result)
                reasons.append(each.lost)
            results.append(result.alias(one.name))
        return [*results, F.concat_ws("; ", *reasons).alias(_LOST)]

    def report(self, emitted: int) -> WindowReport | None:
        """Return how the windows are after a batch that emitted so many rows; `None` before the first rows."""
        if (last := self.last) is None:
            return None
        still = [end for end in self._stored if last.watermark is None or end > last.watermark]
        return self._reported(last, emitted, len(still), sum(self._stored[end] for end in still))

    # -------------------------------------------------------------------------------------------------- rows of a batch

    def _timed(self, rows: Sequence[tuple[str, Any]]) -> Any:
        """Return the rows of all sources, with their time and window, and why one of them is in none."""
        from pyspark.sql import functions as F

        if len(rows) > 1:
            rows = [(name, frame.withColumn(_SOURCE, F.lit(name))) for name, frame in rows]
        frame = fan_in.rows_of_all(rows, fan_in.read_by_window(self.window))
        self._check_columns(frame)
        frame = self._dated(frame, rows[0][0])
        # All rows that are left out for one reason form one group; without values, no aggregate of it overflows.
        aggregated = {name for each in self.window.aggregations for name in each.columns}
        aggregated -= {self.window.event_time_column, *self.window.group_by}
        texts = {name: f"CASE WHEN {REASON} IS NULL THEN {quoted(name)} END" for name in sorted(aggregated)}
        if (start := self._start_of_rows()) is not None:
            texts[_START] = start
        return frame.withColumns({name: F.expr(text) for name, text in texts.items()}) if texts else frame

    def _counted(self) -> dict[int, int]:
        return self.store.counts()

    def _keyed(self, reduced: Any) -> Any:
        """Return what a batch made of its rows, with more columns where the state needs them."""
        return reduced

    def _start_of_rows(self) -> str | None:
        """Return when the window of a row begins, in SQL: a row is there once for each window that it is in."""
        if self._hop == self._length:
            return self._latest_start()
        windows, closed = -(-self._length // self._hop), moving(self._gone())
        starts = f"transform(sequence(0L, {windows - 1}L), n -> {self._latest_start()} - n * {self._hop})"
        is_open = f"s + {self._length} > {TIME} AND s + {self._length} > {closed}"
        # A row that is left out stays, to be counted.
        return f"explode(CASE WHEN {REASON} IS NULL THEN filter({starts}, s -> {is_open}) ELSE array(0L) END)"

    def _latest_start(self) -> str:
        return f"({TIME} - pmod({TIME}, {self._hop}))"

    def _window_columns(self) -> list[Any]:
        """Return the columns by which a batch groups rows, besides those of the window's groups."""
        from pyspark.sql import functions as F

        return [F.when(F.col(REASON).isNull(), F.col(_START)).alias(_START)]

    def _is_late(self, watermark: int) -> str:
        # All windows of the row have closed.
        return f"{self._latest_start()} + {self._length} <= {moving(self._gone())}"

    def _fragments(self, table: pa.Table) -> pa.Table:
        """Return what a batch made of its rows, with when each window begins and ends."""
        start = table[_START]
        return bounded(table.drop_columns([_START]), start, pc.add(start, self._length))

    def _split(self, table: pa.Table, rows: Sequence[tuple[str, Any]]) -> Reduced:
        kept = pc.is_null(table[REASON])
        left_out = {
            each[REASON]: each[f"{_ROWS}_sum"]
            for each in table.filter(pc.invert(kept)).group_by(REASON).aggregate([(_ROWS, "sum")]).to_pylist()
        }
        fragments = table.filter(kept)
        # The time of a row that is too far in the future says nothing about the others.
        timed = table.filter(pc.or_(kept, pc.fill_null(pc.equal(table[REASON], LATE), False)))
        newest: dict[str, int] = {}
        if len(rows) > 1:
            maxima = timed.group_by(_SOURCE).aggregate([(NEWEST, "max")]).to_pylist()
            newest = {each[_SOURCE]: each[f"{NEWEST}_max"] for each in maxima}
        elif len(timed):
            newest = {rows[0][0]: pc.max(timed[NEWEST]).as_py()}
        fragments = self._fragments(fragments.drop_columns([REASON, *([_SOURCE] if len(rows) > 1 else [])]))
        return Reduced(fragments.drop_columns([_ROWS, OLDEST, NEWEST]), newest, left_out)

    def _check_columns(self, frame: Any) -> None:
        """Raise for columns that the rows do not have, or that no state keeps."""
        window = self.window
        named = [("group_by", name) for name in window.group_by]
        named += [("aggregations", name) for each in window.aggregations for name in each.columns]
        self._check_named(frame, named, window.event_time_column)
        kept = [name for each in window.aggregations if each.agg != "count" for name in each.columns]
        for name in (*window.group_by, *kept):
            if (kind := frame.schema[name].dataType.typeName()) in NESTED:
                raise DeclarationError(
                    f"The window of {self.pipeline.name}: the column {name!r} is of type {kind}, which no state keeps.",
                    hint=f"Make a text of it by transform_sql: to_json({name}) AS {name}.",
                )

    # -------------------------------------------------------------------------------------------------------- decisions

    def _emitted(self, last: StateBatch) -> Selection | None:
        """Return the stored rows of what a batch emits; `None` where it is known that there are none."""
        if self.window.emit == "update":
            return None if last.is_tick else Selection(after=NEVER, batch=last.added)
        if last.watermark is None:
            return None
        if self.window.changes_rows:
            return Selection(after=_before(last), upto=last.watermark, batch=last.added)
        is_some = any(end <= last.watermark for end in self._stored)
        return Selection(upto=last.watermark) if is_some else None

    def _remove_closed(self) -> None:
        if self.last is None or self.last.watermark is None:
            return
        upto = self._gone()
        done = [end for end in self._stored if end <= upto]
        if done:
            self.store.remove(upto)
            for end in done:
                del self._stored[end]
                self._groups.pop(end, None)
                self._uncounted.discard(end)

    def _check_groups(self, rows: pa.Table) -> None:
        """Raise where a window has more groups than it may; nothing of the batch is stored then."""
        most = self.window.max_groups_per_window
        if most is None:
            return
        for end, count in _counted(rows).items():
            if self._stored.get(end, 0) + count <= most:
                continue
            keys = list(self.window.group_by)
            parts = [rows.filter(pc.equal(rows[END], end)).select(keys)]
            if end in self._stored:
                parts.append(self.store.read(Selection(after=end - 1, upto=end)).select(keys))
            groups = len(pa.concat_tables(parts).group_by(keys).aggregate([])) if keys else 1
            if groups > most:
                raise self._too_many(groups)

    def _too_many(self, groups: int) -> LoadRefusedError:
        most = self.window.max_groups_per_window
        return LoadRefusedError(
            f"The window of {self.pipeline.name}: max_groups_per_window={most} reached ({groups:,} groups). Nothing of "
            "the batch was stored.",
            hint="Make max_groups_per_window larger, windows or gaps shorter, or group_by columns with fewer values.",
        )

    # ------------------------------------------------------------------------------------------------------ stored rows

    def _fitted(self, rows: pa.Table, schema: pa.Schema | None = None) -> pa.Table:
        """Return rows with the columns and types that are stored, or will be."""
        is_new = schema is None
        schema = self.store.schema() if schema is None else schema
        if schema is None:
            schema = self._first_schema(rows.schema)
        elif is_new and (changed := self._changed_fields(schema, rows.schema)):
            for each in changed:
                schema = schema.set(schema.get_field_index(each.name), each)
            self._retype(schema)
        return self._cast(rows, schema)

    def _changed_fields(self, stored: pa.Schema, rows: pa.Schema) -> list[pa.Field]:
        """Return the columns of the state that need another type for the rows of a batch: that of their first values,
        and of aggregates one that holds larger numbers."""
        own = {*self.window.group_by, KEY, WINDOW_START, WINDOW_END}
        changed = []
        for each in stored:
            new = rows.field(each.name).type
            if is_void(each) and not pa.types.is_null(new):
                changed.append(stored_field(rows.field(each.name)))
            elif each.name not in own and (wider := wider_type(each.type, new)) is not None:
                changed.append(stored_field(pa.field(each.name, wider)))
        return changed

    def _long(self, rows: pa.Table, watermark: int | None) -> tuple[int, ...]:
        """Return the ends of open windows that have many more rows than groups, where it is worth to fold them."""
        new, ends = _counted(rows), self._found_long(rows, watermark)
        if not ends or self._uncounted.isdisjoint(ends):
            return ends
        # A batch may have only some of a window's groups.
        uncounted = tuple(end for end in ends if end in self._uncounted)
        for end, count in self.store.groups([END, *self.window.group_by], Selection(ends=uncounted)).items():
            self._groups[end] = max(count, new.get(end, 0))
        self._uncounted.difference_update(uncounted)
        return self._found_long(rows, watermark)

    def _found_long(self, rows: pa.Table, watermark: int | None) -> tuple[int, ...]:
        new, counts = _counted(rows), {}
        for end, stored in self._stored.items():
            count, groups = stored + new.get(end, 0), max(self._groups.get(end, 0), new.get(end, 0))
            if count > _COMPACT_RATIO * groups and (watermark is None or end > watermark):
                counts[end] = count
        if sum(counts.values()) <= _COMPACT_ROWS:
            return ()
        # One window at least; the others with a batch after this one.
        chosen: list[int] = []
        total = 0
        for end in sorted(counts, key=counts.__getitem__, reverse=True):
            if chosen and total + counts[end] > _COMPACT_MOST:
                break
            chosen.append(end)
            total += counts[end]
        return tuple(chosen[:_COMPACT_ENDS])

    def _compacted(self, rows: pa.Table, replaced: Selection, spark: Any) -> pa.Table:
        """Return the rows of a batch, and those of some windows folded into one for each group."""
        is_folded = mask(rows, replaced)
        both = pa.concat_tables([self.store.read(replaced), rows.filter(is_folded)])
        with outcome.explained(f"compact the state of {self.pipeline.name}"):
            folded = self._folded(frame_of(spark, both)).toArrow()
        return pa.concat_tables([self._fitted(folded, rows.schema), rows.filter(pc.invert(is_folded))])

    def _folded(self, frame: Any) -> Any:
        """Return stored rows, one for each window and group."""
        from pyspark.sql import functions as F

        keys = (END, WINDOW_START, WINDOW_END, *map(quoted, self.window.group_by))
        return frame.groupBy(*keys).agg(*self._merged_columns(frame), F.max(BATCH).alias(BATCH))

    def _merged_columns(self, frame: Any) -> list[Any]:
        """Return the stored columns of the aggregates, merged over several rows."""
        merged = {name: column for each in self._merges(frame) for name, column in each.merged.items()}
        # Cast to the stored type: Spark would widen a decimal at each fold. A sum that does not fit is lost.
        return [column.try_cast(frame.schema[name].dataType).alias(name) for name, column in merged.items()]

    def _merges(self, frame: Any) -> list[Steps]:
        """Return the steps of the aggregates over stored rows."""
        from pyspark.sql import functions as F

        window, schema = self.window, frame.schema
        types = [schema[each.name].dataType for each in window.aggregations]
        if self._merging is None or self._merging[0] != types:
            each_type = zip(window.aggregations, types, strict=True)
            merges = [steps(each, None, F.col(TIME), groups=window.group_by, stored=kind) for each, kind in each_type]
            self._merging = types, merges
        return self._merging[1]

    def _fingerprints(self) -> list[str]:
        aggs = ("udaf" if each.udaf is not None else str(each.agg) for each in self.window.aggregations)
        since = max(_FORMS.get(each, 2) for each in aggs)
        return [self._fingerprint_of(form) for form in range(_FORM, since - 1, -1)]

    def _fingerprint_of(self, form: int) -> str:
        aggregations = []
        for each in self.window.aggregations:
            # A limit may be changed: what is stored does not depend on it. Nor on which percentile it is.
            named = {**asdict(each), "max_distinct_values_per_group": None}
            for option in ("percentage", "max_values_per_group"):
                del named[option]
            if each.udaf is not None:
                named |= {"agg": each.udaf.sql_name, "state": each.udaf.state}
            aggregations.append(named)
        window = self.window
        named = {"length": self._length, "hop": self._hop, "group_by": window.group_by, "of": aggregations}
        named |= {"at": window.event_time_column, "form": form}
        if window.gap_ms is not None:
            named |= {"gap": window.gap_ms, "limit": window.max_session_duration_ms}
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _is_json(each: Aggregation) -> bool:
    """Return whether an aggregate keeps its values in JSON."""
    return each.agg == "collect" or (each.agg == "count_distinct" and each.mode == "exact")


def _before(last: StateBatch) -> int:
    return -NEVER if last.previous is None else last.previous


def bounded(rows: pa.Table, start: Any, end: Any) -> pa.Table:
    """Return rows with the columns of a window that begins and ends so."""
    utc = pa.timestamp("us", "UTC")
    columns = ((END, end), (WINDOW_START, start.cast(utc)), (WINDOW_END, end.cast(utc)))
    for position, (name, column) in enumerate(columns):
        rows = rows.add_column(position, name, column)
    return rows


def frame_of(spark: Any, rows: pa.Table) -> Any:
    """Return rows as a DataFrame, in which a time without a zone has none."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return spark.createDataFrame(rows, from_arrow_schema(rows.schema, prefer_timestamp_ntz=True))


def _counted(rows: pa.Table) -> dict[int, int]:
    return {each["values"]: each["counts"] for each in rows[END].value_counts().to_pylist()}
