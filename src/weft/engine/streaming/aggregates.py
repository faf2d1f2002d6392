"""The aggregates of windows in Spark, each in three steps: what a batch stores of its rows, how stored values become
one, and what that is in the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from weft.pipelines.streaming.windows import Aggregation
from weft.spark_support.sessions import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

_SKETCHED = ("int", "bigint", "string", "binary")
"""The types that a HyperLogLog sketch of Spark takes."""
_LOG_K = 12


class Steps(NamedTuple):
    """One aggregate. The stored columns are called as the result, or that and a suffix."""

    stored: dict[str, Column]
    """The columns that are stored, over rows."""
    merged: dict[str, Column]
    """The same columns, over stored ones."""
    result: Column
    """The result, over merged columns."""


def steps(each: Aggregation, rows: StructType | None, at: Column) -> Steps:
    """Return the steps of an aggregate, over rows of these columns and `at` this time. Without `rows` only stored
    columns are merged."""
    from pyspark.sql import functions as F

    name, extra = each.name, f"_weft_n_{each.name}"
    # In backticks: a name may hold a dot.
    own, more = F.col(quoted(name)), F.col(quoted(extra))
    value = F.lit(1) if each.column is None else F.col(quoted(each.column))
    kind = None if each.column is None or rows is None else rows[each.column].dataType

    match each.agg:
        case "count":
            return Steps({name: F.count(value)}, {name: F.sum(own)}, own)
        case "sum":
            return Steps({name: F.sum(value)}, {name: F.sum(own)}, own)
        case "min":
            return Steps({name: F.min(value)}, {name: F.min(own)}, own)
        case "max":
            return Steps({name: F.max(value)}, {name: F.max(own)}, own)
        case "avg":
            is_decimal = kind is not None and kind.typeName() == "decimal"
            # A sum of integers could overflow where their average does not.
            summed = F.sum(value if is_decimal else value.cast("double"))
            return Steps({name: summed, extra: F.count(value)}, {name: F.sum(own), extra: F.sum(more)}, own / more)
        case "first" | "last":
            choose = F.min if each.agg == "first" else F.max
            pair = choose(F.when(value.isNotNull(), F.struct(at.alias("at"), value.alias("value"))))
            stored = choose(F.when(more.isNotNull(), F.struct(more.alias("at"), own.alias("value"))))
            return Steps({name: pair["value"], extra: pair["at"]}, {name: stored["value"], extra: stored["at"]}, own)
        case "stddev":
            mean = f"_weft_mean_{name}"
            return Steps(
                {
                    name: F.var_pop(value.cast("double")) * F.count(value),
                    mean: F.avg(value.cast("double")),
                    extra: F.count(value),
                },
                _merged_variance(name, mean, extra),
                F.when(more > 1, F.sqrt(own / (more - 1))),
            )
        case "count_distinct" if each.mode == "exact":
            return _exact(each, value, own)
        case "count_distinct":
            is_taken = kind is not None and kind.simpleString() in _SKETCHED
            hashed = value if is_taken else F.xxhash64(value)
            # A hash of nothing is a value.
            sketched = F.hll_sketch_agg(F.when(value.isNotNull(), hashed), F.lit(_LOG_K))
            return Steps({name: sketched}, {name: F.hll_union_agg(own)}, F.hll_sketch_estimate(own))
    raise AssertionError(each.agg)


def _merged_variance(squares: str, mean: str, rows: str) -> dict[str, Any]:
    """Return the columns of a variance that is merged pair by pair, which loses no digits to large sums."""
    from pyspark.sql import functions as F

    parts = F.collect_list(F.when(F.col(quoted(rows)) > 0, F.struct(quoted(squares), quoted(mean), quoted(rows))))

    def together(one: Any, other: Any) -> Any:
        count = one[rows] + other[rows]
        apart = other[mean] - one[mean]
        return F.struct(
            (one[squares] + other[squares] + apart * apart * one[rows] * other[rows] / count).alias(squares),
            (one[mean] + apart * other[rows] / count).alias(mean),
            count.alias(rows),
        )

    none = F.struct(F.lit(0.0).alias(squares), F.lit(0.0).alias(mean), F.lit(0).cast("bigint").alias(rows))
    merged = F.aggregate(parts, none, together)
    return {squares: merged[squares], mean: merged[mean], rows: merged[rows]}


def _exact(each: Aggregation, value: Any, own: Any) -> Steps:
    """Keep the values themselves, as a text of JSON that every database holds."""
    from pyspark.sql import functions as F

    most = each.max_distinct_values_per_group or 0
    reached = f"max_distinct_values_per_group={most} reached by {each.name}"

    def within(values: Any) -> Any:
        return F.when(F.size(values) <= most, values).otherwise(F.raise_error(F.lit(reached)))

    stored = F.to_json(within(F.collect_set(value.cast("string"))))
    values = F.flatten(F.collect_list(F.from_json(own, "array<string>")))
    return Steps(
        {each.name: stored},
        {each.name: F.to_json(within(F.array_distinct(values)))},
        F.size(F.from_json(own, "array<string>")).cast("bigint"),
    )
