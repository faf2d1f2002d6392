"""Joins of two sources of a streaming pipeline, batch by batch.

A batch adds its rows to the state. Then it emits the pairs of which one row came with it, and, in an outer join, the
rows that can no longer get a partner. The state itself joins them: a database does it with an index on the key.

A row stays as long as a partner may come. Where rows without a partner are emitted, those of the other side stay until
that is decided for all rows that they may belong to: so the state alone says whether a row has had a partner.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view

from weft.columns import hint_of, hinted, in_calendar, not_utf8, python_rows, why_no_text
from weft.engine import frame_projection, inputs
from weft.engine.streaming import new_columns
from weft.engine.streaming.failing_rows import without_rows
from weft.engine.streaming.sources import open_source
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
from weft.errors import DeclarationError
from weft.pipelines.streaming.execution import WindowReport
from weft.pipelines.streaming.spec import StreamingPipeline
from weft.spark_support import outcome
from weft.spark_support.sessions import quoted, union_of
from weft.streams.declare import MAX_NEW_COLUMNS
from weft.systems.load import Columns
from weft.systems.log import RESERVED_PREFIX
from weft.systems.state_store import BATCH, CHECK, END, KEY, SIDE, TIME, Pairs, StateBatch, StateStore, UnmatchedRange

# Rows are removed so many times while one of them stays, so that the ends of rows are few.
_REMOVALS = 32
_SECOND = 1_000_000
# Keys of up to so many bytes are stored as they are.
_SHORT = 15
# By the length of a key in bytes, masks of its bits in the two numbers that hold it.
_KEPT = [np.array([(1 << 8 * min(max(n - at, 0), 8)) - 1 for n in range(_SHORT + 1)], np.uint64) for at in (0, 8)]
# Changes with what is stored of a key.
_FORM = 2
_OWN = (END, SIDE, KEY, CHECK, TIME, BATCH)
_ADDED = b"weft.added"
_log = logging.getLogger("weft.engine")


@dataclass(frozen=True)
class _Side:
    """One side of a join; times in microseconds."""

    number: int
    source: str
    keys: Columns
    event_time: str
    prefix: str
    reach: int
    """How much later than a row its last partner may be."""
    stays: int
    """How long after its time a row is needed, by the watermark."""
    emits_alone: bool
    """Whether a row without a partner is emitted."""


class Joins(Stateful):
    """The join of a pipeline under one checkpoint."""

    WORD, LATE_SINCE = "join", "its time is before the watermark"
    _CHANGES = "its sources, keys, times, prefixes or kind"

    def __init__(self, pipeline: StreamingPipeline, store: StateStore) -> None:
        assert pipeline.join is not None
        join = self.join = pipeline.join
        self._least, self._most = join.least_ms * MILLISECOND, join.most_ms * MILLISECOND
        allowed = (join.allowed_lateness_ms or 0) * MILLISECOND
        emits_left, emits_right = (join.kind in (f"{side}_outer", "full_outer") for side in ("left", "right"))
        reaches, alone = (self._most, -self._least), (emits_left, emits_right)
        self._sides = [
            # A row that may have to be emitted alone needs all its partners until then.
            _Side(number, *side, reach, reach + allowed + (max(reaches[1 - number], 0) if other else 0), own)
            for number, (side, reach, own, other) in enumerate(
                zip(join.sides, reaches, alone, alone[::-1], strict=True)
            )
        ]
        times = {each.source: each.event_time for each in self._sides}
        super().__init__(pipeline, store, join.late_data, join.allowed_lateness_ms, times)
        self._step = max(max(each.stays for each in self._sides) // _REMOVALS, _SECOND)
        self._brings_keys = {each.name: open_source(each).brings_keys for each in pipeline.sources}
        self._left_out: set[str] = set()
        """The columns that the state does not get, of which a warning was written."""
        self._stored = store.counts()
        """How many rows are stored, by their end."""
        self._found: pa.Table | None = None
        """What the last batch emits, where it was found while its rows were stored."""

    # ------------------------------------------------------------------------------------------------------- one batch

    def reduce(self, rows: Sequence[tuple[str, Any]]) -> Reduced:
        hints: dict[str, str] = {}
        parts = [self._selected(next(e for e in self._sides if e.source == name), frame, hints) for name, frame in rows]
        with outcome.explained(f"run the batch of {self.pipeline.name}"):
            return self.reduced(union_of(parts).toArrow(), hints)

    def reduced(self, table: pa.Table, hints: Mapping[str, str]) -> Reduced:
        """Return what the state gets of the rows that Spark has selected."""
        kept = pc.is_null(table[REASON])
        counts = table[REASON].drop_null().value_counts().to_pylist()
        # The time of a row that is too far in the future says nothing about the others.
        timed = table.filter(pc.or_(kept, pc.fill_null(pc.equal(table[REASON], LATE), False)))
        newest = timed.group_by(SIDE).aggregate([(TIME, "max")]).to_pylist()
        for name, hint in hints.items():
            at = table.schema.get_field_index(name)
            table = table.set_column(at, hinted(name, hint), table[name])
        rows, unheld = _storable(table.filter(kept).drop_columns([REASON]))
        rows, aside = self._limited(self._fragments(rows))
        return Reduced(
            rows,
            {self._sides[each[SIDE]].source: each[f"{TIME}_max"] for each in newest},
            {each["values"]: each["counts"] for each in counts},
            aside=[*unheld, *aside],
        )

    def add(self, number: int, reduced: Reduced, spark: Any) -> None:
        batch = self._decide(number, reduced)
        if reduced.fragments is None:
            return
        rows = self._fitted(reduced.fragments.append_column(BATCH, pa.repeat(number, len(reduced.fragments))))
        self._found = None
        self._found = self.store.append_joined(rows, batch, self._pairs(batch, rows.schema))
        self.last = batch
        for each in rows[END].value_counts().to_pylist():
            self._stored[each["values"]] = self._stored.get(each["values"], 0) + each["counts"]

    def emission(self, spark: Any) -> pa.Table | None:
        schema, last = self.store.schema(), self.last
        if schema is None or last is None:
            return None
        rows, self._found = self._found, None  # once: the process need not hold it until the next batch
        if rows is None:
            rows = self.store.pairs(self._pairs(last, schema))
        return rows if len(rows) else None

    def _pairs(self, last: StateBatch, schema: pa.Schema) -> Pairs:
        """Return which rows a batch emits."""
        left, right = (tuple(self._stored_columns(each, schema)) for each in self._sides)
        alone = {}
        for each in self._sides:
            if each.emits_alone and last.watermark is not None:
                after = None if last.previous is None else self._due(each, last.previous)
                upto = self._due(each, last.watermark)
                # The time of a row decides its end, up to the rounding of ends.
                ends = -NEVER if after is None else after + each.stays, upto + each.stays + 2 * self._step
                alone[each.number] = UnmatchedRange(after, upto, *ends)
        return Pairs(last.added, self._least, self._most, left, right, alone)

    def report(self, emitted: int) -> WindowReport | None:
        waiting = sum(self._stored.values())
        return None if self.last is None else self._reported(self.last, emitted, 0, waiting)

    def _remove_closed(self) -> None:
        assert self.last is not None
        upto = -NEVER if self.last.watermark is None else self.last.watermark
        done = [end for end in self._stored if end <= upto]
        if done:
            self.store.remove(upto)
            for end in done:
                del self._stored[end]

    def _due(self, side: _Side, watermark: int) -> int:
        """Return the latest time of a row that can get no partner after a watermark: one of that time is late."""
        return watermark - self._allowed - side.reach - 1

    # ------------------------------------------------------------------------------------------------- rows of a batch

    def _is_late(self, watermark: int) -> str:
        return f"{TIME} < {moving(watermark - self._allowed)}"

    def _selected(self, side: _Side, frame: Any, hints: dict[str, str]) -> Any:
        """Return the rows of a side with the columns that are stored. Notes in `hints` which texts are JSON, say."""
        word = "left" if side.number == 0 else "right"
        self._check_named(frame, [(f"{word}_keys", name) for name in side.keys], side.event_time)
        for name in side.keys:
            if (kind := frame.schema[name].dataType.typeName()) in NESTED:
                raise DeclarationError(
                    f"The join of {self.pipeline.name}: the column {name!r} is of type {kind}, which is no key.",
                    hint=f"Make a text of it by transform_sql: to_json({name}) AS {name}.",
                )
        columns = []
        for field in frame_projection.schema_of(frame):
            if field.name.startswith(RESERVED_PREFIX):
                continue
            column, hint, name = quoted(field.name), hint_of(field), side.prefix + field.name
            if frame.schema[field.name].dataType.typeName() in NESTED:
                column, hint = f"to_json({column})", "json"
            if hint is not None:
                hints[name] = hint
            columns.append(f"{column} AS {quoted(name)}")
        key = _key([_text(quoted(name), frame.schema[name].dataType) for name in side.keys])
        number = f"CAST({side.number} AS SMALLINT) AS {SIDE}"
        return self._dated(frame, side.source).selectExpr(REASON, TIME, number, f"{key} AS {KEY}", *columns)

    def _fragments(self, rows: pa.Table) -> pa.Table:
        """Return the rows that the state gets, each with when it can be removed."""
        left, right = (each.stays for each in self._sides)
        stays = pc.if_else(pc.equal(rows[SIDE], 0), left, right)
        # A row is removed where its end is up to the watermark, and needed up to then.
        ends = pc.add(pc.add(rows[TIME], stays), self._step)
        rows = rows.add_column(0, END, pc.multiply(pc.divide(ends, self._step), self._step))
        key, check = _numbers(rows[KEY])
        rows = rows.set_column(rows.schema.get_field_index(KEY), KEY, key).append_column(CHECK, check)
        # Without a key a row has no partner.
        is_needed = pc.is_valid(rows[KEY])
        for each in self._sides:
            if each.emits_alone:
                is_needed = pc.or_(is_needed, pc.equal(rows[SIDE], each.number))
        return rows.filter(is_needed)

    def _limited(self, rows: pa.Table) -> tuple[pa.Table, list[tuple[dict[str, Any], str]]]:
        """Return rows without columns that the state cannot have or may not get any more, and those that it cannot hold
        with the reason of each. As with the table of a target, one message must not widen it for good, or stop all."""
        known = self.store.schema()
        stored = [] if known is None else list(known)
        parts, aside, most = [], [], self.pipeline.max_new_columns
        for side in self._sides:
            part = rows.filter(pc.equal(rows[SIDE], side.number))
            own = [name for name in part.column_names if name in _OWN or name.startswith(side.prefix)]
            part = part.select(own)
            if not self._brings_keys[side.source]:
                parts.append(part)
                continue
            names = {each.name.lower() for each in stored}
            new = [name for name in own if name.lower() not in names and name not in _OWN]
            is_first = not any(each.name.startswith(side.prefix) for each in stored)
            refused = {name: why for name in new if (why := self.store.refuses_name(name)) is not None}

            def can_hold(more: Collection[str], part: pa.Table = part) -> bool:
                return self.store.can_hold([*stored, *(part.schema.field(name) for name in more)])

            limits = new_columns.ColumnLimits(
                refused, max(most - self._added(known)[side.number], 0), max(most, MAX_NEW_COLUMNS), is_first, can_hold
            )
            fitted = new_columns.fitted(inputs.Memory(part.schema, part.to_batches()), new, limits)
            assert isinstance(fitted.rows, inputs.Memory)
            parts.append(pa.Table.from_batches(fitted.rows.batches, fitted.rows.schema))
            aside += fitted.aside
            if unnamed := sorted({*fitted.left_out} - self._left_out):
                self._left_out.update(unnamed)
                _log.warning(
                    "The state of %s has got as many columns as max_new_columns=%s allows, or as it can have. These "
                    "are left out: %s%s",
                    self.pipeline.name,
                    most,
                    ", ".join(map(repr, unnamed[:20])),
                    " …" if len(unnamed) > 20 else "",
                )
        return pa.concat_tables(parts, promote_options="default"), aside

    def _fitted(self, rows: pa.Table) -> pa.Table:
        """Return rows with the columns and types that are stored; those that are new are added to the state."""
        known = self.store.schema()
        schema = known or self._first_schema(rows.schema)
        # Most databases take `Id` and `id` for one column.
        added, spelled = self._added(known), {name.lower(): name for name in schema.names}
        rows = rows.rename_columns([spelled.get(name.lower(), name) for name in rows.column_names])
        for field in rows.schema:
            at = schema.get_field_index(field.name)
            if at < 0:
                side = next(each for each in self._sides if field.name.startswith(each.prefix))
                added[side.number] += any(name.startswith(side.prefix) for name in known.names) if known else 0
                schema = schema.append(_stored_field(field))
            elif is_void(schema.field(at)) and not pa.types.is_null(field.type):
                schema = schema.set(at, _stored_field(field))
            elif (wider := wider_type(schema.field(at).type, field.type)) is not None:
                schema = schema.set(at, _stored_field(pa.field(field.name, wider)))
        if known is not None and not schema.equals(known, check_metadata=True):
            schema = schema.with_metadata({**(schema.metadata or {}), _ADDED: json.dumps(added).encode()})
            self._retype(schema)
        for field in schema:
            if field.name not in rows.column_names:
                rows = rows.append_column(field, pa.nulls(len(rows), field.type))
        return self._cast(rows, schema)

    def _first_schema(self, rows: pa.Schema) -> pa.Schema:
        schema = super()._first_schema(rows)
        return pa.schema(map(_stored_field, rows), metadata=schema.metadata)

    def _added(self, known: pa.Schema | None) -> list[int]:
        """Return how many columns each side has got after its first rows."""
        metadata = {} if known is None else known.metadata or {}
        added: list[int] = json.loads(metadata.get(_ADDED, b"[0, 0]"))
        return added

    def _stored_columns(self, side: _Side, schema: pa.Schema) -> list[str]:
        return [
            each.name
            for each in schema
            if each.name not in _OWN and each.name.startswith(side.prefix) and not is_void(each)
        ]

    def _fingerprints(self) -> list[str]:
        named = {name: value for name, value in asdict(self.join).items() if name != "late_data"} | {"form": _FORM}
        return [hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()]


def _stored_field(field: pa.Field) -> pa.Field:
    """Return the column of the state for a column of one side: rows of the other side have null there, also where this
    side never has."""
    return stored_field(field).with_nullable(True)


def _storable(rows: pa.Table) -> tuple[pa.Table, list[tuple[dict[str, Any], str]]]:
    """Return rows without those that have a time outside of the years 1 to 9999, which no database gives back, or a
    text that is not UTF-8."""
    is_inside = pa.chunked_array([pa.repeat(pa.scalar(True), len(rows))])
    for column in rows.columns:
        if (fits := in_calendar(column)) is not None:
            is_inside = pc.and_(is_inside, fits)
    reasons = {number: why_no_text(name) for number, name in not_utf8(rows).items()}
    if not reasons and pc.all(is_inside, min_count=0).as_py():
        return rows, []
    for number in pc.indices_nonzero(pc.invert(is_inside)).to_pylist():
        reasons.setdefault(number, "It has a time outside of the years 1 to 9999.")
    named = [name for name in rows.column_names if name not in _OWN]
    unheld = python_rows(rows.select(named).take(pa.array(reasons, pa.int64())))
    return without_rows(rows, reasons), list(zip(unheld, reasons.values(), strict=True))


def _key(texts: Sequence[str]) -> str:
    """Return the keys of a row as bytes, in SQL: a short text as it is, of others a digest; null where one is null."""
    text = texts[0]
    if len(texts) > 1:
        is_null = " OR ".join(f"{each} IS NULL" for each in texts)
        text = f"CASE WHEN NOT ({is_null}) THEN to_json(array({', '.join(texts)})) END"
    # SHA-256: nobody can make two keys that are taken for one. It takes Spark longer than all else of a row.
    digest = f"unhex(sha2({text}, 256))"
    return f"CASE WHEN octet_length({text}) <= {_SHORT} THEN CAST({text} AS BINARY) ELSE {digest} END"


def _numbers(keys: pa.ChunkedArray) -> list[pa.Array]:
    """Return 128 bits of keys as two numbers each; nulls of nulls. They are all of a short key and its length, or 120
    bits of a digest: no two keys have the same."""
    if not len(keys):
        return [pa.array([], pa.int64())] * 2
    whole = keys.combine_chunks()
    is_null = pc.is_null(whole).to_numpy(zero_copy_only=False)
    texts = pc.fill_null(whole, b"")
    starts = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    sizes = np.diff(starts)
    letters = np.frombuffer(texts.buffers()[2] or b"\0", np.uint8)
    letters = np.concatenate([letters, np.zeros(_SHORT + 1, np.uint8)])
    # Sixteen bytes from where each key begins, without those of the next ones.
    first, second = sliding_window_view(letters, _SHORT + 1)[starts[:-1]].view("<u8").T
    kept = np.minimum(sizes, _SHORT)
    first, second = first & _KEPT[0][kept], second & _KEPT[1][kept]
    second |= np.where(sizes <= _SHORT, sizes, 255).astype(np.uint64) << np.uint64(56)
    return [pa.array(each.view(np.int64), mask=is_null) for each in (_spread(first, second), second)]


def _spread(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return numbers that differ in all their bits, as an index and the search in memory need it. Each is `first` by
    another name, as long as `second` is the same."""
    return _mixed(first ^ _mixed(second))


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return another number for each: the last step of SplitMix64, which can be taken back."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    mixed: np.ndarray = numbers ^ (numbers >> np.uint64(31))
    return mixed


def _text(column: str, kind: Any) -> str:
    """Return a value as a text, in SQL: the same for equal numbers of different types, and for a text of their digits.
    Bytes and times equal their own kind alone."""
    from pyspark.sql.types import BinaryType, DecimalType, DoubleType, FloatType, TimestampNTZType, TimestampType

    def digits(number: str) -> str:
        return f"regexp_replace(CAST({number} AS STRING), '[.]?0+$', '')"

    text = f"CAST({column} AS STRING)"
    if isinstance(kind, FloatType | DoubleType):
        # Through a decimal, where one can hold the number: the text of a float may have an exponent.
        decimal = f"try_cast({column} AS DECIMAL(38,18))"
        return (
            f"CASE WHEN abs({column}) < 9e18 AND {column} = floor({column}) "
            f"THEN CAST(CAST({column} AS BIGINT) AS STRING) "
            f"WHEN CAST({decimal} AS DOUBLE) = {column} THEN {digits(decimal)} ELSE {text} END"
        )
    if isinstance(kind, DecimalType) and kind.scale > 0:
        return digits(column)
    if isinstance(kind, BinaryType):
        return f"concat('bytes ', hex({column}))"
    if isinstance(kind, TimestampType | TimestampNTZType):
        return f"concat('time ', unix_micros(CAST({column} AS TIMESTAMP)))"
    return text
