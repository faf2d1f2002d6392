"""Columns of Arrow as those of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from weft.columns import hint_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

HINT = "weft.type"
"""The key in the metadata of a column of Spark that says what its texts are, such as UUIDs or JSON. Spark keeps it
where it changes no value."""


def struct_of(schema: pa.Schema) -> StructType:
    """Return canonical columns as those of Spark, which know what their texts are."""
    from pyspark.sql.pandas.types import from_arrow_schema

    columns = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    for column, field in zip(columns, schema, strict=True):
        if hint := hint_of(field):
            column.metadata = {HINT: hint}
    return columns
