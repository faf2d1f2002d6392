"""The aggregates of windows in Spark, each in three steps: what a batch stores of its rows, how stored values become
one, and what that is in the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.engine.streaming import functions
from weft.pipelines.streaming.windows import Aggregation
from weft.spark_support.sessions import TIME_FORMATS, quoted
from weft.udfs import Udaf

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

_SKETCHED = ("int", "bigint", "string", "binary")
"""The types that a HyperLogLog sketch of Spark takes."""
_LOG_K = 12
_KLL_K = 400


class Steps(NamedTuple):
    """One aggregate. The stored columns are called as the result, or that and a suffix."""

    stored: dict[str, Column]
    """The columns that are stored, over rows."""
    merged: dict[str, Column]
    """The same columns, over stored ones."""
    result: Column
    """The result, over merged columns."""
    lost: Column | None = None
    """Whether the result is lost, since its type cannot hold it; over merged columns."""


def steps(
    each: Aggregation,
    rows: StructType | None,
    at: Column,
    counts: Column | None = None,
    groups: Sequence[str] = (),
) -> Steps:
    """Return the steps of an aggregate, over rows of these columns and `at` this time. Without `rows` only stored
    columns are merged. `counts`: which rows an aggregate of the user's gets. `groups`: what errors name."""
    from pyspark.sql import functions as F

    name, extra = each.name, f"_weft_n_{each.name}"
    # In backticks: a name may hold a dot.
    own, more = F.col(quoted(name)), F.col(quoted(extra))
    if each.udaf is not None:
        return _of_user(each, each.udaf, counts)
    value = F.lit(1) if each.column is None else F.col(quoted(each.columns[0]))
    kind = None if each.column is None or rows is None else rows[each.columns[0]].dataType

    match each.agg:
        case "count":
            return Steps({name: F.count(value)}, {name: F.sum(own)}, own)
        case "sum":
            return _summed(name, extra, value, own)
        case "min":
            return Steps({name: F.min(value)}, {name: F.min(own)}, own)
        case "max":
            return Steps({name: F.max(value)}, {name: F.max(own)}, own)
        case "avg":
            is_decimal = kind is not None and kind.typeName() == "decimal"
            # A sum of integers could overflow where their average does not.
            return _summed(name, extra, value if is_decimal else value.cast("double"), own / more)
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
            return _exact(each, value, own, groups)
        case "count_distinct":
            is_taken = kind is not None and kind.simpleString() in _SKETCHED
            hashed = value if is_taken else F.xxhash64(value)
            # A hash of nothing is a value.
            sketched = F.hll_sketch_agg(F.when(value.isNotNull(), hashed), F.lit(_LOG_K))
            return Steps({name: sketched}, {name: F.hll_union_agg(own)}, F.hll_sketch_estimate(own))
        case "approx_percentile":
            number = F.nanvl(value.cast("double"), F.lit(None))
            # A sketch of nothing has no percentiles.
            sketched = F.when(F.count(number) > 0, F.kll_sketch_agg_double(number, F.lit(_KLL_K)))
            merged = F.when(F.count(own) > 0, F.kll_merge_agg_double(own))
            return Steps(
                {name: sketched}, {name: merged}, F.kll_sketch_get_quantile_double(own, F.lit(each.percentage))
            )
        case "collect":
            return _collected(each, value, own, at)
    raise AssertionError(each.agg)


def _summed(name: str, rows: str, value: Any, result: Any) -> Steps:
    """Add values, and count them: a sum of some that is null is one that its type could not hold."""
    from pyspark.sql import functions as F

    own, more = F.col(quoted(name)), F.col(quoted(rows))
    is_lost = own.isNull() & (more > 0)
    return Steps(
        {name: F.try_sum(value), rows: F.count(value)},
        {name: F.when(~F.max(is_lost), F.try_sum(own)), rows: F.sum(more)},
        result,
        is_lost,
    )


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


def _exact(each: Aggregation, value: Any, own: Any, groups: Sequence[str]) -> Steps:
    """Keep the values themselves, as a text of JSON that every database holds."""
    from pyspark.sql import functions as F

    most = each.max_distinct_values_per_group or 0
    reached = F.lit(f"max_distinct_values_per_group={most} reached by {each.name}")
    if groups:
        named = F.first(F.struct(*map(quoted, groups)))
        reached = F.concat(reached, F.lit(" of the group "), F.to_json(named, TIME_FORMATS))

    def within(values: Any) -> Any:
        return F.when(F.size(values) <= most, values).otherwise(F.raise_error(reached))

    stored = F.to_json(within(F.collect_set(value.cast("string"))))
    values = F.flatten(F.collect_list(F.from_json(own, "array<string>")))
    return Steps(
        {each.name: stored},
        {each.name: F.to_json(within(F.array_distinct(values)))},
        F.size(F.from_json(own, "array<string>")).cast("bigint"),
    )


def _collected(each: Aggregation, value: Any, own: Any, at: Any) -> Steps:
    """Keep values with their times, as a text of JSON; of each value its own JSON."""
    from pyspark.sql import functions as F

    as_json = F.to_json(F.array(value), TIME_FORMATS)
    pair = F.struct(at.alias("at"), F.substring(as_json, F.lit(2), F.length(as_json) - 2).alias("value"))

    def first(pairs: Any) -> Any:
        return F.to_json(F.slice(F.array_sort(pairs), 1, each.max_values_per_group or 0))

    def pairs(text: Any) -> Any:
        return F.from_json(text, "array<struct<at: bigint, value: string>>")

    return Steps(
        {each.name: first(F.collect_list(F.when(value.isNotNull(), pair)))},
        {each.name: first(F.flatten(F.collect_list(pairs(own))))},
        F.concat(F.lit("["), F.array_join(F.transform(pairs(own), lambda pair: pair["value"]), ","), F.lit("]")),
    )


def _of_user(each: Aggregation, udaf: Udaf, counts: Any) -> Steps:
    """Keep the state of a user's aggregate, a column for each of its values."""
    from pyspark.sql import functions as F

    stored = {
        f"s{number}": f"_weft_s{number}_{each.name}" if number else each.name for number in range(len(udaf.state))
    }
    arguments = F.struct(*(F.col(quoted(name)).alias(f"a{number}") for number, name in enumerate(each.columns)))
    states = F.struct(*(F.col(quoted(column)).alias(name) for name, column in stored.items()))
    of_rows = functions.state_of(udaf, "update_batch")(
        F.collect_list(arguments if counts is None else F.when(counts, arguments))
    )
    merged = functions.state_of(udaf, "merge_batch")(F.collect_list(states))
    return Steps(
        {column: of_rows[name] for name, column in stored.items()},
        {column: merged[name] for name, column in stored.items()},
        functions.result_of(udaf)(F.array(states)),
    )
