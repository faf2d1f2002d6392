"""Values without a type in results of SQL."""

from __future__ import annotations

from typing import Any

from weft.spark_support.sessions import quoted


def with_element_types(frame: Any) -> Any:
    """Return a DataFrame in which elements without a type are texts: Arrow refuses those of `array()`, which cannot be
    null either. Columns of nothing but nulls stay."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import NullType

    typed = {
        each.name: kind
        for each in frame.schema
        if not isinstance(each.dataType, NullType) and (kind := _typed(each.dataType)) != each.dataType
    }
    if not typed:
        return frame
    return frame.select(
        *(
            F.col(quoted(name)).cast(typed[name]).alias(name) if name in typed else quoted(name)
            for name in frame.columns
        )
    )


def _typed(kind: Any) -> Any:
    """Return a type of Spark's with texts in the place of what has none."""
    from pyspark.sql.types import ArrayType, MapType, NullType, StringType, StructField, StructType

    if isinstance(kind, NullType):
        return StringType()
    if isinstance(kind, ArrayType):
        return ArrayType(_typed(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_typed(kind.keyType), _typed(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, StructType):
        return StructType([StructField(each.name, _typed(each.dataType), each.nullable) for each in kind])
    return kind
