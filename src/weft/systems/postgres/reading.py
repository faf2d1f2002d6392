"""A query of PostgreSQL as Arrow: binary COPY, decoded in C by the ADBC driver, a batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from weft.errors import SchemaError, WeftError
from weft.systems.base import require
from weft.systems.postgres.sessions import PostgresSessions
from weft.systems.postgres.types import ANY_NUMERIC, sql_type
from weft.systems.sql import decimals
from weft.systems.sql.prefetch import prefetch
from weft.systems.sql.tables import subquery

# The bytes of one batch, as the driver counts them. Four are in memory at once: being read, waiting, being used.
_BATCH_BYTES = 4 * 1024 * 1024


def batches(
    sessions: PostgresSessions, sql: str, fields: Sequence[pa.Field], snapshot: str | None = None
) -> Iterator[pa.RecordBatch]:
    """These columns of a query's result. The next batches are read while the last one is used."""
    dbapi = require("adbc_driver_postgresql.dbapi", "postgres")
    schema = pa.schema(fields)
    wanted = ", ".join(selected(sessions.quote(field.name), field) for field in fields)
    running: list[Any] = []
    # Nothing may be cancelled that is being closed.
    ending = threading.Lock()

    def read() -> Iterator[pa.RecordBatch]:
        try:
            with closing(sessions.connect_adbc(dbapi)) as driver, closing(driver.cursor()) as cursor:
                if snapshot is not None:
                    cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                    cursor.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
                cursor.adbc_statement.set_options(
                    **{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)},
                )
                running.append(cursor)
                try:
                    cursor.execute(f"SELECT {wanted} FROM {subquery(sql)} AS q")
                    with closing(cursor.fetch_record_batch()) as reader:
                        for batch in reader:
                            if batch.num_rows:
                                yield typed(batch, schema)
                finally:
                    with ending:
                        running.clear()
        except (dbapi.Error, OSError) as error:
            if isinstance(error, WeftError):
                raise
            # An error in the middle of the rows comes through Arrow, as an OSError.
            raise sessions.explain_adbc(dbapi, error) from None

    def cancel() -> None:
        with ending, suppress(dbapi.Error):
            for cursor in running:
                cursor.adbc_cancel()

    return prefetch(read, cancel=cancel)


def selected(column: str, field: pa.Field) -> str:
    """A column in a type that the driver decodes; texts for what it does not, or not in every version."""
    kind = field.type
    if pa.types.is_list(kind):
        texts = pa.types.is_decimal(kind.value_type) or pa.types.is_string(kind.value_type)
        array = "text[]" if texts else f"{sql_type(pa.field('', kind.value_type))}[]"
        items = f"{column}::text[]" if texts else column
        # The driver would give all items of all dimensions as one list. No array can be read from that text.
        return (
            f"CASE WHEN array_ndims({column}) > 1 "
            f"THEN (array_dims({column}) || ' has several dimensions; cast it to text')::{array} "
            f"ELSE {items} END AS {column}"
        )
    if pa.types.is_decimal(kind) or pa.types.is_string(kind):
        return f"{column}::text"
    return f"{column}::bigint" if kind == pa.int64() else column


def typed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Columns that were `selected`, in the types of a schema."""
    if not len(schema):
        return batch.select([])
    arrays = []
    for array, field in zip(batch.columns, schema, strict=True):
        try:
            arrays.append(_checked(_cast(array, field.type), field))
        except pa.ArrowInvalid as error:
            raise _misfit(field, error) from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(kind):
        return decimals.from_texts(array, kind)
    if pa.types.is_list(kind) and pa.types.is_decimal(kind.value_type):
        items = decimals.from_texts(array.values, kind.value_type)
        return pa.ListArray.from_arrays(array.offsets, items, kind, mask=array.is_null() if array.null_count else None)
    return array.cast(kind)


def _misfit(field: pa.Field, error: Exception) -> SchemaError:
    if field.type == ANY_NUMERIC:
        return SchemaError(
            f"Column {field.name!r} is a numeric without a precision, and not all of it fits decimal(38,18): {error}.",
            field=field.name,
            hint=f'Say how many digits it has: CAST("{field.name}" AS numeric(38,6)), or AS text, or AS float8.',
        )
    return SchemaError(f"Column {field.name!r} does not fit {field.type}: {error}.", field=field.name)


# Years 1 to 9999. Infinity comes as a number beyond them, as do years before Christ.
_DAYS = (-719_162, 2_932_896)


def _checked(array: pa.Array, field: pa.Field) -> pa.Array:
    values = array.flatten() if pa.types.is_list(array.type) else array
    if pa.types.is_date(values.type):
        numbers, (low, high) = values.view(pa.int32()), _DAYS
    elif pa.types.is_timestamp(values.type):
        numbers, (low, high) = values.view(pa.int64()), (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)
    else:
        return array
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is not None and (ends["min"] < low or ends["max"] > high):
        raise SchemaError(
            f"Column {field.name!r} has a {'date' if values.type == pa.date32() else 'timestamp'} outside the years "
            "1 to 9999: infinity, or one before Christ.",
            field=field.name,
            hint=f'Leave such rows out (WHERE isfinite("{field.name}")), or read it as text: '
            f'CAST("{field.name}" AS text).',
        )
    return array
