"""Values of every field type, and a check that they go in and come out as they were."""

from __future__ import annotations

import json
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from weft.systems.log import Batch
from weft.systems.sql.store import SqlStore
from weft.types import BASES, FieldType

FLOAT32_MAX = struct.unpack("f", bytes.fromhex("ffff7f7f"))[0]
LARGEST = "9" * 20 + "." + "9" * 18
# What both servers store alike.
VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int32": [0, -(2**31), 2**31 - 1],
    "int64": [0, -(2**63), 2**63 - 1],
    "float32": [0.0, 0.5, FLOAT32_MAX, -FLOAT32_MAX, 2.0**-149, struct.unpack("f", struct.pack("f", 0.1))[0]],
    "float64": [0.0, 0.1, 1e15, 1e16, 1.7976931348623157e308, 5e-324, -2.2250738585072014e-308],
    "decimal(38,18)": [Decimal(text) for text in ("0E-18", "-1E-18", "-1.5" + "0" * 17, LARGEST, f"-{LARGEST}")],
    "decimal(5,0)": [Decimal(0), Decimal(-99999)],
    "date": [date.min, date(1969, 12, 31), date(2026, 2, 28), date.max],
    "timestamp": [
        datetime.min.replace(tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        datetime(2026, 1, 31, 12, tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    ],
    "json": [
        '{"a":[1,null,"\\u0000\\n\\"",{}],"b":1.0,"ä":1234567890123456789012345678901234567890}',
        "[" * 200 + "]" * 200,
        "[]",
        '"x"',
        "null",
        "0",
    ],
    "uuid": [UUID(int=0), UUID(int=2**128 - 1)],
}


def strict(value: object) -> object:
    """A value that equals only what is the same: 0.0 is not -0.0, 1 is not True, and 1.0 is not 1.00."""
    return type(value), repr(value)


def check_every_type(store: SqlStore, values_of: dict[str, list[Any]]) -> None:
    """Publish values of every type, and read them in both ways."""
    fields = {name: FieldType.parse(name) for name in values_of}
    assert {kind.base for kind in fields.values()} == set(BASES)
    size = max(map(len, values_of.values())) + 1
    columns = [values + [None] * (size - len(values)) for values in values_of.values()]
    log = store.open("events", "t", fields)
    assert log.fields(fresh=True) == fields
    assert store.append([Batch(log, [("p", size)], tuple(fields), columns)])[0][0].last == size

    page = log.read(0, size, size)
    (batch,) = log.read_arrow(0, size)
    assert batch.schema.names == list(page.names)
    for name, published in zip(fields, columns, strict=True):
        at = page.names.index(name)
        is_json = fields[name].base == "json"
        canonical = [json.loads(v) if is_json and v is not None else v for v in published]
        assert list(map(strict, page.columns[at])) == list(map(strict, canonical)), name
        assert batch.schema.field(name).type == fields[name].arrow
        arrow = batch.column(at).to_pylist()
        if fields[name].base == "timestamp":
            arrow = [None if v is None else v.astimezone(UTC) for v in arrow]
        if fields[name].base == "uuid":
            arrow = [None if v is None else UUID(v) for v in arrow]
        assert list(map(strict, arrow)) == list(map(strict, published)), name
