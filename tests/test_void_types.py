"""Elements without a type become texts; without Spark."""

from __future__ import annotations

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, LongType, MapType, NullType, StringType, StructField, StructType

from weft.spark_support.voids import _typed


def test_elements_without_a_type_are_texts() -> None:
    given = StructType([StructField("a", ArrayType(MapType(NullType(), NullType(), False), False), False)])
    typed = _typed(given)
    assert typed["a"].dataType == ArrayType(MapType(StringType(), StringType(), False), False)
    assert to_arrow_schema(typed).names == ["a"]
    assert _typed(ArrayType(LongType())) == ArrayType(LongType())
