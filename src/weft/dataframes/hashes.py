"""`write_hashes`: the rows of a frame as hashes of Redis."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa

from weft.dataframes.reading import find_connection, system_with
from weft.errors import DeclarationError, SchemaError, SettingsError, unknown
from weft.systems.base import Connection


def write_hashes(url: str | Connection, frame: Any, key_column: str = "key", *, key_prefix: str = "") -> int:
    """Write each row of a frame to the hash `key_prefix` + what `key_column` holds; how many rows there were.

    The other columns are the fields, as texts. A null removes its field; fields that the frame does not have stay.
    """
    connection = find_connection(url)
    write = partial(system_with("hashes", connection, "write_hashes").load("hashes"), connection)
    for what, name in (("key_column", key_column), ("key_prefix", key_prefix)):
        if not isinstance(name, str):
            raise SettingsError(f"{what} is a text, not {name!r}.")
    table = _table_of(frame)
    if key_column not in table.column_names:
        raise unknown("column", key_column, table.column_names)
    for name in table.column_names:
        if table.column_names.count(name) > 1:
            raise SchemaError(f"Two columns have the name {name!r}: a hash has one field of a name.", field=name)
    keys = _texts(table, key_column)
    if None in keys:
        raise SchemaError(
            f"Row {keys.index(None)} has no {key_column!r}, so it has no key.", index=keys.index(None), field=key_column
        )
    rows: dict[Any, int] = {}
    for row, key in enumerate(keys):
        if rows.setdefault(key, row) != row:
            raise SchemaError(
                f"Rows {rows[key]} and {row} have the same {key_column!r}, {key!r}: one hash would replace the other.",
                index=row,
                field=key_column,
                hint="Group the frame by it first, or keep one row of each.",
            )
    fields = {name: _texts(table, name) for name in table.column_names if name != key_column}
    if not fields:
        raise SettingsError(f"The frame has no column but {key_column!r}: a hash needs a field.")
    prefix = key_prefix.encode()
    write([prefix + (key.encode() if isinstance(key, str) else key) for key in keys], fields)
    return len(keys)


def _texts(table: pa.Table, name: str) -> list[Any]:
    values = table[name]
    kind = values.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return list(values.to_pylist())
    try:
        return list(values.cast(pa.string()).to_pylist())
    except pa.ArrowNotImplementedError:
        raise DeclarationError(
            f"Column {name!r} is {kind}, which has no form as a text.", hint="Encode it first, as JSON for example."
        ) from None


def _table_of(frame: Any) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    package = type(frame).__module__.partition(".")[0]
    if package == "pandas":
        try:
            return pa.Table.from_pandas(frame, preserve_index=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise SchemaError(f"The frame cannot be read column by column: {error}") from None
    if package == "polars":
        return (frame.collect() if hasattr(frame, "collect") else frame).to_arrow()
    if package == "pyspark":
        return frame.toArrow()
    raise SettingsError(f"A frame of polars, pandas, Spark or Arrow is needed, not a {type(frame).__name__}.")
