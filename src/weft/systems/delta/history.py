"""Changes of another table's rows as versions of a Delta table, by the order and the times of the source: one MERGE.

What the statements of `systems.sql.cdc_history` do in a database, as one DataFrame. The deletes and truncates that came
lately are in the files of the gate (`mirror.Notes`): each one, because it ends whatever comes late and began before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from weft.spark_support.lazy import F
from weft.spark_support.sessions import quoted
from weft.systems.changes import AT, DELETE, END, KEY, OP, ORDER, POSITION, READ, TS, Place, by_kind, instant_of
from weft.systems.delta.changes import NEVER, key_name, key_names, keys_as, row_hash, same_key
from weft.systems.delta.mirror import Notes
from weft.systems.frame_checks import column
from weft.systems.load import IS_CURRENT, ROW_HASH, VALID_FROM, VALID_TO, Load

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

INSERTED, UPDATED, ENDED = "inserted", "updated", "ended"
_SINCE, _UNTIL, _WAS, _PLACE, _KIND, _NUMBER, _HASH, _ROW = (
    f"_weft_line_{name}" for name in ("since", "until", "was", "place", "kind", "number", "hash", "row")
)
_SRC, _AT, _BEFORE, _IS_NEW, _COVER, _TO = (
    f"_weft_line_{name}" for name in ("src", "at", "before", "is_new", "cover", "to")
)
_STORED, _STAGED = 0, 1
_ENDS = pa.schema([(KEY, pa.string()), (POSITION, pa.string()), (TS, pa.int64()), (END, pa.string())])


@dataclass(frozen=True)
class Ends:
    """The deletes and truncates of a table, without those that are too old to be asked for."""

    deletes: pa.Table
    """The deletes of earlier batches: key, position, time, and all three as one text."""
    truncates: tuple[Place, ...]
    """The truncates of earlier batches and of this one, in their order."""

    @classmethod
    def noted(cls, notes: Notes, frame: DataFrame, load: Load) -> Ends:
        """Note the deletes and truncates of the batch; return the deletes of earlier batches and all truncates."""
        changes = load.changes
        assert changes is not None
        noted, before = notes.before()
        deletes = _ENDS.empty_table() if noted is None else noted
        truncates = [(place, ts) for place, ts in [*(before or ()), *changes.truncates] if ts is not None]
        oldest = changes.oldest_ms(load.moment)
        new = frame.where(column(END).isNotNull()).select(*map(column, _ENDS.names)).toArrow().cast(_ENDS)
        all_of_them = pa.concat_tables(
            [deletes, new.filter(pc.invert(pc.is_in(new[END], deletes[END].combine_chunks())))]
        )
        kept = all_of_them.filter(pc.greater_equal(all_of_them[TS], oldest))
        notes.write(kept, [each for each in dict.fromkeys(truncates) if each[1] >= oldest])
        return cls(deletes, tuple(dict.fromkeys(truncates)))


def new_changes(frame: DataFrame, table: DataFrame, ends: Ends, load: Load) -> DataFrame:
    """Return the changes that the history does not have yet."""
    names = table_names(frame, load)
    compared = load.compared(names)
    staged = frame.withColumn(_HASH, _staged_hash(frame, compared)).alias("s")
    stored = table.select(
        *keys_as(load),
        F.col(VALID_FROM).alias(_SINCE),
        column(POSITION).alias(_PLACE),
        row_hash(table, compared).alias(_BEFORE),
    ).alias("t")
    same = [
        F.col(f"s.{quoted(key)}").eqNullSafe(F.col(f"t.{key_name(number)}")) for number, key in enumerate(load.keys)
    ]
    # A table that was made before positions were kept has none of its older versions.
    unplaced = column(POSITION).isNull() | F.col(_PLACE).isNull()
    is_known = (column(AT) == F.col(_SINCE)) & (
        (column(POSITION) == F.col(_PLACE)) | (unplaced & (F.col(_HASH) == F.col(_BEFORE)))
    )
    new = staged.join(stored, [*same, is_known], "left_anti")
    if ends.deletes.num_rows:
        known = frame.sparkSession.createDataFrame(ends.deletes.select([END]))
        new = new.join(F.broadcast(known), END, "left_anti")
    return new


def late(new: pa.Table, load: Load) -> tuple[int, ...]:
    """Return how many creates, updates and deletes of the batch the history had before. `new`: ORDER of the others."""
    assert load.changes is not None
    counted = load.changes.counted
    assert counted is not None
    is_new = pc.is_in(pa.array(range(counted.num_rows), pa.int64()), new[ORDER].combine_chunks().cast(pa.int64()))
    return by_kind(counted[OP].filter(pc.invert(is_new)).to_pylist())


def moved(new: DataFrame, frame: DataFrame, table: DataFrame, ends: Ends, load: Load) -> DataFrame:
    """Return the versions to add, and those that end otherwise than before."""
    stored = _cleared(table, frame, load)
    keys = key_names(load)
    touched = frame.select(*keys_as(load), column(KEY)).distinct().alias("k")
    row_type = F.lit(None).cast(new.select(_row(frame, load)).schema[_ROW].dataType)
    versions = stored.select(*stored.columns, F.lit(_STORED).alias(_SRC), *_none_of(row_type))
    of_batch = versions.alias("t").join(touched, same_key("t", "k", load), "left_semi")
    staged = new.select(
        *keys_as(load),
        column(AT).alias(_SINCE),
        *(F.lit(None).cast("timestamp").alias(name) for name in (_UNTIL, _WAS)),
        column(POSITION).alias(_PLACE),
        F.col(_HASH),
        F.lit(_STAGED).alias(_SRC),
        column(OP).cast("int").alias(_KIND),
        column(ORDER).cast("bigint").alias(_NUMBER),
        _row(frame, load),
    )
    line = of_batch.unionByName(staged)
    for each in _ended(touched, ends, frame):
        line = line.unionByName(
            each.select(
                *keys,
                F.col(_SINCE),
                *(F.lit(None).cast("timestamp").alias(name) for name in (_UNTIL, _WAS)),
                F.col(_PLACE),
                F.lit("").alias(_HASH),
                F.lit(_STAGED).alias(_SRC),
                F.lit(DELETE).alias(_KIND),
                F.lit(-1).cast("bigint").alias(_NUMBER),
                row_type.alias(_ROW),
            )
        )
    chain = _chained(line, load)
    is_version = (F.col(_SRC) == _STAGED) & (F.col(_HASH) != "")
    is_moved = (F.col(_SRC) == _STORED) & ~F.col(_TO).eqNullSafe(F.col(_WAS))
    changed = chain.where(is_version | is_moved)
    assert load.changes is not None
    if load.changes.truncates:
        # Versions of keys that the batch does not name.
        others = versions.alias("t").join(touched, same_key("t", "k", load), "left_anti")
        others = others.where(~F.col(_UNTIL).eqNullSafe(F.col(_WAS)))
        changed = changed.unionByName(others.withColumns({_TO: F.col(_UNTIL), _IS_NEW: F.lit(_STORED)}))
    return changed


def counts() -> list[Column]:
    """Return the aggregates that count what `moved` has: new keys, new versions, and current ones that ended."""
    is_new = (F.col(_SRC) == _STAGED) & (F.col(_IS_NEW) == _STAGED)
    is_next = (F.col(_SRC) == _STAGED) & (F.col(_IS_NEW) != _STAGED)
    is_ended = (F.col(_SRC) == _STORED) & F.col(_WAS).isNull()
    return [
        F.count_if(is_new).alias(INSERTED),
        F.count_if(is_next).alias(UPDATED),
        F.count_if(is_ended).alias(ENDED),
    ]


def statement(table: str, view: str, names: Sequence[str], load: Load) -> str:
    """Return the MERGE of what `moved` has."""
    same = [f"t.{quoted(key)} <=> s.{key_name(number)}" for number, key in enumerate(load.keys)]
    on = [
        f"s.{_SRC} = {_STORED}",
        *same,
        f"t.{VALID_FROM} = s.{_SINCE}",
        f"t.{quoted(POSITION)} <=> s.{_PLACE}",
        f"t.{VALID_TO} <=> s.{_WAS}",
    ]
    listed = ", ".join([*map(quoted, names), VALID_FROM, VALID_TO, IS_CURRENT, ROW_HASH, quoted(POSITION)])
    values = ", ".join(
        [
            *(f"s.{_ROW}.{quoted(name)}" for name in names),
            *(f"s.{name}" for name in (_SINCE, _TO)),
            f"s.{_TO} IS NULL",
            *(f"s.{name}" for name in (_HASH, _PLACE)),
        ]
    )
    return (
        f"MERGE INTO {table} AS t USING {quoted(view)} AS s ON {' AND '.join(on)} "
        f"WHEN MATCHED THEN UPDATE SET t.{VALID_TO} = s.{_TO}, t.{IS_CURRENT} = (s.{_TO} IS NULL) "
        f"WHEN NOT MATCHED AND s.{_SRC} = {_STAGED} THEN INSERT ({listed}) VALUES ({values})"
    )


def table_names(frame: DataFrame, load: Load) -> list[str]:
    """Return the columns of a row."""
    assert load.changes is not None
    return [name for name in frame.columns if name not in load.changes.own]


# ------------------------------------------------------------------------------------------------------------- the line


def _row(frame: DataFrame, load: Load) -> Column:
    return F.struct(*map(column, table_names(frame, load))).alias(_ROW)


def _none_of(row_type: Column) -> list[Column]:
    return [F.lit(-1).alias(_KIND), F.lit(-1).cast("bigint").alias(_NUMBER), row_type.alias(_ROW)]


def _staged_hash(frame: DataFrame, compared: list[str]) -> Column:
    """A delete has no values: it ends the version before it."""
    return F.when(column(OP) == DELETE, F.lit("")).otherwise(row_hash(frame, compared))


def _cleared(table: DataFrame, frame: DataFrame, load: Load) -> DataFrame:
    """Return the stored versions, and when each ends after the truncates of the batch."""
    changes = load.changes
    assert changes is not None
    stored = table.select(
        *keys_as(load),
        F.col(VALID_FROM).alias(_SINCE),
        F.col(VALID_TO).alias(_UNTIL),
        F.col(VALID_TO).alias(_WAS),
        column(POSITION).alias(_PLACE),
        row_hash(table, load.compared(table_names(frame, load))).alias(_HASH),
    )
    for place, ts in changes.truncates:
        if ts is None:
            continue
        since, until, end = F.col(_SINCE), F.col(_UNTIL), F.lit(instant_of(ts))
        is_before = since <= end
        if place is not None:
            # As `is_late`: positions start over in a source that was restored.
            latest = F.lit(instant_of(ts + changes.tolerance_ms))
            by_place = (F.col(_PLACE) <= place) & (since <= latest)
            is_before = F.when(F.col(_PLACE).isNull(), since <= end).otherwise(by_place)
        cut = F.when(is_before & until.isNull(), F.greatest(end, since))
        cut = cut.when(is_before & (since <= end) & (until > end), end)
        stored = stored.withColumn(_UNTIL, cut.otherwise(until))
    return stored


def _ended(touched: DataFrame, ends: Ends, frame: DataFrame) -> list[DataFrame]:
    """Return the deletes and truncates that came before: what comes late ends with them too."""
    session, ended = frame.sparkSession, []
    if ends.deletes.num_rows:
        at = ends.deletes[TS].cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))
        deletes = session.createDataFrame(
            pa.table({KEY: ends.deletes[KEY], _SINCE: at, _PLACE: ends.deletes[POSITION]})
        )
        ended.append(touched.join(F.broadcast(deletes), KEY))
    if ends.truncates:
        at = pa.array([instant_of(ts) for _, ts in ends.truncates if ts is not None], pa.timestamp("us", "UTC"))
        places = pa.array([place for place, _ in ends.truncates], pa.string())
        truncates = session.createDataFrame(pa.table({_SINCE: at, _PLACE: places}))
        ended.append(touched.crossJoin(F.broadcast(truncates)))
    return ended


def _chained(line: DataFrame, load: Load) -> DataFrame:
    """Find of each version when it ends: with the next one, or where it ended before."""
    from pyspark.sql import Window

    assert load.changes is not None
    keys, so_far = key_names(load), (Window.unboundedPreceding, Window.currentRow)
    since, until, place, src, never = F.col(_SINCE), F.col(_UNTIL), F.col(_PLACE), F.col(_SRC), F.lit(NEVER)
    by_place = Window.partitionBy(*keys, place.isNull()).orderBy(place).rowsBetween(*so_far)
    # The clock of a source may go back, and MySQL's times are of when a statement began. Positions do not; but they
    # begin again in a source that was restored, much later.
    highest = F.max(since).over(by_place)
    tolerance = F.expr(f"INTERVAL '{load.changes.tolerance_ms / 1000:.3f}' SECOND")
    timed = line.withColumn(_AT, highest)
    is_near = place.isNotNull() & (F.col(_AT) <= since + tolerance)
    timed = timed.withColumn(_AT, F.when(is_near, F.col(_AT)).otherwise(since))
    # At one time without positions: what an earlier delete ended, that delete, what came after it, what is staged.
    is_end = (src == _STAGED) & (F.col(_NUMBER) == -1)
    rank = F.when((src == _STORED) & (until <= since), 0).when(is_end, 1).when(src == _STORED, 2).otherwise(3)
    order = Window.partitionBy(*keys).orderBy(
        F.col(_AT), F.coalesce(place, F.lit("")), rank, F.col(_NUMBER), F.coalesce(until, never)
    )
    seen = timed.withColumn(_BEFORE, F.lag(_HASH).over(order))
    seen = seen.withColumn(_IS_NEW, F.min(_SRC).over(Window.partitionBy(*keys)))
    # A snapshot reads a row as it was.
    is_same = F.col(_BEFORE).isNotNull() & (F.col(_BEFORE) == F.col(_HASH))
    kept = seen.where(~((src == _STAGED) & (F.col(_KIND) == READ) & is_same))
    # A row that comes late ends where the version ended into which it falls, whatever ended that.
    cover = F.max(F.when(src == _STORED, F.coalesce(until, never))).over(order.rowsBetween(*so_far))
    linked = kept.withColumn(_COVER, cover).withColumn(_TO, F.lead(_SINCE).over(order))
    own_end = F.when(src == _STORED, until).when((F.col(_COVER) > F.col(_AT)) & (F.col(_COVER) < never), F.col(_COVER))
    first = F.least(own_end, F.col(_TO))
    # Among versions with the same time only the last has a length.
    ended = linked.withColumn(_TO, F.when(first < since, since).otherwise(first))
    return ended.drop(_AT, _BEFORE, _COVER)
