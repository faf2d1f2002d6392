"""SQL over the rows that changes have, before they are applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa

from weft.engine.streaming.cdc.debezium_types import typed
from weft.engine.streaming.cdc.envelopes import OpenedChanges
from weft.engine.streaming.cdc.newest import is_unavailable
from weft.engine.streaming.functions import selecting_also
from weft.errors import LoadRefusedError
from weft.systems.changes import DELETE, ORDER, TRUNCATE

RunSql = Callable[[str, pa.Table], pa.Table]
"""Runs SQL over the table `source`."""


def selected(changes: OpenedChanges, sql: str, run: RunSql) -> OpenedChanges:
    """Return the changes with the rows that the SQL makes of theirs. One that it leaves out is a delete. Keys stay."""
    if unavailable := [name for name, each in changes.columns.items() if is_unavailable(each)]:
        raise LoadRefusedError(
            f"Updates do not say the values of {', '.join(unavailable)}, which they did not change, so that row_sql "
            "cannot use them.",
            hint="Have the source send whole rows: ALTER TABLE … REPLICA IDENTITY FULL.",
        )
    is_row = ~np.isin(changes.op, (DELETE, TRUNCATE))
    numbers = np.flatnonzero(is_row)
    if not len(numbers):  # deletes alone have no columns
        return replace(changes, columns={})
    rows = pa.table({**changes.keys, **changes.columns, ORDER: pa.array(np.arange(len(changes.op)))})
    rows = typed(rows, changes.meanings)
    result = run(selecting_also(sql, ORDER), rows.take(pa.array(numbers)))
    # SQL that selects everything has the number twice.
    result = result.select([result.column_names.index(name) for name in dict.fromkeys(result.column_names)])
    origins = result[ORDER].to_numpy()
    if len(np.unique(origins)) < len(origins):
        raise LoadRefusedError(
            "row_sql makes several rows of one.", hint="A change is of one row: let it choose columns."
        )
    places = np.full(len(changes.op), -1, dtype=np.int64)
    places[origins] = np.arange(len(origins))
    index = pa.array(places, mask=places < 0)
    columns = {
        name: result[name].combine_chunks().take(index)
        for name in result.column_names
        if name not in (*changes.keys, ORDER)
    }
    whole = {**changes.keys, **columns}
    after = pa.StructArray.from_arrays(list(whole.values()), list(whole), mask=pa.array(places < 0))
    op = np.where(is_row & (places < 0), DELETE, changes.op)
    # The columns that the SQL returns have lost their Debezium types.
    known = {name: each for name, each in changes.meanings.items() if name in changes.keys}
    return replace(changes, op=op, columns=columns, after=after, meanings=known)
