"""Which rows of a Delta table a merge or scd2 load must change, as one DataFrame that a single MERGE applies.

It reads the table, and is computed inside that MERGE: what it sees is what the MERGE replaces, and Delta refuses the
commit if another load came between.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

from weft.spark_support.lazy import F, T
from weft.spark_support.sessions import TIME_FORMATS, quoted
from weft.systems.frame_checks import column
from weft.systems.load import IS_CURRENT, ROW_HASH, VALID_FROM, VALID_TO, Load

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

OP, TS, UNTIL, TO, ROW, HASH, EXPIRED = (f"_weft_{name}" for name in ("op", "ts", "until", "to", "row", "hash", "old"))
INSERT, VERSION, UPDATE, CLOSE, DELETE = "insert", "version", "update", "close", "delete"
_HIT, _SRC, _COVER, _BEFORE, _BEFORE_TS, _NEW, _SINCE = (
    f"_weft_{name}" for name in ("hit", "src", "cover", "before", "before_ts", "new", "since")
)
NEVER = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)


def key_name(number: int) -> str:
    """Return the name of the column that holds the value of a key in a change."""
    return f"_weft_key_{number}"


def row_hash(frame: DataFrame, names: list[str]) -> Column:
    """Return a hash of values, in which null, empty and shifted values differ."""
    types = {field.name: field.dataType for field in frame.schema}
    parts = []
    for name in names:
        text = _text(column(name), types[name])
        full = F.concat(F.length(text).cast("string"), F.lit(":"), text)
        parts.append(F.when(column(name).isNull(), F.lit("-")).otherwise(full))
    return F.sha2(F.concat(*parts, F.lit("")), 256)


def _text(value: Column, kind: DataType) -> Column:
    if isinstance(kind, T.BinaryType):
        return F.hex(value)
    if isinstance(kind, T.FloatType | T.DoubleType):
        return (value + F.lit(0.0)).cast("string")  # -0.0 equals 0.0
    if isinstance(kind, T.ArrayType | T.MapType | T.StructType):
        return F.to_json(value, {**TIME_FORMATS, "ignoreNullFields": "false"})
    return value.cast("string")


def keys_as(load: Load) -> list[Column]:
    """Return the keys of a table under the names that they have in a change."""
    return [column(key).alias(key_name(number)) for number, key in enumerate(load.keys)]


def same_key(left: str, right: str, load: Load) -> Column:
    """Return whether two changes are of one key."""
    pairs = (
        F.col(f"{left}.{key_name(number)}").eqNullSafe(F.col(f"{right}.{key_name(number)}"))
        for number in range(len(load.keys))
    )
    return reduce(lambda one, other: one & other, pairs)


def key_names(load: Load) -> list[str]:
    """Return the names that keys have in a change."""
    return [key_name(number) for number in range(len(load.keys))]


def changed_rows(source: DataFrame, table: DataFrame, load: Load) -> DataFrame:
    """Return the changes of a merge or scd2 load."""
    return (scd2_changes if load.mode == "scd2" else merge_changes)(source, table, load)


def change_counts(load: Load) -> list[Column]:
    """Return the aggregates that count the changes of a load by their kind."""
    expired = F.count_if(F.col(EXPIRED)) if load.mode == "scd2" else F.lit(0)
    kinds = (INSERT, VERSION, UPDATE, DELETE)
    return [*(F.count_if(F.col(OP) == kind).alias(kind) for kind in kinds), expired.alias(EXPIRED)]


def merge_changes(source: DataFrame, table: DataFrame, load: Load) -> DataFrame:
    """New rows and rows that differ; the keys of the rows that the load removes, with `handle_deletes` of all that are
    gone."""
    names = source.columns
    compared = load.compared(names)
    incoming = source.select(
        *keys_as(load), row_hash(source, compared).alias(HASH), F.struct(*map(column, names)).alias(ROW)
    ).alias("s")
    stored = table.select(*keys_as(load), row_hash(table, compared).alias(_BEFORE), F.lit(True).alias(_HIT)).alias("t")
    joined = incoming.join(stored, same_key("s", "t", load), "left")
    changed = joined.where(F.col(_HIT).isNull() | (F.col(_BEFORE) != F.col(HASH))).select(
        *(F.col(f"s.{name}").alias(name) for name in key_names(load)),
        F.when(F.col(_HIT).isNull(), F.lit(INSERT)).otherwise(F.lit(UPDATE)).alias(OP),
        F.col(ROW),
    )
    if load.deleted_keys:
        columns = list(load.deleted_keys[0])
        rows = [tuple(each[name] for name in columns) for each in load.deleted_keys]
        named = source.sparkSession.createDataFrame(rows, columns).distinct()
        missing = table.join(named, columns, "left_semi").select(*keys_as(load))
    elif load.handle_deletes is not None:
        missing = stored.join(incoming, same_key("s", "t", load), "left_anti")
    else:
        return changed
    gone = missing.select(
        *key_names(load), F.lit(DELETE).alias(OP), F.lit(None).cast(changed.schema[ROW].dataType).alias(ROW)
    )
    return changed.unionByName(gone)


def scd2_changes(source: DataFrame, table: DataFrame, load: Load) -> DataFrame:
    """Versions to close and versions to add."""
    names = source.columns
    compared = load.compared(names)
    began: Any = F.lit(load.moment)
    if load.event_timestamp_column is not None:
        began = column(load.event_timestamp_column).cast("timestamp")
    incoming = source.select(
        *keys_as(load),
        began.alias(TS),
        row_hash(source, compared).alias(HASH),
        F.struct(*map(column, names)).alias(ROW),
    )
    stored = table.select(
        *keys_as(load),
        F.col(VALID_FROM).alias(_SINCE),
        F.col(VALID_TO).alias(UNTIL),
        F.col(IS_CURRENT),
        row_hash(table, compared).alias(_BEFORE),
    )
    current = stored.where(F.col(IS_CURRENT)).drop(UNTIL, IS_CURRENT)
    if load.event_timestamp_column is None:
        changes = _by_load(incoming, current, load)
    else:
        changes = _by_event(incoming, stored, current, load)
    closing = _closing(incoming, current, changes, load)
    if load.ttl_seconds is not None:
        # Rows whose time is so old that their TTL has passed already.
        ends = F.col(TS) + F.expr(_interval(load.ttl_seconds))
        is_old = F.col(OP).isin(INSERT, VERSION) & F.col(TO).isNull() & (F.col(TS) < F.lit(_oldest(load)))
        changes = changes.withColumn(EXPIRED, is_old).withColumn(TO, F.when(is_old, ends).otherwise(F.col(TO)))
    else:
        changes = changes.withColumn(EXPIRED, F.lit(False))
    return changes if closing is None else changes.unionByName(closing)


def first_versions(source: DataFrame, load: Load) -> DataFrame:
    """Return the rows of an scd2 table that has none yet."""
    hashed = row_hash(source, load.compared(source.columns))
    ends = {VALID_FROM: F.lit(load.moment), VALID_TO: F.lit(None).cast("timestamp")}
    return source.withColumns({**ends, IS_CURRENT: F.lit(True), ROW_HASH: hashed})


def _change(op: Column, ts: Column, until: Column, to: Column, load: Load) -> list[Column]:
    return [
        *(F.col(name) for name in key_names(load)),
        op.alias(OP),
        ts.alias(TS),
        until.cast("timestamp").alias(UNTIL),
        to.cast("timestamp").alias(TO),
        F.col(HASH),
        F.col(ROW),
    ]


def _by_load(incoming: DataFrame, current: DataFrame, load: Load) -> DataFrame:
    """Return changes that begin a version with this load, where a row is new or differs from the current one."""
    stored = current.withColumn(_HIT, F.lit(True)).alias("t")
    joined = incoming.alias("s").join(stored, same_key("s", "t", load), "left")
    changed = joined.where(F.col(_HIT).isNull() | (F.col(_BEFORE) != F.col(HASH)))
    # If the clock went back, still later than what is stored.
    since = F.greatest(F.col(TS), F.col(_SINCE) + F.expr("INTERVAL 1 MICROSECOND"))
    changed = changed.select(
        *(F.col(f"s.{name}").alias(name) for name in key_names(load)), HASH, ROW, _HIT, _SINCE, since.alias(TS)
    )
    nothing = F.lit(None)
    op = F.when(F.col(_HIT).isNull(), F.lit(INSERT)).otherwise(F.lit(VERSION))
    added = changed.select(*_change(op, F.col(TS), nothing, nothing, load))
    closed = changed.where(F.col(_HIT)).select(*_change(F.lit(CLOSE), F.col(_SINCE), nothing, F.col(TS), load))
    return added.unionByName(closed)


def _by_event(incoming: DataFrame, stored: DataFrame, current: DataFrame, load: Load) -> DataFrame:
    """Put events into the history of their keys: each begins a version where it changes something, ends the one before
    it, and is ended by the one after it, whatever order they come in."""
    from pyspark.sql import Window

    keys = key_names(load)
    # A key whose rows all say what the current version says, and not of an earlier time, is left alone.
    touched = (
        incoming.alias("s")
        .join(current.withColumn(_HIT, F.lit(True)).alias("t"), same_key("s", "t", load), "left")
        .where(F.col(_HIT).isNull() | (F.col(_BEFORE) != F.col(HASH)) | (F.col(TS) < F.col(_SINCE)))
        .select(*(F.col(f"s.{name}").alias(name) for name in keys))
        .distinct()
        .alias("k")
    )
    row_type = incoming.schema[ROW].dataType
    versions = (
        stored.alias("t")
        .join(touched, same_key("t", "k", load), "left_semi")
        .select(
            *keys,
            F.col(_SINCE).alias(TS),
            F.col(UNTIL),
            F.lit(0).alias(_SRC),
            F.col(_BEFORE).alias(HASH),
            F.lit(None).cast(row_type).alias(ROW),
        )
    )
    known = (
        same_key("s", "t", load) & (F.col(f"s.{TS}") == F.col(f"t.{TS}")) & (F.col(f"s.{HASH}") == F.col(f"t.{HASH}"))
    )
    events = (
        incoming.alias("s")
        .join(touched, same_key("s", "k", load), "left_semi")
        .join(versions.select(*keys, TS, HASH).alias("t"), known, "left_anti")
        .select(*keys, TS, F.lit(None).cast("timestamp").alias(UNTIL), F.lit(1).alias(_SRC), HASH, ROW)
    )
    never = F.lit(NEVER)
    order = Window.partitionBy(*keys).orderBy(TS, _SRC, F.coalesce(UNTIL, never))
    so_far = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    # Where the version that began last before this row ends: stored versions never overlap.
    cover = F.max(F.when(F.col(_SRC) == 0, F.coalesce(UNTIL, never))).over(so_far)
    line = (
        versions.unionByName(events)
        .withColumn(_COVER, cover)
        .withColumn(_BEFORE, F.lag(HASH).over(order))
        .withColumn(_BEFORE_TS, F.lag(TS).over(order))
        .withColumn(_NEW, F.min(_SRC).over(Window.partitionBy(*keys)))
    )
    # The key had gone and is back, with the values it had.
    is_back = (F.col(_COVER) <= F.col(TS)) & (F.col(_BEFORE_TS) < F.col(_COVER))
    kept = line.where((F.col(_SRC) == 0) | F.col(_BEFORE).isNull() | (F.col(_BEFORE) != F.col(HASH)) | is_back)
    own_end = F.when((F.col(_COVER) > F.col(TS)) & (F.col(_COVER) < never), F.col(_COVER))
    chain = kept.withColumn(TO, F.least(own_end, F.lead(TS).over(order)))
    op = F.when(F.col(_SRC) == 0, F.lit(CLOSE)).when(F.col(_NEW) == 1, F.lit(INSERT)).otherwise(F.lit(VERSION))
    moved = (F.col(_SRC) == 1) | ~F.col(TO).eqNullSafe(F.col(UNTIL))
    return chain.where(moved).select(*_change(op, F.col(TS), F.col(UNTIL), F.col(TO), load))


def _closing(incoming: DataFrame, current: DataFrame, changes: DataFrame, load: Load) -> DataFrame | None:
    """Return the current versions that end because their key is gone or because they are too old."""
    row_type = incoming.schema[ROW].dataType
    ended_versions: list[DataFrame] = []

    def close(rows: DataFrame, to: Column) -> None:
        rows = rows.withColumn(HASH, F.lit(None).cast("string")).withColumn(ROW, F.lit(None).cast(row_type))
        closed = rows.select(*_change(F.lit(DELETE), F.col(_SINCE), F.lit(None), to, load))
        ended_versions.append(closed.withColumn(EXPIRED, F.lit(False)))

    stored = current.alias("t")
    if load.handle_deletes == "soft":
        gone = stored.join(incoming.alias("s"), same_key("s", "t", load), "left_anti")
        close(gone, F.greatest(F.lit(load.moment), F.col(_SINCE)))
        stored = stored.join(incoming.alias("s"), same_key("s", "t", load), "left_semi").alias("t")
    if load.ttl_seconds is not None:
        ended = changes.where((F.col(OP) == CLOSE) & F.col(UNTIL).isNull()).alias("s")
        old = stored.join(ended, same_key("s", "t", load), "left_anti").where(F.col(_SINCE) < F.lit(_oldest(load)))
        close(old, F.col(_SINCE) + F.expr(_interval(load.ttl_seconds)))
    return reduce(lambda one, other: one.unionByName(other), ended_versions) if ended_versions else None


def _oldest(load: Load) -> datetime:
    assert load.ttl_seconds is not None
    try:
        return load.moment - timedelta(seconds=load.ttl_seconds)
    except OverflowError:
        return datetime(1, 1, 1, tzinfo=UTC)


def _interval(seconds: float) -> str:
    return f"INTERVAL '{seconds:.6f}' SECOND"


def merge_statement(target: str, view: str, names: list[str], load: Load) -> str:
    """Return the MERGE that applies changes of a merge."""
    on = " AND ".join(f"t.{quoted(key)} <=> s.{key_name(number)}" for number, key in enumerate(load.keys))
    updated = load.updated(names)
    clauses = []
    if load.handle_deletes is not None or load.deleted_keys:
        clauses.append(f"WHEN MATCHED AND s.{OP} = '{DELETE}' THEN DELETE")
    if updated:
        changes = ", ".join(f"t.{quoted(name)} = s.{ROW}.{quoted(name)}" for name in updated)
        clauses.append(f"WHEN MATCHED AND s.{OP} <> '{DELETE}' THEN UPDATE SET {changes}")
    values = ", ".join(f"s.{ROW}.{quoted(name)}" for name in names)
    listed = ", ".join(map(quoted, names))
    clauses.append(f"WHEN NOT MATCHED AND s.{OP} <> '{DELETE}' THEN INSERT ({listed}) VALUES ({values})")
    return f"MERGE INTO {target} AS t USING {view} AS s ON {on} {' '.join(clauses)}"


def scd2_statement(target: str, view: str, names: list[str], load: Load) -> str:
    """Return the MERGE that applies changes of scd2."""
    same = [f"t.{quoted(key)} <=> s.{key_name(number)}" for number, key in enumerate(load.keys)]
    on = " AND ".join(
        [f"s.{OP} IN ('{CLOSE}', '{DELETE}')", *same, f"t.{VALID_FROM} = s.{TS}", f"t.{VALID_TO} <=> s.{UNTIL}"]
    )
    listed = ", ".join([*map(quoted, names), VALID_FROM, VALID_TO, IS_CURRENT, ROW_HASH])
    values = ", ".join(
        [*(f"s.{ROW}.{quoted(name)}" for name in names), f"s.{TS}", f"s.{TO}", f"s.{TO} IS NULL", f"s.{HASH}"]
    )
    return (
        f"MERGE INTO {target} AS t USING {view} AS s ON {on} "
        f"WHEN MATCHED THEN UPDATE SET t.{VALID_TO} = s.{TO}, t.{IS_CURRENT} = (s.{TO} IS NULL) "
        f"WHEN NOT MATCHED AND s.{OP} IN ('{INSERT}', '{VERSION}') THEN INSERT ({listed}) VALUES ({values})"
    )
