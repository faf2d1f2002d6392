"""A range of a table as Arrow.

In chunks, each a short statement of its own: one that streams for long would hold up ALTER TABLE, and behind that every
publisher.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa

from weft.systems.log import ROWID
from weft.systems.mysql import results
from weft.systems.sql import chunks
from weft.types import FieldType

if TYPE_CHECKING:
    from weft.systems.mysql.store import MySQLStore
    from weft.systems.sql.log import SqlLog

# Some of these are in memory at once, as text and as Arrow.
_CHUNK_BYTES = 4 * 1024 * 1024


def batches(
    store: MySQLStore, log: SqlLog, after: int, upto: int, columns: dict[str, FieldType]
) -> Iterator[pa.RecordBatch]:
    """The record batches of `after < offset <= upto`, in order."""
    # The offset comes first, wanted or not: a row has a value at least.
    schema = pa.schema([(name, kind.arrow) for name, kind in ({ROWID: FieldType("int64")} | columns).items()])
    rows = f"SELECT {', '.join(map(store.quote, schema.names))} FROM {log.table} FORCE INDEX (PRIMARY)"

    def read(first: int, last: int) -> tuple[list[pa.RecordBatch], int]:
        sql = f"{rows} WHERE {log.rowid} > {int(first)} AND {log.rowid} <= {int(last)} ORDER BY {log.rowid}"
        with store.session("read") as session, closing(results.rows(session.driver, sql, schema)) as received:
            done = [batch.select(list(columns)) for batch in received]
        return done, sum(batch.nbytes for batch in done)

    return chunks.in_order(read, after, upto, workers=2, chunk_bytes=_CHUNK_BYTES)
