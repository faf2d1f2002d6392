"""Columns that a text format cannot hold as they are, on the way into files and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.errors import LoadRefusedError
from weft.spark_support.lazy import F, T
from weft.spark_support.sessions import TIME_FORMATS
from weft.systems.frame_checks import column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

EMPTY = "\ufdd0"
"""The text as which an empty text is read from CSV, where Spark takes it for a null. No text has this character."""


def encoded(frame: DataFrame, format: str) -> DataFrame:
    """Return the columns as a file holds them: in CSV nested values are JSON texts and bytes are base64."""
    if format != "csv":
        return frame
    chosen = []
    for field in frame.schema:
        kind, value = _kind(field.dataType), column(field.name)
        if kind == "nested":
            value = F.to_json(value, {**TIME_FORMATS, "ignoreNullFields": "false"})
        elif kind == "binary":
            value = F.base64(value)
        chosen.append(value.alias(field.name))
    return frame.select(*chosen)


def file_schema(schema: StructType, format: str) -> StructType:
    """Return the types under which a file is read."""
    if format != "csv":
        return T.StructType([T.StructField(field.name, field.dataType) for field in schema])
    return T.StructType(
        [T.StructField(field.name, T.StringType() if _kind(field.dataType) else field.dataType) for field in schema]
    )


def decoded(frame: DataFrame, schema: StructType, format: str) -> DataFrame:
    """Return `encoded` columns with their types again."""
    if format != "csv":
        return frame
    chosen = []
    for field in schema:
        kind, value = _kind(field.dataType), column(field.name)
        if kind is not None or isinstance(field.dataType, T.StringType):
            value = F.when(value == EMPTY, F.lit("")).otherwise(value)
        if kind == "nested":
            value = F.from_json(value, field.dataType, {**TIME_FORMATS, "mode": "FAILFAST"})  # type: ignore[arg-type]
        elif kind == "binary":
            value = F.unbase64(value)
        chosen.append(value.alias(field.name))
    return frame.select(*chosen)


def _kind(type: Any) -> str | None:
    if isinstance(type, T.ArrayType | T.MapType | T.StructType):
        return "nested"
    return "binary" if isinstance(type, T.BinaryType) else None


def refuse_unwritable(schema: StructType, format: str, name: str) -> None:
    """Refuse types that no file of this format holds, before anything runs."""
    for field in schema:
        if format == "orc" and "`" in field.name:
            raise LoadRefusedError(
                f"ORC files lose columns with a ` in their name: {field.name!r} of {name}.",
                hint="Give it another name in the source, or use another format.",
            )
        if isinstance(field.dataType, T.DayTimeIntervalType | T.YearMonthIntervalType | T.VariantType):
            raise LoadRefusedError(
                f"The column {field.name!r} of {name} is {field.dataType.simpleString()}, which {format} files cannot "
                "hold.",
                hint="Convert it in the source, for example to a text.",
            )
