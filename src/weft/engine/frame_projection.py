"""DataFrames made to fit a declared table: its columns, normalized and of its types, and as they are expected to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from weft.columns import canonical_schema, hint_of, hinted, to_be_cast
from weft.errors import SchemaError
from weft.spark_support.columns import HINT
from weft.spark_support.sessions import quoted, quoted_names
from weft.systems.load import Load
from weft.systems.sql.checks import condition, is_broken, refuse_broken, refuse_unknown_columns

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}


def arrow_of(columns: StructType) -> pa.Schema:
    """Return columns of Spark as canonical ones."""
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    for each in columns:
        try:
            to_arrow_schema(StructType([each]), timezone="UTC")
        except PySparkTypeError:  # an interval of months, say
            kind = each.dataType.simpleString()
            raise SchemaError(
                f"Column {each.name!r} is of type {kind}, which no table can hold.",
                field=each.name,
                hint=to_be_cast(each.name),
            ) from None
    return canonical_schema(to_arrow_schema(columns, timezone="UTC"))


def schema_of(frame: Any) -> pa.Schema:
    """Return the canonical columns of a DataFrame."""
    return _hinted(arrow_of(frame.schema), frame)


def gathered(frame: Any) -> pa.Table:
    """Return the rows of a DataFrame with what their texts are, UUIDs or JSON, which Spark leaves out."""
    rows = frame.toArrow()
    return pa.Table.from_arrays(rows.columns, schema=_hinted(rows.schema, frame))


def _hinted(schema: pa.Schema, frame: Any) -> pa.Schema:
    hints = [(each.metadata or {}).get(HINT) for each in frame.schema]
    if not any(hints) or _unites_others(frame):
        return schema
    return pa.schema(
        [
            hinted(field.name, hint, nullable=field.nullable) if hint else field
            for field, hint in zip(schema, hints, strict=True)
        ]
    )


def _unites_others(frame: Any) -> bool:
    """Whether a UNION has columns of UUIDs or JSON in some of its queries alone: Spark takes the first one's word."""
    nodes = [frame._jdf.queryExecution().analyzed()]
    while nodes:
        node = nodes.pop()
        children = [node.children().apply(number) for number in range(node.children().size())]
        if node.nodeName().startswith("Union"):
            hints = [_hints_of(child.output()) for child in children]
            if any(each != hints[0] for each in hints):
                return True
        nodes += children
    return False


def _hints_of(attributes: Any) -> list[str | None]:
    metadata = [attributes.apply(number).metadata() for number in range(attributes.size())]
    return [each.getString(HINT) if each.contains(HINT) else None for each in metadata]


def cast_to(frame: Any, schema: pa.Schema, *, with_hints: bool = False) -> Any:
    """Return the columns with the types of a schema; a number stays as it is where that has no room for its digits.
    `with_hints`: texts that are times there are known as such."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_type

    present = schema_of(frame)
    other = {
        field.name: from_arrow_type(field.type, prefer_timestamp_ntz=True)
        for field, own in zip(schema, present, strict=True)
        if not own.type.equals(field.type) and (_has_room(own.type, field.type) or _is_time(own.type, field.type))
    }
    times = {each.name for each in schema if with_hints and hint_of(each) == "time"}
    if not other and not times:
        return frame
    chosen = []
    for name in frame.columns:
        column = F.col(quoted(name))
        if name in other:
            column = column.cast(other[name]).alias(name)
        elif name in times:
            column = column.alias(name, metadata={HINT: "time"})
        chosen.append(column)
    return frame.select(*chosen)


def _is_time(*kinds: pa.DataType) -> bool:
    return all(pa.types.is_date(kind) or pa.types.is_timestamp(kind) for kind in kinds)


def _has_room(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a number may have another type: a whole number that is too great for it is an error."""
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
    if pa.types.is_float64(wanted):
        return _has_room(kind, pa.int64())
    if not pa.types.is_decimal(wanted):
        return False
    if pa.types.is_integer(kind):
        return bool(wanted.precision - wanted.scale >= _DIGITS[kind])
    is_wide = pa.types.is_decimal(kind) and wanted.scale >= kind.scale
    return bool(is_wide and wanted.precision - wanted.scale >= kind.precision - kind.scale)


def projected(frame: Any, load: Load) -> Any:
    """Return the columns of the target, made from those of the source."""
    if load.projection is None:
        return frame
    # `q`, as in the databases.
    return frame.alias("q").selectExpr(*(f"{each.sql} AS {quoted(each.field.name)}" for each in load.projection))


@contextmanager
def expected(frame: Any, load: Load) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the rows for a load, and warnings about them. Raises where they are not as expected."""
    if not load.checks:
        yield frame, ()
        return
    # The rows that are tried are those that are written, also where the source changes meanwhile.
    frame = frame.persist()
    try:
        yield frame, _checked(frame, load)
    finally:
        frame.unpersist()


def _checked(frame: Any, load: Load) -> tuple[str, ...]:
    from pyspark.sql import functions as F

    refuse_unknown_columns(load.checks, frame.columns, load.name)
    wanted = [F.count(F.lit(1))]
    for check in load.checks:
        if check.kind == "unique":
            # Rows with a null in them are not compared.
            whole = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in check.columns)
            names = ", ".join(quoted(name) for name in check.columns)
            wanted.append(F.expr(f"count_if({whole}) - count(DISTINCT {names})"))
        elif check.kind == "freshness":
            wanted.append(F.max(quoted(check.columns[0])))
        elif check.is_about_rows:
            wanted.append(F.count_if(F.expr(condition(check, quoted, "spark"))))
        else:
            wanted.append(F.lit(None))
    with quoted_names(frame.sparkSession):
        tried = frame.agg(*(each.alias(f"c{number}") for number, each in enumerate(wanted)))
    (result,) = tried.toArrow().to_pylist()
    rows, *values = result.values()
    failed: list[str] = []
    warnings: list[str] = []
    for check, value in zip(load.checks, values, strict=True):
        if check.is_about_rows:
            problem = f"{value:,} of {rows:,} rows" if value else None
        else:
            problem = is_broken(check, rows, value, load.moment)
        if problem is not None:
            (warnings if check.reaction == "warn" else failed).append(f"{check}: {problem}")
    refuse_broken(load, failed, 'on_quality_failure="warn" loads them all the same.')
    return tuple(warnings)
