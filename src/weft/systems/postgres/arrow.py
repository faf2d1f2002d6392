"""A range of a PostgreSQL table as Arrow, by the ADBC driver: a binary COPY, decoded in C, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from psycopg.conninfo import make_conninfo

from weft import settings
from weft.errors import ConnectionFailedError, WeftError
from weft.systems.base import require
from weft.types import FieldType

if TYPE_CHECKING:
    from weft.systems.postgres.store import PostgresStore
    from weft.systems.sql.log import SqlLog

_NATIVE = ("bool", "int32", "int64", "float32", "float64", "date", "timestamp", "bytes")


def batches(
    store: PostgresStore, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
) -> Iterator[pa.RecordBatch]:
    """The record batches of `after < offset <= upto`, in order."""
    if after >= upto:
        return
    dbapi = require("adbc_driver_postgresql.dbapi", "postgres")
    # The other types come as texts: what ADBC makes of them differs by version, and a decimal must keep its digits.
    wanted = ", ".join(
        store.quote(name) if kind.base in _NATIVE else f"{store.quote(name)}::text" for name, kind in columns.items()
    )
    schema = pa.schema([(name, kind.arrow) for name, kind in columns.items()])
    try:
        driver = store.arrow_idle.pop() if store.arrow_idle else _connect(dbapi, store)
    except dbapi.Error as error:
        raise _explain(dbapi, store, error) from None
    finished = False
    try:
        with closing(driver.cursor()) as cursor:
            cursor.execute(
                f"SELECT {wanted} FROM {log.table} "
                f"WHERE {log.rowid} > {int(after)} AND {log.rowid} <= {int(upto)} ORDER BY {log.rowid}"
            )
            for batch in cursor.fetch_record_batch():
                if batch.num_rows:
                    yield _cast(batch, schema)
        finished = True
    except dbapi.Error as error:
        raise _explain(dbapi, store, error) from None
    finally:
        # A reader that stopped early leaves the rest of its COPY in the connection.
        if finished:
            store.arrow_idle.append(driver)
        else:
            driver.close()


def _connect(dbapi: Any, store: PostgresStore) -> Any:
    driver = dbapi.connect(make_conninfo(**store.parameters()), autocommit=True)
    try:
        with closing(driver.cursor()) as cursor:
            cursor.execute("SET TimeZone = 'UTC'")
    except BaseException:
        driver.close()
        raise
    return driver


def _explain(dbapi: Any, store: PostgresStore, error: Exception) -> WeftError:
    # The server may have been restarted: what else is idle is broken as well.
    while store.arrow_idle:
        store.arrow_idle.pop().close()
    text = " ".join(settings.redact(str(error), store.connection.secrets()).split())
    kind = ConnectionFailedError if isinstance(error, dbapi.OperationalError) else WeftError
    return kind(f"PostgreSQL ({store.connection.target}): {text}")


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [array.cast(field.type) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
