"""Declared columns of decimals in files of texts: a number with more digits makes its row a bad one. Spark's readers
round it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from weft.spark_support.lazy import F, T
from weft.systems.frame_checks import column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType


def converted(text: Column, kind: DataType) -> Column:
    """Return a text as a value of this type; null where it is none, or a decimal that would be rounded."""
    number = text.try_cast(kind)
    if not isinstance(kind, T.DecimalType):
        return number
    wide = text.try_cast(T.DecimalType(38, 38 - (kind.precision - kind.scale)))
    has_room = F.rlike(text, F.lit(rf"^\s*[+-]?\d*(\.\d{{0,{kind.scale}}}0*)?\s*$"))
    return F.when(F.when(F.rlike(text, F.lit("[eE]")), number == wide).otherwise(has_room), number)


def required(name: str, kind: DataType) -> Column:
    """Return a column of texts as one of this type; a decimal that would be rounded is an error."""
    text = column(name)
    exact: Column = text.cast(kind)
    if isinstance(kind, T.DecimalType):
        number = converted(text, kind)
        why = F.concat(text, F.lit(f" in the column {name} is no {kind.simpleString()}."))
        exact = F.when(text.isNotNull() & number.isNull(), F.raise_error(why)).otherwise(number)
    return exact


def loaded(
    load: Callable[[StructType], DataFrame],
    schema: StructType,
    declared: Collection[str],
    bad: str | None,
    line: Callable[[Any], Column],
) -> DataFrame:
    """Return what `load` makes of files under these types. A row with a decimal that its declared column would round is
    in the column `bad`, as the `line` of its values, or an error where there is no such column."""
    names = {name.lower() for name in declared}
    kinds: dict[str, Any] = {
        each.name: each.dataType
        for each in schema
        if each.name.lower() in names and isinstance(each.dataType, T.DecimalType)
    }
    texts = [T.StructField(each.name, T.StringType()) if each.name in kinds else each for each in schema]
    frame = load(T.StructType(texts) if kinds else schema)
    if not kinds:
        return frame
    if bad is None:
        return frame.withColumns({name: required(name, kind) for name, kind in kinds.items()})
    numbers = {name: converted(column(name), kind) for name, kind in kinds.items()}
    fails = reduce(or_, (column(name).isNotNull() & number.isNull() for name, number in numbers.items()))
    text = line(F.struct(*map(column, schema.names)))
    return frame.withColumns({**numbers, bad: F.coalesce(column(bad), F.when(fails, text))})
