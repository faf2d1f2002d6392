"""The forms in which a function gets its inputs: Ibis tables, and frames of Spark, polars, pandas and Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pyarrow as pa

from weft.errors import MissingExtraError, installing

Form = Literal["ibis", "spark", "polars", "pandas", "arrow"]
_FORMS: Mapping[str, Form] = {"pyspark": "spark", "polars": "polars", "pandas": "pandas", "pyarrow": "arrow"}
_USUAL_NAMES = {"pl": "polars", "pd": "pandas", "pa": "pyarrow"}
_NULLABLE = ("Int8", "Int16", "Int32", "Int64", "boolean")


def form_of(annotation: Any) -> Form:
    """Return the form that a parameter asks for by the package of its annotation."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__module__", None) or ""
    root = text.partition(".")[0]
    return _FORMS.get(_USUAL_NAMES.get(root, root), "ibis")


def as_frame(table: pa.Table, form: Form) -> Any:
    if form == "pandas":
        import pandas as pd

        # Plain types of pandas hold no null: an integer would become a float.
        nullable = {pa.type_for_alias(name.lower()): pd.api.types.pandas_dtype(name) for name in _NULLABLE}
        return table.to_pandas(types_mapper=nullable.get)
    if form == "polars":
        import polars as pl

        return pl.from_arrow(table)
    return table


def is_ibis(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "ibis" and hasattr(value, "as_table")


def ibis_table(schema: pa.Schema, name: str) -> Any:
    """Return a table of Ibis that has a name and columns, and no rows."""
    ibis = _ibis()
    return ibis.table(ibis.Schema.from_pyarrow(schema), name=name)


def _ibis() -> Any:
    try:
        import ibis
        from ibis.config import Config
    except ImportError as error:
        raise MissingExtraError(
            f"Models need a package that is not installed: {error}.", hint=installing("models")
        ) from None
    if ibis.options.pyspark is None:
        # What Ibis sets when it opens a session of its own.
        class Options(Config):  # type: ignore[misc]
            treat_nan_as_null: bool = False

        ibis.options.pyspark = Options()
    return ibis
