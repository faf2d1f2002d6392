"""A user's query inside one of ours."""

from __future__ import annotations

import pyarrow as pa


def subquery(sql: str) -> str:
    """The query in parentheses, whatever it ends with: a comment must not swallow the parenthesis."""
    return f"({sql.strip().rstrip(';').rstrip()}\n)"


def bare_rows(count: int) -> pa.RecordBatch:
    """So many rows without a column: what is left of a query of which only the rows count."""
    return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), count, [None], children=[]))
