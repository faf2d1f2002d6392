"""A user's query inside one of ours."""

from __future__ import annotations

import pyarrow as pa


def subquery(sql: str) -> str:
    """Return the query in parentheses, whatever it ends with: a comment must not swallow the parenthesis."""
    return f"({sql.strip().rstrip(';').rstrip()}\n)"


def bare_rows(count: int) -> pa.RecordBatch:
    """Return so many rows without a column, for a query of which only the number of rows matters."""
    return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None], children=[]))
