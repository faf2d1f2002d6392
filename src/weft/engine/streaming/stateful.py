"""What windows and joins of a streaming pipeline have in common: rows that wait in a state, and the watermark.

A batch adds what it makes of its rows to the state, together with the watermark that it decides on. Then what this
watermark completes is read from the state and written. After a crash, a batch that the state has is not computed again:
what it emits is read again, the same. Rows that are no longer needed are removed by the batch after it, when every
target has what it emitted.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyarrow as pa

from weft.columns import canonical_schema, python_rows
from weft.engine.streaming import dead_letters
from weft.engine.streaming.row_origin import ORIGIN
from weft.engine.streaming.transform import Probe, TypedRows
from weft.errors import DeclarationError, LoadRefusedError, did_you_mean
from weft.pipelines.streaming.execution import WindowReport
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.pipelines.streaming.windows import LateData, Watermark, keeps_column
from weft.spark_support import outcome
from weft.spark_support.sessions import quoted
from weft.systems.dead_letter_store import DeadLetter
from weft.systems.state_store import BATCH, CODED, TIME, StateBatch, StateStore, overtaken
from weft.systems.stream_source import EVENT_TIME, FrameRows, counted

REASON = "_weft_reason"
MILLISECOND = 1000
LATE, _FUTURE, _UNDATED, _ANCIENT = "late", "future", "undated", "ancient"
_NO_NUMBER, _OUTSIDE, _NO_TEXT = "no number", "outside", "no text"
_FINGERPRINT, _VOID = b"weft.window", {b"weft.void": b"1"}
_BAD = (_UNDATED, _FUTURE, _ANCIENT, _NO_NUMBER, _OUTSIDE, _NO_TEXT)
# The first and last day of the years 1 to 9999, counted from 1970, and the microseconds of a day.
_FIRST_DAY, _LAST_DAY, _DAY = -719_162, 2_932_896, 86_400_000_000
# The second day of the year 1, in microseconds: databases hold no time before that year.
_EARLIEST = (_FIRST_DAY + 1) * _DAY
_OF_TIME = f"unix_micros(CAST({{}} AS TIMESTAMP)) NOT BETWEEN {_FIRST_DAY * _DAY} AND {(_LAST_DAY + 1) * _DAY - 1}"
_CALENDAR = {
    "date": f"unix_date({{}}) NOT BETWEEN {_FIRST_DAY} AND {_LAST_DAY}",
    "timestamp": _OF_TIME,
    "timestamp_ntz": _OF_TIME,
}
"""By type, the condition that a value is outside of the years 1 to 9999, which no database gives back."""
PARTITION = "\x1f"
"""Between the names of a source and of its partition, in neither of which it can be."""
_WHY = {
    _ANCIENT: "has a time before the year 1",
    LATE: "is late: {late}",
    _FUTURE: "has a time that is further in the future than max_future_ms allows",
    _UNDATED: "has no event time",
    _NO_NUMBER: "has a text that is no number in {numbers}",
    _OUTSIDE: "has a time outside of the years 1 to 9999",
    _NO_TEXT: "has a text that is not UTF-8 in {texts}",
}
NEVER = (1 << 63) - 1
_WHOLE = pa.decimal128(19, 0)
"""Holds every 64-bit integer."""
NESTED = ("struct", "array", "map", "variant")


@dataclass(frozen=True)
class Reduced:
    """What a batch makes of its rows."""

    fragments: pa.Table | None
    """What the state gets; `None` where no batch has had rows yet."""
    newest: Mapping[str, int]
    """By source, the greatest time of its rows."""
    left_out: Mapping[str, int]
    """By reason, how many rows the state does not get."""
    rows: int = 0
    """How many rows the batch has read."""
    aside: Sequence[tuple[dict[str, Any], str]] = ()
    """The rows that the state cannot hold, each with the reason."""


class Stateful(ABC):
    """A step of a pipeline that keeps rows between batches, under one checkpoint."""

    WORD: ClassVar[str]
    """What it is, in errors."""
    LATE_SINCE: ClassVar[str]
    """Why a row is late, in errors."""
    _CHANGES: ClassVar[str]
    """What of it cannot be changed while it has a state."""
    _length = 0
    """How long before a row its window may begin, in microseconds."""
    _numbers: Sequence[str] = ()
    """The columns that must be numbers."""
    _kept: Sequence[str] = ()
    """The columns whose values are kept as they are."""
    _texts: Sequence[str] = ()
    """The columns of which rows with a text that is not UTF-8 are left out."""
    probe: Probe | None = None
    """What fails for a row that `reduce` fails for; `None` where no row can make it fail."""

    def __init__(
        self,
        pipeline: StreamingPipeline,
        store: StateStore,
        late_data: LateData,
        allowed_lateness_ms: int | None,
        event_times: Mapping[str, str],
    ) -> None:
        """`event_times`: by source, the column with the time of its rows."""
        self.pipeline, self.store = pipeline, store
        self._watermark = pipeline.watermark or Watermark()
        self._late_data, self._event_times = late_data, event_times
        self._allowed = (allowed_lateness_ms or 0) * MILLISECOND
        self.last = store.last()
        self._check_unchanged()
        # A source that was not heard of counts as heard of now: after a pause of the pipeline all are behind.
        known = self.last.sources if self.last is not None else {}
        self._offsets, self._latest = "", NEVER
        """What the current batch reads, and the latest time that a row may have."""
        self._heard = {name: time.monotonic() for name in (*known, *(each.name for each in pipeline.sources))}

    def close(self) -> None:
        self.store.close()

    # ------------------------------------------------------------------------------------------------------- one batch

    def begin(self, number: int, offsets: str = "", begun_ms: int | None = None) -> bool:
        """Remove what nobody needs after the batch before; return whether the state has this batch already. `offsets`:
        a digest of what it is to read. `begun_ms`: when it was begun first, so that another try decides the same."""
        self._offsets = offsets
        now = time.time() * 1000 if begun_ms is None else begun_ms
        self._latest = int((now + self._watermark.max_future_ms) * MILLISECOND)
        if self.last is None:
            return False
        if self.last.number == number and offsets in ("", self.last.offsets):
            return True
        if self.last.number != number - 1:
            # The checkpoint, or the state, was restored from a backup: rows of a batch would be in no window.
            raise overtaken(StateBatch(number, None, None))
        self._remove_closed()
        return False

    def tick(self, spark: Any) -> bool:
        """Move the watermark without rows, where a source that held it has become idle since the last batch; return
        whether it did. Every target must have what that batch emitted."""
        if self.last is None or len(self._heard) < 2:
            return False
        nothing = self.nothing()
        if self._decide(self.last.number, nothing).watermark == self.last.watermark:
            return False
        self._remove_closed()
        self.add(self.last.number, nothing, spark)
        return True

    @abstractmethod
    def reduce(self, rows: Sequence[tuple[str, Any]]) -> Reduced:
        """Return what the state gets of rows, which are a DataFrame for each source."""

    @abstractmethod
    def add(self, number: int, reduced: Reduced, spark: Any) -> None:
        """Store what a batch made of its rows, and the watermark that follows from them."""

    @abstractmethod
    def emission(self, spark: Any) -> pa.Table | None:
        """Return the rows that the last batch in the state emits; `None` where there are none."""

    def removed(self, spark: Any) -> list[dict[str, Any]]:
        """Return the keys of rows that the last batch removes from the targets."""
        return []

    def unfit(self) -> list[DeadLetter]:
        """Return what the emission leaves out, since a column cannot hold its value, as dead letters."""
        return []

    @abstractmethod
    def report(self, emitted: int) -> WindowReport | None:
        """Return how the state is after a batch that emitted so many rows; `None` before the first rows."""

    @abstractmethod
    def _remove_closed(self) -> None:
        """Remove the rows that the last batch emitted, or that nothing waits for."""

    @abstractmethod
    def _is_late(self, watermark: int) -> str:
        """Return the condition that a row is late, in SQL."""

    @abstractmethod
    def _fingerprints(self) -> list[str]:
        """Return what the stored rows depend on; after it that of older states which are the same."""

    def nothing(self) -> Reduced:
        """Return what a batch without rows makes of them."""
        schema = self.store.schema()
        return Reduced(None if schema is None else schema.remove(schema.get_field_index(BATCH)).empty_table(), {}, {})

    # ------------------------------------------------------------------------------------------------- rows of a batch

    def _dated(self, frame: Any, source: str) -> Any:
        """Return rows of a source with their time in microseconds, and why one of them is left out."""
        reasons = {
            f"{TIME} IS NULL": _UNDATED,
            f"{TIME} > {moving(self._latest)}": _FUTURE,
            f"{TIME} < {_EARLIEST + self._length}": _ANCIENT,
        }
        for name in self._kept:
            if (moment := _CALENDAR.get(frame.schema[name].dataType.typeName())) is not None:
                reasons[moment.format(quoted(name))] = _OUTSIDE
        for name in self._texts:
            reasons[f"NOT is_valid_utf8({quoted(name)})"] = _NO_TEXT
        for name in self._numbers:
            if frame.schema[name].dataType.typeName() == "string":
                reasons[f"{quoted(name)} IS NOT NULL AND try_cast({quoted(name)} AS DOUBLE) IS NULL"] = _NO_NUMBER
        if self.last is not None and self.last.watermark is not None:
            reasons[self._is_late(self.last.watermark)] = LATE
        cases = " ".join(f"WHEN {condition} THEN '{reason}'" for condition, reason in reasons.items())
        # SQL text: each call of a PySpark function is a round trip to the JVM, and many take longer than a small batch.
        moment = f"unix_micros(CAST({quoted(self._event_times[source])} AS TIMESTAMP)) AS {TIME}"
        return frame.selectExpr("*", moment, f"CASE {cases} END AS {REASON}")

    def by_partition(self, reduced: Reduced, rows: Sequence[TypedRows]) -> Reduced:
        """Add how far each partition has come, for sources that have partitions and whose own time is
        that of the rows."""
        keeps_time = keeps_column(self.pipeline.transform_sql, EVENT_TIME)
        newest = dict(reduced.newest)
        for each in rows:
            is_own = keeps_time and self._event_times[each.source] == EVENT_TIME
            # A message that is too far in the future says nothing about how far its partition has come.
            partitions = each.newest_until(self._latest) if is_own and isinstance(each, FrameRows) else {}
            if partitions:
                newest.pop(each.source, None)
                newest |= {f"{each.source}{PARTITION}{name}": moment for name, moment in partitions.items()}
        return replace(reduced, newest=newest)

    def rejects(self, reduced: Reduced) -> bool:
        """Return whether rows that are left out become dead letters. Raise where they have to, and cannot."""
        if self.pipeline.dead_letters is not None:
            return not {*self._rejected_reasons()}.isdisjoint(reduced.left_out)
        if self.pipeline.transform_on_error == "drop":
            return False  # see `dropped`
        for reason in _BAD:
            if count := reduced.left_out.get(reason):
                raise LoadRefusedError(
                    f"The {self.WORD} of {self.pipeline.name} takes no row that {self._why(reason)}: "
                    f"{counted(count, 'rows')}.",
                    hint='Give such rows a place: dead_letter_stream="…" (or dead_letter_table, dead_letter_path). Or '
                    "leave them out by transform_sql.",
                )
        return False

    def dropped(self, reduced: Reduced) -> int:
        """Return how many bad rows are left out for good, since there is no place for them."""
        return 0 if self.pipeline.dead_letters is not None else sum(reduced.left_out.get(each, 0) for each in _BAD)

    def rejected(self, source: str, frame: Any) -> list[DeadLetter]:
        """Return the rows of a source that are left out, as dead letters."""
        from pyspark.sql import functions as F

        timed = self._dated(frame, source)
        with outcome.explained(f"run the batch of {self.pipeline.name}"):
            outside = timed.where(F.col(REASON).isin(self._rejected_reasons())).drop(TIME).toArrow()
        unknown, letters = json.dumps({"source": source, "offset": None}), []
        for row in python_rows(outside):
            why = self._why(row.pop(REASON))
            letters.append(dead_letters.letter_of({ORIGIN: unknown, **row}, f"The row {why}."))
        return letters

    def _why(self, reason: str) -> str:
        named = {"numbers": " or ".join(self._numbers), "texts": " or ".join(self._texts)}
        return _WHY[reason].format(late=self.LATE_SINCE, **named)

    def _rejected_reasons(self) -> list[str]:
        return [*_BAD, *([LATE] if self._late_data == "dlq" else [])]

    # ------------------------------------------------------------------------------------------------------- decisions

    def _decide(self, number: int, reduced: Reduced) -> StateBatch:
        """Return the watermark after a batch, with what the state keeps about the batch. The source that is furthest
        behind decides, unless it is idle; without any time of an active source the watermark stays."""
        last = self.last
        before = None if last is None else last.watermark
        sources = dict(last.sources) if last is not None else {}
        now = time.monotonic()
        for name, newest in reduced.newest.items():
            sources[name] = max(newest, sources.get(name, newest))
            self._heard[name] = now
        for each in self.pipeline.sources:
            if any(name.startswith(f"{each.name}{PARTITION}") for name in sources):
                self._heard.pop(each.name, None)  # its partitions count by themselves
        idle = self._watermark.source_idleness_ms / 1000
        active = [name for name, heard in self._heard.items() if now - heard < idle or name in reduced.newest]
        watermark = before
        if active and all(name in sources for name in active):
            reached = min(sources[name] for name in active) - self._watermark.lateness_ms * MILLISECOND
            watermark = reached if before is None else max(before, reached)
        is_tick = last is not None and last.number == number
        return StateBatch(
            number,
            watermark,
            before,
            sources,
            late=reduced.left_out.get(LATE, 0),
            removed=None if before is None else self._gone(),
            offsets=self._offsets if last is None or not is_tick else last.offsets,
            rows=reduced.rows,
            ticks=(0 if last is None else last.ticks) + is_tick,
            is_tick=is_tick,
        )

    def _gone(self) -> int:
        """Return up to which end windows can no longer get rows."""
        if self.last is None or self.last.watermark is None:
            return -NEVER
        removed = -NEVER if self.last.removed is None else self.last.removed
        return max(self.last.watermark - self._allowed, removed)

    def _reported(self, last: StateBatch, emitted: int, opened: int, groups: int) -> WindowReport:
        lateness = self._watermark.lateness_ms * MILLISECOND
        return WindowReport(
            emitted=emitted,
            open=opened,
            groups=groups,
            late=last.late,
            policy=self._late_data,
            watermark=last.watermark,
            sources={name.replace(PARTITION, " "): newest - lateness for name, newest in last.sources.items()},
        )

    # ----------------------------------------------------------------------------------------------------- stored rows

    def _first_schema(self, rows: pa.Schema) -> pa.Schema:
        """Return the columns of the state, of those of its first rows."""
        return pa.schema(map(stored_field, rows)).with_metadata({_FINGERPRINT: self._fingerprints()[0].encode()})

    def _cast(self, rows: pa.Table, schema: pa.Schema) -> pa.Table:
        """Return rows with the types of the state; raise where that would change a value."""
        columns = []
        for each in schema:
            column = rows[each.name]
            if not _is_alike(column.type, each.type):
                raise self._mismatch(f"{each.name} was {each.type}, and is {column.type}")
            try:
                if pa.types.is_integer(column.type) and pa.types.is_decimal(each.type):
                    column = column.cast(_WHOLE)  # by their values: from a long Arrow refuses a type of fewer digits
                columns.append(column.cast(each.type))
            except pa.ArrowException as error:
                raise self._mismatch(f"{each.name}: {error}") from None
        return pa.table(columns, schema=schema)

    def _retype(self, schema: pa.Schema) -> None:
        """Give the columns of the state these types; raise where a stored value does not fit."""
        try:
            self.store.retype(schema)
        except pa.ArrowException as error:
            raise self._mismatch(str(error)) from None

    def _mismatch(self, what: str) -> LoadRefusedError:
        return LoadRefusedError(
            f"The {self.WORD} of {self.pipeline.name}: a column no longer has the type that its state has: {what}",
            hint="CAST it in transform_sql to the type that it had.",
        )

    def _check_named(self, frame: Any, named: Sequence[tuple[str, str]], event_time: str) -> None:
        """Raise for missing columns, each with the option that names it, and for a time column that holds no times."""
        from pyspark.sql.types import TimestampNTZType, TimestampType

        known = frame.columns
        for option, name in (("event_time_column", event_time), *named):
            if name not in known:
                hint = did_you_mean(name, known, f"Columns: {', '.join(known[:30])}.")
                raise DeclarationError(
                    f"The {self.WORD} of {self.pipeline.name}: the rows have no column {name!r} ({option}).", hint=hint
                )
        of_time = frame.schema[event_time].dataType
        if not isinstance(of_time, TimestampType | TimestampNTZType):
            raise DeclarationError(
                f"The {self.WORD} of {self.pipeline.name} needs a time, and the column {event_time!r} is "
                f"{of_time.simpleString()}.",
                hint=f"Make one by transform_sql: CAST({event_time} AS TIMESTAMP) AS {event_time}.",
            )

    def _check_unchanged(self) -> None:
        schema = self.store.schema()
        if schema is None or (schema.metadata or {}).get(_FINGERPRINT, b"").decode() in self._fingerprints():
            return
        raise DeclarationError(
            f"The {self.WORD} of {self.pipeline.name} is another one than that of its state: {self._CHANGES} were "
            "changed.",
            hint=f"To begin again: weft checkpoints reset {self.pipeline.name}. Or give the pipeline another name.",
        )


def moving(number: int) -> str:
    """Return SQL for a number that changes with each batch. A plain number is part of the code that Spark compiles, so
    Spark would compile each batch again; an element of an array, which the row chooses, is not part of it."""
    return f"array({number}L, {number}L)[IF({TIME} IS NULL, 1, 0)]"


def stored_field(field: pa.Field) -> pa.Field:
    """Return the column of the state for a column of a batch. One of nulls alone gets its type with its first value;
    texts and floating-point numbers are coded, since a database may refuse some of them."""
    if pa.types.is_null(field.type):
        return pa.field(field.name, pa.string(), metadata=_VOID)
    field = canonical_schema(pa.schema([field]))[0]
    is_coded = pa.types.is_string(field.type) or pa.types.is_floating(field.type)
    return field.with_metadata({**(field.metadata or {}), **CODED}) if is_coded else field


def wider_type(stored: pa.DataType, new: pa.DataType) -> pa.DataType | None:
    """Return the type that holds numbers of both types; `None` where the stored one does, or one is no number."""
    types = pa.types
    if types.is_integer(stored) and types.is_integer(new):
        return new if new.bit_width > stored.bit_width else None
    if types.is_integer(stored) and types.is_decimal(new):
        return pa.decimal128(38, new.scale) if new.scale < 20 else None
    if types.is_floating(stored) and types.is_floating(new):
        return new if new.bit_width > stored.bit_width else None
    if types.is_decimal(stored) and types.is_integer(new):
        new = _WHOLE
    if types.is_decimal(stored) and types.is_decimal(new):
        scale, whole = max(stored.scale, new.scale), max(stored.precision - stored.scale, new.precision - new.scale)
        wider = pa.decimal128(min(whole + scale, 38), scale)
        return wider if wider != stored else None
    is_exact = types.is_integer(stored) or types.is_decimal(stored)
    return pa.float64() if is_exact and types.is_floating(new) else None


def _is_alike(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether values of one type can be of another one without being changed, as far as the types say."""
    types = pa.types

    def is_number(kind: pa.DataType) -> bool:
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))

    return bool(types.is_null(one) or one == other or one.id == other.id or (is_number(one) and is_number(other)))


def is_void(field: pa.Field) -> bool:
    """Return whether a column of the state has had no value yet."""
    return bool(field.metadata == _VOID)
