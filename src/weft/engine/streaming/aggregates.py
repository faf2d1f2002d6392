"""The aggregates of windows in Spark, each in three steps: what a batch stores of its rows, how stored values become
one, and what that is in the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from weft.engine.streaming import functions
from weft.pipelines.streaming.windows import Aggregation
from weft.spark_support.sessions import TIME_FORMATS, quoted
from weft.udfs import Udaf

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

_SKETCHED = ("int", "bigint", "string", "binary")
"""The types that a HyperLogLog sketch of Spark takes."""
OF_NUMBERS = ("sum", "avg", "stddev", "approx_percentile")
"""The aggregates that make numbers of texts."""
OF_VALUES = ("min", "max", "first", "last")
"""The aggregates that are a value of their column."""
_EMPTY = "\0the empty text\0"
_UNIT = 1 << 62
_LOG_K = 12
_KLL_K = 400


class Steps(NamedTuple):
    """One aggregate. The stored columns are called as the result, or that and a suffix."""

    stored: dict[str, Column]
    """The columns that are stored, over rows."""
    merged: dict[str, Column]
    """The merged value of each of these columns, over stored rows."""
    result: Column
    """The result, over merged columns."""
    lost: Column | None = None
    """Why there is no result, in words; null where there is one. Over merged columns."""


def steps(
    each: Aggregation,
    rows: StructType | None,
    at: Column,
    counts: Column | None = None,
    groups: Sequence[str] = (),
    stored: DataType | None = None,
) -> Steps:
    """Return the steps of an aggregate, over rows of these columns and `at` this time. Without `rows` only columns are
    merged, of which the first one is `stored` as this type. `counts`: which rows an aggregate of the user's gets.
    `groups`: what errors name."""
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
            of_sum = "" if (known := kind or stored) is None else known.typeName()
            summed = _summed(name, f"_weft_b_{name}", value, is_long=of_sum == "long")
            # All values are null so far: Spark would make the sum a double, but later values decide the type.
            return summed._replace(stored=summed.stored | {name: F.min(value)}) if of_sum == "void" else summed
        case "min":
            return Steps({name: F.min(value)}, {name: F.min(own)}, own)
        case "max":
            return Steps({name: F.max(value)}, {name: F.max(own)}, own)
        case "avg":
            is_decimal = kind is not None and kind.typeName() == "decimal"
            # A sum of integers could overflow where their average does not.
            return _averaged(name, extra, value if is_decimal else value.cast("double"))
        case "first" | "last":
            choose = F.min if each.agg == "first" else F.max
            pair = choose(F.when(value.isNotNull(), F.struct(at.alias("at"), value.alias("value"))))
            both = choose(F.when(more.isNotNull(), F.struct(more.alias("at"), own.alias("value"))))
            return Steps({name: pair["value"], extra: pair["at"]}, {name: both["value"], extra: both["at"]}, own)
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
            return _exact(each, value, own, groups, kind)
        case "count_distinct":
            is_taken = kind is not None and kind.simpleString() in _SKETCHED
            hashed = value if is_taken else F.xxhash64(value)
            if kind is not None and kind.simpleString() in ("string", "binary"):
                # A sketch passes the empty text by. Others stay as they are, for the sketches that are stored.
                hashed = F.when(F.octet_length(value) == 0, F.lit(_EMPTY).cast(kind)).otherwise(value)
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


def plain(each: Aggregation, rows: pa.Table) -> pa.ChunkedArray | None:
    """Return the result over stored rows that need not be merged, as `steps` would; `None` where it takes Spark."""
    own = rows[each.name]
    if each.udaf is not None:
        return None
    if each.agg == "avg" and pa.types.is_floating(own.type):
        return pc.divide(own, rows[f"_weft_n_{each.name}"].cast(pa.float64()))
    return own if each.agg in ("count", "sum", "min", "max", "first", "last") else None


def lost(each: Aggregation, rows: pa.Table) -> pa.ChunkedArray | None:
    """Return which stored rows have lost their result, of an aggregate that is `plain`; `None` where none can."""
    is_null = pc.is_null(rows[each.name])
    if each.agg == "sum":
        beyond = rows[f"_weft_b_{each.name}"]
        return pc.fill_null(pc.or_(pc.not_equal(beyond, 0), is_null), False)
    return pc.and_(is_null, pc.greater(rows[f"_weft_n_{each.name}"], 0)) if each.agg == "avg" else None


def _summed(name: str, beyond: str, value: Any, *, is_long: bool) -> Steps:
    """Add values. A sum may leave the range of its column and come back with later values. So of integers the column
    `beyond` counts how many times 2^62 is left over; of other numbers it is 1 once the sum is lost. Without values both
    are null."""
    from pyspark.sql import functions as F

    own, more, none = F.col(quoted(name)), F.col(quoted(beyond)), F.lit(0).cast("bigint")

    def total(values: Any, before: Any) -> dict[str, Any]:
        whole = F.try_sum(values)
        if not is_long:
            is_lost = (before != 0) | (whole.isNull() & (F.count(values) > 0))
            return {name: F.when(~is_lost, whole), beyond: F.when(is_lost, F.lit(1)).when(whole.isNotNull(), none)}
        # In halves, whose sums fit: a sum of decimals takes twice as long.
        high, low = F.sum(F.shiftright(values, 32)), F.sum(values.bitwiseAND(F.lit((1 << 32) - 1)))
        exact = high.cast("decimal(38,0)") * F.lit(1 << 32) + low + before.cast("decimal(38,0)") * F.lit(_UNIT)
        is_plain, fits = whole.isNotNull() & (before == 0), exact.try_cast("bigint").isNotNull()
        units = F.when(is_plain | fits, none).otherwise(F.floor(exact / F.lit(_UNIT)).cast("bigint"))
        rest = (exact - units.cast("decimal(38,0)") * F.lit(_UNIT)).cast("bigint")
        return {name: F.when(is_plain, whole).otherwise(rest), beyond: F.when(exact.isNotNull(), units)}

    # One that is null was too large for the type that is stored.
    missing = F.when(own.isNull() & more.isNotNull(), F.lit(1)).otherwise(more)
    merged = total(own, F.coalesce(F.sum(missing), none))
    return Steps(total(value, none), merged, own, _too_large(name, missing != 0))


def _averaged(name: str, rows: str, value: Any) -> Steps:
    """Add values, and count them: where there are some, a sum that is null is one that its type could not hold."""
    from pyspark.sql import functions as F

    own, more = F.col(quoted(name)), F.col(quoted(rows))
    # A decimal with more digits after the point has fewer before it.
    result = F.try_divide(own, more)
    return Steps(
        {name: F.try_sum(value), rows: F.count(value)},
        {name: F.when(~F.max(own.isNull() & (more > 0)), F.try_sum(own)), rows: F.sum(more)},
        result,
        _too_large(name, result.isNull() & (more > 0)),
    )


def _too_large(name: str, is_lost: Any) -> Any:
    from pyspark.sql import functions as F

    return F.when(is_lost, F.lit(f"a sum is larger than its type can hold ({name})"))


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


def _exact(each: Aggregation, value: Any, own: Any, groups: Sequence[str], kind: DataType | None) -> Steps:
    """Keep the values themselves, as a text of JSON that every database holds."""
    from pyspark.sql import functions as F

    most = each.max_distinct_values_per_group or 0
    reached = F.lit(f"max_distinct_values_per_group={most} reached by {each.name}")
    if groups:
        named = F.first(F.struct(*map(quoted, groups)))
        reached = F.concat(reached, F.lit(" of the group "), F.to_json(named, TIME_FORMATS))

    def within(values: Any) -> Any:
        return F.when(F.size(values) <= most, values).otherwise(F.raise_error(reached))

    # Bytes in base64: those that are no text would all be the same one. Of nested values the texts can be the same.
    is_text = kind is None or kind.typeName() not in ("binary", "array", "struct", "map")
    if kind is not None and kind.typeName() in ("float", "double"):
        value = F.when(value == 0, F.lit(0).cast(kind)).otherwise(value)  # 0.0 and -0.0 are one number
    text = value.cast("string") if is_text else F.when(value.isNotNull(), F.to_json(F.array(value), TIME_FORMATS))
    stored = F.to_json(within(F.collect_set(text)))
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
    """Keep the state of a user's aggregate, a column for each of its values; and why it could not be merged."""
    from pyspark.sql import functions as F

    stored = {
        f"s{number}": f"_weft_s{number}_{each.name}" if number else each.name for number in range(len(udaf.state))
    }
    failed = f"_weft_e_{each.name}"
    error = F.col(quoted(failed))
    arguments = F.struct(*(F.col(quoted(name)).alias(f"a{number}") for number, name in enumerate(each.columns)))
    states = F.struct(*(F.col(quoted(column)).alias(name) for name, column in stored.items()))
    of_rows = functions.state_of(udaf, "update_batch")(
        F.collect_list(arguments if counts is None else F.when(counts, arguments))
    )
    merged = functions.state_of(udaf, "merge_batch")(F.collect_list(F.when(error.isNull(), states)))
    result = functions.result_of(udaf)(F.when(error.isNull(), F.array(states)))
    return Steps(
        {column: of_rows[name] for name, column in stored.items()} | {failed: of_rows["error"]},
        {column: merged[name] for name, column in stored.items()} | {failed: F.coalesce(F.max(error), merged["error"])},
        result["value"],
        F.coalesce(error, result["error"]),
    )
