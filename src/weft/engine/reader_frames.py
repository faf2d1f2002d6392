"""Spark DataFrames whose tasks read rows elsewhere: of a database or a stream, which apply filters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any, cast

import pyarrow as pa

from weft.engine import session
from weft.engine.readers import Comparison, RowReader, SqlReader, StreamReader
from weft.spark_support import sessions
from weft.spark_support.columns import struct_of
from weft.systems.sql.tables import SqlTables

# In turns: a session keeps every source that was registered, and a frame needs the name of its own only to be made.
_numbers = itertools.cycle(range(1000))


def from_reader(
    spark: Any, reader: RowReader, parts: int = 1, *, is_read_once: bool = False, with_hints: bool = False
) -> Any:
    """Return a DataFrame whose tasks read rows elsewhere as Arrow.

    `is_read_once`: the query that uses it has one scan of it, so that the database may apply the filters that it can.
    Spark keeps what a Python source takes of filters for all scans of a query: those of one would be lost or doubled by
    the filters of another.

    `with_hints`: columns of UUIDs and JSON, which are texts in Spark, are known as such in tables made of the frame."""
    from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
    from pyspark.sql.pandas.types import from_arrow_schema

    from weft.engine.tasks import freeze_imports

    columns = reader.schema
    schema = struct_of(columns) if with_hints else from_arrow_schema(columns, prefer_timestamp_ntz=True)
    # Here, not in `partitions`: that runs in a process which ends before the parts are read, and with it a snapshot.
    planned, held = reader.parts(parts)

    class Part(InputPartition):
        def __init__(self, value: Any) -> None:
            self.value = value

    class PartReader(DataSourceReader):
        def __init__(self) -> None:
            freeze_imports()
            self.conditions: list[str] = []
            self.comparisons: list[Comparison] = []

        def partitions(self) -> list[InputPartition]:
            ranges = reader.within(planned, self.comparisons) if isinstance(reader, StreamReader) else planned
            return [Part(value) for value in ranges]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            freeze_imports()
            # Without partitions Spark passes one of its own.
            return reader.read(partition.value, self.conditions) if isinstance(partition, Part) else iter(())

    class FilteredReader(PartReader):
        def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
            for each in filters:
                # Spark applies it as well: the loops of a recursive query forget what a source has taken over.
                yield each
                sql = _condition(each, reader) if isinstance(reader, SqlReader) else None
                if sql is not None:
                    self.conditions.append(sql)
                operator, compared = sessions.OPERATORS.get(type(each).__name__), cast(Any, each)
                if operator is not None:
                    self.comparisons.append((compared.attribute, operator, compared.value))

    frame = sessions.read_source(
        spark, f"weft_{next(_numbers)}", schema, FilteredReader if is_read_once else PartReader
    )
    reader.close()
    if held is not None:
        # Until Spark stops: frames made of this one do not refer to it, so nobody knows when the last is done.
        session.at_stop(held.close)
    return frame


def _condition(pushed: Any, reader: SqlReader) -> str | None:
    """The condition in SQL, or `None` where the database might mean something else by it: then Spark applies it."""
    kind = type(pushed).__name__
    if kind == "Not":
        inner = _condition(pushed.child, reader)
        return None if inner is None else f"NOT ({inner})"
    path: tuple[str, ...] = getattr(pushed, "attribute", ())
    if len(path) != 1 or path[0] not in reader.schema.names:
        return None
    name, field = reader.tables.quote(path[0]), reader.schema.field(path[0])
    if kind in ("IsNull", "IsNotNull"):
        return f"{name} IS {'NOT ' if kind == 'IsNotNull' else ''}NULL"
    if kind in sessions.OPERATORS:
        value = _literal(pushed.value, field, reader.tables)
        return None if value is None else f"{name} {sessions.OPERATORS[kind]} {value}"
    if kind == "In":
        values = [_literal(value, field, reader.tables) for value in pushed.value]
        return None if not values or None in values else f"{name} IN ({', '.join(map(str, values))})"
    return None


def _literal(value: object, field: pa.Field, tables: SqlTables) -> str | None:
    """Return a literal, for the types whose values the database compares as Spark does.

    Not texts: they are compared by collations, which may ignore case or trailing spaces.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and pa.types.is_integer(field.type):
        return str(value)
    if not tables.native_decimals:
        return None
    if isinstance(value, Decimal) and pa.types.is_decimal(field.type) and value.is_finite():
        return f"{value:f}"
    if isinstance(value, date) and not isinstance(value, datetime) and pa.types.is_date32(field.type):
        return f"DATE '{value.isoformat()}'"
    return None
