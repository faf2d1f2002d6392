"""What is checked of a source's rows before any is written: columns, keys, and which of several rows counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.columns import not_utf8, why_no_text
from weft.errors import LoadRefusedError
from weft.spark_support.lazy import F, T
from weft.spark_support.sessions import java_class, quoted
from weft.systems.load import MOST_ASIDE, Counts, Load
from weft.systems.sql import quarantine
from weft.systems.target import Reject

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_RANK = "_weft_rank"
_NO_TEXT = "weft: a text is not UTF-8"


def column(name: str) -> Any:
    """Return a column by its name, which may have any characters."""
    return F.col(quoted(name))


def without_void(frame: DataFrame) -> DataFrame:
    """Columns of nothing but nulls as texts: no file holds a column without a type."""
    return frame.select(
        *(
            column(field.name).cast(T.StringType()).alias(field.name)
            if isinstance(field.dataType, T.NullType)
            else column(field.name)
            for field in frame.schema
        )
    )


def cast_to_table(frame: DataFrame, table: StructType, load: Load) -> DataFrame:
    """Return the source's columns with the types of the table's, where no value can change by it; else a refusal.
    Columns that the table lacks are refused too, unless it is to get them."""
    types = {field.name: field.dataType for field in table}
    known = {name.lower() for name in types}
    evolves = load.declared is not None and load.declared.on_drift == "evolve"
    chosen = []
    own = () if load.changes is None else load.changes.own
    for field in frame.schema:
        wanted = types.get(field.name)
        if field.name in own:
            chosen.append(column(field.name))
            continue
        # One that differs in capitals alone is another column to some readers, and the same to others.
        if wanted is None and evolves and field.name.lower() not in known:
            chosen.append(column(field.name))
            continue
        if wanted is None:
            raise load.no_column(field.name, list(types))
        if not _fits(frame, field.dataType, wanted):
            raise LoadRefusedError(
                f"The column {field.name!r} of {load.name} is {wanted.simpleString()}, and "
                f"{field.dataType.simpleString()} in the source.",
                hint=f"Convert it there: CAST({quoted(field.name)} AS {wanted.simpleString()}).",
            )
        chosen.append(column(field.name).cast(wanted).alias(field.name))
    return frame.select(*chosen)


def extended_schema(table: StructType, frame: DataFrame) -> StructType:
    """Return the columns of a table, and then those that a frame has beyond them."""
    more = [T.StructField(field.name, field.dataType) for field in frame.schema if field.name not in table.names]
    return T.StructType([*table, *more])


def with_all_columns(frame: DataFrame, columns: StructType) -> DataFrame:
    """Return all of these columns in this order, null where a frame lacks one."""
    present = set(frame.columns)
    return frame.select(
        *(
            column(field.name) if field.name in present else F.lit(None).cast(field.dataType).alias(field.name)
            for field in columns
        )
    )


def _fits(frame: DataFrame, source: DataType, wanted: DataType) -> bool:
    if source == wanted or isinstance(source, T.NullType):
        return True
    if isinstance(wanted, T.StringType):
        return False
    if isinstance(source, T.IntegralType) and isinstance(wanted, T.IntegralType):
        return True  # a value that is too large fails the load
    if isinstance(source, T.DecimalType) and isinstance(wanted, T.DecimalType):
        return wanted.scale >= source.scale
    spark: Any = frame.sparkSession
    to_java = spark._jsparkSession.parseDataType
    cast = java_class(spark, "org.apache.spark.sql.catalyst.expressions.Cast")
    return bool(cast.canUpCast(to_java(source.json()), to_java(wanted.json())))


def written_texts(frame: DataFrame, load: Load, reject: Reject | None, write: Callable[[DataFrame], Counts]) -> Counts:
    """Return what `write` does with a DataFrame, where all texts of it are UTF-8: Spark makes a text of any bytes, and
    would replace some of them in CSV and JSON, or write a Parquet file that others cannot read. Rows with another text
    go to `reject`, if there is one."""
    from pyspark.errors import PySparkException

    conditions = [
        each for field in frame.schema if (each := _is_no_text(column(field.name), field.dataType)) is not None
    ]
    if not conditions:
        return write(frame)
    is_bad = reduce(or_, (F.coalesce(each, F.lit(False)) for each in conditions))
    # Almost all texts are UTF-8: a pass of its own would find nothing.
    raised = F.raise_error(F.lit(_NO_TEXT)).cast("boolean")
    try:
        return write(frame.where(F.when(is_bad, raised).otherwise(F.lit(True))))
    except PySparkException as error:
        if _NO_TEXT not in str(error):
            raise
    bad = frame.where(is_bad).limit(MOST_ASIDE + 1).toArrow()
    by_column: dict[str, list[int]] = {}
    for number, name in not_utf8(bad).items():
        by_column.setdefault(name, []).append(number)
    if reject is None or len(bad) > MOST_ASIDE:
        counted = f"more than {MOST_ASIDE:,}" if len(bad) > MOST_ASIDE else f"{len(bad):,}"
        raise LoadRefusedError(
            f"Rows of {load.name} have a text that is not UTF-8 in {', '.join(map(repr, by_column))}: {counted}.",
            hint="In Spark's SQL: CASE WHEN is_valid_utf8(…) THEN … END, or make_valid_utf8(…).",
            can_quarantine=True,
        )
    for name, numbers in by_column.items():
        reject(bad.take(pa.array(numbers)), why_no_text(name))
    counts = write(frame.where(~is_bad))
    return replace(counts, rows_read=counts.rows_read + len(bad), quarantined=counts.quarantined + len(bad))


def _is_no_text(value: Any, kind: DataType) -> Any:
    """Return the condition that a value has a text that is not UTF-8; `None` where it has no texts."""
    if isinstance(kind, T.StringType):
        return ~F.is_valid_utf8(value)
    if isinstance(kind, T.ArrayType):
        if _is_no_text(value, kind.elementType) is None:
            return None
        return F.exists(value, lambda each: F.coalesce(_is_no_text(each, kind.elementType), F.lit(False)))
    if isinstance(kind, T.MapType):
        parts = [
            _is_no_text(F.map_keys(value), T.ArrayType(kind.keyType)),
            _is_no_text(F.map_values(value), T.ArrayType(kind.valueType)),
        ]
    elif isinstance(kind, T.StructType):
        parts = [_is_no_text(value.getField(field.name), field.dataType) for field in kind]
    else:
        return None
    found = [F.coalesce(each, F.lit(False)) for each in parts if each is not None]
    return reduce(or_, found) if found else None


def refuse_empty(load: Load, rows: int) -> None:
    """Refuse an empty source where it would empty the table."""
    if rows == 0 and (load.mode == "truncate" or load.handle_deletes is not None) and not load.allow_empty:
        raise LoadRefusedError(
            f"The source of {load.name} is empty, and this load would empty the table.",
            hint="If that is meant, say so: allow_empty=True.",
        )


def checked_keys(
    frame: DataFrame, load: Load, reject: Callable[[DataFrame, str], None] | None = None
) -> tuple[DataFrame, int, int]:
    """Return one row for each key, how many rows there were, and how many are left. Raise if rows have no key or share
    one.

    Rows without a key or an event time go to `reject`, if there is one, with the reason."""
    event = load.event_timestamp_column
    # Several events of one key are its history. Two at one instant would be a contradiction.
    keys = [*load.keys, *([event] if event is not None and not load.deduplicate_by else [])]
    groups = frame.groupBy(*map(column, keys)).agg(F.count(F.lit(1)).alias(_RANK))
    has_null = reduce(lambda one, other: one | other, (column(key).isNull() for key in load.keys))
    is_timeless = column(event).isNull() if event is not None and event in keys else F.lit(False)
    rows = F.col(_RANK)
    totals = groups.agg(
        *(F.coalesce(F.sum(F.when(condition, rows)), F.lit(0)) for condition in (F.lit(True), has_null, is_timeless)),
        F.count(F.lit(1)),
        F.max(rows),
    )
    total, nulls, timeless, different, most = totals.collect()[0]
    if nulls:
        if reject is not None and nulls <= MOST_ASIDE:
            reject(frame.where(has_null), quarantine.keyless(load))
            kept, _, left = checked_keys(frame.where(~has_null), load, reject)
            return kept, total, left
        raise LoadRefusedError(
            f"{nulls:,} of {total:,} source rows of {load.name} have no key ({', '.join(load.keys)} is null).",
            hint=f"Filter them out in the source, or choose other keys.{load.about_nulls}",
        )
    if event is not None and event not in keys:
        timeless = frame.where(column(event).isNull()).count()
    if event is not None and timeless and reject is not None and timeless <= MOST_ASIDE:
        reject(frame.where(column(event).isNull()), quarantine.timeless(load))
        kept, _, left = checked_keys(frame.where(column(event).isNotNull()), load, reject)
        return kept, total, left
    if timeless:
        raise LoadRefusedError(
            f"{timeless:,} source rows of {load.name} have no event time ({event} is null).",
            hint=f"Filter them out in the source, or load without event_timestamp_column.{load.about_nulls}",
        )
    if not total or most == 1:
        return frame, total, total
    if load.deduplicate_by:
        return _greatest(frame, load), total, different
    raise LoadRefusedError(
        _shared(load, keys, groups.where(rows > 1).limit(5).collect()),
        hint='Say which of them counts: deduplicate_by="updated_at" keeps the greatest.',
    )


def _shared(load: Load, keys: Sequence[str], rows: Sequence[Any]) -> str:
    examples = "; ".join(
        f"{', '.join(f'{key}={value!s}' for key, value in zip(keys, row, strict=False))} ({row[-1]} rows)"
        for row in rows
    )
    return f"Rows of the source of {load.name} share a key: {examples}{' …' if len(rows) == 5 else ''}."


def _greatest(frame: DataFrame, load: Load) -> DataFrame:
    """Return the row of each key that is greatest by `deduplicate_by`, then by all columns, so that a re-run agrees."""
    from pyspark.sql import Window

    sortable = {field.name for field in frame.schema if isinstance(field.dataType, T.AtomicType)}
    rest = [name for name in frame.columns if name not in (*load.keys, *load.deduplicate_by) and name in sortable]
    order = [column(name).desc_nulls_last() for name in (*load.deduplicate_by, *rest)]
    window = Window.partitionBy(*map(column, load.keys)).orderBy(*order)
    return frame.withColumn(_RANK, F.row_number().over(window)).where(F.col(_RANK) == 1).drop(_RANK)
