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
    sql = (
        f"SELECT {wanted} FROM {log.table} "
        f"WHERE {log.rowid} > {int(after)} AND {log.rowid} <= {int(upto)} ORDER BY {log.rowid}"
    )
    begun = False
    while True:
        store.check_open()
        driver = _idle(store)
        fresh = driver is None
        finished = False
        try:
            driver = driver or _connect(dbapi, store)
            with closing(driver.cursor()) as cursor:
                cursor.execute(sql)
                for batch in cursor.fetch_record_batch():
                    begun = True
                    if batch.num_rows:
                        yield _cast(batch, schema)
            finished = True
            return
        except dbapi.Error as error:
            # The server may have been restarted: what else is idle is broken as well.
            _close_idle(store)
            if fresh or begun:
                raise _explain(dbapi, store, error) from None
        finally:
            # A reader that stopped early leaves the rest of its COPY in the connection.
            if finished:
                store.arrow_idle.append(driver)
            elif driver is not None:
                driver.close()


def _idle(store: PostgresStore) -> Any:
    try:
        return store.arrow_idle.pop()
    except IndexError:
        return None


def _close_idle(store: PostgresStore) -> None:
    while (driver := _idle(store)) is not None:
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
    text = " ".join(settings.redact(str(error), store.connection.secrets()).split())
    kind = ConnectionFailedError if isinstance(error, dbapi.OperationalError) else WeftError
    return kind(f"PostgreSQL ({store.connection.target}): {text}")


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [array.cast(field.type) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
