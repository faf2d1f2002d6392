"""Types of columns, however they are named: by a text, a polars, pyarrow or Spark type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pyarrow as pa

from weft.errors import DeclarationError, SettingsError, did_you_mean
from weft.types import FieldType


def check_choice(option: str, value: object, literal: Any) -> None:
    """Raise for an option that is none of the words of a `Literal`."""
    words = get_args(literal)
    if value not in words:
        listed = ", ".join(map(repr, words))
        raise SettingsError(f"{option} is {listed}; {value!r} is none of them.", hint=did_you_mean(str(value), words))


def arrow_types(schema: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """Return the Arrow type of each column."""
    if not isinstance(schema, Mapping):
        raise DeclarationError(
            f"A schema maps names of fields to types; this one is a {type(schema).__name__}.",
            hint='schema={"user_id": "string", "value": "int64"}',
        )
    return {name: _arrow_type(name, kind) for name, kind in schema.items()}


def _arrow_type(name: str, kind: Any) -> pa.DataType:
    if not isinstance(name, str):
        raise DeclarationError(f"The name of a field is a text, not a {type(name).__name__}.")
    if isinstance(kind, str):
        arrow = FieldType.parse(kind, field=name).arrow
    elif isinstance(kind, pa.DataType):
        arrow = kind
    else:
        arrow = _from_polars(kind) or _from_spark(kind)
        if arrow is None:
            raise DeclarationError(
                f"The type of field {name!r} is {kind!r}, which is not the type of a column.",
                hint="Name it ('int64'), or give a polars, pyarrow or Spark type.",
            )
    try:
        pa.array([], pa.string()).cast(arrow)
    except pa.ArrowNotImplementedError:
        raise DeclarationError(
            f"The type of field {name!r} is {arrow}, which cannot be read from a text.",
            hint="Read it as 'string', and parse it then.",
        ) from None
    return arrow


def is_polars_type(kind: object) -> bool:
    """Return whether this is a type of polars, an instance or the class itself."""
    return (kind if isinstance(kind, type) else type(kind)).__module__.startswith("polars.")


def _from_polars(kind: Any) -> pa.DataType | None:
    if not is_polars_type(kind):
        return None
    import polars as pl

    if kind == pl.Object:  # the addresses of Python's objects
        return None
    try:
        arrow = pl.Series("", [], pl.String if kind in (pl.Categorical, pl.Enum) else kind).to_arrow().type
    except pa.ArrowInvalid:  # it has no such type
        return None
    if pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return pa.string()
    if pa.types.is_large_binary(arrow) or pa.types.is_binary_view(arrow):
        return pa.binary()
    return arrow


def _from_spark(kind: Any) -> pa.DataType | None:
    if isinstance(kind, type) or not type(kind).__module__.startswith("pyspark."):
        return None
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(kind)
