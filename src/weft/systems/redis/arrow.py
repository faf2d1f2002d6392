"""Pages of entries as record batches, without a Python object per value.

Only of entries that Weft wrote, which their fields show. All others are read by `values`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from weft.errors import SchemaError
from weft.systems.log import EXTRA, META_TYPES, PUBLISH_ID, PUBLISHED_AT, ROWID
from weft.systems.redis import ids, resp
from weft.types import FieldType

# Arrow reads the texts of these as Python does. JSON and UUIDs would have to be checked one by one.
_CAST = ("string", "bool", "int32", "int64", "float32", "float64", "decimal", "date", "timestamp", "bytes")


def batch_of(page: resp.EntryPage, fields: Mapping[str, FieldType], schema: pa.Schema) -> pa.RecordBatch | None:
    """Return the columns of a schema; `None` where that is not for this module."""
    by = page.fields.get(PUBLISH_ID)
    if by is None or by.null_count or any(name not in fields for name in page.fields.keys() - {PUBLISH_ID}):
        return None
    # Values that do not fit their field are among the extra ones: to return those, all fields must be read.
    needed = set(page.fields) if EXTRA in schema.names else page.fields.keys() & set(schema.names)
    try:
        columns = {name: _read(page.fields[name], fields.get(name)) for name in needed} | _places(page)
    except (pa.ArrowInvalid, SchemaError):
        return None
    arrays = [columns[each.name] if each.name in columns else pa.nulls(len(page), each.type) for each in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _read(raw: pa.Array, kind: FieldType | None) -> pa.Array:
    if kind is None:  # the publish's id
        return raw.cast(pa.string())
    if kind.base not in _CAST:
        raise pa.ArrowInvalid(f"{kind} is read one by one")
    return raw.cast(kind.arrow) if kind.base == "bytes" else raw.cast(pa.string()).cast(kind.arrow)


def _places(page: resp.EntryPage) -> dict[str, pa.Array]:
    ms, seq = (part.to_numpy() for part in page.times())
    ids.to_offset(f"{ms.max()}-{seq.max()}", "")  # all have one if this has
    ms, seq = ms.astype(np.int64), seq.astype(np.int64)
    moments = pa.array(ms * 1000).cast(META_TYPES[PUBLISHED_AT].arrow)
    return {ROWID: pa.array(ids.first_of(ms) | seq), PUBLISHED_AT: moments}
