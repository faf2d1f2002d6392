"""Tables of Arrow as the frames that people ask for."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa

from weft.dataframes.layout import Layout
from weft.dataframes.types import is_polars_type
from weft.errors import MissingExtraError

To = Literal["polars", "arrow", "pandas", "spark"]


def frame_of(table: pa.Table, to: str, layout: Layout) -> Any:
    """Return the table as a frame. A column with a polars type in the schema has exactly that type in polars."""
    if to == "arrow":
        return table
    if to == "pandas":
        return table.to_pandas()
    if to == "spark":
        from weft.engine import session

        return session.spark().createDataFrame(table)
    pl = polars()
    frame = pl.from_arrow(table, rechunk=False)
    exact = {name: kind for name, kind in layout.schema_types.items() if name in frame.columns and is_polars_type(kind)}
    return frame.cast(exact) if exact else frame


def polars() -> Any:
    """Return the package, which only those need who ask for its frames."""
    try:
        import polars
    except ImportError as error:
        raise MissingExtraError(
            f"Frames of polars need a package that is not installed: {error}.",
            hint='pip install polars, or ask for others: to="arrow" or to="pandas".',
        ) from error
    return polars
