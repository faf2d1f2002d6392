"""`weft.sql`: Spark SQL over every connection by name, as a frame."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pyarrow as pa

from weft.dataframes.layout import Layout, frame_of, package
from weft.engine import queries
from weft.engine.queries import Parameters
from weft.engine.readers import read_all
from weft.engine.result_files import refuse_twins
from weft.errors import DeclarationError, listed
from weft.spark_support import outcome
from weft.systems.base import Connection

To = Literal["arrow", "polars", "pandas", "spark", "rows"]


def sql(
    query: str,
    *,
    to: To = "arrow",
    parameters: Parameters | None = None,
    connection: str | Connection | None = None,
    pushdown: bool = False,
) -> Any:
    """Return the result of a query over any tables: `weft.sql("SELECT city, count(*) FROM events.orders GROUP BY 1")`.

    A table is a stream (`events.orders`), a table of a connection (`warehouse.public.orders`), a Delta table or files
    (`lake.raw.events`, `lake."2024/*.parquet"`), or without a connection one of `connection`. The result is an Arrow
    table, a frame of polars, pandas or Spark, or a list of dicts (`to="rows"`). `parameters` are the values of `:name`,
    or of `?` in their order. With `pushdown` the database of all tables runs the query itself, in its own SQL.
    """
    if to not in get_args(To):
        kinds = ", ".join(get_args(To))
        raise DeclarationError(f"There are no frames {to!r}.", hint=listed(str(to), get_args(To), f"Frames: {kinds}."))
    if to in ("polars", "pandas"):
        package(to)
    understood = queries.understand(query, connection)
    if pushdown:
        table = _pushed_down(understood, connection, parameters)
    else:
        result = queries.frame(understood, parameters)
        if to == "spark":
            return result
        with outcome.explained("run the query"):
            table = result.toArrow()
    if to != "arrow":
        refuse_twins(table.column_names)
    return table.to_pylist() if to == "rows" else frame_of(table, to, Layout())


def _pushed_down(
    query: queries.ParsedQuery, connection: str | Connection | None, parameters: Parameters | None
) -> pa.Table:
    reader = queries.pushed_down(query, connection, parameters)
    try:
        return pa.Table.from_batches(list(read_all(reader)), reader.schema)
    finally:
        reader.close()
